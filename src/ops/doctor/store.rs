//! Checks of any store: presence of a repository, and conformance by a probe.

use super::{Check, Outcome};
use crate::error::{ErrorKind, Result};
use crate::repository::{OpenOptions, Repository};
use crate::storage::{Capabilities, Effort, Store, Verdict, probe};

/// Check for a repository. `Err`: the store does not answer.
pub(super) async fn repository(store: &Store) -> Result<Check> {
    const WHAT: &str = "repository";
    match Repository::open(store.clone(), OpenOptions::default()).await {
        Ok(repository) => Ok(Check::ok(WHAT, format!("{} at {}", repository.id(), store.location()))),
        Err(error) => match error.kind() {
            ErrorKind::Unreachable => Err(error),
            ErrorKind::NotFound | ErrorKind::Denied => Ok(Check::unanswered(WHAT, &error)),
            _ => Ok(Check::failed(WHAT, Outcome::Bad, &error)),
        },
    }
}

/// Checks of the store's abilities. `Err`: the store does not answer.
pub(super) async fn abilities(store: &Store) -> Result<Vec<Check>> {
    const WHAT: &str = "what the store does";
    match probe(store, Effort::Full).await {
        Ok(found) => Ok(judge(&found)),
        Err(error) => match error.kind() {
            ErrorKind::Unreachable => Err(error),
            ErrorKind::Denied => Ok(vec![Check::unanswered(WHAT, &error)]),
            _ => Ok(vec![Check::failed(WHAT, Outcome::Bad, &error)]),
        },
    }
}

fn judge(found: &Capabilities) -> Vec<Check> {
    vec![
        shared_writing(found),
        needed("create if absent", found.create),
        needed("read after write", found.read_after_write),
        needed("list after write", found.list_after_write),
        needed("range reads", found.ranges),
        spare("update if unchanged", found.update, found.unquoted_etags),
        spare("delete if unchanged", found.delete, false),
    ]
}

fn shared_writing(found: &Capabilities) -> Check {
    const WHAT: &str = "shared writing";
    match found.shared_writing() {
        Ok(()) => Check::ok(WHAT, "any number of writers may share a repository here"),
        Err(error) if error.kind() == ErrorKind::Unreachable => Check::unanswered(WHAT, &error),
        Err(error) => Check::failed(WHAT, Outcome::Bad, &error),
    }
}

fn needed(what: &str, verdict: Verdict) -> Check {
    let outcome = match verdict {
        Verdict::Works => Outcome::Ok,
        Verdict::Unclear | Verdict::Untried => Outcome::Warn,
        Verdict::Ignored | Verdict::Refused | Verdict::Racy { .. } => Outcome::Bad,
    };
    Check::new(what, outcome, verdict.to_string())
}

/// Check of an ability that is not required.
fn spare(what: &str, verdict: Verdict, unquoted_etags: bool) -> Check {
    let note = match verdict {
        Verdict::Works if unquoted_etags => "; only with ETags sent without their quotes, as by Ceph RGW 16",
        Verdict::Works => "",
        _ => "; Towline does not need it",
    };
    Check::ok(what, format!("{verdict}{note}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CEPH: Capabilities = Capabilities {
        create: Verdict::Works,
        update: Verdict::Works,
        delete: Verdict::Ignored,
        ranges: Verdict::Works,
        read_after_write: Verdict::Works,
        list_after_write: Verdict::Works,
        unquoted_etags: true,
    };

    #[test]
    fn what_towline_does_without_is_no_trouble() {
        let checks = judge(&CEPH);
        assert!(checks.iter().all(|check| check.outcome == Outcome::Ok && check.help.is_none()), "{checks:?}");
        assert!(checks.iter().any(|check| check.detail.contains("without their quotes")));
        assert!(checks.iter().any(|check| check.detail == "ignored without a word; Towline does not need it"));
    }

    #[test]
    fn what_towline_stands_on_is_bad_without_and_a_warning_unseen() {
        let racy = judge(&Capabilities { create: Verdict::Racy { broken: 3, rounds: 16 }, ..CEPH });
        let bad: Vec<_> = racy.iter().filter(|check| check.outcome == Outcome::Bad).collect();
        assert_eq!(bad.iter().map(|check| &*check.what).collect::<Vec<_>>(), ["shared writing", "create if absent"]);
        assert!(bad[0].help.is_some());
        let unclear = judge(&Capabilities { create: Verdict::Unclear, ..CEPH });
        assert_eq!(unclear.iter().filter(|check| check.outcome == Outcome::Warn).count(), 2);
    }
}
