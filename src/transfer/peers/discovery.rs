//! Discovery of peers: by configuration, by a DNS name with all of their addresses, and by registrations in the
//! repository.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::Peers;
use super::peer::Origin;
use crate::error::Result;
use crate::identity::Identity;
use crate::repository::Repository;

/// Interval of DNS lookups and reads of registrations.
const EVERY: Duration = Duration::from_secs(20);
/// Interval of an agent's announcements.
const ANNOUNCE_EVERY: Duration = Duration::from_mins(5);
/// Age from which a registration counts as that of a stopped agent.
const AGE_MAX: Duration = Duration::from_mins(15);

/// Sources of peers' addresses.
#[derive(Clone, Debug, Default)]
pub struct Discovery {
    /// `HOST:PORT` of configured agents, which are never removed.
    pub addresses: Vec<String>,
    /// `HOST:PORT` of DNS names with one address for each peer, such as a headless service's
    /// (<https://kubernetes.io/docs/concepts/services-networking/service/#headless-services>).
    pub names: Vec<String>,
    /// Repositories in which agents register.
    pub repositories: Vec<Repository>,
    /// Identity to register there, with its `HOST:PORT`.
    pub register: Option<(Identity, String)>,
}

/// Keeps `peers` up to date until `over`; then removes its own registration.
///
/// # Cancel safety
/// Safe: then registrations stay until they are too old.
pub async fn discover(peers: Arc<Peers>, discovery: Discovery, over: CancellationToken) {
    let mut known = Sources::new();
    keep((&peers, Origin::Settings), &mut known, "the settings", Ok(discovery.addresses.iter().cloned().collect()));
    let (mut look, mut announce) = (interval(EVERY), interval(ANNOUNCE_EVERY));
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    announce.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = over.cancelled() => break,
            _ = announce.tick() => register(&discovery).await,
            _ = look.tick() => {
                for name in &discovery.names {
                    keep((&peers, Origin::Settings), &mut known, name, resolve(name).await);
                }
                for repository in &discovery.repositories {
                    let own = discovery.register.as_ref().map(|(_, address)| address.as_str());
                    let there = registered(repository, own).await;
                    let location = repository.store().location().to_string();
                    keep((&peers, Origin::Announced), &mut known, &location, there);
                }
            }
        }
    }
    if let Some((identity, _)) = &discovery.register {
        for repository in &discovery.repositories {
            if let Err(error) = repository.withdraw(identity).await {
                tracing::info!("cannot remove the registration, which expires later: {error:?}");
            }
        }
    }
}

async fn register(discovery: &Discovery) {
    let Some((identity, address)) = &discovery.register else { return };
    for repository in &discovery.repositories {
        if let Err(error) = repository.announce(identity, address).await {
            tracing::warn!("cannot register the agent: {error:?}");
        }
    }
}

async fn resolve(name: &str) -> Result<BTreeSet<String>> {
    let addresses = tokio::net::lookup_host(name)
        .await
        .map_err(|source| crate::Error::unreachable("name of peers cannot be looked up").at(name).source(source))?;
    Ok(addresses.map(|address| address.to_string()).collect())
}

async fn registered(repository: &Repository, own: Option<&str>) -> Result<BTreeSet<String>> {
    let announced = repository.announced(AGE_MAX).await?.into_iter().map(|announced| announced.address);
    Ok(announced.filter(|address| Some(address.as_str()) != own).collect())
}

/// Addresses by source: names, repositories, the settings.
type Sources = BTreeMap<String, BTreeSet<String>>;

/// Adds the agents in `there`, and removes those that only the source `by` listed before. A failed lookup changes
/// nothing.
fn keep((peers, origin): (&Peers, Origin), known: &mut Sources, by: &str, there: Result<BTreeSet<String>>) {
    let there = match there {
        Ok(there) => there,
        Err(error) => return tracing::warn!("peer discovery by {by} failed: {error:?}"),
    };
    let (gone, new) = changes(known, by, &there);
    for gone in gone {
        tracing::info!("peer {gone} is gone from {by}");
        peers.remove(&gone);
    }
    for new in new {
        if let Err(error) = peers.add_of(&new, origin) {
            tracing::warn!("peer found by {by} is not added: {error:?}");
        }
    }
}

/// Records the agents in `there` for the source `by`; returns the removed and the added ones.
fn changes(known: &mut Sources, by: &str, there: &BTreeSet<String>) -> (Vec<String>, Vec<String>) {
    let before = known.insert(by.to_owned(), there.clone()).unwrap_or_default();
    let is_known = |address: &&String| known.values().any(|addresses| addresses.contains(*address));
    let gone = before.difference(there).filter(|address| !is_known(address)).cloned().collect();
    (gone, there.difference(&before).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_told_of_otherwise_stays() {
        let mut known = Sources::new();
        let set = |addresses: &[&str]| addresses.iter().map(|&address| address.to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(changes(&mut known, "settings", &set(&["a:1"])), (vec![], vec!["a:1".to_owned()]));
        let new = changes(&mut known, "name", &set(&["a:1", "b:1"]));
        assert_eq!(new, (vec![], vec!["a:1".to_owned(), "b:1".to_owned()]));
        assert_eq!(changes(&mut known, "name", &set(&[])), (vec!["b:1".to_owned()], vec![]));
        assert_eq!(changes(&mut known, "name", &set(&["b:1"])), (vec![], vec!["b:1".to_owned()]));
    }
}
