//! Labels in the log. A label belongs to a name and to every name below it. It stays when the name is removed, and with the name's
//! tree.

#[cfg(test)]
mod tests;

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
        let own = self.labels.entry(name.clone()).or_default();
        *own = std::mem::take(own).joined(labels).bounded();
        self.declassified.remove(name);
        // The names below it: they begin with it and a slash, and the character after the slash is `0`.
        let (from, to) = (format!("{name}/"), format!("{name}0"));
        let below = self.declassified.range::<str, _>((Bound::Excluded(&*from), Bound::Excluded(&*to)));
        for other in below.map(|(other, _)| other.clone()).collect::<Vec<_>>() {
            self.declassified.remove(&other);
        }
    }

    /// Names that `entry` removes or gives another tree, and the labels of all names of the trees that they had. Looks at each name
    /// once, however many leave.
    pub(super) fn leaving(&self, entry: &LogEntry) -> Leaving {
        let mut leaving = Leaving::default();
        if self.labels.is_empty() {
            return leaving;
        }
        let origins: HashSet<&Name> = self.labels.values().flat_map(Labels::origins).collect();
        let mut records: BTreeMap<ManifestId, BTreeSet<&Name>> = BTreeMap::new();
        for action in &entry.actions {
            let (name, now) = match action {
                Action::SetRef { name, value, .. } => (name, Some(value.manifest)),
                Action::RemoveRef { name, .. } => (name, None),
                _ => continue,
            };
            let Some(tree) = self.refs.get(name).map(|value| value.manifest) else { continue };
            if Some(tree) != now && (origins.contains(name) || self.is_labelled(name)) {
                leaving.names.insert(name.clone(), tree);
                records.entry(tree).or_default();
            }
        }
        if leaving.names.is_empty() {
            return leaving;
        }
        for (name, value) in &self.refs {
            if let Some(records) = records.get_mut(&value.manifest) {
                records.extend(self.labelled_above(name));
            }
        }
        // Trees below one labelled name share its labels.
        let (mut shared, mut weight) = (HashMap::new(), 0);
        for (tree, records) in records {
            let labels = shared.entry(records).or_insert_with_key(|records| {
                let labels = if weight > KEPT_LABELS_MAX { Labels::nowhere() } else { self.joined_records(records) };
                weight += labels.weight();
                Arc::new(labels)
            });
            leaving.labels.insert(tree, Arc::clone(labels));
        }
        leaving
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

    /// Keeps the labels of the trees that lost names, so that nothing loses a label because a name is removed or replaced: the other
    /// names of these trees get them, also those that can be undeleted, and the names that were made from the lost ones. If that
    /// would take more than [`KEPT_LABELS_MAX`] bytes, all of them may be nowhere instead. Returns the bytes of labels that were given.
    pub(super) fn keep_labels(&mut self, leaving: &Leaving) -> usize {
        if leaving.names.is_empty() {
            return 0;
        }
        let given = self.lacking_labels(leaving);
        let too_many = given.iter().map(|(_, labels)| labels.weight()).sum::<usize>() > KEPT_LABELS_MAX;
        let mut bytes = 0;
        for (name, labels) in given {
            let labels = if too_many { Labels::nowhere() } else { Labels::clone(&labels).without_origin(&name) };
            let own = self.own_labels(&name);
            if own.clone().joined(&labels) != own {
                bytes += size_of::<(Name, Labels)>() + name.as_str().len() + labels.weight();
                self.apply_label(&name, &labels);
            }
        }
        bytes
    }

    /// Names that must get labels of `leaving`, because they do not have all of them.
    fn lacking_labels(&self, leaving: &Leaving) -> Vec<(Name, Arc<Labels>)> {
        let mut given: BTreeMap<&Name, BTreeSet<ManifestId>> = BTreeMap::new();
        let mut give = |name, tree: &ManifestId| {
            if leaving.labels.get(tree).is_some_and(|labels| !labels.is_empty()) {
                given.entry(name).or_default().insert(*tree);
            }
        };
        self.refs.iter().for_each(|(name, value)| give(name, &value.manifest));
        self.removed.iter().for_each(|((name, _), kept)| give(name, &kept.value.manifest));
        for (name, labels) in &self.labels {
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
            let records: BTreeSet<&Name> = self.labelled_above(name).into_iter().collect();
            let has_all = has_all.entry((records, trees)).or_insert_with_key(|(records, _)| {
                let own = self.joined_records(records);
                own.clone().joined(labels) == own
            });
            if !*has_all {
                lacking.push((name.clone(), Arc::clone(labels)));
            }
        }
        lacking
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
