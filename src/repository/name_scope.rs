//! Limits of a saver: the names that the labels of a save may make stricter, and those that it may read.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use super::Repository;
use super::log::{Action, LogEntry, State};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::{ManifestId, SessionId, WriteId};
use crate::name::Name;
use crate::size::show;

/// Part of the memory for names that the names of a saver with limited rights may take: one of so many.
const SHARE: u64 = 4;

/// Predicate on names.
type Names = dyn Fn(&Name) -> bool + Send + Sync;

/// Names to which a right of a saver extends. The default is all.
#[derive(Clone, Default)]
pub struct NameScope(Option<Arc<Names>>);

impl NameScope {
    /// Only names for which `names` is true: for savers with limited rights.
    pub fn only(names: impl Fn(&Name) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(names)))
    }

    /// True for a name that it has.
    pub(crate) fn includes(&self, name: &Name) -> bool {
        self.0.as_ref().is_none_or(|names| names(name))
    }

    /// True if it is not all names.
    pub(crate) fn is_limited(&self) -> bool {
        self.0.is_some()
    }
}

impl fmt::Debug for NameScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "NameScope(some names)" } else { "NameScope(all names)" })
    }
}

impl Repository {
    /// Checks that a saver of names `within` leaves others enough of the memory for names: what is `after` it besides `before`. All such
    /// savers together leave one share to those with all rights.
    ///
    /// # Errors
    /// Exhausted, if its names would take more than their share, or if all names leave less than that.
    fn check_share(&self, (before, after): (&State, &State), within: &Names) -> Result<()> {
        let share = self.budget().kept_max() / SHARE;
        let (own, all) = (after.weight_of(within), after.weight());
        let (what, most, got) = if own > share {
            ("names that may be saved here take too much memory, with their metrics and labels", share, own)
        } else if all > (SHARE - 1) * share {
            ("names of the repository take too much memory, with their metrics and labels", (SHARE - 1) * share, all)
        } else {
            return Ok(());
        };
        if own <= before.weight_of(within) {
            return Ok(());
        }
        Err(Error::exhausted(what)
            .expected(format!("at most {}", show(most)))
            .got(show(got))
            .help("remove some, save fewer metrics and labels, or raise `memory`; who has all rights may save more"))
    }

    /// Checks that `actions`, an entry of `session` after `state`, make no content stricter that a name outside of `scope` holds, or
    /// held and can get back. Content is bound by all of its names and origins, so the state before is compared with the one after.
    ///
    /// # Errors
    /// Denied, if they would; exhausted, if the names of `scope` would take too much memory.
    pub(crate) fn check_label_scope(
        &self,
        state: &State,
        (session, actions): (Option<SessionId>, &[Action]),
        scope: &NameScope,
    ) -> Result<()> {
        let Some(within) = &scope.0 else { return Ok(()) };
        let mut after = state.clone();
        let entry = LogEntry { write: WriteId::random(), session, at: Timestamp(0), actions: actions.to_vec() };
        if after.apply(&entry).is_err() {
            // The commit itself refuses an entry that does not apply.
            return Ok(());
        }
        self.check_share((state, &after), &**within)?;
        if after.labels.is_empty() {
            return Ok(());
        }
        let (before, now) = (self.label_view(state), self.label_view(&after));
        let (demanded, demands) = (before.of_all_trees(), now.of_all_trees());
        let own: HashSet<ManifestId> =
            after.refs.iter().filter(|(name, _)| within(name)).map(|(_, value)| value.manifest).collect();
        let is_stricter = |tree: &ManifestId| {
            let implied = demands.get(tree).is_none_or(|now| {
                let before = demanded.get(tree).cloned().unwrap_or_default();
                before.imply(now)
            });
            // An origin binds as soon as it gets labels itself.
            !implied || own.contains(tree) && !before.of_tree(tree).origins().is_superset(now.of_tree(tree).origins())
        };
        let others: HashSet<ManifestId> =
            state.roots().filter(|(name, _)| !within(name)).map(|(_, value)| value.manifest).collect();
        if !others.iter().any(is_stricter) {
            return Ok(());
        }
        Err(Error::denied("labels would bind content of names that may not be saved here")
            .help("save it under a name with other labels, or without labels; or let someone with all rights save it"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::error::ErrorKind;
    use crate::limits::MEMORY_MIN;
    use crate::repository::OpenOptions;
    use crate::repository::log::{RefValue, StepFacts};
    use crate::repository::runs::tests::value;
    use crate::storage::Store;

    #[tokio::test]
    async fn a_limited_saver_fills_no_more_than_its_share_of_the_names() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Some(dir.path().to_owned());
        let options = OpenOptions { memory: Some(MEMORY_MIN), cache, ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let facts = |of: u64| {
            let named = |nth: u64| format!("{:0>120}", of * 100 + nth);
            (0..64).fold(StepFacts::default(), |facts, nth| facts.metric(&named(nth), 0.0).unwrap())
        };
        let valued = |of: u64| RefValue { facts: facts(of), ..value(of, &[]) };
        let named = |of: u64| format!("mine/step-{of:04}").parse::<Name>().unwrap();
        let one = State::of(BTreeMap::from([(named(1), valued(1))])).weight_of(|_| true);
        let fit = repository.budget().kept_max() / SHARE / one;
        let state = State::of((0..fit - 1).map(|of| (named(of), valued(of))).collect());
        let (mine, others) = (NameScope::only(|name| name.as_str().starts_with("mine/")), NameScope::only(|_| false));
        let check = |state: &State, of: u64, scope: &NameScope| {
            let action = Action::SetRef { name: named(of), expected: None, value: valued(of) };
            repository.check_label_scope(state, (None, &[action]), scope).map_err(|error| error.kind())
        };
        assert_eq!(check(&state, fit, &mine), Ok(()));
        let full = State::of((0..=fit).map(|of| (named(of), valued(of))).collect());
        assert_eq!(check(&full, fit + 1, &mine), Err(ErrorKind::Exhausted));
        for scope in [others, NameScope::default()] {
            assert_eq!(check(&full, fit + 1, &scope), Ok(()));
        }
        // All limited savers together leave a share to others.
        let theirs = |of: u64| format!("theirs/step-{of:04}").parse::<Name>().unwrap();
        let full = State::of((0..SHARE * fit).map(|of| (theirs(of), valued(of))).collect());
        assert_eq!(check(&full, 1, &mine), Err(ErrorKind::Exhausted));
        assert_eq!(check(&full, 1, &NameScope::default()), Ok(()));
    }
}
