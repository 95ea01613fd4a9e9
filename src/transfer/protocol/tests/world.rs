//! Two peers and the network between them, in virtual time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::super::limits::READ_AHEAD_MAX;
use super::super::{
    Arrived, Closed, Demand, Event, Grant, OutgoingFrame, Priority, Provider, RequestOutcome, Requester, Runs, Survey,
    Wanted,
};
use super::network::{Channel, LinkProperties, Rng};
use super::{asker, hello, server};
use crate::codec::{Codec, Encoded};
use crate::format::ChunkList;
use crate::id::{ChunkId, ManifestId};
use crate::limits::{KIB, MIB};

/// Longer than any transfer in these tests.
const PATIENCE: Duration = Duration::from_hours(1);

/// Content of the provider: one manifest that the asker may read, one that it may not.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) open: ManifestId,
    pub(super) secret: ManifestId,
    pub(super) grant: Arc<Grant>,
    pub(super) held: BTreeSet<ChunkId>,
    /// Held chunks of the secret manifest alone.
    pub(super) secrets: Vec<ChunkId>,
    bytes: Bytes,
}

impl Store {
    /// `lens.len()` chunks, those at `lacking` not held, and one base for each ten.
    pub(super) fn new(lens: &[u32], lacking: &[u32]) -> Self {
        let ids: Vec<ChunkId> = (0..lens.len()).map(|n| ChunkId::of(&n.to_le_bytes())).collect();
        let mut bases: Vec<_> =
            (0..lens.len() / 10).map(|n| (ChunkId::of(format!("base {n}").as_bytes()), 5000)).collect();
        bases.sort_unstable();
        let secrets: Vec<ChunkId> = (0u8..9).map(|n| ChunkId::of(&[n, 1, 2])).collect();
        let lacks: BTreeSet<ChunkId> = lacking.iter().map(|&n| ids[n as usize]).collect();
        let held = ids.iter().chain(bases.iter().map(|(id, _)| id)).chain(&secrets);
        let held = held.filter(|id| !lacks.contains(id)).copied().collect();
        let chunks = Arc::new(ChunkList { ids, lens: lens.to_vec() });
        Self {
            open: ManifestId::of(b"open"),
            secret: ManifestId::of(b"secret"),
            grant: Arc::new(Grant { chunks, bases }),
            held,
            secrets,
            bytes: (0..16 * MIB).map(|n| ((n * 31) >> 3).to_le_bytes()[0]).collect::<Vec<_>>().into(),
        }
    }

    /// Chunks of all sizes up to `most` bytes, from a seed.
    pub(super) fn of_sizes(count: u64, most: u64, lacking: &[u32]) -> Self {
        let mut rng = Rng::new(count + most);
        Self::new(&(0..count).map(|_| u32::try_from(rng.below(most)).unwrap()).collect::<Vec<_>>(), lacking)
    }

    pub(super) fn len_of(&self, id: &ChunkId) -> u32 {
        let chunks = &self.grant.chunks;
        let own = chunks.ids.iter().position(|one| one == id).map(|at| chunks.lens[at]);
        own.or_else(|| self.grant.bases.iter().find(|(one, _)| one == id).map(|(_, len)| *len)).unwrap_or(5000)
    }

    /// Stored bytes of a chunk: one pattern, at an offset of its own.
    pub(super) fn stored(&self, id: &ChunkId) -> Bytes {
        let len = self.len_of(id) as usize;
        let from = (id.prefix() % 999) as usize;
        self.bytes.slice(from..).slice(..len.min(self.bytes.len() - from))
    }

    pub(super) fn every(&self) -> Wanted {
        let len = u32::try_from(self.grant.chunks.ids.len()).unwrap();
        Wanted {
            chunks: Runs::of(0..len),
            bases: self.grant.bases.iter().map(|(id, _)| *id).collect(),
            ..Wanted::default()
        }
    }

    fn chunk(&self, wanted: &Wanted, ordinal: u32) -> ChunkId {
        let place = wanted.chunks.get(ordinal.into());
        place.map_or_else(|| wanted.base(ordinal.into()).unwrap(), |place| self.grant.chunks.ids[place as usize])
    }
}

/// Observations of the requester.
#[derive(Debug, Default)]
pub(super) struct Observations {
    /// Arrivals of each chunk.
    pub(super) chunks: BTreeMap<ChunkId, u32>,
    pub(super) missing: BTreeSet<ChunkId>,
    /// Result of each request, its rest, and the time; in that order.
    pub(super) ended: Vec<(u64, RequestOutcome, Runs, Duration)>,
    pub(super) surveys: Vec<Survey>,
    pub(super) closed: Option<Closed>,
    pub(super) provider_closed: Option<Closed>,
    pub(super) opened: bool,
    /// Peak memory of the requester and the provider.
    pub(super) peak: (u64, u64),
}

/// Two peers and the network between them.
#[derive(Debug)]
pub(super) struct World {
    pub(super) now: Duration,
    pub(super) requester: Requester,
    pub(super) provider: Provider,
    pub(super) store: Store,
    pub(super) up: Channel,
    pub(super) down: Channel,
    pub(super) seen: Observations,
    /// Bytes that the provider sent, by lane.
    pub(super) said: Vec<u8>,
    /// Duration of a read; without one, no read ends.
    pub(super) read_time: Option<Duration>,
    /// Bytes a second that the provider reports as received from further away.
    pub(super) brings: u64,
    /// Bytes a second that the reader processes; without a limit if none.
    pub(super) reader: Option<u64>,
    line: LinkProperties,
    lanes: u32,
    window: u64,
    rng: Rng,
    reads: Vec<(Duration, u64, u32, ChunkId)>,
    releases: VecDeque<(Duration, u64)>,
    asked: BTreeMap<u64, Wanted>,
}

impl World {
    pub(super) fn new(store: Store, line: LinkProperties, lanes: u32, window: u64, seed: u64) -> Self {
        let now = Duration::from_secs(seed % 1000);
        let (requester, provider) = pair(lanes, window, now);
        Self {
            now,
            requester,
            provider,
            store,
            up: Channel::new(line),
            down: Channel::new(line),
            seen: Observations::default(),
            said: Vec::new(),
            read_time: Some(Duration::from_millis(2)),
            brings: 0,
            reader: None,
            line,
            lanes,
            window,
            rng: Rng::new(seed),
            reads: Vec::new(),
            releases: VecDeque::new(),
            asked: BTreeMap::new(),
        }
    }

    /// A fast line, and enough memory.
    pub(super) fn calm(store: Store, lanes: u32, seed: u64) -> Self {
        Self::new(store, line(), lanes, 8 * MIB, seed)
    }

    /// Breaks the connection, and makes a new one.
    pub(super) fn reconnect(&mut self) {
        self.requester.lost("reset");
        self.provider.lost("reset");
        self.pump();
        self.again();
    }

    /// Makes a new connection after one that is over.
    pub(super) fn again(&mut self) {
        (self.requester, self.provider) = pair(self.lanes, self.window, self.now);
        (self.up, self.down) = (Channel::new(self.line), Channel::new(self.line));
        self.reads.clear();
        self.releases.clear();
        self.asked.clear();
        (self.seen.opened, self.seen.closed, self.seen.provider_closed) = (false, None, None);
        self.run(|world| world.seen.opened);
    }

    /// Opens the connection and requests `wanted`.
    pub(super) fn ask(&mut self, priority: Priority, wanted: Wanted) -> u64 {
        self.run(|world| world.seen.opened);
        let request = self.requester.request(priority, self.store.open, wanted.clone(), self.now).unwrap();
        self.asked.insert(request, wanted);
        request
    }

    /// Runs until `request` has ended; returns its result and rest.
    pub(super) fn until_ended(&mut self, request: u64) -> (RequestOutcome, Runs) {
        self.run(|world| world.seen.ended.iter().any(|(ended, ..)| *ended == request));
        let ended = self.seen.ended.iter().rev().find(|(ended, ..)| *ended == request);
        let (_, how, left, _) = ended.unwrap_or_else(|| panic!("request {request} never ended"));
        (how.clone(), left.clone())
    }

    /// Runs until `done`, or until nothing happens any more.
    pub(super) fn run(&mut self, done: impl Fn(&Self) -> bool) {
        let begun = self.now;
        loop {
            self.pump();
            if done(self) || !self.advance(Duration::MAX) {
                return;
            }
            assert!(self.now < begun + PATIENCE, "still going on after {PATIENCE:?}");
        }
    }

    /// Runs for `time`.
    pub(super) fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.pump();
        while self.now < end {
            if !self.advance(end) {
                self.now = end;
            }
            self.pump();
        }
    }

    /// Moves all bytes that can move without time passing.
    fn pump(&mut self) {
        loop {
            let mut moved = false;
            while let Some(event) = self.requester.poll() {
                self.see(event);
                moved = true;
            }
            while let Some(demand) = self.provider.poll() {
                self.meet(demand);
                moved = true;
            }
            while self.up.takes(0)
                && let Some(bytes) = self.requester.transmit(self.now)
            {
                self.up.send(0, &[bytes.head, bytes.body].concat(), self.now, &mut self.rng);
                moved = true;
            }
            for lane in 0..=self.lanes {
                while self.down.takes(lane)
                    && let Some(bytes) = self.provider.transmit(lane, self.now)
                {
                    let bytes = [bytes.head, bytes.body].concat();
                    self.said.extend_from_slice(&bytes);
                    self.down.send(lane, &bytes, self.now, &mut self.rng);
                    moved = true;
                }
            }
            self.judge();
            if !moved {
                return;
            }
        }
    }

    /// Checks that the memory of both sides is bounded.
    fn judge(&mut self) {
        let (here, there) = (self.requester.in_memory(), self.provider.in_memory());
        assert!(here <= self.window, "requester holds {here}");
        assert!(there <= READ_AHEAD_MAX.max(self.window), "provider holds {there}");
        self.seen.peak = (self.seen.peak.0.max(here), self.seen.peak.1.max(there));
    }

    fn see(&mut self, event: Event) {
        match event {
            Event::Opened => self.seen.opened = true,
            Event::Arrived(arrived) => self.arrived(&arrived),
            Event::Missing { request, ordinals } => {
                let wanted = &self.asked[&request];
                let chunks = ordinals.iter().map(|ordinal| self.store.chunk(wanted, ordinal));
                self.seen.missing.extend(chunks);
            }
            Event::Found { survey, .. } => self.seen.surveys.push(survey),
            Event::Ended { request, how, left } => self.seen.ended.push((request, how, left, self.now)),
            Event::Leaving(_) => {}
            Event::Closed(why) => assert!(self.seen.closed.replace(why).is_none(), "closed twice"),
        }
    }

    fn arrived(&mut self, arrived: &Arrived) {
        let id = self.store.chunk(&self.asked[&arrived.request], arrived.ordinal);
        assert_eq!(arrived.encoded.bytes, self.store.stored(&id));
        assert_eq!(arrived.plain_len, self.store.len_of(&id));
        *self.seen.chunks.entry(id).or_default() += 1;
        match self.reader {
            None => self.requester.release(arrived.charge, self.now),
            Some(rate) => {
                let begin = self.releases.back().map_or(self.now, |(at, _)| (*at).max(self.now));
                let time = Duration::from_secs_f64(arrived.charge as f64 / rate as f64);
                self.releases.push_back((begin + time, arrived.charge));
            }
        }
    }

    fn meet(&mut self, demand: Demand) {
        match demand {
            Demand::Authorise { request, manifest } => {
                let grant = (manifest == self.store.open).then(|| Arc::clone(&self.store.grant));
                self.provider.granted(request, grant, self.now);
            }
            Demand::Survey { request, manifest, from } => {
                let survey = (manifest == self.store.open).then(|| self.survey(from));
                self.provider.surveyed(request, survey, self.now);
            }
            Demand::Read { request, ordinal, chunk, .. } => {
                let takes =
                    self.read_time.map_or(PATIENCE * 9, |time| time.mul_f64(self.rng.below(200) as f64 / 100.0));
                self.reads.push((self.now + takes, request, ordinal, chunk.id));
            }
            Demand::Abort { request } => self.provider.over(request, self.now),
            Demand::Closed(why) => assert!(self.seen.provider_closed.replace(why).is_none(), "closed twice"),
        }
    }

    /// Ten at a time, to test repeated questions.
    fn survey(&self, from: u32) -> Survey {
        let ids = &self.store.grant.chunks.ids;
        let chunks = u32::try_from(ids.len()).unwrap();
        let upto = chunks.min(from + 10);
        let held = (from..upto).filter(|&n| self.store.held.contains(&ids[n as usize])).collect();
        Survey { chunks, upto, held }
    }

    /// Advances the time to the next event; false if there is none.
    fn advance(&mut self, end: Duration) -> bool {
        let read = self.reads.iter().map(|(at, ..)| *at).min();
        let release = self.releases.front().map(|(at, _)| *at);
        let timeouts = [self.requester.timeout(), self.provider.timeout()];
        let next = [self.up.next(), self.down.next(), read, release].into_iter().chain(timeouts).flatten().min();
        let Some(next) = next else { return false };
        self.now = self.now.max(next.min(end));
        while let Some((lane, bytes)) = self.up.receive(self.now) {
            self.provider.handle(lane, &bytes, self.now);
        }
        while let Some((lane, bytes)) = self.down.receive(self.now) {
            self.requester.handle(lane, &bytes, self.now);
            self.provider.wrote(self.now);
        }
        while let Some(at) = self.reads.iter().position(|(at, ..)| *at <= self.now) {
            let (_, request, ordinal, id) = self.reads.swap_remove(at);
            let supply = self.store.held.contains(&id).then(|| OutgoingFrame {
                encoded: Encoded { codec: Codec::Raw, bytes: self.store.stored(&id), base: None },
                plain_len: self.store.len_of(&id),
            });
            self.provider.supply(request, ordinal, supply, self.now);
        }
        while let Some((_, bytes)) = self.releases.pop_front_if(|(at, _)| *at <= self.now) {
            self.requester.release(bytes, self.now);
        }
        self.requester.expire(self.now);
        self.provider.bytes_received(self.brings * self.now.as_secs());
        self.provider.expire(self.now);
        true
    }
}

/// 100 Mbyte/s, 20 ms, some jitter.
pub(super) fn line() -> LinkProperties {
    let (delay, jitter) = (Duration::from_millis(20), Duration::from_millis(15));
    LinkProperties { delay, jitter, rate: 100_000_000, buffer: usize::try_from(256 * KIB).unwrap() }
}

fn pair(lanes: u32, window: u64, now: Duration) -> (Requester, Provider) {
    let requester = Requester::new(hello(&asker(), window), server(), now).unwrap();
    (requester, Provider::new(hello(&server(), 0), asker(), lanes, now))
}
