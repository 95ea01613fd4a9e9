//! Doubts about the times of files. A write through a shared memory map sets them only if it is the first one to its page since that went
//! to the disk; in memory file systems none does.
#![expect(unsafe_code, reason = "no crate has leases of files")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use rustix::fs::fstatfs;

use super::stat::WalkEntry;
use crate::clock::Timestamp;

/// Time after which a page that was written to is on the disk: 30 s, plus some for the writing, unless the system is set otherwise
/// (<https://docs.kernel.org/admin-guide/sysctl/vm.html#dirty-expire-centisecs>).
const WRITTEN_BACK: Duration = Duration::from_mins(2);
/// `F_SETSIG` of `fcntl`, which the crate libc lacks
/// (<https://github.com/torvalds/linux/blob/v6.12/include/uapi/asm-generic/fcntl.h>).
const F_SETSIG: libc::c_int = 10;
/// Magic numbers of tmpfs, ramfs and hugetlbfs (<https://man7.org/linux/man-pages/man2/statfs.2.html>).
const IN_MEMORY: [u32; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];
/// Magic number of overlayfs: maps are of the file below, so its own file seems to have no writer, and may be in memory.
const OVERLAY: u32 = 0x794c_7630;

/// Files whose times do not tell every change.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// Paths of files that changed recently, and that somebody had open for writing, or may have had.
    written: BTreeSet<Vec<u8>>,
    /// Devices of the files.
    devices: BTreeMap<u64, FileSystem>,
}

/// Kinds of file systems, by what a write through a memory map does to the times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileSystem {
    /// It sets them if the page was on the disk.
    Disk,
    /// It sets none, or may set none.
    Memory,
}

impl Doubts {
    /// Looks at a file that was opened `now`, before it is read.
    pub(super) fn look(&mut self, found: &WalkEntry, file: &File, now: Timestamp) {
        let system = *self.devices.entry(found.stat.dev).or_insert_with(|| file_system(file));
        let is_old = found.stat.ctime.after(WRITTEN_BACK) < now;
        if system != FileSystem::Memory && !is_old && !has_no_writer(file) {
            self.written.insert(found.path.clone());
        }
    }

    /// True if every change of the file since it was looked at sets a new time.
    pub(super) fn times_tell(&self, found: &WalkEntry) -> bool {
        self.devices.get(&found.stat.dev) != Some(&FileSystem::Memory) && !self.written.contains(&found.path)
    }
}

fn file_system(file: &File) -> FileSystem {
    match fstatfs(file).map(|system| u32::try_from(system.f_type)) {
        Ok(Ok(magic)) => by_magic(magic),
        _ => FileSystem::Disk,
    }
}

fn by_magic(magic: u32) -> FileSystem {
    if magic == OVERLAY || IN_MEMORY.contains(&magic) { FileSystem::Memory } else { FileSystem::Disk }
}

/// True if no process has the file open, or mapped, for writing: the kernel grants leases for reading only then, to the owner of the file
/// (<https://man7.org/linux/man-pages/man2/F_SETLEASE.2const.html>).
fn has_no_writer(file: &File) -> bool {
    let descriptor = file.as_raw_fd();
    // SAFETY: the descriptor is open, and these commands take a number.
    let set = |command, number: libc::c_int| unsafe { libc::fcntl(descriptor, command, number) } == 0;
    // A writer that comes before the lease is given back breaks it by a signal: not by SIGIO, which ends processes, but by one that is ignored.
    let is_leased = set(F_SETSIG, libc::SIGURG) && set(libc::F_SETLEASE, libc::F_RDLCK);
    if is_leased {
        set(libc::F_SETLEASE, libc::F_UNLCK);
    }
    is_leased
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Rules, walk};

    #[test]
    fn files_that_are_open_for_writing_may_hide_a_recent_change() {
        // On a disk, where the folder for temporary files is in memory on many systems.
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "content").unwrap();
        let walk = walk(folder.path(), &Rules::default()).unwrap();
        let found = walk.found.iter().find(|found| found.path == b"file").unwrap();
        let told = |later: u64| {
            let mut doubts = Doubts::default();
            doubts.look(found, &File::open(&path).unwrap(), found.stat.ctime.after(Duration::from_secs(later)));
            doubts.times_tell(found)
        };
        assert!(told(1), "nobody writes");
        let writer = File::options().write(true).open(&path).unwrap();
        assert!(!told(1) && told(200));
        drop(writer);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let map = memmap2::MmapRaw::map_raw(&file).unwrap();
        drop(file);
        assert!(!told(1), "a map counts, although the file is closed");
        drop(map);
        assert!(told(1));
    }

    #[test]
    fn files_in_memory_are_told_by_their_file_system() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "content").unwrap();
        assert_eq!(file_system(&File::open(&path).unwrap()), FileSystem::Memory);
        assert_eq!(file_system(&File::open("/proc/self/stat").unwrap()), FileSystem::Disk);
        assert_eq!(by_magic(0x794c_7630), FileSystem::Memory, "of overlayfs, which containers have");
    }
}
