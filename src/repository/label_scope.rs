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
    /// Checks that `actions`, an entry of `session` after `state`, make no content stricter that a name outside of `scope` holds, or
    /// held and can get back. Content is bound by all of its names and origins, so the state before is compared with the one after.
    ///
    /// # Errors
    /// Denied, if they would.
    pub(crate) fn check_label_scope(
        &self,
        state: &State,
        (session, actions): (Option<SessionId>, &[Action]),
        scope: &NameScope,
    ) -> Result<()> {
        let Some(within) = &scope.0 else { return Ok(()) };
        let mut after = state.clone();
        let entry = LogEntry { write: WriteId::random(), session, at: Timestamp(0), actions: actions.to_vec() };
        if after.apply(&entry).is_err() || after.labels.is_empty() {
            // The commit itself refuses an entry that does not apply.
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
