//! Saves stored checkpoints that their senders have not released.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use ulid::Ulid;

use super::store::HandoffStore;
use crate::agent::state::AgentState;
use crate::agent::tasks::{self, Outcome};
use crate::agent::view::SetAside;
use crate::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::work::blocking;

/// Pauses between the saves of a checkpoint that fail.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_mins(1));
/// Longest sleep.
const LONG: Duration = Duration::from_hours(1);

/// Time of the next save of a checkpoint, and the pauses after failures.
#[derive(Clone, Copy, Debug)]
struct RetryState {
    at: Instant,
    backoff: Backoff,
    /// Failed saves of the class [`Failure::Counted`].
    failed: u32,
}

/// Settings of the receiver.
#[derive(Clone, Copy, Debug)]
pub(in crate::agent) struct ReceiverOptions {
    /// Time that the sender has to save a checkpoint itself.
    pub(in crate::agent) wait: Duration,
    /// Failed saves before a checkpoint is set aside.
    pub(in crate::agent) tries: u32,
}

/// Classes of failed saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// Retried without limit: the repository is unreachable or full, or this agent is shutting down.
    Passing,
    /// Retried up to a limit. Also what takes more memory than there is.
    Counted,
    /// Never retried: it would fail again.
    Lasting,
}

impl Failure {
    fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Unreachable | ErrorKind::Cancelled => Self::Passing,
            // Of a disk or a store; this agent's own limits have no cause.
            ErrorKind::Exhausted if std::error::Error::source(error).is_some() => Self::Passing,
            ErrorKind::Usage | ErrorKind::Unsupported => Self::Lasting,
            _ => Self::Counted,
        }
    }
}

/// Saves checkpoints that have been in `store` for `options.wait`, and deletes them there. Those found at the start are saved at once:
/// saving twice stores nothing. Checkpoints that cannot be saved are set aside.
///
/// # Cancel safety
/// Safe: stored checkpoints stay.
pub(in crate::agent) async fn run_receiver(state: Arc<AgentState>, store: Arc<HandoffStore>, options: ReceiverOptions) {
    let (mut dues, mut wait_now) = (BTreeMap::<Ulid, RetryState>::new(), Duration::ZERO);
    loop {
        let to_save = store.to_save();
        dues.retain(|known, _| to_save.iter().any(|(id, _)| id == known));
        for (id, urgent) in to_save {
            let due = |wait| RetryState { at: Instant::now() + wait, backoff: BACKOFF, failed: 0 };
            if urgent {
                dues.insert(id, due(Duration::ZERO));
            }
            dues.entry(id).or_insert_with(|| due(wait_now));
        }
        wait_now = options.wait;
        let next = dues.iter().min_by_key(|(_, due)| due.at).map(|(id, due)| (*id, *due));
        let at = next.map_or_else(|| Instant::now() + LONG, |(_, due)| due.at);
        tokio::select! {
            () = sleep_until(at) => {}
            () = store.changed.notified() => continue,
        }
        let Some((id, due)) = next else { continue };
        if let Err(error) = save_unless_fatal(&state, &store, id, options.tries).await {
            let failure = Failure::of(&error);
            let failed = due.failed + u32::from(failure != Failure::Passing);
            if failure == Failure::Lasting || failed >= options.tries {
                set_aside(&state, &store, id, failed, &error).await;
                continue;
            }
            tracing::warn!("handoff {id} is not saved yet: {error:?}");
            let mut backoff = due.backoff;
            dues.insert(id, RetryState { at: Instant::now() + backoff.pause(), backoff, failed });
        }
    }
}

/// Sets aside checkpoint `id` after `tries` failed saves, the last one with `error`.
async fn set_aside(state: &AgentState, store: &Arc<HandoffStore>, id: Ulid, tries: u32, error: &Error) {
    let cause = error.help_text().map_or_else(String::new, |help| format!("{help}; then "));
    let aside = SetAside {
        since: state.now().to_string(),
        tries,
        kind: error.kind().word().to_owned(),
        error: error.to_string(),
        help: format!("{cause}towline handoff retry {id}; or delete it: towline handoff drop {id}"),
    };
    tracing::error!("handoff {id} cannot be saved and is set aside: {error:?}; what to do: {}", aside.help);
    let store = Arc::clone(store);
    match blocking(move || store.set_aside(id, aside)).await {
        Ok(()) => {}
        // The sender has saved it meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => tracing::error!("cannot record that handoff {id} was set aside: {error:?}"),
    }
}

/// As [`save`], unless the process ended during each of the last `tries` saves: then nothing else would ever be saved.
async fn save_unless_fatal(state: &AgentState, store: &Arc<HandoffStore>, id: Ulid, tries: u32) -> Result<()> {
    let counted = Arc::clone(store);
    let begun = match blocking(move || counted.begin_save(id)).await {
        Ok(begun) => begun,
        Err(error) => {
            // It may be gone, and a save is what gives a full disk its space back.
            tracing::debug!("save of handoff {id} is not counted: {error:?}");
            return save(state, store, id).await;
        }
    };
    let unended = begun.unended();
    if unended >= tries {
        return Err(Error::new(ErrorKind::Unsupported, "agent ended whenever it saved this checkpoint")
            .at(id)
            .got(format!("{unended} saves without an end"))
            .help("look at its files, and at what ended the agent, such as its memory limit"));
    }
    let saved = save(state, store, id).await;
    drop(begun);
    saved
}

/// Saves checkpoint `id`, then deletes it from the store.
async fn save(state: &AgentState, store: &Arc<HandoffStore>, id: Ulid) -> Result<()> {
    let Some((stored, path)) = store.find(id) else { return Ok(()) };
    store.check_accepted(&stored.from, &stored.what.name)?;
    let task = tasks::save_handoff(state, id, &stored, &path)?;
    let outcome = task.ended().await;
    if store.find(id).is_none() {
        // The sender has saved it meanwhile.
        return Ok(());
    }
    let cause = match outcome {
        Outcome::Done(_) => None,
        Outcome::Failed(error) | Outcome::Cancelled(Some(error)) => Some(error),
        Outcome::Cancelled(None) => Some(Arc::new(Error::cancelled("it was stopped"))),
    };
    if let Some(cause) = &cause {
        let looked = Arc::clone(store);
        if !blocking(move || Ok(looked.has_lost(id))).await? {
            return Err(not_saved(&stored.what.name, cause));
        }
    }
    let what = if cause.is_none() { "is saved" } else { "was removed by hand" };
    tracing::info!(name = %stored.what.name, from = %stored.from, "handed-off checkpoint {what}");
    let store = Arc::clone(store);
    match blocking(move || store.release(id, None)).await {
        // The sender released it a moment earlier.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        released => released,
    }
}

fn not_saved(name: &Name, cause: &Arc<Error>) -> Error {
    let error = Error::new(cause.kind(), "cannot save a handed-off checkpoint").at(name).got(cause);
    // The error underneath tells a full disk from a limit of this agent.
    let error = error.source_of(cause);
    match cause.help_text() {
        Some(help) => error.help(help.to_owned()),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_by_itself_is_waited_for_and_what_lasts_is_not_tried_again() {
        let failed = |cause: Error| Failure::of(&not_saved(&"run/step-1".parse().unwrap(), &Arc::new(cause)));
        let of = |kind| failed(Error::new(kind, "it failed"));
        for passing in [ErrorKind::Unreachable, ErrorKind::Cancelled] {
            assert_eq!(of(passing), Failure::Passing);
        }
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let full = Error::io("cannot be written", std::path::Path::new("disk"), full);
        assert_eq!(failed(full), Failure::Passing);
        for counted in
            [ErrorKind::NotFound, ErrorKind::Damaged, ErrorKind::Conflict, ErrorKind::Denied, ErrorKind::Exhausted]
        {
            assert_eq!(of(counted), Failure::Counted);
        }
        assert_eq!(of(ErrorKind::Usage), Failure::Lasting, "a name that is no step stays none");
    }
}
