//! Comparison of a file with one of a saved tree, by the ids of its chunks.

use std::ops::Range;

use tokio_util::sync::CancellationToken;

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
/// chunk, and whether the file has it there. False once `stop` is cancelled while holes are compared. Blocks.
///
/// # Errors
/// Errors of the file system while it looks for holes; a part that cannot be read counts as different.
pub(super) fn compare_file(
    (content, chunks): (&Content, &ChunkList),
    file: &Opened,
    size: u64,
    stop: &CancellationToken,
    mut compared: impl FnMut(u32, &Range<u64>, bool) -> Next,
) -> Result<bool> {
    let mut buffer = Vec::new();
    let (mut same, mut covered) = (size == content.size, 0);
    let mut zeros = Zeros { file, extents: file.each_extent(size), ahead: None, stop };
    for (chunk, range) in content.placed(chunks) {
        if range.start > covered {
            same = same && zeros.fill(&(covered..range.start))?;
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
    Ok(same && zeros.fill(&(covered..content.size))?)
}

/// Zeros in a file, looked for in ascending order. Holes count as zeros, and are not read.
struct Zeros<'a, I> {
    file: &'a Opened,
    /// Ranges of data that were not looked at yet.
    extents: I,
    /// The range of data that reached to the end of what was compared last, or is after it.
    ahead: Option<Range<u64>>,
    stop: &'a CancellationToken,
}

impl<I: Iterator<Item = Result<Range<u64>>>> Zeros<'_, I> {
    /// True if they fill `range`, which must not start before those of earlier calls end. False if it is stopped.
    fn fill(&mut self, range: &Range<u64>) -> Result<bool> {
        // The search for data may take long: without a hole there is none.
        if range.is_empty() {
            return Ok(true);
        }
        while let Some(data) = self.ahead.take().map(Ok).or_else(|| self.extents.next()).transpose()? {
            let within = data.start.max(range.start)..data.end.min(range.end);
            let is_last = data.end >= range.end;
            if is_last {
                self.ahead = Some(data);
            }
            if self.stop.is_cancelled() || !self.are_read(&within) {
                return Ok(false);
            }
            if is_last {
                break;
            }
        }
        Ok(true)
    }

    /// True if the bytes in `range` are zeros. False if it is stopped.
    fn are_read(&self, range: &Range<u64>) -> bool {
        let mut buffer = Vec::new();
        (range.start..range.end).step_by(ZEROS).all(|at| {
            buffer.resize(usize::try_from(range.end - at).unwrap_or(ZEROS).min(ZEROS), 0);
            let read = !self.stop.is_cancelled() && self.file.read_exact_at(&mut buffer, at).is_ok();
            read && ZERO_BYTES.starts_with(&buffer)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use crate::chunker::Cut;
    use crate::format::Piece;
    use crate::tree::HOLE_MIN;

    fn zeros<'a>(
        file: &'a Opened,
        extents: &'a [Range<u64>],
        stop: &'a CancellationToken,
    ) -> Zeros<'a, impl Iterator<Item = Result<Range<u64>>>> {
        Zeros { file, extents: extents.iter().cloned().map(Ok), ahead: None, stop }
    }

    /// Hours, if each hole is compared with each extent.
    #[test]
    fn holes_between_very_many_extents_are_zero() {
        let (file, stop) = (Opened::File(tempfile::tempfile().unwrap()), CancellationToken::new());
        let data: Vec<Range<u64>> = (0..1_000_000).map(|at| at * 10..at * 10 + 1).collect();
        let mut zeros = zeros(&file, &data, &stop);
        assert!(data.iter().all(|extent| zeros.fill(&(extent.end..extent.end + 9)).unwrap()));
    }

    /// More extents than a list of them has in tests. The file ends with the last of them, so that a read of what follows fails.
    #[test]
    fn a_hole_after_very_many_extents_is_not_read() {
        let file = tempfile::tempfile().unwrap();
        let (count, apart, bytes) = (6, 2 * HOLE_MIN, [1_u8; 4096]);
        for nth in 0..count {
            file.write_all_at(&bytes, nth * apart).unwrap();
        }
        let piece = |nth| Piece { hole: if nth == 0 { 0 } else { apart - bytes.len() as u64 }, first: 0, count: 1 };
        let (pieces, size) = ((0..count).map(piece).collect(), 1 << 40);
        let content = Content { size, cut: Cut::Content, pieces, tensors: Vec::new() };
        let chunks = ChunkList { ids: vec![Chunk::new(&bytes).id()], lens: vec![4096] };
        let (file, stop) = (Opened::File(file), CancellationToken::new());
        let mut found = Vec::new();
        let is_equal = compare_file((&content, &chunks), &file, size, &stop, |_, range, is_there| {
            found.extend(is_there.then_some(range.start));
            Next::Continue
        });
        assert!(is_equal.unwrap());
        assert_eq!(found, (0..count).map(|nth| nth * apart).collect::<Vec<_>>());
    }

    #[test]
    fn data_in_a_hole_is_zero_if_its_bytes_are() {
        let mut file = tempfile::tempfile().unwrap();
        let mut bytes = vec![0; 3 * ZEROS];
        bytes[2 * ZEROS + 5] = 1;
        file.write_all(&bytes).unwrap();
        let (file, stop) = (Opened::File(file), CancellationToken::new());
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
            let is_zero = zeros(&file, &data, &stop).fill(&range).unwrap();
            assert_eq!(is_zero, expected, "{range:?} {data:?}");
        }
        let data = [0..9, 20..one + 1];
        let mut zeros = zeros(&file, &data, &stop);
        let found = [2..4, 6..20, 21..22, 30..one, one..len].map(|range| zeros.fill(&range).unwrap());
        assert_eq!(found, [true, true, true, true, false], "one extent in several ranges");
    }

    #[test]
    fn a_stopped_comparison_of_zeros_ends() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0; 10]).unwrap();
        let (file, stop) = (Opened::File(file), CancellationToken::new());
        let content = Content { size: 10, cut: Cut::Content, pieces: Vec::new(), tensors: Vec::new() };
        let chunks = ChunkList::default();
        let is_equal = || compare_file((&content, &chunks), &file, 10, &stop, |_, _, _| Next::Continue).unwrap();
        assert!(is_equal());
        stop.cancel();
        assert!(!is_equal());
    }
}
