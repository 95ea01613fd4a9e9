//! Tests of labels in the log: inheritance, joins, declassification, and limits.

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

/// Names of few letters, so that many are alike, with characters that sort before and after the slash.
fn any_name() -> impl Strategy<Value = Name> {
    prop::collection::vec("[a+-.0b]{1,2}", 1..5).prop_filter_map("a name", |parts| parts.join("/").parse().ok())
}

proptest! {
    #[test]
    fn the_labelled_names_above_a_name_are_those_of_all_its_prefixes(
        labelled in prop::collection::btree_set(any_name(), 0..40),
        name in any_name(),
    ) {
        let state = State {
            labels: labelled.into_iter().map(|name| (name, labels("sensitivity=secret"))).collect(),
            ..State::default()
        };
        let mut expected: Vec<Name> = name.and_above().filter(|prefix| state.labels.contains_key(prefix)).collect();
        expected.reverse();
        prop_assert_eq!(state.labelled_above(&name).into_iter().cloned().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn labels_end_the_declassifications_at_and_below_their_name(
        declassified in prop::collection::btree_set(any_name(), 0..40),
        name in any_name(),
    ) {
        let signed = Declassified {
            manifest: ManifestId::of(b"a"),
            labels: Labels::default(),
            replaces: Labels::default(),
            reason: String::new(),
            signature: vec![],
        };
        let mut state = State {
            declassified: declassified.iter().map(|name| (name.clone(), signed.clone())).collect(),
            ..State::default()
        };
        state.apply_label(&name, &labels("sensitivity=secret"));
        let expected: Vec<&Name> = declassified.iter().filter(|other| !other.is_under(&name)).collect();
        prop_assert_eq!(state.declassified.keys().collect::<Vec<_>>(), expected);
    }
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
    for bad in [&[1, 1, 1, 2, b'e', b'u'][..], &[1, 3, 0], &[1, 2, 1, 1, b'x'], &[2, 3, 1, 1, b'a', 1, 1, 1, b'A']] {
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
    let remove =
        |state: &State, text: &str| Action::RemoveRef { name: name(text), expected: state.refs[&name(text)].version };
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
    let given: Vec<(&str, &str)> = names.iter().zip(&origins).map(|(name, of)| (name.as_str(), of.as_str())).collect();
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

#[test]
fn labels_of_very_many_names_are_bounded_and_shared() {
    let list = |prefix: &str, len: usize| (0..len).map(|n| format!("{prefix}{n}")).collect::<Vec<_>>().join(",");
    let large = Labels::default().with_stored("tenant", &list("t", 250)).unwrap();
    let names: Vec<String> = (0..2_000).map(|n| format!("run/{n}")).collect();
    let trees: Vec<String> = (0..2_000).map(|n| format!("tree {n}")).collect();
    let refs: Vec<(&str, &str)> = names.iter().zip(&trees).map(|(name, tree)| (name.as_str(), tree.as_str())).collect();
    let mut state = state(&refs, &[]);
    state.labels.insert(name("run"), large.clone());
    let view = LabelView::new(&state, |_, _| false);
    let all = view.of_all_trees();
    let one = &all[&ManifestId::of(b"tree 0")];
    assert_eq!(**one, large);
    assert!(all.values().all(|labels| Arc::ptr_eq(labels, one)), "names below one label share it");
    drop(view);
    // Each has a label of its own beside: 2,000 times 25 KB are too many, and then content is nowhere.
    for n in 0..2_000 {
        state.labels.insert(name(&format!("run/{n}")), labels(&format!("purpose=p{n}")));
    }
    let view = LabelView::new(&state, |_, _| false);
    let all = view.of_all_trees();
    let is_nowhere = |labels: &Labels| *labels == Labels::nowhere().demands();
    let nowhere = all.values().filter(|labels| is_nowhere(labels)).count();
    assert!((1_000..1_900).contains(&nowhere), "{nowhere}");
    for (name, tree) in refs {
        let labels = &all[&ManifestId::of(tree.as_bytes())];
        assert!(is_nowhere(labels) || labels.imply(&view.of(&name.parse().unwrap())), "{name}");
    }
}
