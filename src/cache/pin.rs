//! Creating, renewing and ending pins.

use std::sync::{Arc, MutexGuard, PoisonError};

use tokio::sync::OwnedSemaphorePermit;

use super::Cache;
use super::allocator::UNIT;
use super::extent;
use super::identity::replace;
use super::pins::{self, Pin, PinChunk, PinLimit, PinRequest, Pinned};
use super::state::State;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::PinId;
use crate::size;

/// Cure of a pin beyond a limit.
const RAISE: &str = "end other pins (towline pins, towline unpin), or have the limit raised: [caller_pins], or [token_pins] for tokens, in the settings of the agent that caches";

/// Chunks that are looked up while the state is locked.
const LOCKED_MAX: usize = 4096;

/// Index key and space of each chunk, each once.
fn weights(chunks: &[PinChunk]) -> Vec<(u64, u16)> {
    let weight = |chunk: &PinChunk| (chunk.id.prefix(), extent::weight(chunk.stored_len.into()));
    let mut chunks: Vec<_> = chunks.iter().map(weight).collect();
    chunks.sort_unstable();
    chunks.dedup_by_key(|(key, _)| *key);
    chunks
}

impl PinLimit {
    /// Checks that one more pin, of `chunks`, is allowed.
    fn check(&self, cache: &Cache, chunks: &[PinChunk]) -> Result<()> {
        let (pins, listed) = cache.state().ledger.listed_by(&self.owners);
        self.check_count(pins, listed + chunks.len() as u64)?;
        self.check_bytes(cache.units_with(&self.owners, chunks) * UNIT)
    }

    /// Checks that one more than `pins` is allowed, and that all may list `chunks`.
    fn check_count(&self, pins: usize, chunks: u64) -> Result<()> {
        let owner = self.owner();
        if pins >= self.pins {
            return Err(Error::exhausted(format!("{owner} has too many pins"))
                .expected(format!("at most {}", self.pins))
                .help(RAISE));
        }
        if chunks > self.chunks {
            return Err(Error::exhausted(format!("pins of {owner} would list too many chunks"))
                .expected(format!("at most {}", self.chunks))
                .got(chunks)
                .help(RAISE));
        }
        Ok(())
    }

    /// Checks that all pins may hold `bytes`.
    fn check_bytes(&self, bytes: u64) -> Result<()> {
        if bytes > self.bytes {
            return Err(Error::exhausted(format!("pins of {} would keep too much", self.owner()))
                .expected(format!("at most {} ({} bytes)", size::show(self.bytes), self.bytes))
                .got(format!("{bytes} bytes"))
                .help(RAISE));
        }
        Ok(())
    }

    fn owner(&self) -> &str {
        self.owners.trim_end_matches('/')
    }
}

impl Cache {
    /// Pins chunks: present ones from now on, others as soon as they are inserted. When this returns, the pin survives a power
    /// loss; for the chunks themselves see [`Cache::missing`] and [`Cache::sync`].
    ///
    /// # Errors
    /// Usage, if owner or reason are longer than 1024 bytes; errors of the file system. The pin then does not exist.
    pub fn pin(&self, request: PinRequest) -> Result<Pinned> {
        self.pin_within(request, None)
    }

    /// As [`Cache::pin`], with a limit for the pins of some owners.
    ///
    /// # Errors
    /// Exhausted, above the limit; as [`Cache::pin`].
    pub fn pin_within(&self, request: PinRequest, limit: Option<&PinLimit>) -> Result<Pinned> {
        let request = request.normal()?;
        self.expire();
        let (id, now, possible) = (PinId::random(), self.clock.now(), self.possible_units());
        let (promise, mut chunks) = (request.promise(id, now), request.weights());
        {
            // Of two pins that are within the limit only alone, one is refused.
            let _limited = self.limited(limit);
            if let Some(limit) = limit {
                limit.check(self, &request.chunks)?;
            }
            let mut state = self.state();
            state.weigh(&mut chunks);
            let wanted = state.ledger.weight() + state.ledger.added_by(&chunks);
            let most = State::pinnable(possible);
            if wanted > most {
                let allowed = self.slabs_max as u64 * (self.identity.slab_len / UNIT);
                // The cache grows by whole slabs.
                let (slab, disk_full) = (self.identity.slab_len, possible < allowed);
                let lacking = (wanted - most) * UNIT;
                let bytes = if disk_full { lacking.next_multiple_of(slab) } else { lacking };
                return Ok(Pinned::Lacking { bytes, disk_full });
            }
            // Under one lock: of two pins that only fit alone, one is refused.
            state.pin(promise.clone(), &mut chunks);
        }
        let path = pins::path(&self.dir, id);
        if let Err(error) = replace(&*self.medium, &pins::folder(&self.dir), &path, &request.encode(now)) {
            self.state().unpin(id);
            return Err(Error::io("cannot write a pin", &path, error));
        }
        Ok(Pinned::Kept(promise))
    }

    /// Checks that a pin of `chunks` would be within `limit`.
    ///
    /// # Errors
    /// Exhausted, above the limit.
    pub fn check_limit(&self, chunks: &[PinChunk], limit: &PinLimit) -> Result<()> {
        self.expire();
        let _limited = self.limited(Some(limit));
        limit.check(self, chunks)
    }

    /// Waits until no other pin or hold with a limit is checked: that takes time and memory for each chunk that the owners of the limit
    /// keep. Callers on a runtime wait here, so that they take no threads meanwhile.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait holds nothing.
    pub async fn limit_turn(&self, limit: Option<&PinLimit>) -> Option<OwnedSemaphorePermit> {
        limit?;
        // Never closed.
        Arc::clone(&self.limit_turns).acquire_owned().await.ok()
    }

    /// Held while a limit is checked and used.
    pub(super) fn limited(&self, limit: Option<&PinLimit>) -> Option<MutexGuard<'_, ()>> {
        limit.map(|_| self.limit_work.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Units that `chunks` take together with those that owners whose names begin with `owners` pin or hold. The state is locked for
    /// few of them at a time.
    pub(super) fn units_with(&self, owners: &str, chunks: &[PinChunk]) -> u64 {
        let lists = {
            let state = self.state();
            [state.ledger.lists_of(owners), state.holds.lists_of(owners)].concat()
        };
        let mut kept: Vec<u64> = lists.iter().flat_map(|keys| keys.iter().copied()).collect();
        kept.sort_unstable();
        kept.dedup();
        let mut units = 0;
        for keys in kept.chunks(LOCKED_MAX) {
            let state = self.state();
            let weight = |key: &u64| state.ledger.weight_of(*key).or_else(|| state.holds.weight_of(*key)).unwrap_or(0);
            units += keys.iter().map(|key| u64::from(weight(key))).sum::<u64>();
        }
        for chunks in chunks.chunks(LOCKED_MAX) {
            let mut new = weights(chunks);
            new.retain(|(key, _)| kept.binary_search(key).is_err());
            self.state().weigh(&mut new);
            units += new.iter().map(|(_, weight)| u64::from(*weight)).sum::<u64>();
        }
        units
    }

    /// Bytes missing to hold `chunks` besides the pinned ones, if all others are evicted; 0 if there is space. Blocks on the
    /// disk.
    #[must_use]
    pub fn shortage(&self, chunks: &[PinChunk]) -> u64 {
        self.expire();
        let possible = self.possible_units();
        let mut chunks = weights(chunks);
        let state = self.state();
        state.weigh(&mut chunks);
        (state.ledger.weight() + state.ledger.added_by(&chunks)).saturating_sub(possible) * UNIT
    }

    /// Bytes that stay free on the disk.
    #[must_use]
    pub fn free_floor(&self) -> u64 {
        self.free_floor
    }

    /// Ends a pin: chunks without another pin may be evicted from now on. False if there is no such pin.
    ///
    /// # Errors
    /// Errors of the file system; the pin then stays.
    pub fn unpin(&self, id: PinId) -> Result<bool> {
        let _work = self.pin_work.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state().ledger.keys(id).is_none() {
            return Ok(false);
        }
        let path = pins::path(&self.dir, id);
        match self.medium.remove(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("cannot remove a pin", &path, error));
            }
            _ => {}
        }
        let synced = self.medium.sync_folder(&pins::folder(&self.dir));
        synced.map_err(|error| Error::io("cannot remove a pin", &path, error))?;
        Ok(self.state().unpin(id))
    }

    /// Changes the time at which a pin ends; returns the pin, or none if there is no such pin. When this returns, the change survives
    /// a power loss.
    ///
    /// # Errors
    /// Errors of the file system, and damaged, if the pin's file is; the pin then ends as before.
    pub fn renew(&self, id: PinId, expires: Option<Timestamp>) -> Result<Option<Pin>> {
        let _work = self.pin_work.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state().ledger.keys(id).is_none() {
            return Ok(None);
        }
        let (request, created) = self.read_pin(id)?;
        let renewed = PinRequest { expires, ..request };
        let path = pins::path(&self.dir, id);
        replace(&*self.medium, &pins::folder(&self.dir), &path, &renewed.encode(created))
            .map_err(|error| Error::io("cannot write a pin", &path, error))?;
        Ok(self.state().ledger.renew(id, expires).cloned())
    }

    /// All pins, the oldest first.
    #[must_use]
    pub fn pins(&self) -> Vec<Pin> {
        self.expire();
        let mut pins: Vec<Pin> = self.state().ledger.pins().cloned().collect();
        pins.sort_by_key(|pin| (pin.created, pin.id));
        pins
    }

    /// Chunks of a pin that are not in the cache, or no longer; none if there is no such pin.
    ///
    /// # Errors
    /// Errors of the file system; damaged, if the pin's file is.
    pub fn missing(&self, id: PinId) -> Result<Option<Vec<PinChunk>>> {
        if self.state().ledger.keys(id).is_none() {
            return Ok(None);
        }
        let (mut request, _) = self.read_pin(id)?;
        let state = self.state();
        request.chunks.retain(|chunk| state.queue.peek(chunk.id.prefix()).is_none());
        Ok(Some(request.chunks))
    }

    /// Reads the file of a pin: the request and its time.
    fn read_pin(&self, id: PinId) -> Result<(PinRequest, Timestamp)> {
        let path = pins::path(&self.dir, id);
        let read = self.medium.open(&path, false).and_then(|file| {
            let mut bytes = vec![0; usize::try_from(file.len()?).unwrap_or(0)];
            file.read_at(&mut bytes, 0)?;
            Ok(bytes)
        });
        let bytes = read.map_err(|error| Error::io("cannot read a pin", &path, error))?;
        PinRequest::decode(&bytes).map_err(|error| error.at(path.display()))
    }

    /// Chunks of a pin that are not in the cache, or no longer, and their stored bytes; none if there is no such pin. Unlike
    /// [`Cache::missing`], it takes little memory.
    ///
    /// # Errors
    /// As [`Cache::missing`].
    pub fn count_missing(&self, id: PinId) -> Result<Option<(u64, u64)>> {
        if self.state().ledger.keys(id).is_none() {
            return Ok(None);
        }
        let path = pins::path(&self.dir, id);
        let io = |error| Error::io("cannot read a pin", &path, error);
        let file = self.medium.open(&path, false).map_err(io)?;
        let len = file.len().map_err(io)?;
        let (mut chunks, mut bytes) = (0, 0);
        let read = |buffer: &mut [u8], at: u64| file.read_at(buffer, at).map_err(io);
        let counted = pins::each_chunk(len, read, |batch| {
            let state = self.state();
            for chunk in batch.iter().filter(|chunk| state.queue.peek(chunk.id.prefix()).is_none()) {
                chunks += 1;
                bytes += u64::from(chunk.stored_len);
            }
        });
        counted.map_err(|error| error.at(path.display()))?;
        Ok(Some((chunks, bytes)))
    }

    /// Ends expired pins. There is no timer: callers do this when it matters. True if one has ended.
    pub(super) fn expire(&self) -> bool {
        let mut ended = false;
        let over = self.state().ledger.expired(self.clock.now());
        for id in over {
            match self.unpin(id) {
                Ok(unpinned) => ended |= unpinned,
                Err(error) => tracing::warn!("an expired pin stays for now: {error:?}"),
            }
        }
        ended
    }
}
