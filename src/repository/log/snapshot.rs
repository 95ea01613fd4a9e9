//! Snapshots: a state as bytes, and back.

use bytes::Bytes;

use super::attempt::Joint;
use super::fields::{read_name, read_owned, write_owned};
use super::state::{Condemned, NODE_SHARE, Purged, Session, State};
use super::values::{RefValue, SegmentInfo};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::format::envelope::{Kind, VERSION, VERSION_MAX, seal_version};
use crate::format::wire::{Reader, Writer};
use crate::id::{PackId, SegmentId, SessionId, WriteId};
use crate::name::Name;

impl State {
    /// Version of the format that its snapshot needs: version 1 whenever possible, for older programs.
    #[must_use]
    pub fn snapshot_version(&self) -> u8 {
        let plain =
            self.removed.is_empty() && self.labels.is_empty() && self.declassified.is_empty() && self.policy.is_none();
        if plain { VERSION } else { VERSION_MAX }
    }

    /// Complete object of a snapshot.
    #[must_use]
    pub fn seal(&self) -> Bytes {
        seal_version(self.snapshot_version(), Kind::Snapshot, &self.encode(), true)
    }

    /// The body of a snapshot: every field, each list with its count.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.varint(self.seq).varint(self.forgotten).count(self.refs.len());
        for (name, value) in &self.refs {
            out.string(name.as_str().as_bytes()).varint(value.version);
            value.write(&mut out);
        }
        out.count(self.segments.len());
        for (id, info) in &self.segments {
            write_owned(&mut out, *id);
            info.write(&mut out);
            out.varint(info.built);
        }
        out.count(self.sessions.len());
        for (id, session) in &self.sessions {
            out.bytes(&id.to_bytes()).varint(session.opened).varint(session.touched);
            out.bytes(&session.last_write.to_bytes()).u8(session.joint.is_some().into());
            if let Some(joint) = &session.joint {
                joint.write(&mut out);
            }
        }
        out.count(self.condemned.len());
        for (pack, condemned) in &self.condemned {
            write_owned(&mut out, *pack);
            out.varint(condemned.at).signed(condemned.when.0).varint(condemned.len).u8(condemned.damaged.into());
        }
        out.count(self.purged.len());
        for (pack, purged) in &self.purged {
            write_owned(&mut out, *pack);
            out.varint(purged.at).u8(purged.deleted.into());
        }
        if self.snapshot_version() == VERSION_MAX {
            self.write_labels(&mut out);
            self.write_removed(&mut out);
            self.write_policy(&mut out);
        }
        out.into_bytes()
    }

    /// Reads the body of a snapshot of this version of the format.
    ///
    /// # Errors
    /// Damaged; unsupported, if a later version wrote it.
    pub fn decode(version: u8, body: &[u8]) -> Result<Self> {
        Self::decode_within(version, body, u64::MAX)
    }

    /// As [`State::decode`], for one that may take `memory` bytes of memory.
    ///
    /// # Errors
    /// As [`State::decode`]; exhausted, if `memory` is too little.
    pub fn decode_within(version: u8, body: &[u8], memory: u64) -> Result<Self> {
        let mut reader = Reader::within(body, memory);
        let r = &mut reader;
        let mut state = Self { seq: r.varint()?, forgotten: r.varint()?, ..Self::default() };
        for _ in 0..r.count(40)? {
            r.keep_all::<(Name, RefValue)>(NODE_SHARE)?;
            let (name, version) = (read_name(r)?, r.varint()?);
            state.refs.insert(name, RefValue { version, ..RefValue::read(r)? });
        }
        for _ in 0..r.count(36)? {
            r.keep_all::<(SegmentId, SegmentInfo)>(NODE_SHARE)?;
            let (id, info) = (read_owned(r)?, SegmentInfo::read(r)?);
            state.segments.insert(id, SegmentInfo { built: r.varint()?, ..info });
        }
        for _ in 0..r.count(35)? {
            r.keep_all::<(SessionId, Session)>(NODE_SHARE)?;
            let id = SessionId::from_bytes(r.array()?);
            let (opened, touched, last_write) = (r.varint()?, r.varint()?, WriteId::from_bytes(r.array()?));
            let joint = if r.flag()? { Some(Joint::read(r)?) } else { None };
            state.sessions.insert(id, Session { opened, touched, last_write, joint });
        }
        for _ in 0..r.count(36)? {
            r.keep_all::<(PackId, Condemned)>(NODE_SHARE)?;
            let (pack, at, when) = (read_owned(r)?, r.varint()?, Timestamp(r.signed()?));
            state.condemned.insert(pack, Condemned { at, when, len: r.varint()?, damaged: r.flag()? });
        }
        for _ in 0..r.count(34)? {
            r.keep_all::<(PackId, Purged)>(NODE_SHARE)?;
            let pack = read_owned(r)?;
            state.purged.insert(pack, Purged { at: r.varint()?, deleted: r.flag()? });
        }
        if version == VERSION_MAX {
            state.read_second(r)?;
        }
        reader.finish()?;
        Ok(state)
    }

    /// Reads what only snapshots of version 2 have.
    fn read_second(&mut self, r: &mut Reader<'_>) -> Result<()> {
        self.read_labels(r)?;
        self.read_removed(r)?;
        self.read_policy(r)?;
        // A state has only one valid encoding.
        if self.snapshot_version() == VERSION {
            return Err(r.malformed("snapshot of version 2 has nothing that needs it").into());
        }
        Ok(())
    }
}
