//! `[gates]`: pods with a scheduling gate start once their data is there.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::account_rules::AccountSection;
use super::cluster_access::AccessSection;
use super::quantity::Span;
use crate::agent::gates::GatesConfig;
use crate::error::Result;
use crate::toml_text::OneOrSeveral;

/// The section `[gates]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GatesSection {
    kubeconfig: Option<PathBuf>,
    namespace: Option<String>,
    lease: Option<Span>,
    holders: Option<OneOrSeveral>,
    warms: Option<usize>,
    held_names: Option<usize>,
    admit_after: Option<Span>,
    trust_domain: Option<String>,
    #[serde(default)]
    allow: Vec<AccountSection>,
}

impl GatesSection {
    /// Resolves relative paths from `folder`; `held_names` is the default of that setting.
    pub(super) fn settle(self, folder: &Path, held_names: usize) -> Result<GatesConfig> {
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
        Ok(GatesConfig { access: access.settle("gates", folder)?, admit_after: self.admit_after.map(|span| span.0) })
    }
}
