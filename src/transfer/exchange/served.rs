//! A repository that is served, with a rate limit on the reads of its log: misses of any number of agents share them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::rights::Rights;
use super::single_flight::SingleFlight;
use crate::error::Result;
use crate::repository::Repository;
use crate::repository::log::State;

/// The pause between two reads of a log.
const PAUSE: Duration = Duration::from_millis(20);
/// The same, while only agents with many misses wait.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A repository, and what was seen of it.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) repository: Repository,
    /// Rights of agents in it.
    pub(super) rights: Rights,
    seen: Arc<Mutex<Seen>>,
    reads: SingleFlight<(), (Instant, Arc<State>)>,
    /// Wakes a read that waits for the long pause.
    hurry: Arc<Notify>,
}

#[derive(Debug)]
struct Seen {
    /// Begin and result of the last read.
    state: Option<(Instant, Arc<State>)>,
    /// End of the last read.
    ended: Option<Instant>,
}

impl Served {
    pub(super) fn new(repository: &Repository) -> Self {
        let seen = Seen { state: None, ended: None };
        Self {
            repository: repository.clone(),
            rights: Rights::default(),
            seen: Arc::new(Mutex::new(seen)),
            reads: SingleFlight::default(),
            hurry: Arc::default(),
        }
    }

    /// The state as of `since`, or newer. Concurrent callers share one read; one that may not `hurry` waits longer for it.
    ///
    /// # Errors
    /// As [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn state(&self, since: Option<Instant>, hurry: bool) -> Result<Arc<State>> {
        let new_enough = |began: Instant| since.is_none_or(|since| began >= since);
        loop {
            let seen = lock(&self.seen).state.clone();
            if let Some((_, state)) = seen.filter(|(began, _)| new_enough(*began)) {
                return Ok(state);
            }
            if hurry {
                self.hurry.notify_one();
            }
            // A shared read may have begun before `since`.
            let reading = || read(self.repository.clone(), Arc::clone(&self.seen), Arc::clone(&self.hurry));
            let (began, state) = self.reads.get(&(), reading).await?;
            if new_enough(began) {
                return Ok(state);
            }
        }
    }

    /// Forgets what was seen.
    pub(super) fn forget(&self) {
        lock(&self.seen).state = None;
    }
}

/// Reads the log, once it may be read again.
async fn read(repository: Repository, seen: Arc<Mutex<Seen>>, hurry: Arc<Notify>) -> Result<(Instant, Arc<State>)> {
    let ended = lock(&seen).ended;
    if let Some(ended) = ended {
        tokio::select! {
            () = sleep_until(ended + PAUSE_MAX) => {}
            () = hurry.notified() => sleep_until(ended + PAUSE).await,
        }
    }
    let began = Instant::now();
    let read = repository.state().await;
    let mut seen = lock(&seen);
    seen.ended = Some(Instant::now());
    let state = read?;
    seen.state = Some((began, Arc::clone(&state)));
    Ok((began, state))
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}
