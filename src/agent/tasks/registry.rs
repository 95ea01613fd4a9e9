//! Running tasks and the last ones that ended: progress, outcome, limits, cancellation.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;
use ulid::Ulid;

use crate::agent::view::{self, TaskKind, TaskState};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::progress::Progress;
use crate::transfer::identity::Identity;

/// Limit of concurrent tasks.
const RUNNING_MAX: usize = 64;
/// Limit of concurrent tasks of other agents, which leaves room for this node. One agent has at most half of what the others leave.
const REMOTE_MAX: usize = 32;
/// Ended tasks that are remembered.
const ENDED_KEPT: usize = 256;

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
    caller: Option<Identity>,
    begun: Instant,
    started: Timestamp,
    progress: Progress,
    failures: Failures,
    stop: CancellationToken,
    status: watch::Sender<Status>,
}

#[derive(Clone, Debug)]
struct Status {
    state: TaskState,
    /// Duration, once it has ended.
    took: Option<Duration>,
    /// Its report, or its error.
    outcome: Option<Value>,
}

/// Failures that a running task retries, as a watch does. Clones share them.
#[derive(Clone, Debug, Default)]
pub(in crate::agent) struct Failures(Arc<Mutex<FailureList>>);

#[derive(Debug, Default)]
struct FailureList {
    /// Subject and message of each failure that has not been cleared, the latest last.
    current: Vec<(String, String)>,
    count: u64,
}

impl Failures {
    /// Counts a failure about `what`, shown until it is cleared.
    pub(in crate::agent) fn record(&self, what: &str, message: String) {
        let mut list = self.list();
        list.current.retain(|(about, _)| about != what);
        list.current.push((what.to_owned(), message));
        list.count += 1;
    }

    /// Clears the failure about `what`.
    pub(in crate::agent) fn clear(&self, what: &str) {
        self.list().current.retain(|(about, _)| about != what);
    }

    fn count(&self) -> u64 {
        self.list().count
    }

    fn last(&self) -> Option<Value> {
        let list = self.list();
        let (_, message) = list.current.last()?;
        Some(serde_json::json!({ "kind": ErrorKind::Other.word(), "message": message }))
    }

    fn list(&self) -> MutexGuard<'_, FailureList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Description of a task.
#[derive(Clone, Debug)]
pub(in crate::agent) struct TaskSpec {
    pub(in crate::agent) kind: TaskKind,
    pub(in crate::agent) name: String,
    pub(in crate::agent) repository: Option<String>,
    /// Other agent that asked for it.
    pub(in crate::agent) caller: Option<Identity>,
}

/// Counts of one kind of task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::agent) struct Tally {
    pub(in crate::agent) running: u64,
    pub(in crate::agent) ended: BTreeMap<TaskState, u64>,
    pub(in crate::agent) moved: u64,
    /// Failures that were retried.
    pub(in crate::agent) retried: u64,
}

impl Tasks {
    pub(in crate::agent) fn new(clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(Shared { clock, registry: Mutex::default(), tracker: TaskTracker::new() }))
    }

    /// Spawns `work` as a task, which goes on whether anybody follows it. Needs a runtime.
    ///
    /// # Errors
    /// Unreachable, once the agent is shutting down; exhausted, at a limit of concurrent tasks.
    pub(in crate::agent) fn begin<F>(&self, spec: TaskSpec, work: impl FnOnce(Progress) -> F) -> Result<Arc<Task>>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        self.start(spec, |task| work(task.progress.clone()), Duration::ZERO)
    }

    /// As [`Tasks::begin`], but on a stop request `work` sees the token cancelled and has some seconds to end by itself.
    ///
    /// # Errors
    /// As [`Tasks::begin`].
    pub(in crate::agent) fn begin_stoppable<F>(
        &self,
        spec: TaskSpec,
        work: impl FnOnce(Progress, CancellationToken) -> F,
    ) -> Result<Arc<Task>>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
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
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        self.start(spec, |task| work(task.progress.clone(), task.failures.clone(), task.stop.clone()), STOPPING)
    }

    fn start<F>(&self, spec: TaskSpec, work: impl FnOnce(&Task) -> F, patience: Duration) -> Result<Arc<Task>>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        let task = Arc::new(Task {
            id: Ulid::generate(),
            kind: spec.kind,
            name: spec.name,
            repository: spec.repository,
            caller: spec.caller,
            begun: Instant::now(),
            started: self.0.clock.now(),
            progress: Progress::default(),
            failures: Failures::default(),
            stop: CancellationToken::new(),
            status: watch::Sender::new(Status { state: TaskState::Running, took: None, outcome: None }),
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

    /// Task `id`; for another agent, only if it asked for it.
    ///
    /// # Errors
    /// Not found, if there is none, or it was forgotten.
    pub(in crate::agent) fn find(&self, id: &str, caller: Option<&Identity>) -> Result<Arc<Task>> {
        let found = id.parse().ok().and_then(|id: Ulid| self.registry().tasks.get(&id).map(Arc::clone));
        let found = found.filter(|task| task.is_visible_to(caller));
        found.ok_or_else(|| Error::not_found("there is no such task").at(id).help("GET /v1/tasks lists them"))
    }

    /// All tasks, the oldest first; for another agent, those that it asked for.
    pub(in crate::agent) fn list(&self, caller: Option<&Identity>) -> view::TaskList {
        let tasks: Vec<_> = self.registry().tasks.values().map(Arc::clone).collect();
        let visible = tasks.iter().filter(|task| task.is_visible_to(caller));
        view::TaskList { tasks: visible.map(|task| task.view_for(caller)).collect() }
    }

    /// Counts of each kind since the agent began.
    pub(in crate::agent) fn tally(&self, kind: TaskKind) -> Tally {
        let registry = self.registry();
        let running = registry.tasks.values().filter(|task| task.kind == kind && task.is_running());
        let mut tally = Tally::default();
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
            let own = running.iter().filter(|other| other.caller.as_ref() == Some(caller)).count();
            if called >= REMOTE_MAX {
                return too_many("too many tasks of other agents are running".into(), REMOTE_MAX);
            }
            let share = (REMOTE_MAX - (called - own)).div_ceil(2);
            if own >= share {
                return too_many(format!("too many tasks of {} are running", caller.path()), share);
            }
        }
        self.tasks.insert(task.id, Arc::clone(task));
        Ok(())
    }

    /// Forgets the oldest ended tasks beyond [`ENDED_KEPT`].
    fn forget(&mut self) {
        let ended = self.tasks.values().filter(|task| !task.is_running()).map(|task| task.id);
        let mut ended: Vec<_> = ended.collect();
        ended.truncate(ended.len().saturating_sub(ENDED_KEPT));
        self.tasks.retain(|id, _| !ended.contains(id));
    }
}

impl Task {
    /// View for callers of this node.
    pub(in crate::agent) fn view(&self) -> view::Task {
        let Status { state, took, outcome } = self.status.borrow().clone();
        let (report, error) = match state {
            TaskState::Done => (outcome, None),
            TaskState::Running => (None, self.failures.last()),
            TaskState::Failed | TaskState::Cancelled => (None, outcome),
        };
        view::Task {
            id: self.id.to_string(),
            kind: self.kind,
            name: self.name.clone(),
            repository: self.repository.clone(),
            caller: self.caller.as_ref().map(Identity::path),
            state,
            started: self.started.to_string(),
            seconds: took.unwrap_or_else(|| self.begun.elapsed()).as_secs_f64(),
            progress: self.progress.snapshot().into(),
            report,
            error,
        }
    }

    /// View for `caller`: other agents do not see the repository's location.
    pub(in crate::agent) fn view_for(&self, caller: Option<&Identity>) -> view::Task {
        let view = self.view();
        if caller.is_some() { view::Task { repository: None, ..view } } else { view }
    }

    /// True for callers of this node, and for the agent that asked for the task.
    fn is_visible_to(&self, caller: Option<&Identity>) -> bool {
        caller.is_none() || caller == self.caller.as_ref()
    }

    pub(in crate::agent) fn is_running(&self) -> bool {
        self.status.borrow().state == TaskState::Running
    }

    /// Requests a stop; completed work stays. No effect once it ended.
    pub(in crate::agent) fn stop(&self) {
        self.stop.cancel();
    }

    /// Waits until it ends.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::agent) async fn ended(&self) {
        // The sender lives in `self`: this cannot fail.
        let _ = self.status.subscribe().wait_for(|status| status.state != TaskState::Running).await;
    }
}

/// Marks the task as ended, also when it panics or is dropped.
struct Completion {
    tasks: Tasks,
    task: Arc<Task>,
}

impl Completion {
    fn end(self, ended: Option<Result<Value>>) {
        let (state, outcome) = match ended {
            Some(Ok(report)) => (TaskState::Done, Some(report)),
            Some(Err(error)) if error.kind() == ErrorKind::Cancelled && self.task.stop.is_cancelled() => {
                (TaskState::Cancelled, serde_json::to_value(&error).ok())
            }
            Some(Err(error)) => {
                tracing::warn!(kind = self.task.kind.word(), name = %self.task.name, "task failed: {error:?}");
                (TaskState::Failed, serde_json::to_value(&error).ok())
            }
            None => (TaskState::Cancelled, None),
        };
        self.settle(state, outcome);
    }

    fn settle(&self, state: TaskState, outcome: Option<Value>) {
        let task = &self.task;
        let took = Some(task.begun.elapsed());
        let mut registry = self.tasks.registry();
        *registry.ended.entry((task.kind, state)).or_default() += 1;
        *registry.moved.entry(task.kind).or_default() += task.progress.snapshot().moved;
        *registry.retried.entry(task.kind).or_default() += task.failures.count();
        task.status.send_replace(Status { state, took, outcome });
        registry.forget();
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if self.task.is_running() {
            let error = Error::other("task ended without a result: this is a bug in towline");
            self.settle(TaskState::Failed, serde_json::to_value(&error).ok());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    fn spec(name: &str) -> TaskSpec {
        TaskSpec { kind: TaskKind::Save, name: name.to_owned(), repository: None, caller: None }
    }

    fn tasks() -> Tasks {
        Tasks::new(Arc::new(SystemClock))
    }

    #[tokio::test]
    async fn each_end_is_told_and_counted() {
        let tasks = tasks();
        let done = tasks.begin(spec("done"), |progress| async move {
            progress.moved(7);
            Ok(Value::from("report"))
        });
        let failed = tasks.begin(spec("failed"), |_| async { Err(Error::conflict("no")) });
        let stopped = tasks.begin(spec("stopped"), |_| std::future::pending()).unwrap();
        let broken = tasks.begin(spec("broken"), |_| async { panic!("a bug, for the test") });
        assert!(stopped.is_running());
        stopped.stop();
        let all = [done.unwrap(), failed.unwrap(), stopped, broken.unwrap()];
        for task in &all {
            task.ended().await;
        }
        let views = all.each_ref().map(|task| task.view());
        assert_eq!(views[0].report, Some("report".into()));
        assert_eq!(views[1].error.as_ref().unwrap()["kind"], "conflict");
        let states = views.map(|view| view.state);
        assert_eq!(states, [TaskState::Done, TaskState::Failed, TaskState::Cancelled, TaskState::Failed]);
        let tally = tasks.tally(TaskKind::Save);
        assert_eq!((tally.running, tally.moved), (0, 7));
        assert_eq!(tally.ended.into_values().collect::<Vec<_>>(), [1, 2, 1]);
        assert_eq!(tasks.find(&all[0].id.to_string(), None).unwrap().id, all[0].id);
        assert_eq!(tasks.find("nobody", None).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn what_hears_that_it_is_stopped_says_what_came_of_it() {
        let tasks = tasks();
        let hearing = tasks.begin_stoppable(spec("a"), |_, stop| async move {
            stop.cancelled().await;
            Err(Error::cancelled("3 MiB are stored"))
        });
        let hearing = hearing.unwrap();
        hearing.stop();
        hearing.ended().await;
        let view = hearing.view();
        assert_eq!(
            (view.state, &view.error.unwrap()["message"]),
            (TaskState::Cancelled, &Value::from("3 MiB are stored"))
        );
    }

    #[tokio::test]
    async fn it_is_bounded_and_closes() {
        let tasks = tasks();
        let running: Vec<_> =
            (0..RUNNING_MAX).map(|_| tasks.begin(spec("a"), |_| std::future::pending()).unwrap()).collect();
        let refused = |tasks: &Tasks| tasks.begin(spec("b"), |_| std::future::pending()).unwrap_err();
        assert_eq!(refused(&tasks).kind(), ErrorKind::Exhausted);
        running.iter().for_each(|task| task.stop());
        tasks.close();
        tasks.ended().await;
        assert_eq!(refused(&tasks).kind(), ErrorKind::Unreachable);
    }

    #[tokio::test]
    async fn the_oldest_that_ended_are_forgotten() {
        let tasks = tasks();
        let first = tasks.begin(spec("first"), |_| std::future::pending()).unwrap();
        for _ in 0..ENDED_KEPT + 5 {
            tasks.begin(spec("a"), |_| async { Ok(Value::Null) }).unwrap().ended().await;
        }
        assert_eq!(tasks.list(None).tasks.len(), ENDED_KEPT + 1);
        assert!(tasks.find(&first.id.to_string(), None).is_ok(), "it runs");
    }

    #[tokio::test]
    async fn other_agents_see_their_own_and_leave_room() {
        let tasks = tasks();
        let agent = |agent: &str| Some(Identity::new("home", agent).unwrap());
        let begin =
            |caller: Option<Identity>| tasks.begin(TaskSpec { caller, ..spec("a") }, |_| std::future::pending());
        let (own, theirs) = (begin(None).unwrap(), begin(agent("a")).unwrap());
        let id = |task: &Task| task.id.to_string();
        assert!(tasks.find(&id(&own), agent("a").as_ref()).is_err());
        assert!(tasks.find(&id(&theirs), agent("b").as_ref()).is_err());
        assert_eq!(tasks.find(&id(&theirs), agent("a").as_ref()).unwrap().id, theirs.id);
        assert_eq!(tasks.list(agent("a").as_ref()).tasks.len(), 1);
        assert_eq!(tasks.list(agent("b").as_ref()).tasks.len(), 0);
        assert_eq!(tasks.list(None).tasks.len(), 2);
        // Each has at most half of what others leave; `a` has one already.
        let fill = |name: &str| (0..REMOTE_MAX).filter(|_| begin(agent(name)).is_ok()).count();
        assert_eq!(fill("b"), 16);
        let error = begin(agent("b")).unwrap_err();
        assert!(error.to_string().contains("too many tasks of home/b are running: expected at most 16"), "{error}");
        assert_eq!(["c", "d", "e", "f"].map(fill), [8, 4, 2, 1]);
        let error = begin(agent("b")).unwrap_err();
        assert!(error.to_string().contains("too many tasks of other agents are running: expected at most 32"));
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(begin(None).is_ok());
    }
}
