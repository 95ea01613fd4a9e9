//! Reference for tests: how an entry of the log changes names and labels, by simple passes over all names.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::super::entry::{Action, LogEntry};
use super::super::state::{State, Swaps};
use super::{KEPT_LABELS_MAX, Leaving};
use crate::id::ManifestId;
use crate::name::Name;
use crate::policy::Labels;

/// Applies the changes of names, kept values, maps and labels of `entry`, which is known to follow.
pub(super) fn apply(state: &mut State, entry: &LogEntry) {
    state.check(entry).unwrap();
    state.drop_places();
    state.seq += 1;
    let swaps = Swaps::of(&entry.actions);
    let removed = state.removed.values_mut().map(|removed| &mut removed.value);
    for value in state.refs.values_mut().chain(removed) {
        if let Some(last) = swaps.all.get(&value.map_key) {
            value.map_key = *last;
        }
    }
    let leaving = leaving(state, entry);
    for (at, action) in entry.actions.iter().enumerate() {
        state.apply_action(entry, at, action, &swaps);
    }
    keep_labels(state, &leaving);
}

fn leaving(state: &State, entry: &LogEntry) -> Leaving {
    let mut leaving = Leaving::default();
    if state.labels.is_empty() {
        return leaving;
    }
    let origins: HashSet<&Name> = state.labels.values().flat_map(Labels::origins).collect();
    let mut records: BTreeMap<ManifestId, BTreeSet<&Name>> = BTreeMap::new();
    for action in &entry.actions {
        let (name, now) = match action {
            Action::SetRef { name, value, .. } => (name, Some(value.manifest)),
            Action::RemoveRef { name, .. } => (name, None),
            _ => continue,
        };
        let Some(tree) = state.refs.get(name).map(|value| value.manifest) else { continue };
        if Some(tree) != now && (origins.contains(name) || state.is_labelled(name)) {
            leaving.names.insert(name.clone(), tree);
            records.entry(tree).or_default();
        }
    }
    if leaving.names.is_empty() {
        return leaving;
    }
    for (name, value) in &state.refs {
        if let Some(records) = records.get_mut(&value.manifest) {
            records.extend(state.labelled_above(name));
        }
    }
    // Trees below one labelled name share its labels.
    let (mut shared, mut weight) = (HashMap::new(), 0);
    for (tree, records) in records {
        let labels = shared.entry(records).or_insert_with_key(|records| {
            let labels = if weight > KEPT_LABELS_MAX { Labels::nowhere() } else { state.joined_records(records) };
            weight += labels.weight();
            Arc::new(labels)
        });
        leaving.labels.insert(tree, Arc::clone(labels));
    }
    leaving
}

fn keep_labels(state: &mut State, leaving: &Leaving) {
    if leaving.names.is_empty() {
        return;
    }
    let given = lacking_labels(state, leaving);
    let too_many = given.iter().map(|(_, labels)| labels.weight()).sum::<usize>() > KEPT_LABELS_MAX;
    for (name, labels) in given {
        let labels = if too_many { Labels::nowhere() } else { Labels::clone(&labels).without_origin(&name) };
        let own = state.own_labels(&name);
        if own.clone().joined(&labels) != own {
            state.apply_label(&name, &labels);
        }
    }
}

fn lacking_labels(state: &State, leaving: &Leaving) -> Vec<(Name, Arc<Labels>)> {
    let mut given: BTreeMap<&Name, BTreeSet<ManifestId>> = BTreeMap::new();
    let mut give = |name, tree: &ManifestId| {
        if leaving.labels.get(tree).is_some_and(|labels| !labels.is_empty()) {
            given.entry(name).or_default().insert(*tree);
        }
    };
    state.refs.iter().for_each(|(name, value)| give(name, &value.manifest));
    state.removed.iter().for_each(|((name, _), kept)| give(name, &kept.value.manifest));
    for (name, labels) in &state.labels {
        labels.origins().iter().filter_map(|origin| leaving.names.get(origin)).for_each(|tree| give(name, tree));
    }
    // Most names are labelled by the same names above them.
    let mut of_trees: HashMap<BTreeSet<ManifestId>, Arc<Labels>> = HashMap::new();
    let mut has_all: HashMap<(BTreeSet<&Name>, BTreeSet<ManifestId>), bool> = HashMap::new();
    let mut lacking = Vec::new();
    for (name, trees) in given {
        let labels = of_trees.entry(trees.clone()).or_insert_with_key(|trees| {
            let labels = trees.iter().filter_map(|tree| leaving.labels.get(tree));
            Arc::new(labels.fold(Labels::default(), |joined, labels| joined.joined(labels).bounded()))
        });
        let records: BTreeSet<&Name> = state.labelled_above(name).into_iter().collect();
        let has_all = has_all.entry((records, trees)).or_insert_with_key(|(records, _)| {
            let own = state.joined_records(records);
            own.clone().joined(labels) == own
        });
        if !*has_all {
            lacking.push((name.clone(), Arc::clone(labels)));
        }
    }
    lacking
}
