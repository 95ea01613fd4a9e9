//! File system metadata of one entry.

use std::fs::File;

use rustix::fs::{FileType, fstat};

use crate::clock::Timestamp;

/// Kind of an entry, as far as a tree can hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WalkKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Symlink {
        /// Target, byte for byte.
        target: Vec<u8>,
    },
}

impl WalkKind {
    /// Bytes in a link's target.
    pub(super) fn target_len(&self) -> usize {
        match self {
            Self::Symlink { target } => target.len(),
            Self::File | Self::Folder => 0,
        }
    }
}

/// The part of an inode's metadata that a tree keeps or compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The device that holds it.
    pub dev: u64,
    /// Inode number there.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Permission bits, with setuid, setgid and sticky: at most `0o7777`.
    pub mode: u32,
    /// When its content last changed; anyone may set it.
    pub mtime: Timestamp,
    /// When its content or metadata last changed; only the kernel sets it.
    pub ctime: Timestamp,
    /// Number of names.
    pub nlink: u32,
}

impl Stat {
    /// The metadata of an open file, now.
    pub fn of(file: &File) -> std::io::Result<Self> {
        Ok(Self::from_raw(&fstat(file)?))
    }

    pub(super) fn from_raw(raw: &rustix::fs::Stat) -> Self {
        Self {
            dev: raw.st_dev,
            ino: raw.st_ino,
            size: u64::try_from(raw.st_size).unwrap_or(0),
            mode: raw.st_mode & 0o7777,
            mtime: instant(raw.st_mtime, raw.st_mtime_nsec),
            ctime: instant(raw.st_ctime, raw.st_ctime_nsec),
            nlink: u32::try_from(raw.st_nlink).unwrap_or(u32::MAX),
        }
    }
}

/// The kind of what `raw` describes.
pub(super) fn kind_of(raw: &rustix::fs::Stat) -> FileType {
    FileType::from_raw_mode(raw.st_mode)
}

/// Seconds and nanoseconds as one number; what lies outside its 584 years is clamped.
fn instant(seconds: i64, nanos: u64) -> Timestamp {
    Timestamp(seconds.saturating_mul(1_000_000_000).saturating_add(i64::try_from(nanos).unwrap_or(0)))
}

/// Something to save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalkEntry {
    /// Path in the tree; empty for the root folder, the file's name where the root is a file.
    pub path: Vec<u8>,
    /// Kind.
    pub kind: WalkKind,
    /// Metadata when it was found.
    pub stat: Stat,
}
