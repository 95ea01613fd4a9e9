//! Fixed cutting: pieces of equal length, for files that are overwritten in place.

use crate::limits::MIB;

/// Bytes in each piece but the last.
pub const PIECE_LEN: u64 = MIB;

/// The chunk ends of a file of `len` bytes.
pub fn cuts(len: u64) -> impl Iterator<Item = u64> {
    cuts_after(len, 0)
}

/// The chunk ends of a file of `len` bytes after offset `from`.
pub fn cuts_after(len: u64, from: u64) -> impl Iterator<Item = u64> {
    // None is at or after the end of the file.
    let first = if from < len { from / PIECE_LEN + 1 } else { u64::MAX };
    (first..=len.div_ceil(PIECE_LEN)).map(move |nth| nth.saturating_mul(PIECE_LEN).min(len))
}
