//! Network in virtual time: lanes that keep order within, but not among each other; with delay, rate, small buffers,
//! faults.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Deterministic stream of numbers.
#[derive(Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Xorshift (<https://www.jstatsoft.org/article/view/v008i14>).
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }
}

/// Properties of a network.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkProperties {
    pub(super) delay: Duration,
    /// Maximum additional delay of each piece: lanes overtake each other.
    pub(super) jitter: Duration,
    /// Bytes a second, each way.
    pub(super) rate: u64,
    /// Bytes that one lane accepts before the sender has to wait.
    pub(super) buffer: usize,
}

/// One direction.
#[derive(Debug)]
pub(super) struct Channel {
    line: LinkProperties,
    /// Time when the line is free for the next byte.
    free: Duration,
    lanes: BTreeMap<u32, VecDeque<(Duration, Vec<u8>)>>,
    /// Drops everything without an error.
    pub(super) black: bool,
    /// Bytes that were delivered.
    pub(super) delivered: u64,
}

impl Channel {
    pub(super) fn new(line: LinkProperties) -> Self {
        Self { line, free: Duration::ZERO, lanes: BTreeMap::new(), black: false, delivered: 0 }
    }

    /// True if `lane` accepts more now.
    pub(super) fn takes(&self, lane: u32) -> bool {
        let waiting: usize = self.lanes.get(&lane).map_or(0, |lane| lane.iter().map(|(_, piece)| piece.len()).sum());
        waiting < self.line.buffer
    }

    /// Sends bytes on `lane`, in pieces.
    pub(super) fn send(&mut self, lane: u32, bytes: &[u8], now: Duration, rng: &mut Rng) {
        let queue = self.lanes.entry(lane).or_default();
        for piece in bytes.chunks(1 + usize::try_from(rng.below(40_000)).unwrap()) {
            let seconds = Duration::from_secs_f64(piece.len() as f64 / self.line.rate as f64);
            self.free = self.free.max(now) + seconds;
            let jitter = self.line.jitter.mul_f64(rng.below(1000) as f64 / 1000.0);
            let earliest = queue.back().map_or(Duration::ZERO, |(arrival, _)| *arrival);
            queue.push_back(((self.free + self.line.delay + jitter).max(earliest), piece.to_vec()));
        }
    }

    /// Time of the next arrival.
    pub(super) fn next(&self) -> Option<Duration> {
        let heads = self.lanes.values().filter_map(|lane| lane.front().map(|(arrival, _)| *arrival));
        heads.min().filter(|_| !self.black)
    }

    /// One piece that has arrived by `now`.
    pub(super) fn receive(&mut self, now: Duration) -> Option<(u32, Vec<u8>)> {
        let due = |lane: &VecDeque<(Duration, Vec<u8>)>| lane.front().is_some_and(|(arrival, _)| *arrival <= now);
        let (&lane, queue) = self.lanes.iter_mut().find(|(_, lane)| due(lane))?;
        let (_, piece) = queue.pop_front().filter(|_| !self.black)?;
        self.delivered += piece.len() as u64;
        Some((lane, piece))
    }
}
