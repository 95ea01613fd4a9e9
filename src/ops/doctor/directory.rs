//! Checks of a directory: file system, free space, durability.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use super::{Check, size};
use crate::limits::GIB;
use crate::storage::scratch;

/// Free bytes below which the next save may not fit.
const FREE_MIN: u64 = GIB;

/// All checks of a directory; removes empty folders of this and earlier probes.
pub(super) fn directory(path: &Path) -> Vec<Check> {
    let mut checks = match rustix::fs::statfs(path) {
        Ok(found) => {
            let block = u64::try_from(found.f_bsize).unwrap_or_default();
            vec![
                file_system(u64::try_from(found.f_type).unwrap_or_default()),
                space(found.f_bavail.saturating_mul(block), found.f_blocks.saturating_mul(block)),
            ]
        }
        Err(error) => vec![Check::warn("file system", format!("cannot be inspected: {error}"))],
    };
    let folder = path.join(scratch().as_ref());
    match fs::create_dir_all(&folder) {
        Ok(()) => checks.extend([fsync(&folder), hard_links(&folder)]),
        Err(error) => checks.push(Check::warn("fsync", format!("not tried, the directory cannot be written: {error}"))),
    }
    for name in [FILE, LINK] {
        // A missing file is fine.
        let _ = fs::remove_file(folder.join(name));
    }
    remove_empty(folder.parent().unwrap_or(path));
    checks
}

const FILE: &str = "file";
const LINK: &str = "link";

/// Suitability of a file system.
enum FileSystemKind {
    Local,
    Memory,
    Network,
    Unknown,
}

/// Kind of a file system, by the magic numbers of statfs(2) (<https://man7.org/linux/man-pages/man2/statfs.2.html>).
fn file_system(magic: u64) -> Check {
    const WHAT: &str = "file system";
    let (name, nature) = match magic {
        0xEF53 => ("ext4", FileSystemKind::Local),
        0x5846_5342 => ("XFS", FileSystemKind::Local),
        0x9123_683E => ("Btrfs", FileSystemKind::Local),
        0x2FC1_2FC1 => ("ZFS", FileSystemKind::Local),
        0xF2F5_2010 => ("F2FS", FileSystemKind::Local),
        0x794C_7630 => ("overlayfs; in a container it goes when the container goes", FileSystemKind::Local),
        0x0102_1994 => ("tmpfs", FileSystemKind::Memory),
        0x8584_58F6 => ("ramfs", FileSystemKind::Memory),
        0x6969 => ("NFS", FileSystemKind::Network),
        0x517B | 0xFF53_4D42 | 0xFE53_4D42 => ("SMB", FileSystemKind::Network),
        0x0102_1997 => ("9p", FileSystemKind::Network),
        0x00C3_6400 => ("CephFS", FileSystemKind::Network),
        0x0BD0_0BD0 => ("Lustre", FileSystemKind::Network),
        0x4750_4653 => ("GPFS", FileSystemKind::Network),
        0x6573_5546 => ("FUSE: what it promises depends on what is behind it", FileSystemKind::Unknown),
        _ => return Check::ok(WHAT, format!("of kind {magic:#x}, which Towline does not know")),
    };
    match nature {
        FileSystemKind::Local => Check::ok(WHAT, name),
        FileSystemKind::Memory => Check::warn(WHAT, format!("{name}: everything is gone when this machine stops"))
            .help("keep what must last on a disk or in S3"),
        FileSystemKind::Network => {
            Check::warn(WHAT, format!("{name}: other machines may see what is written here late"))
                .help("write from one machine at a time, or share through S3")
        }
        FileSystemKind::Unknown => {
            Check::warn(WHAT, name).help("use a directory on a disk, or the store behind it itself")
        }
    }
}

/// Help for a full disk.
const FULL: &str = "free some space: `towline rm` removes names, and `towline collect --grace 0 --keep-removed 0` then deletes what no name needs";

fn space(free: u64, total: u64) -> Check {
    const WHAT: &str = "free space";
    let detail = format!("{} of {}", size(free), size(total));
    if free < FREE_MIN {
        return Check::warn(WHAT, detail).help(FULL);
    }
    Check::ok(WHAT, detail)
}

/// Checks that a file and its folder can be synced, as every put does.
fn fsync(folder: &Path) -> Check {
    const WHAT: &str = "fsync";
    let synced = || {
        let mut file = File::create(folder.join(FILE))?;
        file.write_all(b"towline")?;
        file.sync_all()?;
        File::open(folder)?.sync_all()
    };
    match synced() {
        Ok(()) => Check::ok(WHAT, "files and folders can be synced"),
        Err(error) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            Check::warn(WHAT, format!("cannot be tried: {error}")).help(FULL)
        }
        Err(error) => Check::bad(WHAT, format!("does not work: {error}")).help("use another file system"),
    }
}

/// Checks hard links: create-if-absent is a hard link to a finished file, which appears atomically for only one writer.
fn hard_links(folder: &Path) -> Check {
    const WHAT: &str = "hard links";
    let (file, link) = (folder.join(FILE), folder.join(LINK));
    let refused = match fs::hard_link(&file, &link).and_then(|()| match fs::hard_link(&file, &link) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::other("a second link of the same name replaced the first")),
    }) {
        Ok(()) => return Check::ok(WHAT, "work"),
        Err(error) => error,
    };
    Check::bad(WHAT, format!("do not work: {refused}; commits stand on them"))
        .help("use a file system that has them (not FAT, exFAT or most FUSE mounts)")
}

/// Removes the empty folders in `folder`, and then itself: a store leaves them, since removing them under a writer's feet
/// makes it try again.
fn remove_empty(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // A folder that is in use is not empty and stays.
        let _ = fs::remove_dir(entry.path());
    }
    let _ = fs::remove_dir(folder);
}

#[cfg(test)]
mod tests {
    use super::super::Outcome;
    use super::*;

    #[test]
    fn a_directory_is_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("probe/old")).unwrap();
        let checks = directory(dir.path());
        let outcome = |what: &str| checks.iter().find(|check| check.what == what).unwrap().outcome;
        assert_eq!((outcome("fsync"), outcome("hard links")), (Outcome::Ok, Outcome::Ok), "{checks:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn file_systems_that_lose_or_delay_are_told() {
        assert_eq!(file_system(0xEF53).outcome, Outcome::Ok);
        for magic in [0x6969, 0x0102_1994, 0x6573_5546] {
            let check = file_system(magic);
            assert_eq!(check.outcome, Outcome::Warn);
            assert!(check.help.is_some(), "{check:?}");
        }
        assert_eq!(space(FREE_MIN - 1, 1 << 40).outcome, Outcome::Warn);
    }
}
