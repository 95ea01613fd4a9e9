//! Checks that the source of a fetch is known and answers. Pure.

use std::collections::BTreeSet;

use super::{FetchPolicy, From};
use crate::error::{Error, Result};
use crate::identity::Identity;

/// Checks the source that `policy` names against the `live` agents, all that were ever `known`, and addresses that have never answered,
/// with their errors.
///
/// # Errors
/// Not found, if no known agent belongs to that source; unreachable, if none of the live ones does, or one of the addresses may, and
/// the repository must not be read instead.
pub(super) fn check(
    policy: &FetchPolicy,
    live: &[Identity],
    (known, nameless): (&BTreeSet<Identity>, &[String]),
) -> Result<()> {
    let fits = |agent: &Identity| match &policy.from {
        From::Site(site) => agent.site() == site,
        From::Agent(wanted) => agent == wanted,
        From::Anywhere | From::Repository => true,
    };
    let kind = match &policy.from {
        From::Anywhere | From::Repository => return Ok(()),
        From::Site(_) => "site",
        From::Agent(_) => "agent",
    };
    if live.iter().any(fits) {
        return Ok(());
    }
    if policy.hides_agents {
        if policy.or_repository {
            return Ok(());
        }
        return Err(Error::unreachable(format!("{kind} `{}` is not known here, or does not answer", policy.from))
            .help("leave the source out, or read from the repository what it lacks (or_repository)"));
    }
    if known.iter().any(fits) {
        if policy.or_repository {
            return Ok(());
        }
        return Err(Error::unreachable(format!("{kind} `{}` does not answer", policy.from))
            .help("try again when its agents run, or read from the repository what it lacks: --or-repository"));
    }
    if !nameless.is_empty() {
        if policy.or_repository {
            return Ok(());
        }
        return Err(Error::unreachable(format!("{kind} `{}` has not answered yet", policy.from))
            .got(format!(
                "no answer from {}, which may be of other sites: an address has no name until it answers",
                nameless.join("; ")
            ))
            .help("try again when its agents run; an agent that has just started is found within half a minute"));
    }
    let error = Error::not_found(format!("{kind} `{}` is not known here", policy.from));
    Err(if known.is_empty() {
        error.got("no other agent yet").help("other agents are named in [peers] of the agent's settings")
    } else {
        error
            .expected(names(known))
            .help("name one of these, or `repository`; other agents are named in [peers] of the agent's settings")
    })
}

/// Text of the known sites and their agents.
fn names(known: &BTreeSet<Identity>) -> String {
    let sites: BTreeSet<&str> = known.iter().map(Identity::site).collect();
    let agents: Vec<String> = known.iter().map(Identity::path).collect();
    let sites: Vec<&str> = sites.into_iter().collect();
    format!("one of the sites {} or the agents {}", sites.join(", "), agents.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn agent(site: &str, agent: &str) -> Identity {
        Identity::new(site, agent).unwrap()
    }

    fn said(from: &str, or_repository: bool) -> Option<(ErrorKind, String)> {
        let policy = FetchPolicy { from: from.parse().unwrap(), or_repository, ..FetchPolicy::default() };
        let (up, down) = (agent("home", "a"), agent("cloud", "b"));
        let known = BTreeSet::from([up.clone(), down]);
        let error = check(&policy, &[up], (&known, &[])).err()?;
        Some((error.kind(), error.to_string()))
    }

    #[test]
    fn a_place_must_be_known_and_answer() {
        for fine in ["home", "home/a", "repository"] {
            assert_eq!(said(fine, false), None, "{fine}");
        }
        for unknown in ["nowhere", "home/b", "nowhere/a"] {
            for or_repository in [false, true] {
                let (kind, text) = said(unknown, or_repository).unwrap();
                assert_eq!(kind, ErrorKind::NotFound);
                let expected = "expected one of the sites cloud, home or the agents cloud/b, home/a";
                assert!(
                    text.starts_with(&format!(
                        "{} `{unknown}` is not known here",
                        if unknown.contains('/') { "agent" } else { "site" }
                    )),
                    "{text}"
                );
                assert!(text.ends_with(expected), "{text}");
            }
        }
        for silent in ["cloud", "cloud/b"] {
            assert_eq!(said(silent, false).unwrap().0, ErrorKind::Unreachable);
            assert_eq!(said(silent, true), None);
        }
        let (nobody, nameless) = (BTreeSet::new(), ["127.0.0.1:7171".to_owned()]);
        let checked = |policy: &FetchPolicy| check(policy, &[], (&nobody, &nameless)).map_err(|error| error.kind());
        assert_eq!(checked(&FetchPolicy::default()), Ok(()));
        // Which site the agent at that address is of, only it can say.
        let mut named = FetchPolicy { from: "home".parse().unwrap(), ..FetchPolicy::default() };
        assert_eq!(checked(&named), Err(ErrorKind::Unreachable));
        let error = check(&named, &[], (&nobody, &nameless)).unwrap_err();
        assert!(error.to_string().contains("127.0.0.1:7171, which may be of other sites"), "{error}");
        named.or_repository = true;
        assert_eq!(checked(&named), Ok(()));
    }

    #[test]
    fn who_may_not_know_the_agents_is_told_none() {
        let known = BTreeSet::from([agent("home", "a"), agent("cloud", "b")]);
        let nameless = ["127.0.0.1:7171".to_owned()];
        for from in ["nowhere", "cloud", "cloud/b", "nowhere/a"] {
            for (known, nameless) in [(&known, &[][..]), (&BTreeSet::new(), &nameless[..])] {
                let policy = FetchPolicy { from: from.parse().unwrap(), hides_agents: true, ..FetchPolicy::default() };
                let error = check(&policy, &[agent("home", "a")], (known, nameless)).unwrap_err();
                let kind = if from.contains('/') { "agent" } else { "site" };
                assert_eq!(error.to_string(), format!("{kind} `{from}` is not known here, or does not answer"));
                assert_eq!(error.kind(), ErrorKind::Unreachable);
            }
        }
    }
}
