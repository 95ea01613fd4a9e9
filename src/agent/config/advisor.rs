//! `[advisor]`: hints, and who may ask for them in what way.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::agent::kube::{KubeRule, KubeRules};
use crate::agent::slurm::{SlurmHints, SlurmRule};
use crate::error::{Error, Result};
use crate::pattern::Patterns;
use crate::toml_text::OneOrSeveral;

/// A section `[advisor]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AdvisorSection {
    pub(super) sites: PathBuf,
    pub(super) prices: Option<PathBuf>,
    #[serde(default)]
    kube: Vec<KubeSection>,
    slurm_hints: Option<PathBuf>,
    #[serde(default)]
    slurm: Vec<SlurmSection>,
}

/// A section `[[advisor.slurm]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SlurmSection {
    users: OneOrSeveral,
    names: Patterns,
}

/// A section `[[advisor.kube]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KubeSection {
    namespaces: Patterns,
    names: Patterns,
}

impl AdvisorSection {
    /// Rules for pods.
    pub(super) fn kube(&self) -> Result<KubeRules> {
        let rule = |KubeSection { namespaces, names }: &KubeSection| {
            if namespaces.is_empty() || names.is_empty() {
                return Err(Error::usage("[[advisor.kube]] permits nothing")
                    .expected("at least one pattern in each of namespaces and names")
                    .help("name them, or remove the entry"));
            }
            Ok(KubeRule { namespaces: namespaces.clone(), names: names.clone() })
        };
        self.kube.iter().map(rule).collect::<Result<_>>().map(KubeRules)
    }

    /// Files for Slurm, if there are any.
    pub(super) fn slurm(&self, folder: &Path) -> Result<Option<SlurmHints>> {
        let rule = |SlurmSection { users, names }: SlurmSection| {
            let users: BTreeSet<String> = users.list().into_iter().collect();
            let is_user = |user: &String| !user.is_empty() && !user.contains([',', ' ', '\t', '\n']);
            if users.is_empty() || names.is_empty() || !users.iter().all(is_user) {
                return Err(Error::usage("[[advisor.slurm]] permits nothing")
                    .expected("at least one user, or `*`, and one pattern of names")
                    .help("name them, or remove the entry"));
            }
            Ok(SlurmRule { users, names })
        };
        let rules: Vec<SlurmRule> = self.slurm.iter().cloned().map(rule).collect::<Result<_>>()?;
        match (&self.slurm_hints, rules.is_empty()) {
            (Some(dir), false) => Ok(Some(SlurmHints { dir: folder.join(dir), rules })),
            (None, true) => Ok(None),
            _ => Err(Error::usage("[advisor] slurm_hints and [[advisor.slurm]] need each other")
                .help("set both, or neither")),
        }
    }
}
