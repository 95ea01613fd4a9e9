//! Tests of the ring, with a device that is a thread for each slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{JoinHandle, sleep, spawn};

use super::*;
use crate::error::ErrorKind;

/// Copies within host memory, on a thread for each, some of them late.
struct Threads {
    /// Bytes that may be pinned.
    limit: usize,
    /// Limits of a slot.
    limits: SlotLimits,
    pinned: AtomicUsize,
    started: AtomicUsize,
    pieces: AtomicUsize,
    /// Held by a test to keep copies from running.
    gate: Arc<Mutex<()>>,
}

impl Threads {
    fn new(limit: usize) -> Self {
        Self {
            limit,
            limits: SlotLimits { parts: usize::MAX, scratch: usize::MAX },
            pinned: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            pieces: AtomicUsize::new(0),
            gate: Arc::default(),
        }
    }
}

impl CopyEngine for Threads {
    type Copy = JoinHandle<()>;

    fn limits(&self) -> SlotLimits {
        self.limits
    }

    unsafe fn pin(&self, _: *mut u8, len: usize) -> Result<()> {
        let before = self.pinned.fetch_add(len, Ordering::Relaxed);
        if before + len <= self.limit {
            return Ok(());
        }
        self.pinned.fetch_sub(len, Ordering::Relaxed);
        Err(Error::exhausted("no more"))
    }

    unsafe fn unpin(&self, _: *mut u8) {}

    unsafe fn start(&self, slot: &[u8], parts: &[Part]) -> Result<JoinHandle<()>> {
        let late = self.started.fetch_add(1, Ordering::Relaxed).is_multiple_of(7);
        let copies = joined(parts.iter().map(|part| match part.target {
            PartTarget::Copy(to) => (part.range.clone(), to),
            PartTarget::Chunk(_) => panic!("this device decodes nothing"),
        }));
        self.pieces.fetch_add(copies.len(), Ordering::Relaxed);
        let first = slot.as_ptr() as usize;
        let pieces: Vec<_> = copies.into_iter().map(|(range, to)| (first + range.start, range.len(), to)).collect();
        let gate = Arc::clone(&self.gate);
        Ok(spawn(move || {
            drop(gate.lock());
            sleep(Duration::from_micros(if late { 500 } else { 0 }));
            for (from, len, to) in pieces {
                // SAFETY: both stay as they are until the copy has ended.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
            }
        }))
    }

    fn finish(&self, copy: JoinHandle<()>) -> Result<Duration> {
        copy.join().map_err(|_| Error::other("a copy panicked"))?;
        Ok(Duration::from_micros(1))
    }

    fn has_ended(&self, copy: &JoinHandle<()>) -> bool {
        copy.is_finished()
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

fn one_len(len: usize) -> SlotLens {
    SlotLens { wanted: len, min: len }
}

/// Copies `parts` parts of up to `longest` bytes from each of several threads, and checks what arrived.
fn copy_by_threads(slot_len: usize, slots: usize, parts: usize, longest: usize) {
    const THREADS: usize = 8;
    let target: Vec<u8> = vec![0; THREADS * parts * longest];
    let (address, landed) = (target.as_ptr() as u64, Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&landed);
    let count = move |parts: &[CopiedPart], _| {
        counted.fetch_add(parts.iter().map(|part| part.len).sum(), Ordering::Relaxed);
    };
    let memory = slots * slot_len;
    let ring = PinnedRing::new(Threads::new(memory), one_len(slot_len), memory as u64, Box::new(count));
    let len_of = |part: usize| longest - part % longest.min(100);
    std::thread::scope(|scope| {
        for (thread, value) in (0..THREADS).zip(1_u8..) {
            let ring = &ring;
            scope.spawn(move || {
                for part in 0..parts {
                    let len = len_of(part);
                    if part % 9 == 0 {
                        // Not committed.
                        ring.reserve(len, 0).unwrap().fill(0xff);
                    }
                    let mut reserved = ring.reserve(len, 0).unwrap();
                    reserved.fill(value);
                    let at = (thread * parts + part) * longest;
                    // SAFETY: the target outlives the ring.
                    unsafe { reserved.commit(PartTarget::Copy(address + at as u64), 0).unwrap() };
                }
            });
        }
    });
    ring.finish().unwrap();
    drop(ring);
    assert_eq!(landed.load(Ordering::Relaxed), THREADS * (0..parts).map(len_of).sum::<usize>());
    for (index, place) in target.chunks(longest).enumerate() {
        let (thread, len) = (index / parts, len_of(index % parts));
        assert!(place[..len].iter().all(|&byte| usize::from(byte) == thread + 1), "part {index}");
        assert!(place[len..].iter().all(|&byte| byte == 0), "nothing beside part {index}");
    }
}

#[test]
fn many_threads_share_few_slots() {
    copy_by_threads(4096, 5, 50, 4096);
    copy_by_threads(4096, 1, 50, 4096);
    copy_by_threads(64 << 10, 3, 200, 5000);
}

/// A device that copies gets what is filled meanwhile at once; one that does not, each part alone.
#[test]
fn a_busy_device_gets_few_large_copies() {
    const LEN: usize = 1000;
    let target: Vec<u8> = vec![0; 20 * LEN];
    let address = target.as_ptr() as u64;
    let engine = Threads::new(64 << 10);
    let gate = Arc::clone(&engine.gate);
    let ring = PinnedRing::new(engine, one_len(16 << 10), 64 << 10, Box::new(|_, _| {}));
    let commit = |part: u8| {
        let mut reserved = ring.reserve(LEN, 0).unwrap();
        reserved.fill(part + 1);
        // SAFETY: the target outlives the ring.
        unsafe { reserved.commit(PartTarget::Copy(address + u64::from(part) * LEN as u64), 0).unwrap() };
    };
    let counts = || (ring.engine.started.load(Ordering::Relaxed), ring.engine.pieces.load(Ordering::Relaxed));
    let busy = gate.lock().unwrap();
    commit(0);
    assert_eq!(counts(), (1, 1), "an idle device does not wait for more");
    (1..17).for_each(commit);
    assert_eq!(counts(), (1, 1));
    commit(17);
    assert_eq!(counts(), (2, 2), "a full slot is one copy: its parts follow each other");
    drop(busy);
    ring.finish().unwrap();
    assert_eq!(counts(), (3, 3));
    drop(ring);
    assert!(target[..18 * LEN].chunks(LEN).zip(1..).all(|(part, value)| part.iter().all(|&byte| byte == value)));
}

/// Threads that wait for the memory of another one, which gets none, end too.
#[test]
fn without_pinned_memory_every_thread_ends() {
    for _ in 0..50 {
        let ring =
            PinnedRing::new(Threads::new(0), SlotLens { wanted: 1 << 20, min: 9 }, 64 << 20, Box::new(|_, _| {}));
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| assert_eq!(ring.reserve(1, 0).unwrap_err().kind(), ErrorKind::Exhausted));
            }
        });
    }
}

#[test]
fn slots_become_shorter_where_little_can_be_pinned() {
    let reserved = |limit: usize| {
        let ring = PinnedRing::new(
            Threads::new(limit),
            SlotLens { wanted: 64 << 10, min: 10_000 },
            1 << 20,
            Box::new(|_, _| {}),
        );
        ring.reserve(10_000, 0).map(|part| part.slot.len)
    };
    assert_eq!(reserved(1 << 20).unwrap(), 64 << 10);
    assert_eq!(reserved(40 << 10).unwrap(), 32 << 10);
    assert_eq!(reserved(12 << 10).unwrap(), 12 << 10);
    assert_eq!(reserved(11 << 10).unwrap_err().kind(), ErrorKind::Exhausted);
}

/// A slot takes no more parts, and no more scratch memory, than the device has; a single part may need any amount.
#[test]
fn slots_end_at_the_limits_of_the_device() {
    let target: Vec<u8> = vec![0; 8];
    let address = target.as_ptr() as u64;
    let starts = |scratch: &[usize]| {
        let mut engine = Threads::new(64 << 10);
        engine.limits = SlotLimits { parts: 3, scratch: 10 };
        let gate = Arc::clone(&engine.gate);
        let busy = gate.lock().unwrap();
        let ring = PinnedRing::new(engine, one_len(4096), 64 << 10, Box::new(|_, _| {}));
        for &scratch in scratch {
            // SAFETY: the target outlives the ring.
            unsafe { ring.reserve(1, scratch).unwrap().commit(PartTarget::Copy(address), 0).unwrap() };
        }
        let started = ring.engine.started.load(Ordering::Relaxed);
        drop(busy);
        ring.finish().unwrap();
        started
    };
    // The first is copied at once.
    assert_eq!(starts(&[0, 0, 0, 0]), 1);
    assert_eq!(starts(&[0, 0, 0, 0, 0]), 2);
    assert_eq!(starts(&[0, 6, 4]), 1);
    assert_eq!(starts(&[0, 6, 5]), 2);
    assert_eq!(starts(&[0, 50, 1]), 2);
}
