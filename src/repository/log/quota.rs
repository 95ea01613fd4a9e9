//! Quota of kept values, and which of them go beyond it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::state::State;
use super::values::RefValue;
use crate::error::{Error, Result};
use crate::limits::{CHUNK_LEN_MAX, REMOVED_BYTES_MAX, REMOVED_MAX};
use crate::name::Name;

/// Bytes of `value` that count. Holes are in no chunk.
pub(super) fn bytes_of(value: &RefValue) -> u64 {
    value.logical_bytes.min(value.chunks.saturating_mul(CHUNK_LEN_MAX))
}

/// Use of the quota.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeptUse {
    values: usize,
    /// Sum of the bytes of these: those of each are at most a `u64`, which their sum may exceed.
    bytes: u128,
}

impl KeptUse {
    /// Use by what `state` keeps.
    #[must_use]
    pub fn of(state: &State) -> Self {
        let mut used = Self::default();
        for (_, value) in state.removed_values() {
            used.add(value);
        }
        used
    }

    /// Counts a further value.
    pub fn add(&mut self, value: &RefValue) {
        self.add_bytes(bytes_of(value));
    }

    /// Use without a value that it counts.
    pub(super) fn without(mut self, value: &RefValue) -> Self {
        self.values -= 1;
        self.bytes -= u128::from(bytes_of(value));
        self
    }

    /// Checks that `value` of `name` can be kept, too, and no other one is forgotten for it.
    ///
    /// # Errors
    /// Exhausted, if not.
    pub fn check(mut self, name: &Name, value: &RefValue) -> Result<()> {
        self.add(value);
        if !self.has_too_many() && !self.is_too_large() {
            return Ok(());
        }
        Err(Error::exhausted("replacing it would forget a kept value (a collect forgets those of 7 days; or use --forget)")
            .at(name)
            .expected(format!("at most {REMOVED_MAX} kept values, with chunks of {} TiB", REMOVED_BYTES_MAX >> 40))
            .got(format!("{}, with {} bytes", self.values, self.bytes))
            .help("find out what replaced so many names, and `undelete` what was not meant; then wait until `towline collect` \
                   forgets values after 7 days, or let `towline sync --forget` replace the name and forget values"))
    }

    fn add_bytes(&mut self, bytes: u64) {
        self.values += 1;
        self.bytes += u128::from(bytes);
    }

    fn has_too_many(&self) -> bool {
        self.values > REMOVED_MAX
    }

    /// False for a single one.
    fn is_too_large(&self) -> bool {
        self.bytes > u128::from(REMOVED_BYTES_MAX) && self.values > 1
    }
}

/// Values that share the quota. If there are too many, one goes at a time: of the first segment of names that has the most, below
/// it of the next segment that has the most, and so on; of the name that is reached, the oldest. If their bytes are too many, the
/// same by bytes, but the parent that is reached loses its oldest: that one of its names is large says nothing. Of parts that
/// have as much, those with the writer's own names come first, then that with the oldest value. So whoever replaces one name, or many
/// below a parent, cannot use up what is kept of the others.
#[derive(Clone, Debug, Default)]
pub(super) struct Quota<'a> {
    used: KeptUse,
    /// Name and bytes of each value.
    values: Vec<(&'a Name, u64)>,
}

impl<'a> Quota<'a> {
    /// Counts a value, at the place after those before; the latest comes first.
    pub(super) fn add(&mut self, name: &'a Name, bytes: u64) {
        self.used.add_bytes(bytes);
        self.values.push((name, bytes));
    }

    /// For each place, whether its value is one too many; one always stays.
    pub(super) fn beyond(mut self, own: impl Fn(&Name) -> bool) -> Vec<bool> {
        let mut beyond = vec![false; self.values.len()];
        self.shrink(&mut beyond, &own, KeptUse::has_too_many, |name, _| (name.as_str(), 1));
        self.shrink(&mut beyond, &own, KeptUse::is_too_large, |name, bytes| (parent(name), bytes.into()));
        beyond
    }

    /// Marks values in `beyond` while `is_beyond`, by the path and the weight of each that `weigh` tells.
    fn shrink(
        &mut self,
        beyond: &mut [bool],
        own: &impl Fn(&Name) -> bool,
        is_beyond: fn(&KeptUse) -> bool,
        weigh: fn(&Name, u64) -> (&str, u128),
    ) {
        if !is_beyond(&self.used) {
            return;
        }
        let left = self.values.iter().enumerate().zip(&*beyond).filter(|(_, beyond)| !**beyond);
        let weighed = left.map(|((place, (name, bytes)), _)| {
            let (path, weight) = weigh(name, *bytes);
            Weighed { path, own: own(name), place, weight, bytes: *bytes }
        });
        let mut values: Vec<Weighed<'_>> = weighed.collect();
        values.sort_unstable_by(|a, b| a.segments().cmp(b.segments()).then((a.own, a.place).cmp(&(b.own, b.place))));
        let mut all = Group { values: 0..values.len(), parts: BTreeMap::new() };
        while is_beyond(&self.used) {
            let Some(gone) = all.take(&values) else { break };
            if let Some(beyond) = beyond.get_mut(gone.place) {
                *beyond = true;
            }
            self.used.values -= 1;
            self.used.bytes -= u128::from(gone.bytes);
        }
    }
}

/// Name above `name`; for one segment, itself.
fn parent(name: &Name) -> &str {
    name.as_str().rsplit_once('/').map_or(name.as_str(), |(parent, _)| parent)
}

/// A value and what it counts for.
#[derive(Clone, Copy, Debug)]
struct Weighed<'a> {
    path: &'a str,
    own: bool,
    place: usize,
    weight: u128,
    bytes: u64,
}

impl<'a> Weighed<'a> {
    fn segments(&self) -> std::str::Split<'a, char> {
        self.path.split('/')
    }
}

/// Values below one path, as their range in the order of the paths. Each that is taken costs a look at few of them: anyone who
/// may write names may make as many as they like.
#[derive(Debug)]
struct Group {
    values: Range<usize>,
    /// Parts by the next segment, once they are needed: weight, whether some are the writer's own, and the place of the oldest. A
    /// part that has lost all is removed.
    parts: BTreeMap<(u128, bool, usize), Self>,
}

impl Group {
    /// Takes the next value to go.
    fn take<'v>(&mut self, all: &'v [Weighed<'v>]) -> Option<&'v Weighed<'v>> {
        if self.parts.is_empty() {
            self.split(all);
        }
        let Some(((weight, own, oldest), mut part)) = self.parts.pop_last() else {
            let last = all.get(self.values.clone())?.last()?;
            self.values.end -= 1;
            return Some(last);
        };
        let gone = part.take(all)?;
        if !part.values.is_empty() {
            self.parts.insert((weight - gone.weight, own, oldest), part);
        }
        if self.parts.is_empty() {
            self.values.end = self.values.start;
        }
        Some(gone)
    }

    /// Makes the parts, unless all have one path.
    fn split(&mut self, all: &[Weighed<'_>]) {
        let values = all.get(self.values.clone()).unwrap_or_default();
        let [first, .., last] = values else { return };
        if first.path == last.path {
            return;
        }
        let shared = first.segments().zip(last.segments()).take_while(|(a, b)| a == b).count();
        let mut start = self.values.start;
        for part in values.chunk_by(|a, b| a.segments().nth(shared) == b.segments().nth(shared)) {
            let weight = part.iter().map(|value| value.weight).sum();
            let own = part.iter().any(|value| value.own);
            let oldest = part.iter().map(|value| value.place).max().unwrap_or_default();
            let end = start + part.len();
            self.parts.insert((weight, own, oldest), Self { values: start..end, parts: BTreeMap::new() });
            start = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn beyond(values: &[(Name, u64)], own: impl Fn(&Name) -> bool) -> Vec<bool> {
        let mut quota = Quota::default();
        for (name, bytes) in values {
            quota.add(name, *bytes);
        }
        quota.beyond(own)
    }

    /// Place of the next value to go of those `left`, by its definition: each is a place, a path and a weight. At first there
    /// were those in `begun`.
    fn next<'a>(begun: &[(usize, &'a str, u128)], left: &[(usize, &'a str, u128)]) -> usize {
        let mut left = left.to_vec();
        let mut above: Vec<&str> = Vec::new();
        loop {
            let depth = above.len();
            // Weight and place of the oldest of each part.
            let mut parts: BTreeMap<Option<&str>, (u128, usize)> = BTreeMap::new();
            for (_, path, weight) in &left {
                parts.entry(path.split('/').nth(depth)).or_default().0 += weight;
            }
            for (place, path, _) in begun {
                let is_below = path.split('/').take(depth).eq(above.iter().copied());
                if is_below && let Some((_, oldest)) = parts.get_mut(&path.split('/').nth(depth)) {
                    *oldest = (*oldest).max(*place);
                }
            }
            let most = parts.into_iter().max_by_key(|(_, part)| *part).unwrap().0;
            left.retain(|(_, path, _)| path.split('/').nth(depth) == most);
            let Some(segment) = most else { return left.iter().map(|(place, ..)| *place).max().unwrap() };
            above.push(segment);
        }
    }

    /// [`Quota::beyond`] by its definition: each that goes is found by a look at all of them.
    fn beyond_by_definition(values: &[(Name, u64)]) -> Vec<bool> {
        let mut beyond = vec![false; values.len()];
        for by_number in [true, false] {
            let left = |beyond: &[bool]| -> Vec<(usize, &str, u128)> {
                let all = values.iter().enumerate().filter(|(place, _)| !beyond[*place]);
                let weighed = all.map(|(place, (name, bytes))| {
                    if by_number { (place, name.as_str(), 1) } else { (place, parent(name), u128::from(*bytes)) }
                });
                weighed.collect()
            };
            let begun = left(&beyond);
            loop {
                let left = left(&beyond);
                let bytes: u128 = left.iter().map(|(_, _, weight)| weight).sum();
                let is_within = if by_number {
                    left.len() <= REMOVED_MAX
                } else {
                    bytes <= u128::from(REMOVED_BYTES_MAX) || left.len() == 1
                };
                if is_within {
                    break;
                }
                beyond[next(&begun, &left)] = true;
            }
        }
        beyond
    }

    /// Values of few and of many names, at several depths.
    fn kept_values() -> impl Strategy<Value = Vec<(Name, u64)>> {
        let most = prop_oneof![Just(1), Just(REMOVED_BYTES_MAX / 1024), Just(REMOVED_BYTES_MAX / 64), Just(u64::MAX)];
        (1..2_000_u32, 0..1_300_usize, most).prop_flat_map(|(names, len, most)| {
            let number = prop_oneof![0..names, 0..1 + names / 100];
            let named = number.prop_map(|n| match n % 4 {
                0 => name(&format!("s{}", n % 5)),
                1 => name(&format!("s{}/x{n}", n % 5)),
                2 => name(&format!("s{}-1/x{n}", n % 3)),
                _ => name(&format!("s{}/x{}/y{n}/z", n % 5, n % 13)),
            });
            proptest::collection::vec((named, 0..most), len)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_quota_takes_the_values_that_its_definition_says(values in kept_values()) {
            prop_assert_eq!(beyond(&values, |_| true), beyond_by_definition(&values));
        }
    }

    /// Hours, if each value that goes costs a look at all segments.
    #[test]
    fn values_of_very_many_segments_are_dropped() {
        let count = 300_000;
        let values: Vec<_> = (0..count).map(|n| (name(&format!("s{n:06}/x")), 1)).collect();
        let last = (0..count).map(|place| place >= REMOVED_MAX).collect::<Vec<_>>();
        assert!(beyond(&values, |_| true) == last, "of those that have as much, the oldest goes first");
    }

    #[test]
    fn values_whose_bytes_exceed_the_greatest_number_are_counted() {
        let values = [("a", u64::MAX), ("b", u64::MAX), ("c", 1)].map(|(text, bytes)| (name(text), bytes));
        assert_eq!(beyond(&values, |_| true), [true, true, false]);
    }

    #[test]
    fn of_one_parent_the_writers_own_bytes_go_first() {
        let values = ["own-2", "other", "own-1"].map(|text| (name(&format!("a/{text}")), REMOVED_BYTES_MAX / 2));
        assert_eq!(beyond(&values, |_| true), [false, false, true]);
        let own = |name: &Name| name.as_str() != "a/other";
        assert_eq!(beyond(&[values[0].clone(), values[2].clone(), values[1].clone()], own), [false, true, false]);
    }
}
