//! Parts of an agent, opened as its settings say: repositories, cache, links to other agents.

use std::path::Path;
use std::sync::Arc;

use crate::agent::advisor::{Advisor, SitesPaths};
use crate::agent::commitments::Commitments;
use crate::agent::config::{CacheConfig, Config};
use crate::agent::handoff::HandoffStore;
use crate::agent::restart::once_released;
use crate::agent::tokens::Tokens;
use crate::budget::Budget;
use crate::cache::{Cache, CacheOptions};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::limits::{MEMORY_MIN, MIB};
use crate::repository::{Guard, OpenOptions, Repository};
use crate::size;
use crate::transfer::GOOD_WINDOW;
use crate::transfer::exchange::{Exchange, ExchangeOptions, Limits, NAMED_PATIENCE};
use crate::transfer::identity::Credentials;
use crate::transfer::peers::{Peers, PeersOptions};
use crate::transfer::policy::Policies;
use crate::transfer::protocol::limits::WINDOW_MIN;
use crate::work::blocking;

/// Assumed number of discovered peers when memory is divided among links.
const DISCOVERED_GUESS: usize = 8;
/// Divisor of the exchange's memory: one such part is for frames that are read ahead for peers.
const READ_AHEAD_DIVISOR: u64 = 4;

/// Repositories of `config`, each with `share` bytes of memory.
pub(super) async fn repositories(config: &Config, share: u64, policies: &Arc<Policies>) -> Result<Vec<Repository>> {
    let mut opened = Vec::new();
    for location in &config.repositories {
        let guard: Arc<dyn Guard> = Arc::<Policies>::clone(policies);
        let options = OpenOptions { memory: Some(share), guard: Some(guard), ..OpenOptions::default() };
        opened.push(Repository::at(location, &config.store, options).await?);
    }
    Ok(opened)
}

/// Advisors of `repositories`.
pub(super) async fn advisors(
    paths: &SitesPaths,
    repositories: &[Repository],
    credentials: Option<&Credentials>,
    policies: &Arc<Policies>,
) -> Result<Vec<Advisor>> {
    let (paths, policies, credentials) = (paths.clone(), Arc::clone(policies), credentials.cloned());
    let repositories = repositories.to_vec();
    blocking(move || {
        let advisor = |repository: Repository| {
            let credentials = credentials.clone();
            let authority = move || Ok(credentials.as_ref().map(Credentials::trusted));
            Advisor::new(repository, paths.clone(), Arc::clone(&policies), Box::new(authority))
        };
        repositories.into_iter().map(advisor).collect()
    })
    .await
}

/// Warns if the disk of `dir` is smaller than the configured `capacity`: the free disk space is the limit then.
fn warn_of_capacity(setting: &str, dir: &Path, capacity: u64) {
    let Ok(disk) = rustix::fs::statvfs(dir) else { return };
    if let Some(warning) = too_large(setting, capacity, disk.f_blocks.saturating_mul(disk.f_frsize)) {
        tracing::warn!(dir = %dir.display(), "{warning}");
    }
}

/// Warning for a `capacity` above the size of the disk, in bytes.
fn too_large(setting: &str, capacity: u64, disk: u64) -> Option<String> {
    let (wanted, has) = (size::show(capacity), size::show(disk));
    (capacity > disk)
        .then(|| format!("{setting} is {wanted}, but the disk has {has}: the free disk space is the limit"))
}

/// Memory share of each consumer that must not wait for another: the repositories, the exchange, the links, and files being
/// sent.
pub(super) fn share(config: &Config) -> Result<u64> {
    let sharers =
        config.repositories.len() + 1 + usize::from(config.cache.is_some()) + usize::from(config.identity.is_some());
    let sharers = sharers as u64;
    let memory = config.memory.unwrap_or_else(|| Budget::default_bytes().max(MEMORY_MIN * sharers));
    if memory / sharers >= MEMORY_MIN {
        return Ok(memory / sharers);
    }
    Err(Error::usage("memory of the agent is too small")
        .expected(format!("at least {} MiB, for {sharers} shares", MEMORY_MIN * sharers / MIB))
        .got(format!("{} MiB", memory / MIB))
        .help("raise `memory`"))
}

/// Number of connections to each of `others`, and the largest window of each, that fit into `share` bytes. The windows of all
/// must fit at the same time, or some would wait for ever, plus those of one peer that switches to another transport. Memory
/// that is short reduces the number of connections, not the windows.
fn links(share: u64, others: usize, fixed: Option<usize>) -> Result<(usize, u64)> {
    let usual = PeersOptions::default();
    let others = others.max(1);
    let fit = usize::try_from(share / GOOD_WINDOW).unwrap_or(usize::MAX) / others;
    let connections = fixed.unwrap_or(fit.clamp(1, usual.connections));
    let all = (others * connections) as u64;
    // Rounded to whole MiB: the budget counts in pages, and the last window must fit, too.
    let window = (share / (all + connections as u64) / MIB * MIB).clamp(WINDOW_MIN, usual.window);
    if all * window <= share {
        return Ok((connections, window));
    }
    Err(Error::usage("memory of the agent is too small for its links")
        .expected(format!("a share of {} MiB, for {all} connections", all * window / MIB))
        .got(format!("{} MiB", share / MIB))
        .help("raise `memory`, or reduce [peers] addresses or connections"))
}

pub(super) async fn tokens(config: &Config, clock: &Arc<dyn Clock>) -> Result<Option<Arc<Tokens>>> {
    let Some(file) = config.tokens.clone() else { return Ok(None) };
    let open = || {
        let (file, clock) = (file.clone(), Arc::clone(clock));
        blocking(move || Tokens::open(&file, clock))
    };
    Ok(Some(Arc::new(once_released("the file of tokens", open).await?)))
}

/// Opens the commitments of the cache, if there is one.
pub(super) async fn open_commitments(
    cache: Option<&Arc<Cache>>,
    origins: &[Repository],
    clock: &Arc<dyn Clock>,
) -> Result<Option<Arc<Commitments>>> {
    let (Some(cache), Some(repository)) = (cache.cloned(), origins.first()) else { return Ok(None) };
    let (budget, clock) = (repository.budget().clone(), Arc::clone(clock));
    blocking(move || Commitments::open(cache, budget, clock)).await.map(|opened| Some(Arc::new(opened)))
}

/// Opens the cache that `settings` name.
pub(super) async fn open_cache(settings: CacheConfig) -> Result<Arc<Cache>> {
    let CacheConfig { dir, capacity, free_floor, quotas, .. } = settings;
    let options = CacheOptions { free_floor, quotas, ..CacheOptions::new(capacity) };
    let open = || {
        let (folder, options) = (dir.clone(), options.clone());
        blocking(move || Cache::open(&folder, options))
    };
    let cache = once_released("the cache", open).await?;
    warn_of_capacity("[cache] capacity", &dir, capacity);
    Ok(Arc::new(cache))
}

/// The store of checkpoints that others hand off, if it is configured.
pub(super) async fn handoff_store(config: &Config) -> Result<Option<Arc<HandoffStore>>> {
    let Some(settings) = config.handoff.clone() else { return Ok(None) };
    if settings.accept.is_empty() {
        tracing::warn!(
            "[handoff] accepts nothing: settings have no [[handoff.accept]] that says who may hand off what"
        );
    }
    let (dir, capacity) = (settings.dir.clone(), settings.capacity);
    let store = blocking(move || HandoffStore::open(settings)).await?;
    warn_of_capacity("[handoff] capacity", &dir, capacity);
    Ok(Some(Arc::new(store)))
}

pub(super) async fn exchange(
    config: &Config,
    share: u64,
    cache: &Arc<Cache>,
    (credentials, policies): (Option<&Credentials>, Arc<Policies>),
) -> Result<Arc<Exchange>> {
    let settings = &config.peers;
    let (identity, peers) = match credentials {
        None => (Identity::new("local", "agent")?, Peers::nobody()),
        Some(credentials) => {
            let finds = settings.registered || !settings.names.is_empty();
            let others = settings.addresses.len() + if finds { DISCOVERED_GUESS } else { 0 };
            let (connections, window) = links(share, others, settings.connections)?;
            let options = PeersOptions { transports: settings.transports, connections, window, planned: others };
            (credentials.identity(), Peers::new(credentials.clone(), Budget::new(share)?, options))
        }
    };
    settings.addresses.iter().try_for_each(|address| peers.add(address))?;
    let (cache, budget, allow) = (Arc::clone(cache), Budget::new(share)?, config.allow.clone());
    let ahead = budget.carve(share / READ_AHEAD_DIVISOR).await?;
    Ok(Exchange::new(ExchangeOptions {
        identity,
        cache,
        budget,
        ahead,
        peers,
        allow,
        policies,
        limits: Limits::new(settings.limits.iter().cloned()),
        named_patience: NAMED_PATIENCE,
    }))
}

/// Certificate of the agent, if it has one.
///
/// # Errors
/// As [`Credentials::open`].
pub(super) fn credentials(config: &Config, clock: &Arc<dyn Clock>) -> Result<Option<Credentials>> {
    config.identity.as_ref().map(|folder| Credentials::open(folder, Arc::clone(clock))).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_above_the_disk_is_told() {
        assert_eq!(too_large("[cache] capacity", 1 << 30, 1 << 30), None);
        let warning = too_large("[cache] capacity", 3 << 30, 1 << 30).unwrap();
        assert!(warning.starts_with("[cache] capacity is 3.0 GiB, but the disk has 1.0 GiB"), "{warning}");
    }

    #[tokio::test]
    async fn all_links_fit_at_once() {
        for (memory, others) in [(64, 1), (64, 8), (64, 16), (128, 7), (128, 11), (500, 3), (2048, 30)] {
            let share = memory * MIB + 5;
            let (connections, window) = links(share, others, None).unwrap();
            assert!((1..=4).contains(&connections) && window >= WINDOW_MIN);
            let (budget, mut stored) = (Budget::new(share).unwrap(), Vec::new());
            for _ in 0..others * connections {
                let carved = futures::FutureExt::now_or_never(budget.carve(window));
                stored.push(carved.expect("there is room for the last one").unwrap());
            }
        }
        assert_eq!(links(512 * MIB, 1, None).unwrap(), (4, 64 * MIB));
        assert_eq!(links(128 * MIB, 7, None).unwrap(), (2, 8 * MIB));
        assert_eq!(links(128 * MIB, 1, Some(2)).unwrap(), (2, 32 * MIB));
        let error = links(64 * MIB, 17, None).unwrap_err();
        assert_eq!((error.kind(), error.help_text().is_some()), (crate::error::ErrorKind::Usage, true));
    }
}
