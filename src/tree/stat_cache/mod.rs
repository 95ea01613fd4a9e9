//! The stat cache: files of a tree that a save need not read again.
//!
//! A file counts as unchanged only if its path, device, inode, size, mtime and ctime are what they were when an earlier
//! save on this host recorded them, and only what was settled by then is recorded: had a file changed after that save
//! began, its ctime would differ. The kernel alone sets a ctime, so no program can hide a change, save by writing through
//! a shared memory map: files that somebody had open for writing are recorded only once their last change is old enough
//! (`change_times.rs`), files in memory never.
//!
//! All caches of a folder together have a limit; those that were written longest ago make room.
//!
//! One file for each repository, root and host, all integers little-endian:
//!
//! ```text
//! magic 8 | BLAKE3 of the rest 32 | repository 16 | manifest 32 | count, root, host, paths, body: lengths, 5 x 8
//! root | host | count x (dev ino size mtime ctime path-end, 6 x 8) | paths | body
//! ```
//!
//! Records are in byte order of their paths. An invalid file counts as no cache.

use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::time::{ClockId, clock_gettime};

use super::stat::Stat;
use crate::budget::GrowingMemory;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::{ManifestId, RepositoryId};
use crate::limits::{BODY_LEN_MAX, GIB};

const MAGIC: &[u8; 8] = b"towseen2";
/// Magic and checksum.
const SEALED_FROM: usize = 40;
/// Bytes before the root.
const HEAD_LEN: usize = SEALED_FROM + 16 + 32 + 5 * 8;
const RECORD_LEN: usize = 48;
/// Maximum bytes of a cache file: twice those of a manifest's body.
const CACHE_LEN_MAX: u64 = 2 * BODY_LEN_MAX;
/// Maximum bytes of all cache files of a folder.
const FOLDER_LEN_MAX: u64 = GIB;
/// Maximum number of them.
const FILES_MAX: usize = 4096;

/// Now, by the clock that local file systems stamp inodes with: behind the precise clock by up to a tick, so that nothing
/// that changes after this call gets an earlier stamp. Take it before the walk of a save begins.
#[must_use]
pub fn coarse_now() -> Timestamp {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    Timestamp(now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec))
}

/// Stat cache of one root for one repository.
#[derive(Clone, Debug)]
pub struct StatCache {
    file: PathBuf,
    repository: RepositoryId,
    root: Vec<u8>,
    host: Vec<u8>,
}

/// Record of an earlier save.
pub struct SavedStats {
    bytes: Vec<u8>,
    manifest: ManifestId,
    records: usize,
    paths: Range<usize>,
    body: usize,
    count: usize,
    /// Record after the last match; lookups are usually in order.
    next: AtomicUsize,
}

impl StatCache {
    /// The cache under `folder` for saves of `root` (absolute, free of links: [`Walk::root`](super::Walk::root)) to
    /// `repository` from this host. Touches no file.
    #[must_use]
    pub fn new(folder: &Path, repository: RepositoryId, root: &Path) -> Self {
        let root = root.as_os_str().as_bytes().to_vec();
        let host = host_id();
        let mut hasher = blake3::Hasher::new();
        for part in [&repository.to_bytes()[..], &host, &root] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let mut name = hasher.finalize().to_hex().to_string();
        name.truncate(40);
        Self { file: folder.join(name + ".seen"), repository, root, host }
    }

    /// Record of the last save; none if there was none, or if it is damaged. Its bytes take memory of `memory`.
    ///
    /// # Errors
    /// Exhausted, if too little is left of that.
    pub fn load(&self, memory: &mut GrowingMemory) -> Result<Option<SavedStats>> {
        let Some((file, len)) = self.open() else { return Ok(None) };
        memory.add(len)?;
        Ok(self.read(file, len))
    }

    /// The file, and its length if that is possible.
    fn open(&self) -> Option<(File, u64)> {
        let file = File::open(&self.file).ok()?;
        let len = file.metadata().ok()?.len();
        (len <= CACHE_LEN_MAX).then_some((file, len))
    }

    fn read(&self, file: File, len: u64) -> Option<SavedStats> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(usize::try_from(len).ok()?).ok()?;
        file.take(len).read_to_end(&mut bytes).ok()?;
        SavedStats::parse(bytes, self)
    }

    /// Records a finished save: its manifest, that manifest's plain body, and the files it read or knew, in byte order
    /// of their paths, with the metadata that was checked after reading. `started` is [`coarse_now`] from before its
    /// walk; what was not settled by then is left out. The new record replaces the old in one step. Does nothing if
    /// another save of the same root is recording.
    pub fn store<'e>(
        &self,
        manifest: ManifestId,
        body: &[u8],
        started: Timestamp,
        files: impl IntoIterator<Item = (&'e [u8], &'e Stat)>,
    ) -> Result<()> {
        let mut files = files.into_iter().filter(|(_, stat)| settled(stat, started)).collect::<Vec<_>>();
        files.sort_by_key(|(path, _)| *path);
        files.dedup_by_key(|(path, _)| *path);
        let head = self.encode(manifest, body.len(), &files);
        let mut hasher = blake3::Hasher::new();
        let sum = hasher.update(&head).update(body).finalize();
        let written = self.replace(&[MAGIC, sum.as_bytes(), &head, body]).and_then(|()| self.make_room(FOLDER_LEN_MAX));
        written.map_err(|error| Error::io("cannot write the stat cache", &self.file, error))
    }

    /// Removes other cache files of the folder until all together have at most `most` bytes, those written longest ago first.
    fn make_room(&self, most: u64) -> std::io::Result<()> {
        let Some(folder) = self.file.parent() else { return Ok(()) };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            // Another save may remove it.
            if let Ok(meta) = entry.metadata()
                && meta.is_file()
            {
                files.push((meta.modified()?, meta.len(), entry.path()));
            }
        }
        let mut total: u64 = files.iter().map(|(_, len, _)| len).sum();
        let mut count = files.len();
        files.sort();
        for (_, len, path) in files {
            if total <= most && count <= FILES_MAX {
                break;
            }
            if path != self.file && path.extension().is_some_and(|kind| kind == "seen") {
                let _ = std::fs::remove_file(path);
                total -= len;
                count -= 1;
            }
        }
        Ok(())
    }

    /// Everything between the checksum and the body.
    fn encode(&self, manifest: ManifestId, body_len: usize, files: &[(&[u8], &Stat)]) -> Vec<u8> {
        let paths_len = files.iter().map(|(path, _)| path.len()).sum::<usize>();
        let mut out = Vec::with_capacity(HEAD_LEN + self.root.len() + files.len() * RECORD_LEN + paths_len);
        out.extend_from_slice(&self.repository.to_bytes());
        out.extend_from_slice(manifest.as_bytes());
        for len in [files.len(), self.root.len(), self.host.len(), paths_len, body_len] {
            out.extend_from_slice(&(len as u64).to_le_bytes());
        }
        out.extend_from_slice(&self.root);
        out.extend_from_slice(&self.host);
        let mut path_end = 0;
        for (path, stat) in files {
            path_end += path.len() as u64;
            out.extend_from_slice(&record(stat));
            out.extend_from_slice(&path_end.to_le_bytes());
        }
        for (path, _) in files {
            out.extend_from_slice(path);
        }
        out
    }

    /// Writes `parts` to a temporary file and renames it. A lock protects the temporary file, which is reused after a crash.
    /// There is no fsync: the checksum shows if a power loss has damaged the file.
    fn replace(&self, parts: &[&[u8]]) -> std::io::Result<()> {
        if let Some(folder) = self.file.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let part = self.file.with_extension("part");
        let no_link = OFlags::NOFOLLOW.bits().cast_signed();
        let mut file =
            File::options().create(true).truncate(false).write(true).mode(0o600).custom_flags(no_link).open(&part)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(());
        }
        // The previous holder of the lock may have renamed this file into place.
        if !std::fs::metadata(&part).is_ok_and(|named| file.metadata().is_ok_and(|open| open.ino() == named.ino())) {
            return Ok(());
        }
        file.set_len(0)?;
        if let Err(error) = parts.iter().try_for_each(|part| file.write_all(part)) {
            // Frees the disk: the file is of no use.
            file.set_len(0)?;
            return Err(error);
        }
        std::fs::rename(&part, &self.file)
    }
}

impl SavedStats {
    /// True if the file at `path` (relative to the root) is unchanged.
    #[must_use]
    pub fn unchanged(&self, path: &[u8], stat: &Stat) -> bool {
        self.find(path).is_some_and(|at| {
            self.next.store(at + 1, Ordering::Relaxed);
            self.record(at)[..RECORD_LEN - 8] == record(stat)
        })
    }

    /// The manifest that the save made.
    #[must_use]
    pub fn manifest(&self) -> ManifestId {
        self.manifest
    }

    /// The plain body of that manifest.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.bytes[self.body..]
    }

    /// Parses a complete file of `cache`.
    fn parse(bytes: Vec<u8>, cache: &StatCache) -> Option<Self> {
        let head = bytes.get(..HEAD_LEN)?;
        let sum = blake3::hash(bytes.get(SEALED_FROM..)?);
        let repository = &head[SEALED_FROM..SEALED_FROM + 16];
        if &head[..8] != MAGIC || &head[8..SEALED_FROM] != sum.as_bytes() || repository != cache.repository.to_bytes() {
            return None;
        }
        let manifest = ManifestId::from_bytes(head[SEALED_FROM + 16..SEALED_FROM + 48].try_into().ok()?);
        let len = |n: usize| usize::try_from(number(head, SEALED_FROM + 48 + n * 8)).ok();
        let count = len(0)?;
        let host = HEAD_LEN.checked_add(len(1)?)?;
        let records = host.checked_add(len(2)?)?;
        let paths = records.checked_add(count.checked_mul(RECORD_LEN)?)?;
        let body = paths.checked_add(len(3)?)?;
        let same = bytes.get(HEAD_LEN..host)? == cache.root && bytes.get(host..records)? == cache.host;
        if !same || body.checked_add(len(4)?)? != bytes.len() {
            return None;
        }
        let seen = Self { bytes, manifest, records, paths: paths..body, body, count, next: AtomicUsize::new(0) };
        let ends = (0..count).map(|at| seen.path_end(at));
        (ends.is_sorted() && count.checked_sub(1).map_or(0, |last| seen.path_end(last)) == seen.paths.len())
            .then_some(seen)
    }

    fn find(&self, path: &[u8]) -> Option<usize> {
        let hint = self.next.load(Ordering::Relaxed);
        if hint < self.count && self.path(hint) == path {
            return Some(hint);
        }
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low.midpoint(high);
            match self.path(middle).cmp(path) {
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    fn record(&self, at: usize) -> &[u8] {
        &self.bytes[self.records + at * RECORD_LEN..][..RECORD_LEN]
    }

    /// End of the path of record `at`; [`parse`](Self::parse) checked that these ascend and stay inside.
    fn path_end(&self, at: usize) -> usize {
        usize::try_from(number(self.record(at), RECORD_LEN - 8)).unwrap_or(usize::MAX)
    }

    fn path(&self, at: usize) -> &[u8] {
        let start = at.checked_sub(1).map_or(0, |before| self.path_end(before));
        &self.bytes[self.paths.clone()][start..self.path_end(at)]
    }
}

impl fmt::Debug for SavedStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SavedStats")
            .field("manifest", &self.manifest)
            .field("files", &self.count)
            .finish_non_exhaustive()
    }
}

/// Encodes the part of `stat` that must be equal.
fn record(stat: &Stat) -> [u8; RECORD_LEN - 8] {
    let mut out = [0; RECORD_LEN - 8];
    let fields = [
        stat.dev.to_le_bytes(),
        stat.ino.to_le_bytes(),
        stat.size.to_le_bytes(),
        stat.mtime.0.to_le_bytes(),
        stat.ctime.0.to_le_bytes(),
    ];
    for (place, field) in out.chunks_exact_mut(8).zip(fields) {
        place.copy_from_slice(&field);
    }
    out
}

/// True if every change after `started` would change a timestamp of `stat`.
///
/// A file system that keeps coarse stamps rounds down, so a later change can still get the stamp of an earlier one. How
/// coarse it is shows in the ctime: whole seconds (ext4 with 128-byte inodes, NFS before version 4 on such; FAT has two),
/// or whole milliseconds (exFAT has ten); the others keep nanoseconds.
fn settled(stat: &Stat, started: Timestamp) -> bool {
    const MILLISECOND: i64 = 1_000_000;
    let grain = match stat.ctime.0 {
        whole if whole % (1000 * MILLISECOND) == 0 => 2000 * MILLISECOND,
        whole if whole % MILLISECOND == 0 => 10 * MILLISECOND,
        _ => 0,
    };
    stat.mtime < started && stat.ctime.0.saturating_add(grain) < started.0
}

/// Id of this host among those that share its home folder.
fn host_id() -> Vec<u8> {
    let mut id = std::fs::read("/etc/machine-id").unwrap_or_default();
    id.truncate(64);
    id.extend_from_slice(rustix::system::uname().nodename().to_bytes());
    id
}

fn number(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests;
