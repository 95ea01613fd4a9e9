//! The repository's whole mutable state, and the pure functions that decide what may follow it.
//!
//! `check` says whether an entry may be the next one; a writer asks it before it creates the entry, and every fold asks
//! it again. Nothing here reads a clock or a store.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::attempt::{AttemptId, Joint, read_id, write_id};
use super::entry::{Action, LogEntry, read_manifest_id, read_name, read_owned, write_owned};
use super::facts::StepFacts;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::format::wire::{Read, Reader, Writer};
use crate::id::{ManifestId, ManifestKey, MapKey, ObjectId, PackId, SegmentId, SessionId, WriteId};
use crate::repository::name::Name;

/// Room that one value takes in a map's nodes: half of a node may be empty.
const NODE_SHARE: usize = 2;

/// Value of a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RefValue {
    /// The entry that set it; writers leave 0, the fold fills it in.
    pub version: u64,
    /// The saved tree.
    pub manifest: ManifestId,
    /// Key of the manifest.
    pub manifest_key: ManifestKey,
    /// Key of its map.
    pub map_key: MapKey,
    /// When it was saved, by the writer's clock.
    pub saved: Timestamp,
    /// Bytes in all files.
    pub logical_bytes: u64,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// Saves since the key step that its differences are to; 0 if it is one itself.
    pub behind: u32,
    /// Facts besides its bytes.
    pub facts: StepFacts,
    /// Attempt that saved it, if ranks did.
    pub attempt: Option<AttemptId>,
}

/// Record of an index segment in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentInfo {
    /// Bytes of the object.
    pub len: u64,
    /// Packs it covers.
    pub packs: u64,
    /// Chunks it lists.
    pub chunks: u64,
    /// It lists no pack purged up to this entry; writers leave 0, the fold fills it in. For a session's own packs: the
    /// entry that opened it.
    pub built: u64,
}

/// An open session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Session {
    /// The entry that opened it.
    pub opened: u64,
    /// The entry that touched it last.
    pub touched: u64,
    /// Its last write: how a writer learns what became of it.
    pub last_write: WriteId,
    /// Purpose, if ranks share it.
    pub joint: Option<Joint>,
}

/// A pack that is no dedup target any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Condemned {
    /// The entry that condemned it.
    pub at: u64,
    /// Time of that entry by its writer's clock: only for grace periods.
    pub when: Timestamp,
    /// Bytes.
    pub len: u64,
    /// Never to be pardoned.
    pub damaged: bool,
}

/// A pack that may be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Purged {
    /// The entry that purged it.
    pub at: u64,
    /// True if its deletion is logged as done.
    pub deleted: bool,
}

/// The fold of the log up to and including entry `seq`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct State {
    /// The last entry folded in; 0 before the first.
    pub seq: u64,
    /// Names.
    pub refs: BTreeMap<Name, RefValue>,
    /// Live index segments.
    pub segments: BTreeMap<SegmentId, SegmentInfo>,
    /// Open sessions.
    pub sessions: BTreeMap<SessionId, Session>,
    /// Condemned packs.
    pub condemned: BTreeMap<PackId, Condemned>,
    /// Purged packs that somebody might still believe in.
    pub purged: BTreeMap<PackId, Purged>,
    /// The latest purge that is not remembered any more: knowledge older than that is worthless.
    pub forgotten: u64,
}

/// Why an entry may not follow a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The session is not open: it was fenced, or closed.
    NotOpen(SessionId),
    /// A session is opened twice.
    OpenAlready(SessionId),
    /// The session was touched since.
    Touched(SessionId),
    /// A ref is not at the version that was expected.
    RefMoved(Name),
    /// A segment is not (or already) there.
    Segment(SegmentId),
    /// A segment claims to be built on the future, or on what is forgotten.
    Built(u64),
    /// A pack is not in the condition that was expected.
    Pack(PackId),
    /// The pack's session is open: it is a root.
    InUse(PackId),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOpen(session) => write!(f, "session {session} is not open any more"),
            Self::OpenAlready(session) => write!(f, "session {session} is open already"),
            Self::Touched(session) => write!(f, "session {session} is alive"),
            Self::RefMoved(name) => write!(f, "{name} moved meanwhile"),
            Self::Segment(segment) => write!(f, "index segment {segment} was replaced meanwhile"),
            Self::Built(seq) => write!(f, "index segment was built on entry {seq}"),
            Self::Pack(pack) => write!(f, "pack {pack} changed meanwhile"),
            Self::InUse(pack) => write!(f, "pack {pack} belongs to an open session"),
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let help = match refusal {
            Refusal::RefMoved(_) => "somebody else saved or removed it; look at it, then run the command again",
            _ => "run the command again: what was uploaded is used again",
        };
        Self::new(ErrorKind::Conflict, refusal.to_string()).help(help)
    }
}

impl State {
    /// Checks `entry` as number `self.seq + 1`.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn check(&self, entry: &LogEntry) -> Result<(), Refusal> {
        let opens = |session: SessionId| {
            let opens =
                |action: &Action| matches!(action, Action::Open(id) | Action::OpenJoint(id, _) if *id == session);
            entry.actions.iter().any(opens)
        };
        if let Some(session) = entry.session
            && !self.sessions.contains_key(&session)
            && !opens(session)
        {
            return Err(Refusal::NotOpen(session));
        }
        self.check_own(entry)?;
        entry.actions.iter().try_for_each(|action| self.check_action(entry, action))
    }

    /// Writers take their own packs for sound: nobody may condemn a pack of an open session. But who finds damage does, and
    /// then nothing may be made reachable by that session any more.
    fn check_own(&self, entry: &LogEntry) -> Result<(), Refusal> {
        let reaches = |action: &Action| matches!(action, Action::SetRef { .. } | Action::SwapMap { .. });
        let Some(session) = entry.session.filter(|_| entry.actions.iter().any(reaches)) else { return Ok(()) };
        let object = |byte| PackId { session, object: ObjectId::from_bytes([byte; 16]) };
        let own = object(0)..=object(u8::MAX);
        let condemned = self.condemned.range(own.clone()).map(|(pack, _)| *pack).next();
        match condemned.or_else(|| self.purged.range(own).map(|(pack, _)| *pack).next()) {
            Some(pack) => Err(Refusal::Pack(pack)),
            None => Ok(()),
        }
    }

    fn check_action(&self, entry: &LogEntry, action: &Action) -> Result<(), Refusal> {
        let ensure = |holds: bool, refusal: Refusal| if holds { Ok(()) } else { Err(refusal) };
        match action {
            Action::Open(id) => ensure(!self.sessions.contains_key(id), Refusal::OpenAlready(*id)),
            Action::OpenJoint(id, attempt) => {
                ensure(!self.sessions.contains_key(id), Refusal::OpenAlready(*id))?;
                let joined = self.joint(attempt).map(|(id, ..)| Err(Refusal::OpenAlready(id)));
                joined.unwrap_or(Ok(()))?;
                ensure(self.completed(attempt).is_none(), Refusal::RefMoved(attempt.name.clone()))
            }
            Action::Renew(id) | Action::Close(id) => ensure(self.sessions.contains_key(id), Refusal::NotOpen(*id)),
            Action::Fence { session, touched } => {
                let still = self.sessions.get(session).is_some_and(|s| s.touched == *touched);
                ensure(still, Refusal::Touched(*session))
            }
            Action::AddSegment(id, _) => {
                let own = entry.session == Some(id.session);
                ensure(own && !self.segments.contains_key(id), Refusal::Segment(*id))
            }
            Action::ReplaceSegments { old, new, built } => {
                ensure((self.forgotten..=self.seq).contains(built), Refusal::Built(*built))?;
                old.iter().try_for_each(|id| ensure(self.segments.contains_key(id), Refusal::Segment(*id)))?;
                new.iter().try_for_each(|(id, _)| ensure(!self.segments.contains_key(id), Refusal::Segment(*id)))
            }
            Action::SetRef { name, expected, .. } => {
                ensure(self.version(name) == *expected, Refusal::RefMoved(name.clone()))
            }
            Action::RemoveRef { name, expected } => {
                ensure(self.version(name) == Some(*expected), Refusal::RefMoved(name.clone()))
            }
            Action::SwapMap { .. } => Ok(()),
            Action::Condemn { pack, damaged, .. } => {
                ensure(*damaged || !self.sessions.contains_key(&pack.session), Refusal::InUse(*pack))?;
                let known = self.condemned.contains_key(pack) || self.purged.contains_key(pack);
                ensure(!known, Refusal::Pack(*pack))
            }
            Action::Pardon { pack, at } => {
                let same = self.condemned.get(pack).is_some_and(|c| c.at == *at && !c.damaged);
                ensure(same, Refusal::Pack(*pack))
            }
            Action::Purge { pack, at } => {
                let same = self.condemned.get(pack).is_some_and(|c| c.at == *at);
                ensure(same, Refusal::Pack(*pack))
            }
            Action::Deleted(packs) => {
                packs.iter().try_for_each(|pack| ensure(self.purged.contains_key(pack), Refusal::Pack(*pack)))
            }
        }
    }

    /// The state after `entry`.
    ///
    /// # Errors
    /// As [`State::check`]; the state is unchanged then.
    pub fn apply(&mut self, entry: &LogEntry) -> Result<(), Refusal> {
        self.check(entry)?;
        self.seq += 1;
        for action in &entry.actions {
            self.apply_action(entry, action);
        }
        if let Some(session) = entry.session.and_then(|id| self.sessions.get_mut(&id)) {
            session.last_write = entry.write;
            session.touched = self.seq;
        }
        self.forget();
        Ok(())
    }

    fn apply_action(&mut self, entry: &LogEntry, action: &Action) {
        let seq = self.seq;
        match action {
            Action::Open(id) => {
                self.open(*id, entry.write, None);
            }
            Action::OpenJoint(id, attempt) => {
                let expected = self.version(&attempt.name);
                self.open(*id, entry.write, Some(Joint { attempt: attempt.clone(), expected }));
            }
            Action::Renew(id) => {
                self.sessions.entry(*id).and_modify(|session| session.touched = seq);
            }
            Action::Close(id) | Action::Fence { session: id, .. } => {
                self.sessions.remove(id);
            }
            Action::AddSegment(id, info) => {
                // Its packs are the session's own, so none was purged before the session opened. Since then one may have
                // been: damage is condemned in open sessions too.
                let built = self.sessions.get(&id.session).map_or(0, |session| session.opened);
                self.segments.insert(*id, SegmentInfo { built, ..*info });
            }
            Action::ReplaceSegments { old, new, built } => {
                self.segments.retain(|id, _| !old.contains(id));
                self.segments.extend(new.iter().map(|(id, info)| (*id, SegmentInfo { built: *built, ..*info })));
            }
            Action::SetRef { name, value, .. } => {
                self.refs.insert(name.clone(), RefValue { version: seq, ..value.clone() });
            }
            Action::RemoveRef { name, .. } => {
                self.refs.remove(name);
            }
            Action::SwapMap { old, new } => {
                self.refs.values_mut().filter(|value| value.map_key == *old).for_each(|value| value.map_key = *new);
            }
            Action::Condemn { pack, len, damaged } => {
                self.condemned.insert(*pack, Condemned { at: seq, when: entry.at, len: *len, damaged: *damaged });
            }
            Action::Pardon { pack, .. } => {
                self.condemned.remove(pack);
            }
            Action::Purge { pack, .. } => {
                self.condemned.remove(pack);
                self.purged.insert(*pack, Purged { at: seq, deleted: false });
            }
            Action::Deleted(packs) => {
                for pack in packs {
                    self.purged.entry(*pack).and_modify(|purged| purged.deleted = true);
                }
            }
        }
    }

    fn open(&mut self, id: SessionId, last_write: WriteId, joint: Option<Joint>) {
        self.sessions.insert(id, Session { opened: self.seq, touched: self.seq, last_write, joint });
    }

    /// Opens `id` if it is not open.
    pub(super) fn reopen(&mut self, id: SessionId, last_write: WriteId) {
        if !self.sessions.contains_key(&id) {
            self.open(id, last_write, None);
        }
    }

    /// Forgets purges that nobody can believe in any more: deleted, and older than every live segment and open session.
    fn forget(&mut self) {
        if self.purged.is_empty() {
            return;
        }
        let segments = self.segments.values().map(|segment| segment.built);
        let sessions = self.sessions.values().map(|session| session.opened);
        let oldest = segments.chain(sessions).min().unwrap_or(self.seq);
        let forgotten = &mut self.forgotten;
        self.purged.retain(|_, purged| {
            let gone = purged.deleted && purged.at <= oldest;
            if gone {
                *forgotten = (*forgotten).max(purged.at);
            }
            !gone
        });
    }

    /// The version of `name`, if it exists.
    #[must_use]
    pub fn version(&self, name: &Name) -> Option<u64> {
        self.refs.get(name).map(|value| value.version)
    }

    /// True if new content may rely on `pack`.
    #[must_use]
    pub fn is_target(&self, pack: &PackId) -> bool {
        !self.condemned.contains_key(pack) && !self.purged.contains_key(pack)
    }

    /// Pardons that a commit needs to rely on `packs`, known from the state after entry `known`: they go into the same entry.
    ///
    /// # Errors
    /// The packs that cannot be relied on: purged, damaged, or known from too long ago to tell.
    pub fn vouch(&self, packs: &BTreeSet<PackId>, known: u64) -> Result<Vec<Action>, Vec<PackId>> {
        let lost = |pack: &&PackId| {
            known < self.forgotten
                || self.purged.contains_key(pack)
                || self.condemned.get(pack).is_some_and(|condemned| condemned.damaged)
        };
        let lost: Vec<PackId> = packs.iter().filter(lost).copied().collect();
        if !lost.is_empty() {
            return Err(lost);
        }
        let pardon = |pack: &PackId| Some(Action::Pardon { pack: *pack, at: self.condemned.get(pack)?.at });
        Ok(packs.iter().filter_map(pardon).collect())
    }
}

impl RefValue {
    pub(in crate::repository) fn write(&self, out: &mut Writer) {
        out.bytes(self.manifest.as_bytes());
        write_owned(out, self.manifest_key);
        write_owned(out, self.map_key);
        out.signed(self.saved.0).varint(self.logical_bytes).varint(self.files).varint(self.chunks);
        out.varint(self.behind.into());
        self.facts.write(out);
        write_id(out, self.attempt.as_ref());
    }

    pub(in crate::repository) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            version: 0,
            manifest: read_manifest_id(reader)?,
            manifest_key: read_owned(reader)?,
            map_key: read_owned(reader)?,
            saved: Timestamp(reader.signed()?),
            logical_bytes: reader.varint()?,
            files: reader.varint()?,
            chunks: reader.varint()?,
            behind: reader.varint32()?,
            facts: StepFacts::read(reader)?,
            attempt: read_id(reader)?,
        })
    }
}

impl SegmentInfo {
    pub(super) fn write(&self, out: &mut Writer) {
        out.varint(self.len).varint(self.packs).varint(self.chunks);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Read<Self> {
        Ok(Self { len: reader.varint()?, packs: reader.varint()?, chunks: reader.varint()?, built: 0 })
    }
}

impl State {
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
        out.into_bytes()
    }

    /// Reads the body of a snapshot.
    ///
    /// # Errors
    /// Damaged.
    pub fn decode(body: &[u8]) -> Result<Self> {
        Self::decode_within(body, u64::MAX)
    }

    /// Reads the body of a snapshot that may take `room` bytes of memory.
    ///
    /// # Errors
    /// Damaged; exhausted, if `room` is too little.
    pub fn decode_within(body: &[u8], room: u64) -> Result<Self> {
        let mut reader = Reader::within(body, room);
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
        reader.finish()?;
        Ok(state)
    }
}
