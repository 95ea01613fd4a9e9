//! Names that the destination has with another value: which of them a sync replaces.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use serde::Serialize;

use super::Syncing;
use crate::clock::Timestamp;
use crate::name::Name;
use crate::repository::log::{RefValue, State};

/// Treatment of names that the destination has with another value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// Replace those that are not newer in the destination.
    #[default]
    KeepNewer,
    /// Keep all of them.
    Keep,
    /// Replace all of them.
    Replace,
}

/// A name whose value in the destination was kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeptName {
    /// The name.
    pub name: Name,
    /// Reason why it was kept.
    pub reason: KeptReason,
    /// Time at which the source's value was saved, RFC 3339.
    pub saved: String,
    /// Time at which the destination's value was saved, RFC 3339.
    pub saved_there: String,
}

/// Reason for keeping the destination's value of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptReason {
    /// It is newer than the source's.
    Newer,
    /// [`Existing::Keep`] keeps all.
    Exists,
}

impl Syncing<'_> {
    /// True if the destination's value of `name` stays, which is reported. `source` is the state with its `value`.
    pub(super) fn is_kept(&mut self, name: &Name, value: &RefValue, source: &State) -> bool {
        let Some((there, reason)) = self.kept(name, value, source) else { return false };
        let [saved, saved_there] = [value, there].map(|value| value.saved.to_string());
        self.report.kept.push(KeptName { name: name.clone(), reason, saved, saved_there });
        self.options.progress.advance(value.logical_bytes);
        true
    }

    /// The destination's value of `name`, if it stays, and the reason.
    fn kept(&self, name: &Name, value: &RefValue, source: &State) -> Option<(&RefValue, KeptReason)> {
        let there = self.began.refs.get(name).filter(|there| !is_same(there, value))?;
        match self.options.existing {
            Existing::Keep => Some((there, KeptReason::Exists)),
            Existing::KeepNewer if is_newer(name, there, value, [source, &self.began]) => {
                Some((there, KeptReason::Newer))
            }
            Existing::Replace | Existing::KeepNewer => None,
        }
    }

    /// Names below `name` that this sync has set, or that were equal: a name may still fail that has not come yet.
    pub(super) fn come_below(&self, name: &Name) -> BTreeSet<Name> {
        let from = format!("{name}/");
        let below = self.set.range::<str, _>((Bound::Excluded(&*from), Bound::Unbounded));
        below.take_while(|other| other.is_under(name)).cloned().collect()
    }
}

/// The `names`, each with the version that set it, in that order, but each after those below it: its labels bind these, too,
/// and must not if they cannot be copied.
pub(super) fn ordered(names: &[(u64, &Name)]) -> Vec<Name> {
    let mut newest: BTreeMap<&str, u64> = names.iter().map(|(version, name)| (name.as_str(), *version)).collect();
    for (version, name) in names {
        for (slash, _) in name.as_str().match_indices('/') {
            if let Some(of_above) = newest.get_mut(&name.as_str()[..slash]) {
                *of_above = (*version).max(*of_above);
            }
        }
    }
    let key = |name: &Name| {
        let depth = name.as_str().matches('/').count();
        (newest.get(name.as_str()).copied(), Reverse(depth), name.clone())
    };
    let mut ordered: Vec<_> = names.iter().map(|&(_, name)| key(name)).collect();
    ordered.sort_unstable();
    ordered.into_iter().map(|(.., name)| name).collect()
}

/// True if the value `there` of the destination is newer than the `value` of the source. Kept values tell first: if one side had the
/// other's value and replaced it, that side is newer, though the new value may have been saved earlier (`cp` of an earlier step,
/// `undelete`). Otherwise the later save is newer.
fn is_newer(name: &Name, there: &RefValue, value: &RefValue, [source, destination]: [&State; 2]) -> bool {
    match (left(source, name, there), left(destination, name, value)) {
        (None, None) => there.saved > value.saved,
        (here, there) => there > here,
    }
}

/// Time at which `name` last had the value `old` in `state`; none, if that is not known.
fn left(state: &State, name: &Name, old: &RefValue) -> Option<Timestamp> {
    state.removed_of(name).filter(|(_, kept)| is_same(&kept.value, old)).map(|(_, kept)| kept.when).max()
}

/// True if tree and facts are the same.
pub(super) fn is_same(a: &RefValue, b: &RefValue) -> bool {
    a.manifest == b.manifest && a.facts == b.facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_in_the_order_of_their_versions_after_those_below_them() {
        let names = ["a", "a/b", "a/b/c", "a/d", "a-1", "z"].map(|name| name.parse::<Name>().unwrap());
        let [a, b, c, d, other, last] = &names;
        let versions = [(1, a), (3, b), (2, c), (5, d), (4, other), (5, last)];
        assert_eq!(ordered(&versions), [c, b, other, d, a, last].map(Clone::clone));
    }
}
