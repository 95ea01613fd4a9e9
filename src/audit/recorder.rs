//! The recorder: one thread that writes the decisions of many tasks into one log.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::entry::{Decision, EntryKind};
use super::head::Head;
use super::journal::Journal;
use super::requests::{Repeats, Request, Requests};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, Result};

/// Maximum number of queued decisions. One more is refused, so that nobody waits for a slow disk.
const QUEUE: usize = 1024;
/// Interval of syncs and of the ends of requests.
const TICK: Duration = Duration::from_secs(1);
/// Time to wait for a log that another process has open.
const WAIT: Duration = Duration::from_secs(5);
/// Maximum number of ends in one write.
const TOGETHER_MAX: usize = 64;

/// Settings of a recorder.
#[derive(Clone, Debug)]
pub struct RecorderOptions {
    /// The folder of the log.
    pub folder: PathBuf,
    /// Owner of the log: an identity, or `cli:USER`.
    pub origin: String,
    /// Time within which repeated requests share one entry.
    pub window: Duration,
}

impl RecorderOptions {
    /// Options for the log of `origin` in `folder`; repeats within a minute share one entry.
    #[must_use]
    pub fn new(folder: PathBuf, origin: String) -> Self {
        Self { folder, origin, window: Duration::from_mins(1) }
    }
}

/// Recorder of decisions. Clones share it.
///
/// An entry is in the file when [`Recorder::record`] returns, and would survive a power loss about a second later.
#[derive(Clone, Debug)]
pub struct Recorder(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    queue: SyncSender<Message>,
    problem: Arc<Mutex<Option<String>>>,
    clock: Arc<dyn Clock>,
}

#[derive(Debug)]
enum Message {
    Record(Box<Decision>, Repeats, oneshot::Sender<Result<Request>>),
    Head(oneshot::Sender<Result<Head>>),
    Close(oneshot::Sender<Result<Head>>),
}

impl Recorder {
    /// Opens the log, and starts the thread that writes it. Blocking.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn open(options: RecorderOptions, clock: Arc<dyn Clock>) -> Result<Self> {
        let RecorderOptions { folder, origin, window } = options;
        let journal = Journal::open(&folder, &origin, clock.now(), WAIT)?;
        Self::of(journal, window, clock)
    }

    pub(super) fn of(journal: Journal, window: Duration, clock: Arc<dyn Clock>) -> Result<Self> {
        let (queue, waiting) = sync_channel(QUEUE);
        let (folder, problem) = (journal.folder().to_owned(), Arc::new(Mutex::new(None)));
        let writing = Writing {
            journal,
            clock: Arc::clone(&clock),
            requests: Requests::new(window),
            ends: Vec::new(),
            problem: Arc::clone(&problem),
        };
        std::thread::Builder::new()
            .name("towline-audit".to_owned())
            .spawn(move || writing.run(&waiting))
            .map_err(|source| Error::other("cannot start the thread of the audit log").source(source))?;
        Ok(Self(Arc::new(Shared { folder, queue, problem, clock })))
    }

    /// Folder of the log.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.0.folder
    }

    /// Time by the clock of its entries.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    /// Records `decision`. A caller that gets an error must refuse the request, whatever was decided. It waits for the
    /// write, never for space in the queue.
    ///
    /// # Errors
    /// Exhausted, if the disk is full or too slow; else errors of the file system.
    ///
    /// # Cancel safety
    /// Safe: it was recorded or not.
    pub async fn record(&self, decision: Decision, repeats: Repeats) -> Result<Request> {
        self.ask(|answer| Message::Record(Box::new(decision.bounded()), repeats, answer)).await
    }

    /// Head of the log; the entries up to it would survive a power loss.
    ///
    /// # Errors
    /// Errors of the file system.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn head(&self) -> Result<Head> {
        self.ask(Message::Head).await
    }

    /// Ends all requests and closes the log; returns its head. Later decisions are refused.
    ///
    /// # Errors
    /// As [`Recorder::head`].
    ///
    /// # Cancel safety
    /// Safe: the log is closed in any case.
    pub async fn close(&self) -> Result<Head> {
        self.ask(Message::Close).await
    }

    /// Current problem of the log, if any.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.0.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn ask<T>(&self, message: impl FnOnce(oneshot::Sender<Result<T>>) -> Message) -> Result<T> {
        let (sender, answer) = oneshot::channel();
        self.0.queue.try_send(message(sender)).map_err(|error| match error {
            TrySendError::Full(_) => Error::exhausted("audit log does not keep up, so requests are refused")
                .expected(format!("at most {QUEUE} queued decisions"))
                .help("check the speed of its disk, and for an agent with too many requests"),
            TrySendError::Disconnected(_) => closed(),
        })?;
        answer.await.map_err(|_| closed())?
    }
}

fn closed() -> Error {
    Error::unreachable("audit log is closed: the agent is shutting down")
}

/// State of the writer thread.
struct Writing {
    journal: Journal,
    clock: Arc<dyn Clock>,
    requests: Requests,
    /// Ends that are not written yet.
    ends: Vec<EntryKind>,
    problem: Arc<Mutex<Option<String>>>,
}

impl Writing {
    fn run(mut self, waiting: &Receiver<Message>) {
        let mut next = Instant::now() + TICK;
        loop {
            // An answer without a receiver is dropped.
            match waiting.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Message::Record(decision, repeats, answer)) => drop(answer.send(self.record(*decision, repeats))),
                Ok(Message::Head(answer)) => drop(answer.send(self.head(false))),
                Ok(Message::Close(answer)) => {
                    let head = self.head(true);
                    drop(self);
                    // Closed before the answer is sent, so that the next process can open the log.
                    let _ = answer.send(head);
                    return;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let _ = self.head(true);
                    return;
                }
            }
            if Instant::now() >= next {
                // `head` stores the problem for [`Recorder::problem`].
                let _ = self.head(false);
                next = Instant::now() + TICK;
            }
        }
    }

    fn record(&mut self, decision: Decision, repeats: Repeats) -> Result<Request> {
        let now = Instant::now();
        if repeats == Repeats::Merged
            && let Some(request) = self.requests.repeated(&decision, now)
        {
            return Ok(request);
        }
        if repeats == Repeats::Merged {
            self.ends.extend(self.requests.make_room(&decision));
        }
        let request = Request::new(self.append(&[EntryKind::Decision(decision.clone())])?);
        self.requests.begin(decision, repeats, request.clone(), now);
        Ok(request)
    }

    /// Writes the ends of ended requests, or of all, and syncs.
    fn head(&mut self, all: bool) -> Result<Head> {
        self.ends.extend(self.requests.ended(Instant::now(), all));
        while !self.ends.is_empty() {
            let some: Vec<EntryKind> = self.ends.iter().take(TOGETHER_MAX).cloned().collect();
            self.append(&some)?;
            self.ends.drain(..some.len());
        }
        let synced = self.journal.sync();
        self.told(&synced);
        synced?;
        Ok(self.journal.head(self.clock.now()))
    }

    fn append(&mut self, entries: &[EntryKind]) -> Result<u64> {
        let appended = self.journal.append(self.clock.now(), entries);
        self.told(&appended);
        appended
    }

    /// Stores the problem, or clears it.
    fn told<T>(&self, result: &Result<T>) {
        let problem = result.as_ref().err().map(ToString::to_string);
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(problem) = problem.as_ref().filter(|problem| known.as_ref() != Some(problem)) {
            tracing::error!("{problem}");
        }
        *known = problem;
    }
}
