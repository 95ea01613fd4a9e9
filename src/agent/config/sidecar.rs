//! What an agent does by itself, beside a training: bring its inputs, save what it writes, look out for the machine's end.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::quantity::Span;
use crate::agent::elsewhere::At;
use crate::agent::notice::Provider;
use crate::error::Result;
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
    entrust: Option<String>,
    notice: Option<Looked>,
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
}

/// Whose notices are looked for.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Looked {
    None,
    #[serde(untagged)]
    Of(Provider),
}

/// What an agent does by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SidecarConfig {
    /// What is brought into the cache before the agent is ready.
    pub warm: Vec<Selector>,
    /// What is restored before it is, and where to.
    pub restore: Vec<(Selector, PathBuf)>,
    /// The folders whose checkpoints are saved.
    pub watch: Vec<Watched>,
    /// Whom checkpoints are given to when there may be no time to save them.
    pub entrust: Option<At>,
    /// Whose notices are looked for.
    pub notice: Option<Provider>,
}

/// A folder that a training writes its checkpoints to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    /// The folder.
    pub folder: PathBuf,
    /// The run whose steps they are.
    pub run: Name,
    /// How long nothing in a checkpoint may change before it is whole.
    pub settle: Duration,
}

impl SidecarSection {
    /// Whether it has something to do with other agents.
    pub(super) fn entrusts(&self) -> bool {
        self.entrust.is_some()
    }

    /// Paths that are relative count from `folder`.
    pub(super) fn settle(self, folder: &Path) -> Result<SidecarConfig> {
        let restored = |section: RestoreSection| Ok((section.name.parse()?, folder.join(section.to)));
        let watched = |section: WatchSection| {
            let settle = section.settle.map_or(SETTLE, |span| span.0);
            Ok(Watched { folder: folder.join(section.folder), run: section.run.parse()?, settle })
        };
        Ok(SidecarConfig {
            warm: self.warm.iter().map(|name| name.parse()).collect::<Result<_>>()?,
            restore: self.restore.into_iter().map(restored).collect::<Result<_>>()?,
            watch: self.watch.into_iter().map(watched).collect::<Result<_>>()?,
            entrust: self.entrust.as_deref().map(str::parse).transpose()?,
            notice: self.notice.and_then(|looked| match looked {
                Looked::None => None,
                Looked::Of(provider) => Some(provider),
            }),
        })
    }
}
