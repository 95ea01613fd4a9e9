//! Codes to bytes: up to four symbols a lookup, four streams at a time.

use super::{BITS_MAX, Code, HEADER_LEN, LENGTHS_LEN, STREAMS};

/// Symbols that one lookup gives, at most.
const SYMBOLS: usize = 4;
/// Lookups between two refills: a refill leaves at least 56 bits.
const LOOKUPS: usize = 5;
const WINDOWS: usize = 1 << BITS_MAX;

/// What a window of bits begins with: whole codes, as many as fit, at most [`SYMBOLS`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(8))]
struct Entry {
    symbols: [u8; SYMBOLS],
    count: u8,
    bits: u8,
    /// Bits of the first one.
    first: u8,
}

/// Decodes what `encode` made of `out.len()` symbols; none if `stored` is anything else.
pub(in crate::codec) fn decode(stored: &[u8], out: &mut [u8]) -> Option<()> {
    let (header, streams) = stored.split_at_checked(HEADER_LEN)?;
    let (lengths, ends) = header.split_first_chunk::<LENGTHS_LEN>()?;
    let table = table(&Code::from_bytes(lengths)?);
    let part = out.len().div_ceil(STREAMS).max(1);
    let mut parts = out.chunks_mut(part);
    let mut start = 0;
    let mut ends = ends.chunks_exact(4).filter_map(|end| end.try_into().ok().map(u32::from_le_bytes));
    let mut lane = || {
        let end = ends.next().map_or(streams.len(), |end| end as usize);
        let data = streams.get(start..end)?;
        start = end;
        Some(Lane { data, out: parts.next().unwrap_or_default(), ..Lane::default() })
    };
    let mut lanes = [lane()?, lane()?, lane()?, lane()?];
    while lanes.iter().all(Lane::has_room) {
        for lane in &mut lanes {
            lane.refill();
        }
        for _ in 0..LOOKUPS {
            for lane in &mut lanes {
                lane.lookup(&table);
            }
        }
    }
    lanes.iter_mut().try_for_each(|lane| lane.finish(&table))
}

/// One stream.
#[derive(Debug, Default)]
struct Lane<'a> {
    data: &'a [u8],
    at: usize,
    acc: u64,
    /// Bits of the accumulator that count; those above are what the next bytes hold.
    bits: u32,
    out: &'a mut [u8],
    filled: usize,
}

impl Lane<'_> {
    /// For a refill and all lookups after it, whatever they give?
    #[inline]
    fn has_room(&self) -> bool {
        self.at + 8 <= self.data.len() && self.filled + SYMBOLS * (LOOKUPS + 1) <= self.out.len()
    }

    #[inline]
    fn refill(&mut self) {
        if let Some(next) = self.data.get(self.at..).and_then(<[u8]>::first_chunk::<8>) {
            self.acc |= u64::from_le_bytes(*next) << self.bits;
            self.at += ((63 - self.bits) >> 3) as usize;
            // That many bytes, whatever was left: 56 bits are there, or up to 63.
            self.bits |= 0b11_1000;
        }
    }

    /// The bits that come next.
    #[inline]
    fn window(&self) -> usize {
        usize::try_from(self.acc % WINDOWS as u64).unwrap_or(0)
    }

    #[inline]
    fn lookup(&mut self, table: &[Entry; WINDOWS]) {
        let entry = table[self.window()];
        if let Some(out) = self.out.get_mut(self.filled..).and_then(<[u8]>::first_chunk_mut::<SYMBOLS>) {
            *out = entry.symbols;
        }
        self.filled += usize::from(entry.count);
        self.acc >>= entry.bits;
        self.bits -= u32::from(entry.bits);
    }

    /// The rest, with every check.
    fn finish(&mut self, table: &[Entry; WINDOWS]) -> Option<()> {
        while self.has_room() {
            self.refill();
            (0..LOOKUPS).for_each(|_| self.lookup(table));
        }
        for at in self.filled..self.out.len() {
            while self.bits < BITS_MAX
                && let Some(&byte) = self.data.get(self.at)
            {
                self.acc |= u64::from(byte) << self.bits;
                self.bits += 8;
                self.at += 1;
            }
            let entry = table[self.window()];
            self.bits = self.bits.checked_sub(entry.first.into())?;
            self.acc >>= entry.first;
            *self.out.get_mut(at)? = entry.symbols[0];
        }
        // Nothing but the last byte's unused bits may be left, and they are zero.
        let left = self.acc & ((1 << self.bits) - 1);
        (self.at == self.data.len() && self.bits < 8 && left == 0).then_some(())
    }
}

/// What each window begins with. The code is complete: each begins with a code.
fn table(code: &Code) -> Box<[Entry; WINDOWS]> {
    let mut table = Box::new([Entry::default(); WINDOWS]);
    for (symbol, bits, length) in code.codes() {
        for entry in table.iter_mut().skip(bits as usize).step_by(1 << length) {
            let length = u8::try_from(length).unwrap_or(u8::MAX);
            *entry = Entry { symbols: [symbol, 0, 0, 0], count: 1, bits: length, first: length };
        }
    }
    for window in (0..WINDOWS).rev() {
        let mut entry = table[window];
        while usize::from(entry.count) < SYMBOLS {
            // A code is told by its bits alone if all of them are in the window.
            let next = table[window >> entry.bits];
            if u32::from(entry.bits + next.first) > BITS_MAX {
                break;
            }
            entry.symbols[usize::from(entry.count)] = next.symbols[0];
            entry.count += 1;
            entry.bits += next.first;
        }
        table[window] = entry;
    }
    table
}
