//! Folders below one root, opened segment by segment and kept open while in use.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{Dir, FileType, Mode, OFlags, openat};
use rustix::io::{Errno, Result as SysResult};

use super::path::{split, within};
use crate::error::Error;

/// Maximum number of open folders, well below the usual limit of 1,024 descriptors.
const OPEN_MAX: usize = 128;

/// Flags to read a folder. `NOFOLLOW` with `DIRECTORY` refuses a symbolic link with `ENOTDIR` (open(2)).
pub(super) const READ_FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Flags to access entries by name; they need no permission to list the folder.
const ENTER_FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The folders below a root. Paths are relative to it and were checked by the caller.
pub(super) struct Folders {
    base: Arc<OwnedFd>,
    shown: PathBuf,
    kept: Mutex<OpenFolders>,
}

/// The folders that are open, oldest first.
#[derive(Default)]
struct OpenFolders {
    open: HashMap<Vec<u8>, Arc<OwnedFd>>,
    order: VecDeque<Vec<u8>>,
}

impl Folders {
    /// Creates it for `base`, whose path for display is `shown`.
    pub(super) fn new(base: OwnedFd, shown: PathBuf) -> Self {
        Self { base: Arc::new(base), shown, kept: Mutex::default() }
    }

    /// The root.
    pub(super) fn base(&self) -> &Arc<OwnedFd> {
        &self.base
    }

    /// Path of `path`, for display.
    pub(super) fn shown(&self, path: &[u8]) -> PathBuf {
        if path.is_empty() { self.shown.clone() } else { self.shown.join(Path::new(OsStr::from_bytes(path))) }
    }

    /// Opens the folder `path`, to access entries in it.
    pub(super) fn get(&self, path: &[u8]) -> SysResult<Arc<OwnedFd>> {
        if path.is_empty() {
            return Ok(Arc::clone(&self.base));
        }
        let (mut at, mut folder) = self.nearest(path);
        while at < path.len() {
            let start = if at == 0 { 0 } else { at + 1 };
            let end = path[start..].iter().position(|byte| *byte == b'/').map_or(path.len(), |slash| start + slash);
            folder = Arc::new(openat(&folder, &path[start..end], ENTER_FOLDER, Mode::empty())?);
            self.keep(&path[..end], &folder);
            at = end;
        }
        Ok(folder)
    }

    /// The deepest open folder on the way to `path`, and how much of `path` it covers.
    fn nearest(&self, path: &[u8]) -> (usize, Arc<OwnedFd>) {
        let kept = self.kept();
        let mut on_the_way = path;
        while !on_the_way.is_empty() {
            if let Some(folder) = kept.open.get(on_the_way) {
                return (on_the_way.len(), Arc::clone(folder));
            }
            on_the_way = split(on_the_way).0;
        }
        (0, Arc::clone(&self.base))
    }

    /// The folder that holds `path`, and the name of `path` in it.
    pub(super) fn parent<'p>(&self, path: &'p [u8]) -> SysResult<(Arc<OwnedFd>, &'p [u8])> {
        let (parent, name) = split(path);
        Ok((self.get(parent)?, name))
    }

    /// Opens the folder `path` to list it; the root is opened anew, so that each listing has its own position.
    pub(super) fn read(&self, path: &[u8]) -> SysResult<OwnedFd> {
        if path.is_empty() {
            return openat(&self.base, c".", READ_FOLDER, Mode::empty());
        }
        let (parent, name) = self.parent(path)?;
        openat(&parent, name, READ_FOLDER, Mode::empty())
    }

    /// Keeps a folder open.
    pub(super) fn keep(&self, path: &[u8], folder: &Arc<OwnedFd>) {
        let mut kept = self.kept();
        if kept.open.insert(path.to_vec(), Arc::clone(folder)).is_none() {
            kept.order.push_back(path.to_vec());
        }
        if kept.order.len() > OPEN_MAX
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.open.remove(&oldest);
        }
    }

    /// Closes folders at and below `path`, which is about to be removed.
    pub(super) fn forget(&self, path: &[u8]) {
        let mut kept = self.kept();
        kept.order.retain(|open| !within(open, path));
        kept.open.retain(|open, _| !within(open, path));
    }

    /// Converts an error at `path`: an entry in the way is a conflict, others are classified by their code.
    pub(super) fn fault(&self, what: &'static str, path: &[u8], errno: Errno) -> Error {
        let place = self.shown(path);
        match errno {
            Errno::NOTDIR | Errno::LOOP => Error::conflict(what)
                .at(place.display())
                .expected("folders all the way")
                .got("a file or symbolic link on the way")
                .source(std::io::Error::from(errno))
                .help("move it away, or let it be replaced with --overwrite"),
            Errno::ISDIR | Errno::EXIST | Errno::NOTEMPTY => Error::conflict(what)
                .at(place.display())
                .got("something else with this name")
                .source(std::io::Error::from(errno))
                .help("move it away, or let it be replaced with --overwrite"),
            _ => Error::io(what, &place, errno.into()),
        }
    }

    fn kept(&self) -> MutexGuard<'_, OpenFolders> {
        // Every change leaves the map consistent, so poisoning is harmless.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Folders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Folders").field("root", &self.shown).finish_non_exhaustive()
    }
}

/// Names in an open folder, with their kinds by the listing (`Unknown` on some file systems), as they are read.
pub(super) struct Listing(Dir);

impl Listing {
    /// Begins to list `folder`, whose position must be its start.
    pub(super) fn of(folder: &OwnedFd) -> SysResult<Self> {
        Dir::read_from(folder).map(Self)
    }
}

impl Iterator for Listing {
    type Item = SysResult<(Vec<u8>, FileType)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let entry = match self.0.read()? {
                Ok(entry) => entry,
                Err(errno) => return Some(Err(errno)),
            };
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                return Some(Ok((name.to_vec(), entry.file_type())));
            }
        }
    }
}
