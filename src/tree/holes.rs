//! Ranges of data and holes in a file.

use std::fs::File;
use std::ops::Range;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// Minimum bytes of a hole; shorter ones are read as zeros.
pub const HOLE_MIN: u64 = 64 << 10;

/// Maximum number of extents of a file; the rest of the file then counts as data.
const EXTENTS_MAX: usize = 1 << 16;

/// Ranges of data in the first `len` bytes of `file`: in order, with gaps of at least [`HOLE_MIN`]. All of the file if the file
/// system does not report holes; none if the file is one hole. Moves the position of `file`.
///
/// # Errors
/// The seek failed: a bad descriptor, or an I/O error.
pub fn extents(file: &File, len: u64) -> Result<Vec<Range<u64>>> {
    let mut extents: Vec<Range<u64>> = Vec::new();
    if len < HOLE_MIN {
        extents.extend((len > 0).then_some(0..len));
        return Ok(extents);
    }
    let mut at = 0;
    while at < len {
        // lseek(2): past the last data SEEK_DATA says ENXIO; a file system without support says EINVAL or the like.
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.min(len),
            Err(Errno::NXIO) => len,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(errno) => return Err(fault(errno)),
        };
        let end = match extents.len() {
            _ if start == len => len,
            EXTENTS_MAX.. => len,
            _ => match seek(file, SeekFrom::Hole(start)) {
                Ok(end) => end.min(len),
                // The file became shorter, or there is no support.
                Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => len,
                Err(errno) => return Err(fault(errno)),
            },
        };
        append(&mut extents, start..end, len);
        at = end.max(at + 1);
    }
    Ok(extents)
}

/// Adds `next`, which is empty at the end of the file, and merges extents across short holes.
fn append(extents: &mut Vec<Range<u64>>, next: Range<u64>, len: u64) {
    let before = extents.last().map_or(0, |last| last.end);
    let near = next.start - before < HOLE_MIN;
    match extents.last_mut() {
        Some(last) if near => last.end = next.end,
        None if near => extents.push(0..next.end),
        _ if next.start < len => extents.push(next),
        _ => {}
    }
}

fn fault(errno: Errno) -> Error {
    Error::other("cannot tell where the holes of a file are").source(std::io::Error::from(errno))
}
