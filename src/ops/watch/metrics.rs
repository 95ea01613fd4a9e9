//! Logged metrics of a checkpoint: the numbers in its `trainer_state.json`, as Hugging Face's Trainer writes it
//! (<https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_callback.py>, `TrainerState`).

use std::fs::File;
use std::io::{ErrorKind as Io, Read as _};
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::candidate::TRAINER_STATE;
use crate::error::{Error, Result};
use crate::limits::MIB;
use crate::repository::log::StepFacts;

/// A longer file is not read: a training that logs each of a million steps stays below.
const LEN_MAX: u64 = 256 * MIB;
/// Keys that are logged with the metrics and are none.
const NOT_METRICS: [&str; 2] = ["step", "epoch"];

/// A metric to take from what the trainer logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedMetric {
    /// Name of the metric in the step.
    pub name: String,
    /// Key of the trainer.
    pub key: String,
}

impl FromStr for LoggedMetric {
    type Err = Error;

    /// Reads `NAME=KEY`, or `NAME` where both are one.
    fn from_str(text: &str) -> Result<Self> {
        let (name, key) = text.split_once('=').unwrap_or((text, text));
        // The name has to be one that a step can have.
        StepFacts::default().metric(name, 0.0)?;
        if key.is_empty() {
            return Err(Error::usage("this names no key").expected("NAME=KEY").got(text));
        }
        Ok(Self { name: name.to_owned(), key: key.to_owned() })
    }
}

/// The part of the file that is read.
#[derive(Debug, Default, Deserialize)]
struct Logged {
    #[serde(default)]
    log_history: Vec<Map<String, Value>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// `facts` with the metrics that the checkpoint in `folder`, of `step`, tells: those `wanted`, each as it was logged last; or, if
/// none are, all that were logged at this very step. Metrics that `facts` has already stay.
pub(super) fn with_logged(folder: &Path, step: u64, wanted: &[LoggedMetric], facts: StepFacts) -> StepFacts {
    let logged = match read(&folder.join(TRAINER_STATE)) {
        Ok(Some(logged)) => logged,
        Ok(None) => return facts,
        Err(error) => {
            tracing::warn!("no metrics are taken from a checkpoint: {error:?}");
            return facts;
        }
    };
    let found: Vec<(&str, f64)> = if wanted.is_empty() {
        logged.at(step)
    } else {
        wanted.iter().filter_map(|one| logged.last(one, step)).collect()
    };
    found.into_iter().fold(facts, |facts, (name, value)| {
        if facts.value(name).is_some() {
            return facts;
        }
        facts.clone().metric(name, value).unwrap_or_else(|error| {
            tracing::info!("a logged value is not taken: {error:?}");
            facts
        })
    })
}

/// None, if there is no such file.
fn read(path: &Path) -> Result<Option<Logged>> {
    let fault = |error| Error::io("cannot read what the trainer logged", path, error);
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), Io::NotFound | Io::NotADirectory) => return Ok(None),
        Err(error) => return Err(fault(error)),
    };
    let mut text = String::new();
    if file.take(LEN_MAX + 1).read_to_string(&mut text).map_err(fault)? as u64 > LEN_MAX {
        return Err(Error::exhausted("what the trainer logged is too long").at(path.display()).expected(LEN_MAX));
    }
    let parsed = serde_json::from_str(&without_nan(&text));
    parsed
        .map(Some)
        .map_err(|source| Error::damaged("what the trainer logged is not JSON").at(path.display()).source(source))
}

impl Logged {
    /// All numbers that were logged at `step`; of two with one name the later.
    fn at(&self, step: u64) -> Vec<(&str, f64)> {
        let entries = self.log_history.iter().rev().filter(|entry| step_of(entry) == Some(step));
        let numbers =
            entries.flat_map(|entry| entry.iter()).filter_map(|(key, value)| Some((key.as_str(), value.as_f64()?)));
        numbers.filter(|(key, _)| !NOT_METRICS.contains(key)).collect()
    }

    /// The value of a metric that was logged last up to `step`, or that the state itself has.
    fn last<'a>(&'a self, wanted: &'a LoggedMetric, step: u64) -> Option<(&'a str, f64)> {
        let entries = self.log_history.iter().rev().filter(|entry| step_of(entry).is_none_or(|at| at <= step));
        let mut values = entries.filter_map(|entry| entry.get(&wanted.key)?.as_f64());
        let value = values.next().or_else(|| self.rest.get(&wanted.key)?.as_f64());
        if value.is_none() {
            tracing::warn!("step {step} is saved without {}: the trainer logged no number {}", wanted.name, wanted.key);
        }
        Some((&wanted.name, value?))
    }
}

fn step_of(entry: &Map<String, Value>) -> Option<u64> {
    entry.get("step")?.as_u64()
}

/// `text` with null for `NaN` and `Infinity`, which Python writes and JSON lacks.
fn without_nan(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let (mut within, mut escaped, mut rest) = (false, false, text);
    while let Some(next) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| !within && rest.starts_with(word));
        if let Some(word) = word {
            plain.push_str("null");
            rest = &rest[word.len()..];
            continue;
        }
        (within, escaped) = match next {
            _ if escaped => (within, false),
            '\\' if within => (within, true),
            '"' => (!within, false),
            _ => (within, false),
        };
        plain.push(next);
        rest = &rest[next.len_utf8()..];
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: &str = r#"{"best_metric": 0.5, "global_step": 20, "log_history": [
        {"epoch": 0.5, "step": 10, "loss": 3.0, "grad_norm": NaN, "note": "NaN \" Infinity"},
        {"epoch": 1.0, "step": 20, "loss": 2.0, "learning_rate": 1e-5, "bad name": 1.0},
        {"epoch": 1.0, "step": 20, "eval_loss": 2.5, "eval_runtime": -Infinity},
        {"epoch": 1.5, "step": 30, "loss": 1.0}]}"#;

    fn metrics_of(state: Option<&str>, step: u64, wanted: &[&str]) -> Vec<(String, f64)> {
        let folder = tempfile::tempdir().unwrap();
        state.iter().for_each(|state| std::fs::write(folder.path().join(TRAINER_STATE), state).unwrap());
        let wanted: Vec<LoggedMetric> = wanted.iter().map(|text| text.parse().unwrap()).collect();
        let facts = StepFacts::default().metric("given", 7.0).unwrap();
        let facts = with_logged(folder.path(), step, &wanted, facts);
        facts.metrics().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn pairs(pairs: &[(&str, f64)]) -> Vec<(String, f64)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn all_that_was_logged_at_the_step_is_told() {
        let all = pairs(&[("eval_loss", 2.5), ("given", 7.0), ("learning_rate", 1e-5), ("loss", 2.0)]);
        assert_eq!(metrics_of(Some(STATE), 20, &[]), all);
        assert_eq!(metrics_of(Some(STATE), 10, &[]), pairs(&[("given", 7.0), ("loss", 3.0)]));
        assert_eq!(metrics_of(Some(STATE), 15, &[]), pairs(&[("given", 7.0)]));
    }

    #[test]
    fn named_keys_are_taken_as_they_were_logged_last() {
        assert_eq!(metrics_of(Some(STATE), 25, &["loss"]), pairs(&[("given", 7.0), ("loss", 2.0)]));
        let renamed = metrics_of(Some(STATE), 20, &["val=eval_loss", "best=best_metric", "none=grad_norm"]);
        assert_eq!(renamed, pairs(&[("best", 0.5), ("given", 7.0), ("val", 2.5)]));
        assert_eq!(metrics_of(Some(STATE), 20, &["given=loss"]), pairs(&[("given", 7.0)]), "what is given goes first");
    }

    #[test]
    fn what_cannot_be_read_costs_no_save() {
        for state in [None, Some("{"), Some("[]"), Some(r#"{"log_history": 3}"#), Some("{}")] {
            assert_eq!(metrics_of(state, 20, &["loss"]), pairs(&[("given", 7.0)]), "{state:?}");
        }
        for bad in ["=loss", "loss=", "a/b=loss", ""] {
            assert!(bad.parse::<LoggedMetric>().is_err(), "{bad}");
        }
    }
}
