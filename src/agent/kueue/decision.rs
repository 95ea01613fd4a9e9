//! Decisions: from what is known of the data of a workload to the state of its check. Pure.

use std::time::Duration;

use super::objects::CheckState;
use crate::agent::controller::{Finding, SiteFinding, with_notes};
use crate::size::show;
use crate::span;

/// Times after which a workload does not wait on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time for which its data may be absent, or a warm fail, with the quota held.
    pub(super) retry_after: Duration,
    /// Time since it has its quota after which it is admitted without its data; none: never.
    pub(super) admit_after: Option<Duration>,
}

/// New state of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) state: CheckState,
    pub(super) message: String,
}

impl Finding {
    /// Rank of what decides: the worst finding of a workload.
    fn rank(&self) -> u8 {
        match self {
            Self::Malformed(_) | Self::Denied(_) => 5,
            Self::Absent(..) => 4,
            Self::Failing(..) => 3,
            Self::Queued(_) | Self::Postponed(_) => 2,
            Self::Warming(_) => 1,
            Self::There(_) | Self::Nothing => 0,
        }
    }
}

/// Decides on a workload by what was found for its pods. Without a finding, they need nothing. `quota` is the time since it has its
/// quota.
pub(super) fn decide(findings: &[SiteFinding], quota: Duration, limits: Limits) -> Decision {
    let Some(worst) = findings.iter().max_by_key(|one| one.finding.rank()) else {
        return decision(CheckState::Ready, "no data is named".to_owned());
    };
    let site = &worst.site;
    let pending = |text: String| match limits.admit_after {
        Some(limit) if quota >= limit => {
            decision(CheckState::Ready, format!("admitted without its data after {}: {text}", span::show(limit)))
        }
        _ => decision(CheckState::Pending, text),
    };
    let decided = match &worst.finding {
        Finding::Malformed(text) => decision(CheckState::Rejected, text.clone()),
        Finding::Denied(text) => decision(CheckState::Rejected, format!("{text}: may not go to site {site}")),
        // Without a pause: the quota was held long enough, and another workload may get it now.
        Finding::Absent(since, text) if *since >= limits.retry_after => decision(CheckState::Retry, text.clone()),
        Finding::Absent(_, text) => decision(CheckState::Pending, text.clone()),
        Finding::Failing(since, text) if *since >= limits.retry_after && limits.admit_after.is_none() => {
            decision(CheckState::Retry, format!("warm at site {site} fails: {text}"))
        }
        Finding::Failing(_, text) => pending(format!("warm at site {site} fails, and is tried again: {text}")),
        Finding::Queued(missing) => {
            pending(format!("{} are missing at site {site}; other warms come first", show(*missing)))
        }
        Finding::Postponed(text) => pending(text.clone()),
        Finding::Warming(progress) => pending(progress.text(site)),
        Finding::There(_) | Finding::Nothing => decision(CheckState::Ready, there(findings)),
    };
    let message = with_notes(decided.message, findings.iter().flat_map(|one| &one.notes));
    Decision { message, ..decided }
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

fn decision(state: CheckState, message: String) -> Decision {
    Decision { state, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::controller::Progress;

    const LIMITS: Limits = Limits { retry_after: Duration::from_mins(5), admit_after: None };

    fn at(site: &str, finding: Finding) -> SiteFinding {
        SiteFinding { site: site.to_owned(), finding, notes: Vec::new() }
    }

    fn decided(findings: &[SiteFinding]) -> (CheckState, String) {
        let Decision { state, message } = decide(findings, Duration::from_hours(1), LIMITS);
        (state, message)
    }

    fn absent(seconds: u64) -> Finding {
        Finding::Absent(Duration::from_secs(seconds), "there is no such name".to_owned())
    }

    fn failing(seconds: u64) -> Finding {
        Finding::Failing(Duration::from_secs(seconds), "disk is full".to_owned())
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
        assert_eq!(decided(&[warming.clone(), at("home", absent(300))]).0, CheckState::Retry);
        let text = "raw/x: raw data stays at home: may not go to site cloud";
        assert_eq!(decided(&[at("home", absent(300)), denied, there]), (CheckState::Rejected, text.to_owned()));
    }

    #[test]
    fn what_is_absent_or_fails_gives_the_quota_back_after_a_while() {
        for finding in [absent, failing] {
            assert_eq!(decided(&[at("home", finding(299))]).0, CheckState::Pending);
            assert_eq!(decided(&[at("home", finding(300))]).0, CheckState::Retry);
        }
        for finding in [Finding::Queued(7), Finding::Postponed("others".to_owned())] {
            assert_eq!(decided(&[at("home", finding)]).0, CheckState::Pending, "however long");
        }
    }

    #[test]
    fn a_workload_is_admitted_without_its_data_in_the_end_if_so_set() {
        let limits = Limits { admit_after: Some(Duration::from_mins(10)), ..LIMITS };
        let at_second = |seconds, finding| decide(&[at("home", finding)], Duration::from_secs(seconds), limits).state;
        assert_eq!(at_second(599, failing(540)), CheckState::Pending, "it would be admitted soon");
        assert_eq!(at_second(600, failing(540)), CheckState::Ready);
        assert_eq!(at_second(600, Finding::Queued(7)), CheckState::Ready);
        // Time changes nothing about what may not be.
        assert_eq!(at_second(600, Finding::Denied(String::new())), CheckState::Rejected);
        assert_eq!(at_second(600, absent(10)), CheckState::Pending);
        assert_eq!(at_second(600, absent(300)), CheckState::Retry);
    }

    #[test]
    fn messages_are_short_and_have_the_notes() {
        let notes = vec!["there is no step run@latest yet, so none is restored".to_owned()];
        let finding = SiteFinding { notes, ..at("home", Finding::Nothing) };
        assert_eq!(decided(&[finding]).1, "no data is named; there is no step run@latest yet, so none is restored");
        let long = at("home", Finding::Absent(Duration::ZERO, "\u{e4}".repeat(5000)));
        assert_eq!(decided(&[long]).1.chars().count(), 1000);
    }
}
