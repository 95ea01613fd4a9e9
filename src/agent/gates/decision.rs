//! Decisions: from what is known of the data of a pod to whether it waits on. Pure.

use std::time::Duration;

use crate::agent::controller::{Finding, SiteFinding, with_notes};
use crate::size::show;
use crate::span;

/// Decision on a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decision {
    /// True if it starts.
    pub(super) opens: bool,
    /// True if somebody should look at it.
    pub(super) warns: bool,
    /// Reason of the event.
    pub(super) reason: &'static str,
    /// How far it is: another one is another event.
    pub(super) action: &'static str,
    pub(super) note: String,
}

/// Action of an event that tells of no progress.
const CHECKED: &str = "CheckData";
/// Actions of those that do, by quarters of the bytes.
const QUARTERS: [&str; 4] = ["Warm0Percent", "Warm25Percent", "Warm50Percent", "Warm75Percent"];

/// Decides on a pod by what was `found` for it; without a finding, it names no data. `age` is that of the pod.
pub(super) fn decide(found: Option<&SiteFinding>, age: Duration, admit_after: Option<Duration>) -> Decision {
    let decision = |opens, warns, reason, note: String| Decision { opens, warns, reason, action: CHECKED, note };
    let Some(SiteFinding { site, finding, notes }) = found else {
        return decision(true, false, "DataReady", "no data is named".to_owned());
    };
    let waits = |warns, reason, text: String| match admit_after.filter(|limit| age >= *limit) {
        Some(limit) => {
            let text = format!("starts without its data after {}: {text}", span::show(limit));
            decision(true, true, "DataNotReady", text)
        }
        None => decision(false, warns, reason, text),
    };
    let decided = match finding {
        Finding::Malformed(text) => decision(false, true, "DataRejected", text.clone()),
        // It could not be read there either.
        Finding::Denied(text) => decision(false, true, "DataRejected", format!("{text}: may not go to site {site}")),
        Finding::Absent(_, text) => waits(true, "DataAbsent", text.clone()),
        Finding::Failing(_, text) => {
            waits(true, "DataWarmFails", format!("warm at site {site} fails, and is tried again: {text}"))
        }
        Finding::Queued(missing) => {
            let text = format!("{} are missing at site {site}; other warms come first", show(*missing));
            waits(false, "DataQueued", text)
        }
        Finding::Postponed(text) => waits(false, "DataQueued", text.clone()),
        Finding::Warming(progress) => {
            let done = progress.bytes.saturating_sub(progress.missing);
            let quarter = done.saturating_mul(4).checked_div(progress.bytes).unwrap_or(0);
            let action = QUARTERS[usize::try_from(quarter).unwrap_or(0).min(QUARTERS.len() - 1)];
            Decision { action, ..waits(false, "DataWarming", progress.text(site)) }
        }
        Finding::There(bytes) => decision(true, false, "DataReady", format!("warm: {} at site {site}", show(*bytes))),
        Finding::Nothing => decision(true, false, "DataReady", "no data is there to wait for".to_owned()),
    };
    Decision { note: with_notes(decided.note, notes), ..decided }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::controller::Progress;

    const MINUTE: Duration = Duration::from_mins(1);

    fn decided(finding: Finding, admit_after: Option<Duration>) -> (bool, bool, &'static str, String) {
        let found = SiteFinding { site: "cloud".to_owned(), finding, notes: vec!["a remark".to_owned()] };
        let Decision { opens, warns, reason, note, .. } = decide(Some(&found), MINUTE, admit_after);
        (opens, warns, reason, note)
    }

    #[test]
    fn a_pod_starts_once_its_data_is_there() {
        assert!(decide(None, MINUTE, None).opens);
        let (opens, warns, reason, note) = decided(Finding::There(2048), None);
        assert_eq!((opens, warns, reason), (true, false, "DataReady"));
        assert_eq!(note, "warm: 2.0 KiB at site cloud; a remark");
        assert!(decided(Finding::Nothing, None).0);
        let warming = |missing| Finding::Warming(Progress { missing, bytes: 2048, seconds: Some((40, 40)) });
        let (opens, warns, reason, note) = decided(warming(512), None);
        assert_eq!((opens, warns, reason), (false, false, "DataWarming"));
        let found = SiteFinding { site: "cloud".to_owned(), finding: warming(512), notes: Vec::new() };
        assert_eq!(decide(Some(&found), MINUTE, None).action, "Warm75Percent");
        assert_eq!(note, "warming at site cloud: 75 %, 1.5 KiB of 2.0 KiB; about 40 s left; a remark");
        for finding in [Finding::Absent(MINUTE, "x".into()), Finding::Failing(MINUTE, "x".into()), Finding::Queued(1)] {
            assert!(!decided(finding, None).0);
        }
    }

    #[test]
    fn a_limit_ends_the_wait_but_not_for_what_may_not_be() {
        for (limit, opens) in [(MINUTE, true), (2 * MINUTE, false)] {
            let (opened, _, _, note) = decided(Finding::Queued(7), Some(limit));
            assert_eq!(opened, opens);
            assert_eq!(note.starts_with("starts without its data after 1m: 7 B are missing"), opens, "{note}");
        }
        for finding in [Finding::Denied("raw/x".into()), Finding::Malformed("annotation is unknown".into())] {
            let (opens, warns, reason, _) = decided(finding, Some(MINUTE));
            assert_eq!((opens, warns, reason), (false, true, "DataRejected"));
        }
    }
}
