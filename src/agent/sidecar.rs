//! What an agent does by itself, beside a training: first its inputs, then it is ready; it saves what the training writes, and looks out
//! for the machine's end.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::config::SidecarConfig;
use super::custody::Giver;
use super::errands::{self, AGAIN_AFTER, Restoring, Warming};
use super::house::House;
use super::notice::notice;
use super::transfers::Entry;
use super::view::Kind;
use super::view::{Standing, Transfer};
use crate::error::{Error, ErrorKind, Result};
use crate::ops::Refuge;
use crate::repository::Selector;
use crate::transfer::exchange::From;

/// Begins all that `told` says, as tasks of `doors`.
///
/// # Errors
/// Not found, if something is to be warmed and there is no cache; unreachable, if the agent is ending already.
pub(super) fn begin(house: &Arc<House>, told: SidecarConfig, doors: &mut JoinSet<()>) -> Result<()> {
    let SidecarConfig { warm, restore, watch, entrust, notice: provider } = told;
    if !warm.is_empty() {
        house.exchange()?;
    }
    if let Some(provider) = provider {
        let house = Arc::clone(house);
        doors.spawn(async move {
            tokio::select! {
                notice = notice(provider) => house.told_to_go(notice),
                () = house.leaving.cancelled() => {}
            }
        });
    }
    if warm.is_empty() && restore.is_empty() && watch.is_empty() {
        house.prepared();
        return Ok(());
    }
    let refuge: Option<Arc<dyn Refuge>> = match entrust {
        Some(to) => Some(Arc::new(Giver::new(Arc::clone(house), to)?)),
        None => None,
    };
    // First of all: what a training finishes from now on is saved, or named, whatever becomes of the inputs.
    let mut restored = Vec::with_capacity(watch.len());
    for watched in watch {
        restored.push(errands::watch(house, watched, refuge.clone())?);
    }
    let house = Arc::clone(house);
    doors.spawn(async move {
        let prepared = async {
            for name in warm {
                let warming = || {
                    let warming = Warming {
                        name: name.clone(),
                        below: None,
                        kind: Kind::Warm,
                        from: From::Anywhere,
                        or_repository: true,
                        pin: None,
                        dry_run: false,
                        caller: None,
                    };
                    errands::warm(&house, None, warming)
                };
                bring(&name, warming).await;
            }
            for (name, to) in restore {
                let restoring = || {
                    let (name, to) = (name.clone(), to.clone());
                    errands::restore(
                        &house,
                        None,
                        Restoring { name, below: None, to, overwrite: false, delete: false, only: Vec::new() },
                    )
                };
                bring(&name, restoring).await;
            }
            for restored in restored {
                restored.cancelled().await;
            }
            house.prepared();
        };
        tokio::select! {
            () = prepared => {}
            () = house.leaving.cancelled() => {}
        }
    });
    Ok(())
}

/// Begins an errand about `name` again and again until it is done. A run without the step that is chosen has not begun: there is nothing
/// to bring yet.
async fn bring(name: &Selector, begin: impl Fn() -> Result<Arc<Entry>>) {
    loop {
        let failed = match begin() {
            Ok(entry) => {
                entry.ended().await;
                match lacking(name, &entry.view()) {
                    None => return,
                    Some(failed) => failed,
                }
            }
            Err(error) => error,
        };
        tracing::warn!("not ready yet: {failed:?}");
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

/// Error that keeps an errand from having brought all of `name`.
fn lacking(name: &Selector, view: &Transfer) -> Option<Error> {
    let told = |of: Option<&serde_json::Value>, field: &str| of.and_then(|of| of.get(field)).cloned();
    match view.state {
        Standing::Done => {
            let missing = told(view.report.as_ref(), "missing").and_then(|missing| missing.as_u64()).unwrap_or(0);
            (missing > 0).then(|| Error::unreachable(format!("{missing} chunks could not be had")).at(name))
        }
        Standing::Cancelled => None,
        Standing::Running | Standing::Failed => {
            let kind = told(view.error.as_ref(), "kind");
            let kind = kind.and_then(|kind| kind.as_str().map(ErrorKind::from_word)).unwrap_or(ErrorKind::Other);
            if kind == ErrorKind::NotFound && matches!(name, Selector::Step { .. }) {
                tracing::info!("{name} has no step yet: there is nothing to bring");
                return None;
            }
            let message = told(view.error.as_ref(), "message").unwrap_or_default();
            Some(Error::new(kind, format!("an input is not there: {message}")).at(name))
        }
    }
}
