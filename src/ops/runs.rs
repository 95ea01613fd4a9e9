//! Runs: lists runs, and the steps of one, from the log alone.

use std::collections::BTreeMap;

use serde::Serialize;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::name::Name;
use crate::repository::log::{RefValue, StepFacts};
use crate::repository::{Repository, Run, Step};

/// One run, as `runs` shows it.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct RunListed {
    /// The run.
    pub run: String,
    /// Steps that count.
    pub count: u64,
    /// The first one's number.
    pub first: u64,
    /// The last one's number.
    pub last: u64,
    /// The last one's name.
    pub latest: String,
    /// Time of the last save, RFC 3339.
    pub saved: String,
    /// Bytes in all files of all its steps.
    pub bytes: u64,
    /// Facts of the last step.
    #[serde(flatten)]
    pub facts: StepFacts,
    /// All steps, if this run was requested by its exact name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepListed>,
}

/// One step of a run.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct StepListed {
    /// Number.
    pub step: u64,
    /// Name.
    pub name: String,
    /// True if it is the one that counts among those with this number.
    pub counts: bool,
    /// Time of the save, RFC 3339.
    pub saved: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// Saves since the key step that its differences are to; 0 if it is one itself.
    pub behind: u32,
    /// Facts of the step.
    #[serde(flatten)]
    pub facts: StepFacts,
}

impl Repository {
    /// Runs under `prefix`, or all, by name. If `prefix` is itself a run, that one has its steps.
    ///
    /// # Errors
    /// Not found, if a prefix was given and no run is under it.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn runs(&self, prefix: Option<&Name>) -> Result<Vec<RunListed>> {
        let state = self.state().await?;
        match (list_runs(&state.refs, prefix, |_| true), prefix) {
            (listed, Some(prefix)) if listed.is_empty() => Err(Error::not_found("no run is under this prefix")
                .at(prefix)
                .help("`towline runs` lists all runs, `towline ls` all names")),
            (listed, _) => Ok(listed),
        }
    }

    /// As [`Repository::runs`], of the steps that `may` accepts alone, if it is given. A prefix without runs is no error.
    ///
    /// # Errors
    /// Errors of the store.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn readable_runs(
        &self,
        prefix: Option<&Name>,
        may: Option<impl Fn(&Name) -> bool>,
    ) -> Result<Vec<RunListed>> {
        let state = self.state_since(Some(Instant::now())).await?;
        let may = |name: &Name| may.as_ref().is_none_or(|may| may(name));
        Ok(list_runs(&state.refs, prefix, may))
    }
}

fn list_runs(refs: &BTreeMap<Name, RefValue>, prefix: Option<&Name>, may: impl Fn(&Name) -> bool) -> Vec<RunListed> {
    let runs = Run::all_among(refs, |name| prefix.is_none_or(|prefix| name.is_under(prefix)) && may(name));
    let matching = runs.iter().filter(|run| prefix.is_none_or(|prefix| run.name().is_under(prefix)));
    matching.map(|run| list(run, prefix == Some(run.name()))).collect()
}

fn list(run: &Run<'_>, steps: bool) -> RunListed {
    let (first, latest) = (run.steps().first().map_or(0, |step| step.number), run.latest());
    RunListed {
        run: run.name().to_string(),
        count: run.counting().count() as u64,
        first,
        last: latest.number,
        latest: latest.name.to_string(),
        saved: latest.value.saved.to_string(),
        bytes: run.steps().iter().map(|step| step.value.logical_bytes).fold(0, u64::saturating_add),
        facts: latest.value.facts.clone(),
        steps: if steps { list_steps(run) } else { Vec::new() },
    }
}

fn list_steps(run: &Run<'_>) -> Vec<StepListed> {
    let list = |step: &Step<'_>, counts| StepListed {
        step: step.number,
        name: step.name.to_string(),
        counts,
        saved: step.value.saved.to_string(),
        bytes: step.value.logical_bytes,
        files: step.value.files,
        chunks: step.value.chunks,
        behind: step.value.behind,
        facts: step.value.facts.clone(),
    };
    let mut later = run.steps().iter().skip(1);
    run.steps().iter().map(|step| list(step, later.next().is_none_or(|next| next.number != step.number))).collect()
}
