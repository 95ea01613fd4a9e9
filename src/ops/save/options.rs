//! Options of a save.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::codec::Compression;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::ops::names::exists;
use crate::progress::Progress;
use crate::repository::NameScope;
use crate::repository::log::StepFacts;
use crate::tree::MemoryFile;

/// Choice of chunk boundaries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutChoice {
    /// Depends on the format: tensor boundaries in checkpoint files, content-defined ones otherwise.
    #[default]
    Auto,
    /// Tensor boundaries; content-defined ones in files without tensors.
    Tensor,
    /// Content-defined boundaries.
    Content,
    /// Fixed-length chunks.
    Fixed,
}

impl FromStr for CutChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "tensor" => Ok(Self::Tensor),
            "content" => Ok(Self::Content),
            "fixed" => Ok(Self::Fixed),
            _ => Err(Error::usage("unknown kind of chunk boundaries")
                .expected("auto, tensor, content or fixed")
                .got(text)),
        }
    }
}

/// Source of a save.
#[derive(Clone, Debug)]
pub enum SaveSource {
    /// The file or folder at a path.
    Path(PathBuf),
    /// A tree of files in memory.
    Memory(Vec<MemoryFile>),
}

impl Default for SaveSource {
    /// No files.
    fn default() -> Self {
        Self::Memory(Vec::new())
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for SaveSource {
    fn from(path: &P) -> Self {
        Self::Path(path.as_ref().to_path_buf())
    }
}

impl From<Vec<MemoryFile>> for SaveSource {
    fn from(files: Vec<MemoryFile>) -> Self {
        Self::Memory(files)
    }
}

/// Options of a save.
#[derive(Clone, Debug, Default)]
pub struct SaveOptions {
    /// Name of a tree that is likely to share much with this one; by default the current value of the saved name. Its tensors
    /// are the bases of differences, instead of those of the previous step of the run.
    pub base: Option<Name>,
    /// Chunk boundaries of files.
    pub cut: CutChoice,
    /// Labels of the tree.
    pub labels: BTreeMap<String, String>,
    /// Facts for the log, by which runs are listed and steps selected.
    pub facts: StepFacts,
    /// Patterns to leave out, in gitignore syntax.
    pub exclude: Vec<String>,
    /// Read every file, regardless of the stat cache.
    pub reread: bool,
    /// Compression of new chunks.
    pub compression: Compression,
    /// Interval of key steps: one of this many saves of a run is stored whole, the others as differences to it (default 8; 1:
    /// all are stored whole). A key step is read with each of the others, and kept as long as they are.
    pub key_every: Option<NonZeroU32>,
    /// Report how each tensor is stored, and why.
    pub explain: bool,
    /// Required state of the name at the start of the save; it must not change until the commit. Otherwise the save is a
    /// conflict.
    pub expected: Expected,
    /// Permission bits to record instead of those on the disk, by path in the tree (empty: its root folder).
    pub modes: Arc<BTreeMap<Vec<u8>, u32>>,
    /// Treatment of a symbolic link at the path itself.
    pub root_link: RootLink,
    /// Save files that ignore files exclude, too.
    pub no_ignore_files: bool,
    /// Names that the labels of the save may make stricter, or its content, if they have the same.
    pub label_scope: NameScope,
    /// Names that the saver may read: chunks of no other name are bases, since the size of a difference tells what its base is.
    pub readable: NameScope,
    /// Caller with limited rights that the save is for, if any: the saves of one may use an eighth of the memory budget for what they
    /// know about their files, and as much for bases and predictions, without which they store more bytes if that is taken.
    pub caller: Option<Arc<str>>,
    /// Progress counters.
    pub progress: Progress,
    /// Cancelled to stop the save: uploaded data is recorded within seconds, and the next save uses it. A save that is about to
    /// commit completes.
    pub stop: CancellationToken,
}

/// Treatment of a symbolic link at the path that is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RootLink {
    /// Follow the link.
    #[default]
    Follow,
    /// Refuse the link, because another user may have created it.
    Refuse,
}

/// Required state of a name when a save begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// Any state: the save replaces the current value.
    #[default]
    Anything,
    /// Absent: the name is new.
    Nothing,
    /// Unchanged: the name has this version of the log.
    Version(u64),
}

impl Expected {
    /// Compares with the `version` that `name` has.
    ///
    /// # Errors
    /// Conflict, if the version differs.
    pub(super) fn check(self, name: &Name, version: Option<u64>) -> Result<()> {
        match self {
            Self::Nothing if version.is_some() => Err(exists(name)),
            Self::Version(expected) if version != Some(expected) => Err(moved(name)),
            _ => Ok(()),
        }
    }
}

/// Error for a name that changed since a save began.
pub(super) fn moved(name: &Name) -> Error {
    Error::conflict("name moved since this save began")
        .at(name)
        .help("another process saved or removed it; check it (`towline show`), then save again")
}
