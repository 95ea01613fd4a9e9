//! Content cutting: the same cuts however a file is read, and few new chunks after an edit.

use std::collections::HashSet;

use proptest::prelude::*;

use super::{assert_covers, random};
use crate::chunk::Chunk;
use crate::chunker::content::{LEN_MAX, LEN_MEAN, LEN_MIN, LOOKBACK, Resolver, THRESHOLD, candidates, cuts};
use crate::id::ChunkId;

/// The cuts of `bytes` read in windows that end at `ends` (in any order, ends beyond the bytes ignored).
fn cuts_by_windows(bytes: &[u8], ends: impl IntoIterator<Item = usize>) -> Vec<u64> {
    let mut ends: Vec<usize> = ends.into_iter().filter(|&end| end < bytes.len()).collect();
    ends.sort_unstable();
    ends.push(bytes.len());
    let (mut resolver, mut cuts, mut start) = (Resolver::new(), Vec::new(), 0_usize);
    for end in ends {
        let mut found = Vec::new();
        candidates(&bytes[start.saturating_sub(LOOKBACK)..start], &bytes[start..end], &mut found);
        resolver.push(&found, (end - start) as u64, &mut cuts);
        start = end;
    }
    resolver.finish(&mut cuts);
    cuts
}

/// The module's specification, word for word: one byte at a time, gear values made on the spot.
fn cuts_by_the_book(bytes: &[u8]) -> Vec<u64> {
    let gear: Vec<u64> = (0..=255_u8)
        .map(|byte| {
            let digest = blake3::hash(&[b"towline gear v1".as_slice(), &[byte]].concat());
            u64::from_le_bytes(digest.as_bytes()[..8].try_into().unwrap())
        })
        .collect();
    let (mut hash, mut cut, mut cuts) = (0_u64, 0, Vec::new());
    for (byte, at) in bytes.iter().zip(1_u64..) {
        hash = (hash << 1).wrapping_add(gear[usize::from(*byte)]);
        let candidate = hash < THRESHOLD && at - cut >= LEN_MIN;
        if candidate || at - cut == LEN_MAX || at == bytes.len() as u64 {
            cut = at;
            cuts.push(at);
        }
    }
    cuts
}

/// Bytes with a candidate every 64 to 96 bytes: one lucky context again and again, with random bytes between.
fn dense(seed: u64, len: usize) -> Vec<u8> {
    let (source, mut found) = (random(5, 2 << 20), Vec::new());
    candidates(&[], &source, &mut found);
    let lucky = &source[found[0] as usize - LOOKBACK..found[0] as usize];
    let mut bytes = Vec::new();
    for gap in random(seed, len / LOOKBACK + 1) {
        bytes.extend_from_slice(lucky);
        bytes.extend(random(seed, usize::from(gap % 32)));
    }
    bytes.truncate(len);
    bytes
}

/// The chunks of `bytes`, named.
fn chunks(bytes: &[u8]) -> Vec<Chunk<'_>> {
    let mut at = 0;
    let cuts = cuts(bytes).into_iter().map(|end| usize::try_from(end).unwrap());
    cuts.map(|end| Chunk::new(&bytes[std::mem::replace(&mut at, end)..end])).collect()
}

#[test]
fn a_stranger_who_follows_the_book_finds_the_same_cuts() {
    let bytes = random(1, 5 << 20);
    let got = cuts(&bytes);
    assert_eq!(got, cuts_by_the_book(&bytes));
    assert_covers(&got, bytes.len() as u64, LEN_MAX);
    assert!(cuts(&[]).is_empty());
    assert_eq!(cuts(b"x"), [1]);
}

/// Changing any of these numbers silently would cost every repository its deduplication.
#[test]
fn cuts_stay_what_they_were() {
    assert_eq!(cuts(&random(2, 1 << 20)), GOLDEN);
}

const GOLDEN: &[u64] = &[119_401, 254_821, 360_241, 527_712, 659_191, 1_048_576];

#[test]
fn chunks_keep_to_their_lengths() {
    let bytes = random(3, 64 << 20);
    let got = cuts(&bytes);
    assert_covers(&got, bytes.len() as u64, LEN_MAX);
    assert!(got.windows(2).rev().skip(1).all(|pair| pair[1] - pair[0] >= LEN_MIN));
    let mean = bytes.len() as u64 / got.len() as u64;
    assert!(mean.abs_diff(LEN_MEAN) < LEN_MEAN / 6, "mean {mean}");
}

#[test]
fn bytes_that_never_change_are_cut_at_the_maximum() {
    for byte in 0..=255_u8 {
        let mut found = Vec::new();
        candidates(&[byte; LOOKBACK], &[byte; 1000], &mut found);
        assert_eq!(found, [] as [u32; 0], "a run of {byte}");
    }
    let zeros = vec![0; 3 << 20];
    assert_eq!(cuts(&zeros), [1 << 20, 2 << 20, 3 << 20]);
}

#[test]
fn insertions_change_only_the_chunks_around_them() {
    let before = random(4, 64 << 20);
    let mut after = before.clone();
    for nth in 0..10_u8 {
        let at = usize::from(nth) * 6_500_000 + 12_345;
        after.splice(at..at, random(u64::from(nth), 1 + 7 * usize::from(nth)));
    }
    let known: HashSet<ChunkId> = chunks(&before).iter().map(Chunk::id).collect();
    let new: usize =
        chunks(&after).iter().filter(|chunk| !known.contains(&chunk.id())).map(|chunk| chunk.bytes().len()).sum();
    assert!(new > 0 && new * 10 < after.len(), "{new} new bytes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_windows_give_the_same_cuts(
        seed in any::<u64>(),
        len in 0_usize..3 << 20,
        ends in prop::collection::vec(0_usize..3 << 20, 0..12),
        close in 0_usize..200,
    ) {
        let bytes = random(seed, len);
        let whole = cuts(&bytes);
        assert_covers(&whole, len as u64, LEN_MAX);
        // Windows shorter than the lookback too: a run of one-byte ones around some end.
        let tiny = ends.first().map_or(0, |&end| end);
        let ends = ends.into_iter().chain(tiny..tiny + close);
        prop_assert_eq!(cuts_by_windows(&bytes, ends), whole);
    }

    #[test]
    fn every_lane_finds_its_candidates_and_in_order(seed in any::<u64>(), len in 0_usize..4000, split in 0_usize..4000) {
        let bytes = dense(seed, len);
        let split = split.min(len);
        let (mut whole, mut parts, mut right) = (Vec::new(), Vec::new(), Vec::new());
        candidates(&[], &bytes, &mut whole);
        prop_assert!(whole.len() >= len / 128 && whole.is_sorted());
        candidates(&[], &bytes[..split], &mut parts);
        candidates(&bytes[..split], &bytes[split..], &mut right);
        parts.extend(right.into_iter().map(|at| at + u32::try_from(split).unwrap()));
        prop_assert_eq!(parts, whole);
    }

    #[test]
    fn resolved_cuts_cover_whatever_the_candidates(
        windows in prop::collection::vec((0_u64..3 << 20, prop::collection::vec(any::<u32>(), 0..20)), 0..8),
    ) {
        let (mut resolver, mut cuts, mut len) = (Resolver::new(), Vec::new(), 0);
        for (window, mut found) in windows {
            found.sort_unstable();
            resolver.push(&found, window, &mut cuts);
            len += window;
        }
        resolver.finish(&mut cuts);
        assert_covers(&cuts, len, LEN_MAX);
    }
}
