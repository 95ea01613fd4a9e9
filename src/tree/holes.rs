//! Ranges of data and holes in a file.

use std::fs::File;
use std::ops::Range;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// Minimum bytes of a hole; shorter ones are read as zeros.
pub const HOLE_MIN: u64 = 64 << 10;

/// Maximum number of extents in a list of them.
const EXTENTS_MAX: usize = if cfg!(test) { 4 } else { 1 << 16 };

/// Ranges of data in the first `len` bytes of `file`: in order, with gaps of at least [`HOLE_MIN`]. All of the file if the file
/// system does not report holes; none if the file is one hole. After very many of them the rest counts as data: [`Extents`] has no
/// limit. Moves the position of `file`.
///
/// # Errors
/// The seek failed: a bad descriptor, or an I/O error.
pub fn extents(file: &File, len: u64) -> Result<Vec<Range<u64>>> {
    let mut extents = Vec::new();
    for extent in Extents::new(file, len) {
        let extent = extent?;
        if extents.len() == EXTENTS_MAX {
            extents.push(extent.start..len);
            break;
        }
        extents.push(extent);
    }
    Ok(extents)
}

/// The ranges that [`extents`] lists, each looked for when it is requested. The iteration moves the position of the file, and ends with
/// the first error.
#[derive(Debug)]
pub struct Extents<'a> {
    /// None for a file without holes.
    file: Option<&'a File>,
    len: u64,
    /// Where to look for more data.
    at: u64,
    /// Data that was found, but not returned yet.
    ahead: Option<Range<u64>>,
}

impl<'a> Extents<'a> {
    /// The ranges of data in the first `len` bytes of `file`.
    #[must_use]
    pub fn new(file: &'a File, len: u64) -> Self {
        if len < HOLE_MIN { Self::whole(len) } else { Self { file: Some(file), len, at: 0, ahead: None } }
    }

    /// One range with all of `len` bytes.
    pub(super) fn whole(len: u64) -> Self {
        Self { file: None, len, at: len, ahead: Some(0..len) }
    }

    /// The next data, however short the hole before it; empty at the end of the file, and None after that.
    fn data(&mut self) -> Result<Option<Range<u64>>> {
        let Some(file) = self.file.filter(|_| self.at < self.len) else { return Ok(None) };
        // lseek(2): past the last data SEEK_DATA says ENXIO; a file system without support says EINVAL or the like.
        let start = match seek(file, SeekFrom::Data(self.at)) {
            Ok(start) => start.min(self.len),
            Err(Errno::NXIO) => self.len,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => self.at,
            Err(errno) => return Err(fault(errno)),
        };
        if start == self.len {
            self.at = self.len;
            return Ok(Some(start..start));
        }
        let end = match seek(file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(self.len),
            // The file became shorter, or there is no support.
            Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => self.len,
            Err(errno) => return Err(fault(errno)),
        };
        self.at = end.max(self.at + 1);
        Ok(Some(start..end))
    }

    /// The next range; short holes are part of it.
    fn range(&mut self) -> Result<Option<Range<u64>>> {
        let mut range = self.ahead.take();
        while let Some(next) = self.data()? {
            let before = range.as_ref().map_or(0, |range| range.end);
            let near = next.start - before < HOLE_MIN;
            match &mut range {
                Some(range) if near => range.end = next.end,
                None if near => range = Some(0..next.end),
                None => range = Some(next),
                Some(_) => {
                    self.ahead = Some(next);
                    break;
                }
            }
        }
        Ok(range.filter(|range| !range.is_empty()))
    }
}

impl Iterator for Extents<'_> {
    type Item = Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.range();
        if next.is_err() {
            (self.at, self.ahead) = (self.len, None);
        }
        next.transpose()
    }
}

fn fault(errno: Errno) -> Error {
    Error::other("cannot tell where the holes of a file are").source(std::io::Error::from(errno))
}
