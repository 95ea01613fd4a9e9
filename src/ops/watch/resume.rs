//! Bringing the latest step back before anything is watched, so that the framework finds it and goes on.

use std::path::Path;

use super::candidate::{Class, Tracker, classify};
use super::events::WatchEvent;
use super::look::Looker;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Form;
use crate::ops::RestoreOptions;
use crate::repository::{Choice, Name, Repository, Saved, Selector};
use crate::work::blocking;

/// The label that says what a step was called in the watched folder.
pub(super) const ENTRY_LABEL: &str = "watch.entry";
/// The label that says which file beside it named it.
pub(super) const TRACKER_LABEL: &str = "watch.tracker";

impl Repository {
    /// Restores the latest step of `run` into `dir`, if that holds no checkpoint; returns the entry's name. It appears under
    /// it when it is whole.
    pub(super) async fn resume(
        &self,
        dir: &Path,
        run: &Name,
        tell: &mut (dyn FnMut(WatchEvent) + Send),
    ) -> Result<Option<String>> {
        let mut looker = Looker::new(dir);
        let held = blocking(move || looker.look()).await?.unwrap_or_default();
        if let Some(entry) = held.checkpoints.into_keys().chain(held.others.into_keys()).next() {
            tell(WatchEvent::NotRestored { reason: format!("the folder holds checkpoints already: {entry}") });
            return Ok(None);
        }
        let latest = Selector::Step { run: run.clone(), choice: Choice::Latest };
        let name = match self.resolve(&latest).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                tell(WatchEvent::NotRestored { reason: "the run has no step yet".to_owned() });
                return Ok(None);
            }
            name => name?,
        };
        let saved = self.saved(&name).await?;
        let entry = entry_name(&saved)?;
        // Its dot keeps frameworks from taking it for a checkpoint, and a killed restore goes on in it.
        let (under_way, place) = (dir.join(format!(".{entry}.towline-tmp")), dir.join(&entry));
        let options = RestoreOptions { overwrite: true, delete: true, may_empty: true, ..RestoreOptions::default() };
        let report = self.restore(&name, None, &under_way, &options).await?;
        let tracker = tracker(&saved, &entry);
        let tracker = tracker.map(|tracker| (dir.join(tracker.name()), text(tracker, &saved, &entry)));
        blocking(move || {
            let fault = |error| Error::io("cannot put a restored checkpoint in its place", &place, error);
            std::fs::rename(&under_way, &place).map_err(fault)?;
            let Some((path, text)) = tracker else { return Ok(()) };
            let fault = |error| Error::io("cannot write the file that names the latest checkpoint", &path, error);
            std::fs::write(&path, text).map_err(fault)
        })
        .await?;
        tell(WatchEvent::Restored { entry: entry.clone(), report });
        Ok(Some(entry))
    }
}

/// Name of the step's folder: the original one, or one that suits its contents.
fn entry_name(saved: &Saved) -> Result<String> {
    let manifest = &saved.manifest;
    if let Some(label) = manifest.labels.get(ENTRY_LABEL) {
        // A writer of the repository must not choose where files go.
        if label.contains(['/', '\0']) || !matches!(classify(label, manifest.form == Form::Folder), Class::Step(_)) {
            return Err(Error::damaged("a label does not name a checkpoint")
                .at(&saved.name)
                .got(format!("{ENTRY_LABEL}={label:?}"))
                .help("towline restore brings it back under another name"));
        }
        return Ok(label.clone());
    }
    let file = manifest.entries.first().filter(|_| manifest.form == Form::File);
    if let Some(name) = file.and_then(|entry| String::from_utf8(entry.path.clone()).ok()) {
        return Ok(name);
    }
    let step = saved.name.step().map(|(_, step)| step).unwrap_or_default();
    let transformers = manifest.entry(b"trainer_state.json").is_some();
    Ok(if transformers { format!("checkpoint-{step}") } else { format!("step-{step}") })
}

fn tracker(saved: &Saved, entry: &str) -> Option<Tracker> {
    let label = saved.manifest.labels.get(TRACKER_LABEL)?;
    Tracker::named(label).filter(|tracker| tracker.covers(entry))
}

fn text(tracker: Tracker, saved: &Saved, entry: &str) -> String {
    tracker.text(entry, saved.name.step().map(|(_, step)| step).unwrap_or_default())
}
