//! Sealed memory: a file without a name, which one process fills and seals, and which others map (`memfd_create`).
#![expect(unsafe_code, reason = "mapping a file is unsafe by nature")]

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};

use crate::error::{Error, Result};

/// Seals of sealed memory: nobody can write, shrink or grow it, or remove a seal
/// (<https://man7.org/linux/man-pages/man2/F_ADD_SEALS.2const.html>).
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Name of the memory in `/proc`.
const NAME: &str = "towline";

/// Memory that is being filled. Its bytes are zeros until they are written.
#[derive(Debug)]
pub struct UnsealedMemory {
    file: Arc<File>,
    len: usize,
    /// The memory, until it is sealed.
    map: RwLock<Option<MmapRaw>>,
    /// Ranges that somebody writes.
    claimed: Mutex<Vec<Range<usize>>>,
}

impl UnsealedMemory {
    /// `len` bytes.
    ///
    /// # Errors
    /// Exhausted or other, as the system refuses.
    pub fn new(len: u64) -> Result<Self> {
        let failed = |error: rustix::io::Errno| io_error("cannot create shared memory", error.into());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Kernels before 6.3 do not know the flag, and later ones warn without it
        // (<https://docs.kernel.org/userspace-api/mfd_noexec.html>).
        let created = match memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(rustix::io::Errno::INVAL) => memfd_create(NAME, flags),
            created => created,
        };
        let file = File::from(created.map_err(failed)?);
        ftruncate(&file, len).map_err(failed)?;
        let len = address_len(len)?;
        let map = if len == 0 { None } else { Some(MmapOptions::new().len(len).map_raw(&file)) };
        let map = map.transpose().map_err(|source| io_error("cannot map shared memory", source))?;
        if let Some(map) = &map {
            // Best effort: few systems have huge pages for shared memory.
            let _ = map.advise(Advice::HugePage);
        }
        Ok(Self { file: Arc::new(file), len, map: RwLock::new(map), claimed: Mutex::default() })
    }

    /// Lets `write` write the `len` bytes from `offset` on.
    ///
    /// # Errors
    /// As `write`; exhausted, if the system is out of memory; other, beyond the end, for bytes that somebody else writes now, and
    /// once the memory is sealed.
    pub fn fill(&self, offset: u64, len: usize, write: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let start =
            usize::try_from(offset).ok().filter(|start| start.checked_add(len).is_some_and(|end| end <= self.len));
        let (Some(start), Some(map)) = (start, map.as_ref()) else {
            return if len == 0 { write(&mut []) } else { Err(misplaced("memory is sealed, or ends before", offset)) };
        };
        let claim = self.claim(start..start + len)?;
        // Allocates all pages at once, without a page fault each. A lack of memory is then an error; only in a full cgroup the
        // kernel still kills a process.
        let pages = map.advise_range(Advice::PopulateWrite, start, len);
        if let Err(source) = pages
            && source.raw_os_error() != Some(rustix::io::Errno::INVAL.raw_os_error())
        {
            return Err(Error::exhausted("cannot get shared memory").got(format!("{len} bytes")).source(source));
        }
        // SAFETY: the range is within the mapping.
        let first = unsafe { map.as_mut_ptr().add(start) };
        // SAFETY: the read lock keeps the mapping; the claim makes this the only reference to the range; no other process has the
        // file yet.
        let slot = unsafe { std::slice::from_raw_parts_mut(first, len) };
        let written = write(slot);
        drop(claim);
        written
    }

    /// Writes `bytes` from `offset` on.
    ///
    /// # Errors
    /// As [`UnsealedMemory::fill`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.fill(offset, bytes.len(), |slot| {
            slot.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Makes the content final, once all who write have ended: later writes fail.
    ///
    /// # Errors
    /// Other, if the system refuses.
    pub fn seal(&self) -> Result<SealedMemory> {
        // A writable mapping would keep the system from sealing.
        drop(self.map.write().unwrap_or_else(PoisonError::into_inner).take());
        let sealed = fcntl_add_seals(&*self.file, SEALS);
        sealed.map_err(|error| io_error("cannot seal shared memory", error.into()))?;
        Ok(SealedMemory { file: Arc::clone(&self.file), len: self.len as u64 })
    }

    fn claim(&self, range: Range<usize>) -> Result<Claim<'_>> {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if claimed.iter().any(|other| other.start < range.end && range.start < other.end) {
            return Err(misplaced("somebody else writes", range.start as u64));
        }
        claimed.push(range.clone());
        Ok(Claim { memory: self, range })
    }
}

/// The right to write a range, until this is dropped.
struct Claim<'a> {
    memory: &'a UnsealedMemory,
    range: Range<usize>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut claimed = self.memory.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        claimed.retain(|other| *other != self.range);
    }
}

/// Memory whose content is final for all processes that have it. Clones share it; it is freed with the last file descriptor and
/// the last mapping of all processes.
#[derive(Clone, Debug)]
pub struct SealedMemory {
    file: Arc<File>,
    len: u64,
}

impl SealedMemory {
    /// Memory that another process passed.
    ///
    /// # Errors
    /// Denied, if somebody could still change it.
    pub fn received(descriptor: OwnedFd) -> Result<Self> {
        let file = File::from(descriptor);
        // A file that is no memfd has no seals: EINVAL.
        let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SEALS) {
            return Err(Error::denied("shared memory can still be changed")
                .expected("a sealed memfd")
                .got(format!("{seals:?}")));
        }
        let len = file.metadata().map_err(|source| io_error("cannot inspect shared memory", source))?.len();
        Ok(Self { file: Arc::new(file), len })
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps it for this process. What the process writes there is its own: a page is copied when it is first written.
    ///
    /// # Errors
    /// Exhausted or other, as the system refuses.
    pub fn map(&self) -> Result<MappedMemory> {
        let len = address_len(self.len)?;
        if len == 0 {
            return Ok(MappedMemory(None));
        }
        // SAFETY: the seals keep every process from writing or truncating the memory, so the mapping changes by nobody but its
        // owner, whose writes are private to it.
        let mapped = unsafe { MmapOptions::new().len(len).no_reserve_swap().map_copy(&*self.file) };
        let mapped = mapped.map_err(|source| io_error("cannot map shared memory", source))?;
        Ok(MappedMemory(Some(mapped)))
    }
}

fn address_len(len: u64) -> Result<usize> {
    usize::try_from(len).map_err(|_| Error::exhausted("shared memory is larger than the address space").got(len))
}

fn misplaced(what: &'static str, offset: u64) -> Error {
    Error::other(format!("{what} byte {offset} of shared memory"))
}

fn io_error(what: &'static str, source: io::Error) -> Error {
    Error::io(what, Path::new("memfd:towline"), source)
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A private mapping of sealed memory, aligned to pages.
#[derive(Debug)]
pub struct MappedMemory(Option<MmapMut>);

impl Deref for MappedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl DerefMut for MappedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use crate::error::ErrorKind;

    fn sealed(bytes: &[u8]) -> SealedMemory {
        let memory = UnsealedMemory::new(bytes.len() as u64 + 1).unwrap();
        memory.write(1, bytes).unwrap();
        let sealed = memory.seal().unwrap();
        memory.write(1, bytes).unwrap_err();
        sealed
    }

    #[test]
    fn nobody_can_change_sealed_memory() {
        let memory = sealed(b"weights");
        let received = SealedMemory::received(memory.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!((received.len(), &received.map().unwrap()[..]), (8, &b"\0weights"[..]));
        assert!(received.file.write_all_at(b"x", 0).is_err());
        assert!(ftruncate(&*received.file, 2).is_err() && ftruncate(&*received.file, 20).is_err());
        assert!(fcntl_add_seals(&*received.file, SealFlags::FUTURE_WRITE).is_err());
        // SAFETY: the mapping is refused.
        assert!(unsafe { MmapOptions::new().len(8).map_mut(&*received.file) }.is_err());
    }

    #[test]
    fn writes_to_a_mapping_are_private() {
        let memory = sealed(b"weights");
        let (mut one, other) = (memory.map().unwrap(), memory.map().unwrap());
        one[1] = b'W';
        assert_eq!((&one[..], &other[..]), (&b"\0Weights"[..], &b"\0weights"[..]));
        drop(memory);
        assert_eq!(&other[..], b"\0weights", "a mapping outlives the descriptor");
    }

    #[test]
    fn memory_that_is_not_sealed_is_refused() {
        let memory = UnsealedMemory::new(3).unwrap();
        let (error, file) = (
            SealedMemory::received(memory.file.as_fd().try_clone_to_owned().unwrap()).unwrap_err(),
            tempfile::tempfile().unwrap(),
        );
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert_eq!(SealedMemory::received(file.into()).unwrap_err().kind(), ErrorKind::Denied);
    }

    #[test]
    fn bytes_have_one_writer_at_a_time() {
        let memory = UnsealedMemory::new(10).unwrap();
        let nested = |offset: u64, len: usize| {
            let mut inner = Ok(());
            memory
                .fill(2, 4, |outer| {
                    outer.fill(7);
                    inner = memory.fill(offset, len, |slot| {
                        slot.fill(8);
                        Ok(())
                    });
                    Ok(())
                })
                .unwrap();
            inner
        };
        nested(0, 2).unwrap();
        nested(6, 4).unwrap();
        nested(5, 1).unwrap_err();
        nested(0, 3).unwrap_err();
        memory.fill(0, 10, |_| Err(Error::other("on purpose"))).unwrap_err();
        assert_eq!(&memory.seal().unwrap().map().unwrap()[..], [8, 8, 7, 7, 7, 7, 8, 8, 8, 8]);
    }

    #[test]
    fn writes_beyond_the_end_are_refused() {
        let memory = UnsealedMemory::new(3).unwrap();
        memory.write(0, b"abc").unwrap();
        for offset in [1, 3, u64::MAX] {
            memory.write(offset, b"abc").unwrap_err();
        }
        assert!(UnsealedMemory::new(0).unwrap().seal().unwrap().map().unwrap().is_empty());
    }
}
