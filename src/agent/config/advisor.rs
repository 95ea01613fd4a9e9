//! `[advisor]`: hints, and who may ask for them in what way.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::agent::kube::{KubeRule, KubeRules};
use crate::agent::skypilot::{SkyPilotRule, SkyPilotRules};
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
    slurm: Vec<UsersSection>,
    #[serde(default)]
    skypilot: Vec<UsersSection>,
}

/// A section `[[advisor.slurm]]` or `[[advisor.skypilot]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct UsersSection {
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
        let rule = |section: &UsersSection| {
            let (users, names) = section.check("[[advisor.slurm]] permits nothing")?;
            Ok(SlurmRule { users, names })
        };
        let rules: Vec<SlurmRule> = self.slurm.iter().map(rule).collect::<Result<_>>()?;
        match (&self.slurm_hints, rules.is_empty()) {
            (Some(dir), false) => Ok(Some(SlurmHints { dir: folder.join(dir), rules })),
            (None, true) => Ok(None),
            _ => Err(Error::usage("[advisor] slurm_hints and [[advisor.slurm]] need each other")
                .help("set both, or neither")),
        }
    }

    /// Rules for tasks of `SkyPilot`.
    pub(super) fn skypilot(&self) -> Result<SkyPilotRules> {
        let rule = |section: &UsersSection| {
            let (users, names) = section.check("[[advisor.skypilot]] permits nothing")?;
            Ok(SkyPilotRule { users, names })
        };
        self.skypilot.iter().map(rule).collect::<Result<_>>().map(SkyPilotRules)
    }
}

impl UsersSection {
    /// Users and names; an error with the message `nothing` if there are none.
    fn check(&self, nothing: &'static str) -> Result<(BTreeSet<String>, Patterns)> {
        let users: BTreeSet<String> = self.users.clone().list().into_iter().collect();
        let is_user = |user: &String| !user.is_empty() && !user.contains([',', ' ', '\t', '\n']);
        if users.is_empty() || self.names.is_empty() || !users.iter().all(is_user) {
            return Err(Error::usage(nothing)
                .expected("at least one user, or `*`, and one pattern of names")
                .help("name them, or remove the entry"));
        }
        Ok((users, self.names.clone()))
    }
}
