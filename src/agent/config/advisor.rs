//! `[advisor]`: hints, and who may ask for them in what way.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::agent::kube::{KubeRule, KubeRules};
use crate::agent::slurm::SlurmHints;
use crate::agent::user_rules::{UserRule, UserRules};
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
        let rules = rules(&self.slurm, "[[advisor.slurm]] permits nothing")?;
        match (&self.slurm_hints, rules.0.is_empty()) {
            (Some(dir), false) => Ok(Some(SlurmHints { dir: folder.join(dir), rules })),
            (None, true) => Ok(None),
            _ => Err(Error::usage("[advisor] slurm_hints and [[advisor.slurm]] need each other")
                .help("set both, or neither")),
        }
    }

    /// Rules for tasks of `SkyPilot`.
    pub(super) fn skypilot(&self) -> Result<UserRules> {
        rules(&self.skypilot, "[[advisor.skypilot]] permits nothing")
    }
}

/// Rules of `sections`; an error with the message `nothing` for one without users or names.
fn rules(sections: &[UsersSection], nothing: &'static str) -> Result<UserRules> {
    let rule = |section: &UsersSection| {
        let users: BTreeSet<String> = section.users.clone().list().into_iter().collect();
        let is_user = |user: &String| !user.is_empty() && !user.contains([',', ' ', '\t', '\n']);
        if users.is_empty() || section.names.is_empty() || !users.iter().all(is_user) {
            return Err(Error::usage(nothing)
                .expected("at least one user, or `*`, and one pattern of names")
                .help("name them, or remove the entry"));
        }
        Ok(UserRule { users, names: section.names.clone() })
    };
    sections.iter().map(rule).collect::<Result<_>>().map(UserRules)
}
