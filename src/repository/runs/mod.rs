//! Runs: the names `RUN/step-N`, in the order of their numbers. Pure functions of a state's refs.
//!
//! Two names of a run may have the same number (`step-7` and `step-07`): the one set later counts, the other is only listed.

#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::Repository;
use super::log::{RefValue, State};
use super::missing::absent_run;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::selector::{Choice, Selector};

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// Number of the step.
    pub number: u64,
    /// Name of the step.
    pub name: &'a Name,
    /// Value.
    pub value: &'a RefValue,
}

/// A run: at least one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run<'a> {
    name: Name,
    /// By number, then by version.
    steps: Vec<Step<'a>>,
    latest: Step<'a>,
}

impl<'a> Run<'a> {
    /// All runs among `refs`, by name.
    #[must_use]
    pub fn all(refs: &'a BTreeMap<Name, RefValue>) -> Vec<Self> {
        Self::all_among(refs, |_| true)
    }

    /// All runs among those of `refs` that `may` be read, by name.
    pub fn all_among(refs: &'a BTreeMap<Name, RefValue>, may: impl Fn(&Name) -> bool) -> Vec<Self> {
        let mut runs: BTreeMap<Name, Vec<Step<'a>>> = BTreeMap::new();
        for (name, value) in refs.iter().filter(|(name, _)| may(name)) {
            if let Some((run, number)) = name.step() {
                runs.entry(run).or_default().push(Step { number, name, value });
            }
        }
        runs.into_iter().filter_map(|(name, steps)| Self::new(name, steps)).collect()
    }

    /// Finds the run `name`.
    ///
    /// # Errors
    /// Not found, if there is no such run.
    pub fn find(refs: &'a BTreeMap<Name, RefValue>, name: &Name) -> Result<Self> {
        Self::find_among(refs, name, |_| true).ok_or_else(|| absent_run(|| refs.keys(), name))
    }

    /// Finds the run `name` in those of `refs` that `may` be read. Looks at its steps alone.
    pub(crate) fn find_among(
        refs: &'a BTreeMap<Name, RefValue>,
        name: &Name,
        may: impl Fn(&Name) -> bool,
    ) -> Option<Self> {
        let begin = format!("{name}/step-");
        let steps = refs.range::<str, _>((Bound::Included(&*begin), Bound::Unbounded));
        let steps = steps.take_while(|(found, _)| found.as_str().starts_with(&*begin));
        let step = |(found, value)| match Name::step(found) {
            Some((run, number)) if run == *name && may(found) => Some(Step { number, name: found, value }),
            _ => None,
        };
        Self::new(name.clone(), steps.filter_map(step).collect())
    }

    fn new(name: Name, mut steps: Vec<Step<'a>>) -> Option<Self> {
        steps.sort_unstable_by_key(|step| (step.number, step.value.version));
        let latest = *steps.last()?;
        Some(Self { name, steps, latest })
    }

    /// Name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// All steps, by number; of several with the same number, the one that counts comes last.
    #[must_use]
    pub fn steps(&self) -> &[Step<'a>] {
        &self.steps
    }

    /// Steps that count: one for each number, in order.
    pub fn counting(&self) -> impl DoubleEndedIterator<Item = Step<'a>> {
        self.steps.chunk_by(|a, b| a.number == b.number).filter_map(|same| same.last().copied())
    }

    /// Step with the largest number.
    #[must_use]
    pub fn latest(&self) -> Step<'a> {
        self.latest
    }

    /// Step that `choice` selects.
    ///
    /// # Errors
    /// Not found, if no step matches.
    pub fn choose(&self, choice: &Choice) -> Result<Step<'a>> {
        match choice {
            Choice::Latest => Ok(self.latest),
            Choice::UpTo(most) => {
                let end = self.steps.partition_point(|step| step.number <= *most);
                let last = end.checked_sub(1).and_then(|at| self.steps.get(at));
                last.copied().ok_or_else(|| self.none_up_to(*most))
            }
            Choice::Min(metric) => self.best(metric, |value, best| value <= best),
            Choice::Max(metric) => self.best(metric, |value, best| value >= best),
        }
    }

    /// Step with the best `metric`; the last one of several equal ones.
    fn best(&self, metric: &str, as_good: fn(f64, f64) -> bool) -> Result<Step<'a>> {
        let measured = self.counting().filter_map(|step| Some((step, step.value.facts.value(metric)?)));
        let best = measured.reduce(|best, next| if as_good(next.1, best.1) { next } else { best });
        best.map(|(step, _)| step).ok_or_else(|| self.no_such_metric(metric))
    }

    fn none_up_to(&self, most: u64) -> Error {
        let first = self.steps.first().unwrap_or(&self.latest);
        Error::not_found("the run has no step that early")
            .at(&self.name)
            .expected(format!("at most {most}"))
            .got(format!("{} as the first", first.number))
            .help(format!("`towline runs {}` lists its steps", self.name))
    }

    fn no_such_metric(&self, metric: &str) -> Error {
        let known: BTreeSet<&str> =
            self.counting().flat_map(|step| step.value.facts.metrics().map(|(name, _)| name)).collect();
        let error = Error::not_found("no step of the run has that metric").at(&self.name).expected(metric);
        if known.is_empty() {
            return error.got("steps without metrics").help("`towline save --metric NAME=VALUE` sets one");
        }
        error.got(known.into_iter().collect::<Vec<_>>().join(", ")).help("choose one of these metrics")
    }
}

impl Selector {
    /// Resolves the selector in `state`. A plain name resolves to itself, even if it does not exist.
    ///
    /// # Errors
    /// Not found, if there is no such run, or none of its steps matches.
    pub fn resolve(&self, state: &State) -> Result<Name> {
        match self {
            Self::Name(name) => Ok(name.clone()),
            Self::Step { run, choice } => Ok(Run::find(&state.refs, run)?.choose(choice)?.name.clone()),
        }
    }
}

impl Repository {
    /// Resolves `selector` in the current state. A plain name resolves to itself, even if it does not exist.
    ///
    /// # Errors
    /// As [`Selector::resolve`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn resolve(&self, selector: &Selector) -> Result<Name> {
        match selector {
            Selector::Name(name) => Ok(name.clone()),
            Selector::Step { .. } => selector.resolve(&*self.state().await?),
        }
    }
}
