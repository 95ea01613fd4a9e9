//! Splitting numbers into planes and merging them: plain loops, also compiled for wider registers.

#![expect(unsafe_code, reason = "a function compiled for AVX2 may only be called where there is AVX2")]

use super::Width;

/// Splits `numbers` into planes of equal length, the least significant first.
pub(super) fn split(numbers: &[u8], width: Width, rotate: bool, planes: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, which is all that this function asks for.
        return unsafe { wide::split(numbers, width, rotate, planes) };
    }
    split_scalar(numbers, width, rotate, planes);
}

/// Fills `numbers` from one plane for each of their bytes.
pub(super) fn merge(planes: &[&[u8]; 8], width: Width, rotated: bool, numbers: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, which is all that this function asks for.
        return unsafe { wide::merge(planes, width, rotated, numbers) };
    }
    merge_scalar(planes, width, rotated, numbers);
}

/// The same functions, compiled for AVX2.
#[cfg(target_arch = "x86_64")]
mod wide {
    use super::{Width, merge_scalar, split_scalar};

    #[target_feature(enable = "avx2")]
    pub(super) fn split(numbers: &[u8], width: Width, rotate: bool, planes: &mut [u8]) {
        split_scalar(numbers, width, rotate, planes);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn merge(planes: &[&[u8]; 8], width: Width, rotated: bool, numbers: &mut [u8]) {
        merge_scalar(planes, width, rotated, numbers);
    }
}

#[expect(clippy::inline_always, reason = "it is to be compiled anew within each of its callers")]
#[inline(always)]
fn split_scalar(numbers: &[u8], width: Width, rotate: bool, planes: &mut [u8]) {
    let count = numbers.len() / width.bytes();
    match width {
        Width::W1 => planes.copy_from_slice(numbers),
        Width::W2 => {
            let (low, high) = planes.split_at_mut(count);
            let turn = u32::from(rotate);
            for ((number, low), high) in numbers.chunks_exact(2).zip(low).zip(high) {
                let number = u16::from_le_bytes([number[0], number[1]]).rotate_left(turn);
                [*low, *high] = number.to_le_bytes();
            }
        }
        Width::W4 => {
            let (half, other) = planes.split_at_mut(2 * count);
            let ((p0, p1), (p2, p3)) = (half.split_at_mut(count), other.split_at_mut(count));
            let turn = u32::from(rotate);
            for ((((number, p0), p1), p2), p3) in numbers.chunks_exact(4).zip(p0).zip(p1).zip(p2).zip(p3) {
                let number = u32::from_le_bytes([number[0], number[1], number[2], number[3]]).rotate_left(turn);
                [*p0, *p1, *p2, *p3] = number.to_le_bytes();
            }
        }
        Width::W8 => {
            let turn = u32::from(rotate);
            for (at, number) in numbers.as_chunks::<8>().0.iter().enumerate() {
                let number = u64::from_le_bytes(*number).rotate_left(turn);
                for (plane, byte) in planes.chunks_exact_mut(count).zip(number.to_le_bytes()) {
                    plane[at] = byte;
                }
            }
        }
    }
}

#[expect(clippy::inline_always, reason = "it is to be compiled anew within each of its callers")]
#[inline(always)]
fn merge_scalar(planes: &[&[u8]; 8], width: Width, rotated: bool, numbers: &mut [u8]) {
    let [p0, p1, p2, p3, p4, p5, p6, p7] = planes;
    let turn = u32::from(rotated);
    match width {
        Width::W1 => numbers.copy_from_slice(p0),
        Width::W2 => {
            for ((number, low), high) in numbers.chunks_exact_mut(2).zip(*p0).zip(*p1) {
                number.copy_from_slice(&u16::from_le_bytes([*low, *high]).rotate_right(turn).to_le_bytes());
            }
        }
        Width::W4 => {
            for ((((number, p0), p1), p2), p3) in numbers.chunks_exact_mut(4).zip(*p0).zip(*p1).zip(*p2).zip(*p3) {
                number.copy_from_slice(&u32::from_le_bytes([*p0, *p1, *p2, *p3]).rotate_right(turn).to_le_bytes());
            }
        }
        Width::W8 => {
            let low = p0.iter().zip(*p1).zip(*p2).zip(*p3);
            let high = p4.iter().zip(*p5).zip(*p6).zip(*p7);
            for ((number, (((b0, b1), b2), b3)), (((b4, b5), b6), b7)) in numbers.chunks_exact_mut(8).zip(low).zip(high)
            {
                let number64 = u64::from_le_bytes([*b0, *b1, *b2, *b3, *b4, *b5, *b6, *b7]).rotate_right(turn);
                number.copy_from_slice(&number64.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The function that is chosen for this processor and its scalar twin agree, and merging undoes splitting.
        #[test]
        fn twins_agree(numbers in proptest::collection::vec(any::<u8>(), 0..3000), log in 0u32..4, rotate in any::<bool>()) {
            let width = Width::of(1 << log).unwrap();
            let numbers = &numbers[..numbers.len() / width.bytes() * width.bytes()];
            let (mut chosen, mut scalar) = (vec![0; numbers.len()], vec![0; numbers.len()]);
            split(numbers, width, rotate, &mut chosen);
            split_scalar(numbers, width, rotate, &mut scalar);
            prop_assert_eq!(&chosen, &scalar);
            let mut planes: [&[u8]; 8] = [&[]; 8];
            let count = numbers.len() / width.bytes();
            planes.iter_mut().zip(scalar.chunks_exact(count.max(1))).for_each(|(to, plane)| *to = plane);
            let (mut chosen, mut scalar) = (vec![0; numbers.len()], vec![0; numbers.len()]);
            merge(&planes, width, rotate, &mut chosen);
            merge_scalar(&planes, width, rotate, &mut scalar);
            prop_assert_eq!(&chosen, &scalar);
            prop_assert_eq!(&chosen, numbers);
        }
    }
}
