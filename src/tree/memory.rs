//! Files in memory, such as the state of a training loop, that are saved without a disk.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Error as IoError, ErrorKind as IoKind, Result as IoResult};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::holes::Extents;
use super::path::{check_file_name, check_path, split};
use super::stat::{Stat, WalkEntry, WalkKind};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};

/// Permissions that files and folders from memory are saved with.
const FILE_MODE: u32 = 0o644;
const FOLDER_MODE: u32 = 0o755;

/// A file in memory: segments of bytes, one after another, which must not change while it is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    path: Vec<u8>,
    segments: Vec<Bytes>,
    /// End of each segment in the file.
    ends: Vec<u64>,
}

impl MemoryFile {
    /// Creates the file `path` (segments separated by `/`) of a tree, with the content of `segments`.
    #[must_use]
    pub fn new(path: impl Into<Vec<u8>>, segments: impl IntoIterator<Item = Bytes>) -> Self {
        let segments: Vec<Bytes> = segments.into_iter().filter(|segment| !segment.is_empty()).collect();
        let ends = segments.iter().scan(0, |end, segment| {
            *end += segment.len() as u64;
            Some(*end)
        });
        Self { path: path.into(), ends: ends.collect(), segments }
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Bytes in `range`, without a copy if they are in one segment. None if the file is shorter.
    fn slice(&self, range: Range<u64>) -> Option<Bytes> {
        let len = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let (first, within) = self.find(range.start);
        if let Some(segment) = self.segments.get(first)
            && let Some(end) = within.checked_add(len)
            && end <= segment.len()
        {
            return Some(segment.slice(within..end));
        }
        let mut copy = BytesMut::zeroed(len);
        self.read_exact_at(&mut copy, range.start).ok()?;
        Some(copy.freeze())
    }

    fn read_exact_at(&self, mut out: &mut [u8], at: u64) -> IoResult<()> {
        let (first, mut within) = self.find(at);
        for segment in self.segments.get(first..).unwrap_or_default() {
            let from = segment.get(within..).unwrap_or_default();
            let (filled, left) = out.split_at_mut(from.len().min(out.len()));
            filled.copy_from_slice(&from[..filled.len()]);
            (out, within) = (left, 0);
            if out.is_empty() {
                return Ok(());
            }
        }
        if out.is_empty() { Ok(()) } else { Err(IoError::from(IoKind::UnexpectedEof)) }
    }

    /// Segment with the byte at `at`, and the offset in it.
    fn find(&self, at: u64) -> (usize, usize) {
        let segment = self.ends.partition_point(|&end| end <= at);
        let start = segment.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        (segment, usize::try_from(at - start).unwrap_or(usize::MAX))
    }
}

/// A file that is open to be read.
#[derive(Debug)]
pub enum Opened {
    /// A file of the file system.
    File(File),
    /// A file in memory.
    Memory(Arc<MemoryFile>),
}

impl Opened {
    /// Fills `out` with the bytes from `at` on.
    ///
    /// # Errors
    /// Unexpected end of file, if the file is shorter; errors of the file system.
    pub fn read_exact_at(&self, out: &mut [u8], at: u64) -> IoResult<()> {
        match self {
            Self::File(file) => file.read_exact_at(out, at),
            Self::Memory(file) => file.read_exact_at(out, at),
        }
    }

    /// The bytes in `range` if they are in memory.
    #[must_use]
    pub fn in_memory(&self, range: Range<u64>) -> Option<Bytes> {
        match self {
            Self::File(_) => None,
            Self::Memory(file) => file.slice(range),
        }
    }

    /// True if the file is unchanged since `stat`. Files in memory never change.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn is_still(&self, stat: &Stat) -> IoResult<bool> {
        match self {
            Self::File(file) => {
                let same = |stat: &Stat| (stat.size, stat.mtime, stat.ctime);
                Ok(same(&Stat::of(file)?) == same(stat))
            }
            Self::Memory(_) => Ok(true),
        }
    }

    /// The ranges of its first `len` bytes that hold data, one after the other: see [`Extents`].
    #[must_use]
    pub fn each_extent(&self, len: u64) -> Extents<'_> {
        match self {
            Self::File(file) => Extents::new(file, len),
            Self::Memory(_) => Extents::whole(len),
        }
    }
}

/// The files of a tree in memory, by path.
#[derive(Debug)]
pub(super) struct MemoryTree {
    files: HashMap<Vec<u8>, Arc<MemoryFile>>,
}

impl MemoryTree {
    /// Creates the tree of `files`; also returns its entries as of a walk: the files and the folders in their paths.
    pub(super) fn new(files: Vec<MemoryFile>, modified: Timestamp) -> Result<(Self, Vec<WalkEntry>)> {
        let stat = |size, mode| Stat { dev: 0, ino: 0, size, mode, mtime: modified, ctime: modified, nlink: 1 };
        let folder =
            |path: &[u8]| WalkEntry { path: path.to_vec(), kind: WalkKind::Folder, stat: stat(0, FOLDER_MODE) };
        let mut found = vec![folder(b"")];
        for file in &files {
            check_path(&file.path).map_err(|error| {
                Error::new(ErrorKind::Usage, "no path of a file to save").at(file.path.escape_ascii()).source(error)
            })?;
            check_file_name(&file.path)?;
            let stat = stat(file.size(), FILE_MODE);
            found.push(WalkEntry { path: file.path.clone(), kind: WalkKind::File, stat });
            let mut path = split(&file.path).0;
            while !path.is_empty() {
                found.push(folder(path));
                path = split(path).0;
            }
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        found.dedup_by(|a, b| a == b && a.kind == WalkKind::Folder);
        if let Some(twice) = found.windows(2).find(|two| two[0].path == two[1].path) {
            return Err(Error::usage("two things to save have one path").at(twice[0].path.escape_ascii()));
        }
        let files = files.into_iter().map(|file| (file.path.clone(), Arc::new(file))).collect();
        Ok((Self { files }, found))
    }

    pub(super) fn open(&self, path: &[u8]) -> Result<Opened> {
        let file = self.files.get(path).cloned().map(Opened::Memory);
        file.ok_or_else(|| Error::not_found("no such file in memory").at(path.escape_ascii()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, segments: &[&'static [u8]]) -> MemoryFile {
        MemoryFile::new(path, segments.iter().map(|segment| Bytes::from_static(segment)))
    }

    #[test]
    fn any_range_reads_as_of_one_piece() {
        let whole = b"abcdefghij";
        let file = file("f", &[b"abc", b"", b"defg", b"hij"]);
        assert_eq!(file.size(), 10);
        for start in 0..=10 {
            for end in start..=10 {
                let slice = file.slice(start..end).unwrap();
                assert_eq!(slice, &whole[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()]);
            }
        }
        assert!(file.slice(5..11).is_none());
        assert!(file.slice(11..11).is_none_or(|none| none.is_empty()));
    }

    #[test]
    fn a_range_of_one_segment_is_not_copied() {
        let file = file("f", &[b"abc", b"defg"]);
        let (slice, segment) = (file.slice(4..6).unwrap(), &file.segments[1]);
        assert_eq!(slice.as_ptr(), segment[1..].as_ptr());
    }

    #[test]
    fn folders_come_from_paths() {
        let (tree, found) =
            MemoryTree::new(vec![file("b/c/one", &[b"1"]), file("b/two", &[]), file("a", &[])], Timestamp(7)).unwrap();
        let paths: Vec<_> = found.iter().map(|found| String::from_utf8_lossy(&found.path).into_owned()).collect();
        assert_eq!(paths, ["", "a", "b", "b/c", "b/c/one", "b/two"]);
        assert_eq!(found.iter().filter(|found| found.kind == WalkKind::File).count(), 3);
        assert!(tree.open(b"b/two").is_ok() && tree.open(b"b/c").is_err());
    }

    #[test]
    fn paths_that_are_none_are_refused() {
        for wrong in [
            vec![file("../a", &[])],
            vec![file("d/.towline-0123456789abcdef-0.part", &[])],
            vec![file("a", &[]), file("a", &[])],
            vec![file("a", &[]), file("a/b", &[])],
        ] {
            assert_eq!(MemoryTree::new(wrong, Timestamp(0)).unwrap_err().kind(), ErrorKind::Usage);
        }
    }
}
