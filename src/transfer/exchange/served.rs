//! A repository that is served, with a rate limit on the reads of its log: misses of any number of agents share them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::permits::Permits;
use super::rights::Rights;
use crate::error::Result;
use crate::repository::log::State;
use crate::repository::{Guard as _, Repository};
use crate::single_flight::SingleFlight;
use crate::transfer::policy::Policies;

/// Pause between two reads of a log.
const PAUSE: Duration = Duration::from_millis(20);
/// Pause while only agents with many misses wait.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Time after which signatures are verified again.
const VERIFIED_FOR: Duration = Duration::from_mins(1);

/// A repository, and its last state.
#[derive(Debug)]
pub(super) struct ServedRepository {
    pub(super) repository: Repository,
    /// Rights of agents: on other links, and on private ones.
    rights: [Rights; 2],
    policies: Arc<Policies>,
    permits: Mutex<Option<Arc<Permits>>>,
    /// Held while permits are computed: concurrent requests compute them once.
    computing: tokio::sync::Mutex<()>,
    cached: Arc<Mutex<CachedState>>,
    reads: SingleFlight<(), (Instant, Arc<State>)>,
    /// Wakes a read during the long pause.
    hurry: Arc<Notify>,
}

#[derive(Debug)]
struct CachedState {
    /// Begin and result of the last read.
    state: Option<(Instant, Arc<State>)>,
    /// End of the last read.
    ended: Option<Instant>,
}

impl ServedRepository {
    pub(super) fn new(repository: &Repository, policies: &Arc<Policies>) -> Self {
        let cached = CachedState { state: None, ended: None };
        policies.watch(repository.id());
        Self {
            repository: repository.clone(),
            rights: Default::default(),
            policies: Arc::clone(policies),
            permits: Mutex::default(),
            computing: tokio::sync::Mutex::default(),
            cached: Arc::new(Mutex::new(cached)),
            reads: SingleFlight::default(),
            hurry: Arc::default(),
        }
    }

    /// State as of `since`, or newer. Concurrent callers share one read; one that may not `hurry` waits longer for it.
    ///
    /// # Errors
    /// As [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn state(&self, since: Option<Instant>, hurry: bool) -> Result<Arc<State>> {
        let new_enough = |began: Instant| since.is_none_or(|since| began >= since);
        loop {
            let cached = lock(&self.cached).state.clone();
            if let Some((_, state)) = cached.filter(|(began, _)| new_enough(*began)) {
                return Ok(state);
            }
            if hurry {
                self.hurry.notify_one();
            }
            // A shared read may have begun before `since`.
            let reading = || read(self.repository.clone(), Arc::clone(&self.cached), Arc::clone(&self.hurry));
            let (began, state) = self.reads.get(&(), reading).await?;
            if new_enough(began) {
                return Ok(state);
            }
        }
    }

    /// As [`ServedRepository::state`], for policy decisions: read after the last announcement of a later policy.
    ///
    /// # Errors
    /// As [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn state_for_policy(&self, since: Option<Instant>, hurry: bool) -> Result<Arc<State>> {
        match self.policies.announced_at(self.repository.id()) {
            Some(heard) if since.is_none_or(|since| since < heard) => {
                let outdated = lock(&self.cached).state.as_ref().is_none_or(|(began, _)| *began < heard);
                self.state(Some(heard), hurry || outdated).await
            }
            _ => self.state(since, hurry).await,
        }
    }

    /// The state that was seen last.
    pub(super) fn known(&self) -> Option<Arc<State>> {
        lock(&self.cached).state.as_ref().map(|(_, state)| Arc::clone(state))
    }

    /// Rights of agents on private links, or on others.
    pub(super) fn rights(&self, private: bool) -> &Rights {
        &self.rights[usize::from(private)]
    }

    /// Permits under the policy of `state`, kept while the state is the same, and at most a minute.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn permits(&self, state: &Arc<State>) -> Arc<Permits> {
        let kept = || self.last_permits().filter(|kept| kept.seq == state.seq && kept.made.elapsed() < VERIFIED_FOR);
        if let Some(kept) = kept() {
            return kept;
        }
        let _computing = self.computing.lock().await;
        if let Some(kept) = kept() {
            return kept;
        }
        let permits = Arc::new(Permits::of(&self.repository, state, &self.policies).await);
        *self.permits.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&permits));
        permits
    }

    /// Last permits.
    pub(super) fn last_permits(&self) -> Option<Arc<Permits>> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True if the last permits restrict no reader.
    pub(super) fn is_open(&self) -> bool {
        self.last_permits().is_some_and(|permits| permits.are_open())
    }

    /// Forgets the state.
    pub(super) fn forget(&self) {
        lock(&self.cached).state = None;
    }
}

/// Reads the log, after the pause.
async fn read(
    repository: Repository,
    cached: Arc<Mutex<CachedState>>,
    hurry: Arc<Notify>,
) -> Result<(Instant, Arc<State>)> {
    let ended = lock(&cached).ended;
    if let Some(ended) = ended {
        tokio::select! {
            () = sleep_until(ended + PAUSE_MAX) => {}
            () = hurry.notified() => sleep_until(ended + PAUSE).await,
        }
    }
    let began = Instant::now();
    let read = repository.state().await;
    let mut cached = lock(&cached);
    cached.ended = Some(Instant::now());
    let state = read?;
    cached.state = Some((began, Arc::clone(&state)));
    Ok((began, state))
}

fn lock(cached: &Mutex<CachedState>) -> MutexGuard<'_, CachedState> {
    cached.lock().unwrap_or_else(PoisonError::into_inner)
}
