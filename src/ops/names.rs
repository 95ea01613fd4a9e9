//! Names: list, copy. They touch the log only, never content.

use std::ops::Bound;

use serde::Serialize;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::name::Name;
use crate::repository::log::{Action, RefValue, State, StepFacts, log_forgotten};
use crate::repository::{Repository, no_such_name};

/// One name, as `ls` shows it.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct Listed {
    /// The name.
    pub name: String,
    /// Manifest's id.
    pub manifest: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// Time of the save, RFC 3339.
    pub saved: String,
    /// Facts of the step.
    #[serde(flatten)]
    pub facts: StepFacts,
}

/// Range of names to list, a page at a time.
#[derive(Clone, Debug)]
pub struct NameRange {
    /// Only this name and those below it.
    pub prefix: Option<Name>,
    /// Only names that come after this one.
    pub after: Option<Name>,
    /// Maximum number of names.
    pub limit: usize,
}

impl Repository {
    /// One page of the names, sorted, and whether there are more. A prefix without names is no error.
    ///
    /// # Errors
    /// Errors of the store.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn list_range(&self, range: &NameRange) -> Result<(Vec<Listed>, bool)> {
        self.list_readable(range, |_| true).await
    }

    /// As [`Repository::list_range`], as if there were only the names that `may` be read.
    ///
    /// # Errors
    /// The store's.
    ///
    /// # Cancel safety
    /// Safe: a read of the log that has begun goes on.
    pub async fn list_readable(&self, range: &NameRange, may: impl Fn(&Name) -> bool) -> Result<(Vec<Listed>, bool)> {
        let state = self.state_since(Some(Instant::now())).await?;
        let from = range.after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let prefix = range.prefix.as_ref();
        let mut matching = state
            .refs
            .range::<Name, _>((from, Bound::Unbounded))
            .filter(|(name, _)| prefix.is_none_or(|prefix| name.is_under(prefix)) && may(name));
        let listed = matching.by_ref().take(range.limit).map(|(name, value)| listed(name, value)).collect();
        Ok((listed, matching.next().is_some()))
    }

    /// The names under `prefix`, or all, sorted.
    ///
    /// # Errors
    /// Not found, if there are no names under the given prefix.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn list(&self, prefix: Option<&Name>) -> Result<Vec<Listed>> {
        let state = self.state().await?;
        let matching = state.refs.iter().filter(|(name, _)| prefix.is_none_or(|prefix| name.is_under(prefix)));
        let listed: Vec<Listed> = matching.map(|(name, value)| listed(name, value)).collect();
        match prefix {
            Some(prefix) if listed.is_empty() => {
                Err(Error::not_found("no name is under this prefix").at(prefix).help("`towline ls` lists all names"))
            }
            _ => Ok(listed),
        }
    }

    /// Gives what `from` stands for a second name; no content moves. What `to` stood for is replaced, and told.
    ///
    /// # Errors
    /// Not found, if there is no `from`; denied, if the policy does not let it be read here.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn copy(&self, from: &Name, to: &Name) -> Result<Option<Replaced>> {
        self.copy_over(from, to, false).await
    }

    /// As [`Repository::copy`], but replaces nothing.
    ///
    /// # Errors
    /// Not found, if there is no `from`; conflict, if `to` exists when the copy is committed.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn copy_if_absent(&self, from: &Name, to: &Name) -> Result<()> {
        self.copy_over(from, to, true).await.map(drop)
    }

    async fn copy_over(&self, from: &Name, to: &Name, if_absent: bool) -> Result<Option<Replaced>> {
        let (mut replaced, mut kept) = (None, Vec::new());
        let checked = self.current(&*self.state().await?, from)?.manifest;
        self.check_copy((from, &checked), to).await?;
        // Chunks of the source's map cannot be purged while the source stands, and it is read from the very state that
        // the commit follows: so nothing has to be vouched for.
        let commit = self.log().commit(None, |state| {
            // The attempt saved the original name, not this one.
            let value = RefValue { attempt: None, ..self.current(state, from)?.clone() };
            if value.manifest != checked {
                return Err(Error::conflict("name was replaced while it was copied").at(from).help("run it again"));
            }
            let same = |old: &RefValue| {
                old.manifest == value.manifest && old.map_key == value.map_key && old.facts == value.facts
            };
            let there = state.refs.get(to);
            if there.is_some() && if_absent {
                return Err(exists(to));
            }
            if there.is_some_and(same) {
                replaced = None;
                return Ok(Vec::new());
            }
            replaced = there.map(|old| Replaced::of(old, &value));
            kept = state.keep_replaced(to, value.manifest);
            let mut actions = kept.clone();
            actions.extend(self.inherited_labels(state, (from, &value.manifest), to)?);
            actions.push(Action::SetRef { name: to.clone(), expected: state.version(to), value });
            Ok(actions)
        });
        commit.await?;
        log_forgotten(&kept);
        Ok(replaced)
    }

    /// Checks that `name` is there.
    ///
    /// # Errors
    /// Not found, if it is not; unreachable, as the store says.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn check_name(&self, name: &Name) -> Result<()> {
        self.current(&*self.state().await?, name).map(drop)
    }

    pub(super) fn current<'a>(&self, state: &'a State, name: &Name) -> Result<&'a RefValue> {
        state.refs.get(name).ok_or_else(|| self.no_such_name(state, name))
    }

    pub(super) fn no_such_name(&self, state: &State, name: &Name) -> Error {
        no_such_name(&state.refs, name, self.store().location())
    }
}

/// The previous value of a replaced name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replaced {
    /// Manifest's id.
    pub manifest: String,
    /// Time of the save, RFC 3339.
    pub saved: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Metrics that it had and the new value lacks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lost_metrics: Vec<String>,
    /// True if it can be restored for a while; false if the new value is the same tree.
    pub kept: bool,
}

impl Replaced {
    /// `old`, in whose place is `new` now.
    pub(super) fn of(old: &RefValue, new: &RefValue) -> Self {
        let has = |metric: &str| new.facts.metrics().any(|(name, _)| name == metric);
        let lost = old.facts.metrics().map(|(name, _)| name).filter(|name| !has(name));
        Self {
            manifest: old.manifest.to_string(),
            saved: old.saved.to_string(),
            bytes: old.logical_bytes,
            lost_metrics: lost.map(str::to_owned).collect(),
            kept: old.manifest != new.manifest,
        }
    }
}

/// Error: the name exists, but must not.
pub(super) fn exists(name: &Name) -> Error {
    Error::conflict("the name exists already").at(name).help("use another name, or let it be replaced")
}

pub(super) fn listed(name: &Name, value: &RefValue) -> Listed {
    Listed {
        name: name.to_string(),
        manifest: value.manifest.to_string(),
        bytes: value.logical_bytes,
        files: value.files,
        chunks: value.chunks,
        saved: value.saved.to_string(),
        facts: value.facts.clone(),
    }
}
