//! Section `[sidecar]`: inputs to prepare, folders to watch, preemption notices.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::quantity::Span;
use crate::agent::preemption::Provider;
use crate::agent::routing::AgentSelector;
use crate::codec::Compression;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::ops::is_checkpoint;
use crate::selector::Selector;

/// Default of `towline watch`.
const SETTLE: Duration = Duration::from_secs(10);

/// The section `[sidecar]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SidecarSection {
    #[serde(default)]
    warm: Vec<String>,
    #[serde(default)]
    stage: Vec<String>,
    #[serde(default)]
    restore: Vec<RestoreSection>,
    #[serde(default)]
    watch: Vec<WatchSection>,
    handoff_to: Option<String>,
    preemption: Option<NoticeProvider>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RestoreSection {
    name: String,
    to: PathBuf,
    #[serde(default)]
    overwrite: bool,
    #[serde(default)]
    delete: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WatchSection {
    folder: PathBuf,
    run: String,
    settle: Option<Span>,
    restore_latest: Option<bool>,
    compression: Option<String>,
}

/// Provider of preemption notices, or `none`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum NoticeProvider {
    None,
    Aws,
    Gcp,
    Azure,
}

/// Settings of the sidecar.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SidecarConfig {
    /// Names that are fetched into the cache before the agent is ready.
    pub warm: Vec<Selector>,
    /// Names whose tensors are read into memory before the agent is ready, if they fit.
    pub stage: Vec<Selector>,
    /// Names that are restored before the agent is ready.
    pub restore: Vec<RestoredInput>,
    /// Watched folders.
    pub watch: Vec<WatchedFolder>,
    /// Agents that receive checkpoints that may not be saved in time.
    pub handoff_to: Option<AgentSelector>,
    /// Provider of preemption notices.
    pub preemption: Option<Provider>,
}

/// A name that is restored before the agent is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredInput {
    /// The name.
    pub name: Selector,
    /// Its destination.
    pub to: PathBuf,
    /// Replace files that differ there, as those of an earlier step.
    pub overwrite: bool,
    /// Remove what the tree lacks there.
    pub delete: bool,
}

/// A folder that a training writes its checkpoints to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchedFolder {
    /// The folder.
    pub folder: PathBuf,
    /// Run to save the checkpoints to.
    pub run: Name,
    /// Time without any change after which a checkpoint is complete.
    pub settle: Duration,
    /// Restore the run's latest step first, into a folder that holds no checkpoint.
    pub restore_latest: bool,
    /// Compression of what is saved.
    pub compression: Compression,
}

impl SidecarSection {
    /// True if any setting needs other agents.
    pub(super) fn hands_off(&self) -> bool {
        self.handoff_to.is_some()
    }

    /// Refuses inputs that need what the agent lacks: a cache, or memory for tensors.
    pub(super) fn check_inputs(&self, has_cache: bool, has_staging: bool) -> Result<()> {
        if !has_cache && !self.warm.is_empty() {
            return Err(Error::usage("[sidecar] warm is set, but no cache").help("set [cache] dir and capacity"));
        }
        if !has_staging && !self.stage.is_empty() {
            return Err(Error::usage("[sidecar] stage is set, but no memory for tensors")
                .help("set [staging] memory (docs/staging.md)"));
        }
        Ok(())
    }

    /// Resolves relative paths from `folder`.
    pub(super) fn settle(self, folder: &Path) -> Result<SidecarConfig> {
        let restored = |section: RestoreSection| {
            let RestoreSection { name, to, overwrite, delete } = section;
            Ok(RestoredInput { name: name.parse()?, to: folder.join(to), overwrite, delete })
        };
        let watched = |section: WatchSection| {
            let settle = section.settle.map_or(SETTLE, |span| span.0);
            let restore_latest = section.restore_latest.unwrap_or(true);
            let run: Name = section.run.parse()?;
            run.check_run()?;
            let compression = section.compression.as_deref().map(str::parse).transpose()?.unwrap_or_default();
            Ok(WatchedFolder { folder: folder.join(section.folder), run, settle, restore_latest, compression })
        };
        let restore: Vec<_> = self.restore.into_iter().map(restored).collect::<Result<_>>()?;
        let watch: Vec<_> = self.watch.into_iter().map(watched).collect::<Result<_>>()?;
        restore.iter().try_for_each(|input| keeps_out_of_checkpoints(&input.to, &watch))?;
        keeps_other_folders(&restore, &watch)?;
        for (at, watched) in watch.iter().enumerate() {
            if watch[..at].iter().any(|earlier| earlier.run == watched.run) {
                return Err(Error::usage(
                    "two [[sidecar.watch]] have the same run: each would replace steps of the other",
                )
                .got(&watched.run)
                .help("give each folder a run of its own"));
            }
        }
        Ok(SidecarConfig {
            warm: self.warm.iter().map(|name| name.parse()).collect::<Result<_>>()?,
            stage: self.stage.iter().map(|name| name.parse()).collect::<Result<_>>()?,
            restore,
            watch,
            handoff_to: self.handoff_to.as_deref().map(str::parse).transpose()?,
            preemption: match self.preemption {
                None | Some(NoticeProvider::None) => None,
                Some(NoticeProvider::Aws) => Some(Provider::Aws),
                Some(NoticeProvider::Gcp) => Some(Provider::Gcp),
                Some(NoticeProvider::Azure) => Some(Provider::Azure),
            },
        })
    }
}

/// Refuses to remove the folders of other settings, which the tree of a restore lacks.
fn keeps_other_folders(restore: &[RestoredInput], watch: &[WatchedFolder]) -> Result<()> {
    for (at, input) in restore.iter().enumerate().filter(|(_, input)| input.delete) {
        let others = restore.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| &other.to);
        let mut folders = others.chain(watch.iter().map(|watched| &watched.folder));
        if let Some(within) = folders.find(|folder| folder.starts_with(&input.to)) {
            return Err(Error::usage("[sidecar] restore with `delete` would remove another folder of [sidecar]")
                .at(input.to.display())
                .got(within.display())
                .help("restore to a folder of its own, or leave `delete` out"));
        }
    }
    Ok(())
}

/// Refuses to restore into a watched folder or one of its checkpoints: the training's next step changes the files there, and
/// the watch would save a half restored checkpoint.
fn keeps_out_of_checkpoints(to: &Path, watch: &[WatchedFolder]) -> Result<()> {
    for watched in watch {
        let Ok(within) = to.strip_prefix(&watched.folder) else { continue };
        let entry = within.components().next().and_then(|first| first.as_os_str().to_str());
        if entry.is_none_or(is_checkpoint) {
            return Err(Error::usage("[sidecar] restore writes where [[sidecar.watch]] looks for checkpoints")
                .expected(format!("a folder outside of {}", watched.folder.display()))
                .got(to.display())
                .help("remove this `restore`: the watch restores the latest step by itself; or watch another folder"));
        }
    }
    Ok(())
}
