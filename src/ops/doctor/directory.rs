//! Checks of a directory: file system, free space, durability.

use std::io;
use std::path::Path;

use super::{Check, size};
use crate::limits::GIB;
use crate::storage::{DirectoryTrial, try_directory};

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
    match try_directory(path) {
        Ok(DirectoryTrial { fsync, hard_links }) => checks.extend([synced(fsync), linked(hard_links)]),
        Err(error) => checks.push(Check::warn("fsync", format!("not tried, the directory cannot be written: {error}"))),
    }
    checks
}

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

fn synced(tried: io::Result<()>) -> Check {
    const WHAT: &str = "fsync";
    match tried {
        Ok(()) => Check::ok(WHAT, "files and folders can be synced"),
        Err(error) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            Check::warn(WHAT, format!("cannot be tried: {error}")).help(FULL)
        }
        Err(error) => Check::bad(WHAT, format!("does not work: {error}")).help("use another file system"),
    }
}

fn linked(tried: io::Result<()>) -> Check {
    const WHAT: &str = "hard links";
    match tried {
        Ok(()) => Check::ok(WHAT, "work"),
        Err(error) => Check::bad(WHAT, format!("do not work: {error}; commits stand on them"))
            .help("use a file system that has them (not FAT, exFAT or most FUSE mounts)"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Outcome;
    use super::*;

    #[test]
    fn a_directory_is_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("probe/01ARZ3NDEKTSV4RRFFQ69G5FAV")).unwrap();
        let checks = directory(dir.path());
        let outcome = |what: &str| checks.iter().find(|check| check.what == what).unwrap().outcome;
        assert_eq!((outcome("fsync"), outcome("hard links")), (Outcome::Ok, Outcome::Ok), "{checks:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
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
