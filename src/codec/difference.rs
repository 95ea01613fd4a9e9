//! The difference to a base: from one training step to a later one, numbers change little.
//!
//! The bits of floats are mapped to integers in numeric order, subtracted, and zigzag-encoded, so that small differences of
//! either sign are small numbers; these are encoded by [`planes`].
//!
//! ```text
//! kind (1):      log2 of the width in bytes; bit 3: the numbers are floats
//! classes (1):   how many classes of numbers there are, 1 to 4
//! bounds:        one byte less than that, ascending, none 0
//! ..             byte planes of the differences, not rotated
//! ```
//!
//! The change of a number depends on its magnitude. The class of a number is the number of bounds that are at most the most
//! significant byte of its base, rotated left by one (a float's exponent). A plane may be coded separately for each class.

#![expect(unsafe_code, reason = "a function compiled for AVX2 may only be called where there is AVX2")]

use std::cell::RefCell;

use super::planes::{self, CLASSES, Classes, Element, Numbers, Width};
use super::scratch;

/// Bit in the first byte that marks floats.
const FLOATS: u8 = 8;
/// Minimum numbers in a chunk for a table per class.
const CLASSED_FROM: usize = 32 << 10;
/// Sampling interval of bases, to find bounds.
const BOUNDS_STEP: usize = 61;
/// Maximum size of a stored difference, relative to planes: each read of it reads the base, too.
const WORTH: f64 = 7.0 / 8.0;
/// Numbers in the sample that predicts the size, and the number of places.
const SAMPLES: usize = 16;
const SAMPLE: usize = 256;

thread_local! {
    /// The differences of a chunk.
    static DIFFERENCES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The classes of its numbers.
    static CLASSES_OF: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Encodes `plain` as the difference to `base`; none if that is too large, or their lengths differ.
pub(super) fn encode(plain: &[u8], base: &[u8], element: Element) -> Option<Vec<u8>> {
    if plain.len() != base.len() || !pays(plain, base, element) {
        return None;
    }
    let width = element.width();
    let floats = matches!(element, Element::Float(_));
    let whole = plain.len() / width.bytes() * width.bytes();
    let ((numbers, rest), (base, _)) = (plain.split_at(whole), base.split_at(whole));
    let bounds = if floats && whole / width.bytes() >= CLASSED_FROM { bounds(base, width) } else { Vec::new() };
    let mut head = vec![width as u8 | if floats { FLOATS } else { 0 }, u8::try_from(bounds.len() + 1).ok()?];
    head.extend_from_slice(&bounds);
    scratch::with(&DIFFERENCES, whole, |differences| {
        subtract(numbers, base, width, floats, differences);
        with_classes(base, width, &bounds, |classes| {
            let numbers = Numbers { bytes: differences, width, rotate: false, classes };
            planes::write(&head, numbers, rest, plain.len() - plain.len() / 8)
        })
    })
}

/// Decodes the output of [`encode`] for `plain.len()` bytes; none if `stored` is invalid.
pub(super) fn decode(stored: &[u8], base: &[u8], plain: &mut [u8]) -> Option<()> {
    let ([kind, classes], stored) = stored.split_first_chunk::<2>()?;
    let (width, floats) = (Width::of(1 << (kind & 3))?, kind & FLOATS != 0);
    let (bounds, stored) = stored.split_at_checked(usize::from(classes.checked_sub(1)?))?;
    let ascending = bounds.is_sorted_by(|a, b| a < b) && bounds.len() < CLASSES && bounds.first() != Some(&0);
    if kind & !(3 | FLOATS) != 0 || !ascending || base.len() != plain.len() {
        return None;
    }
    let whole = plain.len() / width.bytes() * width.bytes();
    let base = base.get(..whole)?;
    with_classes(base, width, bounds, |classes| planes::read(stored, (width, false), classes, plain))?;
    add(plain.get_mut(..whole)?, base, width, floats);
    Some(())
}

/// Type of the numbers in the output of [`encode`]; none if it is invalid.
pub(super) fn element(stored: &[u8]) -> Option<Element> {
    let kind = stored.first()?;
    let width = Width::of(1 << (kind & 3))?;
    Some(if kind & FLOATS != 0 { Element::Float(width) } else { Element::Integer(width) })
}

/// Passes on the classes of numbers with these bases, if there is more than one.
fn with_classes<T>(base: &[u8], width: Width, bounds: &[u8], then: impl FnOnce(Option<&Classes<'_>>) -> T) -> T {
    if bounds.is_empty() {
        return then(None);
    }
    scratch::with(&CLASSES_OF, base.len() / width.bytes(), |of| {
        classify(base, width, bounds, of);
        then(Some(&Classes::new(of, bounds.len() + 1)))
    })
}

/// Bounds that split these bases into classes of about the same size.
fn bounds(base: &[u8], width: Width) -> Vec<u8> {
    let mut seen = [0usize; 256];
    for number in base.chunks_exact(width.bytes()).step_by(BOUNDS_STEP) {
        let [.., below, top] = *number else { return Vec::new() };
        seen[usize::from(top << 1 | below >> 7)] += 1;
    }
    let total: usize = seen.iter().sum();
    let mut bounds: Vec<u8> = Vec::new();
    let (mut before, mut first) = (0, true);
    for (key, count) in (0..=u8::MAX).zip(seen) {
        let due = bounds.len() + 1;
        let reached = (before + count) * CLASSES > total * due;
        if count > 0 && reached && !first && bounds.len() + 1 < CLASSES {
            bounds.push(key);
        }
        first = first && count == 0;
        before += count;
    }
    bounds
}

/// True if a sample of the numbers predicts that differences are small enough.
fn pays(plain: &[u8], base: &[u8], element: Element) -> bool {
    let (width, floats) = (element.width(), matches!(element, Element::Float(_)));
    let sample_len = SAMPLE * width.bytes();
    let sample = |bytes: &[u8]| -> Vec<u8> {
        let whole = bytes.get(..bytes.len() / width.bytes() * width.bytes()).unwrap_or_default();
        if whole.len() <= SAMPLES * sample_len {
            return whole.to_vec();
        }
        let step = (whole.len() - sample_len) / (SAMPLES - 1) / width.bytes() * width.bytes();
        let places = (0..SAMPLES).filter_map(|at| whole.get(at * step..at * step + sample_len));
        places.collect::<Vec<_>>().concat()
    };
    let (plain, base) = (sample(plain), sample(base));
    let mut differences = vec![0; plain.len()];
    subtract(&plain, &base, width, floats, &mut differences);
    planes::estimate(&differences, width, false) < planes::estimate(&plain, width, floats) * WORTH
}

/// Fills `out` with the zigzag-encoded differences of `numbers` to `base`; all have the same length.
pub(super) fn subtract(numbers: &[u8], base: &[u8], width: Width, floats: bool, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, which is all that this function asks for.
        return unsafe { wide::subtract(numbers, base, width, floats, out) };
    }
    subtract_scalar(numbers, base, width, floats, out);
}

/// Replaces the zigzag-encoded differences `numbers` by the original numbers.
pub(super) fn add(numbers: &mut [u8], base: &[u8], width: Width, floats: bool) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, which is all that this function asks for.
        return unsafe { wide::add(numbers, base, width, floats) };
    }
    add_scalar(numbers, base, width, floats);
}

/// Fills `of` with the class of each number that has one of these bases.
fn classify(base: &[u8], width: Width, bounds: &[u8], of: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, which is all that this function asks for.
        return unsafe { wide::classify(base, width, bounds, of) };
    }
    classify_scalar(base, width, bounds, of);
}

/// The same functions, compiled for AVX2.
#[cfg(target_arch = "x86_64")]
mod wide {
    use super::{Width, add_scalar, classify_scalar, subtract_scalar};

    #[target_feature(enable = "avx2")]
    pub(super) fn classify(base: &[u8], width: Width, bounds: &[u8], of: &mut [u8]) {
        classify_scalar(base, width, bounds, of);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn subtract(numbers: &[u8], base: &[u8], width: Width, floats: bool, out: &mut [u8]) {
        subtract_scalar(numbers, base, width, floats, out);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn add(numbers: &mut [u8], base: &[u8], width: Width, floats: bool) {
        add_scalar(numbers, base, width, floats);
    }
}

/// The two loops for one width: `$bytes` bytes in the unsigned type `$number`, with the signed type `$signed`.
macro_rules! loops {
    ($subtract:ident, $add:ident, $number:ty, $signed:ty, $bytes:literal) => {
        #[expect(clippy::cast_possible_wrap, clippy::cast_sign_loss, reason = "bits, seen with and without a sign")]
        #[inline(always)]
        fn $subtract(numbers: &[u8], base: &[u8], floats: bool, out: &mut [u8]) {
            // Mask of all bits but the sign for floats, which are mapped to integers; zero for integers.
            let turned: $number = if floats { <$number>::MAX >> 1 } else { 0 };
            let order = |bits: $number| bits ^ ((bits as $signed >> (<$number>::BITS - 1)) as $number & turned);
            let (numbers, base, out) =
                (numbers.as_chunks::<$bytes>().0, base.as_chunks::<$bytes>().0, out.as_chunks_mut::<$bytes>().0);
            for ((out, number), base) in out.iter_mut().zip(numbers).zip(base) {
                let number = order(<$number>::from_le_bytes(*number));
                let difference = number.wrapping_sub(order(<$number>::from_le_bytes(*base)));
                let sign = (difference as $signed >> (<$number>::BITS - 1)) as $number;
                *out = (difference << 1 ^ sign).to_le_bytes();
            }
        }

        #[expect(clippy::cast_possible_wrap, clippy::cast_sign_loss, reason = "bits, seen with and without a sign")]
        #[inline(always)]
        fn $add(numbers: &mut [u8], base: &[u8], floats: bool) {
            let turned: $number = if floats { <$number>::MAX >> 1 } else { 0 };
            let order = |bits: $number| bits ^ ((bits as $signed >> (<$number>::BITS - 1)) as $number & turned);
            let (numbers, base) = (numbers.as_chunks_mut::<$bytes>().0, base.as_chunks::<$bytes>().0);
            for (number, base) in numbers.iter_mut().zip(base) {
                let zigzag = <$number>::from_le_bytes(*number);
                let difference = zigzag >> 1 ^ (zigzag & 1).wrapping_neg();
                // The mapping is its own inverse, because the sign stays.
                let base = order(<$number>::from_le_bytes(*base));
                *number = order(base.wrapping_add(difference)).to_le_bytes();
            }
        }
    };
}

loops!(subtract1, add1, u8, i8, 1);
loops!(subtract2, add2, u16, i16, 2);
loops!(subtract4, add4, u32, i32, 4);
loops!(subtract8, add8, u64, i64, 8);

#[expect(clippy::inline_always, reason = "it is to be compiled anew within each of its callers")]
#[inline(always)]
fn subtract_scalar(numbers: &[u8], base: &[u8], width: Width, floats: bool, out: &mut [u8]) {
    match width {
        Width::W1 => subtract1(numbers, base, floats, out),
        Width::W2 => subtract2(numbers, base, floats, out),
        Width::W4 => subtract4(numbers, base, floats, out),
        Width::W8 => subtract8(numbers, base, floats, out),
    }
}

#[expect(clippy::inline_always, reason = "it is to be compiled anew within each of its callers")]
#[inline(always)]
fn add_scalar(numbers: &mut [u8], base: &[u8], width: Width, floats: bool) {
    match width {
        Width::W1 => add1(numbers, base, floats),
        Width::W2 => add2(numbers, base, floats),
        Width::W4 => add4(numbers, base, floats),
        Width::W8 => add8(numbers, base, floats),
    }
}

#[expect(clippy::inline_always, reason = "it is to be compiled anew within each of its callers")]
#[inline(always)]
fn classify_scalar(base: &[u8], width: Width, bounds: &[u8], of: &mut [u8]) {
    // Keys are at most 255: `key > bound - 1` tests a bound, and a missing bound is never exceeded.
    let below = |at: usize| bounds.get(at).map_or(u8::MAX, |&bound| bound.saturating_sub(1));
    let (first, second, third) = (below(0), below(1), below(2));
    let reached = |key: u8| u8::from(key > first) + u8::from(key > second) + u8::from(key > third);
    match width {
        Width::W1 => of.iter_mut().zip(base).for_each(|(of, byte)| *of = reached(byte.rotate_left(1))),
        Width::W2 => of.iter_mut().zip(base.as_chunks::<2>().0).for_each(|(of, number)| {
            *of = reached((u16::from_le_bytes(*number) >> 7).to_le_bytes()[0]);
        }),
        Width::W4 => of.iter_mut().zip(base.as_chunks::<4>().0).for_each(|(of, number)| {
            *of = reached((u32::from_le_bytes(*number) >> 23).to_le_bytes()[0]);
        }),
        Width::W8 => of.iter_mut().zip(base.as_chunks::<8>().0).for_each(|(of, number)| {
            *of = reached((u64::from_le_bytes(*number) >> 55).to_le_bytes()[0]);
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One weight after another, and the same a little later.
    fn trained(count: usize) -> (Vec<f32>, Vec<f32>) {
        let weight = |n: usize| (n as f32 * 0.618).sin() * 0.03;
        let later = |n: usize| weight(n) * (1.0 + ((n * 7 % 100) as f32 - 50.0) * 1e-6);
        ((0..count).map(weight).collect(), (0..count).map(later).collect())
    }

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn a_step_later_shrinks_and_comes_back() {
        let (base, plain) = trained(100_003);
        let (base, plain) = (bytes(&base), bytes(&plain));
        let frame = encode(&plain, &base, Element::Float(Width::W4)).unwrap();
        assert!(frame.len() * 5 < plain.len() * 2, "{} of {}", frame.len(), plain.len());
        let mut out = vec![0; plain.len()];
        assert_eq!(decode(&frame, &base, &mut out), Some(()));
        assert!(out == plain);
        assert_eq!(decode(&frame, &base[4..], &mut out), None, "the base has another length");
        let mut refused = |at: usize, byte: u8| {
            let mut bent = frame.clone();
            bent[at] = byte;
            decode(&bent, &base, &mut out).is_none()
        };
        assert!(frame[1] > 1 && refused(1, 0) && refused(1, 5), "one to four classes");
        assert!(refused(2, 0), "a bound that every number reaches");
        assert!(refused(0, frame[0] | 4), "a bit that means nothing");
    }

    #[test]
    fn what_is_unlike_its_base_is_refused() {
        let (base, _) = trained(100_000);
        let mut noise = vec![0; 400_000];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        assert!(encode(&noise, &bytes(&base), Element::Float(Width::W4)).is_none());
        assert!(encode(&noise, &noise[..1000], Element::Float(Width::W4)).is_none());
    }

    #[test]
    fn differences_follow_the_numeric_order() {
        let difference = |number: f32, base: f32| {
            let mut out = [0; 4];
            subtract(&number.to_le_bytes(), &base.to_le_bytes(), Width::W4, true, &mut out);
            u32::from_le_bytes(out)
        };
        assert_eq!(difference(1.0, 1.0), 0);
        assert_eq!(difference(f32::from_bits(1), 0.0), 2);
        assert_eq!(difference(0.0, f32::from_bits(1)), 1);
        // Across zero: the smallest number on either side, with both zeros between them.
        assert_eq!(difference(f32::from_bits(1), -f32::from_bits(1)), 6);
        assert!(difference(-1.5, -1.500_001) < 100);
    }

    proptest! {
        /// Whatever the bits (NaN payloads, -0.0, infinities), adding undoes subtracting, and the twins agree.
        #[test]
        fn adding_undoes_subtracting(
            pairs in proptest::collection::vec(any::<(u8, u8)>(), 0..3000),
            log in 0u32..4,
            floats in any::<bool>(),
        ) {
            let width = Width::of(1 << log).unwrap();
            let whole = pairs.len() / width.bytes() * width.bytes();
            let (plain, base): (Vec<u8>, Vec<u8>) = pairs.into_iter().take(whole).unzip();
            let (mut chosen, mut scalar) = (vec![0; whole], vec![0; whole]);
            subtract(&plain, &base, width, floats, &mut chosen);
            subtract_scalar(&plain, &base, width, floats, &mut scalar);
            prop_assert_eq!(&chosen, &scalar);
            add(&mut chosen, &base, width, floats);
            add_scalar(&mut scalar, &base, width, floats);
            prop_assert_eq!(&chosen, &scalar);
            prop_assert_eq!(&chosen, &plain);
        }
    }
}
