//! A plane split by classes of numbers that the decoder knows anyway: each class is coded separately.
//!
//! The change of a weight depends on its magnitude. The decoder of a difference knows the base, and so the class of each number.
//!
//! ```text
//! for each class: how (1), stored length (u32), body: the bytes of its numbers, in order
//! ```

#![expect(unsafe_code, reason = "a function compiled for BMI2 may only be called where there is BMI2")]

use std::cell::RefCell;

use super::{Flat, PLANE_HEADER, counts};
use crate::codec::{scratch, wide};

/// Maximum number of classes.
pub(in crate::codec) const CLASSES: usize = 4;
/// Gap between classes for surplus bytes of a move: the maximum bytes moved at once.
const GAP: usize = wide::BLOCK;

thread_local! {
    /// The bytes of a plane, class after class.
    static SORTED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Class of each number: bytes below [`CLASSES`].
#[derive(Clone, Copy, Debug)]
pub(in crate::codec) struct Classes<'a> {
    of: &'a [u8],
    starts: [usize; CLASSES],
    lens: [usize; CLASSES],
    count: usize,
}

impl<'a> Classes<'a> {
    /// The numbers are in `count` classes.
    pub(in crate::codec) fn new(of: &'a [u8], count: usize) -> Self {
        let lens = lens(of);
        let mut starts = [0; CLASSES];
        for class in 1..CLASSES {
            starts[class] = starts[class - 1] + lens[class - 1] + GAP;
        }
        Self { of, starts, lens, count }
    }

    fn scratch_len(&self) -> usize {
        self.of.len() + CLASSES * GAP
    }

    fn each(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.starts.into_iter().zip(self.lens).take(self.count).map(|(start, len)| start..start + len)
    }
}

/// Appends `plane` by classes, if that is shorter than without; returns whether it did. Counts its bytes in any case.
pub(super) fn encode(plane: &[u8], classes: &Classes<'_>, all: &mut [u32; 256], out: &mut Vec<u8>) -> bool {
    scratch::with(&SORTED, classes.scratch_len(), |sorted| {
        sort(plane, classes, sorted);
        let of_each: Vec<([u32; 256], &[u8])> =
            classes.each().filter_map(|range| sorted.get(range)).map(|bytes| (counts(bytes), bytes)).collect();
        for (counts, _) in &of_each {
            all.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
        }
        let apart: usize = of_each.iter().map(|(counts, bytes)| PLANE_HEADER + Flat::len(counts, bytes.len())).sum();
        if apart >= Flat::len(all, plane.len()) {
            return false;
        }
        for (counts, bytes) in of_each {
            let header = out.len();
            out.resize(header + PLANE_HEADER, 0);
            let how = Flat::encode(bytes, &counts, out) as u8;
            let len = u32::try_from(out.len() - header - PLANE_HEADER).unwrap_or(u32::MAX);
            out[header] = how;
            out[header + 1..header + PLANE_HEADER].copy_from_slice(&len.to_le_bytes());
        }
        true
    })
}

/// Decodes the output of [`encode`]; none if `stored` is invalid.
pub(super) fn decode(mut stored: &[u8], classes: &Classes<'_>, plane: &mut [u8]) -> Option<()> {
    scratch::with(&SORTED, classes.scratch_len(), |sorted| {
        for range in classes.each() {
            let (header, rest) = stored.split_first_chunk::<PLANE_HEADER>()?;
            let [how, len @ ..] = header;
            let (body, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
            stored = rest;
            let out = sorted.get_mut(range)?;
            Flat::of(*how)?.decode(body, out)?;
        }
        unsort(sorted, classes, plane);
        stored.is_empty().then_some(())
    })
}

/// Numbers in each class.
fn lens(of: &[u8]) -> [usize; CLASSES] {
    let mut lens = [0; CLASSES];
    let done = wide::lens(of, &mut lens).unwrap_or(0);
    // In blocks so small that a byte can hold the sum, so that the loop needs no wider numbers.
    for some in of[done..].chunks(255) {
        for (class, len) in (0..).zip(&mut lens) {
            *len += usize::from(some.iter().map(|&of| u8::from(of == class)).sum::<u8>());
        }
    }
    lens
}

/// Fills `sorted` with the bytes of `plane`, class after class.
fn sort(plane: &[u8], classes: &Classes<'_>, sorted: &mut [u8]) {
    let mut at = classes.starts;
    if let Some(done) = wide::sort(plane, classes.of, &mut at, sorted) {
        return sort_scalar(done, at, plane, classes, sorted);
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("bmi2") {
        // SAFETY: the processor has BMI2, which is all that this function asks for.
        return unsafe { words::sort(plane, classes, sorted) };
    }
    sort_scalar(0, at, plane, classes, sorted);
}

/// Fills `plane` from its bytes in `sorted`, class after class.
fn unsort(sorted: &[u8], classes: &Classes<'_>, plane: &mut [u8]) {
    let mut at = classes.starts;
    if let Some(done) = wide::unsort(sorted, classes.of, &mut at, plane) {
        return unsort_scalar(done, at, sorted, classes, plane);
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("bmi2") {
        // SAFETY: the processor has BMI2, which is all that this function asks for.
        return unsafe { words::unsort(sorted, classes, plane) };
    }
    unsort_scalar(0, at, sorted, classes, plane);
}

/// From the byte `from` on, each class from `at` on.
fn sort_scalar(from: usize, mut at: [usize; CLASSES], plane: &[u8], classes: &Classes<'_>, sorted: &mut [u8]) {
    for (&byte, &class) in plane.iter().zip(classes.of).skip(from) {
        let at = &mut at[usize::from(class) % CLASSES];
        sorted[*at] = byte;
        *at += 1;
    }
}

fn unsort_scalar(from: usize, mut at: [usize; CLASSES], sorted: &[u8], classes: &Classes<'_>, plane: &mut [u8]) {
    for (byte, &class) in plane.iter_mut().zip(classes.of).skip(from) {
        let at = &mut at[usize::from(class) % CLASSES];
        *byte = sorted[*at];
        *at += 1;
    }
}

/// The same, eight bytes at a time.
#[cfg(target_arch = "x86_64")]
mod words {
    use std::arch::x86_64::{_pdep_u64, _pext_u64};

    use super::{CLASSES, Classes, sort_scalar, unsort_scalar};

    const WORD: usize = 8;
    const ONES: u64 = 0x0101_0101_0101_0101;

    /// One bit in each byte of `word` that is `class`.
    fn members(word: u64, class: u64) -> u64 {
        let differs = word ^ (class * ONES);
        !(differs | differs >> 1) & ONES
    }

    /// Size of the list of those.
    fn size(members: u64) -> usize {
        (members.wrapping_mul(ONES) >> 56) as usize
    }

    #[target_feature(enable = "bmi2")]
    pub(super) fn sort(plane: &[u8], classes: &Classes<'_>, sorted: &mut [u8]) {
        let mut at = classes.starts;
        let words = plane.as_chunks::<WORD>().0;
        for (word, of) in words.iter().zip(classes.of.as_chunks::<WORD>().0) {
            let (word, of) = (u64::from_le_bytes(*word), u64::from_le_bytes(*of));
            for class in 0..CLASSES {
                let members = members(of, class as u64);
                let bytes = _pext_u64(word, members * 0xff);
                sorted[at[class]..at[class] + WORD].copy_from_slice(&bytes.to_le_bytes());
                at[class] += size(members);
            }
        }
        sort_scalar(words.len() * WORD, at, plane, classes, sorted);
    }

    #[target_feature(enable = "bmi2")]
    pub(super) fn unsort(sorted: &[u8], classes: &Classes<'_>, plane: &mut [u8]) {
        let mut at = classes.starts;
        let words = plane.as_chunks_mut::<WORD>().0;
        let done = words.len() * WORD;
        for (word, of) in words.iter_mut().zip(classes.of.as_chunks::<WORD>().0) {
            let of = u64::from_le_bytes(*of);
            let mut found = 0;
            for class in 0..CLASSES {
                let members = members(of, class as u64);
                let mut bytes = [0; WORD];
                bytes.copy_from_slice(&sorted[at[class]..at[class] + WORD]);
                found |= _pdep_u64(u64::from_le_bytes(bytes), members * 0xff);
                at[class] += size(members);
            }
            *word = found.to_le_bytes();
        }
        unsort_scalar(done, at, sorted, classes, plane);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Sort = fn(&[u8], &Classes<'_>, &mut [u8]);

    /// Sorting and its reverse: as they are chosen, one byte at a time, and by words where that can be.
    fn twins() -> Vec<(Sort, Sort)> {
        let sort_one: Sort = |plane, classes, sorted| sort_scalar(0, classes.starts, plane, classes, sorted);
        let unsort_one: Sort = |sorted, classes, plane| unsort_scalar(0, classes.starts, sorted, classes, plane);
        let mut twins: Vec<(Sort, Sort)> = vec![(sort, unsort), (sort_one, unsort_one)];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("bmi2") {
            // SAFETY: the processor has BMI2, which is all that this function asks for.
            let sort: Sort = |plane, classes, sorted| unsafe { words::sort(plane, classes, sorted) };
            // SAFETY: as above.
            let unsort: Sort = |sorted, classes, plane| unsafe { words::unsort(sorted, classes, plane) };
            twins.push((sort, unsort));
        }
        twins
    }

    proptest! {
        /// Sorting keeps each class in order, unsorting undoes it, and the twins agree.
        #[test]
        fn twins_agree(pairs in proptest::collection::vec((any::<u8>(), 0u8..4), 0..2000)) {
            let (plane, of): (Vec<u8>, Vec<u8>) = pairs.iter().copied().unzip();
            let classes = Classes::new(&of, CLASSES);
            for (sort, unsort) in twins() {
                let (mut sorted, mut out) = (vec![0; classes.scratch_len()], vec![0; plane.len()]);
                sort(&plane, &classes, &mut sorted);
                for (class, range) in (0u8..).zip(classes.each()) {
                    let wanted: Vec<u8> = pairs.iter().filter(|pair| pair.1 == class).map(|pair| pair.0).collect();
                    prop_assert_eq!(&sorted[range], &wanted);
                }
                unsort(&sorted, &classes, &mut out);
                prop_assert_eq!(&out, &plane);
            }
        }
    }
}
