//! Requests for hints.

use serde::{Deserialize, Serialize};

use super::objective::Objective;
use crate::clock::Timestamp;
use crate::error::{Error, Result};

/// Version of requests and hints.
pub const API_VERSION: &str = "towline.dev/v1";
/// Maximum number of inputs, and of outputs.
pub const INPUTS_MAX: usize = 256;
/// Maximum number of candidates.
pub const CANDIDATES_MAX: usize = 1024;

/// Question where a job should run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct HintRequest {
    /// [`API_VERSION`].
    pub api_version: String,
    /// The job.
    #[serde(default)]
    pub workload: Workload,
    /// Names that it reads before it starts.
    pub inputs: Vec<HintInput>,
    /// Checkpoints that it writes.
    #[serde(default)]
    pub outputs: Vec<HintOutput>,
    /// Sites to compare; none: all of the sites file.
    #[serde(default)]
    pub candidates: Vec<HintCandidate>,
    /// Objective.
    #[serde(default)]
    pub objective: Objective,
}

/// A job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Workload {
    /// GPUs that wait until the inputs are there.
    pub gpus: u64,
    /// Dollars for a GPU and an hour, at every site; none: the price in the sites file of the first kind of GPU there.
    pub gpu_usd_h: Option<f64>,
    /// Expected seconds that it runs, for the number of its checkpoints and for the deadline.
    pub runtime_s: u64,
    /// Time, RFC 3339, at which it must have ended; sites where it would not rank behind the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
}

impl Workload {
    /// The deadline; none if there is none, or it is malformed.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        let at = chrono::DateTime::parse_from_rfc3339(self.deadline.as_deref()?).ok()?;
        at.timestamp_nanos_opt().map(Timestamp)
    }
}

/// A name that a job reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HintInput {
    /// Name, or a choice such as `run-7@latest`.
    #[serde(rename = "ref")]
    pub reference: String,
}

/// Checkpoints that a job writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HintOutput {
    /// Bytes of each, as they travel.
    pub bytes: u64,
    /// Seconds from one to the next.
    pub every_s: u64,
    /// Site that they are sent to.
    pub return_to: String,
}

/// A site to compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HintCandidate {
    /// Its name.
    pub site: String,
}

impl HintRequest {
    /// A request for a job that reads `names`, at all sites.
    pub fn about<N: ToString>(names: impl IntoIterator<Item = N>) -> Self {
        let input = |name: N| HintInput { reference: name.to_string() };
        Self { api_version: API_VERSION.to_owned(), inputs: names.into_iter().map(input).collect(), ..Self::default() }
    }

    /// Checks numbers and lengths.
    ///
    /// # Errors
    /// Usage, with the field.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &'static str, expected: String, got: String| {
            Err(Error::usage("request for a hint cannot be answered")
                .at(what)
                .expected(expected)
                .got(got)
                .help("docs/placement.md has an example of a request"))
        };
        if self.api_version != API_VERSION {
            return wrong("apiVersion", API_VERSION.to_owned(), self.api_version.clone());
        }
        if self.inputs.is_empty() || self.inputs.len() > INPUTS_MAX {
            return wrong("inputs", format!("1 to {INPUTS_MAX}"), self.inputs.len().to_string());
        }
        if self.outputs.len() > INPUTS_MAX {
            return wrong("outputs", format!("at most {INPUTS_MAX}"), self.outputs.len().to_string());
        }
        if self.candidates.len() > CANDIDATES_MAX {
            return wrong("candidates", format!("at most {CANDIDATES_MAX}"), self.candidates.len().to_string());
        }
        if self.outputs.iter().any(|output| output.every_s == 0) {
            return wrong("outputs[].every_s", "seconds above 0".to_owned(), "0".to_owned());
        }
        let Objective { usd_per_hour, quantile, max_usd, max_seconds, .. } = self.objective;
        for (what, value) in [
            ("workload.gpu_usd_h", self.workload.gpu_usd_h),
            ("objective.usd_per_hour", Some(usd_per_hour)),
            ("objective.max_usd", max_usd),
            ("objective.max_seconds", max_seconds),
        ] {
            if let Some(value) = value.filter(|value| !(0.0..=1e9).contains(value)) {
                return wrong(what, "0 to 1000000000".to_owned(), value.to_string());
            }
        }
        if let Some(deadline) = self.workload.deadline.as_ref().filter(|_| self.workload.deadline().is_none()) {
            return wrong("workload.deadline", "a time such as 2026-12-01T08:00:00Z".to_owned(), deadline.clone());
        }
        if ![0.1, 0.5, 0.9].contains(&quantile) {
            return wrong("objective.quantile", "0.1, 0.5 or 0.9".to_owned(), quantile.to_string());
        }
        Ok(())
    }
}
