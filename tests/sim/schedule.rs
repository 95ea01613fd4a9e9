//! One run of the real log under a scheduler that decides, request by request, who goes on and what fails.
//!
//! Actors are polled by hand, so a run follows from its choices alone. The log's own pauses are real time, but an actor
//! that pauses stands still until it is chosen: thousands of runs pause side by side.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::task::ArcWake;
use object_store::ObjectStore;
use towline::ErrorKind;
use towline::budget::Budget;
use towline::clock::{ManualClock, SystemClock, Timestamp};
use towline::id::{ManifestId, ObjectId, Owned, SessionId};
use towline::limits::MEMORY_MIN;
use towline::repository::log::{Action, Committed, Log, RefValue, SegmentInfo, State, StepFacts};

use super::book::{name, session};
use super::gate::{Gate, Shared, Verdict};

/// Act of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Open,
    AddSegment,
    Renew,
    /// Renews another's session as if it were its own: two processes of one session.
    Join(u8),
    /// Sets a name in its session, and closes it.
    Save(&'static str),
    /// Sets a name in no session.
    Set(&'static str),
    Remove(&'static str),
    Fence(u8),
    Look,
    Truncate(u64),
}

/// Possible next move, and its cost of the two budgets.
#[derive(Clone, Debug)]
pub(crate) struct Chance {
    what: Event,
    pub(crate) switches: u32,
    pub(crate) faults: u32,
}

#[derive(Clone, Debug)]
enum Event {
    /// The waiting request number `at`, for people with its text.
    Request {
        at: usize,
        who: usize,
        verdict: Verdict,
        shown: String,
    },
    Wake(usize),
    Arrive,
    Crash(usize),
}

impl Chance {
    /// The request that actor `who` sends here, if it is carried out and answered.
    pub(crate) fn request_of(&self, actor: usize) -> Option<&str> {
        match &self.what {
            Event::Request { who, shown, verdict: Verdict::Do, .. } if *who == actor => Some(shown),
            _ => None,
        }
    }
}

/// How a run chooses: of the chances, by number. The first costs nothing.
pub(crate) trait Choose {
    fn choose(&mut self, chances: &[Chance]) -> usize;
}

/// A commit's outcome, as its writer was told it.
#[derive(Debug)]
struct Observed {
    /// The clock's time that only this commit's entries carry.
    mark: i64,
    outcome: Result<Option<u64>, ErrorKind>,
}

type History = Arc<Mutex<Vec<Observed>>>;
type Running = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Account of a run, for people.
#[derive(Debug, Default)]
pub(crate) struct RunReport {
    pub(crate) lines: Vec<String>,
    pub(crate) strays: usize,
    pub(crate) unknown: usize,
}

/// The past's actors have numbers from here on, and the sessions of the present's.
const PAST: usize = 50;

struct Flag(AtomicBool);

impl ArcWake for Flag {
    fn wake_by_ref(flag: &Arc<Self>) {
        flag.0.store(true, Ordering::SeqCst);
    }
}

struct Actor {
    running: Option<Running>,
    asleep: bool,
}

impl Actor {
    /// Polls until it waits for the scheduler, for time, or for nothing any more.
    fn poll(&mut self) {
        let flag = Arc::new(Flag(AtomicBool::new(true)));
        let waker = futures::task::waker(Arc::clone(&flag));
        while flag.0.swap(false, Ordering::SeqCst) {
            let Some(running) = &mut self.running else { return };
            if running.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                self.running = None;
            }
        }
    }
}

/// Runs the deeds of all actors after `past`, which nothing disturbs; panics where a rule is violated.
pub(crate) async fn run(past: &[Operation], actors: &[Vec<Operation>], chooser: &mut impl Choose) -> RunReport {
    let shared = Shared::new();
    let (history, mut story) = (History::default(), RunReport::default());
    let past = past.iter().enumerate().map(|(who, deed)| (who, vec![*deed]));
    for (who, deeds) in past {
        let mut actor = [Actor { running: Some(live(&shared, &history, PAST + who, deeds)), asleep: false }];
        drive(&shared, &mut actor, &mut First, &mut RunReport::default()).await;
    }
    let lives = actors.iter().enumerate().map(|(who, deeds)| live(&shared, &history, who, deeds.clone()));
    let mut living: Vec<Actor> = lives.map(|life| Actor { running: Some(life), asleep: false }).collect();
    drive(&shared, &mut living, chooser, &mut story).await;
    judge(&shared, &history, &mut story).await;
    story
}

/// Always the first chance.
struct First;

impl Choose for First {
    fn choose(&mut self, _: &[Chance]) -> usize {
        0
    }
}

async fn drive(shared: &Shared, actors: &mut [Actor], chooser: &mut impl Choose, story: &mut RunReport) {
    let mut last = 0;
    loop {
        for (who, actor) in actors.iter_mut().enumerate().filter(|(_, actor)| !actor.asleep) {
            actor.poll();
            actor.asleep = actor.running.is_some() && !waits(shared, who);
        }
        let chances = chances(shared, actors, last);
        if chances.is_empty() {
            return;
        }
        let chosen = chances[chooser.choose(&chances)].what.clone();
        story.lines.push(format!("{chosen:?}"));
        match chosen {
            Event::Request { at, who, verdict, .. } => {
                let waiting = shared.waiting.lock().unwrap().remove(at);
                waiting.verdict.send(verdict).unwrap();
                last = who;
            }
            Event::Wake(who) => {
                let actor = &mut actors[who];
                let awake = |cx: &mut Context<'_>| match actor.running.as_mut().map(|running| running.as_mut().poll(cx))
                {
                    Some(Poll::Pending) if !waits(shared, who) => Poll::Pending,
                    Some(Poll::Pending) => Poll::Ready(false),
                    _ => Poll::Ready(true),
                };
                if std::future::poll_fn(awake).await {
                    actor.running = None;
                }
                actor.asleep = false;
                last = who;
            }
            Event::Arrive => {
                let (key, payload) = shared.late.lock().unwrap().remove(0);
                drop(shared.create(&key, payload).await);
            }
            Event::Crash(who) => {
                actors[who].running = None;
                actors[who].asleep = false;
                shared.waiting.lock().unwrap().retain(|waiting| waiting.who != who);
            }
        }
    }
}

/// Does an actor wait for the scheduler? Requests that it has dropped do not count.
fn waits(shared: &Shared, who: usize) -> bool {
    let mut waiting = shared.waiting.lock().unwrap();
    waiting.retain(|waiting| !waiting.verdict.is_canceled());
    waiting.iter().any(|waiting| waiting.who == who)
}

/// Possible next moves; the first costs nothing: who went last goes on, or the next in line.
fn chances(shared: &Shared, actors: &[Actor], last: usize) -> Vec<Chance> {
    let waiting = shared.waiting.lock().unwrap();
    let mut chances = Vec::new();
    let on = actors.iter().map(|actor| actor.running.is_some()).collect::<Vec<_>>();
    let order = (last..actors.len()).chain(0..last).filter(|&who| on[who]);
    for (place, who) in order.enumerate() {
        let switches = u32::from(place > 0 && on[last]);
        if actors[who].asleep {
            chances.push(Chance { what: Event::Wake(who), switches, faults: 0 });
            continue;
        }
        let own = waiting.iter().enumerate().filter(|(_, waiting)| waiting.who == who);
        for (turn, (at, waiting)) in own.enumerate() {
            let switches = switches + u32::from(turn > 0);
            let request = |verdict| Event::Request { at, who, verdict, shown: waiting.what.clone() };
            chances.push(Chance { what: request(Verdict::Do), switches, faults: 0 });
            if waiting.creates {
                let faults = [Verdict::Lost, Verdict::Fail, Verdict::Late];
                let faulty = |verdict| Chance { what: request(verdict), switches, faults: 1 };
                chances.extend(faults.into_iter().map(faulty));
            }
        }
        chances.push(Chance { what: Event::Crash(who), switches, faults: 1 });
    }
    if !shared.late.lock().unwrap().is_empty() {
        let switches = u32::from(!chances.is_empty());
        chances.push(Chance { what: Event::Arrive, switches, faults: 0 });
    }
    chances
}

/// The rules, once everybody is done.
async fn judge(shared: &Shared, history: &History, story: &mut RunReport) {
    let log = Log::new(Arc::new(shared.store.clone()), Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap());
    let found = log.refresh().await.expect("the log is sound");
    let truth = shared.truth.lock().unwrap();
    assert_eq!(Some(&*found), truth.states.last(), "the newest state is not the fold of all that was committed");
    story.strays = truth.strays;
    for Observed { mark, outcome } in &*history.lock().unwrap() {
        let entries = (1..).zip(&truth.entries).filter(|(_, entry)| entry.at == Timestamp(*mark));
        let numbers: Vec<u64> = entries.map(|(number, _)| number).collect();
        match outcome {
            Ok(Some(number)) => assert_eq!(numbers, [*number], "commit {mark} is not where its writer believes it"),
            Ok(None) => assert_eq!(numbers, [0u64; 0], "commit {mark} happened though there was nothing to do"),
            Err(ErrorKind::Conflict) => assert_eq!(numbers, [0u64; 0], "commit {mark} was refused, and happened"),
            Err(ErrorKind::Unreachable) => {
                assert!(numbers.len() < 2, "commit {mark} happened twice: {numbers:?}");
                story.unknown += 1;
            }
            Err(kind) => panic!("commit {mark} fails with {kind:?} on a sound log"),
        }
    }
}

/// An actor's life: its deeds, until one fails.
fn live(shared: &Arc<Shared>, history: &History, who: usize, deeds: Vec<Operation>) -> Running {
    // Deeds of the past go one by one: each is the only actor then.
    let gate = Gate { shared: Arc::clone(shared), who: if who < PAST { who } else { 0 } };
    let (shared, history) = (Arc::clone(shared), Arc::clone(history));
    Box::pin(async move {
        let clock = Arc::new(ManualClock::default());
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let log = Log::new(Arc::new(gate) as Arc<dyn ObjectStore>, Arc::clone(&clock) as _, budget);
        for (turn, deed) in deeds.into_iter().enumerate() {
            let mark = i64::try_from(who * 100 + turn).unwrap();
            clock.set(Timestamp(mark));
            let before = shared.truth.lock().unwrap().entries.len();
            let result = match deed {
                Operation::Look => log.refresh().await.map(|state| Committed { entry: None, state }),
                Operation::Truncate(keep) => match log.truncate(keep, None).await {
                    Ok(_) => continue,
                    Err(error) => Err(error),
                },
                _ => log.commit(own_session(deed, who), |state| Ok(actions(deed, who, mark, state))).await,
            };
            if let Ok(Committed { state, entry }) = &result {
                let truth = shared.truth.lock().unwrap();
                let seq = usize::try_from(state.seq).unwrap();
                assert!(seq >= before && state.seq >= entry.unwrap_or(0), "a state is older than what it must hold");
                assert_eq!(Some(&**state), truth.states.get(seq), "a fold finds another state than the true one");
            }
            let failed = result.is_err();
            let outcome = result.map(|committed| committed.entry).map_err(|error| error.kind());
            history.lock().unwrap().push(Observed { mark, outcome });
            if failed {
                return;
            }
        }
    })
}

fn own_session(deed: Operation, who: usize) -> Option<SessionId> {
    match deed {
        Operation::Join(whose) => Some(session(whose)),
        Operation::Open | Operation::AddSegment | Operation::Renew | Operation::Save(_) => {
            Some(session(u8::try_from(who % PAST).unwrap()))
        }
        _ => None,
    }
}

fn actions(deed: Operation, who: usize, mark: i64, state: &State) -> Vec<Action> {
    let own = session(u8::try_from(who % PAST).unwrap());
    let object = Owned { session: own, object: ObjectId::from_bytes([u8::try_from(mark % 100).unwrap(); 16]) };
    let set = |to: &str| {
        let value = RefValue {
            version: 0,
            manifest: ManifestId::from_bytes([0; 32]),
            manifest_key: object,
            map_key: object,
            saved: Timestamp(0),
            logical_bytes: 1,
            files: 1,
            chunks: 1,
            behind: 0,
            facts: StepFacts::default(),
            attempt: None,
        };
        Action::SetRef { name: name(to), expected: state.version(&name(to)), value }
    };
    match deed {
        Operation::Open => vec![Action::Open(own)],
        Operation::Renew => vec![Action::Renew(own)],
        Operation::Join(whose) => vec![Action::Renew(session(whose))],
        Operation::AddSegment => {
            vec![Action::AddSegment(object, SegmentInfo { len: 1, packs: 1, chunks: 1, built: 0 })]
        }
        Operation::Save(to) => vec![set(to), Action::Close(own)],
        Operation::Set(to) => vec![set(to)],
        Operation::Remove(which) => {
            let remove = |expected| Action::RemoveRef { name: name(which), expected };
            state.version(&name(which)).map(remove).into_iter().collect()
        }
        Operation::Fence(whose) => {
            let fence = |open: &towline::repository::log::Session| Action::Fence {
                session: session(whose),
                touched: open.touched,
            };
            state.sessions.get(&session(whose)).map(fence).into_iter().collect()
        }
        Operation::Look | Operation::Truncate(_) => vec![],
    }
}
