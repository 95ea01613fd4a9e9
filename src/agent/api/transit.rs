//! Limit of the calls, or of the answers, of callers without a token that are in transit. On this machine they take no time, so the
//! oldest ones make way: a caller that sends or reads slowly keeps no other one out.

use std::collections::BTreeMap;
use std::collections::btree_map::OccupiedEntry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

/// Messages in transit at a time.
const MESSAGES_MAX: usize = 32;

/// Messages that are sent or received, and their memory. It counts apart from that of other work: nothing holds it for long.
#[derive(Debug)]
pub(super) struct InTransit {
    messages: Mutex<Messages>,
    /// KiB that are free.
    memory: Semaphore,
}

#[derive(Debug)]
struct Messages {
    next: u64,
    by_number: BTreeMap<u64, Message>,
}

#[derive(Debug)]
struct Message {
    kib: usize,
    displaced: CancellationToken,
}

/// A message in transit. It counts until this is dropped.
#[derive(Debug)]
pub(super) struct Transit {
    of: &'static InTransit,
    number: u64,
    memory: Option<SemaphorePermit<'static>>,
    displaced: CancellationToken,
}

impl InTransit {
    /// Messages that take `kib` KiB at a time.
    pub(super) const fn new(kib: usize) -> Self {
        let messages = Messages { next: 0, by_number: BTreeMap::new() };
        Self { messages: Mutex::new(messages), memory: Semaphore::const_new(kib) }
    }

    /// Begins a message. If there are too many, the oldest one is displaced.
    pub(super) fn begin(&'static self) -> Transit {
        let mut messages = self.lock();
        if messages.by_number.len() >= MESSAGES_MAX
            && let Some((_, oldest)) = messages.by_number.pop_first()
        {
            oldest.displaced.cancel();
        }
        messages.next += 1;
        let (number, displaced) = (messages.next, CancellationToken::new());
        messages.by_number.insert(number, Message { kib: 0, displaced: displaced.clone() });
        Transit { of: self, number, memory: None, displaced }
    }

    fn lock(&self) -> MutexGuard<'_, Messages> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transit {
    /// Cancelled when the message must end for a later one.
    pub(super) fn displaced(&self) -> CancellationToken {
        self.displaced.clone()
    }

    /// Counts the first `kib` KiB of the message. If there is too little memory, earlier messages are displaced; false if that is not
    /// enough.
    ///
    /// # Cancel safety
    /// Safe: what was counted counts until the message is dropped.
    pub(super) async fn reserve(&mut self, kib: usize) -> bool {
        let held = self.memory.as_ref().map_or(0, SemaphorePermit::num_permits);
        let Ok(more) = u32::try_from(kib.saturating_sub(held)) else { return false };
        if !self.make_room(more as usize) {
            return false;
        }
        // The memory of a displaced message is free once its task has seen that. The semaphore is never closed.
        let Ok(permit) = self.of.memory.acquire_many(more).await else { return false };
        match &mut self.memory {
            Some(memory) => memory.merge(permit),
            None => self.memory = Some(permit),
        }
        if let Some(own) = self.of.lock().by_number.get_mut(&self.number) {
            own.kib = held.max(kib);
        }
        true
    }

    /// Displaces earlier messages until `more` KiB will be free.
    fn make_room(&self, more: usize) -> bool {
        let mut free = self.of.memory.available_permits();
        let mut messages = self.of.lock();
        while free < more {
            let earlier = messages.by_number.first_entry().filter(|oldest| *oldest.key() < self.number);
            let Some(earlier) = earlier.map(OccupiedEntry::remove) else { return false };
            earlier.displaced.cancel();
            free += earlier.kib;
        }
        true
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        self.of.lock().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn the_oldest_of_many_messages_makes_way() {
        static ALL: InTransit = InTransit::new(1);
        let first = ALL.begin();
        let others: Vec<_> = (1..MESSAGES_MAX).map(|_| ALL.begin()).collect();
        assert!(!first.displaced().is_cancelled());
        let next = ALL.begin();
        assert!(first.displaced().is_cancelled());
        assert!(!others.iter().chain([&next]).any(|message| message.displaced().is_cancelled()));
        drop((first, others, next));
        assert!(ALL.lock().by_number.is_empty());
    }

    #[tokio::test]
    async fn memory_goes_to_the_latest_message() {
        static ALL: InTransit = InTransit::new(16);
        let (mut first, mut second, mut third) = (ALL.begin(), ALL.begin(), ALL.begin());
        assert!(first.reserve(4).await && first.reserve(10).await && second.reserve(6).await);
        {
            let mut reserved = Box::pin(third.reserve(8));
            assert!(reserved.as_mut().now_or_never().is_none(), "the memory is still used");
            assert!(first.displaced().is_cancelled() && !second.displaced().is_cancelled());
            drop(first);
            assert!(reserved.await);
        }
        // An earlier one displaces no later one, and none can have more than all.
        assert!(!second.reserve(9).await && !third.reserve(17).await);
        assert!(!third.displaced().is_cancelled());
        drop((second, third));
        assert_eq!(ALL.memory.available_permits(), 16);
    }
}
