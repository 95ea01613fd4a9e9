//! Decisions: from what is known of the data of a workload to the state of its check. Pure.

use std::time::Duration;

use super::objects::CheckState;
use crate::size::show;
use crate::span;

/// First pause between a `Retry` and the next try, which doubles with each.
const RETRY_FIRST: Duration = Duration::from_mins(1);
/// Longest pause.
const RETRY_MAX: Duration = Duration::from_mins(30);
/// Time for which something may fail, with the quota held, before the workload gives it back.
pub(super) const PATIENCE: Duration = Duration::from_mins(5);
/// Characters of a message; Kueue allows 32768.
const MESSAGE_LEN_MAX: usize = 1000;

/// Finding about the data that some pods of a workload need at a site.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Finding {
    /// They need none.
    Nothing,
    /// It is there: bytes, as they are kept.
    There(u64),
    /// It is on its way.
    Warming(Progress),
    /// Other warms come first.
    Queued(u64),
    /// Something fails, and is tried again: since when, and why.
    Failing(Duration, String),
    /// There is no such name, or the pods may not read it.
    Absent(String),
    /// The data may not go there.
    Denied(String),
    /// The pods ask for something impossible.
    Malformed(String),
}

/// Progress of a warm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Progress {
    pub(super) missing: u64,
    pub(super) bytes: u64,
    /// Seconds until all is there, in the median and at the 90th percentile.
    pub(super) seconds: Option<(u64, u64)>,
}

/// Finding about a site.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SiteFinding {
    pub(super) site: String,
    pub(super) finding: Finding,
    /// Remarks for whoever reads the check.
    pub(super) notes: Vec<String>,
}

/// Past of a workload's check.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waited {
    /// Time since the workload has its quota.
    pub(super) quota: Duration,
    /// Times that it gave it back.
    pub(super) retries: u32,
}

/// New state of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) state: CheckState,
    pub(super) message: String,
    /// Seconds until Kueue tries again, with [`CheckState::Retry`].
    pub(super) requeue_after: Option<u64>,
}

impl Finding {
    /// Rank of what decides: the worst finding of a workload.
    fn rank(&self) -> u8 {
        match self {
            Self::Malformed(_) | Self::Denied(_) => 5,
            Self::Absent(_) => 4,
            Self::Failing(..) => 3,
            Self::Queued(_) => 2,
            Self::Warming(_) => 1,
            Self::There(_) | Self::Nothing => 0,
        }
    }
}

/// Decides on a workload by what was found for its pods. Without a finding, they need nothing.
pub(super) fn decide(findings: &[SiteFinding], waited: Waited, admit_after: Option<Duration>) -> Decision {
    let Some(worst) = findings.iter().max_by_key(|one| one.finding.rank()) else {
        return ready("no data is named".to_owned());
    };
    let site = &worst.site;
    let pending = |text: String| match admit_after {
        Some(limit) if waited.quota >= limit => {
            ready(format!("admitted without its data after {}: {text}", span::show(limit)))
        }
        _ => Decision { state: CheckState::Pending, message: text, requeue_after: None },
    };
    let decision = match &worst.finding {
        Finding::Malformed(text) => rejected(text.clone()),
        Finding::Denied(text) => rejected(format!("{text}: may not go to site {site}")),
        Finding::Absent(text) => retry(text.clone(), waited.retries),
        Finding::Failing(since, text) if *since >= PATIENCE && admit_after.is_none() => {
            retry(format!("warm at site {site} fails: {text}"), waited.retries)
        }
        Finding::Failing(_, text) => pending(format!("warm at site {site} fails, and is tried again: {text}")),
        Finding::Queued(missing) => {
            pending(format!("{} are missing at site {site}; other warms come first", show(*missing)))
        }
        Finding::Warming(progress) => pending(progress.text(site)),
        Finding::There(_) | Finding::Nothing => ready(there(findings)),
    };
    let notes: String =
        findings.iter().flat_map(|one| &one.notes).map(|note| format!("; {note}")).collect::<Vec<_>>().concat();
    let message = (decision.message + &notes).chars().take(MESSAGE_LEN_MAX).collect();
    Decision { message, ..decision }
}

impl Progress {
    fn text(&self, site: &str) -> String {
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

/// Where the data is, each site once.
fn there(findings: &[SiteFinding]) -> String {
    let mut sites: Vec<String> = Vec::new();
    for one in findings {
        if let Finding::There(bytes) = one.finding {
            let text = format!("{} at site {}", show(bytes), one.site);
            if !sites.contains(&text) {
                sites.push(text);
            }
        }
    }
    if sites.is_empty() { "no data is named".to_owned() } else { format!("warm: {}", sites.join(", ")) }
}

fn ready(message: String) -> Decision {
    Decision { state: CheckState::Ready, message, requeue_after: None }
}

fn rejected(message: String) -> Decision {
    Decision { state: CheckState::Rejected, message, requeue_after: None }
}

fn retry(message: String, retries: u32) -> Decision {
    let pause = RETRY_FIRST.saturating_mul(1 << retries.min(10)).min(RETRY_MAX);
    Decision { state: CheckState::Retry, message, requeue_after: Some(pause.as_secs()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(site: &str, finding: Finding) -> SiteFinding {
        SiteFinding { site: site.to_owned(), finding, notes: Vec::new() }
    }

    fn decided(findings: &[SiteFinding]) -> (CheckState, String) {
        let decision = decide(findings, Waited::default(), None);
        assert_eq!(decision.requeue_after.is_some(), decision.state == CheckState::Retry);
        (decision.state, decision.message)
    }

    #[test]
    fn the_worst_finding_decides() {
        let there = at("home", Finding::There(2048));
        let warming = Finding::Warming(Progress { missing: 512, bytes: 2048, seconds: Some((40, 70)) });
        let warming = at("cloud", warming);
        let denied = at("cloud", Finding::Denied("raw/x: raw data stays at home".to_owned()));
        assert_eq!(decided(&[]), (CheckState::Ready, "no data is named".to_owned()));
        assert_eq!(decided(&[at("home", Finding::Nothing)]), (CheckState::Ready, "no data is named".to_owned()));
        let all = [there.clone(), at("cloud", Finding::There(4096)), there.clone()];
        assert_eq!(decided(&all), (CheckState::Ready, "warm: 2.0 KiB at site home, 4.0 KiB at site cloud".to_owned()));
        let text = "warming at site cloud: 75 %, 1.5 KiB of 2.0 KiB; about 40 s left, 70 s at most in 9 of 10 cases";
        assert_eq!(decided(&[there.clone(), warming.clone()]), (CheckState::Pending, text.to_owned()));
        let absent = at("home", Finding::Absent("there is no such name".to_owned()));
        assert_eq!(decided(&[warming.clone(), absent.clone()]).0, CheckState::Retry);
        let text = "raw/x: raw data stays at home: may not go to site cloud";
        assert_eq!(decided(&[absent, denied, there]), (CheckState::Rejected, text.to_owned()));
    }

    #[test]
    fn what_fails_gives_the_quota_back_and_pauses_double() {
        let failing = |seconds| at("home", Finding::Failing(Duration::from_secs(seconds), "disk is full".to_owned()));
        assert_eq!(decided(&[failing(299)]).0, CheckState::Pending);
        for (retries, pause) in [(0, 60), (1, 120), (4, 960), (5, 1800), (4_000_000, 1800)] {
            let waited = Waited { retries, ..Waited::default() };
            let decision = decide(&[failing(300)], waited, None);
            assert_eq!((decision.state, decision.requeue_after), (CheckState::Retry, Some(pause)));
        }
    }

    #[test]
    fn a_workload_is_admitted_without_its_data_in_the_end_if_so_set() {
        let limit = Some(Duration::from_mins(10));
        let at_second = |seconds, finding| {
            let waited = Waited { quota: Duration::from_secs(seconds), retries: 0 };
            decide(&[at("home", finding)], waited, limit).state
        };
        let failing = || Finding::Failing(Duration::from_mins(9), "disk is full".to_owned());
        assert_eq!(at_second(599, failing()), CheckState::Pending, "it would be admitted soon");
        assert_eq!(at_second(600, failing()), CheckState::Ready);
        assert_eq!(at_second(600, Finding::Queued(7)), CheckState::Ready);
        // Time changes nothing about what may not be.
        assert_eq!(at_second(600, Finding::Denied(String::new())), CheckState::Rejected);
        assert_eq!(at_second(600, Finding::Absent(String::new())), CheckState::Retry);
    }

    #[test]
    fn messages_are_short_and_have_the_notes() {
        let notes = vec!["there is no step run@latest yet, so none is restored".to_owned()];
        let finding = SiteFinding { notes, ..at("home", Finding::Nothing) };
        assert_eq!(decided(&[finding]).1, "no data is named; there is no step run@latest yet, so none is restored");
        let long = at("home", Finding::Absent("\u{e4}".repeat(5000)));
        assert_eq!(decided(&[long]).1.chars().count(), MESSAGE_LEN_MAX);
    }
}
