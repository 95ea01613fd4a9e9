//! Gaps: decides which gaps between wanted frames are read as well, to save a request. Pure.

use std::ops::Range;

use crate::limits::KIB;

/// Longest gap that is read: its transfer costs about as much as one more request.
pub(super) const GAP: u64 = 256 * KIB;
/// Gaps up to this length are always read: frames are padded to pages.
const PAGE: u64 = 4 * KIB;
/// With [`Gaps::Spare`], longer gaps add at most one byte to this many wanted bytes.
const SHARE: u64 = 32;

/// Cost to minimize: requests, or bytes that are not wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gaps {
    /// Minimize requests: gaps of up to 256 KiB are read. For whole trees: after a repack, or with other names, up to half of a
    /// pack may be short gaps between their chunks.
    Wide,
    /// Minimize bytes: gaps of up to 4 KiB are read, and longer ones, the shortest first, up to a 32nd of the wanted bytes. For
    /// parts of tensors: a request for an eighth should read an eighth.
    Spare,
}

/// Bytes of gaps that may still be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GapBudget {
    longest: u64,
    left: u64,
}

impl GapBudget {
    /// Allowance of [`Gaps::Wide`].
    pub(super) const WIDE: Self = Self { longest: GAP, left: u64::MAX };

    /// Allowance of [`Gaps::Spare`] for `frames`, each with the number of its pack and its byte range there.
    pub(super) fn spare(mut frames: Vec<(u32, Range<u64>)>) -> Self {
        frames.sort_unstable_by_key(|(pack, range)| (*pack, range.start, range.end));
        frames.dedup();
        let wanted: u64 = frames.iter().map(|(_, range)| range.end - range.start).sum();
        let between = |pair: &[(u32, Range<u64>)]| match pair {
            [(pack, before), (next, after)] if pack == next => Some(after.start.saturating_sub(before.end)),
            _ => None,
        };
        let mut gaps: Vec<u64> = frames.windows(2).filter_map(between).collect();
        gaps.sort_unstable();
        let (left, mut sum) = (wanted / SHARE, 0);
        let fits = |gap: &u64| {
            sum += if *gap > PAGE { *gap } else { 0 };
            *gap <= GAP && sum <= left
        };
        let longest = gaps.into_iter().take_while(fits).last().unwrap_or(0);
        Self { longest, left }
    }

    /// Longest gap that may be read now.
    pub(super) fn gap(&self) -> u64 {
        self.longest.min(self.left).max(PAGE)
    }

    /// Records that `gap` unwanted bytes are read.
    pub(super) fn took(&mut self, gap: u64) {
        if gap > PAGE {
            self.left = self.left.saturating_sub(gap);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames of 1 MiB in one pack with these gaps between them.
    fn spare(gaps: &[u64]) -> GapBudget {
        let mut frames = vec![(7, 0..1024 * KIB)];
        for gap in gaps {
            let start = frames[frames.len() - 1].1.end + gap;
            frames.push((7, start..start + 1024 * KIB));
        }
        GapBudget::spare(frames)
    }

    #[test]
    fn the_shortest_gaps_are_read_up_to_their_share() {
        // Two frames: a 32nd are 64 KiB.
        assert_eq!(spare(&[64 * KIB]).gap(), 64 * KIB);
        assert_eq!(spare(&[64 * KIB + 1]).gap(), PAGE);
        // Five: 160 KiB.
        assert_eq!(spare(&[90 * KIB, 20 * KIB, 60 * KIB, 50 * KIB]).gap(), 60 * KIB);
        // Gaps within pages are no matter.
        assert_eq!(spare(&[PAGE, PAGE, 128 * KIB, PAGE]).gap(), 128 * KIB);
        // The maximum gap applies to any amount.
        assert_eq!(spare(&[[0; 300].as_slice(), &[GAP + 1, GAP]].concat()).gap(), GAP);
        assert_eq!(GapBudget::spare(Vec::new()).gap(), PAGE);
    }

    #[test]
    fn what_was_read_is_off_the_allowance() {
        let mut allowed = spare(&[30 * KIB, 30 * KIB]);
        assert_eq!(allowed.gap(), 30 * KIB);
        allowed.took(PAGE);
        allowed.took(70 * KIB);
        assert_eq!(allowed.gap(), 26 * KIB);
        allowed.took(70 * KIB);
        assert_eq!(allowed.gap(), PAGE);
        let mut wide = GapBudget::WIDE;
        (0..1000).for_each(|_| wide.took(GAP));
        assert_eq!(wide.gap(), GAP);
    }

    #[test]
    fn packs_are_apart_and_what_is_needed_twice_counts_once() {
        let frames = vec![(1, 0..100), (2, 5000..9000), (2, 5000..9000), (1, 0..100)];
        assert_eq!(GapBudget::spare(frames), GapBudget { longest: 0, left: 4100 / SHARE });
    }
}
