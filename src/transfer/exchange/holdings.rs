//! What an exchange gives: to processes of its node all that it can bring, to agents of its site the same but from further away
//! only, to others what it holds: in its cache, or in a repository on this node's disk.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::time::Instant;

use super::bring::unit;
use super::catalog::OpenedTree;
use super::figures::{Tally, add};
use super::gather::Ask;
use super::{Exchange, FetchPolicy};
use crate::cache::Frame;
use crate::error::Result;
use crate::id::{ChunkId, ManifestId};
use crate::transfer::identity::Identity;
use crate::transfer::ledger::Way;
use crate::transfer::peers::Transport;
use crate::transfer::protocol::limits::RUNS_MAX;
use crate::transfer::protocol::{Asked, Grant, Runs, Supply, Survey};
use crate::transfer::{ByteCounters, Holdings, Seat};
use crate::work::blocking;

/// Places that one survey speaks for, at most.
const SURVEY_MAX: u32 = 1 << 18;

/// An exchange, for processes of its own node.
#[derive(Clone, Debug)]
pub struct Local(pub Arc<Exchange>);

#[async_trait]
impl Holdings for Exchange {
    fn opened(&self, identity: &Identity, transport: Transport, wire: Arc<ByteCounters>) {
        self.peers.ledger().opened(identity, transport, wire);
        self.peers.wake();
    }

    fn called(&self, identity: &Identity, wire: Arc<ByteCounters>) {
        self.peers.ledger().called(identity, wire);
    }

    fn brought(&self) -> u64 {
        self.brought()
    }

    fn seat(&self, identity: &Identity) -> Seat {
        self.ahead.seat(Some(identity))
    }

    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        let entry = self.catalog.find(Some(identity), manifest, |name| self.policy.allows(identity, name)).await?;
        Ok(entry.map(|entry| Arc::clone(&entry.grant)))
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        Ok(self.held(grant, from))
    }

    async fn frame(&self, identity: &Identity, asked: &Asked, id: &ChunkId) -> Result<Option<Supply>> {
        let begun = Instant::now();
        let near = identity.site() == self.identity.site();
        let found = self.supply(asked, id, |entry| (near || entry.is_here()).then_some(false)).await?;
        if let Some(supply) = &found {
            let bytes = supply.encoded.bytes.len() as u64;
            self.limits.pass(identity.site(), bytes).await;
            add(if near { &self.counts.to_site } else { &self.counts.to_remote }, bytes);
            self.peers.ledger().moved(identity, Way::Out, asked.manifest, (1, bytes), begun.elapsed());
        }
        Ok(found)
    }
}

#[async_trait]
impl Holdings for Local {
    fn brought(&self) -> u64 {
        self.0.brought()
    }

    fn seat(&self, _: &Identity) -> Seat {
        self.0.ahead.seat(None)
    }

    async fn authorise(&self, _: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        Ok(self.0.catalog.find(None, manifest, |_| true).await?.map(|entry| Arc::clone(&entry.grant)))
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        Ok(self.0.held(grant, from))
    }

    async fn frame(&self, _: &Identity, asked: &Asked, id: &ChunkId) -> Result<Option<Supply>> {
        let found = self.0.supply(asked, id, |_| Some(true)).await?;
        Ok(found.inspect(|supply| add(&self.0.counts.to_local, supply.encoded.bytes.len() as u64)))
    }
}

impl Exchange {
    /// A chunk that was granted: from the cache, or brought if `how` says so of its tree (and then, whether agents of the site may
    /// be asked).
    async fn supply(
        &self,
        asked: &Asked,
        id: &ChunkId,
        how: impl Fn(&OpenedTree) -> Option<bool>,
    ) -> Result<Option<Supply>> {
        let found = self.look(id).await?;
        if found.is_some() {
            return Ok(found);
        }
        let Some(entry) = self.catalog.opened(&asked.manifest) else { return Ok(None) };
        match how(&entry) {
            Some(through) => self.bring_for(&entry, asked, id, through).await,
            None => Ok(None),
        }
    }

    /// Bytes that repositories gave, as they come, and chunks that peers did.
    fn brought(&self) -> u64 {
        self.catalog.received() + self.cache.stat().inserts
    }

    /// A chunk of the cache.
    async fn look(&self, id: &ChunkId) -> Result<Option<Supply>> {
        if !self.cache.contains(id) {
            return Ok(None);
        }
        let (cache, id) = (Arc::clone(&self.cache), *id);
        let frame = blocking(move || Ok(cache.get(&id))).await?;
        Ok(frame.map(|frame: Frame| Supply { encoded: frame.encoded(), plain_len: frame.plain_len() }))
    }

    /// Brings the chunk `id`, and with it what the same request wants of the same unit and nobody has begun to bring: one read instead
    /// of many, and of what is there already none.
    async fn bring_for(
        &self,
        entry: &OpenedTree,
        asked: &Asked,
        id: &ChunkId,
        through: bool,
    ) -> Result<Option<Supply>> {
        let saved = &entry.saved;
        let Some(number) = entry.number(id) else { return Ok(None) };
        let unit_of_it = unit(saved, number)?;
        let bases = asked.wanted.bases.iter().filter_map(|base| entry.number(base));
        let same = |chunk: &u32| unit(saved, *chunk).is_ok_and(|unit| unit == unit_of_it);
        let lacking = |chunk: &u32| {
            let located = saved.locate(*chunk);
            located.is_ok_and(|located| !self.in_flight.has(&located.id) && !self.cache.contains(&located.id))
        };
        let others = asked.wanted.chunks.iter().chain(bases).filter(same).filter(lacking);
        let chunks: Vec<u32> = others.filter(|&other| other != number).chain([number]).collect();
        let (policy, tally) = (FetchPolicy { priority: asked.priority, ..FetchPolicy::FOR_READER }, Tally::default());
        let ask = Ask { repository: &entry.repository, saved, policy: &policy, through, tally: &tally };
        let plain_len = saved.locate(number)?.place.plain_len;
        let mut found = None;
        let mut place = |chunk: u32, encoded: &crate::codec::Encoded| {
            if chunk == number {
                found = Some(Supply { encoded: encoded.clone(), plain_len });
            }
        };
        self.gather(&ask, &chunks, &mut place).await;
        Ok(found)
    }

    fn held(&self, grant: &Grant, from: u32) -> Survey {
        let ids = &grant.chunks.ids;
        let chunks = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        if self.catalog.of(grant).is_some_and(|entry| entry.is_here()) {
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
        }
        Survey { chunks, upto, held: held.without(&Runs::of(upto..u32::MAX)) }
    }
}
