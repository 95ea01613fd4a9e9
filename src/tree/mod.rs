//! Local files of a saved tree: the walk of a save, the stat cache of unchanged files, and the target of a restore.
//!
//! Paths inside a tree are relative byte strings, `/` between segments: names need not be UTF-8. The root itself is the
//! empty path. Everything here blocks: call it where blocking is allowed.
//!
//! No path below the root is resolved as a string. Folders are opened one segment at a time, never through a symbolic link, so
//! that neither a planted link nor a `..` in a manifest leads a save or restore out of the root.

mod atomic;
mod change_times;
mod clear;
mod file_stamp;
mod folders;
mod holes;
mod memory;
mod own_folder;
mod path;
mod private;
mod rules;
mod staged;
mod stat;
mod stat_cache;
mod target;
#[cfg(test)]
mod tests;
mod text_file;
mod walk;

pub use atomic::{Readers, create_file, replace_file};
pub use file_stamp::FileStamp;
pub use holes::{Extents, HOLE_MIN, extents};
pub use memory::{MemoryFile, Opened};
pub use own_folder::OwnFolder;
pub use path::{check_file_name, check_path};
pub use private::{
    check_own_folder, check_private_folder, is_own_file, make_private_folder, read_own_file, read_own_target,
};
pub use rules::{IGNORE_FILE, Rules};
pub use staged::{Durability, Staged};
pub use stat::{Stat, WalkEntry, WalkKind};
pub use stat_cache::{SavedStats, StatCache, coarse_now};
pub use target::{Present, Target, TargetEntries, TargetEntry};
pub use text_file::read_text_file;
pub use walk::{REPOSITORY_MARKS, SKIPPED_MAX, SkipReason, Skipped, Walk, walk};
