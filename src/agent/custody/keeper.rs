//! Saves what is kept for others, if they do not say that they have.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use ulid::Ulid;

use super::shelf::Shelf;
use crate::agent::errands;
use crate::agent::house::House;
use crate::agent::view::{Aside, Standing};
use crate::error::{Error, ErrorKind, Result};
use crate::work::blocking;

/// Pause before a failed save is tried again: first, and at most.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Longest sleep.
const LONG: Duration = Duration::from_hours(1);

/// When something that is kept is to be saved, and how long to wait if that fails.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: Instant,
    again: Duration,
    /// Failed saves of the class [`Failure::Counted`].
    failed: u32,
}

/// Settings of saving what is kept.
#[derive(Clone, Copy, Debug)]
pub(in crate::agent) struct Keeping {
    /// Time that the giver has to save it itself.
    pub(in crate::agent) wait: Duration,
    /// Failed saves before it is set aside.
    pub(in crate::agent) tries: u32,
}

/// Classes of failed saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// Retried without limit: the store is away or full, or this agent ends.
    Passing,
    /// Retried up to a limit.
    Counted,
    /// Never retried: it would fail again.
    Lasting,
}

impl Failure {
    fn of(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Unreachable | ErrorKind::Cancelled | ErrorKind::Exhausted => Self::Passing,
            ErrorKind::Usage | ErrorKind::Unsupported => Self::Lasting,
            _ => Self::Counted,
        }
    }
}

/// Saves all that has been on `shelf` for a while; what is there at the start, at once: it has been there for a while, and saving what
/// somebody else saves does no harm. Then it is let go of. What cannot be saved is set aside.
///
/// # Cancel safety
/// Safe: what is kept stays.
pub(in crate::agent) async fn keep(house: Arc<House>, shelf: Arc<Shelf>, keeping: Keeping) {
    let (mut dues, mut wait_now) = (BTreeMap::<Ulid, Due>::new(), Duration::ZERO);
    loop {
        let to_save = shelf.to_save();
        dues.retain(|known, _| to_save.iter().any(|(id, _)| id == known));
        for (id, urgent) in to_save {
            let due = |wait| Due { at: Instant::now() + wait, again: AGAIN.0, failed: 0 };
            if urgent {
                dues.insert(id, due(Duration::ZERO));
            }
            dues.entry(id).or_insert_with(|| due(wait_now));
        }
        wait_now = keeping.wait;
        let next = dues.iter().min_by_key(|(_, due)| due.at).map(|(id, due)| (*id, *due));
        let at = next.map_or_else(|| Instant::now() + LONG, |(_, due)| due.at);
        tokio::select! {
            () = sleep_until(at) => {}
            () = shelf.changed.notified() => continue,
        }
        let Some((id, due)) = next else { continue };
        if let Err(error) = save(&house, &shelf, id).await {
            let failure = Failure::of(error.kind());
            let failed = due.failed + u32::from(failure != Failure::Passing);
            if failure == Failure::Lasting || failed >= keeping.tries {
                set_aside(&house, &shelf, id, failed, &error).await;
                continue;
            }
            tracing::warn!("what is kept as {id} is not saved yet: {error:?}");
            let again = (due.again * 2).min(AGAIN.1);
            dues.insert(id, Due { at: Instant::now() + due.again, again, failed });
        }
    }
}

/// Sets aside what is kept as `id`, after so many saves failed, the last one with `error`.
async fn set_aside(house: &House, shelf: &Arc<Shelf>, id: Ulid, tries: u32, error: &Error) {
    let cause = error.help_text().map_or_else(String::new, |help| format!("{help}; then "));
    let aside = Aside {
        since: house.now().to_string(),
        tries,
        kind: error.kind().word().to_owned(),
        error: error.to_string(),
        help: format!("{cause}towline custody retry {id}; or give it up: towline custody drop {id}"),
    };
    tracing::error!("what is kept as {id} cannot be saved, and is set aside: {error:?}; what to do: {}", aside.help);
    let shelf = Arc::clone(shelf);
    match blocking(move || shelf.set_aside(id, aside)).await {
        Ok(()) => {}
        // Whoever gave it has saved it meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => tracing::error!("that {id} was set aside is not known after a restart: {error:?}"),
    }
}

/// Saves what is kept as `id`, and lets go of it.
async fn save(house: &House, shelf: &Arc<Shelf>, id: Ulid) -> Result<()> {
    let Some((held, path)) = shelf.find(id) else { return Ok(()) };
    shelf.check_accepted(&held.from, &held.what.name)?;
    let entry = errands::deliver(house, id, &held, &path)?;
    entry.ended().await;
    if shelf.find(id).is_none() {
        // Whoever gave it has saved it meanwhile.
        return Ok(());
    }
    let (view, looked) = (entry.view(), Arc::clone(shelf));
    if view.state != Standing::Done && !blocking(move || Ok(looked.has_lost(id))).await? {
        let said = |field: &str| view.error.as_ref().and_then(|error| error.get(field)).and_then(|said| said.as_str());
        let kind = said("kind").map_or(ErrorKind::Cancelled, ErrorKind::from_word);
        let error = Error::new(kind, "a save for another agent came to no good end")
            .at(&held.what.name)
            .got(said("message").unwrap_or("it was stopped"));
        return Err(said("help").map(str::to_owned).into_iter().fold(error, Error::help));
    }
    let what = if view.state == Standing::Done { "is saved" } else { "was taken away by hand" };
    tracing::info!(name = %held.what.name, from = %held.from, "what was in custody {what}");
    let shelf = Arc::clone(shelf);
    match blocking(move || shelf.release(id, None)).await {
        // Whoever gave it was a moment earlier.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        released => released,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_by_itself_is_waited_for_and_what_lasts_is_not_tried_again() {
        for passing in [ErrorKind::Unreachable, ErrorKind::Cancelled, ErrorKind::Exhausted] {
            assert_eq!(Failure::of(passing), Failure::Passing);
        }
        for counted in [ErrorKind::NotFound, ErrorKind::Damaged, ErrorKind::Conflict, ErrorKind::Denied] {
            assert_eq!(Failure::of(counted), Failure::Counted);
        }
        assert_eq!(Failure::of(ErrorKind::Usage), Failure::Lasting, "a name that is no step stays none");
    }
}
