//! Pointer files of the Python package: small files at the paths of checkpoints that are in a repository already.

use std::io::{self, Read as _};
use std::path::Path;

use super::metrics::open;
use super::truncated::ZIP_BEGIN;

/// Longest pointer file (`_LENGTH_MAX` in `bindings/python/python/towline/_pointer_files.py`).
pub(in crate::ops) const POINTER_LEN_MAX: u64 = 16 << 10;
/// Member of the zip archive that holds the reference (`_ENTRY` there).
const MEMBER: &[u8] = b"archive/towline.json";

/// True if the file at `path` is a pointer file. One that cannot be opened is none: it cannot be saved either.
///
/// # Errors
/// If it cannot be read.
pub(super) fn is_pointer(path: &Path) -> io::Result<bool> {
    let Ok(file) = open(path) else { return Ok(false) };
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > POINTER_LEN_MAX {
        return Ok(false);
    }
    let mut bytes = Vec::new();
    file.take(POINTER_LEN_MAX).read_to_end(&mut bytes)?;
    Ok(is_pointer_content(&bytes))
}

/// True if `bytes`, those of a whole file, are a pointer file's.
pub(in crate::ops) fn is_pointer_content(bytes: &[u8]) -> bool {
    bytes.len() as u64 <= POINTER_LEN_MAX
        && bytes.starts_with(ZIP_BEGIN)
        && bytes.windows(MEMBER.len()).any(|window| window == MEMBER)
}
