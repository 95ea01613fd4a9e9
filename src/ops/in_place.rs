//! Comparison of a file with one of a saved tree, by the ids of its chunks.

use std::ops::Range;

use crate::chunk::Chunk;
use crate::error::Result;
use crate::format::{ChunkList, Content};
use crate::tree::Opened;

/// Bytes compared with zeros at once.
const ZEROS: usize = 1 << 16;
/// So many zeros: slices are compared faster than byte by byte.
static ZERO_BYTES: [u8; ZEROS] = [0; ZEROS];

/// Verdict of the caller on a chunk that was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Compare the next one.
    Continue,
    /// End the comparison: the file counts as different.
    End,
}

/// True if a file of `size` bytes equals the saved `content`. After each chunk it calls `compared` with the index and the place of the
/// chunk, and whether the file has it there. Blocks.
///
/// # Errors
/// Errors of the file system while it looks for holes; a part that cannot be read counts as different.
pub(super) fn compare_file(
    (content, chunks): (&Content, &ChunkList),
    file: &Opened,
    size: u64,
    mut compared: impl FnMut(u32, &Range<u64>, bool) -> Next,
) -> Result<bool> {
    let mut buffer = Vec::new();
    let (mut same, mut covered) = (size == content.size, 0);
    let data = file.extents(size)?;
    for (chunk, range) in content.placed(chunks) {
        if range.start > covered {
            same = same && is_zero(file, covered..range.start, &data);
        }
        covered = range.end;
        let id = chunks.ids.get(chunk as usize);
        buffer.resize(usize::try_from(range.end - range.start).unwrap_or(usize::MAX), 0);
        let read = range.end <= size && file.read_exact_at(&mut buffer, range.start).is_ok();
        let is_there = read && id.is_some_and(|&id| Chunk::new(&buffer).id() == id);
        same = same && is_there;
        if compared(chunk, &range, is_there) == Next::End {
            return Ok(false);
        }
    }
    Ok(same && is_zero(file, covered..content.size, &data))
}

/// True if `range` only has zeros; holes, which are between the sorted extents `data`, count as zeros.
fn is_zero(file: &Opened, range: Range<u64>, data: &[Range<u64>]) -> bool {
    let first = data.partition_point(|extent| extent.end <= range.start);
    let within = data.get(first..).unwrap_or_default().iter().take_while(|extent| extent.start < range.end);
    let mut parts = within.map(|extent| extent.start.max(range.start)..extent.end.min(range.end));
    let mut buffer = Vec::new();
    parts.all(|part| {
        (part.start..part.end).step_by(ZEROS).all(|at| {
            buffer.resize(usize::try_from(part.end - at).unwrap_or(ZEROS).min(ZEROS), 0);
            file.read_exact_at(&mut buffer, at).is_ok() && ZERO_BYTES.starts_with(&buffer)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// Hours, if each hole is compared with each extent.
    #[test]
    fn holes_between_very_many_extents_are_zero() {
        let file = Opened::File(tempfile::tempfile().unwrap());
        let data: Vec<Range<u64>> = (0..1_000_000).map(|at| at * 10..at * 10 + 1).collect();
        assert!(data.iter().all(|extent| is_zero(&file, extent.end..extent.end + 9, &data)));
    }

    #[test]
    fn data_in_a_hole_is_zero_if_its_bytes_are() {
        let mut file = tempfile::tempfile().unwrap();
        let mut bytes = vec![0; 3 * ZEROS];
        bytes[2 * ZEROS + 5] = 1;
        file.write_all(&bytes).unwrap();
        let file = Opened::File(file);
        let (len, one) = (bytes.len() as u64, 2 * ZEROS as u64 + 5);
        for (range, ends, expected) in [
            (0..one, vec![(0, len)], true),
            (one + 1..len, vec![(0, len)], true),
            (0..one + 1, vec![(0, len)], false),
            (0..len, vec![], true),
            (0..len, vec![(0, one), (one + 1, len)], true),
            (0..len, vec![(0, 7), (one, one + 1)], false),
            (one..one + 1, vec![(0, 7), (9, one)], true),
            (7..len, vec![(len, len + 1)], true),
            (len - 1..len + 1, vec![(0, len + 1)], false),
        ] {
            let data: Vec<Range<u64>> = ends.into_iter().map(|(start, end)| start..end).collect();
            assert_eq!(is_zero(&file, range.clone(), &data), expected, "{range:?} {data:?}");
        }
    }
}
