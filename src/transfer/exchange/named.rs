//! Lookups of names for other agents. Rights are decided before a name is looked up, and all callers share the reads of
//! the log.

use std::time::Duration;

use tokio::time::Instant;

use super::Exchange;
use super::permits::{Endpoints, Permits};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::policy::Route;
use crate::repository::log::State;
use crate::repository::{Repository, choose_readable};
use crate::selector::Selector;

/// Maximum age of the state for the lookup of a plain name.
const FRESH: Duration = Duration::from_secs(1);

impl Exchange {
    /// Resolves `selector` among the names of `repository` that `agent` may read. A name that it may not read is absent
    /// for it: the same error and the same reads. Concurrent callers share reads of the log, which are at least 20 ms
    /// apart; an agent that asks for many absent names in a second waits up to a second for the next read.
    ///
    /// # Errors
    /// Not found, for a name, run or repository that does not exist, or that `agent` may not read; else as
    /// [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads, and shared reads continue.
    pub async fn resolve(&self, agent: &Identity, repository: &Repository, selector: &Selector) -> Result<Name> {
        let allowed = |named: Option<&Identity>, name: &Name| named.is_some_and(|named| self.allow.allows(named, name));
        self.resolve_allowed(agent, repository, selector, allowed).await
    }

    /// As [`Exchange::resolve`], with other rules than `[[allow]]`: `allowed` gets the agent that `agent` is by the policy, and a name.
    /// The policy must agree as well.
    ///
    /// # Errors
    /// As [`Exchange::resolve`].
    ///
    /// # Cancel safety
    /// As [`Exchange::resolve`].
    pub async fn resolve_allowed(
        &self,
        agent: &Identity,
        repository: &Repository,
        selector: &Selector,
        allowed: impl Fn(Option<&Identity>, &Name) -> bool,
    ) -> Result<Name> {
        let unknown = || Error::not_found("repository is not served to other agents").at(repository.id());
        let served = self.catalog.served_as(repository).ok_or_else(unknown)?;
        let asked = Instant::now();
        let known = served.state(asked.checked_sub(FRESH), true).await?;
        // Whatever the path: content that may go to the site over a private link only is there for its agents.
        let endpoints = Endpoints { from: &self.identity, to: agent, caller: None };
        let may_in = |state: &State, permits: &Permits, name: &Name| {
            let tree = state.refs.get(name).map(|value| value.manifest);
            allowed(permits.agent(agent).as_deref(), name)
                && tree.is_none_or(|tree| permits.permits(endpoints, Route::Node, name, &tree))
        };
        let permits = served.permits(&known).await;
        let may = |name: &Name| may_in(&known, &permits, name);
        let readable = match selector {
            Selector::Name(name) if known.refs.contains_key(name) && may(name) => return Ok(name.clone()),
            Selector::Name(_) => false,
            // The choice changes with every save, so it needs a newer state.
            Selector::Step { .. } => choose_readable(selector, &known, may, repository.id()).is_ok(),
        };
        let hurry = readable || served.rights(false).may_hurry(Some(agent), &known, may);
        let state = served.state(Some(asked), hurry).await?;
        let permits = served.permits(&state).await;
        choose_readable(selector, &state, |name| may_in(&state, &permits, name), repository.id())
    }
}
