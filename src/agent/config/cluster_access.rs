//! Settings that `[kueue]` and `[gates]` share.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::account_rules::AccountSection;
use super::quantity::Span;
use crate::agent::controller::ClusterAccess;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::toml_text::OneOrSeveral;

/// Default time of a lease without a renewal, as components of Kubernetes have it
/// (<https://kubernetes.io/docs/reference/command-line-tools-reference/kube-controller-manager/>, `--leader-elect-lease-duration`).
const LEASE: Duration = Duration::from_secs(15);
/// Default of warms at a time: half of the tasks that an agent runs for one other.
const WARMS: usize = 8;
/// Default of what the controllers of an agent hold at a time: as many pins as an agent keeps for one other.
pub(super) const HELD_NAMES: usize = 256;

/// These settings, as they are written. Sections repeat them, as `deny_unknown_fields` does not work with `flatten`
/// (<https://serde.rs/container-attrs.html#deny_unknown_fields>).
#[derive(Debug)]
pub(super) struct AccessSection {
    pub(super) kubeconfig: Option<PathBuf>,
    pub(super) namespace: Option<String>,
    pub(super) lease: Option<Span>,
    pub(super) holders: Option<OneOrSeveral>,
    pub(super) warms: Option<usize>,
    pub(super) held_names: usize,
    pub(super) trust_domain: Option<String>,
    pub(super) allow: Vec<AccountSection>,
}

impl AccessSection {
    /// Resolves relative paths from `folder`; `section` is the name of the section.
    ///
    /// # Errors
    /// Usage, with the setting.
    pub(super) fn settle(self, section: &str, folder: &Path) -> Result<ClusterAccess> {
        let at = |setting: &str| format!("[{section}] {setting}");
        if self.allow.is_empty() {
            return Err(Error::usage(format!("[{section}] without [[{section}.allow]] warms nothing"))
                .expected("the names that pods may wait for, by namespace and service account"));
        }
        if let Some(domain) = &self.trust_domain {
            Identity::spiffe(&format!("spiffe://{domain}/ns/any/sa/any")).map_err(|error| error.at("trust_domain"))?;
        }
        let lease = self.lease.map_or(LEASE, |span| span.0);
        if lease.as_secs() == 0 || lease.subsec_nanos() > 0 {
            let error = Error::usage(format!("{} is malformed", at("lease")));
            return Err(error.expected("whole seconds, as in a Lease"));
        }
        for (setting, count) in [("warms", self.warms), ("held_names", Some(self.held_names))] {
            if count == Some(0) {
                return Err(Error::usage(format!("{} is 0", at(setting))).expected("1 or more"));
            }
        }
        let holder = |text: String| {
            let parts = text.split_once('/').ok_or_else(|| Error::usage("agent is malformed").expected("SITE/AGENT"));
            let (site, agent) = parts.map_err(|error| error.at(at("holders")).got(&text))?;
            Identity::new(site, agent).map_err(|error| error.at(at("holders")))
        };
        let holders = self.holders.map(OneOrSeveral::list).unwrap_or_default();
        Ok(ClusterAccess {
            kubeconfig: self.kubeconfig.map(|path| folder.join(path)),
            namespace: self.namespace,
            lease,
            holders: holders.into_iter().map(holder).collect::<Result<_>>()?,
            warms: self.warms.unwrap_or(WARMS),
            held_names: self.held_names,
            trust_domain: self.trust_domain,
            allow: AccountSection::rules(self.allow, &format!("{section}.allow"))?,
        })
    }
}
