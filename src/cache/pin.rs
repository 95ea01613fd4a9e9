//! Pinning: promises given and ended.

use super::Cache;
use super::allocator::UNIT;
use super::extent;
use super::identity::replace;
use super::pins::{self, Pin, PinChunk, PinLimit, PinRequest, Pinned};
use super::state::State;
use crate::error::{Error, Result};
use crate::id::PinId;
use crate::size;

/// Cure of a pin beyond a limit.
const RAISE: &str = "end other pins (towline pins, towline unpin), or have the limit of the caching agent raised";

impl PinLimit {
    /// Checks that one more than `pins` may be given, and that all may list `chunks`.
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

    /// Checks that all may keep `bytes`.
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
    /// Promises to keep chunks: those that are there from now on, the others as soon as they come. When this returns, the promise
    /// survives a power loss; what is there of the chunks then is another matter ([`Cache::missing`], [`Cache::sync`]).
    ///
    /// # Errors
    /// Usage, if owner or reason are longer than 1024 bytes; else the file system's, and then nothing is promised.
    pub fn pin(&self, request: PinRequest) -> Result<Pinned> {
        self.pin_within(request, None)
    }

    /// As [`Cache::pin`], if the pins of some owners then stay within a limit.
    ///
    /// # Errors
    /// Exhausted, if they do not: nothing is promised. As [`Cache::pin`].
    pub fn pin_within(&self, request: PinRequest, limit: Option<&PinLimit>) -> Result<Pinned> {
        let request = request.normal()?;
        self.expire();
        let (id, now, possible) = (PinId::random(), self.clock.now(), self.possible_units());
        let (promise, mut chunks) = (request.promise(id, now), request.weights());
        {
            let mut state = self.state();
            state.weigh(&mut chunks);
            if let Some(limit) = limit {
                let (pins, listed) = state.ledger.listed_by(&limit.owners);
                limit.check_count(pins, listed + chunks.len() as u64)?;
                limit.check_bytes(state.ledger.held_by(&limit.owners, &chunks) * UNIT)?;
            }
            let wanted = state.ledger.weight() + state.ledger.added_by(&chunks);
            let most = State::pinnable(possible);
            if wanted > most {
                return Ok(Pinned::Lacking { bytes: (wanted - most) * UNIT });
            }
            // At once: of two that would fit alone, one is told what is lacking.
            state.pin(promise.clone(), &mut chunks);
        }
        let path = pins::path(&self.dir, id);
        if let Err(error) = replace(&*self.medium, &pins::folder(&self.dir), &path, &request.encode(now)) {
            self.state().unpin(id);
            return Err(Error::io("write a pin", &path, error));
        }
        Ok(Pinned::Kept(promise))
    }

    /// Bytes too few to hold `chunks` beside what is pinned, though all else be evicted; 0 if there is room. Blocks on the disk.
    #[must_use]
    pub fn shortage(&self, chunks: &[PinChunk]) -> u64 {
        self.expire();
        let possible = self.possible_units();
        let mut chunks: Vec<_> =
            chunks.iter().map(|chunk| (chunk.id.prefix(), extent::weight(chunk.stored_len.into()))).collect();
        chunks.sort_unstable();
        chunks.dedup_by_key(|(key, _)| *key);
        let state = self.state();
        state.weigh(&mut chunks);
        (state.ledger.weight() + state.ledger.added_by(&chunks)).saturating_sub(possible) * UNIT
    }

    /// Bytes that stay free on the disk.
    #[must_use]
    pub fn free_floor(&self) -> u64 {
        self.free_floor
    }

    /// Ends a promise: what no other pin keeps may be evicted from now on. False if there is none of that name.
    ///
    /// # Errors
    /// The file system's, and then the promise stands.
    pub fn unpin(&self, id: PinId) -> Result<bool> {
        if self.state().ledger.keys(id).is_none() {
            return Ok(false);
        }
        let path = pins::path(&self.dir, id);
        match self.medium.remove(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("take a pin away", &path, error));
            }
            _ => {}
        }
        let synced = self.medium.sync_folder(&pins::folder(&self.dir));
        synced.map_err(|error| Error::io("take a pin away", &path, error))?;
        Ok(self.state().unpin(id))
    }

    /// The promises that stand, the oldest first.
    #[must_use]
    pub fn pins(&self) -> Vec<Pin> {
        self.expire();
        let mut pins: Vec<Pin> = self.state().ledger.pins().cloned().collect();
        pins.sort_by_key(|pin| (pin.created, pin.id));
        pins
    }

    /// The chunks that a pin keeps and that are not there yet, or no more; none if there is no such pin.
    ///
    /// # Errors
    /// The file system's; damaged, if the pin's file is.
    pub fn missing(&self, id: PinId) -> Result<Option<Vec<PinChunk>>> {
        if self.state().ledger.keys(id).is_none() {
            return Ok(None);
        }
        let path = pins::path(&self.dir, id);
        let read = self.medium.open(&path, false).and_then(|file| {
            let mut bytes = vec![0; usize::try_from(file.len()?).unwrap_or(0)];
            file.read_at(&mut bytes, 0)?;
            Ok(bytes)
        });
        let bytes = read.map_err(|error| Error::io("read a pin", &path, error))?;
        let (mut request, _) = PinRequest::decode(&bytes).map_err(|error| error.at(path.display()))?;
        let state = self.state();
        request.chunks.retain(|chunk| state.queue.peek(chunk.id.prefix()).is_none());
        Ok(Some(request.chunks))
    }

    /// Ends the promises whose time is over. Nobody watches the clock: this is done where it matters. True if one ended.
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
