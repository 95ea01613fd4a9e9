//! Single flight: concurrent calls with the same key share one task and its result. A caller that stops waiting leaves
//! nothing behind, and the task continues for the others.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::error::{Error, Result};

/// Work in progress, by key.
#[derive(Debug)]
pub(crate) struct SingleFlight<K, T>(Flights<K, T>);

type Flights<K, T> = Arc<Mutex<HashMap<K, watch::Receiver<Option<Outcome<T>>>>>>;
type Outcome<T> = Result<T, Arc<Error>>;

impl<K, T> Default for SingleFlight<K, T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K, T> SingleFlight<K, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    T: Clone + Send + Sync + 'static,
{
    /// Result of `work` for `key`, or of the work in progress for it. Needs a runtime.
    ///
    /// # Errors
    /// As the work; all callers get the same error.
    ///
    /// # Cancel safety
    /// Safe: the work continues.
    pub(crate) async fn get<F>(&self, key: &K, work: impl FnOnce() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut outcome = self.join(key, work);
        let found = outcome.wait_for(Option::is_some).await;
        match found.map(|found| found.clone()) {
            Ok(Some(Ok(found))) => Ok(found),
            Ok(Some(Err(error))) => Err(Error::shared(&error)),
            Ok(None) | Err(_) => Err(Error::unreachable("shared request was aborted")),
        }
    }

    fn join<F>(&self, key: &K, work: impl FnOnce() -> F) -> watch::Receiver<Option<Outcome<T>>>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut flights = lock(&self.0);
        if let Some(flight) = flights.get(key) {
            return flight.clone();
        }
        let (sender, outcome) = watch::channel(None);
        flights.insert(key.clone(), outcome.clone());
        let guard = FlightGuard { key: key.clone(), flights: Arc::clone(&self.0) };
        let work = work();
        tokio::spawn(async move {
            let found = work.await.map_err(Arc::new);
            // Later callers start new work.
            drop(guard);
            sender.send_replace(Some(found));
        });
        outcome
    }

    /// Number of keys in progress.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

/// Removes the key when the work ends, also by a panic.
struct FlightGuard<K: Eq + Hash, T> {
    key: K,
    flights: Flights<K, T>,
}

impl<K: Eq + Hash, T> Drop for FlightGuard<K, T> {
    fn drop(&mut self) {
        lock(&self.flights).remove(&self.key);
    }
}

fn lock<K, T>(
    flights: &Mutex<HashMap<K, watch::Receiver<Option<Outcome<T>>>>>,
) -> MutexGuard<'_, HashMap<K, watch::Receiver<Option<Outcome<T>>>>> {
    flights.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::FutureExt as _;
    use futures::future::join_all;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::error::ErrorKind;

    #[tokio::test]
    async fn many_ask_and_one_works() {
        let (calls, works, gate) =
            (SingleFlight::default(), Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let work = || {
            let (works, gate) = (Arc::clone(&works), Arc::clone(&gate));
            async move {
                works.fetch_add(1, Ordering::Relaxed);
                gate.acquire().await.unwrap().forget();
                Ok(7)
            }
        };
        // Cancelled callers leave one task.
        for _ in 0..10_000 {
            assert!(calls.get(&'a', work).now_or_never().is_none());
        }
        assert_eq!(calls.len(), 1);
        let waiting = join_all((0..100).map(|_| calls.get(&'a', work)));
        gate.add_permits(1);
        assert!(waiting.await.into_iter().all(|found| found.unwrap() == 7));
        assert_eq!((works.load(Ordering::Relaxed), calls.len()), (1, 0));
        gate.add_permits(1);
        assert_eq!(calls.get(&'a', work).await.unwrap(), 7);
        assert_eq!(works.load(Ordering::Relaxed), 2, "what is over is not remembered");
    }

    #[tokio::test]
    async fn errors_are_told_to_all_and_a_panic_lets_go() {
        let calls = SingleFlight::<char, ()>::default();
        let refused =
            || Error::denied("no").at("door").help("ask").source(Error::other("rule").source(Error::other("law")));
        let error = calls.get(&'a', || async move { Err(refused()) }).await.unwrap_err();
        assert_eq!(format!("{error:?}"), format!("{:?}", refused()));
        assert_eq!((error.help_text(), error.place()), (refused().help_text(), refused().place()));
        let error = calls.get(&'a', || async { panic!("a bug, for the test") }).await.unwrap_err();
        assert_eq!((error.kind(), calls.len()), (ErrorKind::Unreachable, 0));
    }
}
