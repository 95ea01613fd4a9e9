//! Selectors of saved trees: a name, or `RUN@CHOICE`. No name holds an `@`, so they cannot be confused.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::name::{Name, is_metric_name};

/// Choice of a step of a run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Choice {
    /// The one with the largest number.
    Latest,
    /// The one with the largest number that is at most this.
    UpTo(u64),
    /// The one where this metric is least; of equals the later. Steps without it are skipped.
    Min(String),
    /// The one where this metric is greatest; of equals the later. Steps without it are skipped.
    Max(String),
}

/// A name, or a choice among a run's steps.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Selector {
    /// This name.
    Name(Name),
    /// A step of a run.
    Step {
        /// The run.
        run: Name,
        /// Choice of its step.
        choice: Choice,
    },
}

impl From<Name> for Selector {
    fn from(name: Name) -> Self {
        Self::Name(name)
    }
}

impl FromStr for Selector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((run, choice)) = text.split_once('@') else { return text.parse().map(Self::Name) };
        let (run, choice) = (run.parse()?, choice.parse()?);
        Ok(Self::Step { run, choice })
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let metric = |name: &str| is_metric_name(name).then(|| name.to_owned());
        let choice = match text.split_once('=') {
            None if text == "latest" => Some(Self::Latest),
            Some(("upto", digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().ok().map(Self::UpTo)
            }
            Some(("min", name)) => metric(name).map(Self::Min),
            Some(("max", name)) => metric(name).map(Self::Max),
            _ => None,
        };
        choice.ok_or_else(|| match text {
            "min=" | "max=" => Error::usage("the metric to choose the step by is missing")
                .expected(format!("RUN@{text}METRIC"))
                .got(format!("@{text}"))
                .help(format!(
                    "for example: run-7@{text}loss; `towline runs run-7` lists the steps with their metrics"
                )),
            _ => Error::usage("this chooses no step of a run")
                .expected("RUN@latest, RUN@upto=N, RUN@min=METRIC or RUN@max=METRIC")
                .got(format!("@{text}"))
                .help("for example: run-7@latest"),
        })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str("latest"),
            Self::UpTo(most) => write!(f, "upto={most}"),
            Self::Min(metric) => write!(f, "min={metric}"),
            Self::Max(metric) => write!(f, "max={metric}"),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => fmt::Display::fmt(name, f),
            Self::Step { run, choice } => write!(f, "{run}@{choice}"),
        }
    }
}
