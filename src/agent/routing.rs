//! Routing of calls to other agents, without I/O.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::transfer::peers::PeerStat;

/// Selects agents; as text `SITE` or `SITE/AGENT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentSelector {
    /// Any agent of a site.
    Site(String),
    /// One agent.
    Agent(Identity),
}

impl AgentSelector {
    fn matches(&self, agent: &Identity) -> bool {
        match self {
            Self::Site(site) => agent.site() == site,
            Self::Agent(wanted) => agent == wanted,
        }
    }
}

impl FromStr for AgentSelector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once('/') {
            None => Ok(Self::Site(Identity::new(text, "any")?.site().to_owned())),
            Some((site, agent)) => Ok(Self::Agent(Identity::new(site, agent)?)),
        }
    }
}

impl fmt::Display for AgentSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Site(site) => f.write_str(site),
            Self::Agent(agent) => f.write_str(&agent.path()),
        }
    }
}

/// Agent that a call is routed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// This agent.
    Local,
    /// Another agent, at this address.
    Remote(Identity, String),
}

/// Candidate for a call.
#[derive(Clone, Debug, Default)]
struct Candidate {
    /// Address; None for this agent.
    address: Option<String>,
    live: bool,
}

/// Selects the agent for a call with selector `at`, given agent `own` and its `peers`. Among the agents of a site a hash of
/// `name` selects one, the same on every node. Agents without a link are candidates only if none has one.
///
/// # Errors
/// Not found, if no known agent matches; usage, if several do and there is no name.
pub(super) fn route(at: &AgentSelector, own: &Identity, peers: &[PeerStat], name: Option<&str>) -> Result<Route> {
    let known = candidates(own, peers);
    let matching: Vec<(&Identity, &Candidate)> = known.iter().filter(|(agent, _)| at.matches(agent)).collect();
    let live = matching.iter().filter(|(_, known)| known.live).copied().collect::<Vec<_>>();
    let chosen = match (matching.as_slice(), name) {
        ([], _) => return Err(unknown(at, &known, peers)),
        ([one], _) => *one,
        (several, None) => {
            let names: Vec<_> = several.iter().map(|(agent, _)| agent.path()).collect();
            return Err(Error::usage("site has several agents").at(at).help(format!("name one: {}", names.join(", "))));
        }
        (several, Some(name)) => {
            let among = if live.is_empty() { several } else { &live };
            let first = among.iter().max_by_key(|(agent, _)| weight(agent, name));
            *first.ok_or_else(|| unknown(at, &known, peers))?
        }
    };
    Ok(match &chosen.1.address {
        None => Route::Local,
        Some(address) => Route::Remote(chosen.0.clone(), address.clone()),
    })
}

/// Other agents that `at` matches, with addresses: those with a link first, each group ordered by the hash of `name`.
pub(super) fn others(at: &AgentSelector, own: &Identity, peers: &[PeerStat], name: &str) -> Vec<(Identity, String)> {
    let matching = candidates(own, peers).into_iter().filter(|(agent, _)| at.matches(agent));
    let others = matching.filter_map(|(agent, known)| Some((known.live, weight(&agent, name), agent, known.address?)));
    let mut others: Vec<_> = others.collect();
    others.sort_unstable_by(|a, b| b.cmp(a));
    others.into_iter().map(|(_, _, agent, address)| (agent, address)).collect()
}

/// Agents with a verified certificate, with one address each, preferably one with a link.
fn candidates(own: &Identity, peers: &[PeerStat]) -> BTreeMap<Identity, Candidate> {
    let mut known = BTreeMap::new();
    for peer in peers {
        let Some(identity) = &peer.identity else { continue };
        let entry: &mut Candidate = known.entry(identity.clone()).or_default();
        let live = peer.connections > 0;
        if entry.address.is_none() || live && !entry.live {
            *entry = Candidate { address: Some(peer.address.clone()), live };
        }
    }
    known.insert(own.clone(), Candidate { address: None, live: true });
    known
}

/// Weight of `agent` for `name` in rendezvous hashing (<https://doi.org/10.1109/90.663936>). The highest weight wins, so an
/// agent that joins or leaves moves only its own names.
fn weight(agent: &Identity, name: &str) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(agent.path().as_bytes()).update(b"\n").update(name.as_bytes());
    hasher.finalize().into()
}

fn unknown(at: &AgentSelector, known: &BTreeMap<Identity, Candidate>, peers: &[PeerStat]) -> Error {
    let mut names: Vec<String> = known.keys().map(Identity::path).collect();
    for peer in peers.iter().filter(|peer| peer.identity.is_none()) {
        let trouble = peer.error.as_deref().unwrap_or("has not answered yet");
        names.push(format!("an agent at {} ({trouble})", peer.address));
    }
    let what = match at {
        AgentSelector::Site(_) => "no agent of this site is known",
        AgentSelector::Agent(_) => "this agent is not known here",
    };
    Error::not_found(what)
        .at(at)
        .expected(format!("one of: {}", names.join(", ")))
        .help("configure its address on this node's agent: addresses, dns or registered in [peers] of its settings")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn agent(path: &str) -> Identity {
        let (site, agent) = path.split_once('/').unwrap();
        Identity::new(site, agent).unwrap()
    }

    fn peer(path: Option<&str>, address: &str, connections: usize) -> PeerStat {
        PeerStat {
            address: address.to_owned(),
            identity: path.map(agent),
            transport: None,
            connections,
            rtt: None,
            rate: None,
            received: 0,
            error: None,
        }
    }

    fn chosen(at: &str, peers: &[PeerStat], name: Option<&str>) -> Result<Route> {
        route(&at.parse().unwrap(), &agent("home/a"), peers, name)
    }

    #[test]
    fn an_agent_is_found_where_it_answers() {
        let peers = [peer(Some("cloud/b"), "old:1", 0), peer(Some("cloud/b"), "new:1", 2), peer(None, "x:1", 0)];
        let b = Route::Remote(agent("cloud/b"), "new:1".into());
        assert_eq!(chosen("cloud/b", &peers, None).unwrap(), b);
        assert_eq!(chosen("cloud", &peers, None).unwrap(), b, "there is no other");
        assert_eq!(chosen("home/a", &peers, None).unwrap(), Route::Local);
        // One that was seen and does not answer is still asked for by name.
        assert_eq!(chosen("cloud/b", &peers[..1], Some("n")).unwrap(), Route::Remote(agent("cloud/b"), "old:1".into()));
    }

    #[test]
    fn names_are_spread_over_a_site_and_stay_where_they_are() {
        let peers: Vec<_> = ["c/1", "c/2", "c/3"].map(|path| peer(Some(path), path, 1)).into();
        let of = |peers: &[PeerStat], name: &str| chosen("c", peers, Some(name)).unwrap();
        let names: Vec<String> = (0..60).map(|n| format!("run/step-{n}")).collect();
        let at = |path: &str| Route::Remote(agent(path), path.to_owned());
        for path in ["c/1", "c/2", "c/3"] {
            assert!(names.iter().filter(|name| of(&peers, name) == at(path)).count() > 5, "{path}");
        }
        let mut fewer = peers.clone();
        fewer[1].connections = 0;
        for name in &names {
            let (before, after) = (of(&peers, name), of(&fewer, name));
            assert!(before == after || before == at("c/2"), "{name}");
            assert_ne!(after, at("c/2"));
        }
        let error = chosen("c", &peers, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert_eq!(error.help_text(), Some("name one: c/1, c/2, c/3"));
    }

    #[test]
    fn others_are_those_that_answer_first() {
        let mut peers: Vec<_> = ["c/1", "c/2", "c/3", "d/1"].map(|path| peer(Some(path), path, 1)).into();
        peers[1].connections = 0;
        peers.push(peer(None, "x:1", 0));
        let of = |at: &str, own: &str| {
            let others = others(&at.parse().unwrap(), &agent(own), &peers, "run/step-1");
            others.into_iter().map(|(who, _)| who.path()).collect::<Vec<_>>()
        };
        let site = of("c", "c/9");
        assert_eq!((site.len(), site[2].as_str()), (3, "c/2"));
        assert_eq!(of("c", "c/9"), site);
        assert!(!of("c", "c/3").contains(&"c/3".to_owned()), "nobody is its own target");
        assert_eq!((of("c/2", "c/9"), of("e", "c/9")), (vec!["c/2".to_owned()], vec![]));
    }

    #[test]
    fn who_is_not_known_is_told_with_those_that_are() {
        let error = chosen("mars", &[peer(Some("cloud/b"), "b:1", 1), peer(None, "x:1", 0)], Some("n")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let text = error.to_string();
        assert!(
            text.contains("mars") && text.contains("cloud/b, home/a, an agent at x:1 (has not answered yet)"),
            "{text}"
        );
        assert!("a/b/c".parse::<AgentSelector>().is_err() && "".parse::<AgentSelector>().is_err());
        assert_eq!("cloud/b".parse::<AgentSelector>().unwrap().to_string(), "cloud/b");
    }
}
