//! Finding peers: by configuration, by a DNS name that stands for all of them, and by what agents say in the repository.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::Peers;
use crate::error::Result;
use crate::repository::Repository;
use crate::transfer::identity::Identity;

/// Interval of look-ups of names and reads of registrations.
const EVERY: Duration = Duration::from_secs(20);
/// Interval of an agent's announcements.
const ANNOUNCE_EVERY: Duration = Duration::from_mins(5);
/// A registration that is older is of an agent that is gone.
const AGE_MAX: Duration = Duration::from_mins(15);

/// Sources of peers' addresses.
#[derive(Clone, Debug, Default)]
pub struct Discovery {
    /// `HOST:PORT` of agents that are known for good, whatever else tells of them.
    pub addresses: Vec<String>,
    /// `HOST:PORT` of names that stand for one address each peer, such as a headless service's
    /// (<https://kubernetes.io/docs/concepts/services-networking/service/#headless-services>).
    pub names: Vec<String>,
    /// Repositories in which agents say where they are.
    pub repositories: Vec<Repository>,
    /// Identity that announces `HOST:PORT` in these.
    pub register: Option<(Identity, String)>,
}

/// Keeps `peers` to what is found, until `over`; then takes back what was registered.
///
/// # Cancel safety
/// Safe: then registrations stay until they are old.
pub async fn discover(peers: Arc<Peers>, discovery: Discovery, over: CancellationToken) {
    let mut known = Sources::new();
    keep(&peers, &mut known, "the settings", Ok(discovery.addresses.iter().cloned().collect()));
    let (mut look, mut announce) = (interval(EVERY), interval(ANNOUNCE_EVERY));
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    announce.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = over.cancelled() => break,
            _ = announce.tick() => register(&discovery).await,
            _ = look.tick() => {
                for name in &discovery.names {
                    keep(&peers, &mut known, name, resolve(name).await);
                }
                for repository in &discovery.repositories {
                    let own = discovery.register.as_ref().map(|(_, address)| address.as_str());
                    let there = registered(repository, own).await;
                    keep(&peers, &mut known, &repository.store().location().to_string(), there);
                }
            }
        }
    }
    if let Some((identity, _)) = &discovery.register {
        for repository in &discovery.repositories {
            if let Err(error) = repository.withdraw((identity.site(), identity.agent())).await {
                tracing::info!("registration stays until it is old: {error:?}");
            }
        }
    }
}

async fn register(discovery: &Discovery) {
    let Some((identity, address)) = &discovery.register else { return };
    for repository in &discovery.repositories {
        if let Err(error) = repository.announce((identity.site(), identity.agent()), address).await {
            tracing::warn!("agent cannot be registered: {error:?}");
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

/// Adds who is `there` now, and removes who `by` told of before and nobody tells of any more. What cannot be found out changes
/// nothing.
fn keep(peers: &Peers, known: &mut Sources, by: &str, there: Result<BTreeSet<String>>) {
    let there = match there {
        Ok(there) => there,
        Err(error) => return tracing::warn!("peers cannot be found by {by}: {error:?}"),
    };
    let (gone, new) = changes(known, by, &there);
    for gone in gone {
        tracing::info!("peer {gone} is gone from {by}");
        peers.remove(&gone);
    }
    for new in new {
        if let Err(error) = peers.add(&new) {
            tracing::warn!("peer that {by} tells of is not added: {error:?}");
        }
    }
}

/// Enters who is `there` by `by`; who is gone by that, and who is new.
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
