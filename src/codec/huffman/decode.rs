//! Codes to bytes.

use super::lanes::{Lane, Table, run};
use super::{Code, HEADER_LEN, LENGTHS_LEN, STREAMS};

/// Decodes the output of `encode` for `out.len()` symbols; none if `stored` is invalid.
pub(in crate::codec) fn decode(stored: &[u8], out: &mut [u8]) -> Option<()> {
    let (header, streams) = stored.split_at_checked(HEADER_LEN)?;
    let (lengths, ends) = header.split_first_chunk::<LENGTHS_LEN>()?;
    let code = Code::from_bytes(lengths)?;
    let table = Table::of(&code);
    let part = out.len().div_ceil(STREAMS).max(1);
    let mut parts = out.chunks_mut(part);
    let mut start = 0;
    let mut ends = ends.chunks_exact(4).filter_map(|end| end.try_into().ok().map(u32::from_le_bytes));
    let mut lane = || {
        let end = ends.next().map_or(streams.len(), |end| end as usize);
        let data = streams.get(start..end)?;
        start = end;
        Some(Lane::new(data, parts.next().unwrap_or_default()))
    };
    let mut lanes = [lane()?, lane()?, lane()?, lane()?];
    run(&mut lanes, &table);
    lanes.into_iter().try_for_each(|lane| {
        let mut alone = [lane];
        run(&mut alone, &table);
        let [lane] = alone;
        finish(lane, &code, &table)
    })
}

/// Decodes the remaining symbols one by one, with all checks.
fn finish(lane: Lane<'_>, code: &Code, table: &Table) -> Option<()> {
    let (data, mut at, out) = lane.rest();
    for out in out {
        *out = table.first(bits(data, at));
        at += usize::from(code.length(*out));
    }
    // Only unused bits of the last byte may be left, and they must be zero.
    let unused = at.next_multiple_of(8) - at;
    (at.div_ceil(8) == data.len() && bits(data, at) & ((1 << unused) - 1) == 0).then_some(())
}

/// The bits from bit `at` on, at least 24; zeros after the end.
fn bits(data: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    let data = data.get(at / 8..).unwrap_or_default();
    bytes.iter_mut().zip(data).for_each(|(to, byte)| *to = *byte);
    u32::from_le_bytes(bytes) >> (at % 8)
}
