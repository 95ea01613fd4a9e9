//! Saves what is kept for others, if they do not say that they have.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use ulid::Ulid;

use super::shelf::Shelf;
use crate::agent::errands;
use crate::agent::house::House;
use crate::agent::view::Standing;
use crate::error::{Error, ErrorKind, Result};
use crate::work::blocking;

/// How long until a save that failed is tried again: first, and at most.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// How long it sleeps if nothing happens.
const LONG: Duration = Duration::from_hours(1);

/// When something that is kept is to be saved, and how long to wait if that fails.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: Instant,
    again: Duration,
}

/// Saves all that has been on `shelf` for `wait`; what is there at the start, at once: it has been there for a while, and saving what
/// somebody else saves does no harm. Then it is let go of.
///
/// # Cancel safety
/// Safe: what is kept stays.
pub(in crate::agent) async fn keep(house: Arc<House>, shelf: Arc<Shelf>, wait: Duration) {
    let (mut dues, mut wait_now) = (BTreeMap::<Ulid, Due>::new(), Duration::ZERO);
    loop {
        let held: Vec<Ulid> = shelf.list(None).into_iter().map(|(id, _)| id).collect();
        dues.retain(|id, _| held.contains(id));
        for id in held {
            dues.entry(id).or_insert_with(|| Due { at: Instant::now() + wait_now, again: AGAIN.0 });
        }
        wait_now = wait;
        let next = dues.iter().min_by_key(|(_, due)| due.at).map(|(id, due)| (*id, *due));
        let at = next.map_or_else(|| Instant::now() + LONG, |(_, due)| due.at);
        tokio::select! {
            () = sleep_until(at) => {}
            () = shelf.changed.notified() => continue,
        }
        let Some((id, due)) = next else { continue };
        if let Err(error) = save(&house, &shelf, id).await {
            tracing::warn!("what is kept as {id} is not saved yet: {error:?}");
            let again = (due.again * 2).min(AGAIN.1);
            dues.insert(id, Due { at: Instant::now() + due.again, again });
        }
    }
}

/// Saves what is kept as `id`, and lets go of it.
async fn save(house: &House, shelf: &Arc<Shelf>, id: Ulid) -> Result<()> {
    let Some((held, path)) = shelf.find(id) else { return Ok(()) };
    let entry = errands::deliver(house, id, &held, &path)?;
    entry.ended().await;
    if shelf.find(id).is_none() {
        // Whoever gave it has saved it meanwhile.
        return Ok(());
    }
    let (view, looked) = (entry.view(), Arc::clone(shelf));
    if view.state != Standing::Done && !blocking(move || Ok(looked.has_lost(id))).await? {
        let message = view.error.as_ref().and_then(|error| error.get("message")).and_then(|message| message.as_str());
        return Err(Error::unreachable("a save for another agent came to no good end")
            .at(&held.what.name)
            .got(message.unwrap_or("it was stopped")));
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
