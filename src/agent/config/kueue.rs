//! `[kueue]`: admission checks and clusters for the workloads of Kueue.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::account_rules::AccountSection;
use super::cluster_access::AccessSection;
use super::quantity::Span;
use crate::agent::kueue::KueueConfig;
use crate::error::{Error, Result};
use crate::toml_text::OneOrSeveral;

/// Default of the checks that the controller decides.
const CONTROLLER: &str = "towline.dev/warm";
/// Default of the time after which a workload gives its quota back.
const RETRY_AFTER: Duration = Duration::from_mins(5);
/// Default of the rounds in which clusters are nominated.
const ROUND: Duration = Duration::from_mins(5);

/// The section `[kueue]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KueueSection {
    kubeconfig: Option<PathBuf>,
    namespace: Option<String>,
    lease: Option<Span>,
    holders: Option<OneOrSeveral>,
    warms: Option<usize>,
    held_names: Option<usize>,
    controller: Option<String>,
    retry_after: Option<Span>,
    admit_after: Option<Span>,
    #[serde(default)]
    dispatch: bool,
    round: Option<Span>,
    trust_domain: Option<String>,
    #[serde(default)]
    allow: Vec<AccountSection>,
}

impl KueueSection {
    /// Resolves relative paths from `folder`; `held_names` is the default of that setting.
    pub(super) fn settle(self, folder: &Path, held_names: usize) -> Result<KueueConfig> {
        if self.round.is_some() && !self.dispatch {
            return Err(Error::usage("[kueue] round is set, but not dispatch").help("set both, or neither"));
        }
        let access = AccessSection {
            kubeconfig: self.kubeconfig,
            namespace: self.namespace,
            lease: self.lease,
            holders: self.holders,
            warms: self.warms,
            held_names: self.held_names.unwrap_or(held_names),
            trust_domain: self.trust_domain,
            allow: self.allow,
        };
        Ok(KueueConfig {
            access: access.settle("kueue", folder)?,
            controller: self.controller.unwrap_or_else(|| CONTROLLER.to_owned()),
            retry_after: self.retry_after.map_or(RETRY_AFTER, |span| span.0),
            admit_after: self.admit_after.map(|span| span.0),
            dispatch: self.dispatch.then(|| self.round.map_or(ROUND, |span| span.0)),
        })
    }
}
