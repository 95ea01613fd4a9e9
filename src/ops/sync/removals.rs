//! Removals, which a sync does not carry: names that one side has removed and the other has.

use super::Syncing;
use super::existing::is_same;
use crate::name::Name;
use crate::repository::log::{RefValue, State};

/// Names of the `destination` that the `source` has removed since, with the same value: of `what`, and of the runs whose steps are in
/// it; of all, if that is empty.
pub(super) fn left_behind(source: &State, destination: &State, what: &[Name]) -> Vec<Name> {
    let runs: Vec<Name> = what.iter().filter_map(|name| Some(name.step()?.0)).collect();
    let is_meant = |name: &Name| {
        what.is_empty()
            || what.iter().any(|selector| name.is_under(selector))
            || (!runs.is_empty() && name.step().is_some_and(|(run, _)| runs.contains(&run)))
    };
    let there = destination.refs.iter().filter(|(name, _)| !source.refs.contains_key(*name) && is_meant(name));
    there.filter(|(name, value)| has_removed(source, name, value)).map(|(name, _)| name.clone()).collect()
}

impl Syncing<'_> {
    /// Records that `name` was set, if the destination had removed this value of it.
    pub(super) fn note_returned(&mut self, name: &Name, value: &RefValue) {
        if !self.began.refs.contains_key(name) && has_removed(&self.began, name, value) {
            self.report.returned.push(name.clone());
        }
    }
}

/// True if `name` had this value in `state`.
fn has_removed(state: &State, name: &Name, value: &RefValue) -> bool {
    state.removed_of(name).any(|(_, kept)| is_same(&kept.value, value))
}
