//! Opening a cache, recovery after a crash, and writing its journal.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::allocator::UNIT;
use super::identity::{self, Identity};
use super::journal::{self, Journal};
use super::medium::{Disk, Medium};
use super::pins::{self, PinRequest};
use super::slabs::Slabs;
use super::state::State;
use super::{Cache, CacheOptions, Counters, Writing, tenants};
use crate::error::{Error, Result};
use crate::id::PinId;
use crate::limits::{GIB, MIB};
use crate::size::show;

/// Approximate number of slabs of a cache: few enough to keep open, many enough to free disk space in small steps.
const SLABS_ABOUT: u64 = 128;
/// Minimum records of a journal that is rewritten for being twice as long as needed.
const RECORDS_MIN: u64 = if cfg!(test) { 32 } else { 64 << 10 };
/// Time after which a journal that could not be written is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Share of the capacity (one in this many) that may stay unused for lack of a whole slab without a warning.
const ROUNDED_PART: u64 = 8;

impl Cache {
    /// Opens the cache in `dir`; creates it if needed. After a crash or damage, unreliable content is dropped and counted in
    /// [`super::CacheStat::damaged`]. Opening takes about 0.2 s per million chunks.
    ///
    /// # Errors
    /// Conflict, if another process has it open; denied, if others may have planted its folder of pins; usage, if the capacity is less
    /// than one slab; unsupported, if a later version wrote it; errors of the file system.
    pub fn open(dir: &Path, options: CacheOptions) -> Result<Self> {
        Self::open_locked(identity::lock(dir)?, Arc::new(Disk::open(dir)?), dir, options)
    }

    /// As [`Cache::open`], on any medium.
    #[cfg(test)]
    pub(super) fn open_on(medium: Arc<dyn Medium>, dir: &Path, options: CacheOptions) -> Result<Self> {
        Self::open_locked(identity::lock(dir)?, medium, dir, options)
    }

    fn open_locked(lock: File, medium: Arc<dyn Medium>, dir: &Path, options: CacheOptions) -> Result<Self> {
        let identity = identify(&*medium, dir, &options)?;
        let slab_units = u32::try_from(identity.slab_len / UNIT).unwrap_or(u32::MAX);
        // Units are numbered with 32 bits, which is enough for 16 TiB.
        let most = options.capacity.min(u64::from(u32::MAX) * UNIT);
        let slabs_max = usize::try_from(most / identity.slab_len).unwrap_or(usize::MAX);
        let rounded = options.capacity % identity.slab_len;
        if rounded > options.capacity / ROUNDED_PART {
            let (capacity, slab) = (show(options.capacity), show(identity.slab_len));
            let used = show(options.capacity - rounded);
            tracing::warn!("cache {} uses {used} of its capacity of {capacity}: its slabs are {slab}", dir.display());
        }
        let (slabs, present) = Slabs::open(&*medium, dir, identity.slab_len)
            .map_err(|error| Error::io("cannot open the cache's slabs", dir, error))?;
        let mut state = State::new(slab_units, seed(&identity));
        state.quotas = tenants::load(&*medium, dir, &options.quotas)?;
        let (mut journal, mut first) = (None, true);
        if medium.names(dir).is_ok_and(|names| names.iter().any(|(name, _)| name == "journal")) {
            journal = journal::replay(&*medium, dir, &identity.id, |records, all| {
                if std::mem::take(&mut first) {
                    state.queue.reserve(usize::try_from(all).unwrap_or(0));
                }
                state.replay_all(records)
            });
            if journal.is_none() {
                tracing::warn!("journal of the cache {} is torn: {} chunks are left", dir.display(), state.queue.len());
            }
        }
        if state.has_unknown_tenants {
            tracing::warn!(
                "some chunks of the cache {} count for no tenant: its file `tenants` is gone",
                dir.display()
            );
            journal = None;
        }
        let lost = state.keep_slabs(&present);
        if lost > 0 {
            tracing::warn!("{lost} chunks of the cache {} are gone with their slabs", dir.display());
            journal = None;
        }
        load_pins(&*medium, dir, &mut state)?;
        let cache = Self {
            dir: dir.to_owned(),
            identity,
            medium,
            slabs,
            slabs_max,
            free_floor: options.free_floor,
            tenant_quotas: options.quotas,
            tenant_work: Mutex::new(()),
            clock: options.clock,
            state: Mutex::new(state),
            writing: Mutex::new(Writing { journal, failed: None }),
            slab_work: Mutex::new(()),
            pin_work: Mutex::new(()),
            limit_work: Mutex::new(()),
            limit_turns: Arc::new(Semaphore::new(1)),
            unwatched: AtomicU64::new(0),
            counters: Counters { damaged: AtomicU64::new(lost), ..Counters::default() },
            lock,
        };
        cache.flush();
        cache.trim();
        Ok(cache)
    }

    /// Appends all pending changes to the journal, in order; rewrites it when it is too long, or could not be written. False if it
    /// could not be written: then no extent may be overwritten, as the journal on the disk may still name it.
    pub(super) fn flush(&self) -> bool {
        self.flush_after(RETRY_AFTER)
    }

    /// As [`Cache::flush`]; a journal that could not be written is tried again if that is `retry_after` ago.
    fn flush_after(&self, retry_after: Duration) -> bool {
        let mut writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let Writing { journal, failed } = &mut *writing;
        let is_due = failed.is_none_or(|failed| failed.elapsed() >= retry_after);
        let (pending, whole) = {
            let mut state = self.state();
            let most = RECORDS_MIN + 2 * (state.queue.len() + state.quotas.len());
            let is_long = journal.as_ref().is_none_or(|journal| journal.records() > most);
            (std::mem::take(&mut state.pending), (is_long && is_due).then(|| state.snapshot()))
        };
        let mut failure = None;
        if let Some(records) = whole {
            match Journal::rewrite(&*self.medium, &self.dir, &self.identity.id, &records) {
                Ok(fresh) => {
                    (*journal, *failed) = (Some(fresh), None);
                    return true;
                }
                // A journal that is only too long is continued.
                Err(error) => failure = Some(error),
            }
        }
        if let Some(Err(error)) = journal.as_mut().map(|journal| journal.append(&pending)) {
            (*journal, failure) = (None, Some(error));
        }
        if let Some(error) = failure {
            if failed.is_none() {
                tracing::warn!("journal of the cache {} cannot be written: {error}", self.dir.display());
            }
            *failed = Some(Instant::now());
        }
        journal.is_some()
    }

    /// Syncs the cache: chunks inserted before then survive a power loss.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn sync(&self) -> Result<()> {
        self.flush_after(Duration::ZERO);
        let synced = self.slabs.sync().and_then(|()| match &self.writing().journal {
            Some(journal) => journal.sync(),
            None => Err(std::io::ErrorKind::StorageFull.into()),
        });
        synced.map_err(|error| Error::io("cannot sync the cache", &self.dir, error))
    }
}

/// Existing identity, or that of a new, empty cache.
fn identify(medium: &dyn Medium, dir: &Path, options: &CacheOptions) -> Result<Identity> {
    let found = Identity::read(medium, dir)?.filter(|found| is_slab_len(found.slab_len));
    let slab_len = match &found {
        Some(found) => found.slab_len,
        None => options
            .slab_len
            .unwrap_or_else(|| (options.capacity / SLABS_ABOUT).next_power_of_two().clamp(32 * MIB, 16 * GIB)),
    };
    if !is_slab_len(slab_len) || slab_len > options.capacity {
        return Err(Error::usage("capacity of the cache is too small")
            .at(dir.display())
            .expected(format!("at least {} MiB, which is one slab", slab_len.div_ceil(MIB)))
            .got(format!("{} MiB", options.capacity / MIB)));
    }
    if let Some(found) = found {
        return Ok(found);
    }
    // Removes slabs of an earlier cache, which cannot be verified without its lost secret.
    let io = |error| Error::io("cannot create a cache", dir, error);
    for (name, _) in medium.names(dir).map_err(io)? {
        if name == "journal" || name.strip_prefix("slab-").is_some_and(|number| number.parse::<u32>().is_ok()) {
            medium.remove(&dir.join(name)).map_err(io)?;
        }
    }
    let fresh = Identity::fresh(slab_len);
    fresh.write(medium, dir)?;
    // Syncs the name of the folder itself, because pins must survive a power loss.
    medium.sync_folder(&dir.join("..")).map_err(io)?;
    Ok(fresh)
}

fn is_slab_len(len: u64) -> bool {
    len >= UNIT && len.is_multiple_of(UNIT) && len <= 16 * GIB
}

/// Secret number of this cache, as a seed for its hash table.
fn seed(identity: &Identity) -> u64 {
    let derived = blake3::keyed_hash(&identity.secret, b"table");
    derived.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Reads every pin; a damaged one is removed, because its chunks are unknown.
fn load_pins(medium: &dyn Medium, dir: &Path, state: &mut State) -> Result<()> {
    let folder = pins::folder(dir);
    let io = |error| Error::io("cannot read the cache's pins", &folder, error);
    for (name, len) in medium.names(&folder).map_err(io)? {
        let path = folder.join(&name);
        let Ok(id) = name.parse::<PinId>() else {
            if name.strip_suffix(".new").is_some_and(|name| name.parse::<PinId>().is_ok()) {
                // An incomplete pin, which was never confirmed.
                medium.remove(&path).map_err(io)?;
            }
            continue;
        };
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        medium.open(&path, false).and_then(|file| file.read_at(&mut bytes, 0)).map_err(io)?;
        match PinRequest::decode(&bytes) {
            Ok((request, created)) => state.pin(request.promise(id, created), &mut request.weights()),
            Err(error) => {
                tracing::warn!("pin {} is damaged and ends: {error:?}", path.display());
                medium.remove(&path).map_err(io)?;
            }
        }
    }
    Ok(())
}
