//! Plans, from runs made up for it.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use proptest::prelude::*;

use super::*;
use crate::clock::Timestamp;
use crate::error::ErrorKind;
use crate::id::{ManifestId, ObjectId, Owned, SessionId};
use crate::repository::log::{RefValue, StepFacts};

fn value(version: u64, loss: Option<f64>) -> RefValue {
    let key = Owned { session: SessionId::from_bytes([1; 16]), object: ObjectId::from_bytes([2; 16]) };
    let facts = loss.map(|loss| StepFacts::default().metric("loss", loss).unwrap()).unwrap_or_default();
    RefValue {
        version,
        manifest: ManifestId::from_bytes([3; 32]),
        manifest_key: key,
        map_key: key,
        saved: Timestamp(0),
        logical_bytes: 1,
        files: 1,
        chunks: 1,
        behind: 0,
        facts,
        attempt: None,
    }
}

fn run(steps: &[(&str, Option<f64>)]) -> BTreeMap<Name, RefValue> {
    let step = |((step, loss), version): (&(&str, Option<f64>), u64)| {
        (format!("r/step-{step}").parse().unwrap(), value(version, *loss))
    };
    steps.iter().zip(1..).map(step).collect()
}

fn planned(refs: &BTreeMap<Name, RefValue>, policy: &ExpirePolicy) -> Result<ExpirePlan> {
    plan(&Run::find(refs, &"r".parse().unwrap()).unwrap(), policy)
}

fn policy(last: u64, every: u64) -> ExpirePolicy {
    ExpirePolicy { keep_last: NonZeroU64::new(last), keep_every: NonZeroU64::new(every), ..ExpirePolicy::default() }
}

/// `step reasons` of what is kept, and the names that go.
fn outcome_of(plan: &ExpirePlan) -> (Vec<String>, Vec<&str>) {
    let kept = |step: &PlannedStep| {
        let reasons: Vec<String> = step.reasons.iter().map(ToString::to_string).collect();
        format!("{} {}", step.step, reasons.join(" "))
    };
    (plan.kept.iter().map(kept).collect(), plan.removed.iter().map(|step| step.name.as_str()).collect())
}

#[test]
fn steps_that_a_training_went_back_from_do_not_count() {
    let refs = run(&[("10", Some(3.0)), ("20", Some(1.0)), ("30", None), ("40", Some(0.5)), ("25", None)]);
    let back = |given_up: &[u64], policy| {
        let policy = ExpirePolicy { given_up: given_up.iter().copied().collect(), ..policy };
        planned(&refs, &policy).unwrap()
    };
    let plan = back(&[30, 40], policy(2, 0));
    assert_eq!(
        outcome_of(&plan),
        (vec!["20 last".into(), "25 latest last".into()], vec!["r/step-10", "r/step-30", "r/step-40"])
    );
    let plan = back(&[30, 40], ExpirePolicy { keep_min: vec!["loss".into()], ..policy(1, 0) });
    assert_eq!(outcome_of(&plan).0, ["25 latest last", "40 min=loss"]);
    assert_eq!(outcome_of(&back(&[10, 20, 25, 30, 40], policy(3, 0))).0, ["40 latest"]);
    planned(&refs, &ExpirePolicy { given_up: [10].into(), ..ExpirePolicy::default() }).unwrap_err();
}

#[test]
fn each_rule_keeps_its_own_and_says_why() {
    let refs =
        run(&[("0", None), ("5", Some(2.0)), ("10", Some(1.0)), ("15", Some(1.0)), ("20", Some(3.0)), ("25", None)]);
    let by_loss = ExpirePolicy { keep_min: vec!["loss".into()], keep_max: vec!["loss".into()], ..policy(2, 10) };
    let plan = planned(&refs, &by_loss).unwrap();
    let kept = ["0 every", "10 every", "15 min=loss", "20 last every max=loss", "25 latest last"];
    assert_eq!(outcome_of(&plan), (kept.map(String::from).to_vec(), vec!["r/step-5"]));
    let lacking: Vec<u64> = plan.kept.iter().filter(|step| step.lacks == ["loss"]).map(|step| step.step).collect();
    assert_eq!(lacking, [0, 25], "no metric can keep them");
    assert_eq!(outcome_of(&planned(&refs, &policy(0, 7)).unwrap()).0, ["0 every", "25 latest"]);
    assert!(planned(&refs, &policy(u64::MAX, 0)).unwrap().removed.is_empty());
}

#[test]
fn a_number_counts_once_and_the_name_that_lost_it_goes() {
    let refs = run(&[("1", None), ("02", None), ("2", None), ("3", None)]);
    let plan = planned(&refs, &policy(2, 0)).unwrap();
    assert_eq!(outcome_of(&plan).1, ["r/step-1", "r/step-02"]);
}

#[test]
fn no_rule_or_an_unknown_metric_removes_nothing() {
    let refs = run(&[("1", Some(1.0)), ("2", None)]);
    assert_eq!(planned(&refs, &ExpirePolicy::default()).unwrap_err().kind(), ErrorKind::Usage);
    let misspelt = ExpirePolicy { keep_min: vec!["los".into()], ..policy(1, 0) };
    let error = planned(&refs, &misspelt).unwrap_err();
    assert_eq!((error.kind(), error.to_string().contains("loss")), (ErrorKind::NotFound, true), "{error}");
}

proptest! {
    #[test]
    fn every_step_is_kept_for_a_reason_or_removed_and_the_latest_stays(
        steps in prop::collection::btree_map(0_u64..60, prop::option::of(-3_i8..4), 1..30),
        last in 0_u64..8,
        every in 1_u64..20,
    ) {
        let named = |(n, loss): (&u64, &Option<i8>)| (format!("r/step-{n}").parse().unwrap(), value(*n, loss.map(f64::from)));
        let refs: BTreeMap<Name, RefValue> = steps.iter().map(named).collect();
        let by_loss = if steps.values().any(Option::is_some) { vec!["loss".to_owned()] } else { Vec::new() };
        let plan = planned(&refs, &ExpirePolicy { keep_min: by_loss.clone(), ..policy(last, every) }).unwrap();
        let numbers = |steps: &[PlannedStep]| steps.iter().map(|step| step.step).collect::<BTreeSet<_>>();
        let (kept, removed) = (numbers(&plan.kept), numbers(&plan.removed));
        prop_assert!(kept.is_disjoint(&removed));
        prop_assert_eq!(kept.union(&removed).count(), steps.len());
        prop_assert!(kept.contains(steps.keys().max().unwrap()));
        prop_assert!(steps.keys().rev().take(usize::try_from(last).unwrap()).all(|step| kept.contains(step)));
        prop_assert!(removed.iter().all(|step| step % every != 0));
        let least = steps.values().filter_map(|loss| *loss).min();
        prop_assert!(by_loss.is_empty() || kept.iter().any(|step| steps[step] == least));
        // The same policy finds nothing more to remove in what it left.
        let left = refs.iter().filter(|(name, _)| !plan.removed.iter().any(|step| step.name == **name));
        let left = left.map(|(name, value)| (name.clone(), value.clone())).collect();
        let again = planned(&left, &ExpirePolicy { keep_min: by_loss, ..policy(last, every) }).unwrap();
        prop_assert!(again.removed.is_empty());
    }
}
