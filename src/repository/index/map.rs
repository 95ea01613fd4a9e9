//! Bytes of a segment, memory-mapped if there is a local file.
#![expect(unsafe_code, reason = "mapping a file is unsafe by nature")]

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use bytes::Bytes;
use memmap2::{Advice, Mmap};

use crate::budget::Retained;
use crate::error::{Error, Result};

/// The bytes of an immutable object.
#[derive(Debug)]
pub(super) enum Mapped {
    /// A mapped file; the kernel loads and evicts its pages, so they do not count in the budget.
    File(Mmap),
    /// Bytes in memory, from a store without files.
    Held(Bytes, #[expect(dead_code, reason = "held for its drop")] Retained),
}

impl Mapped {
    /// Maps the file at `path` in the local cache.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| Error::io("cannot open an index segment", path, source))?;
        Self::of(&file, path)
    }

    /// Maps `file`, which was opened at `path`.
    pub(super) fn of(file: &File, path: &Path) -> Result<Self> {
        // SAFETY: segments are written under a new name and never changed, and only files that no other user may write are
        // mapped. If a program of this user truncates one, reading it ends this process by a signal rather than returning wrong
        // bytes.
        let map = unsafe { Mmap::map(file) };
        let map = map.map_err(|source| Error::io("cannot map an index segment", path, source))?;
        if let Err(error) = map.advise(Advice::Random) {
            tracing::debug!("no advice for {}: {error}", path.display());
        }
        Ok(Self::File(map))
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::File(map) => map,
            Self::Held(bytes, _) => bytes,
        }
    }
}
