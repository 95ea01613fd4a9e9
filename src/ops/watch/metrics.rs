//! Logged metrics of a checkpoint: the numbers in its `trainer_state.json`, as Hugging Face's Trainer writes it
//! (<https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_callback.py>, `TrainerState`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind as Io, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::str::FromStr;

use rustix::fs::{Mode, OFlags, openat};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::candidate::TRAINER_STATE;
use crate::error::{Error, Result};
use crate::limits::MIB;
use crate::repository::log::StepFacts;

/// Limit of the file: its text is in memory twice. A training that logs each of a hundred thousand steps stays below.
const LEN_MAX: u64 = 16 * MIB;
/// Maximum numbers of one entry, and in the result.
const NUMBERS_MAX: usize = 1024;
/// Logged keys that are no metrics.
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

    /// Parses `NAME=KEY`, or `NAME` if both are equal.
    fn from_str(text: &str) -> Result<Self> {
        let (name, key) = text.split_once('=').unwrap_or((text, text));
        // Checks that the name is valid for a metric.
        StepFacts::default().metric(name, 0.0)?;
        if key.is_empty() {
            return Err(Error::usage("this names no key").expected("NAME=KEY").got(text));
        }
        Ok(Self { name: name.to_owned(), key: key.to_owned() })
    }
}

/// Adds to `facts` the metrics of the checkpoint in `folder`, of `step`: those `wanted`, each with its last logged value, or,
/// without any, all that were logged at exactly this step. Existing metrics of `facts` stay. Blocking.
pub(crate) fn with_logged(folder: &Path, step: u64, wanted: &[LoggedMetric], facts: StepFacts) -> StepFacts {
    let found = match read(folder, Query { step, wanted }) {
        Ok(Some(found)) => found,
        Ok(None) => return facts,
        Err(error) => {
            tracing::warn!("no metrics are taken from a checkpoint: {error:?}");
            return facts;
        }
    };
    let found: Vec<(String, f64)> = if wanted.is_empty() {
        found.logged.into_iter().collect()
    } else {
        wanted.iter().filter_map(|one| found.value(one, step)).collect()
    };
    found.into_iter().fold(facts, |facts, (name, value)| {
        if facts.value(&name).is_some() {
            return facts;
        }
        facts.clone().metric(&name, value).unwrap_or_else(|error| {
            tracing::info!("a logged value is not taken: {error:?}");
            facts
        })
    })
}

/// Step of the best checkpoint so far, as the trainer wrote it in the checkpoint `folder`; none, if it keeps none. Blocking.
pub(super) fn best_step(folder: &Path) -> Option<u64> {
    #[derive(Deserialize)]
    struct Best {
        best_global_step: Option<u64>,
        /// Path of its folder, `DIR/checkpoint-STEP`: older versions write only this.
        best_model_checkpoint: Option<String>,
    }
    let text = read_state(folder).unwrap_or_else(|error| {
        tracing::warn!("the best checkpoint is not known: {error:?}");
        None
    })?;
    let best: Best = serde_json::from_str(&without_nan(&text)).ok()?;
    best.best_global_step.or_else(|| best.best_model_checkpoint?.rsplit('-').next()?.parse().ok())
}

/// Opens a file in a folder that others may write to: follows no link, and does not block on a pipe.
pub(super) fn open(path: &Path) -> std::io::Result<File> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
    File::options().read(true).custom_flags(flags).open(path)
}

/// Opens the file in the checkpoint `folder`, in whose place others may have put a link.
fn open_state(folder: &Path) -> std::io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags | OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
    Ok(File::from(openat(folder, TRAINER_STATE, flags | OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?))
}

/// Reads the values that `query` wants; none if the file does not exist.
fn read(folder: &Path, query: Query<'_>) -> Result<Option<Found>> {
    let Some(text) = read_state(folder)? else { return Ok(None) };
    let text = without_nan(&text);
    query.deserialize(&mut serde_json::Deserializer::from_str(&text)).map(Some).map_err(|source| {
        let path = folder.join(TRAINER_STATE);
        Error::damaged("what the trainer logged is not JSON").at(path.display()).source(source)
    })
}

/// Text of the file; none if it does not exist.
fn read_state(folder: &Path) -> Result<Option<String>> {
    let path = folder.join(TRAINER_STATE);
    let fault = |error| Error::io("cannot read what the trainer logged", &path, error);
    let file = match open_state(folder) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), Io::NotFound | Io::NotADirectory) => return Ok(None),
        Err(error) => return Err(fault(error)),
    };
    if !file.metadata().map_err(fault)?.is_file() {
        return Err(Error::usage("what the trainer logged is not a regular file").at(path.display()));
    }
    let mut text = String::new();
    if file.take(LEN_MAX + 1).read_to_string(&mut text).map_err(fault)? as u64 > LEN_MAX {
        return Err(Error::exhausted("what the trainer logged is too long").at(path.display()).expected(LEN_MAX));
    }
    Ok(Some(text))
}

/// Values to look for: those `wanted` up to `step`, or all of `step` if none are.
#[derive(Clone, Copy)]
struct Query<'q> {
    step: u64,
    wanted: &'q [LoggedMetric],
}

/// Values found, by key. All other content is skipped by the parser, so memory is limited to the text.
#[derive(Debug, Default)]
struct Found {
    /// Values from the log.
    logged: BTreeMap<String, f64>,
    /// Values from the state itself.
    state: BTreeMap<String, f64>,
}

impl Found {
    /// Last logged value of a metric up to `step`, or else the value in the state itself.
    fn value(&self, wanted: &LoggedMetric, step: u64) -> Option<(String, f64)> {
        let value = self.logged.get(&wanted.key).or_else(|| self.state.get(&wanted.key)).copied();
        if value.is_none() {
            tracing::warn!("step {step} is saved without {}: the trainer logged no number {}", wanted.name, wanted.key);
        }
        Some((wanted.name.clone(), value?))
    }
}

impl Query<'_> {
    fn wants(self, key: &str) -> bool {
        self.wanted.iter().any(|one| one.key == key)
    }

    /// Adds the numbers of one log entry, which replace earlier ones.
    fn take(self, found: &mut Found, Logged { step, numbers }: Logged) {
        let is_due =
            if self.wanted.is_empty() { step == Some(self.step) } else { step.is_none_or(|at| at <= self.step) };
        if !is_due {
            return;
        }
        for (key, value) in numbers {
            let is_metric = !NOT_METRICS.contains(&key.as_str());
            if self.wants(&key) || self.wanted.is_empty() && is_metric && found.logged.len() < NUMBERS_MAX {
                found.logged.insert(key, value);
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for Query<'_> {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Found, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Query<'_> {
    type Value = Found;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the state of a trainer")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Found, A::Error> {
        let mut found = Found::default();
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            if key == "log_history" {
                map.next_value_seed(History { query: self, found: &mut found })?;
            } else if let Number(Some(value)) = map.next_value()?
                && self.wants(&key)
            {
                found.state.insert(key.into_owned(), value);
            }
        }
        Ok(found)
    }
}

/// The log, entry by entry.
struct History<'f, 'q> {
    query: Query<'q>,
    found: &'f mut Found,
}

impl<'de> DeserializeSeed<'de> for History<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for History<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of logged entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> std::result::Result<(), A::Error> {
        while let Some(entry) = entries.next_element::<Logged>()? {
            self.query.take(self.found, entry);
        }
        Ok(())
    }
}

/// The numbers of one entry of the log, up to [`NUMBERS_MAX`].
#[derive(Default)]
struct Logged {
    step: Option<u64>,
    numbers: Vec<(String, f64)>,
}

impl<'de> Deserialize<'de> for Logged {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entry;

        impl<'de> Visitor<'de> for Entry {
            type Value = Logged;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a logged entry")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Logged, A::Error> {
                let mut logged = Logged::default();
                while let Some(key) = map.next_key::<Cow<'_, str>>()? {
                    let Number(Some(value)) = map.next_value()? else { continue };
                    if key == "step" {
                        // Steps are integers far below 2^53.
                        logged.step = format!("{value}").parse().ok();
                    } else if logged.numbers.len() < NUMBERS_MAX {
                        logged.numbers.push((key.into_owned(), value));
                    }
                }
                Ok(logged)
            }
        }

        deserializer.deserialize_map(Entry)
    }
}

/// A number; None for any other value, which is skipped.
struct Number(Option<f64>);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_f64<E>(self, value: f64) -> std::result::Result<Number, E> {
                Ok(Number(Some(value)))
            }

            fn visit_i64<E>(self, value: i64) -> std::result::Result<Number, E> {
                Ok(Number(Some(value as f64)))
            }

            fn visit_u64<E>(self, value: u64) -> std::result::Result<Number, E> {
                Ok(Number(Some(value as f64)))
            }

            fn visit_bool<E>(self, _: bool) -> std::result::Result<Number, E> {
                Ok(Number(None))
            }

            fn visit_str<E>(self, _: &str) -> std::result::Result<Number, E> {
                Ok(Number(None))
            }

            fn visit_unit<E>(self) -> std::result::Result<Number, E> {
                Ok(Number(None))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> std::result::Result<Number, A::Error> {
                while values.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Number(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> std::result::Result<Number, A::Error> {
                while values.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Number(None))
            }
        }

        deserializer.deserialize_any(Any)
    }
}

/// Replaces `NaN` and `Infinity`, which Python writes and JSON lacks, by null.
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
    fn nothing_is_kept_of_values_that_nobody_asked_for() {
        let many = "0,".repeat(100_000);
        let state = format!(
            r#"{{"a": [{many} 0], "log_history": [{{"step": 20, "b": [{many} 0], "loss": 2}}], "c": {{"d": 1}}}}"#
        );
        assert_eq!(metrics_of(Some(&state), 20, &[]), pairs(&[("given", 7.0), ("loss", 2.0)]));
        let query = Query { step: 20, wanted: &[] };
        let found = query.deserialize(&mut serde_json::Deserializer::from_str(&state)).unwrap();
        assert_eq!((found.logged.len(), found.state.len()), (1, 0));
    }

    #[test]
    fn neither_a_link_nor_a_pipe_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join(TRAINER_STATE);
        std::fs::write(folder.path().join("other"), STATE).unwrap();
        std::os::unix::fs::symlink("other", &state).unwrap();
        assert!(with_logged(folder.path(), 20, &[], StepFacts::default()).metrics().next().is_none());
        std::fs::remove_file(&state).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &state, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(with_logged(folder.path(), 20, &[], StepFacts::default()).metrics().next().is_none());
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
