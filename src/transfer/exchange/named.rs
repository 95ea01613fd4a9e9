//! Lookups of names for other agents. Rights are decided before a name is looked up, and all callers share the reads of
//! the log.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Exchange;
use super::permits::{Endpoints, Permits};
use crate::error::{Error, Result};
use crate::id::RepositoryId;
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
        let unknown = || Error::not_found("repository is not served to other agents").at(repository.id());
        let served = self.catalog.served_as(repository).ok_or_else(unknown)?;
        let asked = Instant::now();
        let known = served.state(asked.checked_sub(FRESH), true).await?;
        // Whatever the path: content that may go to the site over a private link only is there for its agents.
        let endpoints = Endpoints { from: &self.identity, to: agent, caller: None };
        let may_in = |state: &State, permits: &Permits, name: &Name| {
            let tree = state.refs.get(name).map(|value| value.manifest);
            let named = permits.agent(agent);
            named.is_some_and(|named| self.allow.allows(&named, name))
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

    /// Names of `repository`, and what the policy says of them, as of `since` or newer. Reads that are not there yet are shared, and
    /// begin at most once a second; the first may `hurry`.
    ///
    /// # Errors
    /// Not found, for a repository that is not served; else as [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads, and shared reads continue.
    pub async fn name_view(&self, repository: &Repository, since: Option<Instant>, hurry: bool) -> Result<NameView> {
        let unknown = || Error::not_found("repository is not served to other agents").at(repository.id());
        let served = self.catalog.served_as(repository).ok_or_else(unknown)?;
        let state = served.state(since, hurry).await?;
        let permits = served.permits(&state).await;
        Ok(NameView { state, permits, own: self.identity.clone(), repository: repository.id() })
    }
}

/// Names of a repository, and what the policy says of them, at one moment.
#[derive(Debug)]
pub struct NameView {
    state: Arc<State>,
    permits: Arc<Permits>,
    own: Identity,
    repository: RepositoryId,
}

impl NameView {
    /// Name that `selector` chooses among those that are `allowed`.
    ///
    /// # Errors
    /// Not found, for a name or run that does not exist, or is not allowed.
    pub fn choose(&self, selector: &Selector, allowed: impl Fn(&Name) -> bool) -> Result<Name> {
        choose_readable(selector, &self.state, allowed, self.repository)
    }

    /// True if the policy lets the content of `name` go to `agent`.
    #[must_use]
    pub fn permits(&self, agent: &Identity, name: &Name) -> bool {
        let endpoints = Endpoints { from: &self.own, to: agent, caller: None };
        let tree = self.state.refs.get(name).map(|value| value.manifest);
        tree.is_some_and(|tree| self.permits.permits(endpoints, Route::Node, name, &tree))
    }
}
