//! Labels of content: those of all its names, and of all names that these were made from; the strictest apply.
//!
//! Very many names may have very many labels by a few records above them, so records are gathered by reference, and each set of
//! records is joined once.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::labels::Declassified;
use super::state::State;
use crate::id::ManifestId;
use crate::name::Name;
use crate::policy::Labels;

/// Holder of labels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Tree(ManifestId),
    /// A name without a tree.
    Name(Name),
}

/// Maximum bytes of the different labels of all trees together. Content whose labels would be beyond it is nowhere.
const ALL_LABELS_MAX: usize = 16 << 20;

/// Records of labels that bind a holder itself: labelled names at and above its names, and its names with declassifications that count
/// instead.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Records<'a> {
    labelled: BTreeSet<&'a Name>,
    declassified: BTreeSet<&'a Name>,
}

/// True if a declassification is validly signed.
type Accepts<'a> = dyn Fn(&Name, &Declassified) -> bool + Send + Sync + 'a;

/// The labels of all content of a state.
pub struct LabelView<'a> {
    state: &'a State,
    names: HashMap<ManifestId, Vec<&'a Name>>,
    accepts_declassification: Box<Accepts<'a>>,
    /// Declassifications whose signatures were looked at, and whether they count. Anybody who can commit can add many.
    verified: Mutex<HashMap<Name, bool>>,
}

impl fmt::Debug for LabelView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LabelView").finish_non_exhaustive()
    }
}

impl<'a> LabelView<'a> {
    /// Labels of `state`; `accepts_declassification` returns true if a declassification is validly signed.
    #[must_use]
    pub fn new(
        state: &'a State,
        accepts_declassification: impl Fn(&Name, &Declassified) -> bool + Send + Sync + 'a,
    ) -> Self {
        let mut names: HashMap<ManifestId, Vec<&Name>> = HashMap::new();
        if !state.labels.is_empty() {
            for (name, value) in &state.refs {
                names.entry(value.manifest).or_default().push(name);
            }
        }
        let accepts_declassification = Box::new(accepts_declassification);
        Self { state, names, accepts_declassification, verified: Mutex::default() }
    }

    /// Labels of the tree of `name`; of a name that does not exist, those that a new tree would have.
    #[must_use]
    pub fn of(&self, name: &Name) -> Labels {
        self.gathered(vec![name])
    }

    /// Labels of a tree: those of all of its names.
    #[must_use]
    pub fn of_tree(&self, manifest: &ManifestId) -> Labels {
        self.names.get(manifest).map_or_else(Labels::default, |names| self.gathered(names.clone()))
    }

    /// Demands of the labels of all trees: as [`Self::of_tree`] for each, but in one pass over the origins. Computes for long where
    /// there are many.
    #[must_use]
    pub fn of_all_trees(&self) -> HashMap<ManifestId, Arc<Labels>> {
        if self.state.labels.is_empty() {
            return HashMap::new();
        }
        let mut graph = self.graph();
        let labels = graph.labels();
        let of_tree = |(holder, labels)| match holder {
            Holder::Tree(tree) => Some((tree, labels)),
            Holder::Name(_) => None,
        };
        graph.holders.into_iter().zip(labels).filter_map(of_tree).collect()
    }

    /// All trees, what they were made from, and so on.
    fn graph(&self) -> OriginGraph {
        let mut graph = OriginGraph::default();
        let mut places: HashMap<Holder, usize> = HashMap::new();
        let mut place_of = |graph: &mut OriginGraph, holder: Holder| match places.get(&holder) {
            Some(place) => *place,
            None => {
                let place = graph.holders.len();
                places.insert(holder.clone(), place);
                graph.holders.push(holder);
                place
            }
        };
        // In order: which ones find no room for their labels is the same each time.
        for tree in self.names.keys().copied().collect::<BTreeSet<_>>() {
            place_of(&mut graph, Holder::Tree(tree));
        }
        // Origins are appended while the list is walked.
        let (mut place, mut joined) = (0, HashMap::new());
        while let Some(holder) = graph.holders.get(place).cloned() {
            let records = self.records_of(&holder);
            let origins = self.origins_of(&records);
            let origins = origins.into_iter().map(|origin| place_of(&mut graph, self.holder_of(origin))).collect();
            let own = joined.entry(records).or_insert_with_key(|records| graph.shared.keep(self.demands_of(records)));
            graph.own.push(Arc::clone(own));
            graph.origins.push(origins);
            place += 1;
        }
        graph
    }

    /// Holder of the labels of `name`: its tree, or itself while it has none.
    fn holder_of(&self, name: &Name) -> Holder {
        match self.state.refs.get(name) {
            Some(value) => Holder::Tree(value.manifest),
            None => Holder::Name(name.clone()),
        }
    }

    /// Records that bind a holder itself.
    fn records_of(&self, holder: &Holder) -> Records<'a> {
        let mut records = Records::default();
        match holder {
            Holder::Tree(tree) => {
                self.names.get(tree).into_iter().flatten().for_each(|name| self.add_records(name, &mut records));
            }
            Holder::Name(name) => self.add_records(name, &mut records),
        }
        records
    }

    fn add_records(&self, name: &Name, records: &mut Records<'a>) {
        match self.state.declassified.get_key_value(name) {
            Some((name, _)) if self.declassified_labels(name).is_some() => drop(records.declassified.insert(name)),
            _ => records.labelled.extend(self.state.labelled_above(name)),
        }
    }

    /// Names that a holder with these records was made from.
    fn origins_of(&self, records: &Records<'a>) -> BTreeSet<&'a Name> {
        records.labelled.iter().filter_map(|name| self.state.labels.get(*name)).flat_map(Labels::origins).collect()
    }

    /// The labels of each record.
    fn labels_of(&self, records: &Records<'a>) -> impl Iterator<Item = &'a Labels> {
        let signed = records.declassified.iter().filter_map(|name| self.state.declassified.get(*name));
        let labelled = records.labelled.iter().filter_map(|name| self.state.labels.get(*name));
        labelled.chain(signed.map(|signed| &signed.labels))
    }

    /// Demands of all records together.
    fn demands_of(&self, records: &Records<'a>) -> Labels {
        self.labels_of(records).fold(Labels::default(), with_demands_of)
    }

    /// Labels of the declassification of `name`, if it has one that counts.
    fn declassified_labels(&self, name: &Name) -> Option<&Labels> {
        let signed = self.state.declassified.get(name)?;
        let known = self.verified().get(name).copied();
        let counts = known.unwrap_or_else(|| {
            let stands = self.state.refs.get(name).is_some_and(|value| value.manifest == signed.manifest);
            let counts = stands
                && self.state.own_labels(name) == signed.replaces
                && (self.accepts_declassification)(name, signed);
            self.verified().insert(name.clone(), counts);
            counts
        });
        counts.then_some(&signed.labels)
    }

    fn verified(&self) -> MutexGuard<'_, HashMap<Name, bool>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the demands of names, of other names of the same trees, and of their origins. Only the origins of the names and their
    /// trees are in the result, not those of the origins.
    fn gathered(&self, names: Vec<&Name>) -> Labels {
        let mut demands = Labels::default();
        if self.state.labels.is_empty() {
            return demands;
        }
        let mut direct: BTreeSet<&Name> = BTreeSet::new();
        let mut seen: HashSet<Holder> = HashSet::new();
        let mut joined = Records::default();
        let mut queue: Vec<Holder> = names.into_iter().map(|name| self.holder_of(name)).collect();
        let asked: HashSet<Holder> = queue.iter().cloned().collect();
        while let Some(holder) = queue.pop() {
            if seen.contains(&holder) {
                continue;
            }
            let records = self.records_of(&holder);
            if asked.contains(&holder) {
                direct.extend(self.labels_of(&records).flat_map(Labels::origins));
            }
            queue.extend(self.origins_of(&records).into_iter().map(|origin| self.holder_of(origin)));
            joined.labelled.extend(records.labelled);
            joined.declassified.extend(records.declassified);
            seen.insert(holder);
        }
        demands.join(&self.demands_of(&joined));
        demands.with_origins(direct.into_iter().cloned().collect())
    }

    /// True if a signed declassification replaces the labels of `name`.
    #[must_use]
    pub fn is_declassified(&self, name: &Name) -> bool {
        self.declassified_labels(name).is_some()
    }
}

/// Labels, each kept once, up to a number of bytes.
#[derive(Default)]
struct SharedLabels {
    known: HashSet<Arc<Labels>>,
    bytes: usize,
}

impl SharedLabels {
    /// `labels`; those of [`Labels::nowhere`], if there is no room for them.
    fn keep(&mut self, labels: Labels) -> Arc<Labels> {
        if let Some(known) = self.known.get(&labels) {
            return Arc::clone(known);
        }
        let weight = size_of::<Labels>() + labels.weight();
        if self.bytes + weight > ALL_LABELS_MAX {
            return self.nowhere();
        }
        self.bytes += weight;
        let labels = Arc::new(labels);
        self.known.insert(Arc::clone(&labels));
        labels
    }

    fn nowhere(&mut self) -> Arc<Labels> {
        let nowhere = Labels::nowhere().demands();
        match self.known.get(&nowhere) {
            Some(known) => Arc::clone(known),
            None => {
                let nowhere = Arc::new(nowhere);
                self.known.insert(Arc::clone(&nowhere));
                nowhere
            }
        }
    }

    /// Demands of both; one of them, without a copy, where it implies the other.
    fn stricter(&mut self, one: Arc<Labels>, other: &Arc<Labels>) -> Arc<Labels> {
        if Arc::ptr_eq(&one, other) || one.imply(other) {
            return one;
        }
        if other.imply(&one) {
            return Arc::clone(other);
        }
        self.keep(Labels::clone(&one).joined(other).demands())
    }
}

/// Holders of labels, and the places of those that each was made from.
#[derive(Default)]
struct OriginGraph {
    holders: Vec<Holder>,
    /// Demands of the labels of each itself.
    own: Vec<Arc<Labels>>,
    origins: Vec<Vec<usize>>,
    shared: SharedLabels,
}

/// Place of a holder in the search, in which none is yet.
const UNSEEN: usize = usize::MAX;

impl OriginGraph {
    /// Demands of each holder: its own, and those of all that it was made from. Holders that were made from each other have the same.
    ///
    /// The components come in an order in which origins are first (R. Tarjan, Depth-first search and linear graph algorithms, 1972,
    /// <https://doi.org/10.1137/0201010>), so each edge is looked at once.
    fn labels(&mut self) -> Vec<Arc<Labels>> {
        let count = self.holders.len();
        let mut labels: Vec<Arc<Labels>> = self.own.clone();
        let (mut order, mut lowest, mut done) = (vec![UNSEEN; count], vec![UNSEEN; count], vec![false; count]);
        let (mut next, mut component) = (0, Vec::new());
        // Holder, and how many of its origins were looked at.
        let mut path: Vec<(usize, usize)> = Vec::new();
        for start in 0..count {
            if order[start] == UNSEEN {
                path.push((start, 0));
            }
            while let Some((holder, looked_at)) = path.pop() {
                if looked_at == 0 {
                    (order[holder], lowest[holder]) = (next, next);
                    next += 1;
                    component.push(holder);
                } else {
                    let before = self.origins[holder][looked_at - 1];
                    lowest[holder] = lowest[holder].min(lowest[before]);
                }
                let mut rest = self.origins[holder].iter().enumerate().skip(looked_at);
                let unseen = rest.find_map(|(at, &origin)| {
                    if order[origin] == UNSEEN {
                        return Some((at, origin));
                    }
                    if !done[origin] {
                        lowest[holder] = lowest[holder].min(order[origin]);
                    }
                    None
                });
                if let Some((at, origin)) = unseen {
                    path.extend([(holder, at + 1), (origin, 0)]);
                    continue;
                }
                if lowest[holder] == order[holder] {
                    let from = component.iter().rposition(|&member| member == holder).unwrap_or_default();
                    self.settle(&component.split_off(from), &mut labels, &mut done);
                }
            }
        }
        labels
    }

    /// Gives all `members` of a component the same labels.
    fn settle(&mut self, members: &[usize], labels: &mut [Arc<Labels>], done: &mut [bool]) {
        let mut all = self.shared.keep(Labels::default());
        for &member in members {
            all = self.shared.stricter(all, &labels[member]);
            for &origin in &self.origins[member] {
                if done[origin] {
                    all = self.shared.stricter(all, &labels[origin]);
                }
            }
        }
        for &member in members {
            labels[member] = Arc::clone(&all);
            done[member] = true;
        }
    }
}

/// `demands`, and those of `labels`.
fn with_demands_of(demands: Labels, labels: &Labels) -> Labels {
    if demands.imply(labels) { demands } else { demands.joined(labels).demands() }
}
