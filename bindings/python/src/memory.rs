//! Access to memory of Python objects by address. This is the only file that does so.
//!
//! The Python package passes addresses of tensors, and keeps the tensors alive until the call returns. A call returns only when
//! no thread uses the memory any more ([`Latch`]).

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytes::Bytes;
use pyo3::prelude::*;
use towline::Result;
use towline::repository::Fill;

/// Minimum bytes for each copying thread.
const PER_THREAD: usize = 4 << 20;
/// Maximum number of copying threads: a few saturate the memory bus.
const THREADS_MAX: usize = 8;

/// A range of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryRange {
    address: usize,
    len: usize,
}

impl MemoryRange {
    /// `len` bytes at `address`; empty if `address` is 0.
    pub(crate) fn new(address: usize, len: usize) -> Self {
        Self { address, len: if address == 0 { 0 } else { len } }
    }

    /// Address of the first byte.
    pub(crate) fn address(self) -> usize {
        self.address
    }

    /// Number of bytes.
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Borrows the bytes.
    ///
    /// # Safety
    /// The memory must be allocated, and must not be written, while the slice lives.
    pub(crate) unsafe fn read<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.len) }
    }

    /// Pointer to the `len` bytes from `offset` on; none if they are out of bounds.
    fn at(self, offset: u64, len: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        fits.then_some((self.address + offset) as *mut u8)
    }

    /// Writes `bytes` from `offset` on; false if they do not fit.
    pub(crate) fn place(self, offset: u64, bytes: &[u8]) -> bool {
        let Some(there) = self.at(offset, bytes.len()) else { return false };
        // SAFETY: the memory belongs to a tensor that the package created, or was given to fill, and keeps alive until the call
        // ends; `at` checked the bounds. Overlapping target tensors would race, and get the bytes of one of them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), there, bytes.len()) };
        true
    }

    /// Passes the `len` bytes from `offset` on to `fill`; false if they are out of bounds.
    pub(crate) fn fill(self, offset: u64, len: usize, fill: Fill<'_>) -> Result<bool> {
        let Some(there) = self.at(offset, len).filter(|_| len > 0) else { return Ok(false) };
        // SAFETY: as in `place`; memory that was not written yet has arbitrary bytes, and `fill` writes all of it.
        fill(unsafe { std::slice::from_raw_parts_mut(there, len) })?;
        Ok(true)
    }

    /// Fills the range with zeros.
    pub(crate) fn clear(self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: as in `place`.
        unsafe { std::ptr::write_bytes(self.address as *mut u8, 0, self.len) };
    }

    /// Lends the bytes without a copy; `latch` counts them as in use until the last reference is dropped.
    pub(crate) fn lend(self, latch: &Arc<Latch>) -> Bytes {
        *latch.lent.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Bytes::from_owner(BorrowedMemory { range: self, latch: Arc::clone(latch) })
    }
}

/// Counter of lent ranges.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    lent: Mutex<usize>,
    returned: Condvar,
}

impl Latch {
    /// Waits until no range is lent any more.
    pub(crate) fn wait(&self) {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        while *lent > 0 {
            lent = self.returned.wait(lent).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct BorrowedMemory {
    range: MemoryRange,
    latch: Arc<Latch>,
}

impl AsRef<[u8]> for BorrowedMemory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the lender waits for the latch before the memory is freed or written.
        unsafe { self.range.read() }
    }
}

impl Drop for BorrowedMemory {
    fn drop(&mut self) {
        let mut lent = self.latch.lent.lock().unwrap_or_else(PoisonError::into_inner);
        *lent -= 1;
        if *lent == 0 {
            self.latch.returned.notify_all();
        }
    }
}

/// Bytes in a huge page of x86-64 and of arm64 with pages of 4 KiB.
const HUGE: usize = 2 << 20;

/// Requests huge pages for `len` bytes at `address` that are about to be written first: page faults become rarer by hundreds.
#[pyfunction]
pub(crate) fn huge_pages(address: usize, len: usize) {
    let start = address.next_multiple_of(HUGE);
    let Some(len) = (address + len).checked_sub(start).map(|len| len / HUGE * HUGE).filter(|&len| len > 0) else {
        return;
    };
    // Best effort: a kernel without huge pages refuses.
    // SAFETY: the range is within a tensor's memory, and the advice does not change its content.
    let _ = unsafe { rustix::mm::madvise(start as *mut _, len, rustix::mm::Advice::LinuxHugepage) };
}

/// Copies ranges `(to, from, len)` of addresses on several threads, with the GIL released. Targets must not overlap.
#[pyfunction]
pub(crate) fn copy(py: Python<'_>, copies: Vec<(usize, usize, usize)>) {
    py.detach(|| copy_all(&copies));
}

/// As [`copy`]. The work is divided by bytes, so that all threads share one long tensor.
pub(crate) fn copy_all(copies: &[(usize, usize, usize)]) {
    let total: usize = copies.iter().map(|copy| copy.2).sum();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (total / PER_THREAD).clamp(1, cores.min(THREADS_MAX));
    let share = total.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for thread in 1..threads {
            scope.spawn(move || copy_share(copies, thread * share, share));
        }
        copy_share(copies, 0, share);
    });
}

/// Copies one thread's share: the `len` bytes from `skip` on, of all copies concatenated.
fn copy_share(copies: &[(usize, usize, usize)], mut skip: usize, mut len: usize) {
    for &(to, from, whole) in copies {
        if len == 0 {
            return;
        }
        let begin = skip.min(whole);
        let here = (whole - begin).min(len);
        let (to, from) = (MemoryRange::new(to + begin, here), MemoryRange::new(from + begin, here));
        // SAFETY: the package keeps the source tensor alive, and its caller must not change it until this returns.
        to.place(0, unsafe { from.read() });
        (skip, len) = (skip - begin, len - here);
    }
}
