//! Sets of numbers as runs, for chunks of a manifest.
//!
//! Encoding: the number of runs, then for each the gap since the end of the previous one (since 0 for the first) and
//! its length. Only the first gap may be 0, and no length: each set has exactly one encoding.

use std::fmt;
use std::ops::Range;

use super::limits::RUNS_MAX;
use crate::format::wire::{Read, Reader, Writer};

/// Set of numbers below 2^32, as ascending runs that do not touch.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Runs {
    ranges: Vec<Range<u32>>,
    /// For each run, the count of numbers in earlier runs.
    before: Vec<u64>,
    len: u64,
}

impl Runs {
    /// Set of the numbers of one range.
    #[must_use]
    pub fn of(range: Range<u32>) -> Self {
        let mut runs = Self::default();
        runs.push(range);
        runs
    }

    /// Adds numbers above all existing ones; ignores others and an empty range.
    pub fn push(&mut self, range: Range<u32>) {
        let floor = self.ranges.last().map_or(0, |last| last.end);
        let range = range.start.max(floor)..range.end;
        if range.is_empty() {
            return;
        }
        let before = self.len;
        self.len += u64::from(range.end - range.start);
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => {
                self.ranges.push(range);
                self.before.push(before);
            }
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The runs, ascending.
    #[must_use]
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.ranges
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    /// Number at the position `ordinal` of the ascending list.
    #[must_use]
    pub fn get(&self, ordinal: u64) -> Option<u32> {
        let at = self.before.partition_point(|&before| before <= ordinal).checked_sub(1)?;
        let within = u32::try_from(ordinal - self.before.get(at)?).ok()?;
        let range = self.ranges.get(at)?;
        range.start.checked_add(within).filter(|number| range.contains(number))
    }

    /// Numbers of `range` with their positions in the ascending list. Its work depends on the range alone.
    pub fn within(&self, range: Range<u32>) -> impl Iterator<Item = (u64, u32)> + '_ {
        let first = self.ranges.partition_point(|run| run.end <= range.start);
        let runs = self.ranges.iter().zip(&self.before).skip(first);
        runs.take_while(move |(run, _)| run.start < range.end).flat_map(move |(run, before)| {
            let numbers = run.start.max(range.start)..run.end.min(range.end);
            numbers.map(move |number| (before + u64::from(number - run.start), number))
        })
    }

    /// True if `number` is in the set.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        let at = self.ranges.partition_point(|range| range.end <= number);
        self.ranges.get(at).is_some_and(|range| range.contains(&number))
    }

    /// Numbers that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut left = Self::default();
        let mut next = 0;
        for range in &self.ranges {
            let mut at = range.start;
            while let Some(taken) = other.ranges.get(next).filter(|taken| taken.start < range.end) {
                left.push(at..taken.start);
                at = at.max(taken.end);
                if taken.end > range.end {
                    break;
                }
                next += 1;
            }
            left.push(at..range.end);
        }
        left
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> usize {
        self.ranges.capacity() * size_of::<Range<u32>>() + self.before.capacity() * size_of::<u64>()
    }

    pub(super) fn write(&self, out: &mut Writer) {
        out.count(self.ranges.len());
        let mut end = 0;
        for range in &self.ranges {
            out.varint(u64::from(range.start - end)).varint(u64::from(range.end - range.start));
            end = range.end;
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Read<Self> {
        let count = reader.count(2)?;
        if count > RUNS_MAX {
            return Err(reader.malformed("too many runs"));
        }
        let mut runs = Self::default();
        let mut end = 0u32;
        for at in 0..count {
            let (gap, len) = (reader.varint32()?, reader.varint32()?);
            if len == 0 || (gap == 0 && at > 0) {
                return Err(reader.malformed("runs touch or are empty"));
            }
            let start = end.checked_add(gap);
            let range = start.and_then(|start| Some(start..start.checked_add(len)?));
            let range = range.ok_or_else(|| reader.malformed("run is out of range"))?;
            end = range.end;
            runs.push(range);
        }
        Ok(runs)
    }
}

impl fmt::Debug for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.ranges).finish()
    }
}

impl FromIterator<u32> for Runs {
    /// Collects an ascending list.
    fn from_iter<I: IntoIterator<Item = u32>>(numbers: I) -> Self {
        let mut runs = Self::default();
        for number in numbers {
            runs.push(number..number.saturating_add(1));
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_sets(a in proptest::collection::btree_set(0u32..300, 0..200),
                         b in proptest::collection::btree_set(0u32..300, 0..200),
                         span in (0u32..320, 0u32..320).prop_map(|(from, to)| from..to)) {
            let runs: Runs = a.iter().copied().collect();
            prop_assert_eq!(runs.iter().collect::<BTreeSet<_>>(), a.clone());
            prop_assert_eq!(runs.len(), a.len() as u64);
            for (ordinal, &number) in a.iter().enumerate() {
                prop_assert_eq!(runs.get(ordinal as u64), Some(number));
            }
            prop_assert_eq!(runs.get(a.len() as u64), None);
            let within: Vec<(u64, u32)> = (0..).zip(a.iter().copied()).filter(|(_, number)| span.contains(number)).collect();
            prop_assert_eq!(runs.within(span).collect::<Vec<_>>(), within);
            let left: BTreeSet<u32> = runs.without(&b.iter().copied().collect()).iter().collect();
            prop_assert_eq!(left, a.difference(&b).copied().collect::<BTreeSet<_>>());
            let mut out = Writer::new();
            runs.write(&mut out);
            prop_assert_eq!(Runs::read(&mut Reader::new(&out.into_bytes())).unwrap(), runs);
        }
    }

    #[test]
    fn a_set_has_one_spelling() {
        for (bytes, what) in [
            (&[1, 0, 0][..], "runs touch or are empty"),
            (&[2, 0, 1, 0, 1], "runs touch or are empty"),
            (&[1, 1, 0xff, 0xff, 0xff, 0xff, 0x0f], "run is out of range"),
            (&[9, 1, 1], "count is impossible"),
        ] {
            assert_eq!(Runs::read(&mut Reader::new(bytes)).unwrap_err().what, what);
        }
    }
}
