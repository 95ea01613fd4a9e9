//! Identity of a cache folder: the description of the cache, and the lock of the process that has it open.
//!
//! ```text
//! cache   0  8  magic "TWLCACHE"   8  4  version (2)   12  4  bytes in a unit   16  8  bytes in a slab   24  16  id
//!         40 32 secret             72 32 BLAKE3 of the 72 bytes before
//! lock    the holder's process id, as text
//! ```

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{CWD, FlockOperation, flock};

use super::allocator::UNIT;
use super::extent::Secret;
use super::journal::CacheId;
use super::medium::{Medium, open_own};
use crate::error::{Error, Result};
use crate::id::ObjectId;

const MAGIC: &[u8; 8] = b"TWLCACHE";
const VERSION: u32 = 2;
const LEN: usize = 104;
const SEALED_LEN: usize = 72;

/// Constants of a cache for its lifetime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Id that its journal must have.
    pub(super) id: CacheId,
    /// Key for its digests.
    pub(super) secret: Secret,
    /// Bytes in each of its slabs.
    pub(super) slab_len: u64,
}

impl Identity {
    /// Creates a new identity.
    pub(super) fn fresh(slab_len: u64) -> Self {
        // Each id has 80 random bits from a generator seeded by the operating system.
        let random: Vec<u8> = (0..4).flat_map(|_| ObjectId::random().to_bytes()).collect();
        Self {
            id: ObjectId::random().to_bytes(),
            secret: blake3::derive_key("towline cache secret", &random),
            slab_len,
        }
    }

    /// Reads the description in `dir`; none if there is none, it is damaged, or an earlier version wrote it: the cache then
    /// starts empty.
    ///
    /// # Errors
    /// Unsupported, if a later version wrote it.
    pub(super) fn read(medium: &dyn Medium, dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("cache");
        let mut bytes = [0; LEN];
        let read = medium.open(&path, false).and_then(|file| file.read_at(&mut bytes, 0));
        match read {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(Error::io("cannot read the cache's description", &path, error)),
        }
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if bytes[..8] != MAGIC[..] || blake3::hash(&bytes[..SEALED_LEN]).as_bytes()[..] != bytes[SEALED_LEN..] {
            return Ok(None);
        }
        // Chunks of an earlier version are fetched again.
        if number(8) < VERSION {
            return Ok(None);
        }
        if (number(8), u64::from(number(12))) != (VERSION, UNIT) {
            return Err(Error::unsupported("cache was made by another version")
                .at(dir.display())
                .expected(VERSION)
                .got(number(8))
                .help("use a newer towline, or another directory"));
        }
        let mut found = Self { id: [0; 16], secret: [0; 32], slab_len: 0 };
        found.slab_len = u64::from(number(20)) << 32 | u64::from(number(16));
        found.id.copy_from_slice(&bytes[24..40]);
        found.secret.copy_from_slice(&bytes[40..72]);
        Ok(Some(found))
    }

    /// Writes it, to last.
    pub(super) fn write(&self, medium: &dyn Medium, dir: &Path) -> Result<()> {
        let mut bytes = Vec::with_capacity(LEN);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&u32::try_from(UNIT).unwrap_or(0).to_le_bytes());
        bytes.extend_from_slice(&self.slab_len.to_le_bytes());
        bytes.extend_from_slice(&self.id);
        bytes.extend_from_slice(&self.secret);
        bytes.extend_from_slice(blake3::hash(&bytes).as_bytes());
        let path = dir.join("cache");
        replace(medium, dir, &path, &bytes)
            .map_err(|error| Error::io("cannot write the cache's description", &path, error))
    }
}

/// Writes a small file whole, to last, in the place of one that is there.
pub(super) fn replace(medium: &dyn Medium, folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let file = medium.open(&new, true)?;
    file.write_at(&[bytes], 0)?;
    file.sync()?;
    medium.rename(&new, path)?;
    medium.sync_folder(folder)
}

/// Checks that `dir` belongs to this user or root. Others may be able to write to it, as to a volume of Kubernetes (`emptyDir`): its
/// files are guarded one by one ([`open_own`]), and what they hold is verified.
fn check_folder(dir: &Path) -> Result<()> {
    let io = |error| Error::io("cannot inspect the cache's folder", dir, error);
    let owner = dir.metadata().map_err(io)?.uid();
    let user = rustix::process::geteuid().as_raw();
    if owner != user && owner != 0 {
        return Err(Error::denied("cache's folder belongs to another user")
            .at(dir.display())
            .expected(format!("a folder of user {user} or root"))
            .got(format!("owner {owner}"))
            .help("name another folder in [cache] dir, or give this one to the user of the agent"));
    }
    Ok(())
}

/// Creates the folder if needed, and locks the cache for this process until the file is closed.
///
/// # Errors
/// Conflict, with the process that has it open.
pub(super) fn lock(dir: &Path) -> Result<File> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|error| Error::io("cannot make the cache's folder", dir, error))?;
    check_folder(dir)?;
    let path = dir.join("lock");
    let failed = |error| Error::io("cannot open the cache's lock", &path, error);
    let mut file = match open_own(CWD, &path, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Another process may create it first.
            let created = File::options().write(true).create_new(true).mode(0o600).open(&path);
            if let Err(error) = created
                && error.kind() != io::ErrorKind::AlreadyExists
            {
                return Err(failed(error));
            }
            open_own(CWD, &path, false).map_err(failed)?
        }
        opened => opened.map_err(failed)?,
    };
    if let Err(errno) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if errno != rustix::io::Errno::WOULDBLOCK {
            return Err(Error::io("cannot lock the cache", &path, errno.into()));
        }
        let mut holder = String::new();
        let _ = file.read_to_string(&mut holder);
        return Err(Error::conflict("cache is in use")
            .at(dir.display())
            .got(format!("process {}", holder.trim()))
            .help("use that process, end it, or give this one a directory of its own"));
    }
    let written = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
    if let Err(error) = written {
        tracing::debug!("the cache's lock does not say whose it is: {error}");
    }
    Ok(file)
}
