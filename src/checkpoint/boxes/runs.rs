//! Bytes that a part and a box share, as runs that are contiguous in both. Runs are computed, not stored.

use std::ops::Range;

use super::TensorBox;

/// Bytes that are contiguous both in the file of a part and in the requested box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Range in the file.
    pub source: Range<u64>,
    /// Offset of the first one in the requested box.
    pub target: u64,
}

/// Runs of one part, in order of source and target. Each run is computed from its number, so memory does not grow with their
/// number, and the runs in any chunk can be found on any thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Dimensions along which there is more than one run, innermost first.
    steps: Vec<Step>,
    source: u64,
    target: u64,
    /// Bytes in each run.
    len: u64,
    count: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    count: u64,
    source: u64,
    target: u64,
}

impl Runs {
    /// Runs of the box `common` from `part` to `wanted`; both are row-major and contain `common`. The elements of `part`, of
    /// `element` bytes, start at byte `start` of a file. All lengths in bytes fit 64 bits.
    #[must_use]
    pub fn new(common: &TensorBox, part: &TensorBox, wanted: &TensorBox, element: u64, start: u64) -> Self {
        let mut runs = Self { steps: Vec::new(), source: start, target: 0, len: element, count: 1 };
        if common.is_empty() {
            return Self { len: 0, count: 0, ..runs };
        }
        let (mut source_step, mut target_step, mut together) = (element, element, true);
        for ((common, part), wanted) in common.dimensions().zip(part.dimensions()).zip(wanted.dimensions()).rev() {
            let (from, len) = common;
            runs.source += (from - part.0) * source_step;
            runs.target += (from - wanted.0) * target_step;
            if together {
                runs.len *= len;
                together = len == part.1 && len == wanted.1;
            } else if len > 1 {
                runs.steps.push(Step { count: len, source: source_step, target: target_step });
                runs.count *= len;
            }
            source_step *= part.1;
            target_step *= wanted.1;
        }
        runs
    }

    /// One run of `len` bytes from byte `start` of a file on.
    #[must_use]
    pub fn plain(start: u64, len: u64) -> Self {
        Self { steps: Vec::new(), source: start, target: 0, len, count: u64::from(len > 0) }
    }

    /// Number of runs.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Range from the first byte in the file to the last.
    #[must_use]
    pub fn span(&self) -> Range<u64> {
        if self.count == 0 { self.source..self.source } else { self.source..self.run(self.count - 1).source.end }
    }

    /// Runs cut to the bytes `range` of the file, in order.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let clip = move |run: Run| {
            let (from, to) = (run.source.start.max(range.start), run.source.end.min(range.end));
            let target = run.target + from.saturating_sub(run.source.start);
            (from < to).then_some(Run { source: from..to, target })
        };
        (self.first_after(range.start)..self.count).map(|number| self.run(number)).map_while(clip)
    }

    /// Bytes of the runs within the bytes `range` of the file. There may be very many runs: it takes a search, not a pass.
    #[must_use]
    pub fn bytes_within(&self, range: Range<u64>) -> u64 {
        self.bytes_before(range.end).saturating_sub(self.bytes_before(range.start))
    }

    /// Bytes of the runs before the byte `at` of the file.
    fn bytes_before(&self, at: u64) -> u64 {
        let whole = self.first_after(at);
        let begun = if whole < self.count { at.saturating_sub(self.run(whole).source.start) } else { 0 };
        whole.saturating_mul(self.len).saturating_add(begun)
    }

    /// The number of the first run that ends after the byte `at` of the file.
    fn first_after(&self, at: u64) -> u64 {
        let (mut from, mut to) = (0, self.count);
        while from < to {
            let middle = from + (to - from) / 2;
            if self.run(middle).source.end <= at {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        from
    }

    fn run(&self, mut number: u64) -> Run {
        let (mut source, mut target) = (self.source, self.target);
        for step in &self.steps {
            let at = number % step.count;
            number /= step.count;
            source += at * step.source;
            target += at * step.target;
        }
        Run { source: source..source + self.len, target }
    }
}
