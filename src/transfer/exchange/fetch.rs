//! Fetching of chunks by plan: from peers and from packs. Chunks that a source fails to deliver are planned
//! again without that source.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument as _;

use super::get::ChunkRequest;
use super::plan::{Group, Origin, Plan, UNIT_LEN, Unit, plan};
use super::stats::{Source, add};
use super::{Exchange, From, warn_about};
use crate::budget::Buffer;
use crate::cache::Frame;
use crate::codec::{Encoded, encode_alone};
use crate::error::{Error, ErrorKind, Result};
use crate::policy::LocalCaller;
use crate::repository::{
    Delivered, Gaps, Located, PackRead, Saved, deliver, longest_read, plan as plan_reads, plan_anew, read_pack,
};
use crate::transfer::driver::{Fetching, Reply};
use crate::transfer::frame_request::frame_request;
use crate::transfer::ledger::{Direction, MovedChunks};
use crate::transfer::peers::{Peer, min_useful_rate};
use crate::transfer::protocol::{Closed, RequestOutcome, Violation};
use crate::work::blocking;

/// Maximum number of concurrent groups. Each peer or store bounds its own work.
const GROUPS: usize = 24;

/// Minimum time limit of a peer: it may have to fetch the chunk itself.
const PATIENCE: Duration = Duration::from_secs(3);
/// Minimum time limit of a peer while the rate of the repository is not known.
const PATIENCE_UNKNOWN: Duration = Duration::from_secs(20);
/// Minimum rate of a peer, in bytes a second, while the rate of the repository is not known.
const RATE_UNKNOWN: f64 = 65_536.0;
/// Time limit of an agent of the own site that fetches for this one, in those of one that has the chunks.
const THROUGH: u32 = 8;
/// Wait for a permit to ask a busy peer, in time limits of the request.
const PERMIT_WAIT: u32 = 8;

/// Callback for each chunk that arrives.
type Placing<'p> = Mutex<&'p mut (dyn FnMut(u32, &Encoded) + Send)>;

/// Requests to peers that may end late before the repository is read instead.
const LATE_MAX: usize = 2;

/// Outcome of a request.
#[derive(Default)]
struct ReceivedCounts {
    chunks: u64,
    bytes: u64,
    /// Bytes that the repository stores for the same chunks.
    stored: u64,
}

/// Outcome of a group.
struct GroupOutcome {
    lacking: Vec<u32>,
    /// Peer that is excluded from now on.
    without: Option<Arc<str>>,
}

impl Exchange {
    /// Fetches `chunks`, none of which is a base of another; returns those that no source delivered.
    pub(super) async fn fetch_missing(
        &self,
        request: &ChunkRequest<'_>,
        chunks: Vec<u32>,
        place: &mut (dyn FnMut(u32, &Encoded) + Send),
    ) -> Result<Vec<u32>> {
        let placing = Mutex::new(place);
        let (mut wanted, mut failed, mut without) = (chunks, Vec::new(), Vec::new());
        let mut late = 0;
        while !wanted.is_empty() {
            let (mut view, peers) = self.view(request, &without).await;
            if late >= LATE_MAX && view.repository {
                (view.site, view.remote) = Default::default();
            }
            let Plan { groups, unavailable } = plan(&wanted, |chunk| unit(request.saved, chunk), &view)?;
            failed.extend(unavailable);
            // Limits reads for callers that act for another agent of the site, or share the fetch with others.
            let gang = !request.through || !view.site.is_empty();
            wanted.clear();
            let peers = &peers;
            let mut outcome = stream::iter(groups)
                .map(|group| {
                    let placing = &placing;
                    async move {
                        let peer = match &group.from {
                            Origin::Repository => None,
                            Origin::Peer(address) => peers.iter().find(|peer| peer.address() == address),
                        };
                        let from = peer.map_or("repository", |peer| &**peer.address());
                        let span = tracing::debug_span!("group", from, chunks = group.chunks.len());
                        let outcome = async {
                            match peer {
                                Some(peer) => self.fetch_from_peer(request, peer, &group, placing).await,
                                None if gang => {
                                    let permit = self.origin_reads.acquire().await;
                                    let begun = Instant::now();
                                    let outcome = self.fetch_from_packs(request, &group, placing).await;
                                    permit.finished(begun.elapsed());
                                    outcome
                                }
                                None => self.fetch_from_packs(request, &group, placing).await,
                            }
                        };
                        outcome.instrument(span).await
                    }
                })
                .buffer_unordered(GROUPS);
            while let Some(GroupOutcome { lacking, without: bad }) = outcome.next().await {
                match bad {
                    Some(address) => {
                        wanted.extend(lacking);
                        late += usize::from(peers.iter().any(|peer| *peer.address() == address && peer.is_late()));
                        without.push(address);
                    }
                    None => failed.extend(lacking),
                }
            }
        }
        Ok(failed)
    }

    /// Fetches a group from a peer.
    async fn fetch_from_peer(
        &self,
        request: &ChunkRequest<'_>,
        peer: &Arc<Peer>,
        group: &Group<Arc<str>>,
        placing: &Placing<'_>,
    ) -> GroupOutcome {
        let mut lacking = Lacking::new(&group.chunks);
        let asked = self.request_from_peer(request, (peer, group.through), &mut lacking, placing).await;
        let without = match asked {
            Ok(()) if lacking.is_empty() => None,
            // Another peer may have chunks that this one lacks.
            Ok(()) => Some(Arc::clone(peer.address())),
            Err(error) => {
                tracing::info!(peer = %peer.address(), "peer gave fewer chunks than requested: {error:?}");
                peer.failed(&error);
                Some(Arc::clone(peer.address()))
            }
        };
        GroupOutcome { lacking: lacking.chunks(), without }
    }

    async fn request_from_peer(
        &self,
        request: &ChunkRequest<'_>,
        (peer, through): (&Arc<Peer>, bool),
        lacking: &mut Lacking,
        placing: &Placing<'_>,
    ) -> Result<()> {
        let late = self
            .deadline(request, &lacking.chunks())
            .map(|patience| if through { patience * THROUGH } else { patience });
        let _permit = match late {
            Some(patience) => timeout(patience * PERMIT_WAIT, peer.acquire()).await.map_err(|_| too_slow(peer))?,
            None => peer.acquire().await,
        };
        // Another request found out while this one waited.
        if late.is_some() && peer.is_late() {
            return Err(too_slow(peer));
        }
        let begun = Instant::now();
        let link = peer.link()?;
        let mut numbers = lacking.chunks();
        // An older program knows only chunks as they are stored.
        if !request.alone.is_empty() && !link.may_ask_alone().await {
            numbers.retain(|chunk| !request.alone.contains(chunk));
        }
        if numbers.is_empty() {
            return Ok(());
        }
        let wanted = frame_request(request.saved, &mut numbers, request.alone)?;
        let mut asked = self.begin_peer_request(request, &link).await?;
        let near = self.is_near(request.repository.id(), link.peer());
        let far = !through && !near;
        let metered = if far { self.link_rates.begin(link.peer().site()) } else { None };
        let timed = (!through).then(|| peer.begin_request());
        let fetching = link.fetch(request.policy.priority, request.saved.value.manifest, wanted).await?;
        let mut came = ReceivedCounts::default();
        let taking = self.receive(request, (peer, fetching), &numbers, |chunk, frame| {
            came.chunks += 1;
            came.bytes += frame.bytes().len() as u64;
            came.stored += request.saved.locate(chunk).map_or(0, |located| located.place.stored_len.into());
            asked.received(frame.bytes().len() as u64);
            if let Some(timed) = &timed {
                timed.received(frame.bytes().len() as u64);
            }
            if let Some(metered) = &metered {
                metered.received(frame.bytes().len() as u64);
            }
            place_frame(placing, chunk, frame);
            lacking.came(chunk);
        });
        let taken = in_time(peer, (begun, late), taking).await;
        let took = begun.elapsed();
        drop((metered, timed));
        let source = if near { Source::Site } else { Source::Remote };
        self.count(request, source, came.bytes);
        peer.measured(came.bytes, (!through).then_some(took));
        let moved = MovedChunks {
            way: Direction::In,
            manifest: request.saved.value.manifest,
            chunks: came.chunks,
            bytes: came.bytes,
            stored: came.stored,
            time: took,
        };
        self.peers.ledger().named(moved.manifest, request.repository.id(), &request.saved.name);
        self.peers.ledger().moved(link.peer(), &moved);
        taken?;
        self.end_peer_request(asked, request, &link).await?;
        match link.closed() {
            Some(closed) if !lacking.is_empty() => Err(self.blamed(peer, closed.clone())),
            _ => Ok(()),
        }
    }

    /// Error of a request whose connection to `peer` is over. A peer that has violated the protocol is avoided for a while.
    fn blamed(&self, peer: &Peer, closed: Closed) -> Error {
        let violation = if let Closed::Violated(violation) = &closed { Some(violation.clone()) } else { None };
        let error = Error::from(closed).at(peer.address());
        if let Some(violation) = violation {
            peer.sent_wrong_data(&error);
            if matches!(violation, Violation::Length { .. } | Violation::TooLong { .. }) {
                add(&self.counts.corrupt, 1);
            }
            tracing::warn!(peer = %peer.address(), "peer violated the protocol: {violation}");
        }
        error
    }

    /// Receives the frames of a request whose ordinals are the chunks `numbers`, verifies and reports them.
    async fn receive(
        &self,
        request: &ChunkRequest<'_>,
        (peer, mut fetching): (&Peer, Fetching),
        numbers: &[u32],
        mut came: impl FnMut(u32, &Frame),
    ) -> Result<()> {
        while let Some(reply) = fetching.next().await {
            match reply {
                Reply::Frame(received) => {
                    let Some(&chunk) = numbers.get(received.ordinal as usize) else { continue };
                    let (verifier, saved) = (self.verifier.clone(), Arc::clone(request.saved));
                    let (encoded, tenant) = (received.encoded.clone(), request.tenant.map(str::to_owned));
                    match blocking(move || Ok(verifier.keep(&saved, chunk, encoded, tenant.as_deref()))).await? {
                        Ok(Some(frame)) => came(chunk, &frame),
                        // Cannot be verified without its base: a fetch from the repository includes bases.
                        Ok(None) => {}
                        Err(error) => {
                            peer.sent_wrong_data(&error);
                            add(&self.counts.corrupt, 1);
                            tracing::warn!(peer = %peer.address(), "peer sent a wrong chunk: {error:?}");
                            fetching.corrupt(&error);
                            return Err(error);
                        }
                    }
                }
                Reply::Missing(_) => {}
                Reply::Ended { how, .. } => {
                    tracing::debug!(peer = %peer.address(), ?how, "request has ended");
                    if how == RequestOutcome::Lost {
                        fetching.until_closed().await;
                    }
                }
            }
        }
        Ok(())
    }

    /// Time limit for a peer to send `chunks`, after which a more distant source is faster; none, if that is excluded. A tenant or token
    /// may not name a source that sends next to nothing: others may wait for the place of its request.
    fn deadline(&self, request: &ChunkRequest<'_>, chunks: &[u32]) -> Option<Duration> {
        if request.policy.from == From::Anywhere {
            return Some(self.patience(request, chunks));
        }
        request.repository.caller().and_then(LocalCaller::limited)?;
        Some(self.named_patience + Duration::from_secs_f64(stored_len(request, chunks) as f64 / RATE_UNKNOWN))
    }

    /// Time in which `chunks` come from a source that is worth waiting for, by the rate of the repository.
    pub(super) fn patience(&self, request: &ChunkRequest<'_>, chunks: &[u32]) -> Duration {
        let (least, rate) = match self.origin_rate() {
            Some(rate) => (PATIENCE, min_useful_rate(rate).max(1.0)),
            None => (PATIENCE_UNKNOWN, RATE_UNKNOWN),
        };
        least + Duration::from_secs_f64(stored_len(request, chunks) as f64 / rate)
    }

    /// Fetches a group from the repository's packs: only its frames if their bases are cached; else with their bases.
    async fn fetch_from_packs(
        &self,
        request: &ChunkRequest<'_>,
        group: &Group<Arc<str>>,
        placing: &Placing<'_>,
    ) -> GroupOutcome {
        let mut lacking = Lacking::new(&group.chunks);
        let (begun, metered) = (Instant::now(), self.link_rates.begin(""));
        if let Err(error) = self.read(request, &mut lacking, placing).await {
            if error.kind() == ErrorKind::NotFound {
                // Repacked: the next request finds the new map.
                self.catalog.refresh();
            }
            warn_about(&request.saved.name, "cannot read chunks from the repository", &error);
        } else {
            let bytes = stored_len(request, &group.chunks);
            if let Some(metered) = &metered {
                metered.received(bytes);
            }
            self.origin.lock().unwrap_or_else(PoisonError::into_inner).add(bytes, begun.elapsed());
        }
        GroupOutcome { lacking: lacking.chunks(), without: None }
    }

    async fn read(&self, request: &ChunkRequest<'_>, lacking: &mut Lacking, placing: &Placing<'_>) -> Result<()> {
        let saved = request.saved;
        let longest = longest_read(request.repository, &self.budget).min(UNIT_LEN);
        let frame = |chunk| saved.locate(chunk).map(|located| Located { base: None, ..located });
        let mut as_stored = lacking.chunks();
        as_stored.retain(|chunk| !request.alone.contains(chunk));
        for read in plan_reads(frame, as_stored, longest, Gaps::Spare)? {
            let (verifier, tree) = (self.verifier.clone(), Arc::clone(saved));
            let (len, tenant) = (read.stored_len(), request.tenant.map(str::to_owned));
            let work = move |read: &PackRead, buffer: Buffer| {
                let bytes = buffer.freeze();
                let mut kept = Vec::with_capacity(read.chunks.len());
                for planned in &read.chunks {
                    let located = tree.locate(planned.chunk)?;
                    let range = read.find(&located).unwrap_or_default();
                    let encoded =
                        Encoded { codec: located.place.codec, bytes: bytes.slice(range), base: located.place.base };
                    if let Some(frame) = verifier.keep(&tree, planned.chunk, encoded, tenant.as_deref())? {
                        kept.push((planned.chunk, frame));
                    }
                }
                Ok(kept)
            };
            let kept = read_pack(&[request.repository], &self.budget, read, work).await?;
            self.count_read(request, len);
            place_frames(kept, lacking, placing);
        }
        if lacking.is_empty() { Ok(()) } else { self.read_with_bases(request, lacking, placing).await }
    }

    /// Reads chunks together with their bases, and keeps both; of chunks that are to come alone, only these, without the base.
    async fn read_with_bases(
        &self,
        request: &ChunkRequest<'_>,
        lacking: &mut Lacking,
        placing: &Placing<'_>,
    ) -> Result<()> {
        let saved = request.saved;
        let longest = longest_read(request.repository, &self.budget).min(UNIT_LEN);
        let locate = |chunk| saved.locate(chunk);
        let (alone, whole): (Vec<u32>, Vec<u32>) =
            lacking.chunks().into_iter().partition(|chunk| request.alone.contains(chunk));
        let whole = plan_reads(locate, whole, longest, Gaps::Spare)?.into_iter().map(|read| (read, false));
        let anew = plan_anew(locate, alone.iter().copied(), longest, Gaps::Spare)?.into_iter().map(|read| (read, true));
        let alone: Arc<HashSet<u32>> = Arc::new(alone.into_iter().collect());
        for (read, is_anew) in whole.chain(anew) {
            let _memory = if is_anew { Some(read.memory_to_encode(&self.budget, locate).await?) } else { None };
            let turns = (is_anew && !request.through).then(|| Arc::clone(&self.transcoding));
            let (verifier, tree) = (self.verifier.clone(), Arc::clone(saved));
            let (len, tenant, alone) = (read.stored_len(), request.tenant.map(str::to_owned), Arc::clone(&alone));
            let work = move |read: &PackRead, buffer: Buffer| {
                let bytes = buffer.freeze();
                let _turn = turns.as_ref().map(|turns| turns.take());
                let needed = needed(read, &tree, &alone)?;
                let mut kept = Vec::new();
                deliver(
                    read,
                    &bytes,
                    |chunk| tree.locate(chunk),
                    |delivered: Delivered<'_>| {
                        let place = delivered.located.place;
                        let stored = bytes.slice(delivered.stored);
                        let mut encoded = Encoded { codec: place.codec, bytes: stored, base: place.base };
                        let chunk = delivered.chunk?;
                        if alone.contains(&delivered.index) {
                            encoded = encode_alone(chunk.bytes(), &encoded);
                        }
                        let frame = Frame::decoded(chunk, encoded)?;
                        if needed.contains(&delivered.index) {
                            verifier.insert(&frame, tenant.as_deref());
                        }
                        kept.extend(delivered.wanted.then_some((delivered.index, frame)));
                        Ok(())
                    },
                )?;
                Ok(kept)
            };
            let kept = read_pack(&[request.repository], &self.budget, read, work).await?;
            self.count_read(request, len);
            place_frames(kept, lacking, placing);
        }
        Ok(())
    }
}

/// Result of a request to `peer` that began at `begun`, if it ends before it is `late`. If not, the peer is left out for a while.
async fn in_time(
    peer: &Peer,
    (begun, late): (Instant, Option<Duration>),
    request: impl Future<Output = Result<()>>,
) -> Result<()> {
    let Some(patience) = late else { return request.await };
    match timeout_at(begun + patience, request).await {
        Ok(ended) => {
            peer.was_in_time();
            ended
        }
        Err(_) => {
            peer.was_late(begun);
            Err(too_slow(peer))
        }
    }
}

/// Chunks of a request that have not come yet.
#[derive(Debug)]
struct Lacking {
    order: Vec<u32>,
    left: HashSet<u32>,
}

impl Lacking {
    fn new(chunks: &[u32]) -> Self {
        Self { order: chunks.to_vec(), left: chunks.iter().copied().collect() }
    }

    fn came(&mut self, chunk: u32) {
        self.left.remove(&chunk);
    }

    fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// In the order of the request.
    fn chunks(&self) -> Vec<u32> {
        self.order.iter().copied().filter(|chunk| self.left.contains(chunk)).collect()
    }
}

fn place_frames(kept: Vec<(u32, Frame)>, lacking: &mut Lacking, placing: &Placing<'_>) {
    for (chunk, frame) in kept {
        place_frame(placing, chunk, &frame);
        lacking.came(chunk);
    }
}

fn place_frame(placing: &Placing<'_>, chunk: u32, frame: &Frame) {
    (placing.lock().unwrap_or_else(PoisonError::into_inner))(chunk, &frame.encoded());
}

/// Chunks of `read` to keep: those that were asked for, and the bases of those that are not kept `alone`.
fn needed(read: &PackRead, saved: &Saved, alone: &HashSet<u32>) -> Result<HashSet<u32>> {
    let mut needed = HashSet::new();
    // Bases come before their dependents.
    for planned in read.chunks.iter().rev() {
        if planned.wanted {
            needed.insert(planned.chunk);
        }
        if needed.contains(&planned.chunk) && !alone.contains(&planned.chunk) {
            needed.extend(saved.locate(planned.chunk)?.base);
        }
    }
    Ok(needed)
}

/// Bytes of `chunks` as they come.
fn stored_len(request: &ChunkRequest<'_>, chunks: &[u32]) -> u64 {
    let len = |&chunk: &u32| {
        if request.alone.contains(&chunk) {
            return request.saved.alone_len(chunk).map_or(0, |alone| alone.bytes);
        }
        request.saved.locate(chunk).map_or(0, |located| located.place.stored_len)
    };
    chunks.iter().map(len).map(u64::from).sum()
}

fn too_slow(peer: &Peer) -> Error {
    Error::unreachable("peer is slower than a more distant source").at(peer.address())
}

/// Unit in which a chunk begins.
pub(super) fn unit(saved: &Saved, chunk: u32) -> Result<Unit> {
    let place = saved.locate(chunk)?.place;
    Ok((place.pack, place.offset / UNIT_LEN))
}
