//! Removing names. Their values are kept for a while, so that they can be restored, unless the options say otherwise.

use std::collections::BTreeMap;

use serde::Serialize;

use super::names::{Listed, listed};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::repository::Repository;
use crate::repository::log::{Action, KeptKey, RefValue, State};

/// Options of a removal.
#[derive(Clone, Copy, Debug, Default)]
pub struct RemoveOptions {
    /// Also every name below.
    pub recursive: bool,
    /// Keep nothing of the names, nor what is kept of them already: for erasure.
    pub now: bool,
}

/// Result of a removal.
#[derive(Clone, Debug, Serialize)]
pub struct RemoveReport {
    /// The names that were removed, sorted.
    pub removed: Vec<Listed>,
    /// Values of them that can be restored for a while.
    pub kept: u64,
    /// Values kept of names until now that are not any more: those of these names, if nothing is to be kept of them, else the
    /// oldest of all, if there are too many.
    pub forgotten: u64,
}

impl Repository {
    /// Removes a name, and keeps its value, so that [`Repository::undelete`] can restore it, until a collect finds that
    /// it was kept for long enough. Then its content goes if nothing else uses it.
    ///
    /// # Errors
    /// Not found, if there is no such name.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn remove(&self, name: &Name) -> Result<()> {
        self.remove_all(std::slice::from_ref(name), false).await.map(drop)
    }

    /// As [`Repository::remove`], for all of `names` in one commit; if `recursive`, also every name below them. Returns those
    /// that were removed, sorted, as [`Repository::list`] tells them.
    ///
    /// # Errors
    /// Not found, if one of them is not there, or, if `recursive`, stands for nothing and has nothing below it; then nothing is
    /// removed.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn remove_all(&self, names: &[Name], recursive: bool) -> Result<Vec<Listed>> {
        let options = RemoveOptions { recursive, ..RemoveOptions::default() };
        Ok(self.remove_with(names, &options).await?.removed)
    }

    /// Removes all of `names` in one commit. With [`RemoveOptions::now`] a name of which only something is kept counts as there.
    ///
    /// # Errors
    /// As [`Repository::remove_all`].
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn remove_with(&self, names: &[Name], options: &RemoveOptions) -> Result<RemoveReport> {
        match self.try_remove(names, options).await {
            Err(error) if self.has_made_room(&error).await => self.try_remove(names, options).await,
            removed => removed,
        }
    }

    async fn try_remove(&self, names: &[Name], options: &RemoveOptions) -> Result<RemoveReport> {
        let mut report = RemoveReport { removed: Vec::new(), kept: 0, forgotten: 0 };
        let commit = self.log().commit(None, |state| {
            let chosen = self.chosen(state, names, *options)?;
            let mut actions = if options.now { chosen.forgets() } else { state.keep(chosen.refs.keys()) };
            let count = |of: fn(&Action) -> bool| actions.iter().filter(|action| of(action)).count() as u64;
            report.kept = count(|action| matches!(action, Action::Keep { .. }));
            report.forgotten = count(|action| matches!(action, Action::Forget { .. }));
            report.removed = chosen.refs.iter().map(|(name, value)| listed(name, value)).collect();
            let remove = |(name, value): (Name, RefValue)| Action::RemoveRef { name, expected: value.version };
            actions.extend(chosen.refs.into_iter().map(remove));
            Ok(actions)
        });
        commit.await?;
        Ok(report)
    }

    /// Names and kept values of `state` that [`Repository::remove_with`] takes.
    pub(super) fn chosen(&self, state: &State, names: &[Name], options: RemoveOptions) -> Result<Chosen> {
        let mut chosen = Chosen { refs: BTreeMap::new(), forget: BTreeMap::new() };
        for name in names {
            let is_meant = |other: &Name| if options.recursive { other.is_under(name) } else { other == name };
            let refs = state.refs.iter().filter(|(other, _)| is_meant(other));
            let refs: Vec<_> = refs.map(|(name, value)| (name.clone(), value.clone())).collect();
            let kept = state.removed.iter().filter(|((other, _), _)| options.now && is_meant(other));
            let mut kept = kept.map(|(key, removed)| (key.clone(), removed.at)).peekable();
            if refs.is_empty() && kept.peek().is_none() {
                return Err(if options.recursive {
                    self.no_such_name(state, name)
                } else {
                    self.not_removed(state, name)
                });
            }
            chosen.refs.extend(refs);
            chosen.forget.extend(kept);
        }
        Ok(chosen)
    }

    /// The error about a name to remove that is not there. Only names below it may be there.
    fn not_removed(&self, state: &State, name: &Name) -> Error {
        let below = state.refs.keys().filter(|other| other.is_under(name)).count();
        if below == 0 {
            return self.no_such_name(state, name);
        }
        let names = if below == 1 { "1 name is".to_owned() } else { format!("{below} names are") };
        Error::not_found(format!("no such name `{name}` in {}; {names} below it", self.store().location()))
            .help(format!("`towline rm --recursive {name}` removes all below it; `towline ls {name}` lists them"))
    }
}

/// Names to remove, and what is to be forgotten of them.
pub(super) struct Chosen {
    /// The names, with what they stand for.
    pub(super) refs: BTreeMap<Name, RefValue>,
    /// Values kept of them, with the entries that kept these; empty unless nothing is to be kept.
    pub(super) forget: BTreeMap<KeptKey, u64>,
}

impl Chosen {
    /// Actions that forget what is kept of them.
    fn forgets(&self) -> Vec<Action> {
        let forget =
            |((name, version), at): (&KeptKey, &u64)| Action::Forget { name: name.clone(), version: *version, at: *at };
        self.forget.iter().map(forget).collect()
    }
}
