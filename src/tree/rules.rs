//! Exclusions of a save: `--exclude` patterns and `.towlineignore` files.
//!
//! The syntax is that of gitignore (<https://git-scm.com/docs/gitignore>), and so is the meaning: the last pattern that
//! matches decides, a deeper file goes before one above it, and nothing inside a left-out folder can be brought back.
//! `--exclude` goes before all files. Nothing else is read: no `.gitignore`, no global excludes, no file above the root.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use tokio_util::sync::CancellationToken;

use crate::budget::Budget;
use crate::error::{Error, Result};

/// Name of ignore files. They are saved like any other file.
pub const IGNORE_FILE: &str = ".towlineignore";
/// Maximum [cost] of all ignore files of a tree: compiled patterns need up to 50 times as much memory.
pub(super) const IGNORE_LEN_MAX: u64 = 1 << 18;
/// Bytes that a pattern counts as, at least, and those that each of its wildcards adds: these take the memory.
const LINE_COST: u64 = 64;
const WILDCARD_COST: u64 = 32;
/// Maximum number of ignore files above each other: each path is compared with all, and each takes some 20 KiB at least.
const FILES_DEPTH_MAX: usize = 32;
/// Maximum length of one pattern.
const PATTERN_LEN_MAX: usize = 4096;
/// Maximum depth of braces in a pattern. The parser of patterns recurses.
const BRACES_DEPTH_MAX: usize = 16;
/// Maximum cost of all exclude patterns together.
const EXCLUDES_LEN_MAX: u64 = 1 << 16;
/// Maximum number of them: each path is compared with all.
const EXCLUDES_MAX: usize = 1024;

/// Exclusions of a save.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Patterns in gitignore syntax, relative to the root; `!PATTERN` includes entries that a `.towlineignore` excludes.
    pub excludes: Vec<String>,
    /// Folders to skip at any place, above all the repository that is written to. They are identified by device and inode, also
    /// through links and bind mounts; a missing one is no error.
    pub skip: Vec<PathBuf>,
    /// Refuse a root that is a symbolic link, which others may have planted.
    pub no_follow: bool,
    /// Read no ignore files.
    pub no_ignore_files: bool,
    /// Cancelled to end the walk early.
    pub stop: CancellationToken,
    /// Budget that the entries count against; none: they may take any memory.
    pub memory: Option<Budget>,
    /// Caller with limited rights, which may use a part of that: see [`Budget::tree_memory`].
    pub caller: Option<Arc<str>>,
}

/// Rules in effect in one folder: those of its own ignore file, then those of the folders above.
#[derive(Clone, Debug)]
pub(super) struct InForce {
    excludes: Arc<Gitignore>,
    files: Option<Arc<IgnoreFile>>,
}

#[derive(Debug)]
struct IgnoreFile {
    /// Length of the path of this file's folder, including the `/`.
    skip: usize,
    patterns: Gitignore,
    above: Option<Arc<Self>>,
    /// Number of the files above it.
    depth: usize,
}

impl InForce {
    /// The rules at the root.
    pub(super) fn new(excludes: &[String]) -> Result<Self> {
        let len: u64 = excludes.iter().map(|pattern| cost(pattern.as_bytes())).sum();
        if len > EXCLUDES_LEN_MAX || excludes.len() > EXCLUDES_MAX {
            return Err(Error::exhausted("patterns of `exclude` are too many or too long")
                .expected(format!(
                    "at most {EXCLUDES_MAX}, with {EXCLUDES_LEN_MAX} bytes, in which a wildcard counts as {WILDCARD_COST}"
                ))
                .got(format!("{}, with {len} bytes", excludes.len()))
                .help(format!("put them into a {IGNORE_FILE} of the folder")));
        }
        let mut builder = GitignoreBuilder::new(".");
        for pattern in excludes {
            check(pattern, "--exclude")?;
            builder.add_line(None, pattern).map_err(|error| malformed("--exclude", &error))?;
        }
        let excludes = builder.build().map_err(|error| malformed("--exclude", &error))?;
        Ok(Self { excludes: Arc::new(excludes), files: None })
    }

    /// Adds the rules of the ignore file in `folder`, with the content `text` and the path `shown` for errors.
    pub(super) fn with_file(&self, folder: &[u8], text: &[u8], shown: &Path) -> Result<Self> {
        let depth = self.files.as_ref().map_or(0, |above| above.depth + 1);
        if depth >= FILES_DEPTH_MAX {
            return Err(Error::usage("too many ignore files above each other")
                .at(shown.display())
                .expected(format!("at most {FILES_DEPTH_MAX} from the root to a file"))
                .help("put their patterns into one further up"));
        }
        let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
        let mut builder = GitignoreBuilder::new(".");
        for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let place = || format!("{}:{}", shown.display(), number + 1);
            let line = std::str::from_utf8(line).map_err(|error| malformed(&place(), &error))?;
            check(line, &place())?;
            builder.add_line(None, line).map_err(|error| malformed(&place(), &error))?;
        }
        let patterns = builder.build().map_err(|error| malformed(&shown.display().to_string(), &error))?;
        let skip = if folder.is_empty() { 0 } else { folder.len() + 1 };
        let file = IgnoreFile { skip, patterns, above: self.files.clone(), depth };
        Ok(Self { excludes: Arc::clone(&self.excludes), files: Some(Arc::new(file)) })
    }

    /// True if `path`, in the folder of these rules, is excluded.
    pub(super) fn leave_out(&self, path: &[u8], is_folder: bool) -> bool {
        match decide(&self.excludes, path, is_folder) {
            Match::Ignore(()) => return true,
            Match::Whitelist(()) => return false,
            Match::None => {}
        }
        let mut next = self.files.as_ref();
        while let Some(file) = next {
            match decide(&file.patterns, &path[file.skip..], is_folder) {
                Match::Ignore(()) => return true,
                Match::Whitelist(()) => return false,
                Match::None => next = file.above.as_ref(),
            }
        }
        false
    }
}

fn decide(patterns: &Gitignore, path: &[u8], is_folder: bool) -> Match<()> {
    patterns.matched(Path::new(OsStr::from_bytes(path)), is_folder).map(|_| ())
}

/// Bytes that an ignore file with the content `text` counts as.
pub(super) fn cost(text: &[u8]) -> u64 {
    let of_line = |line: &[u8]| {
        let wildcards = line.iter().filter(|byte| b"*?[{".contains(byte)).count() as u64;
        (line.len() as u64 + 1 + wildcards * WILDCARD_COST).max(LINE_COST)
    };
    text.split(|byte| *byte == b'\n').map(of_line).sum()
}

/// Refuses a pattern that is too long or too deep to be parsed.
fn check(pattern: &str, place: &str) -> Result<()> {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in pattern.bytes() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if pattern.len() <= PATTERN_LEN_MAX && deepest <= BRACES_DEPTH_MAX {
        return Ok(());
    }
    Err(Error::usage("ignore pattern is too long or too deep")
        .at(place)
        .expected(format!("at most {PATTERN_LEN_MAX} bytes, and {BRACES_DEPTH_MAX} braces within each other"))
        .got(format!("{} bytes, {deepest} deep", pattern.len())))
}

/// Error for an invalid pattern, which ends the save: ignoring it could save too much or too little.
fn malformed(place: &str, error: &dyn std::error::Error) -> Error {
    Error::usage("malformed ignore pattern").at(place).got(error).help("the syntax is that of gitignore, in UTF-8")
}
