//! Predictions: what an optimizer makes of its state, up to the rounding of its own arithmetic.
//!
//! ```text
//! rule (1)
//! coefficients: three 64-bit floats, little-endian
//! ```
//!
//! | rule | predicts | from |
//! | --- | --- | --- |
//! | 1 | second moments | `f32(v * c0) + c2 g^2`, where `g = m + (m' - m) c1` |
//! | 2 | weights (Adam, `AdamW`) | `f32(w * c0) - c1 m' / (sqrt(v') + c2)` |
//! | 3 | weights (SGD with momentum) | `f32(w * c0) - c1 m' - c2 m` |
//! | 4 | weights (Lion) | `f32(w * c0) - c1 sign(m' - c2 m)` |
//!
//! `w`, `m` and `v` are the weights and moments of the step before, those with a prime (') are this step's. All is computed in 64-bit
//! floats, in this order, and rounded to 32 bits at the end and where `f32` says so; NaN becomes 0. Only additions,
//! subtractions, multiplications, divisions and square roots are used, which IEEE 754 defines to the last bit, so that every
//! processor computes the same.

use super::{FIRST_MOMENTS, Members, SECOND_MOMENTS, WEIGHTS};

/// Bytes of a rule with its coefficients.
pub(super) const RULE_LEN: usize = 25;

/// Rule of a prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    SecondMoments = 1,
    Adam = 2,
    Momentum = 3,
    Lion = 4,
}

/// Rule with its coefficients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rule {
    pub(super) kind: Kind,
    pub(super) coefficients: [f64; 3],
}

impl Rule {
    pub(super) fn from_bytes(bytes: &[u8; RULE_LEN]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let kind = match kind {
            1 => Kind::SecondMoments,
            2 => Kind::Adam,
            3 => Kind::Momentum,
            4 => Kind::Lion,
            _ => return None,
        };
        let mut coefficients = [0.0; 3];
        for (coefficient, bytes) in coefficients.iter_mut().zip(rest.as_chunks::<8>().0) {
            *coefficient = f64::from_le_bytes(*bytes);
        }
        Some(Self { kind, coefficients })
    }

    pub(super) fn to_bytes(self) -> [u8; RULE_LEN] {
        let mut bytes = [0; RULE_LEN];
        bytes[0] = self.kind as u8;
        for (slot, coefficient) in bytes[1..].as_chunks_mut::<8>().0.iter_mut().zip(self.coefficients) {
            *slot = coefficient.to_le_bytes();
        }
        bytes
    }

    /// Member that it predicts.
    pub(super) const fn member(&self) -> usize {
        match self.kind {
            Kind::SecondMoments => SECOND_MOMENTS,
            Kind::Adam | Kind::Momentum | Kind::Lion => WEIGHTS,
        }
    }
}

/// One number of each member: those of the step before, and of this step as far as the rule needs them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Numbers {
    pub(super) weight: f32,
    pub(super) first_moment: f32,
    pub(super) second_moment: f32,
    pub(super) next_first_moment: f32,
    pub(super) next_second_moment: f32,
}

/// Fills `out` with the predicted numbers. Of `now` only the moments are read. None if the rule does not fit the members.
pub(super) fn predict(rule: &Rule, now: &Members<'_>, before: &Members<'_>, out: &mut [u8]) -> Option<()> {
    let [c0, c1, c2] = rule.coefficients;
    let (m, next_m) = (before.get(FIRST_MOMENTS)?, now.get(FIRST_MOMENTS)?);
    match rule.kind {
        Kind::SecondMoments => {
            let v = before.get(SECOND_MOMENTS)?;
            fill(out, [v, m, next_m], |[v, m, next_m]| second_moment([c0, c1, c2], v, m, next_m))
        }
        Kind::Adam => {
            let (w, next_v) = (before.weights, now.get(SECOND_MOMENTS)?);
            fill(out, [w, next_m, next_v], |[w, m, v]| adam([c0, c1, c2], w, m, v))
        }
        Kind::Momentum => fill(out, [before.weights, m, next_m], |[w, m, next_m]| momentum([c0, c1, c2], w, m, next_m)),
        Kind::Lion => fill(out, [before.weights, m, next_m], |[w, m, next_m]| lion([c0, c1, c2], w, m, next_m)),
    }
}

impl Rule {
    /// Prediction from `numbers`.
    pub(super) fn predict_one(&self, numbers: &Numbers) -> f32 {
        let Numbers { weight: w, first_moment: m, second_moment: v, .. } = *numbers;
        let (next_m, next_v) = (numbers.next_first_moment, numbers.next_second_moment);
        match self.kind {
            Kind::SecondMoments => second_moment(self.coefficients, v, m, next_m),
            Kind::Adam => adam(self.coefficients, w, next_m, next_v),
            Kind::Momentum => momentum(self.coefficients, w, m, next_m),
            Kind::Lion => lion(self.coefficients, w, m, next_m),
        }
    }
}

/// Applies `of` to the numbers at each place of three members; none if the members have other lengths than `out`.
fn fill(out: &mut [u8], members: [&[u8]; 3], of: impl Fn([f32; 3]) -> f32) -> Option<()> {
    let [a, b, c] = members.map(|member| member.as_chunks::<4>().0);
    let out = out.as_chunks_mut::<4>().0;
    if [a.len(), b.len(), c.len()] != [out.len(); 3] {
        return None;
    }
    for (((out, a), b), c) in out.iter_mut().zip(a).zip(b).zip(c) {
        let number = of([f32::from_le_bytes(*a), f32::from_le_bytes(*b), f32::from_le_bytes(*c)]);
        *out = if number.is_nan() { [0; 4] } else { number.to_le_bytes() };
    }
    Some(())
}

fn second_moment([c0, c1, c2]: [f64; 3], v: f32, m: f32, next_m: f32) -> f32 {
    let gradient = f64::from(m) + (f64::from(next_m) - f64::from(m)) * c1;
    narrow(scaled(v, c0) + c2 * (gradient * gradient))
}

fn adam([c0, c1, c2]: [f64; 3], w: f32, next_m: f32, next_v: f32) -> f32 {
    narrow(scaled(w, c0) - c1 * f64::from(next_m) / (f64::from(next_v).sqrt() + c2))
}

fn momentum([c0, c1, c2]: [f64; 3], w: f32, m: f32, next_m: f32) -> f32 {
    narrow(scaled(w, c0) - c1 * f64::from(next_m) - c2 * f64::from(m))
}

fn lion([c0, c1, c2]: [f64; 3], w: f32, m: f32, next_m: f32) -> f32 {
    let direction = f64::from(next_m) - c2 * f64::from(m);
    let sign = f64::from(i8::from(direction > 0.0) - i8::from(direction < 0.0));
    narrow(scaled(w, c0) - c1 * sign)
}

/// `number` times `by`, rounded to 32 bits.
fn scaled(number: f32, by: f64) -> f64 {
    f64::from(narrow(f64::from(number) * by))
}

#[expect(clippy::cast_possible_truncation, reason = "rounded to the nearest, as the optimizer does")]
fn narrow(number: f64) -> f32 {
    number as f32
}
