//! Bundles of simulated optimizers: what is predicted, what is not, and what is refused.

use proptest::prelude::*;

use super::predict::Kind;
use super::*;

/// State of an optimizer.
#[derive(Clone, Debug)]
pub(crate) struct State {
    weights: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    steps: i32,
}

/// Numbers that look random, between -1 and 1.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; count * 4];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    let unit = |bytes: &[u8; 4]| (u32::from_le_bytes(*bytes) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    bytes.as_chunks::<4>().0.iter().map(unit).collect()
}

impl State {
    pub(crate) fn new(count: usize) -> Self {
        let weights = noise(0, count).iter().map(|x| x * 0.05).collect();
        Self { weights, first: vec![0.0; count], second: vec![0.0; count], steps: 0 }
    }

    fn gradients(&self) -> Vec<f32> {
        let seed = u64::try_from(self.steps).unwrap();
        let scale = |(at, x): (usize, f32)| x * x * x * 1e-2 / (1.0 + (at % 97) as f32);
        noise(1 + seed, self.weights.len()).into_iter().enumerate().map(scale).collect()
    }

    /// As `torch.optim.AdamW` computes it for one tensor on a processor, in 32 bits.
    #[expect(clippy::cast_possible_truncation, reason = "torch rounds its coefficients to the nearest")]
    pub(crate) fn adamw(&mut self, rate: f64, decay: f64) {
        let (b1, b2) = (0.9f64, 0.999f64);
        let gradients = self.gradients();
        self.steps += 1;
        let (c1, c2) = (1.0 - b1.powi(self.steps), (1.0 - b2.powi(self.steps)).sqrt());
        for (at, g) in gradients.into_iter().enumerate() {
            let (w, m, v) = (&mut self.weights[at], &mut self.first[at], &mut self.second[at]);
            *w *= (1.0 - rate * decay) as f32;
            *m += (1.0 - b1) as f32 * (g - *m);
            *v = *v * b2 as f32 + (1.0 - b2) as f32 * g * g;
            let denominator = v.sqrt() / c2 as f32 + 1e-8;
            *w += -(rate / c1) as f32 * (*m / denominator);
        }
    }

    /// As `torch.optim.SGD`.
    fn sgd(&mut self, rate: f32, nesterov: bool) {
        let gradients = self.gradients();
        self.steps += 1;
        for (at, g) in gradients.into_iter().enumerate() {
            let (w, m) = (&mut self.weights[at], &mut self.first[at]);
            let g = g + 1e-4 * *w;
            *m = 0.9 * *m + g;
            *w -= rate * if nesterov { g + 0.9 * *m } else { *m };
        }
    }

    /// As in the paper (<https://arxiv.org/abs/2302.06675>).
    fn lion(&mut self, rate: f32) {
        let gradients = self.gradients();
        self.steps += 1;
        for (at, g) in gradients.into_iter().enumerate() {
            let (w, m) = (&mut self.weights[at], &mut self.first[at]);
            let direction = 0.9 * *m + 0.1 * g;
            *w = *w * (1.0 - rate * 0.1) - rate * if direction > 0.0 { 1.0 } else { -1.0 };
            *m = 0.99 * *m + 0.01 * g;
        }
    }

    pub(crate) fn members(&self) -> [Vec<u8>; 3] {
        [&self.weights, &self.first, &self.second].map(|of| of.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn plain(&self, count: usize) -> Vec<u8> {
        self.members()[..count].concat()
    }
}

/// Lengths of the stored members.
fn lens(stored: &[u8]) -> Vec<usize> {
    let head = |at: usize| &stored[1 + at * MEMBER_HEAD + 1..][..4];
    (0..usize::from(stored[0])).map(|at| u32::from_le_bytes(head(at).try_into().unwrap()) as usize).collect()
}

fn assert_decodes(stored: &[u8], base: Option<&[u8]>, plain: &[u8]) {
    let mut decoded = vec![0xaa; plain.len()];
    decode(stored, base, &mut decoded).unwrap();
    assert!(decoded == plain);
}

/// Encodes two steps in a row, the first alone and the second as predicted; returns the lengths of its members over their plain length.
fn predicted(mut state: State, count: usize, step: impl Fn(&mut State)) -> Vec<f64> {
    for _ in 0..20 {
        step(&mut state);
    }
    let before = state.plain(count);
    step(&mut state);
    let now = state.plain(count);
    let whole = encode(&before, count, None).unwrap();
    assert_decodes(&whole, None, &before);
    let stored = encode(&now, count, Some(&before)).unwrap();
    assert_decodes(&stored, Some(&before), &now);
    lens(&stored).into_iter().map(|len| len as f64 / (now.len() / count) as f64).collect()
}

#[test]
fn the_next_step_of_each_optimizer_is_predicted() {
    const COUNT: usize = 100_000;
    let adamw = predicted(State::new(COUNT), 3, |state| state.adamw(1e-3, 0.1));
    assert!(adamw[WEIGHTS] < 0.05 && adamw[SECOND_MOMENTS] < 0.05, "{adamw:?}");
    let adam = predicted(State::new(COUNT), 3, |state| state.adamw(1e-3, 0.0));
    assert!(adam[WEIGHTS] < 0.05 && adam[SECOND_MOMENTS] < 0.05, "{adam:?}");
    for nesterov in [false, true] {
        let sgd = predicted(State::new(COUNT), 2, |state| state.sgd(0.1, nesterov));
        assert!(sgd[WEIGHTS] < 0.1, "{nesterov} {sgd:?}");
    }
    let lion = predicted(State::new(COUNT), 2, |state| state.lion(1e-4));
    assert!(lion[WEIGHTS] < 0.1, "{lion:?}");
}

#[test]
fn a_wrong_prediction_costs_no_space() {
    let mut state = State::new(50_000);
    (0..5).for_each(|_| state.adamw(1e-3, 0.1));
    let before = state.plain(3);
    // Weights of another model, moments that went on.
    state.adamw(1e-3, 0.1);
    state.weights = noise(99, 50_000);
    let now = state.plain(3);
    let (stored, alone) = (encode(&now, 3, Some(&before)).unwrap(), encode(&now, 3, None).unwrap());
    assert!(stored.len() <= alone.len(), "{} {}", stored.len(), alone.len());
    assert_decodes(&stored, Some(&before), &now);
}

#[test]
fn numbers_of_all_kinds_come_back() {
    let odd =
        [f32::NAN, f32::from_bits(0xffc0_1234), f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, f32::MIN_POSITIVE, 1e-45];
    let mut state = State::new(1000);
    (0..3).for_each(|_| state.adamw(1e-2, 0.01));
    let before = state.plain(3);
    state.adamw(1e-2, 0.01);
    for of in [&mut state.weights, &mut state.first, &mut state.second] {
        of.iter_mut().step_by(3).zip(odd.iter().cycle()).for_each(|(number, odd)| *number = *odd);
    }
    let now = state.plain(3);
    for base in [Some(&before[..]), Some(&now[..]), None] {
        assert_decodes(&encode(&now, 3, base).unwrap(), base, &now);
    }
    assert_decodes(&encode(&before, 3, Some(&now)).unwrap(), Some(&now), &before);
}

#[test]
fn what_is_no_bundle_is_refused() {
    let plain = vec![7; 24];
    assert!(encode(&plain, 3, Some(&[7; 12])).is_none());
    assert!(encode(&plain, 1, None).is_none() && encode(&plain, 4, None).is_none());
    assert!(encode(&[7; 20], 3, None).is_none() && encode(&[], 2, None).is_none());
    let stored = encode(&plain, 3, None).unwrap();
    let mut out = vec![0; 24];
    decode(&stored, None, &mut out).unwrap();
    // Other counts, lengths and encodings, and what refers to a base without one.
    for (at, byte) in [(0, 2), (0, 4), (1, 9), (1, DIFFERENCE), (1, PREDICTED), (1, PREDICTED_SPARSE), (2, 255)] {
        let mut wrong = stored.clone();
        wrong[at] = byte;
        assert_eq!(decode(&wrong, None, &mut out), None, "{at} {byte}");
    }
    assert_eq!(decode(&stored[..stored.len() - 1], None, &mut out), None);
    assert_eq!(decode(&[&stored[..], &[0]].concat(), None, &mut out), None);
    assert_eq!(decode(&stored, None, &mut out[..12]), None);
}

#[test]
fn predictions_are_the_same_on_every_processor() {
    let mut state = State::new(1000);
    (0..4).for_each(|_| state.adamw(1e-3, 0.1));
    let before = state.plain(3);
    state.adamw(1e-3, 0.1);
    let (now, before) = (state.plain(3), before);
    let members = |plain| Members::of(plain, 3).unwrap();
    let mut out = vec![0; 4000];
    let mut hasher = blake3::Hasher::new();
    for (kind, coefficients) in [
        (Kind::SecondMoments, [0.998_999_953_269_958_5, 10.0, 0.001]),
        (Kind::Adam, [0.999_899_983_406_067, 1.7e-4, 1e-9]),
        (Kind::Momentum, [1.0, 0.1, 0.01]),
        (Kind::Lion, [0.999, 1e-4, 0.9]),
    ] {
        predict(&Rule { kind, coefficients }, &members(&now), &members(&before), &mut out).unwrap();
        hasher.update(&out);
    }
    assert_eq!(&hasher.finalize().to_hex()[..16], "e54358cf064632a0");
}

proptest! {
    #[test]
    fn garbage_is_damage_not_panic(
        stored in proptest::collection::vec(any::<u8>(), 0..400),
        base in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..400)),
        count in 2u8..4,
        len in 0usize..100,
    ) {
        let mut out = vec![0; len * 4];
        let _ = decode(&stored, base.as_deref(), &mut out);
        let stored = [&[count], &stored[..]].concat();
        let _ = decode(&stored, base.as_deref(), &mut out);
    }

    #[test]
    fn any_bytes_come_back(
        numbers in proptest::collection::vec(any::<u32>(), 64..300),
        shift in 0u32..24,
        count in 2usize..4,
    ) {
        let bytes = |turn: u32| -> Vec<u8> {
            let member: Vec<u8> = numbers.iter().flat_map(|x| (x >> shift).rotate_left(turn).to_le_bytes()).collect();
            vec![member; count].concat()
        };
        let (before, now) = (bytes(0), bytes(1));
        assert_decodes(&encode(&now, count, None).unwrap(), None, &now);
        assert_decodes(&encode(&now, count, Some(&before)).unwrap(), Some(&before), &now);
    }
}
