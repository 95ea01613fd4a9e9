//! Permits: rulings of a repository's signed policy on content that goes to other agents or comes from them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::Exchange;
use super::get::ChunkRequest;
use crate::error::{Error, Result};
use crate::id::{ManifestId, RepositoryId};
use crate::identity::Identity;
use crate::name::Name;
use crate::policy::{Basis, Labels, LocalCaller, PolicyRules, Question, Route, Ruling, Verdict};
use crate::repository::log::State;
use crate::repository::{Guard as _, Repository};
use crate::transfer::driver::Client;
use crate::transfer::policy::{Policies, PolicyStatus};
use crate::work::blocking;

/// Labels and rules of one state of a repository.
#[derive(Debug)]
pub(super) struct Permits {
    /// Entry of the log that they follow.
    pub(super) seq: u64,
    /// Time of creation: signatures are verified again after a while.
    pub(super) made: Instant,
    labels: HashMap<ManifestId, Arc<Labels>>,
    rules: Option<Arc<PolicyRules>>,
    /// True if the rules are those of a policy whose signature is no longer valid: they bind content without labels.
    lapsed: bool,
    /// True if nothing restricts anybody.
    open: bool,
    /// True if a newer policy was seen before, or the policy can no longer be read or verified: the log or the policy was replaced, so
    /// labels cannot be trusted.
    lost: bool,
}

impl Permits {
    /// Permits of `state`. A policy that cannot be read or verified counts as none: content with labels stays.
    pub(super) async fn of(repository: &Repository, state: &Arc<State>, policies: &Policies) -> Self {
        let checked = policies.check_version(repository.id(), state.policy);
        let outdated = checked.is_err();
        let policy = match checked {
            Ok(()) => repository.policy_of(state).await,
            Err(error) => Err(error),
        };
        let policy = policy.unwrap_or_else(|error| {
            tracing::warn!(repository = %repository.id(), "cannot read the policy: {error:?}");
            None
        });
        let standing = policies.policy_status(repository.id(), policy.as_deref());
        let lost = outdated || matches!(standing, PolicyStatus::Lost);
        let open = state.labels.is_empty() && state.policy.is_none() && !lost;
        let lapsed = matches!(standing, PolicyStatus::Lapsed(_));
        let rules = match standing {
            PolicyStatus::InForce(rules) | PolicyStatus::Lapsed(rules) => Some(rules),
            PolicyStatus::Unknown | PolicyStatus::Lost => None,
        };
        let (of, view) = (Arc::clone(state), repository.clone());
        let labels = match blocking(move || Ok(view.label_view(&of).of_all_trees())).await {
            Ok(labels) => labels,
            // Only a panic. Without labels, nothing may be allowed.
            Err(error) => {
                tracing::error!("labels cannot be computed: {error:?}");
                return Self {
                    seq: state.seq,
                    made: Instant::now(),
                    labels: HashMap::new(),
                    rules,
                    lapsed,
                    open: false,
                    lost: true,
                };
            }
        };
        Self { seq: state.seq, made: Instant::now(), labels, rules, lapsed, open, lost }
    }

    /// True if nothing is restricted: neither labels nor a policy.
    pub(super) fn are_open(&self) -> bool {
        self.open
    }

    /// The tenant that chunks of `tree` count for: the first of its label.
    fn tenant(&self, tree: &ManifestId) -> Option<String> {
        self.labels.get(tree)?.tenants().first().cloned()
    }

    /// True if `repository` lies at another site than that of `own`.
    fn is_elsewhere(&self, repository: &Repository, own: &Identity) -> bool {
        let Some((rules, own)) = self.rules.as_ref().zip(self.agent(own)) else { return false };
        let at = rules.site_of(&repository.store().addresses(), repository.id());
        at.is_some_and(|site| site != own.site())
    }

    /// The agent that `identity` is: a SPIFFE id is one only by the policy.
    pub(super) fn agent<'a>(&'a self, identity: &'a Identity) -> Option<Cow<'a, Identity>> {
        match &self.rules {
            Some(rules) => rules.agent(identity),
            None => (!identity.is_spiffe()).then_some(Cow::Borrowed(identity)),
        }
    }

    /// True if `route` between the two agents is a private link of their sites.
    pub(super) fn is_private(&self, (one, other): (&Identity, &Identity), route: Route) -> bool {
        let Some((one, other)) = self.agent(one).zip(self.agent(other)) else { return false };
        self.rules.as_ref().is_some_and(|rules| rules.is_private_link((one.site(), other.site()), route))
    }

    /// Ruling on `question`, with the labels of `tree`.
    fn rule_on(&self, tree: &ManifestId, question: &Question<'_>) -> Ruling {
        if self.open {
            return Ruling { verdict: Verdict::Allow, basis: Basis::NoRule };
        }
        if self.lost {
            return Ruling::deny(Basis::NoPolicy);
        }
        let labels = self.labels.get(tree).cloned().unwrap_or_default();
        match &self.rules {
            Some(_) if self.lapsed && labels.restrict() => Ruling::deny(Basis::NoPolicy),
            Some(rules) => rules.rule_on(&Question { labels: &labels, ..*question }),
            None if labels.restrict() => Ruling::deny(Basis::NoPolicy),
            None => Ruling { verdict: Verdict::Allow, basis: Basis::NoPolicy },
        }
    }

    /// True if the content of `name` may go from one agent to the other.
    pub(super) fn permits(&self, endpoints: Endpoints<'_>, route: Route, name: &Name, tree: &ManifestId) -> bool {
        self.ruling(endpoints, route, name, tree).allows()
    }

    /// Why content of `name` may not go there, whatever the way; none, if it may.
    pub(super) fn refusal(&self, endpoints: Endpoints<'_>, name: &Name, tree: &ManifestId) -> Option<String> {
        let ruling = self.ruling(endpoints, Route::Unknown, name, tree);
        (!ruling.allows()).then(|| format!("policy: {}", ruling.basis))
    }

    /// The rule by which the content of `name` may come to this agent, if it may. What has no labels needs none.
    fn take(&self, endpoints: Endpoints<'_>, route: Route, name: &Name, tree: &ManifestId) -> Option<String> {
        if self.open {
            return Some("no policy, and no labels".to_owned());
        }
        let ruling = self.ruling(endpoints, route, name, tree);
        let bound = self.labels.get(tree).is_some_and(|labels| labels.restrict());
        match ruling.basis {
            Basis::NoRule if !bound => Some("it has no labels that restrict".to_owned()),
            basis => (ruling.verdict == Verdict::Allow).then(|| basis.to_string()),
        }
    }

    fn ruling(&self, endpoints: Endpoints<'_>, route: Route, name: &Name, tree: &ManifestId) -> Ruling {
        let (labels, from, agent) = (Labels::default(), self.agent(endpoints.from), self.agent(endpoints.to));
        let (from, agent) = (from.as_deref().map(Identity::site), agent.as_deref());
        let question = Question {
            agent,
            caller: endpoints.caller,
            from,
            to: agent.map(Identity::site),
            name,
            labels: &labels,
            route,
        };
        self.rule_on(tree, &question)
    }
}

/// Agents that content would go between, by their certificates.
#[derive(Clone, Copy, Debug)]
pub(super) struct Endpoints<'a> {
    pub(super) from: &'a Identity,
    pub(super) to: &'a Identity,
    /// Local caller on the receiving machine, if that is this one.
    pub(super) caller: Option<&'a LocalCaller>,
}

impl Exchange {
    /// Tenant that the chunks of `request` count for, if tenants have quotas here.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn tenant_of(&self, request: &ChunkRequest<'_>) -> Option<String> {
        if !self.cache.has_quotas() {
            return None;
        }
        let served = self.catalog.served_as(request.repository)?;
        let state = request.repository.log().latest_or_refresh().await.ok()?;
        served.permits(&state).await.tenant(&request.saved.value.manifest)
    }

    /// True if `repository` is a folder on this node's disk, and no mount: the policy does not put it at another site.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn is_here(&self, repository: &Repository) -> bool {
        if repository.store().directory().is_none() {
            return false;
        }
        let Some(served) = self.catalog.served_as(repository) else { return true };
        let Ok(state) = repository.log().latest_or_refresh().await else { return true };
        !served.permits(&state).await.is_elsewhere(repository, &self.identity)
    }

    /// True if `agent` is at the site of this one. Where a SPIFFE id is, the policy of `repository` says, as read last.
    pub(super) fn is_near(&self, repository: RepositoryId, agent: &Identity) -> bool {
        let own = &self.identity;
        if !own.is_spiffe() && !agent.is_spiffe() {
            return agent.site() == own.site();
        }
        let mapped = |identity| self.catalog.agent_in(repository, identity);
        mapped(own).zip(mapped(agent)).is_some_and(|(own, agent)| own.site() == agent.site())
    }

    /// Checks that the policy permits to fetch the tree of `request` over `link`; each side checks by itself. Returns the rule.
    ///
    /// # Errors
    /// Denied, if not.
    pub(super) async fn check_link(&self, request: &ChunkRequest<'_>, link: &Client) -> Result<String> {
        let unserved = || Ok("its repository is not served".to_owned());
        let Some(served) = self.catalog.served_as(request.repository) else { return unserved() };
        let state = request.repository.state_for_policy().await?;
        let permits = served.permits(&state).await;
        let endpoints = Endpoints { from: link.peer(), to: &self.identity, caller: request.repository.caller() };
        let rule = permits.take(endpoints, link.route(), &request.saved.name, &request.saved.value.manifest);
        rule.ok_or_else(|| {
            Error::denied("policy does not let this name come from there").at(&request.saved.name).got(link.peer())
        })
    }
}
