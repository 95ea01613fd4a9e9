//! Which steps of a run are kept, and why: a pure function.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};
use crate::repository::{Choice, Name, Run, Step};

/// Rules of retention: a step that any of these keeps stays, and always the latest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpirePolicy {
    /// As many of the latest.
    pub keep_last: Option<NonZeroU64>,
    /// Keep steps whose number is a multiple of this, 0 included.
    pub keep_every: Option<NonZeroU64>,
    /// For each of these metrics the step where it is least.
    pub keep_min: Vec<String>,
    /// For each of these metrics the step where it is greatest.
    pub keep_max: Vec<String>,
}

impl ExpirePolicy {
    /// Does it say anything?
    ///
    /// # Errors
    /// Usage, if not: it would remove all steps but the latest.
    pub fn check(&self) -> Result<()> {
        if *self != Self::default() {
            return Ok(());
        }
        Err(Error::usage("nothing says which steps to keep")
            .expected("--keep-last, --keep-every, --keep-min or --keep-max")
            .help("`--keep-last 1` keeps the latest step only"))
    }
}

/// Why a step is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is the latest.
    Latest,
    /// It is among the last ones.
    Last,
    /// Its number is a multiple.
    Every,
    /// This metric is least.
    Min(String),
    /// This metric is greatest.
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
    /// Its number.
    pub step: u64,
    /// Its name.
    pub name: Name,
    /// The version that the plan is about.
    #[serde(skip)]
    pub version: u64,
    /// Bytes in all files.
    pub bytes: u64,
    /// Why it is kept.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<Reason>,
}

/// Decision on each step of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpirePlan {
    /// The run.
    pub run: Name,
    /// Steps that stay, with at least one reason each, by number.
    pub kept: Vec<PlannedStep>,
    /// Steps that go, by number; among them every name whose number another name has since taken over.
    pub removed: Vec<PlannedStep>,
}

/// The plan that `policy` makes for `run`.
///
/// # Errors
/// Usage, if the policy is empty; not found, if no step has a metric to keep by: a name misspelt must not cost the best
/// step.
pub(super) fn plan<'a>(run: &Run<'a>, policy: &ExpirePolicy) -> Result<ExpirePlan> {
    policy.check()?;
    let mut reasons: BTreeMap<&'a Name, Vec<Reason>> = BTreeMap::new();
    let mut keep = |step: Step<'a>, reason| reasons.entry(step.name).or_default().push(reason);
    keep(run.latest(), Reason::Latest);
    let last = policy.keep_last.map_or(0, |last| usize::try_from(last.get()).unwrap_or(usize::MAX));
    run.counting().rev().take(last).for_each(|step| keep(step, Reason::Last));
    if let Some(every) = policy.keep_every {
        run.counting().filter(|step| step.number % every == 0).for_each(|step| keep(step, Reason::Every));
    }
    for metric in &policy.keep_min {
        keep(run.choose(&Choice::Min(metric.clone()))?, Reason::Min(metric.clone()));
    }
    for metric in &policy.keep_max {
        keep(run.choose(&Choice::Max(metric.clone()))?, Reason::Max(metric.clone()));
    }
    let planned = |step: &Step<'_>| PlannedStep {
        step: step.number,
        name: step.name.clone(),
        version: step.value.version,
        bytes: step.value.logical_bytes,
        reasons: reasons.remove(step.name).unwrap_or_default(),
    };
    let (removed, kept) = run.steps().iter().map(planned).partition(|step: &PlannedStep| step.reasons.is_empty());
    Ok(ExpirePlan { run: run.name().clone(), kept, removed })
}
