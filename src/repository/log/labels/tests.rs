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
    state.apply(&entry).unwrap();
    state.drop_places();
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
    state.apply(&entry).unwrap();
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

/// Value of one of few trees, with one of few maps.
fn small_value(tree: u8, map: u8) -> RefValue {
    let key = |byte: u8| Owned {
        session: SessionId::from_bytes([0; 16]),
        object: crate::id::ObjectId::from_bytes([byte; 16]),
    };
    let mut value = state(&[("any", &tree.to_string())], &[]).refs.pop_first().unwrap().1;
    (value.map_key, value.manifest_key) = (key(map), key(0));
    value
}

fn any_labels() -> impl Strategy<Value = Labels> {
    let few =
        "residency=(DE|EU|DE,EU)|sensitivity=(internal|secret)|tenant=[ab]|purpose=[pq]|derived-from=[ab](/[ab])?";
    let some = prop::collection::vec(few, 0..3).prop_map(|pairs| labels(&pairs.join(" ")));
    // Some that are too many, together with others.
    let many = (0_usize..3).prop_map(|from| {
        let values: Vec<String> = (from..from + 255).map(|n| format!("{n:0>60}")).collect();
        Labels::default().with_stored("tenant", &values.join(",")).unwrap()
    });
    prop_oneof![9 => some, 1 => many]
}

/// Action, before it is known which version its name has.
#[derive(Clone, Debug)]
enum Change {
    Set(Name, u8, u8, bool),
    Remove(Name, bool),
    Forget(prop::sample::Index),
    Label(Name, Labels),
    Swap(u8, u8),
}

fn any_change() -> impl Strategy<Value = Change> {
    let near = || "[ab](/[ab]){0,2}".prop_map(|text| text.parse::<Name>().unwrap());
    prop_oneof![
        8 => (near(), 0_u8..3, 0_u8..3, any::<bool>()).prop_map(|(name, tree, map, keep)| Change::Set(name, tree, map, keep)),
        4 => (near(), any::<bool>()).prop_map(|(name, keep)| Change::Remove(name, keep)),
        1 => any::<prop::sample::Index>().prop_map(Change::Forget),
        4 => (near(), any_labels()).prop_map(|(name, labels)| Change::Label(name, labels)),
        2 => (0_u8..3, 0_u8..3).prop_map(|(old, new)| Change::Swap(old, new)),
    ]
}

/// Entry of those `changes` that may follow `state`.
fn entry_of(state: &State, changes: &[Change]) -> LogEntry {
    let mut actions = Vec::new();
    for change in changes {
        let (name, keeps, new) = match change {
            Change::Set(name, tree, map, keep) => (name, *keep, Some(small_value(*tree, *map))),
            Change::Remove(name, keep) => (name, *keep, None),
            Change::Forget(index) => {
                let kept: Vec<_> = state.removed.iter().collect();
                actions.extend((!kept.is_empty()).then(|| index.get(&kept)).map(|(key, kept)| kept.forget(key)));
                continue;
            }
            Change::Label(name, labels) => {
                actions.push(Action::Label { name: name.clone(), labels: labels.clone() });
                continue;
            }
            Change::Swap(old, new) => {
                let [old, new] = [old, new].map(|map| small_value(0, *map).map_key);
                actions.push(Action::SwapMap { old, new });
                continue;
            }
        };
        let expected = state.version(name);
        actions.extend(expected.filter(|_| keeps).map(|version| Action::Keep { name: name.clone(), version }));
        match (new, expected) {
            (Some(value), _) => actions.push(Action::SetRef { name: name.clone(), expected, value }),
            (None, Some(expected)) => actions.push(Action::RemoveRef { name: name.clone(), expected }),
            (None, None) => {}
        }
    }
    LogEntry { write: WriteId::from_bytes([1; 16]), session: None, at: Timestamp(0), actions }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn entries_change_names_and_labels_as_by_the_former_definition(
        entries in prop::collection::vec(prop::collection::vec(any_change(), 1..6), 1..25),
    ) {
        let (mut state, mut expected) = (State::default(), State::default());
        for changes in entries {
            let entry = entry_of(&expected, &changes);
            reference::apply(&mut expected, &entry);
            state.apply(&entry).unwrap();
            prop_assert_eq!(&state, &expected);
        }
        // The places that were kept up to date are those that would be found now.
        let weight = state.places.weight();
        let made = state.places.made();
        let mut fresh = state.clone();
        if made[0] {
            fresh.place_origins();
        }
        if made[1] {
            fresh.place_trees();
        }
        if made[2] {
            fresh.swap_maps(&HashMap::from([(small_value(0, 9).map_key, small_value(0, 9).map_key)]));
        }
        prop_assert_eq!(weight, fresh.places.weight());
        state.drop_places();
        prop_assert_eq!(state.places.weight(), 0);
    }
}

fn looked_at(state: &State) -> usize {
    state.places.looked_at.load(std::sync::atomic::Ordering::Relaxed)
}

/// Names of two trees, entry by entry, with labels of which many names of the first tree get too many: as many names as are given, of
/// which a fifth have a label of their own.
fn replaced_one_by_one(names: usize, entries: usize) -> (State, Vec<LogEntry>) {
    let text: Vec<String> = (0..names).map(|n| format!("t/{}/{n}", n % 10)).collect();
    let mut start = State { seq: 1, ..State::default() };
    let entry = |actions| LogEntry { write: WriteId::from_bytes([1; 16]), session: None, at: Timestamp(0), actions };
    for (n, text) in text.iter().enumerate() {
        start.refs.insert(name(text), RefValue { version: 1, ..small_value(0, 0) });
        if n % 5 == 0 {
            start.labels.insert(name(text), labels(&format!("tenant={:0>60}", n % 1_000)));
        }
    }
    let set = |text: &String| Action::SetRef { name: name(text), expected: Some(1), value: small_value(1, 1) };
    (start, text.iter().step_by(5).take(entries).map(|text| entry(vec![set(text)])).collect())
}

#[test]
fn an_entry_that_replaces_a_name_looks_at_few_of_very_many_names() {
    let (mut state, entries) = replaced_one_by_one(5_000, 100);
    // The first one finds the names of each tree, and gives labels to all names.
    let (first, rest) = entries.split_first().unwrap();
    state.apply(first).unwrap();
    assert_eq!(state.labels.len(), 4_999 + 1);
    let before = looked_at(&state);
    assert!((5_000..40_000).contains(&before), "{before}");
    for entry in rest {
        state.apply(entry).unwrap();
    }
    let each = (looked_at(&state) - before) / rest.len();
    assert!(each < 1_000, "{each} names and groups of names are looked at for each entry");
    let (mut expected, entries) = replaced_one_by_one(800, 2);
    let mut state = expected.clone();
    for entry in &entries {
        reference::apply(&mut expected, entry);
        state.apply(entry).unwrap();
    }
    assert_eq!(state, expected);
}

/// Labels of the trees that one entry takes are more than it may make names keep, whichever of them are shared.
#[test]
fn labels_of_very_many_trees_that_leave_are_bounded_as_by_the_former_definition() {
    for own in [0, 1, 3] {
        let mut start = State { seq: 1, ..State::default() };
        let values: Vec<String> = (0..250).map(|n| format!("{n:0>60}")).collect();
        start.labels.insert(name("run"), Labels::default().with_stored("tenant", &values.join(",")).unwrap());
        let mut actions = Vec::new();
        for n in 0..450 {
            let text = name(&format!("run/{n}"));
            let tree = ManifestId::of(format!("{n}").as_bytes());
            let value = RefValue { version: 1, manifest: tree, ..small_value(0, 0) };
            start.refs.insert(text.clone(), value.clone());
            start.refs.insert(name(&format!("twin/{n}")), value);
            if own > 0 && n % own == 0 {
                start.labels.insert(text.clone(), labels(&format!("purpose=p{}", n % 5)));
            }
            actions.extend((n % 2 == 0).then(|| Action::Keep { name: text.clone(), version: 1 }));
            actions.push(Action::RemoveRef { name: text, expected: 1 });
        }
        let entry = LogEntry { write: WriteId::from_bytes([1; 16]), session: None, at: Timestamp(0), actions };
        let mut expected = start.clone();
        reference::apply(&mut expected, &entry);
        start.apply(&entry).unwrap();
        assert!(start == expected, "one in {own}");
    }
}

#[test]
fn a_swap_of_maps_looks_at_the_values_that_have_them() {
    let (mut state, _) = replaced_one_by_one(2_000, 0);
    let swap = |old, new| {
        let [old, new] = [old, new].map(|map| small_value(0, map).map_key);
        let actions = vec![Action::SwapMap { old, new }];
        LogEntry { write: WriteId::from_bytes([1; 16]), session: None, at: Timestamp(0), actions }
    };
    for n in 0..100 {
        state.apply(&swap(10 + n, 11 + n)).unwrap();
    }
    assert!(looked_at(&state) < 3_000, "{}", looked_at(&state));
    state.apply(&swap(0, 10)).unwrap();
    assert!(state.refs.values().all(|value| value.map_key == small_value(0, 10).map_key));
}
