//! Findings about the data of pods.

use std::time::Duration;

use crate::error::Error;
use crate::size::show;

/// Characters of a message: Kueue allows 32768, and an event 1024 bytes.
const MESSAGE_LEN_MAX: usize = 1000;

/// Finding about the data that some pods need at a site.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::agent) enum Finding {
    /// They need none.
    Nothing,
    /// It is there: bytes, as they are kept.
    There(u64),
    /// It is on its way.
    Warming(Progress),
    /// Other warms come first.
    Queued(u64),
    /// Others come first, before it is looked up: why.
    Postponed(String),
    /// Something fails, and is tried again: since when, and why.
    Failing(Duration, String),
    /// There is no such name, or the pods may not read it: since when, and its text.
    Absent(Duration, String),
    /// The data may not go there.
    Denied(String),
    /// The pods ask for something impossible.
    Malformed(String),
}

/// Progress of a warm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::agent) struct Progress {
    pub(in crate::agent) missing: u64,
    pub(in crate::agent) bytes: u64,
    /// Seconds until all is there, in the median and at the 90th percentile.
    pub(in crate::agent) seconds: Option<(u64, u64)>,
}

/// Finding about a site.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::agent) struct SiteFinding {
    pub(in crate::agent) site: String,
    pub(in crate::agent) finding: Finding,
    /// Remarks for whoever waits for them.
    pub(in crate::agent) notes: Vec<String>,
}

impl Progress {
    /// The progress of a warm at `site`, for people.
    pub(in crate::agent) fn text(&self, site: &str) -> String {
        let done = self.bytes.saturating_sub(self.missing);
        let percent = done.saturating_mul(100).checked_div(self.bytes).unwrap_or(0);
        let eta = match self.seconds {
            None => String::new(),
            Some((half, most)) if most > half => format!("; about {half} s left, {most} s at most in 9 of 10 cases"),
            Some((half, _)) => format!("; about {half} s left"),
        };
        format!("warming at site {site}: {percent} %, {} of {}{eta}", show(done), show(self.bytes))
    }
}

/// Text about names that are absent, or not permitted.
pub(super) fn absence(error: &Error) -> String {
    let help = error.help_text().map(|help| format!(" ({help})")).unwrap_or_default();
    format!("{error}{help}")
}

/// A message with remarks.
pub(in crate::agent) fn with_notes<'a>(mut text: String, notes: impl IntoIterator<Item = &'a String>) -> String {
    for note in notes {
        text.push_str("; ");
        text.push_str(note);
    }
    text.chars().take(MESSAGE_LEN_MAX).collect()
}
