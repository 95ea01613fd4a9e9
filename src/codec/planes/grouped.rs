//! A skewed plane in groups: its few frequent bytes get codes of four, two or one bits, and bytes of such codes (groups) are
//! coded instead. Rare bytes are escaped.
//!
//! A Huffman code needs at least one bit per symbol. If a symbol is eight elements, that is an eighth of a bit per element, and
//! there are only an eighth as many symbols to code. Differences to an earlier step are usually skewed in this way.
//!
//! ```text
//! log (1):     log2 of the elements in a group: 1, 2 or 3
//! frequent:    15, 3 or 1 bytes; the code of each is its place, the first in the lowest bits; one more code means "escaped"
//! groups:      how (1), stored length (u32), body: ceil(n / elements) bytes, as a plane; in groups themselves at most once
//! escaped:     count (u32), how (1), body: to the end
//! ```

use super::{Flat, GROUPED, GROUPED_FROM, counts};
use crate::codec::wide;

/// Maximum share of the most frequent group: longer groups are used until it is reached.
const GROUP_SKEWED: f64 = 0.6;

/// Logarithm of the best group length in elements, where the most frequent byte is `share` of all; 0: no groups.
fn log_for(share: f64) -> u8 {
    (0..3).find(|&log| share.powi(1 << log) <= GROUP_SKEWED).unwrap_or(3)
}

/// Grouping of a plane's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Bytes of the plane.
    Plane,
    /// Bytes that are groups themselves, so that one stands for up to 64 elements, which are mostly equal.
    Groups,
}

/// Logarithm of the best group length in elements for bytes that occur as often as `counts` says; none if groups are not worth
/// it.
pub(super) fn worth(counts: &[u32; 256], len: usize) -> Option<u8> {
    let most = counts.iter().copied().max().unwrap_or(0) as usize;
    let log = log_for(most as f64 / len as f64);
    (log > 0 && len >= GROUPED_FROM && most < len).then_some(log)
}

/// Appends `plane`, with these counts, in groups.
pub(super) fn encode(plane: &[u8], counts_of: &[u32; 256], log: u8, level: Level, out: &mut Vec<u8>) {
    let bits = 8u32 >> log;
    let escape = (1u8 << bits) - 1;
    let mut frequent: Vec<u8> = (0..=u8::MAX).collect();
    frequent.sort_by_key(|&byte| std::cmp::Reverse(counts_of[usize::from(byte)]));
    frequent.truncate(escape.into());
    let mut codes = [escape; 256];
    (0..escape).zip(&frequent).for_each(|(code, &byte)| codes[usize::from(byte)] = code);

    // With space for one block of surplus bytes.
    let rare: u64 = plane.len() as u64 - frequent.iter().map(|&b| u64::from(counts_of[usize::from(b)])).sum::<u64>();
    let mut groups = vec![0; plane.len().div_ceil(1 << log) + wide::BLOCK];
    let mut escaped = vec![0; usize::try_from(rare).unwrap_or(0) + wide::BLOCK];
    let at = group(plane, &codes, log, &mut groups, &mut escaped);
    groups.truncate(plane.len().div_ceil(1 << log));
    escaped.truncate(at);

    out.push(log);
    out.extend_from_slice(&frequent);
    let header = out.len();
    out.resize(header + 5, 0);
    let of_groups = counts(&groups);
    let how = match worth(&of_groups, groups.len()).filter(|_| level == Level::Plane) {
        Some(log) => {
            encode(&groups, &of_groups, log, Level::Groups, out);
            GROUPED
        }
        None => Flat::encode(&groups, &of_groups, out) as u8,
    };
    let len = u32::try_from(out.len() - header - 5).unwrap_or(u32::MAX);
    out[header] = how;
    out[header + 1..header + 5].copy_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&u32::try_from(escaped.len()).unwrap_or(u32::MAX).to_le_bytes());
    let header = out.len();
    out.push(0);
    out[header] = Flat::encode(&escaped, &counts(&escaped), out) as u8;
}

/// Fills `groups`, which are zeros, with the codes of the bytes in `plane` and `escaped` with those that escape; says how many
/// these are. Both have room for [`wide::BLOCK`] bytes too many.
fn group(plane: &[u8], codes: &[u8; 256], log: u8, groups: &mut [u8], escaped: &mut [u8]) -> usize {
    let (done, at) = wide::group(plane, codes, log, groups, escaped).unwrap_or((0, 0));
    at + group_scalar(&plane[done..], codes, log, &mut groups[done >> log..], &mut escaped[at..])
}

fn group_scalar(plane: &[u8], codes: &[u8; 256], log: u8, groups: &mut [u8], escaped: &mut [u8]) -> usize {
    let bits = 8u32 >> log;
    let escape = (1u8 << bits) - 1;
    // The most frequent byte, whose code is zero.
    let common = (0..=u8::MAX).find(|&byte| codes[usize::from(byte)] == 0).unwrap_or(0);
    let mut at = 0;
    for (groups, elements) in groups.chunks_mut(8 >> log).zip(plane.chunks(8)) {
        if <[u8; 8]>::try_from(elements).is_ok_and(|elements| elements == [common; 8]) {
            continue;
        }
        let mut whole = 0;
        for (place, &element) in (0u32..).zip(elements) {
            let code = codes[usize::from(element)];
            whole |= u32::from(code) << (place * bits);
            // Written always, kept only if rare: avoids mispredicted branches.
            escaped[at] = element;
            at += usize::from(code == escape);
        }
        groups.iter_mut().zip(whole.to_le_bytes()).for_each(|(group, byte)| *group = byte);
    }
    at
}

/// Decodes the output of [`encode`] for `plane.len()` bytes; none if `stored` is invalid.
pub(super) fn decode(stored: &[u8], level: Level, plane: &mut [u8]) -> Option<()> {
    let (&log, stored) = stored.split_first()?;
    let bits = [4u32, 2, 1].get(usize::from(log).checked_sub(1)?).copied()?;
    let escape = (1usize << bits) - 1;
    let (frequent, stored) = stored.split_at_checked(escape)?;
    let (&how, stored) = stored.split_first()?;
    let (len, stored) = stored.split_first_chunk::<4>()?;
    let (body, stored) = stored.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    // With space for one block of surplus bytes.
    let mut groups = vec![0; plane.len().div_ceil(1 << log) + wide::BLOCK];
    let (out, _) = groups.split_at_mut(plane.len().div_ceil(1 << log));
    match (how, level) {
        (GROUPED, Level::Plane) => decode(body, Level::Groups, out)?,
        _ => Flat::of(how)?.decode(body, out)?,
    }
    let (count, stored) = stored.split_first_chunk::<4>()?;
    let (&how, body) = stored.split_first()?;
    let count = u32::from_le_bytes(*count) as usize;
    if count > plane.len() {
        return None;
    }
    let mut escaped = vec![0; count + wide::BLOCK];
    Flat::of(how)?.decode(body, escaped.get_mut(..count)?)?;

    let codes = Codes { bits, frequent, groups: &groups };
    codes.expand(log, &escaped, count, plane)
}

/// Groups to be expanded, and [`wide::BLOCK`] bytes after them.
#[derive(Clone, Copy)]
struct Codes<'a> {
    bits: u32,
    frequent: &'a [u8],
    groups: &'a [u8],
}

impl Codes<'_> {
    /// Writes the elements of each group and fills in the `count` that escaped, after which there are as many bytes more.
    fn expand(&self, log: u8, escaped: &[u8], count: usize, plane: &mut [u8]) -> Option<()> {
        let (done, used) = wide::expand(self.groups, escaped, self.frequent, log, plane).unwrap_or((0, 0));
        let rest = Self { groups: self.groups.get(done >> log..)?, ..*self };
        // Codes that used more bits than there were stop here.
        let (escaped, plane) = (escaped.get(used..count)?, plane.get_mut(done..)?);
        match log {
            1 => rest.expand_scalar::<2>(escaped, plane),
            2 => rest.expand_scalar::<4>(escaped, plane),
            _ => rest.expand_scalar::<8>(escaped, plane),
        }
    }

    /// The same, `N` elements at a time.
    fn expand_scalar<const N: usize>(&self, escaped: &[u8], plane: &mut [u8]) -> Option<()> {
        let mask = (1u32 << self.bits) - 1;
        let mut table = [([0u8; N], 0u8); 256];
        for (group, (elements, holes)) in (0u32..).zip(&mut table) {
            for (place, element) in (0u32..).zip(elements) {
                let code = group >> (place * self.bits) & mask;
                match self.frequent.get(code as usize) {
                    Some(&byte) => *element = byte,
                    None => *holes |= 1 << place,
                }
            }
        }
        let mut escaped = escaped.iter();
        let mut fill = |group: u8, out: &mut [u8]| {
            let (elements, mut holes) = table[usize::from(group)];
            out.copy_from_slice(elements.get(..out.len())?);
            while holes != 0 {
                *out.get_mut(holes.trailing_zeros() as usize)? = *escaped.next()?;
                holes &= holes - 1;
            }
            Some(())
        };
        let (whole, rest) = plane.as_chunks_mut::<N>();
        let (groups, last) = self.groups.split_at_checked(whole.len())?;
        whole.iter_mut().zip(groups).try_for_each(|(out, &group)| fill(group, out))?;
        if let (Some(&group), false) = (last.first(), rest.is_empty()) {
            // Codes after the last element of a partial group must be zero.
            let used = u32::try_from(rest.len()).ok()? * self.bits;
            if u32::from(group) >> used != 0 {
                return None;
            }
            fill(group, rest)?;
        }
        escaped.next().is_none().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The functions that are chosen for this processor and their scalar twins agree, and expanding undoes grouping.
        #[test]
        fn twins_agree(plane in proptest::collection::vec(prop_oneof![8 => 0u8..4, 1 => any::<u8>()], 0..2000), log in 1u8..4) {
            let bits = 8u32 >> log;
            let escape = (1u8 << bits) - 1;
            let frequent: Vec<u8> = (0..escape).collect();
            let mut codes = [escape; 256];
            frequent.iter().for_each(|&byte| codes[usize::from(byte)] = byte);
            let scratch = |len: usize| vec![0; len + wide::BLOCK];
            let (mut groups, mut escaped) = (scratch(plane.len().div_ceil(1 << log)), scratch(plane.len()));
            let count = group(&plane, &codes, log, &mut groups, &mut escaped);
            let (mut groups2, mut escaped2) = (scratch(plane.len().div_ceil(1 << log)), scratch(plane.len()));
            prop_assert_eq!(group_scalar(&plane, &codes, log, &mut groups2, &mut escaped2), count);
            prop_assert_eq!(&groups, &groups2);
            prop_assert_eq!(&escaped[..count], &escaped2[..count]);

            let codes = Codes { bits, frequent: &frequent, groups: &groups };
            let (mut out, mut twin) = (vec![0; plane.len()], vec![0; plane.len()]);
            prop_assert_eq!(codes.expand(log, &escaped, count, &mut out), Some(()));
            prop_assert_eq!(&out, &plane);
            let scalar = match log {
                1 => codes.expand_scalar::<2>(&escaped[..count], &mut twin),
                2 => codes.expand_scalar::<4>(&escaped[..count], &mut twin),
                _ => codes.expand_scalar::<8>(&escaped[..count], &mut twin),
            };
            prop_assert_eq!(scalar, Some(()));
            prop_assert_eq!(&twin, &plane);
            let one_less = codes.expand(log, &escaped, count.saturating_sub(1), &mut out);
            prop_assert_eq!(one_less.is_none(), count > 0, "one byte too few escaped");
            prop_assert_eq!(codes.expand(log, &escaped, count + 1, &mut out), None, "one too many");
        }
    }
}
