//! A saved tree's local side: what there is to save, what is known not to have changed, and where a restore puts things.
//!
//! Paths inside a tree are relative byte strings, `/` between segments: names need not be UTF-8. The root itself is the
//! empty path. Everything here blocks: call it where blocking is allowed.
//!
//! No path is ever resolved as a string below the root. Folders are opened one segment at a time, never through a
//! symbolic link, so neither a link planted meanwhile nor a `..` in a manifest leads a save or a restore elsewhere.

mod atomic;
mod clear;
mod folders;
mod holes;
mod look;
mod memory;
mod path;
mod private;
mod rules;
mod seen;
mod staged;
mod stat;
mod target;
#[cfg(test)]
mod tests;
mod walk;

pub use atomic::{Readers, create_file, replace_file};
pub use holes::{HOLE_MIN, extents};
pub use look::Look;
pub use memory::{MemoryFile, Opened};
pub use path::check_path;
pub use private::{check_own_folder, check_private_folder, make_private_folder, read_own_file};
pub use rules::{IGNORE_FILE, Rules};
pub use seen::{Seen, SeenCache, coarse_now};
pub use staged::Staged;
pub use stat::{Stat, WalkKind};
pub use target::{Durability, Present, Target, TargetEntry};
pub use walk::{REPOSITORY_MARKS, SkipReason, Skipped, Walk, WalkEntry, walk};
