//! Bitmap of the used units of one slab, with a bound for the longest free run.

/// One slab.
#[derive(Clone, Debug)]
pub(super) struct Bits {
    /// A set bit is a used unit; bits after the end are set, too.
    words: Vec<u64>,
    units: u32,
    free: u32,
    /// Upper bound for the length of a free run.
    longest: u32,
    /// Lower bound for the first free unit.
    lowest: u32,
}

impl Bits {
    /// A slab of `units` free units.
    pub(super) fn new(units: u32) -> Self {
        let mut words = vec![0; units.div_ceil(64) as usize];
        if let Some(last) = words.last_mut().filter(|_| !units.is_multiple_of(64)) {
            *last = !0 << (units % 64);
        }
        Self { words, units, free: units, longest: units, lowest: 0 }
    }

    /// Units that are free.
    pub(super) fn free(&self) -> u32 {
        self.free
    }

    /// Units in all.
    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// Upper bound for the length of a free run; exact after a failed search.
    pub(super) fn longest(&self) -> u32 {
        self.longest
    }

    /// Takes the first `n` free units in a row.
    pub(super) fn take(&mut self, n: u32) -> Option<u32> {
        self.lowest = self.next_free(self.lowest);
        match self.find(n) {
            Ok(at) => {
                self.set(at, n);
                Some(at)
            }
            Err(longest) => {
                self.longest = longest;
                None
            }
        }
    }

    /// Takes exactly these units if all are free; else returns false and takes none.
    pub(super) fn mark(&mut self, at: u32, n: u32) -> bool {
        let fits = at.checked_add(n).is_some_and(|end| end <= self.units);
        let free = fits && self.next_taken(at, at + n) == at + n;
        if free {
            self.set(at, n);
        }
        free
    }

    /// Frees units.
    pub(super) fn give(&mut self, at: u32, n: u32) {
        self.change(at, n, |word, mask| *word &= !mask);
        self.free += n;
        self.lowest = self.lowest.min(at);
        let run = self.next_taken(at, self.units) - self.last_taken(at);
        self.longest = self.longest.max(run);
    }

    fn set(&mut self, at: u32, n: u32) {
        self.change(at, n, |word, mask| *word |= mask);
        self.free -= n;
    }

    fn change(&mut self, at: u32, n: u32, change: impl Fn(&mut u64, u64)) {
        let (mut at, end) = (at, at + n);
        while at < end {
            let bit = at % 64;
            let here = (64 - bit).min(end - at);
            let mask = (!0 >> (64 - here)) << bit;
            change(&mut self.words[(at / 64) as usize], mask);
            at += here;
        }
    }

    /// First run of `n` free units, or else the length of the longest run.
    fn find(&self, n: u32) -> Result<u32, u32> {
        let (mut longest, mut at) = (0, self.lowest);
        while at < self.units {
            let end = self.next_taken(at, at.saturating_add(n).min(self.units));
            if end - at >= n {
                return Ok(at);
            }
            longest = longest.max(end - at);
            at = self.next_free(end);
        }
        Err(longest)
    }

    /// The first free unit from `at` on, or the end.
    fn next_free(&self, at: u32) -> u32 {
        self.next(at, self.units, |word| !word)
    }

    /// The first taken unit from `at` on, or `end`.
    fn next_taken(&self, at: u32, end: u32) -> u32 {
        self.next(at, end, |word| word)
    }

    fn next(&self, at: u32, end: u32, wanted: impl Fn(u64) -> u64) -> u32 {
        let mut mask = !0 << (at % 64);
        for index in at / 64..end.div_ceil(64) {
            let word = wanted(self.words[index as usize]) & mask;
            if word != 0 {
                return (index * 64 + word.trailing_zeros()).min(end);
            }
            mask = !0;
        }
        end
    }

    /// Unit after the last used one before `at`, or the start.
    fn last_taken(&self, at: u32) -> u32 {
        let mut mask = (1 << (at % 64)) - 1;
        for index in (0..=at / 64).rev() {
            let word = self.words[index as usize] & mask;
            if word != 0 {
                return index * 64 + 64 - word.leading_zeros();
            }
            mask = !0;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_agrees_with_a_list_of_flags(
            units in 1u32..300,
            steps in proptest::collection::vec((any::<bool>(), 0u32..300, 1u32..90), 1..200),
        ) {
            let mut bits = Bits::new(units);
            let mut model = vec![false; units as usize];
            let mut given: Vec<(u32, u32)> = Vec::new();
            for (take, at, n) in steps {
                if take {
                    let run = |at: usize| model[at..].iter().take_while(|taken| !**taken).count();
                    let expected = (0..units).find(|at| run(*at as usize) >= n as usize);
                    prop_assert!(expected.is_none() || bits.longest() >= n);
                    let got = bits.take(n);
                    prop_assert_eq!(got, expected);
                    if let Some(at) = got {
                        model[at as usize..(at + n) as usize].fill(true);
                        given.push((at, n));
                    }
                } else if !given.is_empty() {
                    let (at, n) = given.swap_remove(at as usize % given.len());
                    model[at as usize..(at + n) as usize].fill(false);
                    bits.give(at, n);
                } else {
                    let free = (at + n) <= units && model[at as usize..(at + n) as usize].iter().all(|taken| !taken);
                    prop_assert_eq!(bits.mark(at, n), free);
                    if free {
                        model[at as usize..(at + n) as usize].fill(true);
                        given.push((at, n));
                    }
                }
                prop_assert_eq!(bits.free() as usize, model.iter().filter(|taken| !**taken).count());
            }
        }
    }
}
