//! Names that users give: `/`-separated segments of `[A-Za-z0-9._+=-]`, none `.` or `..`.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};
use crate::limits::{METRIC_NAME_LEN_MAX, NAME_LEN_MAX};

/// A valid name of a saved tree. A prefix is a name too: it matches whole segments.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The run and the number, if this is a step of a run: `RUN/step-N`, N in decimal digits and below 2^64.
    #[must_use]
    pub fn step(&self) -> Option<(Self, u64)> {
        let (run, last) = self.0.rsplit_once('/')?;
        let digits = last.strip_prefix("step-")?;
        let number = if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok()? } else { return None };
        Some((Self(run.to_owned()), number))
    }

    /// Warning about this name, if it looks like a step of a run and is none.
    #[must_use]
    pub fn step_warning(&self) -> Option<String> {
        let last = self.0.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
        let is_separator = |c: char| "-_.=".contains(c);
        let is_step = |rest: &str| rest.is_empty() || rest.starts_with(|c: char| c.is_ascii_digit() || is_separator(c));
        let is_number = |rest: &str| {
            let digits = rest.trim_start_matches(is_separator);
            !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
        };
        let meant = last.strip_prefix("step").is_some_and(is_step)
            || ["checkpoint", "ckpt"].iter().any(|word| last.strip_prefix(word).is_some_and(is_number));
        (meant && self.step().is_none()).then(|| {
            format!("{self} is no step of a run: that is RUN/step-N, N a number, and RUN@latest finds nothing else")
        })
    }

    /// Checks that this name may be that of a run.
    ///
    /// # Errors
    /// Usage, for a step of a run: its steps would look like those of a run `RUN/step-N`.
    pub fn check_run(&self) -> Result<()> {
        let Some((run, _)) = self.step() else { return Ok(()) };
        Err(Error::usage("this is the name of a step, not of a run")
            .expected(format!("a run, such as {run}"))
            .got(self))
    }

    /// This name, and every prefix of it.
    pub fn and_above(&self) -> impl Iterator<Item = Self> {
        let ends = self.0.match_indices('/').map(|(at, _)| at).chain([self.0.len()]);
        ends.filter_map(|end| self.0.get(..end)).map(|text| Self(text.to_owned()))
    }

    /// True if `self` is `prefix` or below it.
    #[must_use]
    pub fn is_under(&self, prefix: &Self) -> bool {
        self.0.strip_prefix(prefix.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

/// Ordered and hashed as its text.
impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() <= NAME_LEN_MAX && text.split('/').all(is_segment) {
            return Ok(Self(text.to_owned()));
        }
        let what =
            if text.contains('@') { "this must be a name: what has an @ is only read" } else { "this is not a name" };
        Err(Error::usage(what)
            .expected(format!("segments of [A-Za-z0-9._+=-] separated by '/', at most {NAME_LEN_MAX} bytes"))
            .got(format!("{text:?}"))
            .help("for example: run-7/step-1000"))
    }
}

/// True if `text` is a valid name of a metric.
#[must_use]
pub fn is_metric_name(text: &str) -> bool {
    text.len() <= METRIC_NAME_LEN_MAX && is_segment(text)
}

/// True if `text` is one valid segment of a name.
pub(crate) fn is_segment(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._+=-".contains(c);
    !matches!(text, "" | "." | "..") && text.chars().all(allowed)
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_segments() {
        for good in ["a", "run-7/step-1000", "A.b+c=d_e", "..."] {
            assert!(good.parse::<Name>().is_ok(), "{good}");
        }
        for bad in ["", "/", "a/", "/a", "a//b", ".", "a/..", "a b", "a:b", "\u{e9}", "a@b"] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_looks_like_a_step_and_is_none_is_warned_about() {
        let warned = |text: &str| text.parse::<Name>().unwrap().step_warning().is_some();
        for odd in [
            "run/step-abc",
            "run/step_7",
            "run/step7",
            "run/Step-7",
            "step-7",
            "run/step-",
            "run/checkpoint-10",
            "a/step",
        ] {
            assert!(warned(odd), "{odd}");
        }
        for fine in [
            "run/step-7",
            "run/stepwise",
            "run/best",
            "run/7",
            "step-7/best",
            "run/steps",
            "a/checkpoint",
            "a/ckpt-best",
        ] {
            assert!(!warned(fine), "{fine}");
        }
    }

    #[test]
    fn a_prefix_matches_whole_segments() {
        let name = |text: &str| text.parse::<Name>().unwrap();
        assert!(name("run/step-1").is_under(&name("run")));
        assert!(name("run/best").check_run().is_ok());
        let error = name("run/step-1").check_run().unwrap_err().to_string();
        assert!(error.contains("a step, not of a run: expected a run, such as run"), "{error}");
        assert!(name("run").is_under(&name("run")));
        assert!(!name("run-2/x").is_under(&name("run")));
    }
}
