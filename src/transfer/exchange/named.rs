//! Names that other agents ask for. Rights are decided before a name is looked up, and all callers share the reads of the log.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::Exchange;
use crate::error::{Error, Result};
use crate::repository::log::{RefValue, State};
use crate::repository::{Name, Repository, Selector, no_such_name};
use crate::transfer::identity::Identity;

/// Age of a state in which a plain name may still be looked up.
const FRESH: Duration = Duration::from_secs(1);

impl Exchange {
    /// The name that `selector` stands for among the names of `repository` that `agent` may read. A name that it may not read is
    /// absent for it: the same error and the same reads. Concurrent callers share reads of the log, which are at least 20 ms apart;
    /// an agent that asks for many absent names in a second waits up to a second for the next read.
    ///
    /// # Errors
    /// Not found, for a name, run or repository that is not there, or that `agent` may not read; else as [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads, and a read that others wait for goes on.
    pub async fn resolve(&self, agent: &Identity, repository: &Repository, selector: &Selector) -> Result<Name> {
        let may = |name: &Name| self.policy.allows(agent, name);
        let unknown = || Error::not_found("repository is not served to other agents").at(repository.id());
        let served = self.catalog.served_as(repository).ok_or_else(unknown)?;
        let asked = Instant::now();
        let known = served.state(asked.checked_sub(FRESH), true).await?;
        let readable = match selector {
            Selector::Name(name) if known.refs.contains_key(name) && may(name) => return Ok(name.clone()),
            Selector::Name(_) => false,
            // A choice changes with every save: it is made in a newer state.
            Selector::Step { .. } => choose(selector, &known, may, repository).is_ok(),
        };
        let hurry = readable || served.rights.may_hurry(Some(agent), &known, may);
        let state = served.state(Some(asked), hurry).await?;
        choose(selector, &state, may, repository)
    }
}

/// The name that `selector` stands for among the names of `state` that `may` be read.
fn choose(selector: &Selector, state: &State, may: impl Fn(&Name) -> bool, repository: &Repository) -> Result<Name> {
    let own = state.refs.iter().filter(|(name, _)| may(name));
    let refs: BTreeMap<Name, RefValue> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
    let readable = State { refs, ..State::default() };
    let name = selector.resolve(&readable)?;
    if readable.refs.contains_key(&name) {
        return Ok(name);
    }
    Err(no_such_name(&readable.refs, &name, format!("repository {}", repository.id())))
}
