//! Outcomes of transfers: how long they took, beside what a hint would have said. They correct the times of hints.

use std::collections::VecDeque;

/// Outcomes that are remembered of a link.
const REMEMBERED: usize = 64;
/// Latest outcomes whose median is the overhead.
const LATEST: usize = 16;
/// Fewest outcomes that tell an overhead.
const CORRECTS: usize = 3;
/// Fewest outcomes whose own quantile is the spread.
const SPREADS: usize = 8;

/// Outcomes of one link, the latest last.
#[derive(Debug, Default)]
pub(super) struct Outcomes(VecDeque<Outcome>);

/// Outcome of one transfer.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// Seconds in which the link was not busy, such as those to open a tree: they do not grow with the bytes.
    overhead: f64,
    /// ln of the time that it took over the median that a hint would have said.
    error: f64,
    /// True if it took at most the 90th percentile that a hint would have said.
    covered: bool,
    /// True if the prediction had an overhead.
    corrected: bool,
}

/// Prediction for a transfer, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prediction {
    /// Median.
    pub(super) median: f64,
    /// 90th percentile.
    pub(super) p90: f64,
}

impl Outcomes {
    /// Adds a transfer that took `seconds`, of which the link was busy for `busy`.
    pub(super) fn add(&mut self, predicted: Prediction, seconds: f64, busy: f64) {
        let ratio = |of: f64| (seconds.max(1e-9) / of.max(1e-9)).ln();
        let corrected = self.0.len() >= CORRECTS;
        if self.0.len() >= REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(Outcome {
            overhead: (seconds - busy).max(0.0),
            error: ratio(predicted.median),
            covered: seconds <= predicted.p90,
            corrected,
        });
    }

    /// Number of outcomes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Seconds that a transfer takes beside the time of its bytes, at the median; 0 before there are several outcomes.
    pub(super) fn overhead(&self) -> f64 {
        if self.0.len() < CORRECTS {
            return 0.0;
        }
        quantile(self.0.iter().rev().take(LATEST).map(|outcome| outcome.overhead).collect(), 0.5)
    }

    /// 90th percentile of the time over its median, by the outcomes themselves; none before there are enough.
    pub(super) fn spread(&self) -> Option<f64> {
        let errors: Vec<f64> = self.0.iter().filter(|outcome| outcome.corrected).map(|outcome| outcome.error).collect();
        (errors.len() >= SPREADS).then(|| quantile(errors, 0.9).max(0.0).exp())
    }

    /// Median of the relative errors of the medians that a hint would have said; 0 without outcomes.
    pub(super) fn median_error(&self) -> f64 {
        // The time that was said, over the one that it took, less 1.
        quantile(self.0.iter().map(|outcome| ((-outcome.error).exp() - 1.0).abs()).collect(), 0.5)
    }

    /// Number of outcomes within the 90th percentile.
    pub(super) fn covered(&self) -> usize {
        self.0.iter().filter(|outcome| outcome.covered).count()
    }
}

/// The quantile of `values`, between the nearest two; 0 of none.
fn quantile(mut values: Vec<f64>, of: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return 0.0 };
    let place = of * last as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the last place")]
    let below = place.floor() as usize;
    let (low, high) = (values[below.min(last)], values[(below + 1).min(last)]);
    low + (high - low) * (place - place.floor())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(median: f64) -> Prediction {
        Prediction { median, p90: median * 1.2 }
    }

    #[test]
    fn an_overhead_is_known_once_it_was_seen_thrice() {
        let mut outcomes = Outcomes::default();
        outcomes.add(said(10.0), 12.5, 10.0);
        outcomes.add(said(10.0), 12.5, 10.0);
        assert!(outcomes.overhead().abs() < 1e-9 && outcomes.covered() == 0);
        outcomes.add(said(10.0), 12.5, 10.0);
        assert!((outcomes.overhead() - 2.5).abs() < 1e-9);
        assert!((outcomes.median_error() - 0.2).abs() < 1e-9);
        // Corrected hints are right from then on; a link that gets slower is no overhead.
        (0..4).for_each(|_| outcomes.add(said(12.5), 12.5, 10.0));
        outcomes.add(said(12.5), 22.5, 20.0);
        assert!((outcomes.overhead() - 2.5).abs() < 1e-9);
        assert_eq!((outcomes.len(), outcomes.covered()), (8, 4));
        assert!(outcomes.spread().is_none());
    }

    #[test]
    fn the_spread_is_the_quantile_of_what_happened() {
        // Of one in this many transfers that takes twice as long, the spread tells if it is more than one in ten.
        for (one_in, spread) in [(16, 1.0..1.01), (5, 1.99..2.01)] {
            let mut outcomes = Outcomes::default();
            for n in 0..160 {
                outcomes.add(said(10.0), if n % one_in == one_in - 1 { 20.0 } else { 10.0 }, 10.0);
            }
            assert_eq!(outcomes.len(), REMEMBERED);
            let found = outcomes.spread().unwrap();
            assert!(spread.contains(&found), "{one_in}: {found}");
        }
    }

    #[test]
    fn quantiles_lie_between_values() {
        assert!((quantile(vec![4.0, 1.0, 2.0], 0.5) - 2.0).abs() < 1e-9);
        assert!((quantile(vec![1.0, 2.0], 0.9) - 1.9).abs() < 1e-9);
        assert!(quantile(Vec::new(), 0.5).abs() < 1e-9);
    }
}
