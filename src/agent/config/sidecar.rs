//! Section `[sidecar]`: inputs to prepare, folders to watch, preemption notices.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::quantity::Span;
use crate::agent::preemption::Provider;
use crate::agent::routing::AgentSelector;
use crate::error::{Error, Result};
use crate::ops::is_checkpoint;
use crate::repository::{Name, Selector};

/// As `towline watch` has it.
const SETTLE: Duration = Duration::from_secs(10);

/// The section `[sidecar]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SidecarSection {
    #[serde(default)]
    warm: Vec<String>,
    #[serde(default)]
    restore: Vec<RestoreSection>,
    #[serde(default)]
    watch: Vec<WatchSection>,
    handoff_to: Option<String>,
    preemption: Option<Looked>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RestoreSection {
    name: String,
    to: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WatchSection {
    folder: PathBuf,
    run: String,
    settle: Option<Span>,
    restore_latest: Option<bool>,
}

/// Provider whose notices are watched.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Looked {
    None,
    #[serde(untagged)]
    Of(Provider),
}

/// Settings of the sidecar.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SidecarConfig {
    /// Names that are brought into the cache before the agent is ready.
    pub warm: Vec<Selector>,
    /// Names that are restored before it is, with their destinations.
    pub restore: Vec<(Selector, PathBuf)>,
    /// The folders whose checkpoints are saved.
    pub watch: Vec<Watched>,
    /// Agents that checkpoints are handed off to when they may not be saved in time.
    pub handoff_to: Option<AgentSelector>,
    /// Provider whose notices are watched.
    pub preemption: Option<Provider>,
}

/// A folder that a training writes its checkpoints to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    /// The folder.
    pub folder: PathBuf,
    /// The run whose steps they are.
    pub run: Name,
    /// Time without any change after which a checkpoint is complete.
    pub settle: Duration,
    /// Restore the run's latest step first, into a folder that holds no checkpoint.
    pub restore_latest: bool,
}

impl SidecarSection {
    /// Whether it has something to do with other agents.
    pub(super) fn hands_off(&self) -> bool {
        self.handoff_to.is_some()
    }

    /// Paths that are relative count from `folder`.
    pub(super) fn settle(self, folder: &Path) -> Result<SidecarConfig> {
        let restored = |section: RestoreSection| Ok((section.name.parse()?, folder.join(section.to)));
        let watched = |section: WatchSection| {
            let settle = section.settle.map_or(SETTLE, |span| span.0);
            let restore_latest = section.restore_latest.unwrap_or(true);
            Ok(Watched { folder: folder.join(section.folder), run: section.run.parse()?, settle, restore_latest })
        };
        let restore: Vec<_> = self.restore.into_iter().map(restored).collect::<Result<_>>()?;
        let watch: Vec<_> = self.watch.into_iter().map(watched).collect::<Result<_>>()?;
        restore.iter().try_for_each(|(_, to)| keeps_out_of_checkpoints(to, &watch))?;
        Ok(SidecarConfig {
            warm: self.warm.iter().map(|name| name.parse()).collect::<Result<_>>()?,
            restore,
            watch,
            handoff_to: self.handoff_to.as_deref().map(str::parse).transpose()?,
            preemption: self.preemption.and_then(|looked| match looked {
                Looked::None => None,
                Looked::Of(provider) => Some(provider),
            }),
        })
    }
}

/// Refuses to restore over a watched folder, or as one of its checkpoints: after the next step the files there differ from what is
/// restored, and the watch would save what it finds half restored.
fn keeps_out_of_checkpoints(to: &Path, watch: &[Watched]) -> Result<()> {
    for watched in watch {
        let Ok(within) = to.strip_prefix(&watched.folder) else { continue };
        let entry = within.components().next().and_then(|first| first.as_os_str().to_str());
        if entry.is_none_or(is_checkpoint) {
            return Err(Error::usage("[sidecar] restore writes where [[sidecar.watch]] looks for checkpoints")
                .expected(format!("a folder outside of {}", watched.folder.display()))
                .got(to.display())
                .help("remove this `restore`: the watch restores the latest step by itself; or route another folder"));
        }
    }
    Ok(())
}
