//! Memory of Python's: read and written by address. The only file here that does.
//!
//! The package hands over addresses of tensors that it holds on to until the call is over; a call is over only when no
//! thread of ours uses them any more ([`Latch`]).

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytes::Bytes;
use pyo3::prelude::*;
use towline::Result;
use towline::repository::Fill;

/// Less than this is not worth another thread.
const PER_THREAD: usize = 4 << 20;
/// Threads that copy, at most: few fill the bus.
const THREADS_MAX: usize = 8;

/// A stretch of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    address: usize,
    len: usize,
}

impl Stretch {
    /// `len` bytes at `address`; nothing where there is nothing.
    pub(crate) fn new(address: usize, len: usize) -> Self {
        Self { address, len: if address == 0 { 0 } else { len } }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// They are there and nobody writes them as long as the slice lives.
    unsafe fn read<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.len) }
    }

    /// The `len` bytes from `offset` on, if they lie in it.
    fn at(self, offset: u64, len: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        fits.then_some((self.address + offset) as *mut u8)
    }

    /// Writes `bytes` from `offset` on; false if they do not fit.
    pub(crate) fn place(self, offset: u64, bytes: &[u8]) -> bool {
        let Some(there) = self.at(offset, bytes.len()) else { return false };
        // SAFETY: the stretch is a tensor's that the package made or was given to fill, and holds on to until the call ends;
        // the offset lies in it. Tensors that overlap would race, and get what one of them wanted.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), there, bytes.len()) };
        true
    }

    /// Lends the `len` bytes from `offset` on to `fill`; false if there are not as many.
    pub(crate) fn fill(self, offset: u64, len: usize, fill: Fill<'_>) -> Result<bool> {
        let Some(there) = self.at(offset, len).filter(|_| len > 0) else { return Ok(false) };
        // SAFETY: as in `place`; allocated memory that was not written yet holds some bytes or other, and `fill` writes it.
        fill(unsafe { std::slice::from_raw_parts_mut(there, len) })?;
        Ok(true)
    }

    /// Makes all of it zeros.
    pub(crate) fn clear(self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: as in `place`.
        unsafe { std::ptr::write_bytes(self.address as *mut u8, 0, self.len) };
    }

    /// Its bytes, without a copy; `latch` hears when the last of them is let go.
    pub(crate) fn lend(self, latch: &Arc<Latch>) -> Bytes {
        *latch.lent.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Bytes::from_owner(Lent { stretch: self, latch: Arc::clone(latch) })
    }
}

/// Counts what is lent.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    lent: Mutex<usize>,
    returned: Condvar,
}

impl Latch {
    /// Waits until all is back.
    pub(crate) fn wait(&self) {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        while *lent > 0 {
            lent = self.returned.wait(lent).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct Lent {
    stretch: Stretch,
    latch: Arc<Latch>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: who lent it waits for the latch before the memory is given up or written.
        unsafe { self.stretch.read() }
    }
}

impl Drop for Lent {
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

/// Wishes for huge pages where `len` bytes at `address` are about to be filled for the first time: fewer faults by hundreds.
#[pyfunction]
pub(crate) fn huge_pages(address: usize, len: usize) {
    let start = address.next_multiple_of(HUGE);
    let Some(len) = (address + len).checked_sub(start).map(|len| len / HUGE * HUGE).filter(|&len| len > 0) else {
        return;
    };
    // A wish: a kernel without them says no.
    // SAFETY: the range lies in a tensor's memory, and the advice changes nothing of what is there.
    let _ = unsafe { rustix::mm::madvise(start as *mut _, len, rustix::mm::Advice::LinuxHugepage) };
}

/// Copies `(to, from, len)` each, on several threads, with the GIL released. Addresses; what is copied to must not overlap.
#[pyfunction]
pub(crate) fn copy(py: Python<'_>, copies: Vec<(usize, usize, usize)>) {
    py.detach(|| copy_all(&copies));
}

/// As [`copy`]: work is shared out by bytes, so that one long tensor is copied by all.
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

/// The `len` bytes from `skip` on, of all copies one after another.
fn copy_share(copies: &[(usize, usize, usize)], mut skip: usize, mut len: usize) {
    for &(to, from, whole) in copies {
        if len == 0 {
            return;
        }
        let begin = skip.min(whole);
        let here = (whole - begin).min(len);
        let (to, from) = (Stretch::new(to + begin, here), Stretch::new(from + begin, here));
        // SAFETY: the package holds on to the tensor that is read, and its caller may not change it until this returns.
        to.place(0, unsafe { from.read() });
        (skip, len) = (skip - begin, len - here);
    }
}
