//! One entry of the log: a list of actions, stamped with the id of its write.
//!
//! The body of an envelope of kind 'L': write id (16), session (1 + 16, or 0), the writer's time (signed), actions: count,
//! each: tag (1), length, payload. An action that a program does not know stops it.

use super::attempt::Attempt;
use super::state::{RefValue, SegmentInfo};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::wire::{Malformed, Read, Reader, Writer};
use crate::id::{ManifestId, ObjectId, Owned, PackId, SegmentId, SessionId, WriteId};
use crate::limits::NAME_LEN_MAX;
use crate::repository::name::Name;

/// A change of the repository's state. What it expects is part of it: nothing is applied to another state than meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A writer begins: its objects are its own, and roots for marking.
    Open(SessionId),
    /// A writer is alive, though it commits nothing.
    Renew(SessionId),
    /// A writer is done.
    Close(SessionId),
    /// The collector ends a session that has stood still since entry `touched`.
    Fence {
        /// Which.
        session: SessionId,
        /// The entry that touched it last.
        touched: u64,
    },
    /// A session's packs become known. The segment lists packs of that session only.
    AddSegment(SegmentId, SegmentInfo),
    /// Segments are merged, or rebuilt without purged packs, from the state after entry `built`.
    ReplaceSegments {
        /// These, exactly, go.
        old: Vec<SegmentId>,
        /// These come.
        new: Vec<(SegmentId, SegmentInfo)>,
        /// The entry after which `new` was built.
        built: u64,
    },
    /// A name gets a new value.
    SetRef {
        /// Name.
        name: Name,
        /// The version it must have; none if it must not exist.
        expected: Option<u64>,
        /// Its value; the version is the entry's number.
        value: RefValue,
    },
    /// A name goes.
    RemoveRef {
        /// Name.
        name: Name,
        /// The version it must have.
        expected: u64,
    },
    /// Repacking: every name that has map `old` gets map `new`; versions stay.
    SwapMap {
        /// The map that goes.
        old: Owned,
        /// The map that comes, of the same manifest.
        new: Owned,
    },
    /// A pack is no dedup target any more; it stays readable.
    Condemn {
        /// Which.
        pack: PackId,
        /// Its length in bytes.
        len: u64,
        /// Damaged packs are never pardoned.
        damaged: bool,
    },
    /// A pack condemned by entry `at` is used after all.
    Pardon {
        /// Which.
        pack: PackId,
        /// The entry that condemned it.
        at: u64,
    },
    /// A pack condemned by entry `at` may be deleted from now on.
    Purge {
        /// Which.
        pack: PackId,
        /// The entry that condemned it.
        at: u64,
    },
    /// These purged packs are deleted.
    Deleted(Vec<PackId>),
    /// Ranks begin to save a step together, in a session that they share.
    OpenJoint(SessionId, Attempt),
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Id by which the writer recognises it.
    pub write: WriteId,
    /// Session that wrote it, if one did.
    pub session: Option<SessionId>,
    /// The writer's clock, for people.
    pub at: Timestamp,
    /// Changes, all or nothing.
    pub actions: Vec<Action>,
}

impl LogEntry {
    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.bytes(&self.write.to_bytes());
        match self.session {
            Some(session) => out.u8(1).bytes(&session.to_bytes()),
            None => out.u8(0),
        };
        out.signed(self.at.0).count(self.actions.len());
        for action in &self.actions {
            let (tag, payload) = action.encode();
            out.u8(tag).string(&payload);
        }
        out.into_bytes()
    }

    /// Reads a body.
    ///
    /// # Errors
    /// Damaged; unsupported, for an action of a later version.
    pub fn decode(body: &[u8]) -> Result<Self> {
        Self::decode_within(body, u64::MAX)
    }

    /// Reads a body that may take `room` bytes of memory.
    ///
    /// # Errors
    /// As [`LogEntry::decode`]; exhausted, if `room` is too little.
    pub fn decode_within(body: &[u8], room: u64) -> Result<Self> {
        let mut reader = Reader::within(body, room);
        let write = WriteId::from_bytes(reader.array()?);
        let session = if reader.flag()? { Some(read_session(&mut reader)?) } else { None };
        let at = Timestamp(reader.signed()?);
        let count = reader.count(2)?;
        let actions = reader.kept_list(count, |reader| {
            let tag = reader.u8()?;
            let payload = reader.string(usize::MAX)?;
            reader.nested(payload, |reader| Action::decode(tag, reader))
        })?;
        reader.finish()?;
        Ok(Self { write, session, at, actions })
    }
}

impl Action {
    fn encode(&self) -> (u8, Vec<u8>) {
        let mut out = Writer::new();
        let tag = match self {
            Self::Open(session) => write_session(&mut out, 1, *session),
            Self::Renew(session) => write_session(&mut out, 2, *session),
            Self::Close(session) => write_session(&mut out, 3, *session),
            Self::Fence { session, touched } => {
                out.bytes(&session.to_bytes()).varint(*touched);
                4
            }
            Self::AddSegment(id, info) => {
                write_owned(&mut out, *id);
                info.write(&mut out);
                5
            }
            Self::ReplaceSegments { old, new, built } => {
                out.varint(*built).count(old.len());
                old.iter().for_each(|&id| write_owned(&mut out, id));
                out.count(new.len());
                for (id, info) in new {
                    write_owned(&mut out, *id);
                    info.write(&mut out);
                }
                6
            }
            Self::SetRef { name, expected, value } => {
                out.string(name.as_str().as_bytes()).varint(expected.map_or(0, |version| version + 1));
                value.write(&mut out);
                7
            }
            Self::RemoveRef { name, expected } => {
                out.string(name.as_str().as_bytes()).varint(*expected);
                8
            }
            Self::SwapMap { old, new } => {
                write_owned(&mut out, *old);
                write_owned(&mut out, *new);
                9
            }
            Self::Condemn { pack, len, damaged } => {
                write_owned(&mut out, *pack);
                out.varint(*len).u8(u8::from(*damaged));
                10
            }
            Self::Pardon { pack, at } => write_verdict(&mut out, 11, *pack, *at),
            Self::Purge { pack, at } => write_verdict(&mut out, 12, *pack, *at),
            Self::Deleted(packs) => {
                out.count(packs.len());
                packs.iter().for_each(|&pack| write_owned(&mut out, pack));
                13
            }
            Self::OpenJoint(session, attempt) => {
                out.bytes(&session.to_bytes());
                attempt.write(&mut out);
                14
            }
        };
        (tag, out.into_bytes())
    }

    /// Reads a payload, all that is left in `r`.
    fn decode(tag: u8, r: &mut Reader<'_>) -> Result<Self> {
        let action = match tag {
            1 => Self::Open(read_session(r)?),
            2 => Self::Renew(read_session(r)?),
            3 => Self::Close(read_session(r)?),
            4 => Self::Fence { session: read_session(r)?, touched: r.varint()? },
            5 => Self::AddSegment(read_owned(r)?, SegmentInfo::read(r)?),
            6 => {
                let (built, old) = (r.varint()?, r.count(32)?);
                let old = r.kept_list(old, read_owned)?;
                let new = r.count(32)?;
                let new = r.kept_list(new, |r| Ok::<_, Malformed>((read_owned(r)?, SegmentInfo::read(r)?)))?;
                Self::ReplaceSegments { old, new, built }
            }
            7 => {
                let (name, expected) = (read_name(r)?, r.varint()?);
                Self::SetRef { name, expected: expected.checked_sub(1), value: RefValue::read(r)? }
            }
            8 => Self::RemoveRef { name: read_name(r)?, expected: r.varint()? },
            9 => Self::SwapMap { old: read_owned(r)?, new: read_owned(r)? },
            10 => Self::Condemn { pack: read_owned(r)?, len: r.varint()?, damaged: r.flag()? },
            11 => Self::Pardon { pack: read_owned(r)?, at: r.varint()? },
            12 => Self::Purge { pack: read_owned(r)?, at: r.varint()? },
            13 => {
                let packs = r.count(32)?;
                Self::Deleted(r.kept_list(packs, read_owned)?)
            }
            14 => Self::OpenJoint(read_session(r)?, Attempt::read(r)?),
            _ => {
                return Err(Error::unsupported("log has an action that this program does not know")
                    .got(tag)
                    .help("use a newer towline"));
            }
        };
        r.done()?;
        Ok(action)
    }
}

fn write_session(out: &mut Writer, tag: u8, session: SessionId) -> u8 {
    out.bytes(&session.to_bytes());
    tag
}

fn write_verdict(out: &mut Writer, tag: u8, pack: PackId, at: u64) -> u8 {
    write_owned(out, pack);
    out.varint(at);
    tag
}

fn read_session(reader: &mut Reader<'_>) -> Read<SessionId> {
    reader.array().map(SessionId::from_bytes)
}

pub(super) fn write_owned(out: &mut Writer, id: Owned) {
    out.bytes(&id.session.to_bytes()).bytes(&id.object.to_bytes());
}

pub(super) fn read_owned(reader: &mut Reader<'_>) -> Read<Owned> {
    Ok(Owned { session: read_session(reader)?, object: ObjectId::from_bytes(reader.array()?) })
}

pub(super) fn read_name(reader: &mut Reader<'_>) -> Result<Name> {
    reader.kept_text(NAME_LEN_MAX)?.parse().map_err(|error: Error| Error::damaged("log holds a bad name").source(error))
}

pub(super) fn read_manifest_id(reader: &mut Reader<'_>) -> Read<ManifestId> {
    reader.array().map(ManifestId::from_bytes)
}
