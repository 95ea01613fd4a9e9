//! Content-defined cutting: boundaries that move with the bytes, so that an insertion changes only the chunks around it.
//!
//! A *gear hash* runs over the file: `h = (h << 1) + G[byte]` modulo 2^64, from `h = 0` before the first byte, where `G[i]`
//! is the first eight bytes, little-endian, of `BLAKE3("towline gear v1" || i)` with `i` as one byte. A byte's share has
//! left the hash after 64 steps, so `h` depends on the last 64 bytes alone, wherever the reading began: windows of a file
//! can be searched in any order and in parallel, and give exactly the cuts of one pass.
//!
//! An offset is a *candidate* if the hash after the byte before it is below [`THRESHOLD`]. The cuts are then found in
//! order: after the latest cut comes the first candidate at least [`LEN_MIN`] away, or, if there is none within
//! [`LEN_MAX`], the offset [`LEN_MAX`] away; the end of the file is the last cut. Random bytes give chunks of
//! `LEN_MIN + 1 / p` on average (256 KiB), less 0.5 % that the maximum takes away.
//!
//! The gear hash is from Xia et al., "Ddelta: A deduplication-inspired fast delta compression approach" (2014); comparing
//! instead of masking lets the mean be any number.

use std::sync::LazyLock;

use crate::limits::{KIB, MIB};

/// Bytes in a chunk, at least (but for a file's last).
pub const LEN_MIN: u64 = 64 * KIB;
/// Bytes in a chunk, on average.
pub const LEN_MEAN: u64 = 256 * KIB;
/// Bytes in a chunk, at most.
pub const LEN_MAX: u64 = MIB;
/// Bytes that the hash remembers: what [`candidates`] must see from before its window.
pub const LOOKBACK: usize = 64;
/// A hash below this makes a candidate: once in `LEN_MEAN - LEN_MIN` (192 Ki) bytes.
pub const THRESHOLD: u64 = u64::MAX / (LEN_MEAN - LEN_MIN);

/// Parts of a window that are searched at once: enough independent chains to fill a core's load and add units.
const LANES: usize = 4;
/// Bytes each lane takes at a time: one load.
const WORD: usize = 8;

static GEAR: LazyLock<[u64; 256]> = LazyLock::new(|| {
    std::array::from_fn(|byte| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"towline gear v1").update(&(byte as u64).to_le_bytes()[..1]);
        let mut first = [0; 8];
        hasher.finalize_xof().fill(&mut first);
        u64::from_le_bytes(first)
    })
});

/// Appends to `found` every candidate in `window`, in order: the number of the window's bytes before it, from 1 to
/// `window.len()`.
///
/// `lookback` is what stands before the window in the file, of which the last [`LOOKBACK`] bytes count; it may be shorter
/// only where the file begins. A window of 4 GiB or more is searched in its first 4 GiB - 1 bytes only: read less at once.
pub fn candidates(lookback: &[u8], window: &[u8], found: &mut Vec<u32>) {
    let window = &window[..window.len().min(u32::MAX as usize)];
    let gear = &*GEAR;
    let first_new = found.len();
    let lane_len = window.len() / LANES / WORD * WORD;
    let starts: [usize; LANES] = std::array::from_fn(|lane| lane * lane_len);
    let mut hashes = starts.map(|start| hash_before(gear, lookback, window, start));

    let [a, b, c, d] = starts.map(|start| window[start..start + lane_len].as_chunks::<WORD>().0);
    for (step, (((a, b), c), d)) in a.iter().zip(b).zip(c).zip(d).enumerate() {
        let (before, words) = (hashes, [a, b, c, d]);
        // The smallest hash of a lane stands for its word: a minimum is cheaper than a branch for each byte.
        let mut smallest = [u64::MAX; LANES];
        for at in 0..WORD {
            for lane in 0..LANES {
                hashes[lane] = (hashes[lane] << 1).wrapping_add(gear[usize::from(words[lane][at])]);
                smallest[lane] = smallest[lane].min(hashes[lane]);
            }
        }
        for lane in (0..LANES).filter(|&lane| smallest[lane] < THRESHOLD) {
            let start = starts[lane] + step * WORD;
            search(gear, before[lane], window, start..start + WORD, found);
        }
    }
    let tail = lane_len * LANES;
    search(gear, hash_before(gear, lookback, window, tail), window, tail..window.len(), found);
    found[first_new..].sort_unstable();
}

/// The hash before byte `at` of the window.
fn hash_before(gear: &[u64; 256], lookback: &[u8], window: &[u8], at: usize) -> u64 {
    let inside = at.min(LOOKBACK);
    let outside = (LOOKBACK - inside).min(lookback.len());
    let bytes = lookback[lookback.len() - outside..].iter().chain(&window[at - inside..at]);
    bytes.fold(0, |hash: u64, byte| (hash << 1).wrapping_add(gear[usize::from(*byte)]))
}

/// Goes through `range` byte by byte, starting from `hash`.
#[cold]
#[inline(never)]
fn search(gear: &[u64; 256], mut hash: u64, window: &[u8], range: std::ops::Range<usize>, found: &mut Vec<u32>) {
    for at in range {
        hash = (hash << 1).wrapping_add(gear[usize::from(window[at])]);
        if hash < THRESHOLD {
            found.extend(u32::try_from(at + 1));
        }
    }
}

/// Chooses the cuts among the candidates of a file, window by window, in order.
#[derive(Clone, Debug, Default)]
pub struct Resolver {
    /// Offset of the next window.
    end: u64,
    /// The latest cut.
    cut: u64,
}

impl Resolver {
    /// A resolver at the start of a file.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next window: its candidates (as [`candidates`] found them) and its length. Appends to `cuts` what they
    /// settle, as offsets in the file.
    pub fn push(&mut self, found: &[u32], window_len: u64, cuts: &mut Vec<u64>) {
        let start = self.end;
        self.end = start.saturating_add(window_len);
        for &candidate in found {
            let at = start.saturating_add(u64::from(candidate)).min(self.end);
            self.force(at, cuts);
            if at.saturating_sub(self.cut) >= LEN_MIN {
                self.cut_at(at, cuts);
            }
        }
        self.force(self.end, cuts);
    }

    /// Ends the file: the rest is the last chunk.
    pub fn finish(mut self, cuts: &mut Vec<u64>) {
        if self.end > self.cut {
            self.cut_at(self.end, cuts);
        }
    }

    /// Makes the cuts up to `at` that no candidate made.
    fn force(&mut self, at: u64, cuts: &mut Vec<u64>) {
        while at.saturating_sub(self.cut) >= LEN_MAX {
            self.cut_at(self.cut + LEN_MAX, cuts);
        }
    }

    fn cut_at(&mut self, at: u64, cuts: &mut Vec<u64>) {
        self.cut = at;
        cuts.push(at);
    }
}

/// The chunk ends of a whole file in memory.
#[must_use]
pub fn cuts(bytes: &[u8]) -> Vec<u64> {
    const WINDOW: usize = 1 << 24;
    let (mut resolver, mut found, mut cuts) = (Resolver::new(), Vec::new(), Vec::new());
    for start in (0..bytes.len()).step_by(WINDOW) {
        let window = &bytes[start..bytes.len().min(start + WINDOW)];
        found.clear();
        candidates(&bytes[start.saturating_sub(LOOKBACK)..start], window, &mut found);
        resolver.push(&found, window.len() as u64, &mut cuts);
    }
    resolver.finish(&mut cuts);
    cuts
}
