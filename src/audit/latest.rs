//! The last entries of a log, read from its end.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::chain::LINE_LEN_MAX;
use super::entry::Entry;
use super::segments;
use crate::error::{Error, Result};

/// Bytes that are read at a time.
const BLOCK_LEN: usize = 64 << 10;
/// Lines that one call looks at, unless they come after the first that is wanted.
const LINES_MAX: u64 = 20_000;

/// Entries of a log, the latest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatestEntries {
    /// Entries.
    pub entries: Vec<Entry>,
    /// Number before which further entries may be found; none at the beginning of the log.
    pub next: Option<u64>,
    /// Lines that are no entries.
    pub unreadable: u64,
}

/// The last entries of the log in `folder` with numbers below `before`, at most `limit` of those that `wanted` accepts. Reads nothing
/// else of the log, and does not verify it. Blocking.
///
/// # Errors
/// Errors of the file system.
pub fn latest_entries(
    folder: &Path,
    before: Option<u64>,
    limit: usize,
    wanted: impl Fn(&Entry) -> bool,
) -> Result<LatestEntries> {
    let before = before.unwrap_or(u64::MAX);
    let (mut found, mut looked_at) = (LatestEntries::default(), 0);
    let segments = segments::list(folder)?;
    for (first, path) in segments.iter().rev().filter(|(first, _)| *first < before) {
        let mut lines = LinesFromEnd::open(path)?;
        while let Some(line) = lines.next()? {
            // In a segment full of what is no entry, nothing else is found: the ones before it are next.
            let mut seq = *first;
            match serde_json::from_slice::<Entry>(&line) {
                Ok(entry) if entry.seq >= before => continue,
                Ok(entry) => {
                    seq = entry.seq;
                    if wanted(&entry) {
                        found.entries.push(entry);
                    }
                }
                Err(_) => found.unreadable += 1,
            }
            looked_at += 1;
            if found.entries.len() >= limit || looked_at >= LINES_MAX {
                found.next = Some(seq).filter(|seq| *seq > 1);
                return Ok(found);
            }
        }
    }
    Ok(found)
}

/// Lines of a file, the last first. What follows the last line's end is left out: it is being written.
struct LinesFromEnd<'a> {
    path: &'a Path,
    file: File,
    /// Position in the file of the first byte in `tail`.
    position: u64,
    /// Bytes read and not returned yet.
    tail: Vec<u8>,
}

impl<'a> LinesFromEnd<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let io = |source| Error::io("cannot read the audit log", path, source);
        let file = File::open(path).map_err(io)?;
        let position = file.metadata().map_err(io)?.len();
        let mut lines = Self { path, file, position, tail: Vec::new() };
        while lines.position > 0 && !lines.tail.contains(&b'\n') {
            lines.read_block()?;
        }
        let ended = lines.tail.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        lines.tail.truncate(ended);
        Ok(lines)
    }

    /// The line before those that were returned; none at the beginning of the file.
    fn next(&mut self) -> Result<Option<Vec<u8>>> {
        // The last byte ends the line.
        while self.position > 0 && !self.tail.iter().rev().skip(1).any(|byte| *byte == b'\n') {
            self.read_block()?;
        }
        if self.tail.is_empty() {
            return Ok(None);
        }
        let end = self.tail.len() - 1;
        let start = self.tail[..end].iter().rposition(|byte| *byte == b'\n').map_or(0, |before| before + 1);
        let mut line = self.tail.split_off(start);
        line.pop();
        Ok(Some(line))
    }

    /// Reads the block before `tail`.
    fn read_block(&mut self) -> Result<()> {
        if self.tail.len() > LINE_LEN_MAX + BLOCK_LEN {
            return Err(Error::damaged("line of the audit log is longer than any that was written")
                .at(self.path.display())
                .expected(format!("at most {LINE_LEN_MAX} bytes"))
                .help("`towline audit verify` says which"));
        }
        let len = usize::try_from(self.position).unwrap_or(BLOCK_LEN).min(BLOCK_LEN);
        let mut block = vec![0; len];
        let position = self.position - len as u64;
        self.file
            .read_exact_at(&mut block, position)
            .map_err(|source| Error::io("cannot read the audit log", self.path, source))?;
        block.append(&mut self.tail);
        (self.tail, self.position) = (block, position);
        Ok(())
    }
}
