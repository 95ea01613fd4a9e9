//! Inputs that are remembered, in memory of their own: each caller has half of it at most, the oldest make room for new ones, and
//! those that nobody uses go.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::HintCaller;
use crate::id::MapKey;

/// Sets of inputs that are remembered. Each caller has half of them at most.
const ENTRIES_MAX: usize = 128;
/// Time after which a set that nobody has used is forgotten.
const UNUSED_MAX: Duration = Duration::from_mins(10);

/// Sets of inputs, with what is known of each.
#[derive(Debug)]
pub(super) struct Remembered<T> {
    /// Bytes of all of them, at most.
    room: u64,
    entries: Vec<Entry<T>>,
}

/// A set of inputs.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) trees: Vec<MapKey>,
    pub(super) known: Arc<T>,
    /// Bytes of memory that it takes.
    pub(super) weight: u64,
    /// Caller who has first asked for it.
    pub(super) caller: HintCaller,
    /// Time of its last use.
    pub(super) used: Instant,
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        Self { trees: self.trees.clone(), known: Arc::clone(&self.known), ..*self }
    }
}

impl<T> Remembered<T> {
    pub(super) fn new(room: u64) -> Self {
        Self { room, entries: Vec::new() }
    }

    /// The value of `trees`, if it is remembered.
    pub(super) fn get(&self, trees: &[MapKey]) -> Option<&Arc<T>> {
        self.entries.iter().find(|entry| entry.trees == trees).map(|entry| &entry.known)
    }

    /// As `get`, if the value is `current`; it counts as used at `now`.
    pub(super) fn use_at(
        &mut self,
        now: Instant,
        trees: &[MapKey],
        current: impl FnOnce(&T) -> bool,
    ) -> Option<Arc<T>> {
        let entry = self.entries.iter_mut().find(|entry| entry.trees == trees)?;
        if !current(&entry.known) {
            return None;
        }
        entry.used = now;
        Some(Arc::clone(&entry.known))
    }

    /// All sets, the last used first.
    pub(super) fn latest(&self) -> Vec<&Entry<T>> {
        let mut latest: Vec<&Entry<T>> = self.entries.iter().collect();
        latest.sort_by_key(|entry| std::cmp::Reverse(entry.used));
        latest
    }

    /// Forgets all sets but those that are `wanted` and were used shortly before `now`.
    pub(super) fn retain(&mut self, now: Instant, wanted: impl Fn(&Entry<T>) -> bool) {
        self.entries.retain(|entry| now.saturating_duration_since(entry.used) < UNUSED_MAX && wanted(entry));
    }

    /// Remembers `entry` in the place of what was known of its trees. The oldest sets make room: those of its caller until this has
    /// its share, then those of all. False, if it takes more than the share of a caller: it is not remembered.
    pub(super) fn put(&mut self, entry: Entry<T>) -> bool {
        self.entries.retain(|known| known.trees != entry.trees);
        if entry.weight > self.room / 2 {
            return false;
        }
        let caller = entry.caller;
        self.entries.push(entry);
        self.shrink(|known| known.caller == caller, (self.room / 2, ENTRIES_MAX / 2));
        self.shrink(|_| true, (self.room, ENTRIES_MAX));
        true
    }

    /// Forgets the oldest of the sets that `counted` selects until they are within the limits of bytes and of their number.
    fn shrink(&mut self, counted: impl Fn(&Entry<T>) -> bool, (bytes, count): (u64, usize)) {
        loop {
            let all = || self.entries.iter().enumerate().filter(|(_, entry)| counted(entry));
            if all().map(|(_, entry)| entry.weight).sum::<u64>() <= bytes && all().count() <= count {
                return;
            }
            let Some((oldest, _)) = all().min_by_key(|(_, entry)| entry.used) else { return };
            self.entries.remove(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ObjectId, SessionId};

    struct Sets {
        sets: Remembered<()>,
        begun: Instant,
    }

    impl Sets {
        fn put(&mut self, number: u8, weight: u64, caller: HintCaller, second: u64) -> bool {
            let used = self.begun + Duration::from_secs(second);
            self.sets.put(Entry { trees: vec![key(number)], known: Arc::new(()), weight, caller, used })
        }

        fn known(&self) -> Vec<u8> {
            (0..=u8::MAX).filter(|number| self.sets.get(&[key(*number)]).is_some()).collect()
        }
    }

    fn key(number: u8) -> MapKey {
        MapKey { session: SessionId::from_bytes([number; 16]), object: ObjectId::from_bytes([number; 16]) }
    }

    fn sets(room: u64) -> Sets {
        Sets { sets: Remembered::new(room), begun: Instant::now() }
    }

    #[test]
    fn a_caller_has_half_and_the_oldest_make_room() {
        let (one, other) = (HintCaller::other("token", "a"), HintCaller::other("token", "b"));
        let mut sets = sets(100);
        assert!(sets.put(0, 20, HintCaller::User, 0) && sets.put(1, 20, HintCaller::User, 1));
        // However much one asks for, it has half.
        for number in 2..10 {
            assert!(sets.put(number, 25, one, number.into()));
        }
        assert_eq!(sets.known(), [0, 1, 8, 9]);
        assert!(!sets.put(10, 51, one, 10), "it would take more than half");
        assert_eq!(sets.known(), [0, 1, 8, 9]);
        // The oldest make room for a further caller, unless they were used since.
        let later = sets.begun + Duration::from_secs(11);
        assert!(sets.sets.use_at(later, &[key(0)], |()| true).is_some());
        assert!(sets.put(20, 50, other, 12));
        assert_eq!(sets.known(), [0, 9, 20]);
        // The same trees are there once.
        assert!(sets.put(9, 25, other, 13));
        assert_eq!(sets.known(), [0, 9]);
    }

    #[test]
    fn small_sets_of_a_caller_leave_those_of_others() {
        let mut sets = sets(1000);
        assert!(sets.put(200, 1, HintCaller::User, 0));
        for number in 0..150 {
            assert!(sets.put(number, 1, HintCaller::other("token", "a"), number.into()));
        }
        assert_eq!(sets.known().len(), ENTRIES_MAX / 2 + 1);
        assert!(sets.known().contains(&200));
    }

    #[test]
    fn sets_that_nobody_uses_go() {
        let mut sets = sets(100);
        let unused = UNUSED_MAX.as_secs();
        assert!(sets.put(0, 1, HintCaller::User, 0) && sets.put(1, 1, HintCaller::User, unused - 1));
        let (begun, now) = (sets.begun, sets.begun + UNUSED_MAX);
        sets.sets.retain(begun, |_| true);
        assert_eq!(sets.known(), [0, 1]);
        sets.sets.retain(now, |_| true);
        assert_eq!(sets.known(), [1]);
    }
}
