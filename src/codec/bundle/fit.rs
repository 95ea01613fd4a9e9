//! Fits the coefficients of a prediction to a sample of the numbers. Only the stored numbers are used, no settings of the
//! optimizer.

use super::predict::{Kind, Numbers, Rule};
use super::{FIRST_MOMENTS, Members, SECOND_MOMENTS, WEIGHTS};

/// Numbers in a sample, and how many of them stand side by side.
const SAMPLE: usize = 8192;
const RUN: usize = 64;
/// Minimum numbers in a sample of a tensor that has more, and the share (one part in this many) of longer ones: the time of a fit is
/// in proportion to its bytes.
const SAMPLE_LEAST: usize = 1024;
const SAMPLE_SHARE: usize = 4;
/// Numbers by which mixes of Lion are compared first, and the mixes that are compared by the sample.
const LION_SAMPLE: usize = 512;
const LION_MIXES: usize = 6;
/// Minimum numbers for a fit.
const SAMPLE_MIN: usize = 64;
/// Minimum gain of a prediction over the numbers of the step before: one bit for so many numbers.
const GAIN: u64 = 20;
/// Iterations of the fit of `eps`, which is not linear.
const ROUNDS: usize = 4;
/// Usual value of `eps`.
const EPS: f64 = 1e-8;
/// Pairs of betas that are usual, as `torch.optim` and papers have them.
const BETAS: [(f64, f64); 6] = [(0.9, 0.999), (0.9, 0.95), (0.9, 0.99), (0.9, 0.98), (0.95, 0.999), (0.8, 0.99)];

/// A sample of the numbers with what they became.
struct Sample(Vec<(Numbers, f32)>);

/// Best rule for the numbers of `member`; None if none gains enough.
pub(super) fn rule(member: usize, now: &Members<'_>, before: &Members<'_>) -> Option<Rule> {
    let sample = Sample::of(member, now, before)?;
    let rules = match member {
        SECOND_MOMENTS => second_moments(&sample),
        WEIGHTS if now.second_moments.is_some() => adam(&sample),
        WEIGHTS => [momentum(&sample), lion(&sample)].concat(),
        _ => Vec::new(),
    };
    sample.best(member, rules)
}

impl Sample {
    fn of(member: usize, now: &Members<'_>, before: &Members<'_>) -> Option<Self> {
        let numbers = |bytes: Option<&[u8]>, at: usize| {
            let number = bytes.and_then(|bytes| bytes.as_chunks::<4>().0.get(at));
            number.map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
        };
        let count = now.get(member)?.len() / 4;
        let wanted = (count / SAMPLE_SHARE).clamp(SAMPLE_LEAST, SAMPLE);
        let runs = (wanted / RUN).min(count / RUN).max(1);
        let stride = (count / runs).max(1);
        let places = (0..runs).flat_map(|run| run * stride..(run * stride + RUN).min(count));
        let sample = places.map(|at| {
            let numbers_at = Numbers {
                weight: numbers(Some(before.weights), at),
                first_moment: numbers(before.get(FIRST_MOMENTS), at),
                second_moment: numbers(before.second_moments, at),
                next_first_moment: numbers(now.get(FIRST_MOMENTS), at),
                next_second_moment: numbers(now.second_moments, at),
            };
            (numbers_at, numbers(now.get(member), at))
        });
        let sample: Vec<_> = sample.collect();
        (sample.len() >= SAMPLE_MIN).then_some(Self(sample))
    }

    /// At most `count` of its numbers.
    fn thinned(&self, count: usize) -> Self {
        Self(self.0.iter().step_by(self.0.len().div_ceil(count).max(1)).copied().collect())
    }

    /// The rule that leaves the fewest bits; none if none saves some.
    fn best(&self, member: usize, rules: Vec<Rule>) -> Option<Rule> {
        let before = |numbers: &Numbers| if member == SECOND_MOMENTS { numbers.second_moment } else { numbers.weight };
        let least = |rule: Rule| (self.bits(|numbers| rule.predict_one(numbers)), rule);
        let (bits, rule) = rules.into_iter().map(least).min_by_key(|(bits, _)| *bits)?;
        (bits + self.0.len() as u64 / GAIN < self.bits(before)).then_some(rule)
    }

    /// Bits in the differences of all numbers to their predictions.
    fn bits(&self, predict: impl Fn(&Numbers) -> f32) -> u64 {
        let distance = |(numbers, became): &(Numbers, f32)| ordered(predict(numbers)).abs_diff(ordered(*became));
        self.0.iter().map(|pair| u64::from(u32::BITS - distance(pair).leading_zeros())).sum()
    }

    /// Least-squares fit: coefficients of the columns whose sum is nearest to the last value of each row. Skips rows that are not
    /// finite.
    fn solve<const N: usize>(&self, row: impl Fn(&Numbers, f64) -> ([f64; N], f64)) -> Option<[f64; N]> {
        let (mut left, mut right) = ([[0.0; N]; N], [0.0; N]);
        for (numbers, became) in &self.0 {
            let (columns, wanted) = row(numbers, f64::from(*became));
            if !wanted.is_finite() || columns.iter().any(|column| !column.is_finite()) {
                continue;
            }
            for (at, column) in columns.iter().enumerate() {
                right[at] += column * wanted;
                left[at].iter_mut().zip(columns).for_each(|(sum, other)| *sum += column * other);
            }
        }
        eliminate(left, right)
    }
}

/// Solves a system of linear equations; none if it is singular.
fn eliminate<const N: usize>(mut left: [[f64; N]; N], mut right: [f64; N]) -> Option<[f64; N]> {
    for at in 0..N {
        let pivot = (at..N).max_by(|&a, &b| left[a][at].abs().total_cmp(&left[b][at].abs()))?;
        left.swap(at, pivot);
        right.swap(at, pivot);
        if left[at][at].abs() < f64::MIN_POSITIVE {
            return None;
        }
        for below in at + 1..N {
            let factor = left[below][at] / left[at][at];
            let above = left[at];
            left[below].iter_mut().zip(above).for_each(|(value, above)| *value -= factor * above);
            right[below] -= factor * right[at];
        }
    }
    for at in (0..N).rev() {
        let known: f64 = (at + 1..N).map(|after| left[at][after] * right[after]).sum();
        right[at] = (right[at] - known) / left[at][at];
    }
    right.iter().all(|value| value.is_finite()).then_some(right)
}

/// `v' = b2 v + (1 - b2) g^2` and `m' = b1 m + (1 - b1) g`: the betas follow from four sums of products.
fn second_moments(sample: &Sample) -> Vec<Rule> {
    let solved = sample.solve(|of, became| {
        let (v, m, next) = (f64::from(of.second_moment), f64::from(of.first_moment), f64::from(of.next_first_moment));
        // Each number counts the same, whatever its magnitude.
        ([v, next * next, next * m, m * m].map(|column| column / became), 1.0)
    });
    let kind = Kind::SecondMoments;
    let (mut betas, mut rules) = (BETAS.to_vec(), Vec::new());
    if let Some([kept, gain, mixed, _]) = solved {
        let first = -mixed / gain / 2.0;
        betas.push((first, kept));
        betas.push((rounded(first, 1e3), rounded(kept, 1e4)));
        betas.push((rounded(first, 1e2), rounded(kept, 1e3)));
        // Unrounded coefficients, which also fit several steps in between.
        let scale = 1.0 / (1.0 - first);
        rules.push(Rule { kind, coefficients: [kept, scale, gain / (scale * scale)] });
    }
    let usable = |&(first, second): &(f64, f64)| (0.0..1.0).contains(&first) && (0.0..1.0).contains(&second);
    let rule =
        |(first, second): (f64, f64)| Rule { kind, coefficients: [nearest(second), 1.0 / (1.0 - first), 1.0 - second] };
    rules.extend(betas.into_iter().filter(usable).map(rule));
    rules
}

/// `w' = a w - k m' / (sqrt(v') + e)`.
fn adam(sample: &Sample) -> Vec<Rule> {
    let (mut eps, mut rules) = (EPS, Vec::new());
    for round in 0..ROUNDS {
        let step = |of: &Numbers| {
            let root = f64::from(of.next_second_moment).sqrt() + eps;
            (f64::from(of.next_first_moment), root)
        };
        let linear = sample.solve(|of, became| {
            let (weight, (m, root)) = (f64::from(of.weight), step(of));
            ([weight, -m / root], became - weight)
        });
        let Some([decay, rate]) = linear else { break };
        rules.extend(weights(Kind::Adam, decay, [rate, eps]));
        if round == 0 {
            rules.extend(weights(Kind::Adam, decay, [rate, 0.0]));
        }
        // A step of Newton's method towards `eps`.
        let moved = sample.solve(|of, became| {
            let (weight, (m, root)) = (f64::from(of.weight), step(of));
            ([weight, -m / root, rate * m / (root * root)], became - weight)
        });
        let Some([.., more]) = moved else { break };
        eps = (eps + more).max(0.0);
    }
    rules
}

/// `w' = a w - k m' - j m`, which is Nesterov's form, too.
fn momentum(sample: &Sample) -> Vec<Rule> {
    let plain = sample.solve(|of, became| {
        let weight = f64::from(of.weight);
        ([weight, -f64::from(of.next_first_moment)], became - weight)
    });
    let nesterov = sample.solve(|of, became| {
        let weight = f64::from(of.weight);
        ([weight, -f64::from(of.next_first_moment), -f64::from(of.first_moment)], became - weight)
    });
    let plain = plain.map(|[decay, rate]| weights(Kind::Momentum, decay, [rate, 0.0]));
    let nesterov = nesterov.map(|[decay, rate, before]| weights(Kind::Momentum, decay, [rate, before]));
    [plain.unwrap_or_default(), nesterov.unwrap_or_default()].concat()
}

/// `w' = a w - k sign(m' - r m)`, where `r = (b2 - b1) / (1 - b1)`.
fn lion(sample: &Sample) -> Vec<Rule> {
    let few = sample.thinned(LION_SAMPLE);
    let bits = |rules: &[Rule]| rules.iter().map(|rule| few.bits(|numbers| rule.predict_one(numbers))).min();
    let mixes = (0..100u8).map(|hundredths| f64::from(hundredths) / 100.0);
    let mut best: Vec<(u64, f64)> = mixes.filter_map(|mix| Some((bits(&lion_of(&few, mix))?, mix))).collect();
    best.sort_by_key(|(bits, _)| *bits);
    best.iter().take(LION_MIXES).flat_map(|(_, mix)| lion_of(sample, *mix)).collect()
}

/// Rules of Lion with the mix `r`.
fn lion_of(sample: &Sample, mix: f64) -> Vec<Rule> {
    let sign = |of: &Numbers| {
        let direction = f64::from(of.next_first_moment) - mix * f64::from(of.first_moment);
        f64::from(i8::from(direction > 0.0) - i8::from(direction < 0.0))
    };
    let solved = sample.solve(|of, became| {
        let weight = f64::from(of.weight);
        ([weight, -sign(of)], became - weight)
    });
    solved.map(|[decay, rate]| weights(Kind::Lion, decay, [rate, mix])).unwrap_or_default()
}

/// Rules for weights that shrink by `decay`: torch multiplies by a 32-bit number, others may not.
fn weights(kind: Kind, decay: f64, [rate, other]: [f64; 2]) -> Vec<Rule> {
    let mut kept = vec![nearest(1.0 + decay), 1.0 + decay, 1.0];
    kept.dedup();
    kept.into_iter().map(|kept| Rule { kind, coefficients: [kept, rate, other] }).collect()
}

/// The nearest multiple of `1 / parts`.
fn rounded(number: f64, parts: f64) -> f64 {
    (number * parts).round() / parts
}

/// The nearest 32-bit number.
#[expect(clippy::cast_possible_truncation, reason = "rounded to the nearest")]
fn nearest(number: f64) -> f64 {
    f64::from(number as f32)
}

/// Integers in the order of the floats.
#[expect(clippy::cast_possible_wrap, reason = "bits, seen with a sign")]
fn ordered(number: f32) -> i32 {
    let bits = number.to_bits() as i32;
    if bits < 0 { bits ^ i32::MAX } else { bits }
}
