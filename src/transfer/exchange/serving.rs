//! Serving of chunks. Processes of the node get all chunks that the exchange can fetch; agents of its site those that it
//! can fetch from other sites or the repository; others only those in its cache or in a repository on this node's disk.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::audited::Requester;
use super::catalog::{OpenedTree, PeerSide};
use super::fetch::unit;
use super::get::ChunkRequest;
use super::stats::{SourceCounters, add};
use super::{Exchange, FetchPolicy};
use crate::cache::Frame;
use crate::codec::{Codec, Encoded};
use crate::error::{ErrorKind, Result};
use crate::id::{ManifestId, MapKey};
use crate::identity::Identity;
use crate::name::Name;
use crate::policy::{LocalCaller, Route};
use crate::repository::{ANEW_MAX, Saved};
use crate::transfer::Transport;
use crate::transfer::ledger::{Direction, MovedChunks};
use crate::transfer::protocol::limits::RUNS_MAX;
use crate::transfer::protocol::{AskedChunk, FrameRequest, Grant, OutgoingFrame, Runs, Survey};
use crate::transfer::{ByteCounters, ReadAheadShare, ServedChunks};
use crate::work::blocking;

/// Maximum number of places in one survey.
const SURVEY_MAX: u32 = 1 << 18;
/// Places that are looked at before other tasks run.
const SURVEY_TURN: u32 = 1 << 12;

/// Memory to encode a chunk without its base, in chunks of its length: itself, two of its bases at a time, and both forms. A bundle is
/// as long as three of its parts.
const TRANSCODING_WEIGHT: u64 = 5;
const PART_TRANSCODING_WEIGHT: u64 = 9;
/// Distance in the manifest's list up to which missing chunks are fetched together with one that is asked for.
const NEAR: u32 = 2_048;
/// Maximum number of grants that are remembered.
const GRANTS_MAX: usize = 4096;
/// Validity of a grant, with labels or a policy, and without.
const LASTING: Duration = Duration::from_secs(1);
const LASTING_OPEN: Duration = Duration::from_secs(10);

/// Chunks of an exchange for a process of its own node.
#[derive(Clone, Debug)]
pub struct Local {
    exchange: Arc<Exchange>,
    caller: LocalCaller,
}

impl Local {
    /// Holdings of `exchange` for a process of `caller`.
    #[must_use]
    pub fn new(exchange: Arc<Exchange>, caller: LocalCaller) -> Self {
        Self { exchange, caller }
    }
}

#[async_trait]
impl ServedChunks for Exchange {
    fn opened(&self, identity: &Identity, transport: Transport, wire: Arc<ByteCounters>) {
        self.peers.ledger().opened(identity, transport, wire);
        self.peers.wake();
    }

    fn called(&self, identity: &Identity, wire: Arc<ByteCounters>) {
        self.peers.ledger().called(identity, wire);
    }

    fn bytes_received(&self) -> u64 {
        self.bytes_received()
    }

    fn read_ahead_share(&self, identity: &Identity) -> ReadAheadShare {
        self.ahead.share(Some(identity))
    }

    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        self.authorise_over(identity, Route::Unknown, manifest).await
    }

    async fn authorise_over(
        &self,
        identity: &Identity,
        route: Route,
        manifest: &ManifestId,
    ) -> Result<Option<Arc<Grant>>> {
        let entry = self.granted(identity, route, manifest).await?;
        let grant = entry.map(|entry| Arc::clone(&entry.grant));
        self.record(Requester::Agent(identity), manifest, grant.is_some()).await?;
        Ok(grant)
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        Ok(self.held(grant, from).await)
    }

    async fn frame(
        &self,
        identity: &Identity,
        asked: &FrameRequest,
        chunk: AskedChunk,
    ) -> Result<Option<OutgoingFrame>> {
        self.frame_over(identity, Route::Unknown, asked, chunk).await
    }

    async fn frame_over(
        &self,
        identity: &Identity,
        route: Route,
        asked: &FrameRequest,
        chunk: AskedChunk,
    ) -> Result<Option<OutgoingFrame>> {
        let Some(granted) = self.still_granted(identity, route, &asked.manifest).await? else { return Ok(None) };
        let (begun, near) = (Instant::now(), granted.near);
        let by = if near { RequestedBy::SiteAgent } else { RequestedBy::RemoteAgent };
        let entry = match self.catalog.opened(&asked.manifest, Some(granted.map)) {
            Some(entry) => Some(entry),
            None => self.granted(identity, route, &asked.manifest).await?,
        };
        let Some(entry) = entry else { return Ok(None) };
        let found = self.supply(&entry, (asked, chunk), by).await?;
        if let Some(supply) = &found {
            let bytes = supply.encoded.bytes.len() as u64;
            self.count_sent(Requester::Agent(identity), &asked.manifest, bytes).await?;
            self.limits.pass(identity, bytes).await;
            add(if near { &self.counts.to_site } else { &self.counts.to_remote }, bytes);
            let stored = entry.stored_len(&chunk.id).unwrap_or(bytes);
            let (way, manifest, time) = (Direction::Out, asked.manifest, begun.elapsed());
            self.peers.ledger().moved(identity, &MovedChunks { way, manifest, chunks: 1, bytes, stored, time });
        }
        Ok(found)
    }
}

#[async_trait]
impl ServedChunks for Local {
    fn bytes_received(&self) -> u64 {
        self.exchange.bytes_received()
    }

    fn read_ahead_share(&self, _: &Identity) -> ReadAheadShare {
        self.exchange.ahead.share(None)
    }

    async fn authorise(&self, _: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        let mut entry = self.exchange.catalog.find(None, Some(&self.caller), manifest, |_, _| true).await?;
        // A tree that stays open is asked about again: the policy may have changed.
        if let Some(found) = &entry
            && let Err(error) =
                found.repository.for_caller(Some(self.caller.clone())).check_readable(&found.saved.name, manifest).await
        {
            tracing::info!(name = %found.saved.name, "tree is denied to a process of this node: {error:?}");
            entry = None;
        }
        self.exchange.record(Requester::Process(&self.caller), manifest, entry.is_some()).await?;
        Ok(entry.map(|entry| Arc::clone(&entry.grant)))
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        Ok(self.exchange.held(grant, from).await)
    }

    async fn frame(&self, _: &Identity, asked: &FrameRequest, chunk: AskedChunk) -> Result<Option<OutgoingFrame>> {
        let entry = match self.exchange.catalog.opened(&asked.manifest, None) {
            Some(entry) => Some(entry),
            None => self.exchange.catalog.find(None, Some(&self.caller), &asked.manifest, |_, _| true).await?,
        };
        let Some(entry) = entry else { return Ok(None) };
        let found = self.exchange.supply(&entry, (asked, chunk), RequestedBy::Process(&self.caller)).await?;
        if let Some(supply) = &found {
            let bytes = supply.encoded.bytes.len() as u64;
            self.exchange.count_sent(Requester::Process(&self.caller), &asked.manifest, bytes).await?;
            add(&self.exchange.counts.to_local, bytes);
        }
        Ok(found)
    }
}

/// Requester of a chunk.
#[derive(Clone, Copy, Debug)]
enum RequestedBy<'a> {
    /// Process of this node: it gets all that can be fetched.
    Process(&'a LocalCaller),
    /// Agent of the same site: it gets what other sites and the repository have.
    SiteAgent,
    /// Agent of another site: it gets what is on this node.
    RemoteAgent,
}

fn outgoing(frame: &Frame) -> OutgoingFrame {
    OutgoingFrame { encoded: frame.encoded(), plain_len: frame.plain_len() }
}

/// Chunks to fetch at once, and those of them that come without their bases.
#[derive(Debug, Default)]
struct Together {
    chunks: Vec<u32>,
    alone: HashSet<u32>,
    /// Plain bytes of the latter.
    anew: u64,
}

impl Together {
    fn add(&mut self, chunk: u32, is_alone: bool, plain_len: u64) {
        self.chunks.push(chunk);
        if is_alone {
            self.alone.insert(chunk);
            self.anew += plain_len;
        }
    }
}

/// A chunk, and all that it needs.
fn chain(saved: &Saved, first: Option<u32>) -> Vec<u32> {
    let next = |chunk: &u32| saved.locate(*chunk).ok()?.base;
    std::iter::successors(first, next).collect()
}

/// Agent and tree of a grant, and the path that it was ruled for: a grant on a private link holds on no other.
pub(super) type GrantKey = (Identity, Route, ManifestId);

/// Time when a tree was granted to an agent, its validity, and the map of the name that the agent may read: another name of the tree
/// may need bases that the agent may not have.
#[derive(Clone, Copy, Debug)]
pub(super) struct GrantedAt {
    at: Instant,
    lasts: Duration,
    map: MapKey,
    /// True for an agent of this site.
    near: bool,
}

impl Exchange {
    /// Tree whose manifest is `manifest`, if `identity` may read it and the policy lets it go there over `route`.
    async fn granted(
        &self,
        identity: &Identity,
        route: Route,
        manifest: &ManifestId,
    ) -> Result<Option<Arc<OpenedTree>>> {
        let by = PeerSide { peer: identity, own: &self.identity, route };
        let allowed = |agent: Option<&Identity>, name: &Name| agent.is_some_and(|agent| self.allow.allows(agent, name));
        let entry = self.catalog.find(Some(by), None, manifest, allowed).await?;
        if let Some(entry) = &entry {
            self.peers.ledger().named(*manifest, entry.repository.id(), &entry.saved.name);
        }
        let mut grants = self.grants.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (identity.clone(), route, *manifest);
        match &entry {
            Some(entry) => {
                if grants.len() >= GRANTS_MAX {
                    grants.clear();
                }
                grants.insert(key, self.grant_of(entry, identity));
            }
            None => {
                grants.remove(&key);
            }
        }
        Ok(entry)
    }

    /// A grant that still holds: policies and labels change during a transfer.
    async fn still_granted(
        &self,
        identity: &Identity,
        route: Route,
        manifest: &ManifestId,
    ) -> Result<Option<GrantedAt>> {
        let key = (identity.clone(), route, *manifest);
        let granted = self.grants.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if granted.is_some_and(|granted| granted.at.elapsed() < granted.lasts) {
            return Ok(granted);
        }
        let entry = self.granted(identity, route, manifest).await?;
        Ok(entry.map(|entry| self.grant_of(&entry, identity)))
    }

    fn grant_of(&self, entry: &OpenedTree, identity: &Identity) -> GrantedAt {
        GrantedAt {
            at: Instant::now(),
            lasts: if self.catalog.is_open(&entry.repository) { LASTING_OPEN } else { LASTING },
            map: entry.saved.value.map_key,
            near: self.is_near(entry.repository.id(), identity),
        }
    }

    /// Chunk of the granted tree `entry`: from the cache, or fetched, as far as that is done for the requester.
    async fn supply(
        &self,
        entry: &Arc<OpenedTree>,
        (asked, chunk): (&FrameRequest, AskedChunk),
        by: RequestedBy<'_>,
    ) -> Result<Option<OutgoingFrame>> {
        let found = self.cached_frame(entry, chunk).await?;
        if found.is_some() {
            return Ok(found);
        }
        // Agents of two sites with mounts of the same folder would wait for each other.
        if matches!(by, RequestedBy::RemoteAgent) && !self.is_here(&entry.repository).await {
            return Ok(None);
        }
        self.fetch_for(entry, (asked, chunk), by).await
    }

    /// Bytes received from repositories, and chunks from peers.
    fn bytes_received(&self) -> u64 {
        self.catalog.received() + self.cache.stat().inserts
    }

    /// Chunk of the cache, with the base that the granted tree lists or none, as a reader of the tree may not see others; without its
    /// base, if it must, and if the base is there, too.
    async fn cached_frame(&self, entry: &Arc<OpenedTree>, chunk: AskedChunk) -> Result<Option<OutgoingFrame>> {
        let AskedChunk { id, alone } = chunk;
        let Some(number) = entry.number(&id).filter(|_| self.cache.contains(&id)) else { return Ok(None) };
        let (verifier, entry) = (self.verifier.clone(), Arc::clone(entry));
        let get = move || {
            // The manifest may say another length than the chunk has: who asks for it would take the frame for a violation.
            let plain_len = entry.saved.locate(number)?.place.plain_len;
            Ok(verifier.get(&entry.saved, number)?.filter(|frame| frame.plain_len() == plain_len))
        };
        match blocking(get).await? {
            Some(frame) if alone && frame.base().is_some() => self.without_base(frame).await,
            frame => Ok(frame.map(|frame| outgoing(&frame))),
        }
    }

    /// `frame` without its base: encoded anew, or recently so. None if the base is not in the cache. Only some are encoded at a time.
    async fn without_base(&self, frame: Frame) -> Result<Option<OutgoingFrame>> {
        let (id, verifier, turns) = (frame.id(), self.verifier.clone(), Arc::clone(&self.transcoding));
        let (budget, encoded) = (self.budget.clone(), Arc::clone(&self.counts.reencoded));
        let encode = move || async move {
            // Read-ahead has a quarter of the budget for good: a wait for more than half might never end.
            let weight = if frame.codec() == Codec::Part { PART_TRANSCODING_WEIGHT } else { TRANSCODING_WEIGHT };
            let bytes = u64::from(frame.plain_len()) * weight;
            let memory = match budget.carve_beside_buffers(bytes).await {
                Err(error) if error.kind() == ErrorKind::Exhausted => return Ok(None),
                memory => memory?,
            };
            let alone = blocking(move || {
                let _held = (turns.take(), memory);
                Ok(verifier.alone(&frame))
            });
            let alone = alone.await?;
            add(&encoded, u64::from(alone.is_some()));
            Ok(alone.map(|frame| outgoing(&frame)))
        };
        self.reencoded.get(id, encode).await
    }

    /// Fetches the chunk `id`, together with missing chunks of the same request and unit that nobody is fetching: one
    /// read instead of many.
    async fn fetch_for(
        &self,
        entry: &Arc<OpenedTree>,
        (asked, chunk): (&FrameRequest, AskedChunk),
        by: RequestedBy<'_>,
    ) -> Result<Option<OutgoingFrame>> {
        let caller = match by {
            RequestedBy::Process(caller) => Some(caller),
            RequestedBy::SiteAgent | RequestedBy::RemoteAgent => None,
        };
        // Agents of the site are asked only for a process: for one of them it could go in circles.
        let through = caller.is_some();
        let saved = &entry.saved;
        let Some(number) = entry.number(&chunk.id) else { return Ok(None) };
        let plain_len = saved.locate(number)?.place.plain_len;
        let Together { chunks, alone, .. } = self.together(entry, asked, (number, chunk.alone))?;
        let (policy, counters) =
            (FetchPolicy { priority: asked.priority, ..FetchPolicy::FOR_READER }, SourceCounters::default());
        let repository = &entry.repository.for_caller(caller.cloned());
        let request = ChunkRequest {
            repository,
            saved,
            alone: &alone,
            policy: &policy,
            through,
            counters: &counters,
            tenant: None,
        };
        let mut found = None;
        let mut place = |chunk: u32, encoded: &Encoded| {
            if chunk == number {
                found = Some(OutgoingFrame { encoded: encoded.clone(), plain_len });
            }
        };
        if through {
            // A process of this node leaves it to the agent how chunks come.
            self.get_planned(&request, &chunks, &mut place).await;
        } else {
            self.get_chunks(&request, &chunks, &mut place).await;
        }
        if chunk.alone && found.as_ref().is_some_and(|found| found.encoded.base.is_some()) {
            // It was there, without its base.
            let base = saved.locate(number)?.base;
            self.get_chunks(&request, &chain(saved, base), &mut |_, _| {}).await;
            return self.cached_frame(entry, chunk).await;
        }
        Ok(found)
    }

    /// Chunk `number`, and missing chunks of the same request and unit that nobody is fetching. Of those that are encoded anew, as much as
    /// one read brings.
    fn together(&self, entry: &OpenedTree, asked: &FrameRequest, (number, is_alone): (u32, bool)) -> Result<Together> {
        let (saved, wanted) = (&entry.saved, &asked.wanted);
        let unit_of_it = unit(saved, number)?;
        let mut together = Together::default();
        together.add(number, is_alone, saved.locate(number)?.place.plain_len.into());
        let near = wanted.chunks.within(number.saturating_sub(NEAR)..number.saturating_add(NEAR));
        let bases = wanted.bases.iter().zip(wanted.chunks.len()..);
        let bases = bases.filter_map(|(base, ordinal)| Some((ordinal, entry.number(base)?)));
        for (ordinal, other) in near.chain(bases).filter(|(_, other)| *other != number) {
            let Ok(located) = saved.locate(other) else { continue };
            let plain_len = u64::from(located.place.plain_len);
            let is_alone = u32::try_from(ordinal).is_ok_and(|ordinal| wanted.alone.contains(ordinal));
            let too_much = is_alone && together.anew + plain_len > ANEW_MAX;
            let same = unit(saved, other).is_ok_and(|unit| unit == unit_of_it);
            if same && !too_much && !self.in_flight.has(&located.id) && !self.cache.contains(&located.id) {
                together.add(other, is_alone, plain_len);
            }
        }
        Ok(together)
    }

    async fn held(&self, grant: &Grant, from: u32) -> Survey {
        let ids = &grant.chunks.ids;
        let chunks = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        if let Some(entry) = self.catalog.of(grant)
            && self.is_here(&entry.repository).await
        {
            return Survey { chunks, upto: chunks, held: Runs::of(from..chunks) };
        }
        let mut upto = from;
        let mut held = Runs::default();
        for (place, id) in (from..chunks.min(from.saturating_add(SURVEY_MAX))).zip(ids.iter().skip(from as usize)) {
            if self.cache.contains(id) {
                held.push(place..place + 1);
            }
            if held.ranges().len() > RUNS_MAX - 1 {
                break;
            }
            upto = place + 1;
            if upto.is_multiple_of(SURVEY_TURN) {
                tokio::task::yield_now().await;
            }
        }
        Survey { chunks, upto, held: held.without(&Runs::of(upto..u32::MAX)) }
    }
}
