//! One entry of the log: a list of actions, and the id of its write.
//!
//! The body of an envelope of kind 'L': write id (16), session (1 + 16, or 0), the writer's time (signed), actions: count,
//! each: tag (1), length, payload. A program fails at an action that it does not know.

use super::attempt::Attempt;
use super::fields::{read_name, read_owned, read_session, write_owned};
use super::labels::{Declassified, PolicyMark, read_labels, write_labels};
use super::removed::{KeptKey, KeptValue};
use super::values::{RefValue, SegmentInfo};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::wire::{Malformed, Reader, Writer};
use crate::id::{Owned, PackId, SegmentId, SessionId, WriteId};
use crate::name::Name;
use crate::policy::Labels;

/// A change of the repository's state. It includes the state that it expects, and fails on any other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Opens a writer's session: its objects are roots for marking.
    Open(SessionId),
    /// Keeps a session alive without a commit.
    Renew(SessionId),
    /// Closes a session.
    Close(SessionId),
    /// Ends a session that has made no progress since entry `touched`; by a collector.
    Fence {
        /// The session.
        session: SessionId,
        /// Entry that touched it last.
        touched: u64,
    },
    /// Adds a segment with packs of one session.
    AddSegment(SegmentId, SegmentInfo),
    /// Replaces segments by merged ones, or ones without purged packs, built from the state after entry `built`.
    ReplaceSegments {
        /// Segments to remove, exactly these.
        old: Vec<SegmentId>,
        /// Segments to add.
        new: Vec<(SegmentId, SegmentInfo)>,
        /// The entry after which `new` was built.
        built: u64,
    },
    /// Sets a name.
    SetRef {
        /// Name.
        name: Name,
        /// Version that it must have; none if it must not exist.
        expected: Option<u64>,
        /// New value; its version is the entry's number.
        value: RefValue,
    },
    /// Removes a name.
    RemoveRef {
        /// Name.
        name: Name,
        /// Version that it must have.
        expected: u64,
    },
    /// Replaces map `old` by map `new` in all names, after a repack; versions stay.
    SwapMap {
        /// Map to replace.
        old: Owned,
        /// New map of the same manifest.
        new: Owned,
    },
    /// Condemns a pack: it stays readable, but is no dedup target any more.
    Condemn {
        /// The pack.
        pack: PackId,
        /// Length in bytes.
        len: u64,
        /// Damaged packs are never pardoned.
        damaged: bool,
    },
    /// Revokes the condemnation by entry `at`, because the pack is in use.
    Pardon {
        /// The pack.
        pack: PackId,
        /// The entry that condemned it.
        at: u64,
    },
    /// Purges a pack condemned by entry `at`: it may be deleted from now on.
    Purge {
        /// The pack.
        pack: PackId,
        /// The entry that condemned it.
        at: u64,
    },
    /// Records that these purged packs are deleted.
    Deleted(Vec<PackId>),
    /// Opens a shared session of ranks that save a step together.
    OpenJoint(SessionId, Attempt),
    /// Keeps the value of a name as a root when this entry removes or replaces it. It comes before that action.
    Keep {
        /// Name.
        name: Name,
        /// Its version.
        version: u64,
    },
    /// Forgets a kept value: undeleted, or old enough.
    Forget {
        /// Name that had it.
        name: Name,
        /// Version that it had.
        version: u64,
        /// Entry that kept it.
        at: u64,
    },
    /// Adds labels to a name and every name below it; existing ones stay.
    Label {
        /// Name or prefix.
        name: Name,
        /// Labels to join to its own.
        labels: Labels,
    },
    /// Gives one tree of a name laxer labels.
    Declassify {
        /// Name.
        name: Name,
        /// Signed declassification.
        declassified: Declassified,
    },
    /// Puts a newer policy in force.
    SetPolicy(PolicyMark),
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Id by which the writer recognises its entry.
    pub write: WriteId,
    /// Session that wrote it, if one did.
    pub session: Option<SessionId>,
    /// Time by the writer's clock, for display.
    pub at: Timestamp,
    /// Changes, applied atomically.
    pub actions: Vec<Action>,
}

impl LogEntry {
    /// Approximate bytes of memory that it adds to a state.
    pub(super) fn weight(&self) -> u64 {
        let within = |action: &Action| match action {
            Action::SetRef { name, value, .. } => name.as_str().len() + value.facts.weight(),
            Action::OpenJoint(_, attempt) => attempt.name.as_str().len(),
            // Facts of the value were counted when it was set.
            Action::Keep { name, .. } => name.as_str().len() + size_of::<(KeptKey, KeptValue)>(),
            Action::ReplaceSegments { new, .. } => size_of_val(&**new),
            Action::Label { name, labels } => name.as_str().len() + size_of::<(Name, Labels)>() + labels.weight(),
            Action::Declassify { name, declassified } => name.as_str().len() + declassified.weight(),
            _ => 0,
        };
        let within: usize = self.actions.iter().map(within).sum();
        (size_of_val(&*self.actions) + within) as u64
    }

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

    /// Reads a body, with at most `memory` bytes of memory.
    ///
    /// # Errors
    /// As [`LogEntry::decode`]; exhausted, if `memory` is too little.
    pub fn decode_within(body: &[u8], memory: u64) -> Result<Self> {
        let mut reader = Reader::within(body, memory);
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
            Self::RemoveRef { name, expected } => write_name(&mut out, 8, name, &[*expected]),
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
            Self::Keep { name, version } => write_name(&mut out, 15, name, &[*version]),
            Self::Forget { name, version, at } => write_name(&mut out, 16, name, &[*version, *at]),
            Self::Label { name, labels } => {
                let tag = write_name(&mut out, 17, name, &[]);
                write_labels(&mut out, labels);
                tag
            }
            Self::Declassify { name, declassified } => {
                let tag = write_name(&mut out, 18, name, &[]);
                declassified.write(&mut out);
                tag
            }
            Self::SetPolicy(mark) => {
                mark.write(&mut out);
                19
            }
        };
        (tag, out.into_bytes())
    }

    /// Reads a payload from all of `r`.
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
            15 => Self::Keep { name: read_name(r)?, version: r.varint()? },
            16 => Self::Forget { name: read_name(r)?, version: r.varint()?, at: r.varint()? },
            17 => Self::Label { name: read_name(r)?, labels: read_labels(r)? },
            18 => Self::Declassify { name: read_name(r)?, declassified: Declassified::read(r)? },
            19 => Self::SetPolicy(PolicyMark::read(r)?),
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

fn write_name(out: &mut Writer, tag: u8, name: &Name, numbers: &[u64]) -> u8 {
    out.string(name.as_str().as_bytes());
    numbers.iter().for_each(|number| {
        out.varint(*number);
    });
    tag
}

fn write_verdict(out: &mut Writer, tag: u8, pack: PackId, at: u64) -> u8 {
    write_owned(out, pack);
    out.varint(at);
    tag
}
