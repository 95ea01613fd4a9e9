//! Notices in the log that a store does not answer: which store, what was asked, and for how long.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::location::Location;

/// Time without an answer after which the log says so.
const AFTER: Duration = Duration::from_secs(10);
/// Minimum time between two such lines: a store that hangs does not answer many requests at once.
const EVERY: Duration = Duration::from_secs(30);
/// Notices about one store. Clones share the time of the last one.
#[derive(Clone, Debug)]
pub(super) struct Notices {
    /// Location of the store.
    store: Arc<str>,
    after: Duration,
    last: Arc<Mutex<Option<Instant>>>,
}

impl Notices {
    pub(super) fn new(location: &Location) -> Self {
        Self { store: location.to_string().into(), after: AFTER, last: Arc::default() }
    }

    /// Location of the store.
    pub(super) fn store(&self) -> &Arc<str> {
        &self.store
    }

    /// The same, with the first line after another time.
    #[cfg(test)]
    pub(super) fn after(self, after: Duration) -> Self {
        Self { after, ..self }
    }

    /// Time without an answer after which `tell` is to be called.
    pub(super) fn first(&self) -> Duration {
        self.after
    }

    /// Result of `work`, which asks the store for `what`. While there is none, the log says so, first when `extra` and the usual time
    /// are over. `limit` is the time after which a try ends.
    ///
    /// # Cancel safety
    /// As the work's.
    pub(super) async fn during<T>(
        &self,
        what: impl Fn() -> String,
        (extra, limit): (Duration, Duration),
        work: impl Future<Output = T>,
    ) -> T {
        let (mut work, begun) = (pin!(work), Instant::now());
        let mut pause = self.after + extra;
        loop {
            match timeout(pause, &mut work).await {
                Ok(result) => return result,
                Err(_) => self.tell(&what(), begun.elapsed(), limit),
            }
            pause = EVERY;
        }
    }

    /// Says that the store has not answered `what` for the time `waited`.
    pub(super) fn tell(&self, what: &str, waited: Duration, limit: Duration) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= EVERY) {
            *last = Some(Instant::now());
            tracing::warn!(
                "{} has not answered for {}s, waiting for: {what}; a try fails after {limit:?}",
                self.store,
                waited.as_secs()
            );
        }
    }
}
