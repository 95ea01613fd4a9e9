//! `towline watch`: signals in, events out.

use std::time::Duration;

use tokio::signal::unix::SignalKind;
use tokio::sync::watch;
use tokio::time::sleep;

use super::args::{Watch, WatchedMetric};
use super::output::printable;
use super::signals::StopRequests;
use super::verbs::{Context, manner};
use super::{SHUTDOWN_MAX, listen, render};
use crate::audit::{Action, Recorded};
use crate::error::{Error, Result};
use crate::ops::{Stop, WatchEvent, WatchOptions};

impl Context {
    /// Watches until a signal, and then as long as `--on-term` allows; gives the exit code.
    pub(super) async fn watch(&self, args: Watch) -> Result<u8> {
        let Watch { dir, run, restore_latest, on_term, settle, once, metrics: specs, manner: how } = args;
        run.check_run()?;
        let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        let (say, stop) = watch::channel(Stop::No);
        let (mut save, mut metrics) = (manner(how)?, Vec::new());
        for metric in specs {
            match metric {
                WatchedMetric::Value(name, value) => save.facts = save.facts.metric(&name, value)?,
                WatchedMetric::Logged(logged) => metrics.push(logged),
            }
        }
        let options = WatchOptions { settle, restore_latest, once, save, metrics, handoff: None, stop };
        let tell = |event| self.tell(&event);
        let watching = async {
            let repository = self.open_to_save().await?;
            // One entry for all steps of the run: nobody decides on each.
            let names = [run.to_string()];
            let restored = if options.restore_latest {
                self.record(Action::Restore, &names, &repository, None).await?
            } else {
                Recorded::default()
            };
            let saved = self.record(Action::Save, &names, &repository, None).await?;
            let (mut out, mut into) = (0, 0);
            let mut counted = |event: WatchEvent| {
                match &event {
                    WatchEvent::Restored { report, .. } => out += report.bytes,
                    WatchEvent::Saved { report, .. } => into += report.logical_bytes,
                    _ => {}
                }
                tell(event);
            };
            let watched = repository.watch(&dir, &run, &options, &mut counted).await;
            let outcome = match &watched {
                Ok(_) => Ok(()),
                Err(error) => Err(Error::new(error.kind(), error.to_string())),
            };
            // The error itself is the watch's.
            let _ = restored.end(outcome, |()| out).await;
            saved.end(watched, |_| into).await
        };
        let mut watching = Box::pin(watching);
        // Not waited for after a second signal, or if a folder hangs.
        let (mut asked, mut latest) = (StopRequests::default(), Box::pin(sleep(Duration::MAX)));
        let report = loop {
            let linger = tokio::select! {
                report = &mut watching => break report?,
                () = &mut latest => return Err(Error::cancelled("interrupted").help("start the watch again")),
                _ = interrupt.recv() => false,
                _ = terminate.recv() => true,
            };
            let Some(number) = asked.signal() else { continue };
            let again = number > 1;
            let (signal, how) = (if linger { "SIGTERM" } else { "SIGINT" }, if again { " at once" } else { "" });
            self.output.remark(&format!("got {signal}: the watch ends{how}"));
            let wait = if again { SHUTDOWN_MAX } else { on_term.saturating_add(SHUTDOWN_MAX) };
            let stop = if again { Stop::Now } else { Stop::Within { grace: on_term, linger } };
            latest.set(sleep(wait));
            // A receiver is alive as long as the options are.
            let _ = say.send(stop);
        };
        let help = "start the watch again, or give it more time with --on-term";
        match report.error(&dir, help, String::clone).filter(|_| asked.any() || report.parted > 0) {
            Some(error) => Err(error),
            None => Ok(0),
        }
    }

    /// Prints an event. Errors are ignored: the watch goes on when nobody listens any more.
    fn tell(&self, event: &WatchEvent) {
        let printed = match event {
            WatchEvent::Saved { report, .. } => {
                for warning in report.skipped.iter().chain(&report.warnings) {
                    self.output.remark(&printable(warning));
                }
                self.output.report(event, |event, _| render::watched(event))
            }
            _ => self.output.event(event, render::watched),
        };
        if let Err(error) = printed {
            tracing::debug!("an event was not told: {error:?}");
        }
    }
}
