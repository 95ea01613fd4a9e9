//! `[kueue]`: admission checks and clusters for the workloads of Kueue.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::account_rules::AccountSection;
use super::quantity::Span;
use crate::agent::kueue::KueueConfig;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::toml_text::OneOrSeveral;

/// Default time of a lease without a renewal, as components of Kubernetes have it
/// (<https://kubernetes.io/docs/reference/command-line-tools-reference/kube-controller-manager/>, `--leader-elect-lease-duration`).
const LEASE: Duration = Duration::from_secs(15);
/// Default of the checks that the controller decides.
const CONTROLLER: &str = "towline.dev/warm";
/// Default of the time after which a workload gives its quota back.
const RETRY_AFTER: Duration = Duration::from_mins(5);
/// Default of warms at a time: half of the tasks that an agent runs for one other.
const WARMS: usize = 8;
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
    /// Resolves relative paths from `folder`.
    pub(super) fn settle(self, folder: &Path) -> Result<KueueConfig> {
        if self.allow.is_empty() {
            return Err(Error::usage("[kueue] without [[kueue.allow]] warms nothing")
                .expected("the names that workloads may wait for, by namespace and service account"));
        }
        if let Some(domain) = &self.trust_domain {
            Identity::spiffe(&format!("spiffe://{domain}/ns/any/sa/any")).map_err(|error| error.at("trust_domain"))?;
        }
        if self.round.is_some() && !self.dispatch {
            return Err(Error::usage("[kueue] round is set, but not dispatch").help("set both, or neither"));
        }
        let lease = self.lease.map_or(LEASE, |span| span.0);
        if lease.as_secs() == 0 || lease.subsec_nanos() > 0 {
            return Err(Error::usage("[kueue] lease is malformed").expected("whole seconds, as in a Lease"));
        }
        if self.warms == Some(0) {
            return Err(Error::usage("[kueue] warms is 0").expected("1 or more"));
        }
        let holder = |text: String| {
            let parts = text.split_once('/').ok_or_else(|| Error::usage("agent is malformed").expected("SITE/AGENT"));
            let (site, agent) = parts.map_err(|error| error.at("[kueue] holders").got(&text))?;
            Identity::new(site, agent).map_err(|error| error.at("[kueue] holders"))
        };
        let holders = self.holders.map(OneOrSeveral::list).unwrap_or_default();
        Ok(KueueConfig {
            kubeconfig: self.kubeconfig.map(|path| folder.join(path)),
            namespace: self.namespace,
            lease,
            holders: holders.into_iter().map(holder).collect::<Result<_>>()?,
            warms: self.warms.unwrap_or(WARMS),
            controller: self.controller.unwrap_or_else(|| CONTROLLER.to_owned()),
            retry_after: self.retry_after.map_or(RETRY_AFTER, |span| span.0),
            admit_after: self.admit_after.map(|span| span.0),
            dispatch: self.dispatch.then(|| self.round.map_or(ROUND, |span| span.0)),
            trust_domain: self.trust_domain,
            allow: AccountSection::rules(self.allow, "kueue.allow")?,
        })
    }
}
