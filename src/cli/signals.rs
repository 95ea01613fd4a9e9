//! Ctrl-C and SIGTERM: the first asks a command to stop, the second ends the process.

use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::SHUTDOWN_MAX;
use super::output::Output;
use crate::error::{Error, Result};

/// Time that a stopped command has to record what it has stored.
const WINDING_UP: Duration = Duration::from_secs(8);

/// Time within which a further signal is part of the same request: `timeout` of coreutils, and some launchers, signal a process and
/// then its group.
const SAME_REQUEST: Duration = Duration::from_millis(300);

/// Requests to stop, of one or more signals each.
#[derive(Debug, Default)]
pub(super) struct StopRequests {
    number: u32,
    last: Option<Instant>,
}

impl StopRequests {
    /// Counts a signal; gives the number of the request that it begins, from 1, or none if it is part of the one before.
    pub(super) fn signal(&mut self) -> Option<u32> {
        if self.last.is_some_and(|last| last.elapsed() < SAME_REQUEST) {
            return None;
        }
        self.last = Some(Instant::now());
        self.number += 1;
        Some(self.number)
    }

    /// True if there was any.
    pub(super) fn any(&self) -> bool {
        self.number > 0
    }
}

/// A command that ended otherwise than well: why, and its exit code.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: Error,
    pub(super) code: u8,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { code: error.kind().exit_code(), error }
    }
}

/// Outcome of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReceivedSignal {
    Interrupt,
    Terminate,
}

impl ReceivedSignal {
    /// 128 and the number of the signal, as shells tell it.
    const fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// SIGINT and SIGTERM.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn listen() -> Result<Self> {
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    async fn next(&mut self) -> ReceivedSignal {
        tokio::select! {
            _ = self.interrupt.recv() => ReceivedSignal::Interrupt,
            _ = self.terminate.recv() => ReceivedSignal::Terminate,
        }
    }
}

/// Hears a signal, instead of ending by it.
pub(super) fn listen(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|source| Error::other("signals cannot be caught").source(source))
}

/// Makes a write beyond the limit of file sizes (`ulimit -f`) an error instead of the end of the process, for good. In a runtime.
pub(super) fn survive_file_limit() -> Result<()> {
    // The handler stays when this is dropped.
    listen(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw())).map(drop)
}

/// Behaviour of a command at a signal.
pub(super) struct Interruption {
    /// Asks the command to stop.
    pub(super) stop: Option<CancellationToken>,
    /// Help for the user afterwards.
    pub(super) help: &'static str,
}

/// Runs `command` until it ends or a signal comes. With `stop` it is then asked to stop and has some seconds for that;
/// without, or if it takes longer, it is dropped. A second signal ends the process at once.
///
/// It runs as a task, so that a command that blocks its thread can be left behind.
pub(super) async fn interruptible(
    command: impl Future<Output = Result<u8>> + Send + 'static,
    manner: Interruption,
    output: &Output,
) -> Result<u8, Failed> {
    let mut signals = Signals::listen()?;
    let mut task = tokio::spawn(command);
    let bug = |source| Error::other("towline has a bug").source(source);
    let caught = tokio::select! {
        ended = &mut task => return Ok(ended.map_err(bug)??),
        caught = signals.next() => caught,
    };
    let mut interrupted = Error::cancelled("interrupted").help(manner.help);
    if let Some(stop) = manner.stop {
        output.remark("interrupted: what has arrived is being recorded; a second signal ends it at once");
        stop.cancel();
        match tokio::time::timeout(WINDING_UP, &mut task).await {
            // It was done all the same.
            Ok(Ok(Ok(code))) => return Ok(code),
            Ok(Ok(Err(error))) => return Err(Failed { error, code: caught.exit_code() }),
            Ok(Err(source)) => return Err(bug(source).into()),
            Err(_) => {
                interrupted = Error::cancelled("interrupted; the repository took too long to record what has arrived")
                    .help("run the same command again: what was recorded before is used");
            }
        }
    }
    task.abort();
    // Dropping it removes what it left half done; how it ends does not matter any more.
    let _ = tokio::time::timeout(SHUTDOWN_MAX, task).await;
    Err(Failed { error: interrupted, code: caught.exit_code() })
}

/// Ends the process at the second signal from now on, whatever its other threads do then. Outside of a runtime.
#[expect(clippy::exit, reason = "whoever asks twice does not want to wait for anything")]
pub(super) fn end_at_the_second() -> Result<()> {
    let fault = |source| Error::other("threads cannot be started").source(source);
    let runtime = Builder::new_current_thread().enable_all().build().map_err(fault)?;
    let mut signals = runtime.block_on(async { Signals::listen() })?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let first = runtime.block_on(async {
                let (first, mut requests) = (signals.next().await, StopRequests::default());
                requests.signal();
                loop {
                    signals.next().await;
                    if requests.signal().is_some() {
                        break first;
                    }
                }
            });
            std::process::exit(first.exit_code().into());
        })
        .map_err(fault)?;
    Ok(())
}
