//! Chunks being fetched: each is fetched once, however many wait for it, unless its source was named and is slow.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::id::ChunkId;

/// Chunks being fetched. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlight(Arc<Mutex<HashMap<ChunkId, Fetch>>>);

/// Fetch in progress.
#[derive(Clone, Debug)]
pub(super) struct Fetch {
    /// Cancelled when it has ended.
    pub(super) done: CancellationToken,
    /// True if its request names the source: then it may take as long as that source does.
    pub(super) named_source: bool,
}

/// The only fetch of a chunk (single flight). Dropping it wakes the waiters, whether the chunk has arrived or not.
#[derive(Debug)]
pub(super) struct FetchGuard {
    id: ChunkId,
    done: CancellationToken,
    in_flight: InFlight,
}

impl InFlight {
    /// Starts the fetch of `id`, from a source that its request names or not; or returns the fetch in progress.
    pub(super) fn begin(&self, id: ChunkId, named_source: bool) -> Result<FetchGuard, Fetch> {
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(id) {
            Entry::Occupied(fetching) => Err(fetching.get().clone()),
            Entry::Vacant(vacant) => {
                let done = CancellationToken::new();
                vacant.insert(Fetch { done: done.clone(), named_source });
                Ok(FetchGuard { id, done, in_flight: self.clone() })
            }
        }
    }

    /// True if `id` is being fetched.
    pub(super) fn has(&self, id: &ChunkId) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(id)
    }
}

impl Drop for FetchGuard {
    fn drop(&mut self) {
        self.in_flight.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.done.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_fetches_and_the_others_wait() {
        let (in_flight, id) = (InFlight::default(), ChunkId::of(b"chunk"));
        let guard = in_flight.begin(id, true).unwrap();
        let Fetch { done, named_source } = in_flight.begin(id, false).unwrap_err();
        assert!(named_source, "it says how the fetch in progress was begun");
        assert!(in_flight.has(&id) && !in_flight.has(&ChunkId::of(b"other")));
        assert!(in_flight.begin(ChunkId::of(b"other"), false).is_ok());
        assert!(!done.is_cancelled());
        drop(guard);
        assert!(done.is_cancelled());
        assert!(in_flight.begin(id, false).is_ok());
    }
}
