//! Audit entries of requests of peers, granted and refused, and of requests to peers: one entry for each request for a manifest, with
//! its bytes; none for single chunks.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::Exchange;
use super::get::ChunkRequest;
use super::permits::Endpoints;
use crate::audit::{
    Action, Actor, ActorLimit, DENIED_NAMES, Decision, Recorder, Repeats, Request, SERVED_TREES, Verdict,
};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ManifestId, RepositoryId};
use crate::identity::Identity;
use crate::log_limit::LogLimit;
use crate::name::Name;
use crate::policy::LocalCaller;
use crate::transfer::driver::Client;

/// Maximum number of requests that are remembered to count their bytes; forgotten ones are recorded again.
const REQUESTS_MAX: usize = 1024;
/// Rule that allows processes of this node to read.
const LOCAL: &str = "process of this node";

/// Whoever asks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Requester<'a> {
    /// Another agent.
    Agent(&'a Identity),
    /// A process of this node, by the user that the kernel names.
    Process(&'a LocalCaller),
}

impl Requester<'_> {
    fn actor(self) -> Actor {
        match self {
            Self::Agent(agent) => Actor::Agent(agent.clone()),
            Self::Process(caller) => Actor::of_caller(caller),
        }
    }
}

/// The other side of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum PeerRole {
    /// It asked.
    Requester(Actor),
    /// It was asked.
    Provider(Identity),
}

/// The recorder, if there is one, and the requests that it has recorded.
#[derive(Debug)]
pub(super) struct Audited {
    recorder: OnceLock<Recorder>,
    requests: Mutex<HashMap<(PeerRole, ManifestId), Request>>,
    /// Trees that each agent was served lately.
    served: ActorLimit,
    /// Trees that each agent was refused lately.
    denied: ActorLimit,
}

impl Default for Audited {
    fn default() -> Self {
        Self {
            recorder: OnceLock::new(),
            requests: Mutex::default(),
            served: ActorLimit::new(SERVED_TREES),
            denied: ActorLimit::new(DENIED_NAMES),
        }
    }
}

impl Audited {
    /// `decision` about a request of `agent` for the tree of a manifest, as it is recorded: of many refused trees without their names. A
    /// tree whose entry `ended` counts again.
    ///
    /// # Errors
    /// Exhausted, if the agent is served too many trees in the minute of `now`.
    fn limited(&self, decision: Decision, agent: &Identity, ended: Option<u64>, now: Timestamp) -> Result<Decision> {
        let (who, Some(manifest)) = (agent.to_string(), &decision.manifest) else { return Ok(decision) };
        let granted = decision.verdict == Verdict::Allow;
        let limit = if granted { &self.served } else { &self.denied };
        if limit.admit_once(&who, &format!("{manifest} {ended:?}"), now) {
            return Ok(decision);
        }
        if granted {
            return Err(Error::exhausted("agent asks for chunks of too many trees in a minute")
                .at(agent)
                .expected(format!("at most {SERVED_TREES}, as each has an entry in the audit log")));
        }
        let rule = "refused, as many trees before in this minute".to_owned();
        Ok(Decision { name: None, manifest: None, repository: None, rule, ..decision })
    }

    fn requests(&self) -> std::sync::MutexGuard<'_, HashMap<(PeerRole, ManifestId), Request>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, party: PeerRole, manifest: ManifestId, request: Request) {
        let mut requests = self.requests();
        if requests.len() >= REQUESTS_MAX {
            requests.clear();
        }
        requests.insert((party, manifest), request);
    }
}

/// A request to a peer, and its entry, if there is a log.
#[derive(Debug, Default)]
pub(super) struct PeerRequest {
    request: Option<Request>,
    /// Bytes that came after the entry had ended.
    late: u64,
}

impl PeerRequest {
    /// Counts `bytes` that the peer has sent.
    pub(super) fn received(&mut self, bytes: u64) {
        if self.request.as_ref().is_some_and(|request| !request.moved(bytes)) {
            self.late += bytes;
        }
    }
}

/// Log lines about refusals that the audit log does not have.
static UNRECORDED: LogLimit = LogLimit::new();

impl Exchange {
    /// Starts recording decisions with `recorder`; a request that cannot be recorded is refused. The first recorder
    /// stays.
    pub fn record_in(&self, recorder: Recorder) {
        let _ = self.audited.recorder.set(recorder);
    }

    /// Records that `requester` is granted or refused `manifest`. Granted and refused requests are looked up in the same
    /// way.
    ///
    /// # Errors
    /// As [`Recorder::record`]; exhausted, if an agent is served too many trees in a minute.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn record(&self, requester: Requester<'_>, manifest: &ManifestId, granted: bool) -> Result<()> {
        let Some(recorder) = self.audited.recorder.get() else { return Ok(()) };
        let mut decision = self.decision(requester, manifest, granted);
        if let Requester::Agent(agent) = requester {
            let key = (PeerRole::Requester(requester.actor()), *manifest);
            let ended = self.audited.requests().get(&key).filter(|request| !request.moved(0)).map(Request::seq);
            decision = self.audited.limited(decision, agent, ended, recorder.now())?;
        }
        if matches!(requester, Requester::Process(_)) && !granted {
            // Absent, so not refused.
            return Ok(());
        }
        let request = match recorder.record(decision, Repeats::Merged).await {
            Ok(request) => request,
            // It is refused in any case, with the answer for an absent one.
            Err(error) if !granted => {
                if let Some(kept_back) = UNRECORDED.may() {
                    tracing::warn!(kept_back, "refusal is not recorded: {error:?}");
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if granted {
            self.audited.remember(PeerRole::Requester(requester.actor()), *manifest, request);
        }
        Ok(())
    }

    /// Counts `bytes` of `manifest` that are sent to `requester`. Bytes after a minute without any are recorded as a new
    /// request.
    ///
    /// # Errors
    /// As [`Recorder::record`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn count_sent(&self, requester: Requester<'_>, manifest: &ManifestId, bytes: u64) -> Result<()> {
        if self.audited.recorder.get().is_none() {
            return Ok(());
        }
        let key = (PeerRole::Requester(requester.actor()), *manifest);
        let goes_on = |request: &Request| request.moved(bytes);
        if self.audited.requests().get(&key).is_some_and(goes_on) {
            return Ok(());
        }
        self.record(requester, manifest, true).await?;
        let _ = self.audited.requests().get(&key).is_some_and(goes_on);
        Ok(())
    }

    /// Checks that the policy permits to fetch the tree of `chunk_request` over `link`, and records the request or its refusal: one entry for
    /// all requests within a minute. Bytes are counted by [`PeerRequest::received`].
    ///
    /// # Errors
    /// Denied, if the policy does not permit it; as [`Recorder::record`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn begin_peer_request(
        &self,
        chunk_request: &ChunkRequest<'_>,
        link: &Client,
    ) -> Result<PeerRequest> {
        let checked = self.check_link(chunk_request, link).await;
        let Some(recorder) = self.audited.recorder.get() else { return checked.map(|_| PeerRequest::default()) };
        let (peer, manifest) = (link.peer(), chunk_request.saved.value.manifest);
        let key = (PeerRole::Provider(peer.clone()), manifest);
        let going_on = self.audited.requests().get(&key).filter(|request| request.moved(0)).cloned();
        if let (Ok(_), Some(request)) = (&checked, going_on) {
            return Ok(PeerRequest { request: Some(request), late: 0 });
        }
        let (verdict, rule) = match &checked {
            Ok(rule) => (Verdict::Allow, rule.clone()),
            Err(error) if error.kind() == ErrorKind::Denied => (Verdict::Deny, error.to_string()),
            Err(_) => return checked.map(|_| PeerRequest::default()),
        };
        let decision = Decision {
            actor: Actor::Agent(self.identity.clone()),
            action: Action::Fetch,
            name: Some(chunk_request.saved.name.to_string()),
            manifest: Some(manifest.to_string()),
            repository: Some(chunk_request.repository.id().to_string()),
            to: Some(self.identity.site().to_owned()),
            asked: Some(peer.to_string()),
            verdict,
            rule,
        };
        let request = recorder.record(decision, Repeats::Merged).await?;
        checked?;
        self.audited.remember(key.0, manifest, request.clone());
        Ok(PeerRequest { request: Some(request), late: 0 })
    }

    /// Records bytes that arrived after the entry had ended, a minute without any, under a new entry.
    ///
    /// # Errors
    /// As [`Exchange::begin_peer_request`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn end_peer_request(
        &self,
        asked: PeerRequest,
        chunk_request: &ChunkRequest<'_>,
        link: &Client,
    ) -> Result<()> {
        if asked.late > 0
            && let Some(request) = self.begin_peer_request(chunk_request, link).await?.request
        {
            let _ = request.moved(asked.late);
        }
        Ok(())
    }

    fn decision(&self, requester: Requester<'_>, manifest: &ManifestId, granted: bool) -> Decision {
        let known = self.catalog.names_of(manifest);
        let rule_of = |repository: &RepositoryId, name: &Name| match requester {
            Requester::Agent(agent) => self.allow.rule(&self.catalog.agent_in(*repository, agent)?, name),
            Requester::Process(_) => Some(LOCAL.to_owned()),
        };
        // The name by which it may be read; else any name, which only this log shows.
        let ruled = known.iter().find_map(|(repository, name)| Some((repository, name, rule_of(repository, name)?)));
        let to = match requester {
            Requester::Agent(agent) => agent,
            Requester::Process(_) => &self.identity,
        };
        let rule = match &ruled {
            Some((_, _, rule)) if granted => rule.clone(),
            None if granted => "granted before".to_owned(),
            Some((_, name, _)) => {
                let refused = match requester {
                    Requester::Agent(agent) => {
                        let endpoints = Endpoints { from: &self.identity, to: agent, caller: None };
                        self.catalog.refusal(endpoints, name, manifest)
                    }
                    Requester::Process(_) => None,
                };
                refused.unwrap_or_else(|| "its name was not there when it was asked for".to_owned())
            }
            None if known.is_empty() => "no name has the requested manifest".to_owned(),
            None => "no [[allow]] lets the agent read the name".to_owned(),
        };
        let named = ruled.map(|(repository, name, _)| (repository, name));
        let named = named.or_else(|| known.first().map(|(repository, name)| (repository, name)));
        Decision {
            actor: requester.actor(),
            action: Action::Serve,
            name: named.map(|(_, name)| name.to_string()),
            // The requester can invent unknown manifests: these requests share one entry.
            manifest: (!known.is_empty() || granted).then(|| manifest.to_string()),
            repository: named.map(|(repository, _)| repository.to_string()),
            to: Some(to.site().to_owned()),
            asked: None,
            verdict: if granted { Verdict::Allow } else { Verdict::Deny },
            rule,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_asks_for_very_many_trees_has_few_entries_and_others_have_theirs() {
        let audited = Audited::default();
        let agent = |name: &str| Identity::new("home", name).unwrap();
        let of = |agent: &Identity, tree: u32, verdict| Decision {
            actor: Actor::Agent(agent.clone()),
            action: Action::Serve,
            name: Some(format!("run/step-{tree}")),
            manifest: Some(ManifestId::of(&tree.to_le_bytes()).to_string()),
            repository: None,
            to: None,
            asked: None,
            verdict,
            rule: "[[allow]] 1".to_owned(),
        };
        let (many, other, now) = (agent("many"), agent("other"), Timestamp(0));
        let served = |who: &Identity, tree, ended, now| {
            audited.limited(of(who, tree, Verdict::Allow), who, ended, now).map(|decision| decision.name.is_some())
        };
        // The trees that were asked for first are served, also when they are asked for again; further ones are not.
        for _ in 0..2 {
            let come = (0..5000).filter(|&tree| served(&many, tree, None, now).is_ok()).collect::<Vec<_>>();
            assert_eq!(come, (0..SERVED_TREES).collect::<Vec<_>>());
        }
        assert_eq!(served(&many, SERVED_TREES, None, now).unwrap_err().kind(), ErrorKind::Exhausted);
        // An entry that has ended needs another one.
        assert_eq!(served(&many, 0, Some(1), now).unwrap_err().kind(), ErrorKind::Exhausted);
        assert!(served(&other, 7000, None, now).unwrap());
        assert!(served(&many, 7000, None, Timestamp(60_000_000_000)).unwrap());
        // Refusals are recorded all the same, without what was asked for: as one.
        let refused = |tree| audited.limited(of(&many, tree, Verdict::Deny), &many, None, now).unwrap();
        let named = (0..5000).filter(|&tree| refused(tree).manifest.is_some()).count();
        assert_eq!(named, DENIED_NAMES as usize);
        assert_eq!(refused(4000), refused(4001));
    }
}
