//! Paths inside a tree: checks, splitting and joining, and names of temporary files.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use ulid::Ulid;

use crate::error::{Error, Result};
use crate::limits::{PATH_LEN_MAX, SEGMENT_LEN_MAX};

/// Prefix of names of unfinished files.
const STAGING_PREFIX: &str = ".towline-";
const STAGING_SUFFIX: &str = ".part";
/// Hex digits that identify a process.
const PROCESS_DIGITS: usize = 16;

/// Accepts a valid path below the root of a tree: no empty, `.` or `..` segment, no NUL, no leading or trailing `/`, and not
/// longer than Linux allows.
///
/// # Errors
/// Damaged: only a damaged or malicious manifest has another path.
pub fn check_path(path: &[u8]) -> Result<()> {
    let refuse = |expected: &str| {
        Err(Error::damaged("unsafe path in a saved tree").at(shown(path)).expected(expected).help(
            "nothing was written there: the tree was made by a broken or hostile program, save it again from its source",
        ))
    };
    if path.len() > PATH_LEN_MAX {
        return refuse("at most 4096 bytes");
    }
    for segment in path.split(|byte| *byte == b'/') {
        match segment {
            b"" | b"." | b".." => return refuse("a relative path without empty, . or .. segments"),
            _ if segment.len() > SEGMENT_LEN_MAX => return refuse("names of at most 255 bytes"),
            _ if segment.contains(&0) => return refuse("no NUL byte"),
            _ => {}
        }
    }
    Ok(())
}

/// Refuses a file or link at `path` whose name is that of an unfinished file: the next restore to its folder would remove it.
///
/// # Errors
/// Usage.
pub fn check_file_name(path: &[u8]) -> Result<()> {
    if !is_staging(split(path).1) {
        return Ok(());
    }
    Err(Error::usage("this name is kept for unfinished files of restores")
        .at(shown(path))
        .help("give the file another name"))
}

/// Parent and name; the parent of a top entry is the empty path.
pub(super) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

/// `name` inside `folder`.
pub(super) fn join(folder: &[u8], name: &[u8]) -> Vec<u8> {
    if folder.is_empty() {
        return name.to_vec();
    }
    let mut path = Vec::with_capacity(folder.len() + 1 + name.len());
    path.extend_from_slice(folder);
    path.push(b'/');
    path.extend_from_slice(name);
    path
}

/// True if `path` is `folder`, or is inside of it.
pub(super) fn within(path: &[u8], folder: &[u8]) -> bool {
    match path.strip_prefix(folder) {
        Some(rest) => folder.is_empty() || rest.is_empty() || rest[0] == b'/',
        None => false,
    }
}

/// A path as text for display.
pub(super) fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// Unique name for an unfinished file.
pub(super) fn staging_name() -> String {
    static PROCESS: LazyLock<u64> = LazyLock::new(|| {
        // The low 80 bits of a ULID are random.
        let [.., a, b, c, d, e, f, g, h] = Ulid::generate().to_bytes();
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    });
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let process = *PROCESS;
    format!("{STAGING_PREFIX}{process:016x}-{:x}{STAGING_SUFFIX}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Name of the unfinished file for `name`, by which a later process finds it.
pub(super) fn resumable_name(name: &[u8]) -> String {
    let digest = blake3::hash(name);
    let [a, b, c, d, e, f, g, h, ..] = *digest.as_bytes();
    format!("{STAGING_PREFIX}{:016x}-0{STAGING_SUFFIX}", u64::from_be_bytes([a, b, c, d, e, f, g, h]))
}

/// True if `name` is one that [`staging_name`] or [`resumable_name`] makes.
pub(super) fn is_staging(name: &[u8]) -> bool {
    let inner = name
        .strip_prefix(STAGING_PREFIX.as_bytes())
        .and_then(|rest| rest.strip_suffix(STAGING_SUFFIX.as_bytes()))
        .unwrap_or_default();
    let hex = |bytes: &[u8]| !bytes.is_empty() && bytes.iter().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(b));
    inner
        .split_at_checked(PROCESS_DIGITS)
        .is_some_and(|(process, rest)| hex(process) && rest.strip_prefix(b"-").is_some_and(hex))
}
