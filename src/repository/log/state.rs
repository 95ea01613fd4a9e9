//! All mutable state of the repository, and pure functions that decide which entry may follow it.
//!
//! `check` decides whether an entry may be the next one. A writer calls it before it creates the entry, and every fold calls it
//! again. Nothing here reads a clock or a store.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

use super::attempt::{Attempt, Joint};
use super::entry::{Action, LogEntry};
use super::labels::{Declassified, Places, PolicyMark, labelled_name};
use super::removed::{KeptKey, KeptValue};
use super::values::{RefValue, SegmentInfo};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{MapKey, ObjectId, PackId, SegmentId, SessionId, WriteId};
use crate::name::Name;
use crate::policy::Labels;

/// Factor for the memory of a value in a map's nodes, which may be half empty.
pub(super) const NODE_SHARE: usize = 2;

/// Most that the version of a policy is above the one before. Nobody can use up the versions with a few entries; a version may be a
/// time in milliseconds.
const POLICY_STEP_MAX: u64 = 1 << 44;

/// An open session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Session {
    /// Entry that opened it.
    pub opened: u64,
    /// Entry that touched it last.
    pub touched: u64,
    /// Id of its last write, by which a writer finds the outcome of a commit.
    pub last_write: WriteId,
    /// Purpose, if ranks share the session.
    pub joint: Option<Joint>,
}

/// A pack that is no dedup target any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Condemned {
    /// Entry that condemned it.
    pub at: u64,
    /// Time of that entry by its writer's clock, used only for grace periods.
    pub when: Timestamp,
    /// Bytes.
    pub len: u64,
    /// True if the pack is damaged and never pardoned.
    pub damaged: bool,
}

/// A pack that may be deleted already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Purged {
    /// Entry that purged it.
    pub at: u64,
    /// True once the log records its deletion.
    pub deleted: bool,
}

/// The fold of the log up to and including entry `seq`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct State {
    /// Last entry included; 0 before the first.
    pub seq: u64,
    /// Names.
    pub refs: BTreeMap<Name, RefValue>,
    /// Live index segments.
    pub segments: BTreeMap<SegmentId, SegmentInfo>,
    /// Open sessions.
    pub sessions: BTreeMap<SessionId, Session>,
    /// Condemned packs.
    pub condemned: BTreeMap<PackId, Condemned>,
    /// Purged packs that a writer with an older state might still rely on.
    pub purged: BTreeMap<PackId, Purged>,
    /// Latest purge whose record was dropped: older states must not be relied on.
    pub forgotten: u64,
    /// Kept values of removed or replaced names.
    pub removed: BTreeMap<KeptKey, KeptValue>,
    /// Labels of names and prefixes; they stay when a name is removed.
    pub labels: BTreeMap<Name, Labels>,
    /// Names with declassifications.
    pub declassified: BTreeMap<Name, Declassified>,
    /// Policy in force.
    pub policy: Option<PolicyMark>,
    /// Places of names while entries are applied; nothing else may change names, kept values or labels once there are any.
    pub(super) places: Places,
}

/// Reason why an entry may not follow a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The session is not open; it was fenced or closed.
    NotOpen(SessionId),
    /// The session is open already.
    OpenAlready(SessionId),
    /// The session was touched since.
    Touched(SessionId),
    /// A ref does not have the expected version.
    RefMoved(Name),
    /// A segment is missing, or exists already.
    Segment(SegmentId),
    /// A segment was built from a future state, or from one older than the dropped records.
    Built(u64),
    /// A pack is not in the expected condition.
    Pack(PackId),
    /// The pack's session is open, so it is a root for marking.
    InUse(PackId),
    /// The kept value of the name is not the expected one.
    Removed(Name),
    /// A newer policy is in force.
    Policy(u64),
    /// The policy's version is too far from the one in force.
    PolicyStep(u64),
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
            Self::Policy(version) => write!(f, "policy of version {version} is in force"),
            Self::PolicyStep(version) => {
                write!(f, "policy has a version that is more than {POLICY_STEP_MAX} above {version}, the one in force")
            }
            Self::Removed(name) => write!(f, "the kept value of {name} was restored or forgotten meanwhile"),
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let help = match refusal {
            Refusal::RefMoved(_) => "somebody else saved or removed it; check it, then run the command again",
            _ => "run the command again: it reuses what was uploaded",
        };
        Self::new(ErrorKind::Conflict, refusal.to_string()).help(help)
    }
}

/// Composed swaps of maps in an entry.
#[derive(Debug, Default)]
pub(super) struct Swaps {
    /// New map of each old one, for refs from before the entry.
    pub(super) all: HashMap<MapKey, MapKey>,
    /// New maps for refs that the entry itself sets, by number of the action.
    after: HashMap<usize, MapKey>,
}

impl Swaps {
    pub(super) fn of(actions: &[Action]) -> Self {
        let mut swaps = Self::default();
        // From last to first, so that `all` has the later swaps.
        for (at, action) in actions.iter().enumerate().rev() {
            match action {
                Action::SwapMap { old, new } => {
                    let last = swaps.all.get(new).copied().unwrap_or(*new);
                    swaps.all.insert(*old, last);
                }
                Action::SetRef { value, .. } => {
                    if let Some(last) = swaps.all.get(&value.map_key) {
                        swaps.after.insert(at, *last);
                    }
                }
                _ => {}
            }
        }
        swaps
    }
}

impl State {
    /// State with these names alone.
    #[cfg(test)]
    pub(crate) fn of(refs: BTreeMap<Name, RefValue>) -> Self {
        Self { refs, ..Self::default() }
    }

    /// Approximate bytes of memory.
    pub(crate) fn weight(&self) -> u64 {
        fn all<K, V>(map: &BTreeMap<K, V>) -> usize {
            map.len() * (size_of::<K>() + size_of::<V>())
        }
        let names = self.refs.iter().map(|(name, value)| name.as_str().len() + value.facts.weight());
        let maps = [all(&self.refs), all(&self.segments), all(&self.sessions), all(&self.condemned), all(&self.purged)];
        let besides = self.removed_weight() + self.labels_weight() + self.places.weight();
        (names.sum::<usize>() + maps.iter().sum::<usize>() + besides) as u64
    }

    /// Approximate bytes of memory of the names for which `counts` is true: their values, kept ones too, and their labels.
    pub(crate) fn weight_of(&self, counts: impl Fn(&Name) -> bool) -> u64 {
        let (mut bytes, mut labelled) = (0, HashSet::new());
        for (name, value) in self.refs.iter().chain(self.removed_values()).filter(|(name, _)| counts(name)) {
            bytes += name.as_str().len() + size_of::<(Name, RefValue)>() + value.facts.weight();
            labelled.insert(labelled_name(name));
        }
        for (name, labels) in self.labels.iter().filter(|(name, _)| counts(name) || labelled.contains(*name)) {
            bytes += name.as_str().len() + size_of::<(Name, Labels)>() + labels.weight();
        }
        bytes as u64
    }

    /// Checks `entry` as number `self.seq + 1`.
    ///
    /// # Errors
    /// The first reason why it may not follow.
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
        self.check_own(entry.session, &entry.actions)?;
        self.check_joints(entry)?;
        entry.actions.iter().try_for_each(|action| self.check_action(entry.session, action))
    }

    /// Checks one action of an entry of `session`, which is open. Whether an attempt has a session already is not checked.
    pub(super) fn check_alone(&self, session: Option<SessionId>, action: &Action) -> Result<(), Refusal> {
        self.check_own(session, std::slice::from_ref(action))?;
        self.check_action(session, action)
    }

    /// Writers rely on their own packs, so packs of an open session may not be condemned, except for damage. A session with a
    /// damaged pack may then make nothing reachable any more.
    fn check_own(&self, session: Option<SessionId>, actions: &[Action]) -> Result<(), Refusal> {
        let reaches = |action: &Action| matches!(action, Action::SetRef { .. } | Action::SwapMap { .. });
        let Some(session) = session.filter(|_| actions.iter().any(reaches)) else { return Ok(()) };
        let object = |byte| PackId { session, object: ObjectId::from_bytes([byte; 16]) };
        let own = object(0)..=object(u8::MAX);
        let condemned = self.condemned.range(own.clone()).map(|(pack, _)| *pack).next();
        match condemned.or_else(|| self.purged.range(own).map(|(pack, _)| *pack).next()) {
            Some(pack) => Err(Refusal::Pack(pack)),
            None => Ok(()),
        }
    }

    /// Refuses a second session for an attempt.
    fn check_joints(&self, entry: &LogEntry) -> Result<(), Refusal> {
        let new = entry.actions.iter().filter_map(|action| match action {
            Action::OpenJoint(_, attempt) => Some(attempt),
            _ => None,
        });
        let new: HashSet<&Attempt> = new.collect();
        if new.is_empty() {
            return Ok(());
        }
        let is_new = |session: &Session| session.joint.as_ref().is_some_and(|joint| new.contains(&joint.attempt));
        match self.sessions.iter().find(|(_, session)| is_new(session)) {
            Some((id, _)) => Err(Refusal::OpenAlready(*id)),
            None => Ok(()),
        }
    }

    fn check_action(&self, session: Option<SessionId>, action: &Action) -> Result<(), Refusal> {
        let ensure = |holds: bool, refusal: Refusal| if holds { Ok(()) } else { Err(refusal) };
        match action {
            Action::Open(id) => ensure(!self.sessions.contains_key(id), Refusal::OpenAlready(*id)),
            Action::OpenJoint(id, attempt) => {
                ensure(!self.sessions.contains_key(id), Refusal::OpenAlready(*id))?;
                ensure(self.completed(attempt).is_none(), Refusal::RefMoved(attempt.name.clone()))
            }
            Action::Renew(id) | Action::Close(id) => ensure(self.sessions.contains_key(id), Refusal::NotOpen(*id)),
            Action::Fence { session, touched } => {
                let still = self.sessions.get(session).is_some_and(|s| s.touched == *touched);
                ensure(still, Refusal::Touched(*session))
            }
            Action::AddSegment(id, _) => {
                let own = session == Some(id.session);
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
            Action::SwapMap { .. } | Action::Label { .. } => Ok(()),
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
            Action::Keep { name, version } => self.check_keep(name, *version),
            Action::Forget { name, version, at } => self.check_forget((name.clone(), *version), *at),
            Action::Declassify { name, declassified } => {
                let same = self.refs.get(name).is_some_and(|value| value.manifest == declassified.manifest);
                ensure(same, Refusal::RefMoved(name.clone()))
            }
            Action::SetPolicy(mark) => match self.policy {
                Some(policy) if policy.version >= mark.version => Err(Refusal::Policy(policy.version)),
                policy => {
                    let before = policy.map_or(0, |policy| policy.version);
                    ensure(mark.version - before <= POLICY_STEP_MAX, Refusal::PolicyStep(before))
                }
            },
        }
    }

    /// The state after `entry`.
    ///
    /// # Errors
    /// As [`State::check`]; the state stays unchanged.
    pub fn apply(&mut self, entry: &LogEntry) -> Result<(), Refusal> {
        self.apply_weighed(entry).map(drop)
    }

    /// As [`Self::apply`]; returns the bytes of memory that it takes beside what is in the entry: labels that names keep because of it,
    /// and places of names.
    pub(super) fn apply_weighed(&mut self, entry: &LogEntry) -> Result<u64, Refusal> {
        self.check(entry)?;
        let made = self.places.made();
        self.seq += 1;
        let swaps = Swaps::of(&entry.actions);
        self.swap_maps(&swaps.all);
        let leaving = self.leaving(entry);
        for (at, action) in entry.actions.iter().enumerate() {
            self.apply_action(entry, at, action, &swaps);
        }
        let kept = self.keep_labels(&leaving);
        if let Some(session) = entry.session.and_then(|id| self.sessions.get_mut(&id)) {
            session.last_write = entry.write;
            session.touched = self.seq;
        }
        self.forget();
        let places = if made == self.places.made() { 0 } else { self.places.weight() };
        Ok((kept + places) as u64)
    }

    pub(super) fn apply_action(&mut self, entry: &LogEntry, at: usize, action: &Action, swaps: &Swaps) {
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
                // Its packs belong to the session, so none was purged before the session opened. Since then one may have been
                // purged: damage is condemned in open sessions, too.
                let built = self.sessions.get(&id.session).map_or(0, |session| session.opened);
                self.segments.insert(*id, SegmentInfo { built, ..*info });
            }
            Action::ReplaceSegments { old, new, built } => {
                for id in old {
                    self.segments.remove(id);
                }
                self.segments.extend(new.iter().map(|(id, info)| (*id, SegmentInfo { built: *built, ..*info })));
            }
            Action::SetRef { name, value, .. } => {
                let map_key = swaps.after.get(&at).copied().unwrap_or(value.map_key);
                self.move_name(name, Some((value.manifest, map_key)));
                self.refs.insert(name.clone(), RefValue { version: seq, map_key, ..value.clone() });
            }
            Action::RemoveRef { name, .. } => {
                self.move_name(name, None);
                self.refs.remove(name);
            }
            // Applied to all values at once, before.
            Action::SwapMap { .. } => {}
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
            Action::Keep { name, version } => self.apply_keep(name, *version, entry.at),
            Action::Forget { name, version, .. } => self.apply_forget(&(name.clone(), *version)),
            Action::Label { name, labels } => self.apply_label(name, labels),
            Action::Declassify { name, declassified } => {
                self.declassified.insert(name.clone(), declassified.clone());
            }
            Action::SetPolicy(mark) => self.policy = Some(*mark),
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

    /// Drops records of purges that no writer can rely on any more: deleted, and older than every live segment and open session.
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

    /// Version of `name`, if it exists.
    #[must_use]
    pub fn version(&self, name: &Name) -> Option<u64> {
        self.refs.get(name).map(|value| value.version)
    }

    /// Open session of an attempt.
    #[must_use]
    pub fn joint(&self, attempt: &Attempt) -> Option<(SessionId, &Session, &Joint)> {
        self.sessions.iter().find_map(|(id, session)| {
            let joint = session.joint.as_ref().filter(|joint| joint.attempt == *attempt)?;
            Some((*id, session, joint))
        })
    }

    /// Current value of the attempt's name, if this attempt saved it.
    #[must_use]
    pub fn completed(&self, attempt: &Attempt) -> Option<&RefValue> {
        self.refs.get(&attempt.name).filter(|value| value.is_of(attempt))
    }

    /// True if new content may rely on `pack`.
    #[must_use]
    pub fn is_target(&self, pack: &PackId) -> bool {
        !self.condemned.contains_key(pack) && !self.purged.contains_key(pack)
    }

    /// Pardons needed by a commit that relies on `packs`, found in the state after entry `known`; add them to the same entry.
    ///
    /// # Errors
    /// Packs that cannot be relied on: purged, damaged, or found in a state that is too old.
    pub fn check_packs(&self, packs: &BTreeSet<PackId>, known: u64) -> Result<Vec<Action>, Vec<PackId>> {
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

#[cfg(test)]
mod tests {
    use super::super::attempt::AttemptId;
    use super::*;
    use crate::id::{ManifestId, Owned};
    use crate::repository::log::StepFacts;

    fn entry(actions: Vec<Action>) -> LogEntry {
        LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions }
    }

    fn set(name: &str, map_key: MapKey) -> Action {
        let value = RefValue {
            version: 0,
            manifest: ManifestId::of(b""),
            manifest_key: map_key,
            map_key,
            saved: Timestamp(0),
            logical_bytes: 0,
            files: 0,
            chunks: 0,
            behind: 0,
            facts: StepFacts::default(),
            attempt: None,
        };
        Action::SetRef { name: name.parse().unwrap(), expected: None, value }
    }

    #[test]
    fn swaps_of_one_entry_follow_each_other() {
        let [a, b, c, d] = [(); 4].map(|()| Owned::fresh(SessionId::random()));
        let mut state = State::default();
        state.apply(&entry(vec![set("one", a), set("two", b), set("three", d)])).unwrap();
        let swap = |old, new| Action::SwapMap { old, new };
        // A name that is set between two swaps is swapped by the later one alone.
        state.apply(&entry(vec![swap(a, b), set("four", a), swap(b, c), swap(a, d), set("five", b)])).unwrap();
        let maps =
            ["one", "two", "three", "four", "five"].map(|name| state.refs[&name.parse::<Name>().unwrap()].map_key);
        assert_eq!(maps, [c, c, d, d, b]);
        let again = state.clone();
        state.apply(&entry(vec![swap(c, a), swap(a, c)])).unwrap();
        assert_eq!(state.refs, again.refs, "there and back");
    }

    #[test]
    fn an_attempt_has_one_session() {
        let attempt: Attempt =
            Attempt { name: "run/step-1".parse().unwrap(), id: AttemptId::default(), ranks: std::num::NonZeroU32::MIN };
        let open = || Action::OpenJoint(SessionId::random(), attempt.clone());
        let mut state = State::default();
        state.apply(&entry(vec![open()])).unwrap();
        assert!(matches!(state.check(&entry(vec![open()])), Err(Refusal::OpenAlready(_))));
    }

    #[test]
    fn weights_grow_with_what_is_held() {
        let mut state = State::default();
        let large =
            entry((0..1000).map(|n| set(&format!("run/step-{n}"), Owned::fresh(SessionId::random()))).collect());
        assert!(large.weight() > 100_000);
        state.apply(&large).unwrap();
        assert!(state.weight() > 100_000 && State::default().weight() == 0);
    }
}
