//! What the agent is doing and did last: each transfer with its progress, its end, and a way to stop it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;
use ulid::Ulid;

use super::view::{self, Kind, Standing};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::progress::Progress;
use crate::transfer::identity::Identity;

/// Transfers that run at the same time, at most.
const RUNNING_MAX: usize = 64;
/// Of these, those that other agents asked for, at most: there is room for what this node wants. One agent has at most half of those
/// that other callers leave it.
const CALLED_MAX: usize = 32;
/// Transfers that ended and are still told of.
const ENDED_KEPT: usize = 256;

/// Time that a transfer has to end after a stop request.
const STOPPING: Duration = Duration::from_secs(8);

/// All transfers of an agent. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Transfers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    clock: Arc<dyn Clock>,
    register: Mutex<Register>,
    tasks: TaskTracker,
}

#[derive(Debug, Default)]
struct Register {
    /// By id, so by the time at which they began.
    known: BTreeMap<Ulid, Arc<Entry>>,
    /// Nothing new is taken any more.
    closed: bool,
    ended: BTreeMap<(Kind, Standing), u64>,
    /// Stored bytes that ended transfers moved.
    moved: BTreeMap<Kind, u64>,
    /// Failures that ended transfers went on after.
    retried: BTreeMap<Kind, u64>,
}

/// One transfer.
#[derive(Debug)]
pub(super) struct Entry {
    id: Ulid,
    kind: Kind,
    name: String,
    repository: Option<String>,
    caller: Option<Identity>,
    begun: Instant,
    started: Timestamp,
    progress: Progress,
    trouble: Trouble,
    stop: CancellationToken,
    state: watch::Sender<State>,
}

#[derive(Clone, Debug)]
struct State {
    standing: Standing,
    /// Duration, once it has ended.
    took: Option<Duration>,
    /// Its report, or its error.
    outcome: Option<Value>,
}

/// Failures of a transfer that goes on all the same, as a watch does. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Trouble(Arc<Mutex<Troubles>>);

#[derive(Debug, Default)]
struct Troubles {
    /// The failures that stand, the last one at the end: what each is about, and what went wrong.
    standing: Vec<(String, String)>,
    count: u64,
}

impl Trouble {
    /// Counts a failure about `what`, which stands until it is over.
    pub(super) fn add(&self, what: &str, message: String) {
        let mut troubles = self.troubles();
        troubles.standing.retain(|(about, _)| about != what);
        troubles.standing.push((what.to_owned(), message));
        troubles.count += 1;
    }

    /// Clears the problem reported for `what`.
    pub(super) fn over(&self, what: &str) {
        self.troubles().standing.retain(|(about, _)| about != what);
    }

    fn count(&self) -> u64 {
        self.troubles().count
    }

    fn last(&self) -> Option<Value> {
        let troubles = self.troubles();
        let (_, message) = troubles.standing.last()?;
        Some(serde_json::json!({ "kind": ErrorKind::Other.word(), "message": message }))
    }

    fn troubles(&self) -> MutexGuard<'_, Troubles> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Description of a transfer's work.
#[derive(Clone, Debug)]
pub(super) struct About {
    pub(super) kind: Kind,
    pub(super) name: String,
    pub(super) repository: Option<String>,
    /// The other agent that asks for it, if one does.
    pub(super) caller: Option<Identity>,
}

/// Counts of a kind of transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) running: u64,
    pub(super) ended: BTreeMap<Standing, u64>,
    pub(super) moved: u64,
    /// Failures that they went on after.
    pub(super) retried: u64,
}

impl Transfers {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(Shared { clock, register: Mutex::default(), tasks: TaskTracker::new() }))
    }

    /// Begins `work` as a task of its own, which goes on whoever listens. Within a runtime.
    ///
    /// # Errors
    /// Unreachable, once the agent is ending; exhausted, if too many run.
    pub(super) fn begin<F>(&self, about: About, work: impl FnOnce(Progress) -> F) -> Result<Arc<Entry>>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        self.start(about, |entry| work(entry.progress.clone()), Duration::ZERO)
    }

    /// As [`Transfers::begin`]; but when it is stopped, `work` is told by the token and has some seconds to end by itself.
    ///
    /// # Errors
    /// As [`Transfers::begin`].
    pub(super) fn begin_stoppable<F>(
        &self,
        about: About,
        work: impl FnOnce(Progress, CancellationToken) -> F,
    ) -> Result<Arc<Entry>>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        self.start(about, |entry| work(entry.progress.clone(), entry.stop.clone()), STOPPING)
    }

    /// As [`Transfers::begin_stoppable`], for `work` that goes on after failures and tells of them.
    ///
    /// # Errors
    /// As [`Transfers::begin`].
    pub(super) fn begin_lasting<F>(
        &self,
        about: About,
        work: impl FnOnce(Progress, Trouble, CancellationToken) -> F,
    ) -> Result<Arc<Entry>>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        self.start(about, |entry| work(entry.progress.clone(), entry.trouble.clone(), entry.stop.clone()), STOPPING)
    }

    fn start<F>(&self, about: About, work: impl FnOnce(&Entry) -> F, patience: Duration) -> Result<Arc<Entry>>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        let entry = Arc::new(Entry {
            id: Ulid::generate(),
            kind: about.kind,
            name: about.name,
            repository: about.repository,
            caller: about.caller,
            begun: Instant::now(),
            started: self.0.clock.now(),
            progress: Progress::default(),
            trouble: Trouble::default(),
            stop: CancellationToken::new(),
            state: watch::Sender::new(State { standing: Standing::Running, took: None, outcome: None }),
        });
        let work = work(&entry);
        // Whoever closes waits for all that were admitted: it must see them all.
        let mut register = self.register();
        register.admit(&entry)?;
        let settling = Settling { transfers: self.clone(), entry: Arc::clone(&entry) };
        let span = tracing::info_span!("transfer", id = %entry.id, kind = entry.kind.word(), name = %entry.name);
        let tracked = async move {
            let stop = settling.entry.stop.clone();
            let mut work = std::pin::pin!(work);
            let ended = tokio::select! {
                result = &mut work => Some(result),
                () = stop.cancelled() => None,
            };
            let ended = match ended {
                None if !patience.is_zero() => tokio::time::timeout(patience, work).await.ok(),
                ended => ended,
            };
            settling.end(ended);
        };
        self.0.tasks.spawn(tracked.instrument(span));
        Ok(entry)
    }

    /// The transfer called `id`; for another agent, if it asked for it.
    ///
    /// # Errors
    /// Not found, if there is none, or not any more.
    pub(super) fn find(&self, id: &str, caller: Option<&Identity>) -> Result<Arc<Entry>> {
        let found = id.parse().ok().and_then(|id: Ulid| self.register().known.get(&id).map(Arc::clone));
        let found = found.filter(|entry| entry.is_of(caller));
        found.ok_or_else(|| Error::not_found("there is no such transfer").at(id).help("GET /v1/transfers lists them"))
    }

    /// All of them, the oldest first; for another agent, those that it asked for.
    pub(super) fn list(&self, caller: Option<&Identity>) -> view::TransferList {
        let known: Vec<_> = self.register().known.values().map(Arc::clone).collect();
        let of = known.iter().filter(|entry| entry.is_of(caller));
        view::TransferList { transfers: of.map(|entry| entry.view_for(caller)).collect() }
    }

    /// Counts of each kind since the agent began.
    pub(super) fn tally(&self, kind: Kind) -> Tally {
        let register = self.register();
        let running = register.known.values().filter(|entry| entry.kind == kind && entry.is_running());
        let mut tally = Tally::default();
        for entry in running {
            tally.running += 1;
            tally.moved += entry.progress.snapshot().moved;
            tally.retried += entry.trouble.count();
        }
        let count = |end| register.ended.get(&(kind, end)).copied().unwrap_or(0);
        tally.ended = Standing::ENDS.into_iter().map(|end| (end, count(end))).collect();
        tally.moved += register.moved.get(&kind).copied().unwrap_or(0);
        tally.retried += register.retried.get(&kind).copied().unwrap_or(0);
        tally
    }

    /// Takes nothing new from now on.
    pub(super) fn close(&self) {
        self.register().closed = true;
        self.0.tasks.close();
    }

    /// Whether nothing new is taken.
    pub(super) fn is_closed(&self) -> bool {
        self.register().closed
    }

    /// Those that run.
    pub(super) fn running(&self) -> Vec<Arc<Entry>> {
        self.register().known.values().filter(|entry| entry.is_running()).map(Arc::clone).collect()
    }

    /// Until none runs, after [`Transfers::close`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn ended(&self) {
        self.0.tasks.wait().await;
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        self.0.register.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Register {
    fn admit(&mut self, entry: &Arc<Entry>) -> Result<()> {
        if self.closed {
            return Err(
                Error::unreachable("agent is shutting down").help("try again when it, or another one, is there")
            );
        }
        let running: Vec<_> = self.known.values().filter(|entry| entry.is_running()).collect();
        let too_many = |what: String, most: usize| {
            Err(Error::exhausted(what).expected(format!("at most {most}")).help("wait until one has ended"))
        };
        if running.len() >= RUNNING_MAX {
            return too_many("too many transfers are running".into(), RUNNING_MAX);
        }
        if let Some(caller) = &entry.caller {
            let called = running.iter().filter(|other| other.caller.is_some()).count();
            let own = running.iter().filter(|other| other.caller.as_ref() == Some(caller)).count();
            if called >= CALLED_MAX {
                return too_many("too many transfers of other agents are running".into(), CALLED_MAX);
            }
            let share = (CALLED_MAX - (called - own)).div_ceil(2);
            if own >= share {
                return too_many(format!("too many transfers of {} are running", caller.path()), share);
            }
        }
        self.known.insert(entry.id, Arc::clone(entry));
        Ok(())
    }

    /// Forgets the oldest of those that ended, if they are too many.
    fn forget(&mut self) {
        let ended = self.known.values().filter(|entry| !entry.is_running()).map(|entry| entry.id);
        let mut ended: Vec<_> = ended.collect();
        ended.truncate(ended.len().saturating_sub(ENDED_KEPT));
        self.known.retain(|id, _| !ended.contains(id));
    }
}

impl Entry {
    /// As the API tells it.
    pub(super) fn view(&self) -> view::Transfer {
        let State { standing, took, outcome } = self.state.borrow().clone();
        let (report, error) = match standing {
            Standing::Done => (outcome, None),
            Standing::Running => (None, self.trouble.last()),
            Standing::Failed | Standing::Cancelled => (None, outcome),
        };
        view::Transfer {
            id: self.id.to_string(),
            kind: self.kind,
            name: self.name.clone(),
            repository: self.repository.clone(),
            caller: self.caller.as_ref().map(Identity::path),
            state: standing,
            started: self.started.to_string(),
            seconds: took.unwrap_or_else(|| self.begun.elapsed()).as_secs_f64(),
            progress: self.progress.snapshot().into(),
            report,
            error,
        }
    }

    /// As the API tells `caller`: another agent is not told where the repository is.
    pub(super) fn view_for(&self, caller: Option<&Identity>) -> view::Transfer {
        let view = self.view();
        if caller.is_some() { view::Transfer { repository: None, ..view } } else { view }
    }

    /// May `caller` know of it? Whoever is of this node may.
    fn is_of(&self, caller: Option<&Identity>) -> bool {
        caller.is_none() || caller == self.caller.as_ref()
    }

    pub(super) fn is_running(&self) -> bool {
        self.state.borrow().standing == Standing::Running
    }

    /// Tells it to stop; what it has done stays done. No effect once it ended.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// Until it ends.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn ended(&self) {
        // The sender is in `self`.
        let _ = self.state.subscribe().wait_for(|state| state.standing != Standing::Running).await;
    }
}

/// A transfer's task: however it goes away, the transfer has ended.
struct Settling {
    transfers: Transfers,
    entry: Arc<Entry>,
}

impl Settling {
    fn end(self, ended: Option<Result<Value>>) {
        let (standing, outcome) = match ended {
            Some(Ok(report)) => (Standing::Done, Some(report)),
            Some(Err(error)) if error.kind() == ErrorKind::Cancelled && self.entry.stop.is_cancelled() => {
                (Standing::Cancelled, serde_json::to_value(&error).ok())
            }
            Some(Err(error)) => {
                tracing::warn!(kind = self.entry.kind.word(), name = %self.entry.name, "transfer failed: {error:?}");
                (Standing::Failed, serde_json::to_value(&error).ok())
            }
            None => (Standing::Cancelled, None),
        };
        self.settle(standing, outcome);
    }

    fn settle(&self, standing: Standing, outcome: Option<Value>) {
        let entry = &self.entry;
        let took = Some(entry.begun.elapsed());
        let mut register = self.transfers.register();
        *register.ended.entry((entry.kind, standing)).or_default() += 1;
        *register.moved.entry(entry.kind).or_default() += entry.progress.snapshot().moved;
        *register.retried.entry(entry.kind).or_default() += entry.trouble.count();
        entry.state.send_replace(State { standing, took, outcome });
        register.forget();
    }
}

impl Drop for Settling {
    fn drop(&mut self) {
        if self.entry.is_running() {
            let error = Error::other("transfer ended without a result: towline has a bug");
            self.settle(Standing::Failed, serde_json::to_value(&error).ok());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    fn about(name: &str) -> About {
        About { kind: Kind::Save, name: name.to_owned(), repository: None, caller: None }
    }

    fn transfers() -> Transfers {
        Transfers::new(Arc::new(SystemClock))
    }

    #[tokio::test]
    async fn each_end_is_told_and_counted() {
        let transfers = transfers();
        let done = transfers.begin(about("done"), |progress| async move {
            progress.moved(7);
            Ok(Value::from("report"))
        });
        let failed = transfers.begin(about("failed"), |_| async { Err(Error::conflict("no")) });
        let stopped = transfers.begin(about("stopped"), |_| std::future::pending()).unwrap();
        let broken = transfers.begin(about("broken"), |_| async { panic!("a bug, for the test") });
        assert!(stopped.is_running());
        stopped.stop();
        let entries = [done.unwrap(), failed.unwrap(), stopped, broken.unwrap()];
        for entry in &entries {
            entry.ended().await;
        }
        let views = entries.each_ref().map(|entry| entry.view());
        assert_eq!(views[0].report, Some("report".into()));
        assert_eq!(views[1].error.as_ref().unwrap()["kind"], "conflict");
        let states = views.map(|view| view.state);
        assert_eq!(states, [Standing::Done, Standing::Failed, Standing::Cancelled, Standing::Failed]);
        let tally = transfers.tally(Kind::Save);
        assert_eq!((tally.running, tally.moved), (0, 7));
        assert_eq!(tally.ended.into_values().collect::<Vec<_>>(), [1, 2, 1]);
        assert_eq!(transfers.find(&entries[0].id.to_string(), None).unwrap().id, entries[0].id);
        assert_eq!(transfers.find("nobody", None).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn what_hears_that_it_is_stopped_says_what_came_of_it() {
        let transfers = transfers();
        let hearing = transfers.begin_stoppable(about("a"), |_, stop| async move {
            stop.cancelled().await;
            Err(Error::cancelled("3 MiB are stored"))
        });
        let hearing = hearing.unwrap();
        hearing.stop();
        hearing.ended().await;
        let view = hearing.view();
        assert_eq!(
            (view.state, &view.error.unwrap()["message"]),
            (Standing::Cancelled, &Value::from("3 MiB are stored"))
        );
    }

    #[tokio::test]
    async fn it_is_bounded_and_closes() {
        let transfers = transfers();
        let running: Vec<_> =
            (0..RUNNING_MAX).map(|_| transfers.begin(about("a"), |_| std::future::pending()).unwrap()).collect();
        let refused = |transfers: &Transfers| transfers.begin(about("b"), |_| std::future::pending()).unwrap_err();
        assert_eq!(refused(&transfers).kind(), ErrorKind::Exhausted);
        running.iter().for_each(|entry| entry.stop());
        transfers.close();
        transfers.ended().await;
        assert_eq!(refused(&transfers).kind(), ErrorKind::Unreachable);
    }

    #[tokio::test]
    async fn the_oldest_that_ended_are_forgotten() {
        let transfers = transfers();
        let first = transfers.begin(about("first"), |_| std::future::pending()).unwrap();
        for _ in 0..ENDED_KEPT + 5 {
            transfers.begin(about("a"), |_| async { Ok(Value::Null) }).unwrap().ended().await;
        }
        assert_eq!(transfers.list(None).transfers.len(), ENDED_KEPT + 1);
        assert!(transfers.find(&first.id.to_string(), None).is_ok(), "it runs");
    }

    #[tokio::test]
    async fn other_agents_see_their_own_and_leave_room() {
        let transfers = transfers();
        let agent = |agent: &str| Some(Identity::new("home", agent).unwrap());
        let begin =
            |caller: Option<Identity>| transfers.begin(About { caller, ..about("a") }, |_| std::future::pending());
        let (own, theirs) = (begin(None).unwrap(), begin(agent("a")).unwrap());
        let id = |entry: &Entry| entry.id.to_string();
        assert!(transfers.find(&id(&own), agent("a").as_ref()).is_err());
        assert!(transfers.find(&id(&theirs), agent("b").as_ref()).is_err());
        assert_eq!(transfers.find(&id(&theirs), agent("a").as_ref()).unwrap().id, theirs.id);
        assert_eq!(transfers.list(agent("a").as_ref()).transfers.len(), 1);
        assert_eq!(transfers.list(agent("b").as_ref()).transfers.len(), 0);
        assert_eq!(transfers.list(None).transfers.len(), 2);
        // Each has at most half of what others leave; `a` has one already.
        let fill = |name: &str| (0..CALLED_MAX).filter(|_| begin(agent(name)).is_ok()).count();
        assert_eq!(fill("b"), 16);
        let error = begin(agent("b")).unwrap_err();
        assert!(error.to_string().contains("too many transfers of home/b are running: expected at most 16"), "{error}");
        assert_eq!(["c", "d", "e", "f"].map(fill), [8, 4, 2, 1]);
        let error = begin(agent("b")).unwrap_err();
        assert!(error.to_string().contains("too many transfers of other agents are running: expected at most 32"));
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(begin(None).is_ok());
    }
}
