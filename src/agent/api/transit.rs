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
    /// KiB of all together.
    kib: usize,
    /// KiB that no message has, displaced ones included.
    memory: Semaphore,
}

#[derive(Debug)]
struct Messages {
    next: u64,
    by_number: BTreeMap<u64, Message>,
}

#[derive(Debug)]
struct Message {
    /// Memory that it has, or waits for until displaced messages are gone.
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
        Self { messages: Mutex::new(messages), kib, memory: Semaphore::const_new(kib) }
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
        if !self.make_room(held.max(kib)) {
            return false;
        }
        // The memory of a displaced message is free once its task has seen that. The semaphore is never closed.
        let Ok(permit) = self.of.memory.acquire_many(more).await else { return false };
        match &mut self.memory {
            Some(memory) => memory.merge(permit),
            None => self.memory = Some(permit),
        }
        true
    }

    /// Displaces earlier messages until this one can have `kib` KiB; false if that is not enough, or if it was displaced itself.
    fn make_room(&self, kib: usize) -> bool {
        let mut messages = self.of.lock();
        let others = messages.by_number.iter().filter(|(number, _)| **number != self.number);
        let mut wanted = kib + others.map(|(_, other)| other.kib).sum::<usize>();
        while wanted > self.of.kib {
            let earlier = messages.by_number.first_entry().filter(|oldest| *oldest.key() < self.number);
            let Some(earlier) = earlier.map(OccupiedEntry::remove) else { return false };
            earlier.displaced.cancel();
            wanted -= earlier.kib;
        }
        let Some(own) = messages.by_number.get_mut(&self.number) else { return false };
        own.kib = kib;
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
        // One that waits counts as well: the next one does not take for free what it waits for.
        let (mut fourth, mut fifth) = (ALL.begin(), ALL.begin());
        let mut waiting = Box::pin(fourth.reserve(8));
        assert!(waiting.as_mut().now_or_never().is_none() && second.displaced().is_cancelled());
        assert!(fifth.reserve(2).now_or_never().is_none() && third.displaced().is_cancelled());
        drop(waiting);
        drop((second, third, fourth, fifth));
        assert_eq!(ALL.memory.available_permits(), 16);
    }
}
