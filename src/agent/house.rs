//! What an agent holds open: its repositories, its cache, and what it is doing.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::config::Config;
use super::files::Opened;
use super::transfers::Transfers;
use super::view;
use crate::budget::Budget;
use crate::cache::{Cache, CacheOptions};
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{MEMORY_MIN, MIB};
use crate::ops::blocking;
use crate::repository::{OpenOptions, Repository};
use crate::storage::{self, Location};

/// All that the doors have to do with.
#[derive(Debug)]
pub(super) struct House {
    repositories: Vec<Repository>,
    cache: Option<Arc<Cache>>,
    pub(super) transfers: Transfers,
    /// What parts of files are held in on their way to readers, apart from what they are fetched with: a reader that is slow
    /// must not keep a fetch from going on.
    pub(super) windows: Budget,
    /// Trees that were read from last.
    pub(super) opened: Opened,
    /// Bytes of files handed out.
    pub(super) handed_out: AtomicU64,
    clock: Arc<dyn Clock>,
    pub(super) started: Timestamp,
}

impl House {
    /// Opens all that `config` names.
    ///
    /// # Errors
    /// Not found, for a repository that is not there; conflict, for a cache that another process has; usage, for too little
    /// memory; else the store's and the file system's.
    pub(super) async fn open(config: &Config) -> Result<Self> {
        let sharers = config.repositories.len() as u64 + 1;
        let memory = config.memory.unwrap_or_else(|| Budget::default_bytes().max(MEMORY_MIN * sharers));
        if memory / sharers < MEMORY_MIN {
            return Err(Error::usage("memory of the agent is too little")
                .expected(format!("at least {} MiB, for {} repositories", MEMORY_MIN * sharers / MIB, sharers - 1))
                .got(format!("{} MiB", memory / MIB))
                .cure("raise `memory`"));
        }
        let cache = match config.cache.clone() {
            None => None,
            Some(told) => {
                let options = CacheOptions { free_floor: told.free_floor, ..CacheOptions::new(told.capacity) };
                Some(Arc::new(blocking(move || Cache::open(&told.dir, options)).await?))
            }
        };
        let mut repositories = Vec::new();
        for location in &config.repositories {
            let options = OpenOptions { memory: Some(memory / sharers), ..OpenOptions::default() };
            repositories.push(open(location, &config.store, options).await?);
        }
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        Ok(Self {
            repositories,
            cache,
            transfers: Transfers::new(Arc::clone(&clock)),
            windows: Budget::new(memory / sharers)?,
            opened: Opened::default(),
            handed_out: AtomicU64::new(0),
            started: clock.now(),
            clock,
        })
    }

    /// The repository that was named, or the usual one.
    ///
    /// # Errors
    /// Not found, if the agent does not have it.
    pub(super) fn repository(&self, named: Option<&str>) -> Result<&Repository> {
        let wanted: Option<Location> = named.map(str::parse).transpose()?;
        let fits = |repository: &&Repository| wanted.as_ref().is_none_or(|at| at == repository.store().location());
        self.repositories.iter().find(fits).ok_or_else(|| {
            let known: Vec<_> = self.repositories().collect();
            Error::not_found("this agent does not have the repository")
                .expected(known.join(", "))
                .got(named.unwrap_or_default())
                .cure("add it to `repositories` in the agent's settings")
        })
    }

    /// Where its repositories are, the usual one first.
    pub(super) fn repositories(&self) -> impl Iterator<Item = String> {
        self.repositories.iter().map(|repository| repository.store().location().to_string())
    }

    /// Its repositories, the usual one first.
    pub(super) fn stores(&self) -> &[Repository] {
        &self.repositories
    }

    /// The cache.
    ///
    /// # Errors
    /// Not found, if the agent has none.
    pub(super) fn cache(&self) -> Result<Arc<Cache>> {
        self.cache.clone().ok_or_else(|| {
            Error::not_found("this agent has no cache").cure("give it one: [cache] dir and capacity in its settings")
        })
    }

    /// Whether what it was told to have ready is there, and it is not ending.
    pub(super) fn is_ready(&self) -> bool {
        !self.transfers.is_closed()
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(super) fn health(&self) -> view::Health {
        view::Health {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started: self.started.to_string(),
            ready: self.is_ready(),
            leaving: self.transfers.is_closed(),
            repositories: self.repositories().collect(),
        }
    }
}

async fn open(location: &Location, options: &storage::StoreOptions, how: OpenOptions) -> Result<Repository> {
    let opened = async { Repository::open(storage::open(location, options).await?, how).await };
    opened.await.map_err(|error: Error| match error.kind() {
        ErrorKind::NotFound => Error::not_found("there is no repository")
            .at(location)
            .cure(format!("towline init {location}"))
            .source(error),
        _ => error,
    })
}
