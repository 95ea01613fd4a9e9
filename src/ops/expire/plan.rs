//! Plan of expiry: the steps of a run to keep, with reasons. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU64;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};
use crate::name::Name;
use crate::repository::{Run, Step};
use crate::selector::Choice;

/// Rules of retention: a step that any of these keeps stays, and always the latest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpirePolicy {
    /// Number of latest steps to keep.
    pub keep_last: Option<NonZeroU64>,
    /// Keep steps whose number is a multiple of this, 0 included.
    pub keep_every: Option<NonZeroU64>,
    /// Metrics; for each, keep the step with the smallest value.
    pub keep_min: Vec<String>,
    /// Metrics; for each, keep the step with the largest value.
    pub keep_max: Vec<String>,
    /// Steps that a training went back from: they count neither as latest nor as last ones, unless there are no others.
    pub given_up: BTreeSet<u64>,
}

impl ExpirePolicy {
    /// Checks that the policy has a rule.
    ///
    /// # Errors
    /// Usage, if it has none: it would remove all steps except the latest.
    pub fn check(&self) -> Result<()> {
        let counts = self.keep_last.is_some() || self.keep_every.is_some();
        if counts || !self.keep_min.is_empty() || !self.keep_max.is_empty() {
            return Ok(());
        }
        Err(Error::usage("nothing says which steps to keep")
            .expected("--keep-last, --keep-every, --keep-min or --keep-max")
            .help("`--keep-last 1` keeps the latest step only"))
    }
}

/// Reason to keep a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Latest step.
    Latest,
    /// One of the latest steps.
    Last,
    /// Number is a multiple.
    Every,
    /// Smallest value of this metric.
    Min(String),
    /// Largest value of this metric.
    Max(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str("latest"),
            Self::Last => f.write_str("last"),
            Self::Every => f.write_str("every"),
            Self::Min(metric) => write!(f, "min={metric}"),
            Self::Max(metric) => write!(f, "max={metric}"),
        }
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One step in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedStep {
    /// Number.
    pub step: u64,
    /// Name.
    pub name: Name,
    /// Version of the name in the plan.
    #[serde(skip)]
    pub version: u64,
    /// Bytes in all files.
    pub bytes: u64,
    /// Reasons to keep it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<Reason>,
    /// Metrics of rules that it lacks: these rules cannot keep it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
}

/// Decision on each step of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpirePlan {
    /// The run.
    pub run: Name,
    /// Steps to keep, with at least one reason each, by number.
    pub kept: Vec<PlannedStep>,
    /// Steps to remove, by number, including names whose number a later name has.
    pub removed: Vec<PlannedStep>,
}

/// The plan that `policy` makes for `run`.
///
/// # Errors
/// Usage, if the policy is empty; not found, if no step has a metric of a rule: a misspelt name must not remove the best step.
pub(super) fn plan<'a>(run: &Run<'a>, policy: &ExpirePolicy) -> Result<ExpirePlan> {
    policy.check()?;
    let mut reasons: BTreeMap<&'a Name, Vec<Reason>> = BTreeMap::new();
    let mut keep = |step: Step<'a>, reason| reasons.entry(step.name).or_default().push(reason);
    let going_on = || run.counting().rev().filter(|step| !policy.given_up.contains(&step.number));
    keep(going_on().next().unwrap_or_else(|| run.latest()), Reason::Latest);
    let last = policy.keep_last.map_or(0, |last| usize::try_from(last.get()).unwrap_or(usize::MAX));
    going_on().take(last).for_each(|step| keep(step, Reason::Last));
    if let Some(every) = policy.keep_every {
        run.counting().filter(|step| step.number % every == 0).for_each(|step| keep(step, Reason::Every));
    }
    for metric in &policy.keep_min {
        keep(run.choose(&Choice::Min(metric.clone()))?, Reason::Min(metric.clone()));
    }
    for metric in &policy.keep_max {
        keep(run.choose(&Choice::Max(metric.clone()))?, Reason::Max(metric.clone()));
    }
    let metrics: BTreeSet<&String> = policy.keep_min.iter().chain(&policy.keep_max).collect();
    let lacks = |step: &Step<'_>| {
        let lacking = metrics.iter().filter(|metric| step.value.facts.value(metric).is_none());
        lacking.map(|metric| (*metric).clone()).collect()
    };
    let planned = |step: &Step<'_>| PlannedStep {
        step: step.number,
        name: step.name.clone(),
        version: step.value.version,
        bytes: step.value.logical_bytes,
        reasons: reasons.remove(step.name).unwrap_or_default(),
        lacks: lacks(step),
    };
    let (removed, kept) = run.steps().iter().map(planned).partition(|step: &PlannedStep| step.reasons.is_empty());
    Ok(ExpirePlan { run: run.name().clone(), kept, removed })
}
