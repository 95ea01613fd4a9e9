//! Labels of content: those of all its names, and of all names that these were made from; the strictest apply.

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
        let graph = self.graph();
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
        for tree in self.names.keys() {
            place_of(&mut graph, Holder::Tree(*tree));
        }
        // Origins are appended while the list is walked.
        let mut place = 0;
        while let Some(holder) = graph.holders.get(place).cloned() {
            let (own, origins) = self.own_of(&holder);
            let origins = origins.iter().map(|origin| place_of(&mut graph, self.holder_of(origin))).collect();
            graph.own.push(Arc::new(own.demands()));
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

    /// Labels of a holder itself, and the names that it was made from.
    fn own_of(&self, holder: &Holder) -> (Labels, BTreeSet<Name>) {
        let names = match holder {
            Holder::Tree(tree) => self.names.get(tree).cloned().unwrap_or_default(),
            Holder::Name(name) => vec![name],
        };
        let (mut own, mut origins) = (Labels::default(), BTreeSet::new());
        for name in names {
            if let Some(signed) = self.declassified_labels(name) {
                own.join(signed);
            } else {
                let labels = self.state.own_labels(name);
                origins.extend(labels.origins().iter().cloned());
                own.join(&labels);
            }
        }
        (own, origins)
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
        let mut direct = Labels::default();
        let mut seen: HashSet<Holder> = HashSet::new();
        let mut queue: Vec<Holder> = names.into_iter().map(|name| self.holder_of(name)).collect();
        let asked: HashSet<Holder> = queue.iter().cloned().collect();
        while let Some(holder) = queue.pop() {
            if !seen.insert(holder.clone()) {
                continue;
            }
            let (own, origins) = self.own_of(&holder);
            if asked.contains(&holder) {
                direct.join(&own);
            }
            demands = demands.joined(&own.demands()).demands();
            queue.extend(origins.iter().map(|origin| self.holder_of(origin)));
        }
        demands.with_origins_of(&direct)
    }

    /// True if a signed declassification replaces the labels of `name`.
    #[must_use]
    pub fn is_declassified(&self, name: &Name) -> bool {
        self.declassified_labels(name).is_some()
    }

    /// True if some name has labels that `own` does not imply.
    #[must_use]
    pub fn has_stricter_than(&self, own: &Labels) -> bool {
        self.state.labels.values().any(|labels| !own.imply(labels))
    }
}

/// Holders of labels, and the places of those that each was made from.
#[derive(Default)]
struct OriginGraph {
    holders: Vec<Holder>,
    /// Demands of the labels of each itself.
    own: Vec<Arc<Labels>>,
    origins: Vec<Vec<usize>>,
}

/// Place of a holder in the search, in which none is yet.
const UNSEEN: usize = usize::MAX;

impl OriginGraph {
    /// Demands of each holder: its own, and those of all that it was made from. Holders that were made from each other have the same.
    ///
    /// The components come in an order in which origins are first (R. Tarjan, Depth-first search and linear graph algorithms, 1972,
    /// <https://doi.org/10.1137/0201010>), so each edge is looked at once.
    fn labels(&self) -> Vec<Arc<Labels>> {
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
    fn settle(&self, members: &[usize], labels: &mut [Arc<Labels>], done: &mut [bool]) {
        let mut all = Arc::new(Labels::default());
        for &member in members {
            all = stricter(all, &labels[member]);
            for &origin in &self.origins[member] {
                if done[origin] {
                    all = stricter(all, &labels[origin]);
                }
            }
        }
        for &member in members {
            labels[member] = Arc::clone(&all);
            done[member] = true;
        }
    }
}

/// Demands of both; one of them, without a copy, where it implies the other.
fn stricter(one: Arc<Labels>, other: &Arc<Labels>) -> Arc<Labels> {
    if Arc::ptr_eq(&one, other) || one.imply(other) {
        return one;
    }
    if other.imply(&one) {
        return Arc::clone(other);
    }
    Arc::new(Labels::clone(&one).joined(other).demands())
}
