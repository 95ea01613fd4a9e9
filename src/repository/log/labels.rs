//! Labels in the log. A label belongs to a name and to every name below it. It stays when the name is removed, and with the name's
//! tree.

use std::collections::{BTreeMap, BTreeSet, HashSet};

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
    labels: BTreeMap<ManifestId, Labels>,
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
        // Names below it follow it, among others that begin alike.
        let alike = self.declassified.range(name.clone()..).map(|(other, _)| other);
        let alike = alike.take_while(|other| other.as_str().starts_with(name.as_str()));
        for other in alike.filter(|other| other.is_under(name)).cloned().collect::<Vec<_>>() {
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
        for action in &entry.actions {
            let (name, now) = match action {
                Action::SetRef { name, value, .. } => (name, Some(value.manifest)),
                Action::RemoveRef { name, .. } => (name, None),
                _ => continue,
            };
            let Some(tree) = self.refs.get(name).map(|value| value.manifest) else { continue };
            if Some(tree) != now && (origins.contains(name) || !self.own_labels(name).is_empty()) {
                leaving.names.insert(name.clone(), tree);
                leaving.labels.insert(tree, Labels::default());
            }
        }
        if !leaving.names.is_empty() {
            for (name, value) in &self.refs {
                if let Some(labels) = leaving.labels.get_mut(&value.manifest) {
                    *labels = std::mem::take(labels).joined(&self.own_labels(name)).bounded();
                }
            }
        }
        leaving
    }

    /// Keeps the labels of the trees that lost names, so that nothing loses a label because a name is removed or replaced: the other
    /// names of these trees get them, also those that can be undeleted, and the names that were made from the lost ones. If that
    /// would take more than [`KEPT_LABELS_MAX`] bytes, all of them may be nowhere instead.
    pub(super) fn keep_labels(&mut self, leaving: &Leaving) {
        if leaving.names.is_empty() {
            return;
        }
        let mut given: BTreeMap<Name, BTreeSet<ManifestId>> = BTreeMap::new();
        let mut give = |name: &Name, tree: &ManifestId| {
            if leaving.labels.get(tree).is_some_and(|labels| !labels.is_empty()) {
                given.entry(name.clone()).or_default().insert(*tree);
            }
        };
        self.refs.iter().for_each(|(name, value)| give(name, &value.manifest));
        self.removed.iter().for_each(|((name, _), kept)| give(name, &kept.value.manifest));
        for (name, labels) in &self.labels {
            labels.origins().iter().filter_map(|origin| leaving.names.get(origin)).for_each(|tree| give(name, tree));
        }
        let weights: BTreeMap<ManifestId, usize> =
            leaving.labels.iter().map(|(tree, labels)| (*tree, labels.weight())).collect();
        let of_trees = |trees: &BTreeSet<ManifestId>| trees.iter().filter_map(|tree| weights.get(tree)).sum::<usize>();
        let too_many = given.values().map(of_trees).sum::<usize>() > KEPT_LABELS_MAX;
        for (name, trees) in given {
            let labels = if too_many {
                Labels::nowhere()
            } else {
                let labels = trees.iter().filter_map(|tree| leaving.labels.get(tree));
                labels.fold(Labels::default(), Labels::joined).bounded().without_origin(&name)
            };
            let own = self.own_labels(&name);
            if own.clone().joined(&labels) != own {
                self.apply_label(&name, &labels);
            }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::Timestamp;
    use crate::error::ErrorKind;
    use crate::id::{Owned, SessionId, WriteId};
    use crate::repository::log::{LabelView, RefValue, StepFacts};

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
    fn an_entry_of_many_short_values_is_not_decoded_with_less_than_they_take() {
        let values: Vec<String> = (0..LABEL_VALUES_JOINED_MAX).map(|n| format!("{n:03}")).collect();
        let given = Labels::default().with_stored("tenant", &values.join(",")).unwrap();
        let label = |n: usize| Action::Label { name: name(&format!("run/{n}")), labels: given.clone() };
        let actions: Vec<Action> = (0..100).map(label).collect();
        let entry = LogEntry { write: WriteId::from_bytes([1; 16]), session: None, at: Timestamp(0), actions };
        let (body, values) = (entry.encode(), (100 * LABEL_VALUES_JOINED_MAX) as u64);
        assert!(entry.weight() > 64 * values && (body.len() as u64) < 5 * values);
        assert_eq!(LogEntry::decode_within(&body, entry.weight() / 2).unwrap_err().kind(), ErrorKind::Exhausted);
        assert_eq!(LogEntry::decode_within(&body, 2 * entry.weight()).unwrap(), entry);
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
    fn joined_labels_have_as_many_values_as_one_name_may_have_or_are_nowhere() {
        let mut state = state(&[("raw", "a")], &[]);
        for n in 0..LABEL_VALUES_JOINED_MAX {
            state.apply_label(&name("raw"), &labels(&format!("tenant=t{n} derived-from=from/{n}")));
        }
        let mut out = Writer::new();
        write_labels(&mut out, &state.labels[&name("raw")]);
        let body = out.into_bytes();
        let read = read_labels(&mut Reader::new(&body)).unwrap();
        assert_eq!(read, state.labels[&name("raw")]);
        let error = state.label(&name("raw"), &labels("tenant=one-more")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(state.label(&name("raw"), &labels("tenant=t1")).unwrap().is_none());
        // An entry that says so all the same.
        state.apply_label(&name("raw"), &labels("purpose=p tenant=one-more"));
        assert_eq!(state.labels[&name("raw")], Labels::nowhere());
        let mut long = Writer::new();
        long.count(1).u8(3).count(LABEL_VALUES_JOINED_MAX + 1);
        (0..=LABEL_VALUES_JOINED_MAX).for_each(|n| {
            long.string(format!("t{n:04}").as_bytes());
        });
        let error = read_labels(&mut Reader::new(&long.into_bytes())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
    }

    #[test]
    fn labels_that_very_many_names_would_keep_take_no_memory() {
        let names: Vec<String> = (0..3_000).map(|n| format!("copy/{n}")).collect();
        let mut refs = vec![("raw", "a")];
        refs.extend(names.iter().map(|name| (name.as_str(), "a")));
        let mut state = state(&refs, &[]);
        for n in 0..LABEL_VALUES_JOINED_MAX {
            state.apply_label(&name("raw"), &labels(&format!("tenant={n:0>60}")));
        }
        let before = state.labels_weight();
        assert!(before > 20_000 && before * names.len() > KEPT_LABELS_MAX, "{before}");
        let version = state.refs[&name("raw")].version;
        let actions = vec![Action::RemoveRef { name: name("raw"), expected: version }];
        let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions };
        let leaving = state.leaving(&entry);
        state.refs.remove(&name("raw"));
        state.keep_labels(&leaving);
        assert_eq!(effective(&state, "copy/7"), "residency=- sensitivity=secret");
        assert!(state.labels_weight() < before + names.len() * 400, "{}", state.labels_weight());
    }

    #[test]
    fn what_is_taken_from_a_tree_stays_with_its_other_names() {
        let refs = [("raw", "a"), ("vault/raw", "a"), ("made", "b"), ("other", "c")];
        let mut state = state(&refs, &[("vault", "sensitivity=secret"), ("made", "derived-from=raw")]);
        let remove = |state: &State, text: &str| Action::RemoveRef {
            name: name(text),
            expected: state.refs[&name(text)].version,
        };
        let actions = vec![remove(&state, "raw"), remove(&state, "vault/raw")];
        let entry = LogEntry { write: WriteId::random(), session: None, at: Timestamp(0), actions };
        let leaving = state.leaving(&entry);
        for gone in ["raw", "vault/raw"] {
            state.refs.remove(&name(gone));
        }
        state.keep_labels(&leaving);
        let view = LabelView::new(&state, |_, _| false);
        assert_eq!(view.of(&name("made")).sensitivity().unwrap().word(), "secret");
        assert!(view.of(&name("other")).is_empty());
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
            assert_eq!(**labels, view.of_tree(tree).demands());
        }
        assert!(all.values().filter(|labels| labels.sensitivity().is_some()).count() == 4, "{all:?}");
    }

    /// A long chain, a ring, and all of them in one: each is looked at once, and long chains of origins restrict nothing.
    #[test]
    fn chains_and_rings_of_origins_are_passed_in_one_go() {
        let number = 3_000;
        let names: Vec<String> = (0..number).map(|n| format!("chain/{n}")).collect();
        let refs: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
        let origins: Vec<String> = (0..number)
            .map(|n| match n {
                0 => "tenant=first".to_owned(),
                // A ring of the last hundred.
                2_900 => "derived-from=chain/2899,chain/2999 purpose=ring".to_owned(),
                n => format!("derived-from=chain/{}", n - 1),
            })
            .collect();
        let given: Vec<(&str, &str)> =
            names.iter().zip(&origins).map(|(name, of)| (name.as_str(), of.as_str())).collect();
        let state = state(&refs, &given);
        let view = LabelView::new(&state, |_, _| false);
        let all = view.of_all_trees();
        for at in [0, 1, 257, 2_899, 2_900, 2_950, 2_999] {
            let labels = view.of(&name(&names[at]));
            assert!(labels.origins().len() <= 2, "only its own: {labels}");
            let expected = if at < 2_900 { "tenant=first" } else { "tenant=first purpose=ring" };
            assert_eq!(labels.clone().demands().to_string(), expected, "{at}");
            assert_eq!(*all[&state.refs[&name(&names[at])].manifest], labels.demands(), "{at}");
        }
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
        let unsigned = LabelView::new(&state, |_, _| false).of(&name("set/clean"));
        assert_eq!(unsigned.to_string(), "residency=EU sensitivity=secret");
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
        assert!(state.label(&name("run/step-1"), &labels("sensitivity=internal")).unwrap().is_none());
        assert!(state.label(&name("run/step-1"), &labels("sensitivity=secret")).unwrap().is_some());
        assert_eq!(labelled_name(&name("run/step-7")), name("run"));
        assert_eq!(labelled_name(&name("models/base")), name("models/base"));
    }
}
