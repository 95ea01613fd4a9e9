//! One repository that is served, and its state: however many ask for what is not there, its log is read seldom.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::once::Once;
use super::rights::Rights;
use crate::error::Result;
use crate::repository::Repository;
use crate::repository::log::State;

/// The shortest pause between two reads of a log.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest: reads that find nothing new come to that, each pause twice the one before.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A repository, and what was seen of it.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) repository: Repository,
    /// What agents may read of it.
    pub(super) rights: Rights,
    seen: Arc<Mutex<Seen>>,
    reads: Once<(), (Instant, Arc<State>)>,
}

#[derive(Debug)]
struct Seen {
    /// When the last read began, and what it found.
    state: Option<(Instant, Arc<State>)>,
    /// How often logs are read for what is not found.
    pause: Duration,
    /// Before this no read begins.
    next: Option<Instant>,
}

impl Served {
    pub(super) fn new(repository: &Repository) -> Self {
        let seen = Seen { state: None, pause: PAUSE, next: None };
        Self {
            repository: repository.clone(),
            rights: Rights::default(),
            seen: Arc::new(Mutex::new(seen)),
            reads: Once::default(),
        }
    }

    /// The state as of `since`, or newer. All who ask share one read; one that is not old enough yet is waited for.
    ///
    /// # Errors
    /// As [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn state(&self, since: Option<Instant>) -> Result<Arc<State>> {
        let new_enough = |began: Instant| since.is_none_or(|since| began >= since);
        loop {
            let seen = lock(&self.seen).state.clone();
            if let Some((_, state)) = seen.filter(|(began, _)| new_enough(*began)) {
                return Ok(state);
            }
            // One that others began may have begun too early.
            let (began, state) = self.reads.get(&(), || read(self.repository.clone(), Arc::clone(&self.seen))).await?;
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
async fn read(repository: Repository, seen: Arc<Mutex<Seen>>) -> Result<(Instant, Arc<State>)> {
    let next = lock(&seen).next;
    if let Some(next) = next {
        sleep_until(next).await;
    }
    let began = Instant::now();
    let read = repository.state().await;
    let mut seen = lock(&seen);
    let before = seen.state.as_ref().map(|(_, state)| state.seq);
    let is_new = matches!(&read, Ok(state) if Some(state.seq) != before);
    seen.pause = if is_new { PAUSE } else { (seen.pause * 2).min(PAUSE_MAX) };
    seen.next = Some(Instant::now() + seen.pause);
    let state = read?;
    seen.state = Some((began, Arc::clone(&state)));
    Ok((began, state))
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}
