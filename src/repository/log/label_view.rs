//! Labels of content: those of all its names, and of all names that these were made from; the strictest apply.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
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

    /// Demands of the labels of all trees: as [`Self::of_tree`] for each, but what many trees hand on is passed on once.
    #[must_use]
    pub fn of_all_trees(&self) -> HashMap<ManifestId, Arc<Labels>> {
        let mut labels: HashMap<Holder, Arc<Labels>> = HashMap::new();
        if self.state.labels.is_empty() {
            return HashMap::new();
        }
        // Many trees have the same labels, which are in memory once.
        let mut distinct: HashSet<Arc<Labels>> = HashSet::new();
        let mut shared = |labels: Labels| match distinct.get(&labels) {
            Some(known) => Arc::clone(known),
            None => {
                let labels = Arc::new(labels);
                distinct.insert(Arc::clone(&labels));
                labels
            }
        };
        let mut derived: HashMap<Holder, Vec<Holder>> = HashMap::new();
        let mut pending: Vec<Holder> = self.names.keys().map(|tree| Holder::Tree(*tree)).collect();
        while let Some(holder) = pending.pop() {
            if labels.contains_key(&holder) {
                continue;
            }
            let (own, origins) = self.own_of(&holder);
            labels.insert(holder.clone(), shared(own.demands()));
            for origin in origins {
                let from = self.holder_of(&origin);
                derived.entry(from.clone()).or_default().push(holder.clone());
                pending.push(from);
            }
        }
        let mut waiting: VecDeque<Holder> = derived.keys().cloned().collect();
        while let Some(holder) = waiting.pop_front() {
            let (Some(others), Some(own)) = (derived.get(&holder), labels.get(&holder).cloned()) else { continue };
            for other in others {
                let theirs = labels.entry(other.clone()).or_default();
                let joined = Labels::clone(theirs).joined(&own).demands();
                if joined != **theirs {
                    *theirs = shared(joined);
                    waiting.push_back(other.clone());
                }
            }
        }
        let of_tree = |(holder, labels)| match holder {
            Holder::Tree(tree) => Some((tree, labels)),
            Holder::Name(_) => None,
        };
        labels.into_iter().filter_map(of_tree).collect()
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

    /// Joins the labels of names, of other names of the same trees, and of their origins.
    fn gathered<'n>(&'n self, mut waiting: Vec<&'n Name>) -> Labels {
        let mut labels = Labels::default();
        if self.state.labels.is_empty() {
            return labels;
        }
        let mut seen: BTreeSet<Name> = BTreeSet::new();
        // Each tree brings its names once.
        let mut trees: HashSet<ManifestId> = HashSet::new();
        let mut queue: Vec<Name> = waiting.drain(..).cloned().collect();
        while let Some(name) = queue.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            if let Some(value) = self.state.refs.get(&name).filter(|value| trees.insert(value.manifest)) {
                queue.extend(self.names.get(&value.manifest).into_iter().flatten().map(|&name| name.clone()));
            }
            let own = match self.declassified_labels(&name) {
                Some(signed) => signed.clone(),
                None => {
                    let own = self.state.own_labels(&name);
                    queue.extend(own.origins().iter().cloned());
                    own
                }
            };
            labels.join(&own);
        }
        labels.bounded()
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
