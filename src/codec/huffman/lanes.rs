//! The decoding loop: up to six symbols per lookup, several streams in parallel, and no checks inside.
//!
//! With checks it would take 1.5 times as long, and its state would not fit the registers.

#![expect(unsafe_code, reason = "reads and writes whose bounds are checked once for many")]

use super::{BITS_MAX, Code};

/// Maximum symbols of one lookup.
const SYMBOLS: usize = 6;
/// Lookups between two refills: a refill leaves at least 56 bits.
const LOOKUPS: usize = 5;
const WINDOWS: usize = 1 << BITS_MAX;
/// Bytes of one read and of one write.
const WORD: usize = 8;

/// Decoding table: for each window of bits, the complete codes in it, at most [`SYMBOLS`].
///
/// An entry has, from the lowest byte on, the bits of those codes, at most [`BITS_MAX`], their number, and their symbols.
#[derive(Debug)]
pub(super) struct Table(Box<[u64; WINDOWS]>);

impl Table {
    /// The code is complete: each window begins with a code.
    pub(super) fn of(code: &Code) -> Self {
        // The bits of each code after a leading one, by which longer entries are built.
        let mut codes = [0u32; 2 * WINDOWS];
        for (symbol, bits, length) in code.codes() {
            codes[(1 << length | bits) as usize % (2 * WINDOWS)] = u32::from(symbol) << 16 | 1 << 8 | length;
        }
        // Builds windows of one bit, of two, and so on: each is the entry without the last bit, extended by a code that ends with
        // that bit, if there is one.
        let mut table = Box::new([0; WINDOWS]);
        for bits in 1..=BITS_MAX {
            let half = 1usize << (bits - 1);
            let (zeros, ones) = table.split_at_mut(half);
            for (window, (zero, one)) in zeros.iter_mut().zip(ones).enumerate() {
                let (entry, used) = (*zero, *zero & 63);
                let (count, end) = (entry >> 8 & 255, half >> used);
                let full = u64::from(count == SYMBOLS as u64).wrapping_sub(1);
                let grown = |left: usize| {
                    let code = u64::from(codes[left % (2 * WINDOWS)]) & full;
                    entry + (code & 0xFFFF) + ((code >> 16 << 16) << (8 * count % 64))
                };
                let left = window >> used | end << 1;
                (*zero, *one) = (grown(left), grown(left | end));
            }
        }
        Self(table)
    }

    /// The first symbol of those that begin with `bits`.
    pub(super) fn first(&self, bits: u32) -> u8 {
        self.0[bits as usize % WINDOWS].to_le_bytes()[2]
    }
}

/// One stream, and its output.
#[derive(Debug)]
pub(super) struct Lane<'a> {
    data: &'a [u8],
    /// The byte that the accumulator was filled from.
    at: usize,
    /// Next bits; above them a one, then as many zeros as bits from `at` on were used: at most 62.
    acc: u64,
    out: &'a mut [u8],
    filled: usize,
}

impl<'a> Lane<'a> {
    pub(super) fn new(data: &'a [u8], out: &'a mut [u8]) -> Self {
        Self { data, at: 0, acc: NONE_USED, out, filled: 0 }
    }

    /// Data, position of the next bit, and the rest of the output.
    pub(super) fn rest(self) -> (&'a [u8], usize, &'a mut [u8]) {
        let at = self.at * 8 + self.acc.leading_zeros() as usize;
        (self.data, at, self.out.get_mut(self.filled..).unwrap_or_default())
    }

    /// Number of refills, each with its lookups, that certainly stay within data and output.
    fn rounds(&self) -> usize {
        // A refill moves on by at most seven bytes, those that the round before used, and reads a word.
        let refills = (self.data.len() - self.at).saturating_sub(WORD) / (WORD - 1);
        // A lookup moves on by at most all symbols, and writes a word.
        let lookups = (self.out.len() - self.filled).saturating_sub(WORD) / SYMBOLS;
        refills.min(lookups / LOOKUPS)
    }
}

/// An empty accumulator.
const NONE_USED: u64 = 1 << 63;

/// Decodes as long as all lanes certainly have data and space.
pub(super) fn run<const N: usize>(lanes: &mut [Lane<'_>; N], table: &Table) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("bmi2") && is_x86_feature_detected!("lzcnt") {
        // SAFETY: the processor has all that this function asks for.
        return unsafe { run_bmi(lanes, table) };
    }
    run_scalar(lanes, table);
}

/// The same, with shifts that leave the flags alone.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "bmi1,bmi2,lzcnt")]
fn run_bmi<const N: usize>(lanes: &mut [Lane<'_>; N], table: &Table) {
    run_scalar(lanes, table);
}

#[expect(clippy::inline_always, reason = "it is to be compiled anew within each of its callers")]
#[inline(always)]
fn run_scalar<const N: usize>(lanes: &mut [Lane<'_>; N], table: &Table) {
    loop {
        let rounds = lanes.iter().map(Lane::rounds).min().unwrap_or(0);
        if rounds == 0 {
            return;
        }
        let mut cursors = lanes.each_mut().map(|lane| Cursor::of(lane));
        for _ in 0..rounds {
            for cursor in &mut cursors {
                // SAFETY: there are as many rounds as each lane has room for.
                unsafe { cursor.refill() };
            }
            for _ in 0..LOOKUPS {
                for cursor in &mut cursors {
                    // SAFETY: there are as many rounds as each lane has room for, with so many lookups after a refill.
                    unsafe { cursor.lookup(table) };
                }
            }
        }
        for (lane, cursor) in lanes.iter_mut().zip(cursors) {
            lane.at = cursor.from.addr() - lane.data.as_ptr().addr();
            lane.filled = cursor.to.addr() - lane.out.as_ptr().addr();
            lane.acc = cursor.acc;
        }
    }
}

/// State of a lane in the loop, in three registers.
struct Cursor {
    from: *const u8,
    to: *mut u8,
    acc: u64,
}

#[expect(clippy::inline_always, reason = "they are to be compiled anew within each of their callers")]
impl Cursor {
    #[inline(always)]
    fn of(lane: &mut Lane<'_>) -> Self {
        Self { from: lane.data[lane.at..].as_ptr(), to: lane.out[lane.filled..].as_mut_ptr(), acc: lane.acc }
    }

    /// # Safety
    /// At least 15 more bytes of data must follow.
    #[inline(always)]
    unsafe fn refill(&mut self) {
        let used = self.acc.leading_zeros();
        // SAFETY: at most 62 bits were used, so it moves by at most seven bytes.
        self.from = unsafe { self.from.add((used >> 3) as usize) };
        // SAFETY: there are eight bytes more.
        let next = u64::from_le_bytes(unsafe { self.from.cast::<[u8; WORD]>().read() });
        self.acc = (next | NONE_USED) >> (used & 7);
    }

    /// # Safety
    /// At least a word of output must follow, and this must be at most the fifth lookup since a refill.
    #[inline(always)]
    unsafe fn lookup(&mut self, table: &Table) {
        let entry = table.0[usize::try_from(self.acc % WINDOWS as u64).unwrap_or(0)];
        // SAFETY: there is room for a word.
        unsafe { self.to.cast::<[u8; WORD]>().write((entry >> 16).to_le_bytes()) };
        // SAFETY: an entry has at most six symbols, fewer than there was room for.
        self.to = unsafe { self.to.add((entry >> 8 & 255) as usize) };
        self.acc >>= entry & 63;
    }
}
