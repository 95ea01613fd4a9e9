//! A disk in memory that writes down what is done to it, fills up, and loses its power.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::Rng;
use crate::cache::medium::{Medium, MediumFile};

/// Something that was done, to the inode of that number.
#[derive(Clone, Debug)]
enum DiskOperation {
    Create(PathBuf, u64),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    SyncFolder(PathBuf),
    Write(u64, u64, Vec<u8>),
    Allocate(u64, u64),
    Sync(u64),
}

#[derive(Debug, Default)]
pub(super) struct MemoryDisk {
    names: BTreeMap<PathBuf, u64>,
    inodes: HashMap<u64, Vec<u8>>,
    next: u64,
    deeds: Vec<DiskOperation>,
    /// Deeds until the power goes.
    pub(super) left: Option<usize>,
    /// Whether the disk is full for writes that allocate, or for all.
    pub(super) full: bool,
    pub(super) full_for_writes: bool,
    /// True if a write beyond the end of a file fails, as on a full disk.
    pub(super) full_for_growth: bool,
    pub(super) available: u64,
}

/// Fate of the writes that were not synced at a power failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// Only the process died.
    Nothing,
    /// Each write survives, is lost or is torn; of names, a first part of the changes survives.
    Some(u64),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Memory(Arc<Mutex<MemoryDisk>>);

#[derive(Debug)]
struct MemoryFile(Memory, u64);

impl MemoryDisk {
    fn apply(&mut self, deed: &DiskOperation) {
        match deed {
            DiskOperation::Create(path, inode) => {
                self.names.insert(path.clone(), *inode);
                self.inodes.entry(*inode).or_default();
            }
            DiskOperation::Rename(from, to) => {
                if let Some(inode) = self.names.remove(from) {
                    self.names.insert(to.clone(), inode);
                }
            }
            DiskOperation::Remove(path) => drop(self.names.remove(path)),
            DiskOperation::Write(inode, at, bytes) => {
                let file = self.inodes.entry(*inode).or_default();
                let (from, to) = (usize::try_from(*at).unwrap(), usize::try_from(*at).unwrap() + bytes.len());
                file.resize(file.len().max(to), 0);
                file[from..to].copy_from_slice(bytes);
            }
            DiskOperation::Allocate(inode, len) => {
                let len = usize::try_from(*len).unwrap();
                let file = self.inodes.entry(*inode).or_default();
                file.resize(file.len().max(len), 0);
            }
            DiskOperation::SyncFolder(_) | DiskOperation::Sync(_) => {}
        }
    }

    /// Forgets what was done: for a test that does much and does not ask.
    pub(super) fn forget(&mut self) {
        self.deeds.clear();
    }

    fn act(&mut self, deed: DiskOperation) -> io::Result<()> {
        match &mut self.left {
            Some(0) => return Err(io::Error::other("no power")),
            Some(left) => *left -= 1,
            None => {}
        }
        self.apply(&deed);
        self.deeds.push(deed);
        Ok(())
    }
}

impl Memory {
    pub(super) fn new() -> Self {
        let memory = Self::default();
        memory.world().available = u64::MAX / 4;
        memory
    }

    pub(super) fn world(&self) -> MutexGuard<'_, MemoryDisk> {
        self.0.lock().unwrap()
    }

    /// Deeds so far.
    pub(super) fn deeds(&self) -> usize {
        self.world().deeds.len()
    }

    pub(super) fn is_off(&self) -> bool {
        self.world().left == Some(0)
    }

    /// Changes a file behind everybody's back.
    pub(super) fn meddle(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut world = self.world();
        let inode = *world.names.iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
        change(world.inodes.get_mut(&inode).unwrap());
    }

    /// The disk as it is found when the power is back.
    pub(super) fn after(&self, loss: Loss) -> Self {
        let (deeds, after) = (self.world().deeds.clone(), Self::new());
        let Loss::Some(seed) = loss else {
            deeds.iter().for_each(|deed| after.world().apply(deed));
            after.world().next = self.world().next;
            return after;
        };
        let mut rng = Rng(seed | 1);
        let synced = |last: &dyn Fn(&DiskOperation) -> bool| deeds.iter().rposition(last).map_or(0, |at| at + 1);
        // A file system keeps the order of what is done to names; what a folder's sync promises is at least kept.
        let until = usize::try_from(rng.below(deeds.len() as u64 + 1)).unwrap();
        let named = |path: &Path, at: usize| {
            let folder = path.parent();
            at < until
                .max(synced(&|deed| matches!(deed, DiskOperation::SyncFolder(synced) if Some(&**synced) == folder)))
        };
        for (at, deed) in deeds.iter().enumerate() {
            let mut deed = deed.clone();
            let kept = match &mut deed {
                DiskOperation::Write(inode, _, bytes) => {
                    let safe = at < synced(&|deed| matches!(deed, DiskOperation::Sync(other) if other == inode));
                    if !safe && rng.below(4) == 0 {
                        // Whole sectors arrive, or do not.
                        bytes.truncate(usize::try_from(rng.below(bytes.len() as u64 / 512 + 1)).unwrap() * 512);
                    }
                    safe || rng.below(3) > 0
                }
                DiskOperation::Allocate(inode, _) => {
                    at < synced(&|deed| matches!(deed, DiskOperation::Sync(other) if other == inode))
                        || rng.below(10) > 0
                }
                DiskOperation::Create(path, _) | DiskOperation::Remove(path) | DiskOperation::Rename(path, _) => {
                    named(path, at)
                }
                DiskOperation::Sync(_) | DiskOperation::SyncFolder(_) => true,
            };
            if kept {
                after.world().apply(&deed);
            }
        }
        after.world().next = self.world().next;
        after
    }
}

impl Medium for Memory {
    fn open(&self, path: &Path, create: bool) -> io::Result<Arc<dyn MediumFile>> {
        let mut world = self.world();
        if create {
            if world.full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            world.next += 1;
            let inode = world.next;
            world.act(DiskOperation::Create(path.to_owned(), inode))?;
        }
        let inode = *world.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(MemoryFile(self.clone(), inode)))
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<(String, u64)>> {
        let world = self.world();
        let inside = world.names.iter().filter(|(path, _)| path.parent() == Some(folder));
        Ok(inside
            .map(|(path, inode)| (path.file_name().unwrap().to_str().unwrap().into(), world.inodes[inode].len() as u64))
            .collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.world().act(DiskOperation::Rename(from.to_owned(), to.to_owned()))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if !self.world().names.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.world().act(DiskOperation::Remove(path.to_owned()))
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.world().act(DiskOperation::SyncFolder(folder.to_owned()))
    }

    fn available(&self, _: &Path) -> io::Result<u64> {
        Ok(self.world().available)
    }
}

impl MediumFile for MemoryFile {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let world = self.0.world();
        let at = usize::try_from(at).unwrap();
        let bytes = world.inodes[&self.1].get(at..at + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn write_at(&self, parts: &[&[u8]], at: u64) -> io::Result<()> {
        let mut world = self.0.world();
        let end = at + parts.iter().map(|part| part.len() as u64).sum::<u64>();
        let grows = world.inodes.get(&self.1).is_none_or(|file| (file.len() as u64) < end);
        if world.full_for_writes || world.full_for_growth && grows {
            return Err(io::ErrorKind::StorageFull.into());
        }
        world.act(DiskOperation::Write(self.1, at, parts.concat()))
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let mut world = self.0.world();
        if world.full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        world.act(DiskOperation::Allocate(self.1, len))
    }

    fn sync(&self) -> io::Result<()> {
        self.0.world().act(DiskOperation::Sync(self.1))
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.world().inodes[&self.1].len() as u64)
    }
}
