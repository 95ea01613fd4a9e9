//! Names that the destination has with another value: which of them a sync replaces.

use std::collections::BTreeSet;
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

    /// Names below `name` that the destination has from the `source`, or will have once this sync is done.
    pub(super) fn come_below(&self, name: &Name, source: &State) -> BTreeSet<Name> {
        let from = format!("{name}/");
        let below = source.refs.range::<str, _>((Bound::Excluded(&*from), Bound::Unbounded));
        let below = below.take_while(|(other, _)| other.is_under(name));
        let chosen =
            below.filter(|(other, _)| self.what.is_empty() || self.what.iter().any(|what| other.is_under(what)));
        let come = chosen.filter(|(other, value)| self.kept(other, value, source).is_none());
        come.map(|(other, _)| other.clone()).collect()
    }
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
