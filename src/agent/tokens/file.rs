//! File of the tokens: hashes and rights; replaced atomically, accessible to this user only.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{FlockOperation, OFlags, flock};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::tree::{Readers, check_own_folder, read_own_file, replace_file};

/// Version of the file's format.
const VERSION: u32 = 1;
/// Limit of the file, in bytes.
const FILE_LEN_MAX: u64 = 4 << 20;

/// Record of one token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) id: String,
    /// BLAKE3 of the secret, in hexadecimal digits.
    pub(super) hash: String,
    pub(super) name: Option<String>,
    pub(super) tenant: Option<String>,
    pub(super) scopes: Vec<String>,
    /// Nanoseconds since 1970.
    pub(super) created: i64,
    pub(super) expires: Option<i64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    version: u32,
    tokens: Vec<Record>,
}

#[derive(Debug, Deserialize)]
struct Versioned {
    version: u32,
}

/// Creates the folder of `file` if it does not exist, and locks the file for this agent. Blocking.
///
/// # Errors
/// Conflict, if another agent uses it; denied, if others could replace it; the file system's.
pub(super) fn claim(file: &Path) -> Result<File> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|source| Error::io("cannot create the folder of the tokens", folder, source))?;
    check_own_folder(folder)
        .map_err(|error| error.help("set `tokens` to a path in a folder that does not exist: the agent creates it"))?;
    let path = file.with_extension("lock");
    let io = |source| Error::io("cannot lock the file of the tokens", &path, source);
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false).mode(0o600);
    let lock = options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(&path).map_err(io)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::conflict("another agent uses this file of tokens")
            .at(file.display())
            .help("set `tokens` to a file of its own for each agent")),
        Err(error) => Err(io(error.into())),
    }
}

/// The tokens in `file`; none, if it does not exist. Blocking.
///
/// # Errors
/// Denied, if others own or may write it; damaged, if it is malformed; unsupported, for another version; the file system's.
pub(super) fn read(file: &Path) -> Result<Vec<Record>> {
    let text = match read_own_file(file, FILE_LEN_MAX) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        text => text?,
    };
    let malformed = |source| {
        Error::damaged("file of the tokens is malformed")
            .at(file.display())
            .help("restore the file from a backup; or remove it, which ends all tokens, and create new ones")
            .source(source)
    };
    let Versioned { version } = serde_json::from_str(&text).map_err(malformed)?;
    if version != VERSION {
        return Err(Error::unsupported("file of the tokens has another version")
            .at(file.display())
            .expected(VERSION)
            .got(version)
            .help("use the version of towline that wrote it, or a later one"));
    }
    Ok(serde_json::from_str::<Written>(&text).map_err(malformed)?.tokens)
}

/// Replaces the contents of `file` by `tokens`. Blocking.
///
/// # Errors
/// Exhausted, if they are too many, or the disk is full: the old contents stay; the file system's.
pub(super) fn write(file: &Path, tokens: Vec<Record>) -> Result<()> {
    let written = Written { version: VERSION, tokens };
    let text = serde_json::to_string_pretty(&written)
        .map_err(|source| Error::other("tokens cannot be written as JSON").source(source))?;
    if text.len() as u64 > FILE_LEN_MAX {
        return Err(Error::exhausted("file of the tokens is full").at(file.display()).help("revoke some"));
    }
    replace_file(file, &text, Readers::Owner)
}
