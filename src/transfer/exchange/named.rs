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
use crate::policy::{AllowList, Route};
use crate::repository::log::State;
use crate::repository::{ReadableNames, Repository, choose_readable};
use crate::selector::Selector;
use crate::work::blocking;

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
        let known = self.name_view(repository, asked.checked_sub(FRESH), true).await?;
        // Whatever the path: content that may go to the site over a private link only is there for its agents.
        let may_in = |view: &NameView| {
            let (view, allow, agent) = (view.clone(), self.allow.clone(), agent.clone());
            move |name: &Name| view.is_allowed(&allow, &agent, name)
        };
        let may = may_in(&known);
        let readable = match selector {
            Selector::Name(name) if known.state.refs.contains_key(name) && may(name) => return Ok(name.clone()),
            Selector::Name(_) => false,
            // The choice changes with every save, so it needs a newer state.
            Selector::Step { .. } => chosen(selector, &known, may_in(&known)).await.is_ok(),
        };
        let hurry = readable || served.rights(false).may_hurry(Some(agent), &known.state, may);
        let view = self.name_view(repository, Some(asked), hurry).await?;
        chosen(selector, &view, may_in(&view)).await
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
#[derive(Clone, Debug)]
pub struct NameView {
    state: Arc<State>,
    permits: Arc<Permits>,
    own: Identity,
    repository: RepositoryId,
}

impl NameView {
    /// Names among those that are `allowed`, to choose from.
    pub fn among<M: Fn(&Name) -> bool>(&self, allowed: M) -> ReadableNames<'_, M> {
        ReadableNames::of(&self.state, allowed)
    }

    /// True if `agent` may read `name` by the rules `allow` and the policy, whether it exists or not.
    fn is_allowed(&self, allow: &AllowList, agent: &Identity, name: &Name) -> bool {
        let tree = self.state.refs.get(name).map(|value| value.manifest);
        let endpoints = Endpoints { from: &self.own, to: agent, caller: None };
        let named = self.permits.agent(agent);
        named.is_some_and(|named| allow.allows(&named, name))
            && tree.is_none_or(|tree| self.permits.permits(endpoints, Route::Node, name, &tree))
    }

    /// True if the policy lets the content of `name` go to `agent`.
    #[must_use]
    pub fn permits(&self, agent: &Identity, name: &Name) -> bool {
        let endpoints = Endpoints { from: &self.own, to: agent, caller: None };
        let tree = self.state.refs.get(name).map(|value| value.manifest);
        tree.is_some_and(|tree| self.permits.permits(endpoints, Route::Node, name, &tree))
    }
}

/// Name that `selector` chooses among those of `view` that `may` be read. A run may have many steps: they are not looked at on a thread
/// of the runtime.
async fn chosen(selector: &Selector, view: &NameView, may: impl Fn(&Name) -> bool + Send + 'static) -> Result<Name> {
    let (selector, view) = (selector.clone(), view.clone());
    blocking(move || choose_readable(&selector, &view.state, may, view.repository)).await
}
