//! The log on disk: lines in segments of bounded length, in a folder that one process opens at a time.
//!
//! Lines are written at once and synced later ([`Journal::sync`]). If the end of the log is not a complete line, or
//! does not follow from the lines before it, it is moved to a file beside when the log is opened, and an entry records
//! that: nothing is lost that might be evidence.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::chain::{self, START};
use super::entry::{Entry, EntryKind};
use super::head::{Head, ORIGIN_LEN_MAX};
use super::segments;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::{AuditLogId, EntryHash};
use crate::tree::{OwnFolder, make_private_folder};

/// Maximum length of a segment: a new one begins before that.
pub const SEGMENT_LEN: u64 = 16 << 20;
/// Version of the lines' format.
pub(super) const VERSION: u8 = 1;
/// Name of the lock file.
const LOCK: &str = "lock";
/// Flag that follows no link.
const NO_LINK: i32 = OFlags::NOFOLLOW.bits().cast_signed();
/// Pause between two tries to lock it.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// An open log.
#[derive(Debug)]
pub struct Journal {
    folder: OwnFolder,
    origin: String,
    log: AuditLogId,
    file: File,
    path: PathBuf,
    /// Maximum length of a segment.
    pub(super) segment_len: u64,
    /// Length of the valid lines in the last segment.
    len: u64,
    /// True if the file may have bytes after them.
    ragged: bool,
    /// Number and hash of the last entry.
    last: u64,
    hash: EntryHash,
    /// True if a power loss could still remove entries.
    dirty: bool,
    /// True once a sync has failed: the state of the disk is unknown.
    lost: bool,
    _lock: File,
}

/// Valid beginning of a segment.
struct ValidPrefix {
    log: AuditLogId,
    origin: String,
    last: u64,
    hash: EntryHash,
    len: usize,
}

/// Bytes in place of entries.
struct Torn {
    bytes: u64,
    digest: blake3::Hash,
}

impl Journal {
    /// Opens the log in `folder`, or creates it. Blocking: waits up to `wait` while another process has it.
    ///
    /// # Errors
    /// Conflict, if another process has it; usage, if its owner is not `origin`; denied, if others may use the folder;
    /// errors of the file system.
    pub fn open(folder: &Path, origin: &str, now: Timestamp, wait: Duration) -> Result<Self> {
        if origin.len() > ORIGIN_LEN_MAX {
            return Err(Error::usage("name of an audit log is too long").got(origin));
        }
        make_private_folder(folder)?;
        // Others may be able to put a link in its place meanwhile: all is done in the folder that is opened here.
        let opened = OwnFolder::open(folder)?;
        let lock = locked(&opened.open_path().join(LOCK), wait)?;
        let mut all = segments::list(&opened.open_path())?;
        let mut torn = None;
        while let Some((first, path)) = all.pop() {
            let text = segments::read(first, &path)?;
            let Some(sound) = sound(first, &text.bytes) else {
                torn = Some(set_aside(&path, 0, &text.bytes)?);
                std::fs::remove_file(&path).map_err(|source| unwritten(&path, source))?;
                continue;
            };
            if sound.origin != origin {
                return Err(Error::usage("audit log belongs to another agent or user")
                    .at(folder.display())
                    .expected(origin)
                    .got(sound.origin)
                    .help("use another folder"));
            }
            let rest = text.bytes.get(sound.len..).unwrap_or_default();
            if !rest.is_empty() {
                torn = Some(set_aside(&path, sound.len, rest)?);
            }
            let mut journal = Self::continue_segment(opened, path, sound, lock)?;
            journal.note(torn.as_ref(), now)?;
            return Ok(journal);
        }
        let mut journal = Self::begin(opened, origin, lock, now)?;
        journal.note(torn.as_ref(), now)?;
        Ok(journal)
    }

    fn continue_segment(folder: OwnFolder, path: PathBuf, sound: ValidPrefix, lock: File) -> Result<Self> {
        let file = OpenOptions::new().write(true).custom_flags(NO_LINK).open(&path);
        let file = file.map_err(|source| unwritten(&path, source))?;
        let ValidPrefix { log, origin, last, hash, len } = sound;
        Ok(Self {
            folder,
            origin,
            log,
            file,
            path,
            segment_len: SEGMENT_LEN,
            len: len as u64,
            // Anything after the valid lines is removed.
            ragged: true,
            last,
            hash,
            dirty: true,
            lost: false,
            _lock: lock,
        })
    }

    fn begin(folder: OwnFolder, origin: &str, lock: File, now: Timestamp) -> Result<Self> {
        let (log, origin) = (AuditLogId::random(), origin.to_owned());
        let (path, file, len, hash) =
            create(&folder.open_path(), &Entry { seq: 1, time: now, what: first(log, &origin, &START) }, &START)?;
        Ok(Self {
            folder,
            origin,
            log,
            file,
            path,
            segment_len: SEGMENT_LEN,
            len,
            ragged: false,
            last: 1,
            hash,
            dirty: false,
            lost: false,
            _lock: lock,
        })
    }

    fn note(&mut self, torn: Option<&Torn>, now: Timestamp) -> Result<()> {
        let Some(Torn { bytes, digest }) = torn else { return Ok(()) };
        tracing::warn!(
            folder = %self.folder.path().display(),
            bytes,
            "audit log ended in an incomplete entry, which was moved to a file beside; entries continue after number {}",
            self.last
        );
        self.append(now, &[EntryKind::Torn { bytes: *bytes, digest: digest.to_string() }])?;
        self.sync()
    }

    /// Adds entries: all of them or none; returns the number of the first. Blocking.
    ///
    /// # Errors
    /// Exhausted, if the disk is full; else errors of the file system. Nothing was recorded.
    pub fn append(&mut self, now: Timestamp, what: &[EntryKind]) -> Result<u64> {
        if self.lost {
            return Err(Error::other("audit log could not be synced, so nothing more is recorded")
                .at(real(&self.path).display())
                .help("repair the disk, then restart"));
        }
        if self.ragged {
            self.file.set_len(self.len).map_err(|source| unwritten(&self.path, source))?;
            self.ragged = false;
        }
        let (mut lines, mut hash) = self.sealed(now, what)?;
        if self.len + lines.len() as u64 > self.segment_len {
            self.rotate(now)?;
            (lines, hash) = self.sealed(now, what)?;
        }
        if let Err(source) = self.file.write_all_at(&lines, self.len) {
            // An incomplete line must not stay before the next one.
            self.ragged = self.file.set_len(self.len).is_err();
            return Err(unwritten(&self.path, source));
        }
        let first = self.last + 1;
        self.len += lines.len() as u64;
        self.last += what.len() as u64;
        (self.hash, self.dirty) = (hash, true);
        Ok(first)
    }

    /// Lines of the next entries, and the hash of the last.
    fn sealed(&self, now: Timestamp, what: &[EntryKind]) -> Result<(Vec<u8>, EntryHash)> {
        let (mut lines, mut hash) = (Vec::new(), self.hash);
        for (seq, what) in (self.last + 1..).zip(what) {
            let (line, next) = chain::seal(&hash, &Entry { seq, time: now, what: what.clone().bounded() })?;
            lines.extend_from_slice(&line);
            hash = next;
        }
        Ok((lines, hash))
    }

    fn rotate(&mut self, now: Timestamp) -> Result<()> {
        self.sync()?;
        let entry = Entry { seq: self.last + 1, time: now, what: first(self.log, &self.origin, &self.hash) };
        (self.path, self.file, self.len, self.hash) = create(&self.folder.open_path(), &entry, &self.hash)?;
        self.last += 1;
        Ok(())
    }

    /// Returns once all entries would survive a power loss. Blocking.
    ///
    /// # Errors
    /// Errors of the file system. Nothing can be added afterwards.
    pub fn sync(&mut self) -> Result<()> {
        if self.dirty {
            self.file.sync_data().map_err(|source| {
                self.lost = true;
                unwritten(&self.path, source)
            })?;
            self.dirty = false;
        }
        Ok(())
    }

    /// Folder of the log.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Current head; not synced.
    #[must_use]
    pub fn head(&self, now: Timestamp) -> Head {
        Head { log: self.log, origin: self.origin.clone(), seq: self.last, hash: self.hash, time: now }
    }

    /// Replaces the last segment's file, so that tests can make writes fail.
    #[cfg(test)]
    pub(super) fn swap_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }
}

/// First line of a segment.
fn first(log: AuditLogId, origin: &str, previous: &EntryHash) -> EntryKind {
    let (log, previous) = (log.to_string(), previous.to_string());
    EntryKind::Begin { version: VERSION, log, origin: origin.to_owned(), previous }
}

/// Creates the segment that begins with `entry`.
fn create(folder: &Path, entry: &Entry, previous: &EntryHash) -> Result<(PathBuf, File, u64, EntryHash)> {
    let path = folder.join(segments::name(entry.seq));
    let (line, hash) = chain::seal(previous, entry)?;
    let io = |source| unwritten(&path, source);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(io)?;
    let written = file.write_all_at(&line, 0).and_then(|()| file.sync_all());
    let written = written.and_then(|()| File::open(folder)?.sync_all());
    if let Err(source) = written {
        // An error here leaves an empty segment, which is set aside when the log is opened.
        let _ = std::fs::remove_file(&path);
        return Err(unwritten(&path, source));
    }
    Ok((path, file, line.len() as u64, hash))
}

/// Consecutive valid lines of a segment, beginning with number `first`; none if the first one is invalid.
fn sound(first: u64, bytes: &[u8]) -> Option<ValidPrefix> {
    let mut found: Option<ValidPrefix> = None;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let Some(line) = line.strip_suffix(b"\n") else { break };
        match &mut found {
            None => {
                let (previous, log, origin) = chain::beginning(line)?;
                let (_, hash) = chain::open(&previous, first, line).ok()?;
                found = Some(ValidPrefix { log, origin, last: first, hash, len: line.len() + 1 });
            }
            Some(sound) => {
                let Ok((_, hash)) = chain::open(&sound.hash, sound.last + 1, line) else { break };
                (sound.last, sound.hash, sound.len) = (sound.last + 1, hash, sound.len + line.len() + 1);
            }
        }
    }
    found
}

/// Copies invalid bytes to a file beside the segment.
fn set_aside(segment: &Path, at: usize, bytes: &[u8]) -> Result<Torn> {
    let path = segment.with_extension(format!("torn-{at}"));
    let io = |source| unwritten(&path, source);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(NO_LINK);
    let file = options.open(&path).map_err(io)?;
    file.write_all_at(bytes, 0).and_then(|()| file.sync_all()).map_err(io)?;
    Ok(Torn { bytes: bytes.len() as u64, digest: blake3::hash(bytes) })
}

fn locked(path: &Path, wait: Duration) -> Result<File> {
    let io = |source| Error::io("cannot lock the audit log", &real(path), source);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(NO_LINK);
    let file = options.open(path).map_err(io)?;
    let until = Instant::now() + wait;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOCK_PAUSE),
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::conflict("audit log is in use").at(real(path).display()).help(
                    "an agent has it open: use another folder ([audit] dir of an agent, TOWLINE_AUDIT of a command)",
                ));
            }
            Err(errno) => return Err(io(errno.into())),
        }
    }
}

/// Error of a write: the request to record must be refused.
fn unwritten(path: &Path, source: std::io::Error) -> Error {
    Error::io("cannot write the audit log, so requests are refused", &real(path), source)
}

/// The path of a file in an open folder, for display.
fn real(path: &Path) -> PathBuf {
    let folder = path.parent().and_then(|folder| std::fs::read_link(folder).ok());
    folder.zip(path.file_name()).map_or_else(|| path.to_owned(), |(folder, name)| folder.join(name))
}
