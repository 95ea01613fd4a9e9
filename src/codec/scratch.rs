//! Buffers that a thread keeps from one chunk to the next: fresh memory would cause page faults and be cleared each time.

use std::cell::RefCell;
use std::thread::LocalKey;

/// Maximum bytes of a buffer that a thread keeps: as large as the chunks that are saved. One that was as large as the largest chunk
/// that may exist would keep its memory as long as the thread lives, on each thread.
pub(crate) const KEPT_MAX: usize = 2 << 20;

/// Passes `len` bytes of `buffer` on, whatever is in them.
pub(super) fn with<T>(buffer: &'static LocalKey<RefCell<Vec<u8>>>, len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut own = buffer.take();
    if own.len() < len {
        own.resize(len, 0);
    }
    let result = work(own.split_at_mut(len).0);
    if own.capacity() <= KEPT_MAX {
        buffer.set(own);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    #[test]
    fn a_thread_keeps_what_chunks_usually_need_and_no_more() {
        assert_eq!(with(&BUFFER, 1 << 20, |bytes| bytes.len()), 1 << 20);
        let kept = BUFFER.with_borrow(Vec::capacity);
        assert!((1 << 20..=KEPT_MAX).contains(&kept));
        assert_eq!(with(&BUFFER, 9, |bytes| bytes.len()), 9);
        assert_eq!(BUFFER.with_borrow(Vec::capacity), kept);
        with(&BUFFER, KEPT_MAX + 1, |_| with(&BUFFER, 5, |inner| inner.fill(1)));
        assert!(BUFFER.with_borrow(Vec::capacity) <= KEPT_MAX);
    }
}
