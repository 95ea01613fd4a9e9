//! Kept values of removed or replaced names: roots for marking until they are forgotten.

use std::collections::BTreeSet;

use super::Action;
use super::fields::read_name;
use super::quota::{KeptUse, Quota, bytes_of};
use super::state::{NODE_SHARE, Refusal, State};
use super::values::RefValue;
use crate::clock::Timestamp;
use crate::error::Result;
use crate::format::wire::{Reader, Writer};
use crate::id::ManifestId;
use crate::name::Name;

/// Values beyond the quota that one entry forgets, at most: the oldest ones. Later entries forget the rest.
const FORGOTTEN_MAX: usize = 1 << 14;

/// Key of a kept value: the name, and the version that the value had under it.
pub type KeptKey = (Name, u64);

/// Old value of a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeptValue {
    /// Entry that removed or replaced it.
    pub at: u64,
    /// Time of that entry by its writer's clock: for people, it decides nothing.
    pub when: Timestamp,
    /// Value, with its version.
    pub value: RefValue,
}

/// Treatment of the old value of a name that gets another tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// It is not kept.
    Nothing,
    /// It is kept; beyond the quota, values are forgotten for it.
    Quota,
    /// It is kept, and the name does not get the tree if a value would be forgotten for it.
    All,
}

impl Keeping {
    /// Actions that keep the value that `name` has in `state`, for the entry that gives it this manifest. Of names that have as
    /// many kept values, those that are the writer's `own` lose theirs first.
    ///
    /// # Errors
    /// Exhausted, if all are to be kept and the quota is used up.
    pub fn actions(
        self,
        state: &State,
        (name, manifest): (&Name, ManifestId),
        own: impl Fn(&Name) -> bool,
    ) -> Result<Vec<Action>> {
        let Some(old) = state.refs.get(name).filter(|old| old.manifest != manifest) else { return Ok(Vec::new()) };
        match self {
            Self::Nothing => return Ok(Vec::new()),
            Self::Quota => {}
            Self::All => KeptUse::of(state).check(name, old)?,
        }
        Ok(state.keep_for([name], own))
    }
}

impl KeptValue {
    /// Action that forgets it.
    #[must_use]
    pub fn forget(&self, (name, version): &KeptKey) -> Action {
        Action::Forget { name: name.clone(), version: *version, at: self.at }
    }
}

impl State {
    /// All values whose content stays: current values of names, and kept ones.
    pub fn roots(&self) -> impl Iterator<Item = (&Name, &RefValue)> {
        self.refs.iter().chain(self.removed_values())
    }

    /// Kept values, each with its name.
    pub fn removed_values(&self) -> impl Iterator<Item = (&Name, &RefValue)> {
        self.removed.iter().map(|((name, _), removed)| (name, &removed.value))
    }

    /// Kept values that entries up to `last` kept, by name.
    pub fn kept_through(&self, last: u64) -> impl Iterator<Item = (&KeptKey, &KeptValue)> {
        self.removed.iter().filter(move |(_, removed)| removed.at <= last)
    }

    /// Kept versions of `name`, the oldest first.
    pub fn removed_of<'a>(&'a self, name: &Name) -> impl DoubleEndedIterator<Item = (u64, &'a KeptValue)> + use<'a> {
        let own = (name.clone(), 0)..=(name.clone(), u64::MAX);
        self.removed.range(own).map(|((_, version), removed)| (*version, removed))
    }

    /// Actions that keep the values of `names`, for the entry that removes or replaces them, before those actions. Beyond the quota
    /// values are not kept at all, or forgotten by the same entry, at most `FORGOTTEN_MAX`: see `Quota`.
    pub fn keep<'a>(&self, names: impl IntoIterator<Item = &'a Name>) -> Vec<Action> {
        self.keep_for(names, |_| true)
    }

    /// [`State::keep`] for a writer whose `own` names lose their kept values before others that have as many.
    fn keep_for<'a>(&self, names: impl IntoIterator<Item = &'a Name>, own: impl Fn(&Name) -> bool) -> Vec<Action> {
        let names: BTreeSet<&Name> = names.into_iter().collect();
        let mut taken: Vec<(&Name, &RefValue)> =
            names.into_iter().filter_map(|name| self.refs.get_key_value(name)).collect();
        taken.sort_by_key(|(_, value)| std::cmp::Reverse(value.version));
        let mut kept: Vec<(&KeptKey, &KeptValue)> = self.removed.iter().collect();
        kept.sort_by_key(|((_, version), removed)| std::cmp::Reverse((removed.at, *version)));
        let mut quota = Quota::default();
        for (name, value) in &taken {
            quota.add(name, bytes_of(value));
        }
        for ((name, _), removed) in &kept {
            quota.add(name, bytes_of(&removed.value));
        }
        let beyond = quota.beyond(own);
        let (taken_beyond, kept_beyond) = beyond.split_at(taken.len());
        let within = taken.iter().zip(taken_beyond).filter(|(_, beyond)| !**beyond);
        let mut actions: Vec<Action> =
            within.map(|((name, value), _)| Action::Keep { name: (*name).clone(), version: value.version }).collect();
        let forgotten = kept.iter().zip(kept_beyond).rev().filter(|(_, beyond)| **beyond).take(FORGOTTEN_MAX);
        actions.extend(forgotten.map(|((key, removed), _)| removed.forget(key)));
        actions
    }

    /// [`State::keep`] for a name that gets a value with this manifest: if it has that manifest already, nothing is
    /// kept.
    pub fn keep_replaced(&self, name: &Name, manifest: ManifestId) -> Vec<Action> {
        match self.refs.get(name) {
            Some(value) if value.manifest != manifest => self.keep([name]),
            _ => Vec::new(),
        }
    }

    /// Action that keeps the value of `name` for the entry that gives it the kept value `restored` instead, which is kept no more.
    /// None if nothing changes, or if a further value would be forgotten for it: an undelete must not cost those of other names.
    pub fn keep_for_undelete(&self, name: &Name, restored: &KeptKey) -> Option<Action> {
        let (old, kept) = (self.refs.get(name)?, self.removed.get(restored)?);
        let fits = KeptUse::of(self).without(&kept.value).check(name, old).is_ok();
        (old.manifest != kept.value.manifest && fits).then(|| Action::Keep { name: name.clone(), version: old.version })
    }

    pub(super) fn check_keep(&self, name: &Name, version: u64) -> Result<(), Refusal> {
        if self.version(name) == Some(version) { Ok(()) } else { Err(Refusal::RefMoved(name.clone())) }
    }

    pub(super) fn check_forget(&self, key: KeptKey, at: u64) -> Result<(), Refusal> {
        let same = self.removed.get(&key).is_some_and(|removed| removed.at == at);
        if same { Ok(()) } else { Err(Refusal::Removed(key.0)) }
    }

    /// Keeps the value of `name`, unless an earlier action of the same entry removed it.
    pub(super) fn apply_keep(&mut self, name: &Name, version: u64, when: Timestamp) {
        if let Some(value) = self.refs.get(name).filter(|value| value.version == version) {
            let (key, value) = ((name.clone(), version), value.clone());
            self.apply_forget(&key);
            self.place_kept(&key, (value.manifest, value.map_key));
            self.removed.insert(key, KeptValue { at: self.seq, when, value });
        }
    }

    /// Forgets the value of `key`, if there is one.
    pub(super) fn apply_forget(&mut self, key: &KeptKey) {
        if let Some(KeptValue { value, .. }) = self.removed.remove(key) {
            self.displace_kept(key, (value.manifest, value.map_key));
        }
    }

    /// Approximate bytes of memory of kept values.
    pub(super) fn removed_weight(&self) -> usize {
        let within = self.removed_values().map(|(name, value)| name.as_str().len() + value.facts.weight());
        within.sum::<usize>() + self.removed.len() * (size_of::<KeptKey>() + size_of::<KeptValue>())
    }

    pub(super) fn write_removed(&self, out: &mut Writer) {
        out.count(self.removed.len());
        for ((name, version), removed) in &self.removed {
            out.string(name.as_str().as_bytes()).varint(*version).varint(removed.at).signed(removed.when.0);
            removed.value.write(out);
        }
    }

    pub(super) fn read_removed(&mut self, r: &mut Reader<'_>) -> Result<()> {
        for _ in 0..r.count(40)? {
            r.keep_all::<(KeptKey, KeptValue)>(NODE_SHARE)?;
            let (name, version, at, when) = (read_name(r)?, r.varint()?, r.varint()?, Timestamp(r.signed()?));
            let value = RefValue { version, ..RefValue::read(r)? };
            self.removed.insert((name, version), KeptValue { at, when, value });
        }
        Ok(())
    }
}

/// Reports values forgotten beyond the quota by an entry with the `actions`.
pub fn log_forgotten(actions: &[Action]) {
    let forgotten = actions.iter().filter(|action| matches!(action, Action::Forget { .. })).count();
    if forgotten > 0 {
        tracing::warn!("forgot {forgotten} old values of removed or replaced names: too many were kept");
    }
}

#[cfg(test)]
mod tests {
    use super::super::LogEntry;
    use super::*;
    use crate::error::ErrorKind;
    use crate::id::{Owned, SessionId, WriteId};
    use crate::limits::{CHUNK_LEN_MAX, REMOVED_BYTES_MAX, REMOVED_MAX};
    use crate::repository::log::StepFacts;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn value(content: u64) -> RefValue {
        let key = Owned::fresh(SessionId::random());
        RefValue {
            version: 0,
            manifest: ManifestId::of(&content.to_le_bytes()),
            manifest_key: key,
            map_key: key,
            saved: Timestamp(0),
            logical_bytes: content,
            files: 1,
            chunks: content.div_ceil(CHUNK_LEN_MAX),
            behind: 0,
            facts: StepFacts::default().metric("loss", 0.5).unwrap(),
            attempt: None,
        }
    }

    fn commit(state: &mut State, actions: Vec<Action>) -> Result<(), Refusal> {
        let at = Timestamp(i64::try_from(state.seq).unwrap() + 100);
        let entry = LogEntry { write: WriteId::random(), session: None, at, actions };
        assert_eq!(LogEntry::decode(&entry.encode()).unwrap(), entry);
        let applied = state.apply(&entry);
        let version = state.snapshot_version();
        assert_eq!(version == 2, !state.removed.is_empty());
        assert_eq!(&State::decode(version, &state.encode()).unwrap(), state);
        applied
    }

    fn set(state: &mut State, text: &str, content: u64) {
        let mut actions = state.keep_replaced(&name(text), value(content).manifest);
        let expected = state.version(&name(text));
        actions.push(Action::SetRef { name: name(text), expected, value: value(content) });
        commit(state, actions).unwrap();
    }

    fn remove(state: &mut State, names: &[&str]) {
        let names: Vec<Name> = names.iter().map(|text| name(text)).collect();
        let mut actions = state.keep(&names);
        let gone = |name: &Name| Action::RemoveRef { name: name.clone(), expected: state.version(name).unwrap() };
        actions.extend(names.iter().map(gone));
        commit(state, actions).unwrap();
    }

    /// Kept names and versions.
    fn kept(state: &State) -> Vec<(&str, u64)> {
        state.removed.keys().map(|(name, version)| (name.as_str(), *version)).collect()
    }

    #[test]
    fn what_is_taken_is_kept_until_it_is_forgotten() {
        let mut state = State::default();
        set(&mut state, "a", 1);
        set(&mut state, "a", 1);
        assert!(state.removed.is_empty(), "the same tree is not replaced");
        set(&mut state, "a", 2);
        remove(&mut state, &["a"]);
        assert_eq!(kept(&state), [("a", 2), ("a", 3)]);
        let (version, last) = state.removed_of(&name("a")).next_back().unwrap();
        assert_eq!((version, last.at, last.when, last.value.logical_bytes), (3, 4, Timestamp(103), 2));
        assert_eq!(last.value.version, 3);
        assert_eq!(state.roots().count(), 2);
        let forget = |at| Action::Forget { name: name("a"), version: 2, at };
        assert_eq!(commit(&mut state, vec![forget(4)]), Err(Refusal::Removed(name("a"))), "another taking");
        commit(&mut state, vec![forget(3)]).unwrap();
        assert_eq!(commit(&mut state, vec![forget(3)]), Err(Refusal::Removed(name("a"))), "twice");
        assert_eq!(kept(&state), [("a", 3)]);
        let all = state.removed.iter().map(|(key, removed)| removed.forget(key)).collect();
        commit(&mut state, all).unwrap();
        assert!(state.removed.is_empty());
    }

    #[test]
    fn a_value_that_the_name_has_not_is_not_kept() {
        let mut state = State::default();
        set(&mut state, "a", 1);
        for (text, version) in [("a", 2), ("a", 0), ("b", 1)] {
            let keep = Action::Keep { name: name(text), version };
            assert_eq!(commit(&mut state, vec![keep]), Err(Refusal::RefMoved(name(text))));
        }
        // After the removing action there is nothing to keep.
        let keep = Action::Keep { name: name("a"), version: 1 };
        commit(&mut state, vec![Action::RemoveRef { name: name("a"), expected: 1 }, keep]).unwrap();
        assert!(state.removed.is_empty());
    }

    #[test]
    fn maps_of_kept_values_are_swapped() {
        let mut state = State::default();
        set(&mut state, "a", 1);
        let old = state.refs[&name("a")].map_key;
        let [new, newer] = [(); 2].map(|()| Owned::fresh(SessionId::random()));
        let gone = Action::RemoveRef { name: name("a"), expected: 1 };
        let keep = Action::Keep { name: name("a"), version: 1 };
        commit(&mut state, vec![keep, gone, Action::SwapMap { old, new }]).unwrap();
        assert_eq!(state.removed[&(name("a"), 1)].value.map_key, new, "by a swap of the same entry");
        commit(&mut state, vec![Action::SwapMap { old: new, new: newer }]).unwrap();
        assert_eq!(state.removed[&(name("a"), 1)].value.map_key, newer);
    }

    #[test]
    fn the_quota_forgets_the_oldest() {
        let mut state = State::default();
        let all: Vec<String> = (0..REMOVED_MAX + 6).map(|n| format!("n/{n}")).collect();
        for text in &all {
            set(&mut state, text, 1);
        }
        let texts: Vec<&str> = all.iter().map(String::as_str).collect();
        remove(&mut state, &texts[..5]);
        remove(&mut state, &texts[5..]);
        // The last entry removes 1,025 names: its oldest value is dropped, and so are all of the entry before.
        assert_eq!(state.removed.len(), REMOVED_MAX);
        assert!(state.removed_of(&name("n/5")).next().is_none() && state.removed_of(&name("n/6")).next().is_some());
        set(&mut state, "n/large", REMOVED_BYTES_MAX - 1);
        remove(&mut state, &["n/large"]);
        assert_eq!(state.removed.len(), 2, "as many bytes as there may be");
        set(&mut state, "n/larger", REMOVED_BYTES_MAX * 2);
        remove(&mut state, &["n/larger"]);
        let texts = kept(&state);
        assert_eq!(texts.iter().map(|(text, _)| *text).collect::<Vec<_>>(), ["n/larger"], "the last one always is");
    }

    #[test]
    fn very_many_values_beyond_the_quota_are_forgotten_by_several_entries_the_oldest_first() {
        let mut state = State::default();
        set(&mut state, "n/last", 1);
        let planted = FORGOTTEN_MAX * 2 + 100;
        for number in 0..planted as u64 {
            let value = RefValue { version: 1, ..value(1) };
            let removed = KeptValue { at: number, when: Timestamp(0), value };
            state.removed.insert((name(&format!("n/{}", planted as u64 - number)), 1), removed);
        }
        let forgotten = [(); 3].map(|()| {
            let mut actions = state.keep(&[name("n/last")]);
            actions.retain(|action| matches!(action, Action::Forget { .. }));
            let count = actions.len();
            commit(&mut state, actions).unwrap();
            (count, state.removed.values().map(|removed| removed.at).min().unwrap())
        });
        // The last one's own value is kept, too.
        let all = planted + 1 - REMOVED_MAX;
        let rest = all - FORGOTTEN_MAX;
        assert_eq!(forgotten, [(FORGOTTEN_MAX, FORGOTTEN_MAX as u64), (rest, all as u64), (0, all as u64)]);
    }

    #[test]
    fn what_is_kept_below_one_segment_does_not_use_up_the_others() {
        let mut state = State::default();
        set(&mut state, "precious/data", 1 << 40);
        remove(&mut state, &["precious/data"]);
        for content in 1..=REMOVED_MAX as u64 + 10 {
            set(&mut state, "mine/q", content);
        }
        assert_eq!(state.removed.len(), REMOVED_MAX);
        assert!(state.removed_of(&name("precious/data")).next().is_some());
        for n in 1..=3 {
            set(&mut state, "mine/q", REMOVED_BYTES_MAX + n);
        }
        assert!(state.removed_of(&name("precious/data")).next().is_some());
        // A hole is no content.
        let (before, hole) = (state.removed.len(), RefValue { chunks: 0, ..value(REMOVED_BYTES_MAX) });
        for _ in 0..3 {
            let mut actions = state.keep(&[name("mine/q")]);
            let expected = state.version(&name("mine/q"));
            actions.push(Action::SetRef { name: name("mine/q"), expected, value: hole.clone() });
            commit(&mut state, actions).unwrap();
        }
        assert!(state.removed.len() > before, "{}", state.removed.len());
    }

    /// B1: values of the parent with the most go, and those of the name with the most.
    #[test]
    fn what_is_kept_below_one_parent_does_not_use_up_the_others_of_its_segment() {
        for many_names in [false, true] {
            let mut state = State::default();
            set(&mut state, "team/bob/model", 1);
            remove(&mut state, &["team/bob/model"]);
            for content in 1..=REMOVED_MAX as u64 + 10 {
                if many_names {
                    let text = format!("team/alice/x-{content}");
                    set(&mut state, &text, 1);
                    set(&mut state, &text, 2);
                } else {
                    set(&mut state, "team/alice/x", content);
                }
            }
            assert_eq!(state.removed.len(), REMOVED_MAX);
            assert!(state.removed_of(&name("team/bob/model")).next().is_some(), "{many_names}");
        }
        let mut state = State::default();
        set(&mut state, "run/best", 1);
        remove(&mut state, &["run/best"]);
        for content in 1..=REMOVED_MAX as u64 + 10 {
            set(&mut state, "run/last", content);
        }
        assert!(state.removed_of(&name("run/best")).next().is_some(), "one name has the most");
        let oldest = state.removed_of(&name("run/last")).next().unwrap();
        assert_eq!(oldest.1.value.logical_bytes, 11, "and loses its oldest");
    }

    #[test]
    fn a_writer_of_some_names_loses_its_own_values_before_others_that_are_as_many() {
        let mut state = State::default();
        set(&mut state, "bob", 1);
        remove(&mut state, &["bob"]);
        for n in 0..REMOVED_MAX {
            let text = name(&format!("alice-{n}"));
            set(&mut state, text.as_str(), 1);
            let own = |name: &Name| name.as_str().starts_with("alice-");
            let manifest = value(2).manifest;
            let mut actions = Keeping::Quota.actions(&state, (&text, manifest), own).unwrap();
            actions.push(Action::SetRef { expected: state.version(&text), name: text, value: value(2) });
            commit(&mut state, actions).unwrap();
        }
        assert_eq!(state.removed.len(), REMOVED_MAX);
        assert!(state.removed_of(&name("bob")).next().is_some());
        assert!(state.removed_of(&name("alice-0")).next().is_none());
    }

    #[test]
    fn a_name_is_not_replaced_if_all_are_to_be_kept_and_one_would_be_forgotten() {
        let all = |state: &State, text: &str, content| {
            let manifest = value(content).manifest;
            Keeping::All.actions(state, (&name(text), manifest), |_| true).map_err(|error| error.kind())
        };
        let mut state = State::default();
        for content in 0..=REMOVED_MAX as u64 {
            let keep = all(&state, "n/x", content).unwrap();
            assert_eq!(keep.len(), usize::from(content > 0));
            set(&mut state, "n/x", content);
        }
        assert_eq!(state.removed.len(), REMOVED_MAX);
        assert_eq!(all(&state, "n/x", 1 << 20), Err(ErrorKind::Exhausted), "its own, too");
        assert_eq!(all(&state, "n/x", REMOVED_MAX as u64), Ok(Vec::new()), "the same tree");
        assert_eq!(all(&state, "new", 1), Ok(Vec::new()));

        let mut state = State::default();
        set(&mut state, "a", REMOVED_BYTES_MAX * 2);
        assert_eq!(all(&state, "a", 1).unwrap().len(), 1, "the only one always is kept");
        set(&mut state, "a", 1);
        assert_eq!(all(&state, "a", 2), Err(ErrorKind::Exhausted));
    }

    #[test]
    fn a_snapshot_of_the_second_version_has_something_that_needs_it() {
        let empty = State::default().encode();
        assert_eq!(State::decode(1, &empty).unwrap(), State::default());
        assert_eq!(State::decode(2, &empty).unwrap_err().kind(), ErrorKind::Damaged, "lists are missing");
        let none = [empty.as_slice(), &[0; 4]].concat();
        assert_eq!(State::decode(1, &none).unwrap_err().kind(), ErrorKind::Damaged);
        assert_eq!(State::decode(2, &none).unwrap_err().kind(), ErrorKind::Damaged, "version 1 could say it");
    }
}
