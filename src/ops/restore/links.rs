//! Symbolic links that lead out of their tree.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path};

use crate::error::{Error, Result};
use crate::format::EntryKind;
use crate::ops::shown;
use crate::repository::Saved;

/// Refuses a tree with a symbolic link that leads out of it. A framework follows links when it reads a checkpoint, and when it writes
/// one again: the author of the tree would choose the files.
pub(super) fn check_links(saved: &Saved) -> Result<()> {
    for entry in &saved.manifest.entries {
        let EntryKind::Symlink(target) = &entry.kind else { continue };
        if leads_out(&entry.path, target) {
            return Err(Error::denied("a symbolic link of the checkpoint leads out of it")
                .at(&saved.name)
                .got(format!("{} -> {}", shown(&entry.path), shown(target)))
                .help("`towline restore` restores it to a folder of its own, for whoever trusts its author"));
        }
    }
    Ok(())
}

/// True if the link at `path` may lead out of its tree. Its folders are no links, but those of `target` may be some: `..` behind one
/// leads elsewhere than it seems.
fn leads_out(path: &[u8], target: &[u8]) -> bool {
    let above = path.split(|&byte| byte == b'/').skip(1).count();
    let mut climbed = 0;
    let mut descends = false;
    for part in Path::new(std::ffi::OsStr::from_bytes(target)).components() {
        match part {
            Component::CurDir => {}
            Component::Normal(_) => descends = true,
            Component::ParentDir if !descends && climbed < above => climbed += 1,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return true,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_within_a_tree_are_told_from_others() {
        for (path, target) in [("a", "b"), ("d/a", "../b"), ("d/e/a", "../../b/c"), ("a", "./b"), ("d/a", "..")] {
            assert!(!leads_out(path.as_bytes(), target.as_bytes()), "{path} -> {target}");
        }
        for (path, target) in [
            ("a", "/etc/passwd"),
            ("a", ".."),
            ("d/a", "../../b"),
            ("a", "b/../c"),
            ("d/a", "x/../../b"),
            ("a", "b/.."),
        ] {
            assert!(leads_out(path.as_bytes(), target.as_bytes()), "{path} -> {target}");
        }
    }
}
