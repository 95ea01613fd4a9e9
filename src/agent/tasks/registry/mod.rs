//! Registry of running and recently ended tasks: progress, outcome, limits, cancellation.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;
use ulid::Ulid;

use super::failures::Failures;
use super::histograms::TaskHistograms;
use super::outcome::{Outcome, TaskReport};
use crate::agent::redact::redact;
use crate::agent::requester::Requester;
use crate::agent::tokens::Grant;
use crate::agent::view::{self, TaskKind, TaskState};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, Result};
use crate::log_limit::LogLimit;
use crate::progress::Progress;

/// Limit of concurrent tasks.
const RUNNING_MAX: usize = 64;
/// Limit of concurrent tasks of other agents and tokens, which leaves capacity for this node. One of them, or the tokens of one
/// tenant together, has at most half of what the others leave free.
const REMOTE_MAX: usize = 32;
/// Limit of ended tasks in the registry.
const ENDED_KEPT: usize = 256;
/// The same limit for other agents and tokens together, and for each of them as above.
const REMOTE_ENDED_KEPT: usize = 128;
const CALLER_ENDED_KEPT: usize = 32;
/// Rate limit of log lines about failed tasks of other agents.
static REMOTE_FAILURES: LogLimit = LogLimit::new();

/// Time that a task has to end after a stop request.
const STOPPING: Duration = Duration::from_secs(8);

/// All tasks of an agent. Clones share them.
#[derive(Clone, Debug)]
pub(in crate::agent) struct Tasks(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    clock: Arc<dyn Clock>,
    registry: Mutex<Registry>,
    tracker: TaskTracker,
    histograms: TaskHistograms,
}

#[derive(Debug, Default)]
struct Registry {
    /// By id, and so by start time.
    tasks: BTreeMap<Ulid, Arc<Task>>,
    /// New tasks are refused.
    closed: bool,
    ended: BTreeMap<(TaskKind, TaskState), u64>,
    /// Stored bytes that ended tasks moved.
    moved: BTreeMap<TaskKind, u64>,
    /// Failures that ended tasks retried.
    retried: BTreeMap<TaskKind, u64>,
}

/// One task.
#[derive(Debug)]
pub(in crate::agent) struct Task {
    id: Ulid,
    kind: TaskKind,
    name: String,
    repository: Option<String>,
    caller: Option<Requester>,
    /// [`Grant::path`] of the token with all rights that requested it. It is a task of this node's user all the same.
    admin: OnceLock<String>,
    begun: Instant,
    started: Timestamp,
    progress: Progress,
    failures: Failures,
    /// Also cancelled when the token that requested it is revoked.
    stop: CancellationToken,
    /// None while it runs.
    ended: watch::Sender<Option<Ended>>,
}

#[derive(Clone, Debug)]
struct Ended {
    took: Duration,
    outcome: Outcome,
}

/// Description of a task.
#[derive(Clone, Debug)]
pub(in crate::agent) struct TaskSpec {
    pub(in crate::agent) kind: TaskKind,
    pub(in crate::agent) name: String,
    pub(in crate::agent) repository: Option<String>,
    /// Other agent or token that requested it.
    pub(in crate::agent) caller: Option<Requester>,
}

/// Counts of one kind of task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::agent) struct TaskCounts {
    pub(in crate::agent) running: u64,
    pub(in crate::agent) ended: BTreeMap<TaskState, u64>,
    pub(in crate::agent) moved: u64,
    /// Failures that were retried.
    pub(in crate::agent) retried: u64,
}

impl Tasks {
    pub(in crate::agent) fn new(clock: Arc<dyn Clock>) -> Self {
        let histograms = TaskHistograms::default();
        Self(Arc::new(Shared { clock, registry: Mutex::default(), tracker: TaskTracker::new(), histograms }))
    }

    /// Spawns `work` as a task, which continues even if nobody follows it. Needs a runtime.
    ///
    /// # Errors
    /// Unreachable, once the agent is shutting down; exhausted, at a limit of concurrent tasks.
    pub(in crate::agent) fn begin<F>(&self, spec: TaskSpec, work: impl FnOnce(Progress) -> F) -> Result<Arc<Task>>
    where
        F: Future<Output = Result<TaskReport>> + Send + 'static,
    {
        self.start(spec, |task| work(task.progress.clone()), Duration::ZERO)
    }

    /// As [`Tasks::begin`], but on a stop request the token of `work` is cancelled, and `work` has some seconds to end by
    /// itself.
    ///
    /// # Errors
    /// As [`Tasks::begin`].
    pub(in crate::agent) fn begin_stoppable<F>(
        &self,
        spec: TaskSpec,
        work: impl FnOnce(Progress, CancellationToken) -> F,
    ) -> Result<Arc<Task>>
    where
        F: Future<Output = Result<TaskReport>> + Send + 'static,
    {
        self.start(spec, |task| work(task.progress.clone(), task.stop.clone()), STOPPING)
    }

    /// As [`Tasks::begin_stoppable`], for `work` that retries failures and records them.
    ///
    /// # Errors
    /// As [`Tasks::begin`].
    pub(in crate::agent) fn begin_lasting<F>(
        &self,
        spec: TaskSpec,
        work: impl FnOnce(Progress, Failures, CancellationToken) -> F,
    ) -> Result<Arc<Task>>
    where
        F: Future<Output = Result<TaskReport>> + Send + 'static,
    {
        self.start(spec, |task| work(task.progress.clone(), task.failures.clone(), task.stop.clone()), STOPPING)
    }

    fn start<F>(&self, spec: TaskSpec, work: impl FnOnce(&Task) -> F, patience: Duration) -> Result<Arc<Task>>
    where
        F: Future<Output = Result<TaskReport>> + Send + 'static,
    {
        let stop = spec.caller.as_ref().map(Requester::stop).unwrap_or_default();
        let task = Arc::new(Task {
            id: Ulid::generate(),
            kind: spec.kind,
            name: spec.name,
            repository: spec.repository,
            caller: spec.caller,
            admin: OnceLock::new(),
            begun: Instant::now(),
            started: self.0.clock.now(),
            progress: Progress::default(),
            failures: Failures::default(),
            stop,
            ended: watch::Sender::new(None),
        });
        let work = work(&task);
        // Locked until the task is spawned: `close` must not miss an admitted task.
        let mut registry = self.registry();
        registry.admit(&task)?;
        let completion = Completion { tasks: self.clone(), task: Arc::clone(&task) };
        let span = tracing::info_span!("task", id = %task.id, kind = task.kind.word(), name = %task.name);
        let tracked = async move {
            let stop = completion.task.stop.clone();
            let mut work = std::pin::pin!(work);
            let ended = tokio::select! {
                result = &mut work => Some(result),
                () = stop.cancelled() => None,
            };
            let ended = match ended {
                None if !patience.is_zero() => tokio::time::timeout(patience, work).await.ok(),
                ended => ended,
            };
            completion.end(ended);
        };
        self.0.tracker.spawn(tracked.instrument(span));
        Ok(task)
    }

    /// Task `id`; another agent or a token finds only its own tasks.
    ///
    /// # Errors
    /// Not found, for an unknown or removed task.
    pub(in crate::agent) fn find(&self, id: &str, caller: Option<&Requester>) -> Result<Arc<Task>> {
        let found = id.parse().ok().and_then(|id: Ulid| self.registry().tasks.get(&id).map(Arc::clone));
        let found = found.filter(|task| task.is_visible_to(caller));
        found.ok_or_else(|| Error::not_found("there is no such task").at(id).help("GET /v1/tasks lists them"))
    }

    /// All tasks, the oldest first; for another agent or a token, its own tasks.
    pub(in crate::agent) fn list(&self, caller: Option<&Requester>) -> view::TaskList {
        let tasks: Vec<_> = self.registry().tasks.values().map(Arc::clone).collect();
        let visible = tasks.iter().filter(|task| task.is_visible_to(caller));
        view::TaskList { tasks: visible.map(|task| task.view_for(caller)).collect() }
    }

    /// Counts of each kind since the agent began.
    pub(in crate::agent) fn counts(&self, kind: TaskKind) -> TaskCounts {
        let registry = self.registry();
        let running = registry.tasks.values().filter(|task| task.kind == kind && task.is_running());
        let mut tally = TaskCounts::default();
        for task in running {
            tally.running += 1;
            tally.moved += task.progress.snapshot().moved;
            tally.retried += task.failures.count();
        }
        let count = |end| registry.ended.get(&(kind, end)).copied().unwrap_or(0);
        tally.ended = TaskState::ENDS.into_iter().map(|end| (end, count(end))).collect();
        tally.moved += registry.moved.get(&kind).copied().unwrap_or(0);
        tally.retried += registry.retried.get(&kind).copied().unwrap_or(0);
        tally
    }

    /// Durations and sizes of ended tasks.
    pub(in crate::agent) fn histograms(&self) -> &TaskHistograms {
        &self.0.histograms
    }

    /// Refuses new tasks from now on.
    pub(in crate::agent) fn close(&self) {
        self.registry().closed = true;
        self.0.tracker.close();
    }

    /// True if new tasks are refused.
    pub(in crate::agent) fn is_closed(&self) -> bool {
        self.registry().closed
    }

    /// Running tasks.
    pub(in crate::agent) fn running(&self) -> Vec<Arc<Task>> {
        self.registry().tasks.values().filter(|task| task.is_running()).map(Arc::clone).collect()
    }

    /// Waits until no task of the token `token` ([`Grant::path`]) runs, after it was revoked: some seconds at most.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::agent) async fn ended_of(&self, token: &str) {
        for task in self.running() {
            if task.is_by(token) {
                task.ended().await;
            }
        }
    }

    /// Waits until none runs, after [`Tasks::close`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::agent) async fn ended(&self) {
        self.0.tracker.wait().await;
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.0.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registry {
    fn admit(&mut self, task: &Arc<Task>) -> Result<()> {
        if self.closed {
            return Err(
                Error::unreachable("agent is shutting down").help("try again when it, or another one, is there")
            );
        }
        let running: Vec<_> = self.tasks.values().filter(|task| task.is_running()).collect();
        let too_many = |what: String, most: usize| {
            Err(Error::exhausted(what).expected(format!("at most {most}")).help("wait until one has ended"))
        };
        if running.len() >= RUNNING_MAX {
            return too_many("too many tasks are running".into(), RUNNING_MAX);
        }
        if let Some(caller) = &task.caller {
            let called = running.iter().filter(|other| other.caller.is_some()).count();
            let owners = caller.limited_owners();
            let own = running.iter().filter(|other| other.is_of(&owners)).count();
            if called >= REMOTE_MAX {
                return too_many("too many tasks of other agents and tokens are running".into(), REMOTE_MAX);
            }
            let share = (REMOTE_MAX - (called - own)).div_ceil(2);
            if own >= share {
                let whose = owners.trim_end_matches('/');
                return too_many(format!("too many tasks of {whose} are running"), share);
            }
        }
        self.tasks.insert(task.id, Arc::clone(task));
        Ok(())
    }

    /// Removes the oldest ended tasks beyond the limits for one other agent, for all other agents, and in total. So other
    /// agents cannot displace the tasks of this node.
    fn forget(&mut self, ended: &Task) {
        if let Some(caller) = &ended.caller {
            let owners = caller.limited_owners();
            self.forget_beyond(CALLER_ENDED_KEPT, |task| task.is_of(&owners));
            self.forget_beyond(REMOTE_ENDED_KEPT, |task| task.caller.is_some());
        }
        self.forget_beyond(ENDED_KEPT, |_| true);
    }

    fn forget_beyond(&mut self, most: usize, counts: impl Fn(&Task) -> bool) {
        let ended = self.tasks.values().filter(|task| !task.is_running() && counts(task)).map(|task| task.id);
        let mut ended: Vec<_> = ended.collect();
        ended.truncate(ended.len().saturating_sub(most));
        for id in ended {
            self.tasks.remove(&id);
        }
    }
}

impl Task {
    /// View for callers of this node.
    pub(in crate::agent) fn view(&self) -> view::Task {
        let ended = self.ended.borrow().clone();
        let (state, took, report, error) = match ended {
            None => {
                (TaskState::Running, self.begun.elapsed(), None, self.failures.last().map(|failure| failure.to_json()))
            }
            Some(Ended { took, outcome }) => {
                let report = match &outcome {
                    Outcome::Done(report) => serde_json::to_value(&**report).ok(),
                    Outcome::Failed(_) | Outcome::Cancelled(_) => None,
                };
                let error = outcome.error().and_then(|error| serde_json::to_value(error).ok());
                (outcome.state(), took, report, error)
            }
        };
        view::Task {
            id: self.id.to_string(),
            kind: self.kind,
            name: self.name.clone(),
            repository: self.repository.clone(),
            caller: self.caller.as_ref().map(Requester::path),
            state,
            started: self.started.to_string(),
            seconds: took.as_secs_f64(),
            progress: self.progress.snapshot().into(),
            report,
            error,
        }
    }

    /// View for `caller`: other agents and tokens see no location of this node.
    pub(in crate::agent) fn view_for(&self, caller: Option<&Requester>) -> view::Task {
        let mut view = self.view();
        if caller.is_some() {
            view.repository = None;
            view.error.iter_mut().for_each(redact);
            // It may save the name without reading it.
            if let Some(serde_json::Value::Object(report)) = &mut view.report {
                report.remove("replaced");
            }
        }
        view
    }

    /// True for the user of this node, and for the agent or token that requested the task.
    fn is_visible_to(&self, caller: Option<&Requester>) -> bool {
        caller.is_none() || caller == self.caller.as_ref()
    }

    /// True if it counts with those of `owners`: see [`Requester::limited_owners`].
    fn is_of(&self, owners: &str) -> bool {
        self.caller.as_ref().is_some_and(|caller| caller.limited_owners() == owners)
    }

    /// True if the token `token` requested it, whatever its rights.
    fn is_by(&self, token: &str) -> bool {
        let is_admin = self.admin.get().is_some_and(|admin| admin == token);
        is_admin || self.caller.as_ref().is_some_and(|caller| caller.path() == token)
    }

    pub(in crate::agent) fn is_running(&self) -> bool {
        self.ended.borrow().is_none()
    }

    /// Description of a task that did not succeed: its kind, its name, and its error or the last failure that it retries.
    pub(in crate::agent) fn not_done(&self) -> Option<String> {
        let message = match &*self.ended.borrow() {
            Some(Ended { outcome: Outcome::Done(_), .. }) => return None,
            Some(Ended { outcome, .. }) => outcome.error().map(ToString::to_string),
            None => self.failures.last().map(|failure| failure.message),
        };
        let message = message.unwrap_or_else(|| "stopped when the grace was over".to_owned());
        Some(format!("{} {}: {message}", self.kind.word(), self.name))
    }

    /// Requests a stop; completed work stays. No effect on an ended task.
    pub(in crate::agent) fn stop(&self) {
        self.stop.cancel();
    }

    /// Requests a stop once `grant` is revoked, a token with all rights that requested it. Needs a runtime.
    pub(in crate::agent) fn stop_with(self: &Arc<Self>, grant: &Grant) {
        self.admin.get_or_init(|| grant.path());
        let (task, revoked) = (Arc::clone(self), grant.revocation().clone());
        tokio::spawn(async move {
            tokio::select! {
                () = revoked.cancelled() => task.stop(),
                _ = task.ended() => {}
            }
        });
    }

    /// Waits until it ends.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::agent) async fn ended(&self) -> Outcome {
        let mut ended = self.ended.subscribe();
        match ended.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(ended)) => ended.outcome.clone(),
            // The sender lives in `self`: it does not close.
            Ok(None) | Err(_) => Outcome::Cancelled(None),
        }
    }
}

/// Marks the task as ended, even if it panics or is dropped.
struct Completion {
    tasks: Tasks,
    task: Arc<Task>,
}

impl Completion {
    /// Ends the task with the result of its work; None if it was stopped and its work dropped.
    fn end(self, result: Option<Result<TaskReport>>) {
        let outcome = match result {
            Some(result) => Outcome::of(result, self.task.stop.is_cancelled()),
            None => Outcome::Cancelled(None),
        };
        if let Outcome::Failed(error) = &outcome {
            self.log_failure(error);
        }
        self.settle(outcome);
    }

    /// Rate limit: other agents can cause only so many log lines.
    fn log_failure(&self, error: &Error) {
        let (kind, name) = (self.task.kind.word(), &self.task.name);
        match &self.task.caller {
            None => tracing::warn!(kind, %name, "task failed: {error:?}"),
            Some(caller) => {
                if let Some(kept_back) = REMOTE_FAILURES.may() {
                    tracing::warn!(kind, %name, caller = %caller.path(), kept_back, "task failed: {error:?}");
                }
            }
        }
    }

    fn settle(&self, outcome: Outcome) {
        let task = &self.task;
        let took = task.begun.elapsed();
        let mut registry = self.tasks.registry();
        *registry.ended.entry((task.kind, outcome.state())).or_default() += 1;
        let moved = task.progress.snapshot().moved;
        self.tasks.0.histograms.observe(task.kind, outcome.state(), took, moved);
        *registry.moved.entry(task.kind).or_default() += moved;
        *registry.retried.entry(task.kind).or_default() += task.failures.count();
        task.ended.send_replace(Some(Ended { took, outcome }));
        registry.forget(task);
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if self.task.is_running() {
            let error = Error::other("task ended without a result: this is a bug in towline");
            self.settle(Outcome::Failed(Arc::new(error)));
        }
    }
}
