//! Walking a tree to save it.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, open, openat, readlinkat, statat};
use rustix::io::{Errno, Result as SysResult};
use rustix::process::geteuid;
use tokio_util::sync::CancellationToken;

use super::change_times::Doubts;
use super::folders::{Folders, Listing};
use super::memory::{MemoryFile, MemoryTree, Opened};
use super::path::{check_file_name, is_staging, join, shown, split};
use super::rules::{IGNORE_FILE, IGNORE_LEN_MAX, InForce, Rules, cost};
use super::stat::{Stat, WalkEntry, WalkKind, kind_of};
use super::stat_cache::coarse_now;
use crate::budget::GrowingMemory;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::limits::{MIB, PATH_LEN_MAX, SEGMENT_LEN_MAX};

/// File and folder at the top of every repository in a directory, by which such folders are recognized.
pub const REPOSITORY_MARKS: (&str, &str) = ("repository", "log");

/// Flags to read a file: follow no link, and do not block on a pipe.
pub(super) const READ_FILE: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// Maximum number of entries that are not saved and listed.
pub const SKIPPED_MAX: usize = 1000;

/// Reason why an entry is not saved. Entries excluded by a pattern are not listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason {
    /// Neither a file, nor a folder, nor a symbolic link: `"socket"`, `"pipe"` or `"device"`.
    Special(&'static str),
    /// It was removed or replaced during the walk.
    Vanished,
    /// One of [`Rules::skip`].
    LeftOut,
    /// A file that a restore has not finished.
    Unfinished,
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Special(kind) => kind,
            Self::Vanished => "vanished",
            Self::LeftOut => "left out",
            Self::Unfinished => "unfinished file of a restore",
        })
    }
}

/// An entry that is not saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Path in the tree.
    pub path: Vec<u8>,
    /// Reason.
    pub reason: SkipReason,
}

/// Result of a walk.
#[derive(Debug)]
pub struct Walk {
    /// Entries to save, in byte order of the paths: a folder comes before its content.
    pub found: Vec<WalkEntry>,
    /// Entries that are not saved, with reasons, in the same order: at most [`SKIPPED_MAX`].
    pub skipped: Vec<Skipped>,
    /// Number of further ones.
    pub more_skipped: u64,
    /// Folders among `found` that look like Towline repositories ([`REPOSITORY_MARKS`]).
    pub repositories: Vec<Vec<u8>>,
    place: WalkSource,
    /// About the files that were opened.
    doubts: Mutex<Doubts>,
    _memory: Option<GrowingMemory>,
}

/// Location of the files.
#[derive(Debug)]
enum WalkSource {
    Disk {
        root: PathBuf,
        folders: Folders,
        /// Real name of the root in `folders`, if the root is a file.
        file: Option<Vec<u8>>,
    },
    Memory(MemoryTree),
}

impl Walk {
    /// Creates a walk over files in memory, with the modification time `modified`.
    ///
    /// # Errors
    /// Usage, if a path is invalid, or two files have the same one.
    pub fn in_memory(files: Vec<MemoryFile>, modified: Timestamp) -> Result<Self> {
        let (tree, found) = MemoryTree::new(files, modified)?;
        Ok(Self {
            found,
            skipped: Vec::new(),
            more_skipped: 0,
            repositories: Vec::new(),
            place: WalkSource::Memory(tree),
            doubts: Mutex::default(),
            _memory: None,
        })
    }

    /// Absolute path of the root, without links; none for files in memory.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        match &self.place {
            WalkSource::Disk { root, .. } => Some(root),
            WalkSource::Memory(_) => None,
        }
    }

    /// True if the files are in memory.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        matches!(self.place, WalkSource::Memory(_))
    }

    /// True if the root is a file.
    #[must_use]
    pub fn is_file(&self) -> bool {
        matches!(self.place, WalkSource::Disk { file: Some(_), .. })
    }

    /// Opens a found file, without following links.
    ///
    /// # Errors
    /// Not found, if it vanished; denied; conflict, if something else took its place.
    pub fn open(&self, found: &WalkEntry) -> Result<Opened> {
        match &self.place {
            WalkSource::Disk { folders, file, .. } => {
                let path = file.as_deref().unwrap_or(&found.path);
                let file = open_file(folders, path, "cannot open a file to save")?;
                self.doubts.lock().unwrap_or_else(PoisonError::into_inner).look(found, &file, coarse_now());
                Ok(Opened::File(file))
            }
            WalkSource::Memory(tree) => tree.open(&found.path),
        }
    }

    /// True if every change of the file `found` since it was opened sets a new time. Files that were not opened count as they did before.
    #[must_use]
    pub fn times_tell(&self, found: &WalkEntry) -> bool {
        self.doubts.lock().unwrap_or_else(PoisonError::into_inner).times_tell(found)
    }
}

/// Opens the regular file `path`.
pub(super) fn open_file(folders: &Folders, path: &[u8], what: &'static str) -> Result<File> {
    let fault = |errno| folders.fault(what, path, errno);
    let (parent, name) = folders.parent(path).map_err(fault)?;
    let file = File::from(openat(&parent, name, READ_FILE, Mode::empty()).map_err(fault)?);
    if kind_of(&fstat(&file).map_err(fault)?) == FileType::RegularFile {
        return Ok(file);
    }
    Err(Error::conflict(what).at(folders.shown(path).display()).expected("a regular file").got("something else"))
}

/// Finds everything to save under `root`: a folder, a file, or a symbolic link to either, which is followed unless
/// [`Rules::no_follow`] is set. Links below it are not followed, mount points are crossed, hidden files are included.
///
/// # Errors
/// Not found or denied, for the root and for any folder below it that cannot be listed; usage, for a malformed pattern,
/// and where the root is a file of no savable kind or lies in one of [`Rules::skip`]; conflict, for a link that may not be
/// followed.
pub fn walk(root: &Path, rules: &Rules) -> Result<Walk> {
    let Root { real, fd, shown, file } = if rules.no_follow { Root::itself(root)? } else { Root::followed(root)? };
    let skip = rules.skip.iter().filter_map(|folder| identity(folder)).collect::<Vec<_>>();
    if let Some(above) = real.ancestors().find(|above| identity(above).is_some_and(|id| skip.contains(&id))) {
        return Err(Error::usage("what is to be saved lies in a folder that is left out")
            .at(root.display())
            .got(above.display())
            .help("a repository cannot be saved into itself: `towline sync` copies one"));
    }
    let in_force = InForce::new(&rules.excludes)?;
    let folders = Folders::new(fd, shown);
    let mut scan = Scan::new(&folders, &skip, Some(in_force));
    scan.ignore_left = if rules.no_ignore_files { None } else { Some(IGNORE_LEN_MAX) };
    scan.memory = rules.memory.as_ref().map(|budget| budget.tree_memory(rules.caller.as_deref()));
    scan.stop = rules.stop.clone();
    match &file {
        Some(name) => scan.single(name, root.file_name().unwrap_or(OsStr::from_bytes(name)).as_bytes())?,
        None => scan.run()?,
    }
    let Scan { found, skipped, more_skipped, repositories, memory, .. } = scan;
    let place = WalkSource::Disk { root: real, folders, file };
    Ok(Walk { found, skipped, more_skipped, repositories, place, doubts: Mutex::default(), _memory: memory })
}

/// Opened root of a walk.
struct Root {
    /// Absolute path, without links.
    real: PathBuf,
    /// The folder, or the parent folder of a file.
    fd: OwnedFd,
    /// Path of `fd`.
    shown: PathBuf,
    /// Name of a file.
    file: Option<Vec<u8>>,
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Root {
    fn fault(root: &Path) -> impl Fn(std::io::Error) -> Error {
        move |error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                Error::not_found("there is nothing to save").at(root.display()).help("check the path")
            }
            _ => Error::io("cannot open what is to be saved", root, error),
        }
    }

    /// Opens `root`, following links.
    fn followed(root: &Path) -> Result<Self> {
        let fault = Self::fault(root);
        let real = root.canonicalize().map_err(&fault)?;
        let is_folder = real.metadata().map_err(&fault)?.is_dir();
        let (shown, file) = match (is_folder, real.parent(), real.file_name()) {
            (false, Some(parent), Some(name)) => (parent.to_owned(), Some(name.as_bytes().to_vec())),
            _ => (real.clone(), None),
        };
        let fd = open(&shown, FOLDER, Mode::empty()).map_err(|errno| fault(errno.into()))?;
        Ok(Self { real, fd, shown, file })
    }

    /// Opens `root` without following a link.
    fn itself(root: &Path) -> Result<Self> {
        let fault = Self::fault(root);
        let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else { return Self::followed(root) };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let shown = parent.canonicalize().map_err(&fault)?;
        let real = shown.join(name);
        let above = open(&shown, FOLDER, Mode::empty()).map_err(|errno| fault(errno.into()))?;
        match openat(&above, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(fd) => Ok(Self { shown: real.clone(), real, fd, file: None }),
            Err(errno) => {
                let raw = statat(&above, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| fault(errno.into()))?;
                match kind_of(&raw) {
                    FileType::Directory => Err(fault(errno.into())),
                    FileType::Symlink => Err(Error::conflict("this is a symbolic link, which is not followed here")
                        .at(root.display())
                        .expected("a file or a folder")),
                    _ => Ok(Self { real, fd: above, shown, file: Some(name.as_bytes().to_vec()) }),
                }
            }
        }
    }
}

/// Identity of a folder on this machine.
pub(super) fn identity(folder: &Path) -> Option<(u64, u64)> {
    folder.metadata().ok().map(|meta| (meta.dev(), meta.ino()))
}

/// A walk in progress, over a tree to save or a place to restore to.
pub(super) struct Scan<'a> {
    folders: &'a Folders,
    skip: &'a [(u64, u64)],
    /// Folders still to read, with the rules of their parent (none: ignore files have no effect).
    pending: Vec<(Vec<u8>, Option<InForce>)>,
    pub(super) found: Vec<WalkEntry>,
    skipped: Vec<Skipped>,
    more_skipped: u64,
    /// Folders that were left out; if `special` are entries, too, also those with entries that ignore files leave out.
    pub(super) left_out: Vec<Vec<u8>>,
    /// Number of entries that ignore files leave out; the content of a folder does not count.
    pub(super) ignored: u64,
    /// Sockets, pipes and devices, which count as entries; none: they are only skipped.
    pub(super) special: Option<Vec<Vec<u8>>>,
    /// Memory of the entries; none if they may take any.
    pub(super) memory: Option<GrowingMemory>,
    /// Remedy where they take too much.
    pub(super) remedy: &'static str,
    pub(super) stop: CancellationToken,
    repositories: Vec<Vec<u8>>,
    /// Bytes of ignore files that may still be read; None: none is read.
    ignore_left: Option<u64>,
    /// Paths of the ignore files that have an effect; none: all of them.
    pub(super) ignore_files: Option<&'a BTreeSet<&'a [u8]>>,
}

impl<'a> Scan<'a> {
    /// A walk over all of `folders`.
    pub(super) fn new(folders: &'a Folders, skip: &'a [(u64, u64)], rules: Option<InForce>) -> Self {
        Self {
            folders,
            skip,
            pending: vec![(Vec::new(), rules)],
            found: Vec::new(),
            skipped: Vec::new(),
            more_skipped: 0,
            left_out: Vec::new(),
            ignored: 0,
            special: None,
            memory: None,
            remedy: "raise --memory, or save parts of the folder under names of their own",
            stop: CancellationToken::new(),
            repositories: Vec::new(),
            ignore_left: Some(IGNORE_LEN_MAX),
            ignore_files: None,
        }
    }

    /// Reads all folders, then sorts the entries.
    pub(super) fn run(&mut self) -> Result<()> {
        while let Some((path, rules)) = self.pending.pop() {
            self.folder(path, rules)?;
        }
        self.found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        self.skipped.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        self.repositories.sort_unstable();
        Ok(())
    }

    /// Handles a root that is the file `real`, to be saved as `name`.
    fn single(&mut self, real: &[u8], name: &[u8]) -> Result<()> {
        let raw = statat(self.folders.base(), real, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| self.folders.fault("cannot read what is to be saved", real, errno))?;
        let kind = kind_of(&raw);
        if kind != FileType::RegularFile {
            let place = self.folders.shown(real);
            return Err(Error::usage("only files, folders and links can be saved")
                .at(place.display())
                .got(special(kind)));
        }
        check_file_name(name)?;
        self.found.push(WalkEntry { path: name.to_vec(), kind: WalkKind::File, stat: Stat::from_raw(&raw) });
        Ok(())
    }

    fn folder(&mut self, path: Vec<u8>, rules: Option<InForce>) -> Result<()> {
        let folders = self.folders;
        let fault = |errno| folders.fault("cannot read a folder", &path, errno);
        let fd = match folders.read(&path) {
            Ok(fd) => Arc::new(fd),
            Err(errno) if gone(errno) && !path.is_empty() => {
                self.skip(path, SkipReason::Vanished);
                return Ok(());
            }
            Err(errno) => return Err(fault(errno)),
        };
        let stat = Stat::from_raw(&fstat(&fd).map_err(fault)?);
        if self.skip.contains(&(stat.dev, stat.ino)) {
            self.left_out.push(path.clone());
            self.skip(path, SkipReason::LeftOut);
            return Ok(());
        }
        let Listed { names, bytes } = self.list(&path, &fd)?;
        if !path.is_empty() {
            folders.keep(&path, &fd);
        }
        let rules = match rules {
            Some(rules) => Some(self.with_ignore_file(&fd, &path, &names, rules)?),
            None => None,
        };
        if is_repository(&names) {
            self.repositories.push(path.clone());
        }
        let ignored_before = self.ignored;
        for (name, kind) in names {
            let path = join(&path, &name);
            match self.look(&fd, &path, kind, rules.as_ref())? {
                EntryAction::Folder => {
                    self.reserve(&path, 0)?;
                    self.pending.push((path, rules.clone()));
                }
                EntryAction::Found(kind, stat) => {
                    self.reserve(&path, kind.target_len())?;
                    self.found.push(WalkEntry { path, kind, stat });
                }
                EntryAction::Skip(SkipReason::Special(_)) if self.special.is_some() => {
                    self.reserve(&path, 0)?;
                    self.special.iter_mut().for_each(|special| special.push(path.clone()));
                }
                EntryAction::Skip(reason) => self.skip(path, reason),
                EntryAction::LeaveOut => self.ignored += 1,
            }
        }
        if self.special.is_some() && self.ignored > ignored_before {
            self.reserve(&path, 0)?;
            self.left_out.push(path.clone());
        }
        self.found.push(WalkEntry { path, kind: WalkKind::Folder, stat });
        if let Some(memory) = &mut self.memory {
            memory.subtract(bytes);
        }
        Ok(())
    }

    /// Lists the folder `path`, also entries that are left out.
    fn list(&mut self, path: &[u8], fd: &OwnedFd) -> Result<Listed> {
        let folders = self.folders;
        let fault = |errno| folders.fault("cannot read a folder", path, errno);
        let mut listed = Listed::default();
        for entry in Listing::of(fd).map_err(fault)? {
            let (name, kind) = entry.map_err(fault)?;
            // A vector that grows has room for twice its entries.
            let bytes = (2 * size_of::<(Vec<u8>, FileType)>() + name.len()) as u64;
            self.count(bytes, path, listed.names.len())?;
            listed.bytes += bytes;
            listed.names.push((name, kind));
        }
        Ok(listed)
    }

    fn skip(&mut self, path: Vec<u8>, reason: SkipReason) {
        if self.skipped.len() < SKIPPED_MAX {
            self.skipped.push(Skipped { path, reason });
        } else {
            self.more_skipped += 1;
        }
    }

    /// Counts the memory of the entry `path`, with the bytes of a link's target.
    fn reserve(&mut self, path: &[u8], target: usize) -> Result<()> {
        self.count((size_of::<WalkEntry>() + path.len() + target) as u64, path, 0)
    }

    /// Counts `bytes` of memory at `path`, where `more` names were read; ends a walk that was stopped.
    fn count(&mut self, bytes: u64, path: &[u8], more: usize) -> Result<()> {
        if self.stop.is_cancelled() {
            return Err(Error::cancelled("interrupted"));
        }
        if self.memory.as_mut().is_none_or(|memory| memory.try_add(bytes)) {
            return Ok(());
        }
        let (most, part) = self.memory.as_ref().map_or((0, ""), |memory| (memory.max() / MIB, memory.part()));
        Err(Error::exhausted("folder has more entries than the memory budget holds")
            .at(self.folders.shown(path).display())
            .expected(format!("at most {most} MiB for the entries of all folders together, {part}"))
            .got(format!("{} entries so far", self.found.len() + more))
            .help(self.remedy))
    }

    /// Kind of the entry `path` of `folder`, which the listing says is `listed`.
    fn look(&self, folder: &OwnedFd, path: &[u8], listed: FileType, rules: Option<&InForce>) -> Result<EntryAction> {
        let name = split(path).1;
        if is_staging(name) && listed != FileType::Directory {
            return Ok(EntryAction::Skip(SkipReason::Unfinished));
        }
        let leave_out = |is_folder| rules.is_some_and(|rules| rules.leave_out(path, is_folder));
        if path.len() > PATH_LEN_MAX || name.len() > SEGMENT_LEN_MAX {
            return if leave_out(listed == FileType::Directory) {
                Ok(EntryAction::LeaveOut)
            } else {
                Err(too_long(path))
            };
        }
        // The metadata of a folder is read when it is opened.
        if listed == FileType::Directory {
            return Ok(if leave_out(true) { EntryAction::LeaveOut } else { EntryAction::Folder });
        }
        let look = || -> SysResult<EntryAction> {
            let raw = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let stat = Stat::from_raw(&raw);
            Ok(match kind_of(&raw) {
                kind if leave_out(kind == FileType::Directory) => EntryAction::LeaveOut,
                FileType::Directory => EntryAction::Folder,
                FileType::RegularFile => EntryAction::Found(WalkKind::File, stat),
                FileType::Symlink => {
                    let target = readlinkat(folder, name, Vec::new())?.into_bytes();
                    EntryAction::Found(WalkKind::Symlink { target }, stat)
                }
                kind => EntryAction::Skip(SkipReason::Special(special(kind))),
            })
        };
        match look() {
            // EINVAL: no longer a link to be read.
            Err(errno) if gone(errno) || errno == Errno::INVAL => Ok(EntryAction::Skip(SkipReason::Vanished)),
            other => other.map_err(|errno| self.folders.fault("cannot read an entry of a folder", path, errno)),
        }
    }

    /// Adds the rules of the folder's own ignore file, if it has one that is a regular file.
    fn with_ignore_file(
        &mut self,
        fd: &OwnedFd,
        path: &[u8],
        names: &[(Vec<u8>, FileType)],
        rules: InForce,
    ) -> Result<InForce> {
        let Some(left) = self.ignore_left else { return Ok(rules) };
        let own = join(path, IGNORE_FILE.as_bytes());
        if !names.iter().any(|(name, _)| name == IGNORE_FILE.as_bytes())
            || self.ignore_files.is_some_and(|files| !files.contains(own.as_slice()))
        {
            return Ok(rules);
        }
        let shown = self.folders.shown(&own);
        let fault = |error| Error::io("cannot read an ignore file", &shown, error);
        let file = match openat(fd, IGNORE_FILE, READ_FILE, Mode::empty()) {
            Ok(fd) => File::from(fd),
            Err(errno) if gone(errno) => return Ok(rules),
            Err(errno) => return Err(fault(errno.into())),
        };
        let meta = file.metadata().map_err(fault)?;
        if !meta.is_file() {
            return Ok(rules);
        }
        let owners = [0, geteuid().as_raw(), fstat(fd).map_err(|errno| fault(errno.into()))?.st_uid];
        if !owners.contains(&meta.uid()) {
            let shown = shown.display();
            tracing::warn!("{shown} is ignored: it is of user {}, to whom the folder does not belong", meta.uid());
            return Ok(rules);
        }
        let mut text = Vec::new();
        file.take(left + 1).read_to_end(&mut text).map_err(fault)?;
        let Some(left) = left.checked_sub(cost(&text)) else {
            return Err(Error::usage("ignore files are too long")
                .at(shown.display())
                .expected("at most 256 KiB in all of a tree, with 64 bytes for a shorter line and 32 for a wildcard"));
        };
        self.ignore_left = Some(left);
        rules.with_file(path, &text, &shown)
    }
}

/// Names in one folder, with their kinds by the listing, and the bytes that they take of the memory.
#[derive(Default)]
struct Listed {
    names: Vec<(Vec<u8>, FileType)>,
    bytes: u64,
}

/// Result of a look at an entry.
enum EntryAction {
    /// A folder, to be read later.
    Folder,
    /// Something to save.
    Found(WalkKind, Stat),
    /// Something that is not saved, to be reported.
    Skip(SkipReason),
    /// A pattern leaves it out.
    LeaveOut,
}

/// Name of a kind that cannot be saved.
fn special(kind: FileType) -> &'static str {
    match kind {
        FileType::Socket => "socket",
        FileType::Fifo => "pipe",
        _ => "device",
    }
}

/// True for an error that means that a listed entry was removed or replaced since.
fn gone(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NOTDIR | Errno::LOOP)
}

fn is_repository(names: &[(Vec<u8>, FileType)]) -> bool {
    let holds = |mark: &str| names.iter().any(|(name, _)| name == mark.as_bytes());
    holds(REPOSITORY_MARKS.0) && holds(REPOSITORY_MARKS.1)
}

/// Error for a path that is too long to be restored.
fn too_long(path: &[u8]) -> Error {
    Error::usage("path is too long to be saved")
        .at(shown(path))
        .expected(format!("at most {PATH_LEN_MAX} bytes, {SEGMENT_LEN_MAX} in each name"))
        .got(format!("{} bytes", path.len()))
        .help("give it a shorter name, or leave it out: --exclude")
}
