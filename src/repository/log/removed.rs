//! Kept values of removed or replaced names: roots for marking until they are forgotten.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::num::NonZeroUsize;

use super::Action;
use super::fields::read_name;
use super::state::{NODE_SHARE, Refusal, State};
use super::values::RefValue;
use crate::clock::Timestamp;
use crate::error::Result;
use crate::format::wire::{Reader, Writer};
use crate::id::ManifestId;
use crate::limits::{CHUNK_LEN_MAX, REMOVED_BYTES_MAX, REMOVED_MAX};
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
    /// values are not kept at all, or forgotten by the same entry, at most `FORGOTTEN_MAX`: of the first segment of names that has the
    /// most, the oldest first. So a writer of names below one segment cannot use up what is kept of the others.
    pub fn keep<'a>(&self, names: impl IntoIterator<Item = &'a Name>) -> Vec<Action> {
        let names: BTreeSet<&Name> = names.into_iter().collect();
        let mut taken: Vec<(&Name, &RefValue)> =
            names.into_iter().filter_map(|name| self.refs.get_key_value(name)).collect();
        taken.sort_by_key(|(_, value)| std::cmp::Reverse(value.version));
        let mut kept: Vec<(&KeptKey, &KeptValue)> = self.removed.iter().collect();
        kept.sort_by_key(|((_, version), removed)| std::cmp::Reverse((removed.at, *version)));
        let mut quota = Quota::default();
        for (name, value) in &taken {
            quota.add(name, value);
        }
        for ((name, _), removed) in &kept {
            quota.add(name, &removed.value);
        }
        let beyond = quota.beyond();
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
        tracing::warn!("forgot the {forgotten} oldest values of removed or replaced names: too many were kept");
    }
}

/// Use of the quota, by the first segment of names. Small, for anyone who may write names may make as many as they like.
#[derive(Clone, Debug, Default)]
struct Quota<'a> {
    /// Values that are within the quota.
    values: usize,
    /// Sum of the bytes of these: those of each are at most a `u64`, which their sum may exceed.
    bytes: u128,
    segments: BTreeMap<&'a str, Share>,
    /// All values, in the order in which they were counted.
    counted: Vec<Counted>,
}

/// Values of the names below one segment.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    /// The oldest of them, by its place.
    oldest: Option<NonZeroUsize>,
    values: usize,
    bytes: u128,
}

/// A value: its bytes, and the next later one of its segment, if there is one.
#[derive(Clone, Copy, Debug)]
struct Counted {
    bytes: u64,
    later: Option<NonZeroUsize>,
}

impl<'a> Quota<'a> {
    /// Counts a value, at the place after those before; of one segment, the latest comes first.
    fn add(&mut self, name: &'a Name, value: &RefValue) {
        // Holes are in no chunk.
        let bytes = value.logical_bytes.min(value.chunks.saturating_mul(CHUNK_LEN_MAX));
        let segment = name.as_str().split('/').next().unwrap_or_default();
        let share = self.segments.entry(segment).or_default();
        self.counted.push(Counted { bytes, later: share.oldest });
        // Counted from 1, so that none takes no space.
        share.oldest = NonZeroUsize::new(self.counted.len());
        share.values += 1;
        share.bytes += u128::from(bytes);
        self.values += 1;
        self.bytes += u128::from(bytes);
    }

    /// For each place, whether its value is one too many; one always stays.
    fn beyond(mut self) -> Vec<bool> {
        let mut beyond = vec![false; self.counted.len()];
        let too_many = |quota: &Self| quota.values > REMOVED_MAX;
        self.shrink(&mut beyond, |share| share.values as u128, too_many);
        let too_large = |quota: &Self| quota.bytes > u128::from(REMOVED_BYTES_MAX) && quota.values > 1;
        self.shrink(&mut beyond, |share| share.bytes, too_large);
        beyond
    }

    /// Marks in `beyond` the oldest value of the segment with the greatest `weight`, the last such by name, while `is_beyond`.
    /// A heap of the segments finds it.
    fn shrink(&mut self, beyond: &mut [bool], weight: fn(&Share) -> u128, is_beyond: impl Fn(&Self) -> bool) {
        if !is_beyond(self) {
            return;
        }
        let used = self.segments.iter().filter(|(_, share)| share.oldest.is_some());
        let mut heaviest: BinaryHeap<(u128, &str)> = used.map(|(segment, share)| (weight(share), *segment)).collect();
        while is_beyond(self) {
            let Some((_, segment)) = heaviest.pop() else { break };
            let Some(share) = self.segments.get_mut(segment) else { continue };
            let Some(place) = share.oldest.map(|oldest| oldest.get() - 1) else { continue };
            let (Some(counted), Some(gone)) = (self.counted.get(place), beyond.get_mut(place)) else { continue };
            *gone = true;
            *share = Share {
                oldest: counted.later,
                values: share.values - 1,
                bytes: share.bytes - u128::from(counted.bytes),
            };
            self.values -= 1;
            self.bytes -= u128::from(counted.bytes);
            if share.oldest.is_some() {
                heaviest.push((weight(share), segment));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::LogEntry;
    use super::*;
    use crate::error::ErrorKind;
    use crate::id::{Owned, SessionId, WriteId};
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

    /// A value with `bytes` of content, of which there may be any number.
    fn large(bytes: u64) -> RefValue {
        RefValue { chunks: u64::MAX, logical_bytes: bytes, ..value(0) }
    }

    /// [`Quota::beyond`] by its definition, of values by segment and bytes: each that goes is found by a look at all of them.
    fn beyond_by_definition(values: &[(u32, u64)]) -> Vec<bool> {
        let mut segments: BTreeMap<String, Vec<(usize, u64)>> = BTreeMap::new();
        for (place, (segment, bytes)) in values.iter().enumerate() {
            segments.entry(format!("s{segment}")).or_default().push((place, *bytes));
        }
        let bytes_of = |share: &[(usize, u64)]| share.iter().map(|(_, bytes)| u128::from(*bytes)).sum::<u128>();
        let (mut beyond, mut left) = (vec![false; values.len()], values.len());
        let mut bytes: u128 = segments.values().map(|share| bytes_of(share)).sum();
        while left > REMOVED_MAX || (bytes > u128::from(REMOVED_BYTES_MAX) && left > 1) {
            let by_number = left > REMOVED_MAX;
            let used = segments.values_mut().filter(|share| !share.is_empty());
            let most = used.max_by_key(|share| if by_number { share.len() as u128 } else { bytes_of(share) });
            let (place, of_it) = most.unwrap().pop().unwrap();
            bytes -= u128::from(of_it);
            left -= 1;
            beyond[place] = true;
        }
        beyond
    }

    /// Values of few and of many segments: number of the segment and content of each.
    fn kept_values() -> impl Strategy<Value = Vec<(u32, u64)>> {
        let most = prop_oneof![Just(1), Just(REMOVED_BYTES_MAX / 1024), Just(REMOVED_BYTES_MAX / 64), Just(u64::MAX)];
        (1..2_000_u32, 0..2_000_usize, most).prop_flat_map(|(segments, len, most)| {
            let segment = prop_oneof![0..segments, 0..1 + segments / 100];
            proptest::collection::vec((segment, 0..most), len)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn the_quota_takes_the_values_that_its_definition_says(values in kept_values()) {
            let named = |(segment, bytes): &(u32, u64)| (name(&format!("s{segment}/x")), large(*bytes));
            let named: Vec<(Name, RefValue)> = values.iter().map(named).collect();
            let mut quota = Quota::default();
            for (name, value) in &named {
                quota.add(name, value);
            }
            prop_assert_eq!(quota.beyond(), beyond_by_definition(&values));
        }
    }

    /// Hours, if each value that goes costs a look at all segments.
    #[test]
    fn values_of_very_many_segments_are_dropped() {
        let count = 300_000;
        let names: Vec<Name> = (0..count).map(|n| name(&format!("s{n:06}/x"))).collect();
        let mut quota = Quota::default();
        for name in &names {
            quota.add(name, &large(1));
        }
        let beyond = quota.beyond();
        let last = (0..count).map(|place| place >= REMOVED_MAX).collect::<Vec<_>>();
        assert!(beyond == last, "of those that have as much, the last by name goes first");
    }

    #[test]
    fn values_whose_bytes_exceed_the_greatest_number_are_counted() {
        let names = ["a", "b", "c"].map(name);
        let mut quota = Quota::default();
        for (place, name) in names.iter().enumerate() {
            quota.add(name, &large(if place < 2 { u64::MAX } else { 1 }));
        }
        assert_eq!(quota.beyond(), [true, true, false]);
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
