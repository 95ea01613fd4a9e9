//! Names: list, remove, copy. They touch the log only, never content.

use std::collections::BTreeMap;
use std::ops::Bound;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::repository::log::{Action, RefValue, State, StepFacts};
use crate::repository::{Name, Repository, no_such_name};

/// One name, as `ls` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// The name.
    pub name: String,
    /// Its manifest's id.
    pub manifest: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// When it was saved, RFC 3339.
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
    /// Names, at most.
    pub limit: usize,
}

impl Repository {
    /// Some of the names, sorted, and whether there are more. Nothing under the prefix is no error here.
    ///
    /// # Errors
    /// The store's.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn list_range(&self, range: &NameRange) -> Result<(Vec<Listed>, bool)> {
        let state = self.state().await?;
        let from = range.after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let prefix = range.prefix.as_ref();
        let mut matching = state
            .refs
            .range::<Name, _>((from, Bound::Unbounded))
            .filter(|(name, _)| prefix.is_none_or(|prefix| name.is_under(prefix)));
        let listed = matching.by_ref().take(range.limit).map(|(name, value)| listed(name, value)).collect();
        Ok((listed, matching.next().is_some()))
    }

    /// The names under `prefix`, or all, sorted.
    ///
    /// # Errors
    /// Not found, if a prefix was given and nothing is under it.
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

    /// Removes a name. Its content goes when a collector finds nothing else uses it.
    ///
    /// # Errors
    /// Not found, if there is no such name.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn remove(&self, name: &Name) -> Result<()> {
        self.remove_all(std::slice::from_ref(name), false).await.map(drop)
    }

    /// Removes all of `names` in one commit; if `recursive`, also every name below them. Returns those that were removed,
    /// sorted, as [`Repository::list`] tells them.
    ///
    /// # Errors
    /// Not found, if one of them is not there, or, if `recursive`, stands for nothing and has nothing below it; then nothing is
    /// removed.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn remove_all(&self, names: &[Name], recursive: bool) -> Result<Vec<Listed>> {
        let mut removed = BTreeMap::new();
        let commit = self.log().commit(None, |state| {
            removed = self.chosen(state, names, recursive)?;
            Ok(removed
                .iter()
                .map(|(name, value)| Action::RemoveRef { name: name.clone(), expected: value.version })
                .collect())
        });
        commit.await?;
        Ok(removed.iter().map(|(name, value)| listed(name, value)).collect())
    }

    /// Names of `state` that [`Repository::remove_all`] removes.
    pub(super) fn chosen(&self, state: &State, names: &[Name], recursive: bool) -> Result<BTreeMap<Name, RefValue>> {
        let mut chosen = BTreeMap::new();
        for name in names {
            if recursive {
                let under = state.refs.iter().filter(|(other, _)| other.is_under(name));
                let found: Vec<_> = under.map(|(name, value)| (name.clone(), value.clone())).collect();
                if found.is_empty() {
                    return Err(self.no_such_name(state, name));
                }
                chosen.extend(found);
            } else {
                chosen.insert(name.clone(), self.current(state, name)?.clone());
            }
        }
        Ok(chosen)
    }

    /// Gives what `from` stands for a second name; no content moves. What `to` stood for is replaced, and told.
    ///
    /// # Errors
    /// Not found, if there is no `from`.
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
        let mut replaced = None;
        // Chunks of the source's map cannot be purged while the source stands, and it is read from the very state that
        // the commit follows: so nothing has to be vouched for.
        let commit = self.log().commit(None, |state| {
            // Another name is not what the attempt saved.
            let value = RefValue { attempt: None, ..self.current(state, from)?.clone() };
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
            replaced = there.map(Replaced::of);
            Ok(vec![Action::SetRef { name: to.clone(), expected: state.version(to), value }])
        });
        commit.await?;
        Ok(replaced)
    }

    fn current<'a>(&self, state: &'a State, name: &Name) -> Result<&'a RefValue> {
        state.refs.get(name).ok_or_else(|| self.no_such_name(state, name))
    }

    fn no_such_name(&self, state: &State, name: &Name) -> Error {
        no_such_name(&state.refs, name, self.store().location())
    }
}

/// The previous value of a replaced name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replaced {
    /// Its manifest's id.
    pub manifest: String,
    /// When it was saved, RFC 3339.
    pub saved: String,
    /// Bytes in all files.
    pub bytes: u64,
}

impl Replaced {
    pub(super) fn of(value: &RefValue) -> Self {
        Self { manifest: value.manifest.to_string(), saved: value.saved.to_string(), bytes: value.logical_bytes }
    }
}

/// The name must not exist, and does.
pub(super) fn exists(name: &Name) -> Error {
    Error::conflict("the name exists already").at(name).help("use another name, or let it be replaced")
}

fn listed(name: &Name, value: &RefValue) -> Listed {
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
