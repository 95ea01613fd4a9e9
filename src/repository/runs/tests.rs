//! Tests of runs and choices with synthetic refs.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::clock::Timestamp;
use crate::error::ErrorKind;
use crate::id::{ManifestId, ObjectId, Owned, SessionId};
use crate::repository::log::{State, StepFacts};

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A value set by entry `version`, with metrics.
pub(crate) fn value(version: u64, metrics: &[(&str, f64)]) -> RefValue {
    let key = Owned { session: SessionId::from_bytes([1; 16]), object: ObjectId::from_bytes([2; 16]) };
    let facts = metrics.iter().fold(StepFacts::default(), |facts, (name, value)| facts.metric(name, *value).unwrap());
    RefValue {
        version,
        manifest: ManifestId::from_bytes([3; 32]),
        manifest_key: key,
        map_key: key,
        saved: Timestamp(0),
        logical_bytes: 100,
        files: 1,
        chunks: 1,
        behind: 0,
        facts,
        attempt: None,
    }
}

fn refs<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeMap<Name, RefValue> {
    names.into_iter().zip(1..).map(|(text, version)| (name(text), value(version, &[]))).collect()
}

fn chosen(refs: &BTreeMap<Name, RefValue>, selector: &str) -> Result<String> {
    let state = State::of(refs.clone());
    selector.parse::<Selector>()?.resolve(&state).map(|name| name.to_string())
}

#[test]
fn step_n_below_a_run_is_a_step_and_nothing_else_is() {
    for (text, step) in [
        ("run/step-7", Some(("run", 7))),
        ("a/b/step-0007", Some(("a/b", 7))),
        ("a/step-1/step-2", Some(("a/step-1", 2))),
        ("run/step-18446744073709551615", Some(("run", u64::MAX))),
        ("run/step-18446744073709551616", None),
        ("step-7", None),
        ("run/step-", None),
        ("run/step-+7", None),
        ("run/step--7", None),
        ("run/step-7x", None),
        ("run/Step-7", None),
        ("run/step-7/x", None),
        ("run/7", None),
    ] {
        assert_eq!(name(text).step(), step.map(|(run, number)| (name(run), number)), "{text}");
    }
}

#[test]
fn steps_are_in_the_order_of_their_numbers() {
    let refs = refs(["r/step-10", "r/step-9", "r/step-100", "r/best", "q/step-1", "r/eval/step-5", "r"]);
    let runs = Run::all(&refs);
    let listed: Vec<(&str, Vec<u64>)> =
        runs.iter().map(|run| (run.name().as_str(), run.steps().iter().map(|step| step.number).collect())).collect();
    assert_eq!(listed, [("q", vec![1]), ("r", vec![9, 10, 100]), ("r/eval", vec![5])]);
    assert_eq!(Run::find(&refs, &name("r")).unwrap(), runs[1]);
    assert_eq!(Run::find(&refs, &name("none")).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn of_two_names_with_one_number_the_later_counts() {
    let mut refs = refs(["r/step-007", "r/step-7", "r/step-07", "r/step-1"]);
    let run = Run::find(&refs, &name("r")).unwrap();
    assert_eq!(run.steps().len(), 4);
    assert_eq!(run.counting().map(|step| step.name.as_str()).collect::<Vec<_>>(), ["r/step-1", "r/step-07"]);
    assert_eq!(run.latest().name.as_str(), "r/step-07");
    refs.insert(name("r/step-007"), value(9, &[("loss", 5.0)]));
    refs.insert(name("r/step-7"), value(8, &[("loss", 1.0)]));
    assert_eq!(chosen(&refs, "r@latest").unwrap(), "r/step-007");
    assert_eq!(chosen(&refs, "r@min=loss").unwrap(), "r/step-007", "what does not count is not chosen");
}

#[test]
fn selectors_choose_one_step() {
    let listed: [(&str, &[(&str, f64)]); 5] = [
        ("r/step-1", &[("loss", 3.0), ("acc", 0.1)]),
        ("r/step-2", &[("loss", 1.0)]),
        ("r/step-3", &[("loss", 1.0), ("acc", 0.5)]),
        ("r/step-4", &[("loss", 2.0), ("acc", 0.5)]),
        ("r/step-5", &[]),
    ];
    let refs = listed.iter().zip(1..).map(|((text, metrics), n)| (name(text), value(n, metrics))).collect();
    for (selector, step) in [
        ("r@latest", "r/step-5"),
        ("r@upto=3", "r/step-3"),
        ("r@upto=99", "r/step-5"),
        ("r@min=loss", "r/step-3"),
        ("r@max=loss", "r/step-1"),
        ("r@max=acc", "r/step-4"),
        ("r/step-2", "r/step-2"),
        ("not/there", "not/there"),
    ] {
        assert_eq!(chosen(&refs, selector).unwrap(), step, "{selector}");
        assert_eq!(selector.parse::<Selector>().unwrap().to_string(), selector);
    }
    let error = chosen(&refs, "r@min=los").unwrap_err();
    assert_eq!((error.kind(), error.to_string().contains("acc, loss")), (ErrorKind::NotFound, true), "{error}");
    assert_eq!(chosen(&refs, "r@upto=0").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(chosen(&refs, "none@latest").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn what_chooses_nothing_is_wrong_usage() {
    for text in
        ["r@", "@latest", "r@first", "r@upto=", "r@upto=-1", "r@upto=+1", "r@min", "r@min=", "r@max=a/b", "a@b@latest"]
    {
        assert_eq!(text.parse::<Selector>().unwrap_err().kind(), ErrorKind::Usage, "{text}");
    }
    let error = "r@max=".parse::<Selector>().unwrap_err();
    assert!(error.to_string().starts_with("the metric to choose the step by is missing"), "{error}");
}

proptest! {
    #[test]
    fn choices_are_what_a_plain_search_finds(
        steps in prop::collection::btree_map(0_u64..40, prop::option::of(-3_i8..4), 1..20),
        most in 0_u64..45,
    ) {
        let listed = |(number, metric): (&u64, &Option<i8>)| {
            let metrics: Vec<_> = metric.iter().map(|&m| ("m", f64::from(m))).collect();
            (name(&format!("r/step-{number}")), value(1, &metrics))
        };
        let refs: BTreeMap<Name, RefValue> = steps.iter().map(listed).collect();
        let named = |number: Option<u64>| number.map(|number| format!("r/step-{number}"));
        prop_assert_eq!(chosen(&refs, "r@latest").ok(), named(steps.keys().max().copied()));
        let upto = steps.keys().filter(|&&number| number <= most).max();
        prop_assert_eq!(chosen(&refs, &format!("r@upto={most}")).ok(), named(upto.copied()));
        let measured = || steps.iter().filter_map(|(&number, metric)| metric.map(|metric| (metric, number)));
        let least = measured().min_by_key(|&(metric, number)| (metric, std::cmp::Reverse(number)));
        prop_assert_eq!(chosen(&refs, "r@min=m").ok(), named(least.map(|(_, number)| number)));
        prop_assert_eq!(chosen(&refs, "r@max=m").ok(), named(measured().max().map(|(_, number)| number)));
    }
}
