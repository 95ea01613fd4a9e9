//! Names by tree and by labels, and values by map: so that an entry of the log takes time for what it changes, not for all names.
//!
//! They follow from the state, are made when an entry first needs them, and are kept up to date while more entries are applied.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Bound;
use std::sync::Arc;

use super::super::removed::KeptKey;
use super::super::state::State;
use crate::id::{ManifestId, MapKey};
use crate::name::Name;
use crate::policy::Labels;

/// Places of names while entries are applied. They are no part of a state's value: all are equal, and a copy has none.
#[derive(Default)]
pub(in crate::repository::log) struct Places {
    /// Labelled names by the names that they were made from.
    origins: Option<HashMap<Name, BTreeSet<Name>>>,
    trees: Option<Trees>,
    maps: Option<HashMap<MapKey, MapValues>>,
    /// Names, groups of names and values that were looked at.
    #[cfg(test)]
    pub(in crate::repository::log) looked_at: std::sync::atomic::AtomicUsize,
}

impl Clone for Places {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for Places {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Places {}

impl Hash for Places {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places").finish_non_exhaustive()
    }
}

/// Labels of a name: names of one class have the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Class {
    /// Longest labelled name above it.
    pub(super) above: Option<Name>,
    /// Its own record.
    pub(super) own: Option<Arc<Labels>>,
}

/// Names of one tree and one class.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// Names whose current or kept value has the tree.
    pub(super) names: BTreeSet<Name>,
    /// Number of names whose current value has the tree.
    pub(super) current: usize,
}

/// Names of one tree.
#[derive(Debug, Default)]
pub(super) struct TreeNames {
    pub(super) groups: HashMap<Class, Group>,
    /// Names with a kept value that has the tree.
    pub(super) kept: BTreeSet<Name>,
}

#[derive(Debug, Default)]
struct Trees {
    names: HashMap<ManifestId, TreeNames>,
    /// Trees of kept values by name, each with the number of these values.
    kept: BTreeMap<Name, BTreeMap<ManifestId, usize>>,
}

/// Names, and kept values, that have one map.
#[derive(Debug, Default)]
struct MapValues {
    names: BTreeSet<Name>,
    kept: BTreeSet<KeptKey>,
}

impl Trees {
    fn enter(&mut self, name: &Name, class: Class, tree: ManifestId) {
        let group = self.names.entry(tree).or_default().groups.entry(class).or_default();
        group.names.insert(name.clone());
        group.current += 1;
    }

    fn leave(&mut self, name: &Name, class: &Class, tree: ManifestId) {
        let Some(names) = self.names.get_mut(&tree) else { return };
        if let Some(group) = names.groups.get_mut(class) {
            group.current = group.current.saturating_sub(1);
        }
        self.drop_unless_kept(name, class, tree);
    }

    fn keep(&mut self, name: &Name, class: Class, tree: ManifestId) {
        *self.kept.entry(name.clone()).or_default().entry(tree).or_default() += 1;
        let names = self.names.entry(tree).or_default();
        names.kept.insert(name.clone());
        names.groups.entry(class).or_default().names.insert(name.clone());
    }

    /// Forgets one kept value of `name`; `current` is the tree that the name has.
    fn forget(&mut self, name: &Name, class: &Class, tree: ManifestId, current: Option<ManifestId>) {
        let Some(kept) = self.kept.get_mut(name) else { return };
        if let Some(values) = kept.get_mut(&tree).filter(|values| **values > 1) {
            *values -= 1;
            return;
        }
        kept.remove(&tree);
        if kept.is_empty() {
            self.kept.remove(name);
        }
        if let Some(names) = self.names.get_mut(&tree) {
            names.kept.remove(name);
        }
        if current != Some(tree) {
            self.drop_unless_kept(name, class, tree);
        }
    }

    fn drop_unless_kept(&mut self, name: &Name, class: &Class, tree: ManifestId) {
        let Some(names) = self.names.get_mut(&tree).filter(|names| !names.kept.contains(name)) else { return };
        if let Some(group) = names.groups.get_mut(class) {
            group.names.remove(name);
            if group.names.is_empty() {
                names.groups.remove(class);
            }
        }
        if names.groups.is_empty() {
            self.names.remove(&tree);
        }
    }

    /// Moves `name`, which has the tree `current`, between classes.
    fn reclass(&mut self, name: &Name, (from, to): (&Class, &Class), current: Option<ManifestId>) {
        let kept = self.kept.get(name).into_iter().flat_map(BTreeMap::keys).copied();
        for tree in kept.chain(current).collect::<BTreeSet<_>>() {
            let Some(names) = self.names.get_mut(&tree) else { continue };
            let is_current = usize::from(current == Some(tree));
            if let Some(group) = names.groups.get_mut(from) {
                group.names.remove(name);
                group.current = group.current.saturating_sub(is_current);
                if group.names.is_empty() {
                    names.groups.remove(from);
                }
            }
            let group = names.groups.entry(to.clone()).or_default();
            group.names.insert(name.clone());
            group.current += is_current;
        }
    }

    /// Approximate bytes of memory.
    fn weight(&self) -> usize {
        let of_name = |name: &Name| size_of::<Name>() + name.as_str().len();
        let of_class = |class: &Class| {
            let own = class.own.as_ref().map_or(0, |own| size_of::<Labels>() + own.weight());
            size_of::<(Class, Group)>() + class.above.as_ref().map_or(0, of_name) + own
        };
        let of_tree = |names: &TreeNames| {
            let groups = names.groups.iter();
            let groups = groups.map(|(class, group)| of_class(class) + group.names.iter().map(of_name).sum::<usize>());
            size_of::<(ManifestId, TreeNames)>() + groups.sum::<usize>() + names.kept.iter().map(of_name).sum::<usize>()
        };
        let kept = self.kept.iter().map(|(name, trees)| of_name(name) + trees.len() * size_of::<(ManifestId, usize)>());
        self.names.values().map(of_tree).sum::<usize>() + kept.sum::<usize>()
    }
}

impl Places {
    /// Kinds of places that were made so far.
    pub(in crate::repository::log) fn made(&self) -> [bool; 3] {
        [self.origins.is_some(), self.trees.is_some(), self.maps.is_some()]
    }

    /// Counts things that were looked at, for tests of the work that entries take.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "only tests count"))]
    pub(super) fn look(&self, number: usize) {
        #[cfg(test)]
        self.looked_at.fetch_add(number, std::sync::atomic::Ordering::Relaxed);
        #[cfg(not(test))]
        let _ = number;
    }

    /// Labelled names that were made from `name`.
    pub(super) fn made_from(&self, name: &Name) -> Option<&BTreeSet<Name>> {
        self.origins.as_ref()?.get(name)
    }

    /// Names of `tree` by their labels.
    pub(super) fn of_tree(&self, tree: &ManifestId) -> Option<&TreeNames> {
        self.trees.as_ref()?.names.get(tree)
    }

    /// Approximate bytes of memory.
    pub(in crate::repository::log) fn weight(&self) -> usize {
        let of_name = |name: &Name| size_of::<Name>() + name.as_str().len();
        let origins = self.origins.iter().flatten();
        let origins = origins.map(|(name, made)| of_name(name) + made.iter().map(of_name).sum::<usize>());
        let maps = self.maps.iter().flatten().map(|(_, values)| {
            let kept = values.kept.iter().map(|(name, _)| size_of::<u64>() + of_name(name));
            size_of::<(MapKey, MapValues)>() + values.names.iter().map(of_name).sum::<usize>() + kept.sum::<usize>()
        });
        origins.sum::<usize>() + maps.sum::<usize>() + self.trees.as_ref().map_or(0, Trees::weight)
    }
}

impl State {
    /// Drops what only helps to apply further entries.
    pub(in crate::repository::log) fn drop_places(&mut self) {
        self.places = Places::default();
    }

    /// Class of `name` by the labels as they are now.
    pub(super) fn class_of(&self, name: &Name) -> Class {
        let above = self.labelled_above(name).into_iter().find(|record| *record != name).cloned();
        Class { above, own: self.labels.get(name).map(|own| Arc::new(own.clone())) }
    }

    /// Finds the origins of labels, unless they are known.
    pub(super) fn place_origins(&mut self) {
        if self.places.origins.is_some() {
            return;
        }
        let mut origins: HashMap<Name, BTreeSet<Name>> = HashMap::new();
        for (name, labels) in &self.labels {
            for origin in labels.origins() {
                origins.entry(origin.clone()).or_default().insert(name.clone());
            }
        }
        self.places.look(self.labels.len());
        self.places.origins = Some(origins);
    }

    /// Finds the names of each tree, unless they are known.
    pub(super) fn place_trees(&mut self) {
        if self.places.trees.is_some() {
            return;
        }
        let mut trees = Trees::default();
        for (name, value) in &self.refs {
            trees.enter(name, self.class_of(name), value.manifest);
        }
        for ((name, _), kept) in &self.removed {
            trees.keep(name, self.class_of(name), kept.value.manifest);
        }
        self.places.look(self.refs.len() + self.removed.len());
        self.places.trees = Some(trees);
    }

    /// Finds the values of each map, unless they are known.
    fn place_maps(&mut self) {
        if self.places.maps.is_some() {
            return;
        }
        let mut maps: HashMap<MapKey, MapValues> = HashMap::new();
        for (name, value) in &self.refs {
            maps.entry(value.map_key).or_default().names.insert(name.clone());
        }
        for (key, kept) in &self.removed {
            maps.entry(kept.value.map_key).or_default().kept.insert(key.clone());
        }
        self.places.look(self.refs.len() + self.removed.len());
        self.places.maps = Some(maps);
    }

    /// Gives the values that have a map of `swaps` the map in its place, all at once.
    pub(in crate::repository::log) fn swap_maps(&mut self, swaps: &HashMap<MapKey, MapKey>) {
        if swaps.is_empty() {
            return;
        }
        self.place_maps();
        let Some(mut maps) = self.places.maps.take() else { return };
        let taken: Vec<(MapKey, MapValues)> =
            swaps.iter().filter_map(|(old, new)| Some((*new, maps.remove(old)?))).collect();
        self.places.look(swaps.len());
        for (new, mut values) in taken {
            self.places.look(values.names.len() + values.kept.len());
            for name in &values.names {
                if let Some(value) = self.refs.get_mut(name) {
                    value.map_key = new;
                }
            }
            for key in &values.kept {
                if let Some(kept) = self.removed.get_mut(key) {
                    kept.value.map_key = new;
                }
            }
            let there = maps.entry(new).or_default();
            if there.names.len() < values.names.len() {
                std::mem::swap(&mut there.names, &mut values.names);
            }
            there.names.extend(values.names);
            there.kept.extend(values.kept);
        }
        self.places.maps = Some(maps);
    }

    /// Moves `name` to the tree and map that it will have `now`, before it gets them.
    pub(in crate::repository::log) fn move_name(&mut self, name: &Name, now: Option<(ManifestId, MapKey)>) {
        let before = self.refs.get(name).map(|value| (value.manifest, value.map_key));
        if self.places.trees.is_some() && before.map(|(tree, _)| tree) != now.map(|(tree, _)| tree) {
            let class = self.class_of(name);
            if let Some(trees) = &mut self.places.trees {
                if let Some((tree, _)) = before {
                    trees.leave(name, &class, tree);
                }
                if let Some((tree, _)) = now {
                    trees.enter(name, class, tree);
                }
            }
        }
        let Some(maps) = &mut self.places.maps else { return };
        if let Some((_, map)) = before
            && let Some(values) = maps.get_mut(&map)
        {
            values.names.remove(name);
            if values.names.is_empty() && values.kept.is_empty() {
                maps.remove(&map);
            }
        }
        if let Some((_, map)) = now {
            maps.entry(map).or_default().names.insert(name.clone());
        }
    }

    /// Adds the kept value of `key`, which has `tree` and `map`.
    pub(in crate::repository::log) fn place_kept(&mut self, key: &KeptKey, (tree, map): (ManifestId, MapKey)) {
        if self.places.trees.is_some() {
            let class = self.class_of(&key.0);
            if let Some(trees) = &mut self.places.trees {
                trees.keep(&key.0, class, tree);
            }
        }
        if let Some(maps) = &mut self.places.maps {
            maps.entry(map).or_default().kept.insert(key.clone());
        }
    }

    /// Takes away the kept value of `key`, which had `tree` and `map`.
    pub(in crate::repository::log) fn displace_kept(&mut self, key: &KeptKey, (tree, map): (ManifestId, MapKey)) {
        if self.places.trees.is_some() {
            let (class, current) = (self.class_of(&key.0), self.refs.get(&key.0).map(|value| value.manifest));
            if let Some(trees) = &mut self.places.trees {
                trees.forget(&key.0, &class, tree, current);
            }
        }
        if let Some(maps) = &mut self.places.maps
            && let Some(values) = maps.get_mut(&map)
        {
            values.kept.remove(key);
            if values.names.is_empty() && values.kept.is_empty() {
                maps.remove(&map);
            }
        }
    }

    /// Sets the record of labels of `name`. A name that had none is now the longest labelled one above some names below it: each
    /// record is new once.
    pub(super) fn set_record(&mut self, name: &Name, labels: Labels) {
        if let Some(origins) = &mut self.places.origins {
            let before = self.labels.get(name).map(Labels::origins);
            for gone in before.into_iter().flatten().filter(|origin| !labels.origins().contains(*origin)) {
                if let Some(made) = origins.get_mut(gone) {
                    made.remove(name);
                    if made.is_empty() {
                        origins.remove(gone);
                    }
                }
            }
            for origin in labels.origins() {
                origins.entry(origin.clone()).or_default().insert(name.clone());
            }
        }
        let Some(mut trees) = self.places.trees.take() else {
            self.labels.insert(name.clone(), labels);
            return;
        };
        let is_new = !self.labels.contains_key(name);
        let mut moved: BTreeSet<Name> = BTreeSet::from([name.clone()]);
        if is_new {
            let (from, to) = (format!("{name}/"), format!("{name}0"));
            let below = (Bound::Excluded(&*from), Bound::Excluded(&*to));
            moved.extend(self.refs.range::<str, _>(below).map(|(other, _)| other.clone()));
            moved.extend(trees.kept.range::<str, _>(below).map(|(other, _)| other.clone()));
        }
        self.places.look(moved.len());
        let before: Vec<Class> = moved.iter().map(|other| self.class_of(other)).collect();
        self.labels.insert(name.clone(), labels);
        for (other, before) in moved.iter().zip(before) {
            let (after, current) = (self.class_of(other), self.refs.get(other).map(|value| value.manifest));
            if before != after {
                trees.reclass(other, (&before, &after), current);
            }
        }
        self.places.trees = Some(trees);
    }
}
