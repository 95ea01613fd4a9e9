//! Files of the audit log: segments, each named by the number of its first entry.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::chain::LINE_LEN_MAX;
use super::journal::SEGMENT_LEN;
use crate::error::{Error, Result};

/// Suffix of a segment's name.
const SUFFIX: &str = ".jsonl";
/// Number of digits before it.
const DIGITS: usize = 20;
/// Maximum length of a valid segment.
const SEGMENT_LEN_MAX: u64 = SEGMENT_LEN + LINE_LEN_MAX as u64;

/// Segment read from the disk.
#[derive(Clone, Debug)]
pub struct SegmentText {
    /// Name of its file.
    pub name: String,
    /// Number of its first entry, from its name.
    pub first: u64,
    /// Content.
    pub bytes: Vec<u8>,
}

/// Name of the segment that begins with entry `first`.
pub(super) fn name(first: u64) -> String {
    format!("{first:0DIGITS$}{SUFFIX}")
}

fn first(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX)?;
    let plain = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten()
}

/// Segments in `folder`, in order. Blocking.
///
/// # Errors
/// Errors of the file system.
pub(super) fn list(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let io = |source| Error::io("cannot read the audit log", folder, source);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if let Some(first) = path.file_name().and_then(|name| name.to_str()).and_then(first) {
            found.push((first, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Reads the segment at `path`. Blocking.
///
/// # Errors
/// Damaged, if it is too long; errors of the file system.
pub(super) fn read(first: u64, path: &Path) -> Result<SegmentText> {
    let io = |source| Error::io("cannot read the audit log", path, source);
    let file = std::fs::File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    file.take(SEGMENT_LEN_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > SEGMENT_LEN_MAX {
        return Err(Error::damaged("segment of the audit log is longer than any that was written")
            .at(path.display())
            .expected(format!("at most {SEGMENT_LEN_MAX} bytes")));
    }
    Ok(SegmentText { name: name(first), first, bytes })
}

/// Segments of the log in `folder`, in order, each read when it is requested. Blocking.
///
/// # Errors
/// Not found, if there is none; errors of the file system.
pub fn read_segments(folder: &Path) -> Result<impl Iterator<Item = Result<SegmentText>> + use<>> {
    let found = list(folder)?;
    if found.is_empty() {
        return Err(Error::not_found("there is no audit log").at(folder.display()).expected(name(1)));
    }
    Ok(found.into_iter().map(|(first, path)| read(first, &path)))
}
