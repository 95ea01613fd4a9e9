//! Labels in the log. A label belongs to a name and to every name below it. It stays when the name is removed, and with the name's
//! tree.

mod places;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use super::entry::{Action, LogEntry};
use super::fields::read_name;
use super::state::{NODE_SHARE, State};
use crate::error::{Error, Result};
use crate::format::wire::{Reader, Writer};
use crate::id::ManifestId;
use crate::limits::NAME_LEN_MAX;
use crate::name::Name;
use crate::policy::{LABEL_VALUE_LEN_MAX, LABEL_VALUE_WEIGHT, LABEL_VALUES_JOINED_MAX, Labels};

pub(super) use places::Places;
use places::{Class, Group};

/// Maximum length of the reason of a declassification.
pub const REASON_LEN_MAX: usize = 1024;
/// Maximum bytes of labels that one entry makes names keep. What follows from small entries must not exceed the memory.
const KEPT_LABELS_MAX: usize = 16 << 20;
/// Maximum length of its signature.
const SIGNATURE_LEN_MAX: usize = 32 << 10;

/// Permission, signed with the policy key, to read one tree under laxer labels. It holds only where its signature is
/// verified, and only while its name has that tree.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Declassified {
    /// The tree.
    pub manifest: ManifestId,
    /// Labels in place of all own and inherited ones.
    pub labels: Labels,
    /// Labels that the name had, itself or from what is above it, when this was signed. It counts no longer once they differ: labels only
    /// get stricter, so an old declassification never counts again.
    pub replaces: Labels,
    /// Reason, for people.
    pub reason: String,
    /// Signature, as `transfer::identity::Signature` encodes it.
    pub signature: Vec<u8>,
}

impl Declassified {
    /// Statement that is signed.
    #[must_use]
    pub fn statement(&self, repository: &str, name: &Name) -> Vec<u8> {
        let Self { manifest, labels, replaces, reason, .. } = self;
        format!("{repository}\n{name}\n{manifest}\n{labels}\n{replaces}\n{reason}").into_bytes()
    }

    pub(super) fn write(&self, out: &mut Writer) {
        out.bytes(self.manifest.as_bytes());
        write_labels(out, &self.labels);
        write_labels(out, &self.replaces);
        out.string(self.reason.as_bytes()).string(&self.signature);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            manifest: ManifestId::from_bytes(reader.array()?),
            labels: read_labels(reader)?,
            replaces: read_labels(reader)?,
            reason: reader.kept_text(REASON_LEN_MAX)?,
            signature: reader.kept_string(SIGNATURE_LEN_MAX)?,
        })
    }

    /// Approximate bytes of memory beside its own size.
    pub(super) fn weight(&self) -> usize {
        self.labels.weight() + self.replaces.weight() + self.reason.len() + self.signature.len()
    }
}

/// Names that lose their trees, and the labels of all names of these trees.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    names: BTreeMap<Name, ManifestId>,
    labels: BTreeMap<ManifestId, Arc<Labels>>,
}

/// Names that lack labels.
struct Lacking<'a> {
    labels: Arc<Labels>,
    number: usize,
    names: LackingNames<'a>,
}

enum LackingNames<'a> {
    One(&'a Name),
    /// Names of a group, without those that are `One`.
    Group(&'a Class, &'a Group),
}

/// Version of the policy in force, and the digest of its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PolicyMark {
    /// Number in the key of its object, greater than that of any earlier policy.
    pub version: u64,
    /// BLAKE3 of the object.
    pub digest: [u8; 32],
}

impl PolicyMark {
    pub(super) fn write(&self, out: &mut Writer) {
        out.varint(self.version).bytes(&self.digest);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { version: reader.varint()?, digest: reader.array()? })
    }
}

/// Writes labels: `[n]` of tag (1 residency, 2 sensitivity, 3 tenant, 4 purpose, 5 derived-from), ascending, and `[n]` text, sorted.
pub(super) fn write_labels(out: &mut Writer, labels: &Labels) {
    let pairs = labels.pairs();
    out.count(pairs.len());
    for (key, value) in pairs {
        let tag = crate::policy::LABEL_KEYS.iter().position(|other| *other == key).unwrap_or_default() + 1;
        let values: Vec<&str> = if value == "-" { Vec::new() } else { value.split(',').collect() };
        out.u8(u8::try_from(tag).unwrap_or_default()).count(values.len());
        values.iter().for_each(|value| {
            out.string(value.as_bytes());
        });
    }
}

/// Reads labels in their only valid encoding; unsupported, if a later version added some.
pub(super) fn read_labels(reader: &mut Reader<'_>) -> Result<Labels> {
    let mut labels = Labels::default();
    let mut last = 0;
    for _ in 0..reader.count(2)? {
        let tag = reader.u8()?;
        let Some(key) = usize::from(tag).checked_sub(1).and_then(|at| crate::policy::LABEL_KEYS.get(at)) else {
            return Err(Error::unsupported("log has a label that this program does not know")
                .got(tag)
                .help("use a newer towline: this one cannot read content with unknown labels"));
        };
        let count = reader.count(1)?;
        // Labels of several names that were joined may have more values than one may be given, but no more than this.
        if tag <= last || (count == 0 && *key != "residency") || count > LABEL_VALUES_JOINED_MAX {
            return Err(reader.malformed("bad label").into());
        }
        last = tag;
        let longest = if *key == "derived-from" { NAME_LEN_MAX } else { LABEL_VALUE_LEN_MAX };
        // Their texts, and their places in the set.
        reader.keep(count * LABEL_VALUE_WEIGHT)?;
        let values = reader.kept_list(count, |reader| reader.kept_text(longest))?;
        let value = if values.is_empty() { "-".to_owned() } else { values.join(",") };
        let read = labels.clone().with_stored(key, &value);
        labels = read.map_err(|error| Error::damaged("log holds a bad label").source(error))?;
        let written = labels.pairs().pop().map(|(_, written)| written);
        if written.as_deref() != Some(&*value) {
            return Err(reader.malformed("label has a wrong encoding").into());
        }
    }
    Ok(labels)
}

impl State {
    /// Approximate bytes of memory of labels and declassifications.
    pub(super) fn labels_weight(&self) -> usize {
        let entry = size_of::<(Name, Labels)>();
        let labels = self.labels.iter().map(|(name, labels)| entry + name.as_str().len() + labels.weight());
        let declassified = self
            .declassified
            .iter()
            .map(|(name, value)| size_of::<(Name, Declassified)>() + name.as_str().len() + value.weight());
        labels.sum::<usize>() + declassified.sum::<usize>()
    }

    /// Joins `labels` to those of `name`. This ends earlier declassifications at or below it.
    pub(super) fn apply_label(&mut self, name: &Name, labels: &Labels) {
        match self.labels.get(name) {
            Some(own) if own.cover(labels) && own.fit_one_name() => {}
            own => self.set_record(name, own.cloned().unwrap_or_default().joined(labels).bounded()),
        }
        self.declassified.remove(name);
        // The names below it: they begin with it and a slash, and the character after the slash is `0`.
        let (from, to) = (format!("{name}/"), format!("{name}0"));
        let below = self.declassified.range::<str, _>((Bound::Excluded(&*from), Bound::Excluded(&*to)));
        for other in below.map(|(other, _)| other.clone()).collect::<Vec<_>>() {
            self.declassified.remove(&other);
        }
    }

    /// Names that `entry` removes or gives another tree, and the labels of all names of the trees that they had. Looks at each group
    /// of names with the same labels once, however many leave.
    pub(super) fn leaving(&mut self, entry: &LogEntry) -> Leaving {
        let mut leaving = Leaving::default();
        if self.labels.is_empty() {
            return leaving;
        }
        for action in &entry.actions {
            let (name, now) = match action {
                Action::SetRef { name, value, .. } => (name, Some(value.manifest)),
                Action::RemoveRef { name, .. } => (name, None),
                _ => continue,
            };
            let Some(tree) = self.refs.get(name).map(|value| value.manifest) else { continue };
            if Some(tree) != now {
                self.place_origins();
                if self.places.made_from(name).is_some() || self.is_labelled(name) {
                    leaving.names.insert(name.clone(), tree);
                }
            }
        }
        if !leaving.names.is_empty() {
            self.place_trees();
            let trees: BTreeSet<ManifestId> = leaving.names.values().copied().collect();
            leaving.labels = self.labels_of_trees(&trees).unwrap_or_else(|| self.labels_by_records(&trees));
        }
        leaving
    }

    /// Labels of all names of each of `trees`; none, if those of several take so much memory that some may be nowhere.
    fn labels_of_trees(&self, trees: &BTreeSet<ManifestId>) -> Option<BTreeMap<ManifestId, Arc<Labels>>> {
        let (mut found, mut weight) = (BTreeMap::new(), 0);
        for tree in trees {
            let labels = self.labels_of_names(tree);
            weight += labels.weight();
            if weight > KEPT_LABELS_MAX && trees.len() > 1 {
                return None;
            }
            found.insert(*tree, Arc::new(labels));
        }
        Some(found)
    }

    /// Labels of all names of a tree, [bounded](Labels::bounded).
    fn labels_of_names(&self, tree: &ManifestId) -> Labels {
        let (mut joined, mut above) = (Labels::default(), HashSet::new());
        let groups = self.places.of_tree(tree).into_iter().flat_map(|names| &names.groups);
        for (class, _) in groups.filter(|(_, group)| group.current > 0) {
            self.places.look(1);
            let is_new = class.above.as_ref().is_some_and(|name| above.insert(name));
            let records = if is_new { self.records_of(class) } else { class.own.as_deref().into_iter().collect() };
            for labels in records {
                if !joined.cover(labels) {
                    joined.join(labels);
                }
                if !joined.fit_one_name() {
                    return Labels::nowhere();
                }
            }
        }
        joined
    }

    /// As [`Self::labels_of_trees`]. Trees below one labelled name share its labels; those that find no room are nowhere.
    fn labels_by_records(&self, trees: &BTreeSet<ManifestId>) -> BTreeMap<ManifestId, Arc<Labels>> {
        let (mut shared, mut weight) = (HashMap::new(), 0);
        let mut found = BTreeMap::new();
        for tree in trees {
            let mut records: BTreeSet<&Name> = BTreeSet::new();
            for group in self.places.of_tree(tree).into_iter().flat_map(|names| names.groups.values()) {
                self.places.look(group.names.len());
                let has = |name: &&Name| self.refs.get(*name).is_some_and(|value| value.manifest == *tree);
                records.extend(group.names.iter().filter(has).flat_map(|name| self.labelled_above(name)));
            }
            let labels = shared.entry(records).or_insert_with_key(|records| {
                let labels = if weight > KEPT_LABELS_MAX { Labels::nowhere() } else { self.joined_records(records) };
                weight += labels.weight();
                Arc::new(labels)
            });
            found.insert(*tree, Arc::clone(labels));
        }
        found
    }

    /// Labels of all `records` together, [bounded](Labels::bounded).
    fn joined_records(&self, records: &BTreeSet<&Name>) -> Labels {
        let mut joined = Labels::default();
        for labels in records.iter().filter_map(|record| self.labels.get(*record)) {
            joined.join(labels);
            if !joined.fit_one_name() {
                return Labels::nowhere();
            }
        }
        joined
    }

    /// Records of labels of the names of a class.
    fn records_of<'a>(&'a self, class: &'a Class) -> Vec<&'a Labels> {
        let above = class.above.iter().flat_map(|name| self.labelled_above(name));
        class.own.as_deref().into_iter().chain(above.filter_map(|name| self.labels.get(name))).collect()
    }

    /// Labels of the names of a class, [bounded](Labels::bounded).
    fn labels_of_class<'a>(&'a self, class: &'a Class) -> Cow<'a, Labels> {
        let mut joined = Cow::Owned(Labels::default());
        for labels in self.records_of(class) {
            if labels.cover(&joined) {
                joined = Cow::Borrowed(labels);
            } else if !joined.cover(labels) {
                joined.to_mut().join(labels);
            }
            if !joined.fit_one_name() {
                return Cow::Owned(Labels::nowhere());
            }
        }
        joined
    }

    /// Keeps the labels of the trees that lost names, so that nothing loses a label because a name is removed or replaced: the other
    /// names of these trees get them, also those that can be undeleted, and the names that were made from the lost ones. If that
    /// would take more than [`KEPT_LABELS_MAX`] bytes, all of them may be nowhere instead. Returns the bytes of labels that were given.
    pub(super) fn keep_labels(&mut self, leaving: &Leaving) -> usize {
        if leaving.names.is_empty() {
            return 0;
        }
        let mut bytes = 0;
        for (name, labels) in self.given_labels(leaving) {
            self.places.look(1);
            let labels = Labels::clone(&labels).without_origin(&name);
            if !self.own_labels(&name).cover(&labels) {
                bytes += size_of::<(Name, Labels)>() + name.as_str().len() + labels.weight();
                self.apply_label(&name, &labels);
            }
        }
        bytes
    }

    /// Names that get labels of several trees, or of one without having it, each with these trees; and all others with kept values of
    /// the trees, if there are several.
    fn singly_given(&self, leaving: &Leaving) -> BTreeMap<Name, BTreeSet<ManifestId>> {
        let gives = |tree: &ManifestId| leaving.labels.get(tree).is_some_and(|labels| !labels.is_empty());
        let trees: Vec<ManifestId> = leaving.labels.keys().copied().filter(gives).collect();
        let mut single: BTreeMap<Name, BTreeSet<ManifestId>> = BTreeMap::new();
        // A name has one tree: what else it has are kept values.
        if trees.len() > 1 {
            for tree in &trees {
                for name in self.places.of_tree(tree).into_iter().flat_map(|names| &names.kept) {
                    single.entry(name.clone()).or_default().insert(*tree);
                }
            }
        }
        for (lost, tree) in leaving.names.iter().filter(|(_, tree)| gives(tree)) {
            for name in self.places.made_from(lost).into_iter().flatten() {
                single.entry(name.clone()).or_default().insert(*tree);
            }
        }
        for (name, given) in &mut single {
            given.extend(self.refs.get(name).map(|value| value.manifest).filter(gives));
            if let [tree] = &*trees
                && self.places.of_tree(tree).is_some_and(|names| names.kept.contains(name))
            {
                given.insert(*tree);
            }
        }
        self.places.look(single.len());
        single
    }

    /// Names that must get labels, and these, in the order in which they get them.
    fn given_labels(&self, leaving: &Leaving) -> Vec<(Name, Arc<Labels>)> {
        let single = self.singly_given(leaving);
        let of_trees = |trees: &BTreeSet<ManifestId>| {
            let labels = trees.iter().filter_map(|tree| leaving.labels.get(tree));
            Arc::new(labels.fold(Labels::default(), |joined, labels| joined.joined(labels).bounded()))
        };
        let (mut joined, mut lacking) = (HashMap::new(), Vec::new());
        // Members of groups that are looked at by themselves.
        let mut apart: HashMap<(ManifestId, Class), usize> = HashMap::new();
        for (name, trees) in &single {
            let class = self.class_of(name);
            for tree in trees {
                let group = self.places.of_tree(tree).and_then(|names| names.groups.get(&class));
                if group.is_some_and(|group| group.names.contains(name)) {
                    *apart.entry((*tree, class.clone())).or_default() += 1;
                }
            }
            let labels = joined.entry(trees.clone()).or_insert_with_key(of_trees);
            let own = self.labels_of_class(&class);
            if !own.cover(labels) {
                lacking.push(Lacking { labels: Arc::clone(labels), number: 1, names: LackingNames::One(name) });
            }
        }
        for (tree, labels) in leaving.labels.iter().filter(|(_, labels)| !labels.is_empty()) {
            for (class, group) in self.places.of_tree(tree).into_iter().flat_map(|names| &names.groups) {
                self.places.look(1);
                let own = self.labels_of_class(class);
                if !own.cover(labels) {
                    let apart = if apart.is_empty() { None } else { apart.get(&(*tree, class.clone())) };
                    let number = group.names.len() - apart.copied().unwrap_or_default();
                    lacking.push(Lacking {
                        labels: Arc::clone(labels),
                        number,
                        names: LackingNames::Group(class, group),
                    });
                }
            }
        }
        let weight = |lacking: &Lacking<'_>| lacking.number.saturating_mul(lacking.labels.weight());
        let nowhere = Arc::new(Labels::nowhere());
        let too_many = lacking.iter().map(weight).fold(0, usize::saturating_add) > KEPT_LABELS_MAX;
        let mut given: Vec<(Name, Arc<Labels>)> = Vec::new();
        for Lacking { labels, names, .. } in lacking {
            let labels = if too_many { &nowhere } else { &labels };
            match names {
                LackingNames::One(name) => given.push((name.clone(), Arc::clone(labels))),
                // Where they are nowhere already, they stay as they are.
                LackingNames::Group(class, _) if self.labels_of_class(class).cover(labels) => {}
                LackingNames::Group(_, group) => {
                    let names = group.names.iter().filter(|name| !single.contains_key(*name));
                    given.extend(names.map(|name| (name.clone(), Arc::clone(labels))));
                }
            }
        }
        given.sort_by(|(one, _), (other, _)| one.cmp(other));
        given
    }

    pub(super) fn write_labels(&self, out: &mut Writer) {
        out.count(self.labels.len());
        for (name, labels) in &self.labels {
            out.string(name.as_str().as_bytes());
            write_labels(out, labels);
        }
    }

    pub(super) fn read_labels(&mut self, r: &mut Reader<'_>) -> Result<()> {
        for _ in 0..r.count(3)? {
            r.keep_all::<(Name, Labels)>(NODE_SHARE)?;
            let name = read_name(r)?;
            self.labels.insert(name, read_labels(r)?);
        }
        Ok(())
    }

    /// Writes the policy in force and the declassifications.
    pub(super) fn write_policy(&self, out: &mut Writer) {
        out.u8(self.policy.is_some().into());
        if let Some(policy) = &self.policy {
            policy.write(out);
        }
        out.count(self.declassified.len());
        for (name, declassified) in &self.declassified {
            out.string(name.as_str().as_bytes());
            declassified.write(out);
        }
    }

    pub(super) fn read_policy(&mut self, r: &mut Reader<'_>) -> Result<()> {
        if r.flag()? {
            self.policy = Some(PolicyMark::read(r)?);
        }
        for _ in 0..r.count(37)? {
            r.keep_all::<(Name, Declassified)>(NODE_SHARE)?;
            let name = read_name(r)?;
            self.declassified.insert(name, Declassified::read(r)?);
        }
        Ok(())
    }

    /// Labels of `name` itself and of its prefixes, whatever its tree.
    #[must_use]
    pub fn own_labels(&self, name: &Name) -> Labels {
        let mut labels = Labels::default();
        for record in self.labelled_above(name) {
            labels.join(&self.labels[record]);
        }
        labels
    }

    /// True if `name` or a prefix of it has labels.
    fn is_labelled(&self, name: &Name) -> bool {
        self.labelled_above(name).into_iter().any(|record| !self.labels[record].is_empty())
    }

    /// The labelled ones of `name` and its prefixes, the longest first. Looks only at labelled names, however many prefixes there are.
    pub(super) fn labelled_above(&self, name: &Name) -> Vec<&Name> {
        let (mut found, text) = (Vec::new(), name.as_str());
        let mut longest = text;
        // The last record at or before a prefix of the name: a labelled prefix that is shorter sorts before it.
        while let Some((record, _)) =
            self.labels.range::<str, _>((Bound::Unbounded, Bound::Included(longest))).next_back()
        {
            let same = text.bytes().zip(record.as_str().bytes()).take_while(|(one, other)| one == other).count();
            let end = if name.is_under(record) {
                found.push(record);
                same - 1
            } else {
                same
            };
            // A shorter labelled prefix ends at or before the first byte that differs.
            let Some(slash) = text.get(..=end).and_then(|prefix| prefix.rfind('/')) else { break };
            longest = &text[..slash];
        }
        found
    }

    /// Names below `name`, also such as can be undeleted, whose own labels get stricter if `name` gets the labels `given`.
    pub fn tightened_below<'a>(&'a self, name: &'a Name, given: &'a Labels) -> impl Iterator<Item = &'a Name> {
        let (from, to) = (format!("{name}/"), format!("{name}0"));
        let current =
            self.refs.range::<str, _>((Bound::Excluded(&*from), Bound::Excluded(&*to))).map(|(other, _)| other);
        let after = (Bound::Excluded((name.clone(), u64::MAX)), Bound::Unbounded);
        let removed = self.removed.range(after).map(|((other, _), _)| other);
        let removed = removed.take_while(move |other| *other.as_str() < *to).filter(move |other| other.is_under(name));
        current.chain(removed).filter(move |other| !self.own_labels(other).cover(given))
    }

    /// Action that gives `name` the labels `given`, unless it has them.
    ///
    /// # Errors
    /// Exhausted, if the name would have too many values.
    pub fn label(&self, name: &Name, given: &Labels) -> Result<Option<Action>> {
        let own = self.own_labels(name);
        if own.clone().joined(given) == own {
            return Ok(None);
        }
        let joined = self.labels.get(name).cloned().unwrap_or_default().joined(given);
        if !joined.fit_one_name() {
            return Err(Error::exhausted("name would have too many labels")
                .at(name)
                .expected(format!("at most {LABEL_VALUES_JOINED_MAX} values of each"))
                .help("save what has other origins under another name"));
        }
        Ok(Some(Action::Label { name: name.clone(), labels: given.clone() }))
    }
}

/// Name that gets the labels given with `name`: those of a step belong to its run, so that the next step has them, too.
#[must_use]
pub fn labelled_name(name: &Name) -> Name {
    name.step().map_or_else(|| name.clone(), |(run, _)| run)
}
