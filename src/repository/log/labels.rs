//! Labels in the log, and the labels of content that follow from them.
//!
//! A label belongs to a name and to every name below it. It stays when the name is removed. Content has the labels of
//! all its names, and of all names that these were made from; the strictest apply.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::entry::{Action, LogEntry};
use super::fields::read_name;
use super::state::{NODE_SHARE, State};
use super::values::RefValue;
use crate::error::{Error, Result};
use crate::format::wire::{Reader, Writer};
use crate::id::ManifestId;
use crate::limits::NAME_LEN_MAX;
use crate::name::Name;
use crate::policy::{LABEL_VALUE_LEN_MAX, LABEL_VALUES_MAX, Labels};

/// Maximum length of the reason of a declassification.
pub const REASON_LEN_MAX: usize = 1024;
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
        if tag <= last || count > LABEL_VALUES_MAX || (count == 0 && *key != "residency") {
            return Err(reader.malformed("bad label").into());
        }
        last = tag;
        let longest = if *key == "derived-from" { NAME_LEN_MAX } else { LABEL_VALUE_LEN_MAX };
        let values = reader.kept_list(count, |reader| reader.kept_text(longest))?;
        let value = if values.is_empty() { "-".to_owned() } else { values.join(",") };
        let read = labels.clone().with(key, &value);
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
        self.labels.entry(name.clone()).or_default().join(labels);
        let below = |other: &Name| other.is_under(name);
        // Names below it follow it, among others that begin alike.
        let ended = self.declassified.range(name.clone()..).map(|(other, _)| other);
        let ended = ended.take_while(|other| other.as_str().starts_with(name.as_str()));
        for other in ended.filter(|other| below(other)).cloned().collect::<Vec<_>>() {
            self.declassified.remove(&other);
        }
    }

    /// Own labels of the names that `entry` removes or gives another tree, by their present trees.
    pub(super) fn labels_left_behind(&self, entry: &LogEntry) -> BTreeMap<ManifestId, Labels> {
        let mut left = BTreeMap::new();
        if self.labels.is_empty() {
            return left;
        }
        for action in &entry.actions {
            let (name, now) = match action {
                Action::SetRef { name, value, .. } => (name, Some(value.manifest)),
                Action::RemoveRef { name, .. } => (name, None),
                _ => continue,
            };
            let Some(before) = self.refs.get(name).map(|value| value.manifest).filter(|tree| Some(*tree) != now) else {
                continue;
            };
            let own = self.own_labels(name);
            if !own.is_empty() {
                left.entry(before).or_insert_with(Labels::default).join(&own);
            }
        }
        left
    }

    /// Gives the remaining names of the trees in `left` the labels that other names of these trees had: a tree loses no label
    /// because one of its names is removed or replaced.
    pub(super) fn keep_labels(&mut self, left: &BTreeMap<ManifestId, Labels>) {
        if left.is_empty() {
            return;
        }
        let of = |(name, value): (&Name, &RefValue)| {
            let labels = left.get(&value.manifest)?.clone().without_origin(name);
            let own = self.own_labels(name);
            (own.clone().joined(&labels) != own).then(|| (name.clone(), labels))
        };
        for (name, labels) in self.refs.iter().filter_map(of).collect::<Vec<_>>() {
            self.apply_label(&name, &labels);
        }
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
        if self.labels.is_empty() {
            return labels;
        }
        for prefix in name.and_above() {
            if let Some(own) = self.labels.get(&prefix) {
                labels.join(own);
            }
        }
        labels
    }

    /// Action that gives `name` the labels `given`, unless it has them.
    #[must_use]
    pub fn label(&self, name: &Name, given: &Labels) -> Option<Action> {
        let own = self.own_labels(name);
        let has = own.clone().joined(given) == own;
        (!has).then(|| Action::Label { name: name.clone(), labels: given.clone() })
    }
}

/// The labels of all content of a state.
#[derive(Debug)]
pub struct LabelView<'a> {
    state: &'a State,
    names: HashMap<ManifestId, Vec<&'a Name>>,
    honoured: BTreeSet<Name>,
}

impl<'a> LabelView<'a> {
    /// Labels of `state`; `accepts_declassification` returns true if a declassification is validly signed.
    #[must_use]
    pub fn new(state: &'a State, accepts_declassification: impl Fn(&Name, &Declassified) -> bool) -> Self {
        let mut names: HashMap<ManifestId, Vec<&Name>> = HashMap::new();
        if !state.labels.is_empty() {
            for (name, value) in &state.refs {
                names.entry(value.manifest).or_default().push(name);
            }
        }
        let stands = |name: &Name, tree: &ManifestId| state.refs.get(name).is_some_and(|value| value.manifest == *tree);
        let honoured = state.declassified.iter();
        let honoured = honoured.filter(|(name, signed)| {
            stands(name, &signed.manifest)
                && state.own_labels(name) == signed.replaces
                && accepts_declassification(name, signed)
        });
        let honoured = honoured.map(|(name, _)| name.clone()).collect();
        Self { state, names, honoured }
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

    /// Labels of all trees: as [`Self::of_tree`] for each, but labels that many trees derive are passed on once.
    #[must_use]
    pub fn of_all_trees(&self) -> HashMap<ManifestId, Labels> {
        let (mut labels, mut waiting) = (HashMap::new(), VecDeque::new());
        if self.state.labels.is_empty() {
            return labels;
        }
        // Trees by their origins: those that get the labels of a tree, or of a name without one.
        let mut by_tree: HashMap<ManifestId, Vec<ManifestId>> = HashMap::new();
        let mut by_name: HashMap<Name, Vec<ManifestId>> = HashMap::new();
        for (tree, names) in &self.names {
            let mut own = Labels::default();
            for name in names {
                let labels = self.declassified_labels(name).cloned();
                let (labels, derived) =
                    labels.map_or_else(|| (self.state.own_labels(name), true), |signed| (signed, false));
                for origin in labels.origins().iter().filter(|_| derived) {
                    match self.state.refs.get(origin) {
                        Some(value) => by_tree.entry(value.manifest).or_default().push(*tree),
                        None => by_name.entry(origin.clone()).or_default().push(*tree),
                    }
                }
                own.join(&labels);
            }
            waiting.push_back(*tree);
            labels.insert(*tree, own);
        }
        for (name, trees) in by_name {
            let gathered = self.of(&name);
            for tree in trees {
                labels.entry(tree).or_default().join(&gathered);
            }
        }
        while let Some(tree) = waiting.pop_front() {
            let (Some(derived), Some(own)) = (by_tree.get(&tree), labels.get(&tree).cloned()) else { continue };
            for other in derived {
                let theirs = labels.entry(*other).or_default();
                let joined = theirs.clone().joined(&own);
                if joined != *theirs {
                    *theirs = joined;
                    waiting.push_back(*other);
                }
            }
        }
        labels
    }

    /// Labels of the declassification of `name`, if it has one that counts.
    fn declassified_labels(&self, name: &Name) -> Option<&Labels> {
        if !self.honoured.contains(name) {
            return None;
        }
        self.state.declassified.get(name).map(|signed| &signed.labels)
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
        labels
    }

    /// True if a signed declassification replaces the labels of `name`.
    #[must_use]
    pub fn is_declassified(&self, name: &Name) -> bool {
        self.honoured.contains(name)
    }

    /// True if some name has labels that `own` does not imply.
    #[must_use]
    pub fn has_stricter_than(&self, own: &Labels) -> bool {
        self.state.labels.values().any(|labels| !own.imply(labels))
    }
}

/// Name that gets the labels given with `name`: those of a step belong to its run, so that the next step has them, too.
#[must_use]
pub fn labelled_name(name: &Name) -> Name {
    name.step().map_or_else(|| name.clone(), |(run, _)| run)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::Timestamp;
    use crate::error::ErrorKind;
    use crate::id::{Owned, SessionId};
    use crate::repository::log::StepFacts;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn labels(text: &str) -> Labels {
        let pairs = text.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        pairs.fold(Labels::default(), |labels, (key, value)| labels.with(key, value).unwrap())
    }

    /// State with trees, each named by one letter, under names, and labels.
    fn state(refs: &[(&str, &str)], given: &[(&str, &str)]) -> State {
        let key = Owned::fresh(SessionId::random());
        let value = |tree: &str| RefValue {
            version: 1,
            manifest: ManifestId::of(tree.as_bytes()),
            manifest_key: key,
            map_key: key,
            saved: Timestamp(0),
            logical_bytes: 0,
            files: 0,
            chunks: 0,
            behind: 0,
            facts: StepFacts::default(),
            attempt: None,
        };
        State {
            refs: refs.iter().map(|(text, tree)| (name(text), value(tree))).collect(),
            labels: given.iter().map(|(text, given)| (name(text), labels(given))).collect(),
            ..State::default()
        }
    }

    fn effective(state: &State, text: &str) -> String {
        LabelView::new(state, |_, _| true).of(&name(text)).to_string()
    }

    fn written(labels: &Labels) -> Vec<u8> {
        let mut out = Writer::new();
        write_labels(&mut out, labels);
        out.into_bytes()
    }

    fn read(bytes: &[u8]) -> Result<Labels> {
        let mut reader = Reader::new(bytes);
        let labels = read_labels(&mut reader)?;
        reader.finish()?;
        Ok(labels)
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_the_same(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(labels) = read(&bytes) {
                prop_assert_eq!(written(&labels), bytes);
            }
        }
    }

    #[test]
    fn labels_survive_the_log() {
        for text in [
            "",
            "residency=- sensitivity=secret",
            "residency=DE,EU sensitivity=public tenant=a,b purpose=c derived-from=raw/a,raw/b",
        ] {
            assert_eq!(read(&written(&labels(text))).unwrap(), labels(text), "{text}");
        }
        let unknown = [1, 6, 1, 1, b'x'];
        assert_eq!(read(&unknown).unwrap_err().kind(), ErrorKind::Unsupported);
        for bad in [&[1, 1, 1, 2, b'e', b'u'][..], &[1, 3, 0], &[1, 2, 1, 1, b'x'], &[2, 3, 1, 1, b'a', 1, 1, 1, b'A']]
        {
            assert_eq!(read(bad).unwrap_err().kind(), ErrorKind::Damaged, "{bad:?}");
        }
    }

    #[test]
    fn names_inherit_from_prefixes() {
        let state = state(
            &[("run/step-1", "a"), ("run-2/step-1", "b")],
            &[("run", "sensitivity=restricted"), ("run/step-1", "residency=EU")],
        );
        assert_eq!(effective(&state, "run/step-1"), "residency=EU sensitivity=restricted");
        assert_eq!(effective(&state, "run/step-2"), "sensitivity=restricted");
        assert_eq!(effective(&state, "run-2/step-1"), "");
    }

    #[test]
    fn a_tree_has_the_strictest_labels_of_its_names() {
        let state = state(&[("lax", "a"), ("strict", "a"), ("other", "b")], &[("strict", "sensitivity=secret")]);
        for text in ["lax", "strict"] {
            assert_eq!(effective(&state, text), "sensitivity=secret");
        }
        assert_eq!(effective(&state, "other"), "");
        let view = LabelView::new(&state, |_, _| true);
        assert_eq!(view.of_tree(&ManifestId::of(b"a")).to_string(), "sensitivity=secret");
    }

    #[test]
    fn all_trees_at_once_have_the_labels_that_each_has() {
        let refs = [("raw", "a"), ("twin", "a"), ("x", "b"), ("y", "c"), ("z", "d"), ("alone", "e"), ("late", "f")];
        let given = [
            ("raw", "tenant=t derived-from=z"),
            ("x", "derived-from=twin sensitivity=secret"),
            ("y", "derived-from=x residency=DE"),
            ("z", "derived-from=y,gone"),
            ("gone", "purpose=p derived-from=alone"),
            ("alone", "tenant=other"),
        ];
        let state = state(&refs, &given);
        let view = LabelView::new(&state, |_, _| false);
        let all = view.of_all_trees();
        assert_eq!(all.len(), 6);
        for (tree, labels) in &all {
            assert_eq!(*labels, view.of_tree(tree));
        }
        assert!(all.values().filter(|labels| labels.sensitivity().is_some()).count() == 4, "{all:?}");
    }

    #[test]
    fn origins_hand_on_what_they_have_now() {
        let refs = [("raw", "a"), ("copy-of-raw", "a"), ("made", "b"), ("made-again", "c")];
        let given = [
            ("copy-of-raw", "tenant=t"),
            ("made", "derived-from=raw"),
            ("made-again", "derived-from=made,made-again"),
            ("gone", "residency=EU"),
            ("late", "derived-from=gone"),
        ];
        let state = state(&refs, &given);
        assert!(effective(&state, "made-again").contains("tenant=t"));
        assert!(effective(&state, "late").contains("residency=EU"), "its origin need not be there");
    }

    #[test]
    fn a_declassification_counts_for_its_tree_while_it_is_honoured() {
        let mut state = state(&[("set/clean", "a"), ("set/raw", "b")], &[("set", "sensitivity=secret residency=EU")]);
        let signed = Declassified {
            manifest: ManifestId::of(b"a"),
            labels: labels("sensitivity=internal"),
            replaces: labels("sensitivity=secret residency=EU"),
            reason: "anonymised".to_owned(),
            signature: vec![1],
        };
        state.declassified.insert(name("set/clean"), signed.clone());
        assert_eq!(effective(&state, "set/clean"), "sensitivity=internal");
        // Later labels end it, and it cannot be put there again.
        let mut later = state.clone();
        later.apply_label(&name("set/clean"), &labels("tenant=clinic"));
        assert!(later.declassified.is_empty());
        later.declassified.insert(name("set/clean"), signed);
        assert_eq!(effective(&later, "set/clean"), "residency=EU sensitivity=secret tenant=clinic");
        assert_eq!(effective(&state, "set/raw"), "residency=EU sensitivity=secret");
        let view = LabelView::new(&state, |_, _| false);
        assert_eq!(view.of(&name("set/clean")).to_string(), "residency=EU sensitivity=secret");
        // Another name for the same tree, or another tree under the name, is not declassified.
        let again = state.refs.get(&name("set/clean")).unwrap().clone();
        state.refs.insert(name("set/again"), again);
        assert_eq!(effective(&state, "set/clean"), "residency=EU sensitivity=secret");
        state.refs.remove(&name("set/again"));
        state.refs.get_mut(&name("set/clean")).unwrap().manifest = ManifestId::of(b"c");
        assert_eq!(effective(&state, "set/clean"), "residency=EU sensitivity=secret");
    }

    #[test]
    fn labels_that_are_there_are_not_given_again() {
        let state = state(&[], &[("run", "sensitivity=restricted")]);
        assert!(state.label(&name("run/step-1"), &labels("sensitivity=internal")).is_none());
        assert!(state.label(&name("run/step-1"), &labels("sensitivity=secret")).is_some());
        assert_eq!(labelled_name(&name("run/step-7")), name("run"));
        assert_eq!(labelled_name(&name("models/base")), name("models/base"));
    }
}
