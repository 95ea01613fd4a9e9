//! Bytes to codes.

use super::{BITS_MAX, Code, HEADER_LEN, STREAMS};

/// Symbols between two writes: as many as fit the accumulator beside what a write leaves in it.
const BATCH: usize = 5;

/// Bytes that [`encode`] will make of symbols with these counts, give or take one a stream.
pub(in crate::codec) fn coded_len(code: &Code, counts: &[u32; 256]) -> usize {
    usize::try_from(code.bits(counts).div_ceil(8)).unwrap_or(usize::MAX).saturating_add(HEADER_LEN)
}

/// Appends `symbols`, each of which must have a code.
pub(in crate::codec) fn encode(code: &Code, symbols: &[u8], out: &mut Vec<u8>) {
    let mut table = [0u32; 256];
    for (symbol, bits, length) in code.codes() {
        table[usize::from(symbol)] = bits << 8 | length;
    }
    let header = out.len();
    out.extend_from_slice(&code.to_bytes());
    out.resize(header + HEADER_LEN, 0);
    let streams = out.len();
    let part = symbols.len().div_ceil(STREAMS).max(1);
    for stream in 0..STREAMS {
        let from = (stream * part).min(symbols.len());
        let to = (from + part).min(symbols.len());
        append(&table, &symbols[from..to], out);
        let end = u32::try_from(out.len() - streams).unwrap_or(u32::MAX);
        if stream + 1 < STREAMS {
            let at = streams - 4 * (STREAMS - 1 - stream);
            out[at..at + 4].copy_from_slice(&end.to_le_bytes());
        }
    }
}

fn append(table: &[u32; 256], symbols: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    // Room for the longest codes, and for the last write.
    out.resize(start + symbols.len() * BITS_MAX as usize / 8 + 16, 0);
    let room = &mut out[start..];
    let (mut acc, mut bits, mut at) = (0u64, 0u32, 0usize);
    let mut push = |batch: &[u8]| {
        for &symbol in batch {
            let entry = table[usize::from(symbol)];
            acc |= u64::from(entry >> 8) << bits;
            bits += entry & 0xFF;
        }
        room[at..at + 8].copy_from_slice(&acc.to_le_bytes());
        at += (bits >> 3) as usize;
        acc >>= bits & !7;
        bits &= 7;
    };
    let batches = symbols.chunks_exact(BATCH);
    let rest = batches.remainder();
    batches.for_each(&mut push);
    push(rest);
    let end = start + at + usize::from(bits > 0);
    out.truncate(end);
}
