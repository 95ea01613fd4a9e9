//! Recently re-encoded chunks: those that were sent without their bases. Agents of several sites often request the same chunks at
//! nearly the same time, such as those of a job that starts at more than one site.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use crate::budget::{Budget, GrowingMemory};
use crate::error::Result;
use crate::id::ChunkId;
use crate::single_flight::SingleFlight;
use crate::transfer::protocol::OutgoingFrame;

/// Share of the budget for them.
const SHARE: u64 = 16;

/// Re-encoded chunks: each is encoded once for concurrent requests, and kept for later ones.
#[derive(Debug)]
pub(super) struct Reencoded {
    in_progress: SingleFlight<ChunkId, Option<OutgoingFrame>>,
    kept: Mutex<Kept>,
}

/// Kept frames. The oldest one makes way.
#[derive(Debug)]
struct Kept {
    frames: HashMap<ChunkId, OutgoingFrame>,
    order: VecDeque<ChunkId>,
    bytes: u64,
    bytes_max: u64,
    memory: GrowingMemory,
}

impl Reencoded {
    pub(super) fn new(budget: &Budget) -> Self {
        let kept = Kept {
            frames: HashMap::new(),
            order: VecDeque::new(),
            bytes: 0,
            bytes_max: budget.total() / SHARE,
            memory: budget.keep_growing(),
        };
        Self { in_progress: SingleFlight::default(), kept: Mutex::new(kept) }
    }

    /// The chunk `id` without its base: kept, or encoded by `encode`, which may have nothing to do it with.
    ///
    /// # Errors
    /// As `encode`.
    ///
    /// # Cancel safety
    /// Safe: the work continues for others.
    pub(super) async fn get<F>(&self, id: ChunkId, encode: impl FnOnce() -> F) -> Result<Option<OutgoingFrame>>
    where
        F: Future<Output = Result<Option<OutgoingFrame>>> + Send + 'static,
    {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).frames.get(&id).cloned();
        if kept.is_some() {
            return Ok(kept);
        }
        let encoded = self.in_progress.get(&id, encode).await?;
        if let Some(frame) = &encoded {
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).keep(id, frame);
        }
        Ok(encoded)
    }
}

impl Kept {
    /// Keeps `frame`, unless the memory is used by others.
    fn keep(&mut self, id: ChunkId, frame: &OutgoingFrame) {
        let bytes = weight(frame);
        if bytes > self.bytes_max || self.frames.contains_key(&id) {
            return;
        }
        while self.bytes + bytes > self.bytes_max && self.drop_oldest() {}
        if self.memory.try_add(bytes) {
            self.bytes += bytes;
            self.frames.insert(id, frame.clone());
            self.order.push_back(id);
        }
    }

    /// False if there is none.
    fn drop_oldest(&mut self) -> bool {
        let oldest = self.order.pop_front().and_then(|id| self.frames.remove(&id));
        let Some(frame) = &oldest else { return false };
        self.bytes -= weight(frame);
        self.memory.subtract(weight(frame));
        true
    }
}

/// Bytes of memory, with the entry.
fn weight(frame: &OutgoingFrame) -> u64 {
    (frame.encoded.bytes.len() + 2 * size_of::<(ChunkId, OutgoingFrame)>()) as u64
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;

    use super::*;
    use crate::chunk::Chunk;
    use crate::codec::{Compression, encode};
    use crate::error::Error;
    use crate::limits::MIB;

    fn frame(byte: u8) -> (ChunkId, OutgoingFrame) {
        let plain = Bytes::from(vec![byte; 1 << 20]);
        let encoded = encode(&plain, Compression::Off, None);
        (Chunk::new(&plain).id(), OutgoingFrame { encoded, plain_len: 1 << 20 })
    }

    #[tokio::test]
    async fn a_chunk_is_encoded_once_while_its_form_is_kept() {
        let budget = Budget::new(64 * MIB).unwrap();
        let (reencoded, encoded) = (Reencoded::new(&budget), Arc::new(AtomicUsize::new(0)));
        let get = async |byte: u8| {
            let (id, frame) = frame(byte);
            let count = Arc::clone(&encoded);
            let encode = || async move {
                tokio::task::yield_now().await;
                count.fetch_add(1, Ordering::Relaxed);
                Ok(Some(frame))
            };
            reencoded.get(id, encode).await.unwrap().unwrap().encoded.bytes[0]
        };
        assert_eq!(tokio::join!(get(1), get(1), get(2), get(1)), (1, 1, 2, 1));
        assert_eq!((get(1).await, encoded.load(Ordering::Relaxed)), (1, 2));
        // Three of them fit into 4 MiB: the fourth displaces the first.
        assert_eq!((get(3).await, get(4).await, encoded.load(Ordering::Relaxed)), (3, 4, 4));
        assert_eq!((get(4).await, encoded.load(Ordering::Relaxed)), (4, 4));
        assert_eq!((get(1).await, encoded.load(Ordering::Relaxed)), (1, 5));
        let kept = reencoded.kept.lock().unwrap();
        assert!(kept.bytes <= 4 * MIB && kept.frames.len() == kept.order.len(), "{kept:?}");
    }

    #[tokio::test]
    async fn nothing_is_kept_where_others_use_the_memory_and_failures_are_none() {
        let budget = Budget::new(64 * MIB).unwrap();
        let all = budget.keep(budget.kept_max()).unwrap();
        let reencoded = Reencoded::new(&budget);
        let (id, frame) = frame(1);
        let again = frame.clone();
        assert!(reencoded.get(id, || async move { Ok(Some(again)) }).await.unwrap().is_some());
        assert_eq!(reencoded.kept.lock().unwrap().bytes, 0);
        drop(all);
        let failed = reencoded.get(id, || async { Err(Error::damaged("base")) }).await;
        assert_eq!(failed.unwrap_err().kind(), crate::error::ErrorKind::Damaged);
        assert!(reencoded.get(id, || async { Ok(None) }).await.unwrap().is_none());
        assert!(reencoded.get(id, || async move { Ok(Some(frame)) }).await.unwrap().is_some());
        assert!(reencoded.get(id, || async { Ok(None) }).await.unwrap().is_some(), "it is kept now");
    }
}
