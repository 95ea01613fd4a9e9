//! Code lengths from counts, and canonical codes from lengths.

use super::{BITS_MAX, LENGTHS_LEN};

/// Windows of [`BITS_MAX`] bits.
const WINDOWS: u32 = 1 << BITS_MAX;

/// The lengths of a complete code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::codec) struct Code {
    lengths: [u8; 256],
}

impl Code {
    /// Creates a code for symbols with these counts; none if fewer than two occur.
    pub(in crate::codec) fn of(counts: &[u32; 256]) -> Option<Self> {
        let mut symbols: Vec<(u32, u8)> = (0..=u8::MAX).map(|symbol| (counts[usize::from(symbol)], symbol)).collect();
        symbols.retain(|&(count, _)| count > 0);
        if symbols.len() < 2 {
            return None;
        }
        symbols.sort_unstable();
        let mut depths = depths(&symbols);
        limit(&mut depths);
        let mut lengths = [0; 256];
        for (&(_, symbol), depth) in symbols.iter().zip(depths) {
            lengths[usize::from(symbol)] = depth;
        }
        Some(Self { lengths })
    }

    /// The lengths as stored.
    pub(super) fn to_bytes(&self) -> [u8; LENGTHS_LEN] {
        let mut out = [0; LENGTHS_LEN];
        for (out, pair) in out.iter_mut().zip(self.lengths.chunks_exact(2)) {
            *out = pair[0] | pair[1] << 4;
        }
        out
    }

    /// Reads stored lengths; none unless they make a complete code.
    pub(super) fn from_bytes(bytes: &[u8; LENGTHS_LEN]) -> Option<Self> {
        let mut lengths = [0; 256];
        for (pair, byte) in lengths.chunks_exact_mut(2).zip(bytes) {
            pair[0] = byte & 15;
            pair[1] = byte >> 4;
        }
        let fits = lengths.iter().all(|&length| u32::from(length) <= BITS_MAX);
        let filled: u32 = lengths.iter().filter(|&&length| length > 0 && fits).map(|&length| WINDOWS >> length).sum();
        (fits && filled == WINDOWS).then_some(Self { lengths })
    }

    /// Bits that symbols with these counts take.
    pub(super) fn bits(&self, counts: &[u32; 256]) -> u64 {
        self.lengths.iter().zip(counts).map(|(&length, &count)| u64::from(length) * u64::from(count)).sum()
    }

    /// Bits of a symbol's code.
    pub(super) fn length(&self, symbol: u8) -> u8 {
        self.lengths[usize::from(symbol)]
    }

    /// Each symbol that has a code, with its bits (the first one lowest) and their number.
    pub(super) fn codes(&self) -> impl Iterator<Item = (u8, u32, u32)> {
        let mut counts = [0u32; BITS_MAX as usize + 1];
        for &length in self.lengths.iter().filter(|&&length| length > 0) {
            counts[usize::from(length)] += 1;
        }
        // The first code of each length follows the last one of the shorter length.
        let mut next = [0u32; BITS_MAX as usize + 1];
        for length in 1..next.len() {
            next[length] = (next[length - 1] + counts[length - 1]) << 1;
        }
        let lengths = self.lengths;
        (0..=u8::MAX).filter_map(move |symbol| {
            let length = u32::from(lengths[usize::from(symbol)]);
            (length > 0).then(|| {
                let code = &mut next[length as usize];
                let bits = code.reverse_bits() >> (32 - length);
                *code += 1;
                (symbol, bits, length)
            })
        })
    }
}

/// Depths in the Huffman tree of symbols sorted by count: two queues, the leaves and the inner nodes as they are made.
fn depths(symbols: &[(u32, u8)]) -> Vec<u8> {
    let leaves = symbols.len();
    let mut weights: Vec<u64> = symbols.iter().map(|&(count, _)| count.into()).collect();
    let mut parents = vec![0; 2 * leaves - 1];
    let (mut leaf, mut inner) = (0, leaves);
    for node in leaves..2 * leaves - 1 {
        let mut weight = 0;
        for _ in 0..2 {
            let from_leaves = leaf < leaves && (inner >= node || weights[leaf] <= weights[inner]);
            let lightest = if from_leaves { &mut leaf } else { &mut inner };
            weight += weights[*lightest];
            parents[*lightest] = node;
            *lightest += 1;
        }
        weights.push(weight);
    }
    let mut depths = vec![0u8; 2 * leaves - 1];
    for node in (0..2 * leaves - 2).rev() {
        depths[node] = depths[parents[node]].saturating_add(1);
    }
    depths.truncate(leaves);
    depths
}

/// Makes no depth larger than [`BITS_MAX`] and the code complete again. `depths` fall from rare to frequent symbols.
fn limit(depths: &mut [u8]) {
    let max = u8::try_from(BITS_MAX).unwrap_or(u8::MAX);
    if depths.iter().all(|&depth| depth <= max) {
        return;
    }
    depths.iter_mut().for_each(|depth| *depth = (*depth).min(max));
    let share = |depth: u8| WINDOWS >> depth;
    let mut taken: u32 = depths.iter().map(|&depth| share(depth)).sum();
    // Lengthens the rarest codes that can still be longer, to compensate for the cut.
    while taken > WINDOWS {
        let Some(depth) = depths.iter_mut().find(|depth| **depth < max) else { return };
        taken -= share(*depth) - share(*depth + 1);
        *depth += 1;
    }
    // Uses the excess to shorten the most frequent symbols for which it suffices.
    while taken < WINDOWS {
        let fits = |depth: &&mut u8| share(**depth) <= WINDOWS - taken;
        let Some(depth) = depths.iter_mut().rev().find(fits) else { return };
        taken += share(*depth);
        *depth -= 1;
    }
}
