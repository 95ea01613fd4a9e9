//! Single flight: a chunk that is being brought is brought once, however many wait for it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::id::ChunkId;

/// The chunks that are being brought.
#[derive(Clone, Debug, Default)]
pub(super) struct Flights(Arc<Mutex<HashMap<ChunkId, CancellationToken>>>);

/// A chunk that whoever has this is to bring. When it is dropped, those who wait go on, whether it came or not.
#[derive(Debug)]
pub(super) struct Flight {
    id: ChunkId,
    landed: CancellationToken,
    flights: Flights,
}

/// Ends when another task has brought the chunk.
pub(super) type Landing = CancellationToken;

impl Flights {
    /// Begins to bring `id`, or tells what to wait for.
    pub(super) fn begin(&self, id: ChunkId) -> Result<Flight, Landing> {
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(id) {
            Entry::Occupied(flying) => Err(flying.get().clone()),
            Entry::Vacant(vacant) => {
                let landed = vacant.insert(CancellationToken::new()).clone();
                Ok(Flight { id, landed, flights: self.clone() })
            }
        }
    }

    /// Is somebody bringing `id`?
    pub(super) fn has(&self, id: &ChunkId) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(id)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.landed.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flies_and_the_others_wait_until_it_lands() {
        let (flights, id) = (Flights::default(), ChunkId::of(b"chunk"));
        let flight = flights.begin(id).unwrap();
        let landing = flights.begin(id).unwrap_err();
        assert!(flights.has(&id) && !flights.has(&ChunkId::of(b"other")));
        assert!(flights.begin(ChunkId::of(b"other")).is_ok());
        assert!(!landing.is_cancelled());
        drop(flight);
        assert!(landing.is_cancelled());
        assert!(flights.begin(id).is_ok());
    }
}
