//! One direction of one node's link, as arithmetic: when a packet that arrives now comes out at the other end, if it does.

/// How long a link may have been idle and still catch up, in nanoseconds: the forwarder is a thread that wakes late.
const CATCH_UP: u64 = 4_000_000;

/// Properties of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// Bits a second; 0 is without bound.
    pub(crate) rate: u64,
    /// Nanoseconds on the way, after the last bit has left.
    pub(crate) delay: u64,
    /// The share of packets that never arrive, 0 to 1.
    pub(crate) loss: f64,
    /// Bytes that may wait to be sent.
    pub(crate) queue: u64,
}

/// Fates of packets: numbers of packets, and bytes as IP counts them (headers of IP included).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    /// Lost by chance, after they had taken their time on the link.
    pub(crate) lost_packets: u64,
    pub(crate) lost_bytes: u64,
    /// Found the queue full: they were never on the link.
    pub(crate) refused_packets: u64,
    pub(crate) refused_bytes: u64,
}

/// A link in one direction.
#[derive(Debug)]
pub(crate) struct Lane {
    shape: Shape,
    /// When the last bit of what was accepted so far has left, in nanoseconds.
    free_at: u64,
    chance: Chance,
    counts: Counts,
}

impl Lane {
    pub(crate) const fn new(shape: Shape, seed: u64) -> Self {
        Self { shape, free_at: 0, chance: Chance(seed), counts: Counts { ..NOTHING } }
    }

    pub(crate) const fn counts(&self) -> Counts {
        self.counts
    }

    /// When a packet of `len` bytes that arrives at `now` comes out; None if it does not.
    pub(crate) fn pass(&mut self, now: u64, len: usize) -> Option<u64> {
        let len = len as u64;
        let waiting = u128::from(self.free_at.saturating_sub(now)) * u128::from(self.shape.rate) / 8_000_000_000;
        if waiting + u128::from(len) > u128::from(self.shape.queue) {
            self.counts.refused_packets += 1;
            self.counts.refused_bytes += len;
            return None;
        }
        let takes = (len * 8_000_000_000).checked_div(self.shape.rate).unwrap_or(0);
        self.free_at = self.free_at.max(now.saturating_sub(CATCH_UP)) + takes;
        if self.chance.happens(self.shape.loss) {
            self.counts.lost_packets += 1;
            self.counts.lost_bytes += len;
            return None;
        }
        self.counts.packets += 1;
        self.counts.bytes += len;
        Some(self.free_at.max(now) + self.shape.delay)
    }
}

const NOTHING: Counts =
    Counts { packets: 0, bytes: 0, lost_packets: 0, lost_bytes: 0, refused_packets: 0, refused_bytes: 0 };

/// Random numbers that are the same in each run: `SplitMix64` (<https://prng.di.unimi.it/splitmix64.c>).
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn happens(&mut self, share: f64) -> bool {
        share > 0.0 && ((self.next() >> 11) as f64) < share * (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn lane(rate: u64, loss: f64, queue: u64) -> Lane {
        Lane::new(Shape { rate, delay: 10 * MS, loss, queue }, 7)
    }

    #[test]
    fn packets_leave_one_after_the_other_at_the_rate_and_come_out_after_the_delay() {
        let mut lane = lane(12_000_000, 0.0, u64::MAX);
        // 1,500 bytes take 1 ms. A link that was idle may be 4 ms behind.
        let out: Vec<u64> = (0..8).map(|_| lane.pass(100 * MS, 1500).unwrap() / MS).collect();
        assert_eq!(out, [110, 110, 110, 110, 111, 112, 113, 114]);
        assert_eq!(lane.pass(200 * MS, 1500), Some(210 * MS));
        assert_eq!((lane.counts().packets, lane.counts().bytes), (9, 9 * 1500));
    }

    #[test]
    fn a_full_queue_refuses_until_it_has_drained() {
        let mut lane = lane(12_000_000, 0.0, 3000);
        let passed = (0..10).filter(|_| lane.pass(100 * MS, 1500).is_some()).count();
        assert_eq!((passed, lane.counts().refused_packets), (6, 4), "four that catch up, two that wait");
        assert!(lane.pass(100 * MS + MS / 2, 1500).is_none(), "half a packet has left");
        assert!(lane.pass(101 * MS, 1500).is_some(), "one has");
    }

    #[test]
    fn as_many_are_lost_as_asked_and_the_same_ones_each_time() {
        let lost = || {
            let mut lane = lane(0, 0.01, u64::MAX);
            let lost: Vec<usize> = (0..100_000).filter(|_| lane.pass(0, 1500).is_none()).collect();
            assert_eq!(lane.counts().lost_packets, lost.len() as u64);
            lost
        };
        assert!((900..1100).contains(&lost().len()), "{} of 100,000", lost().len());
        assert_eq!(lost(), lost());
    }
}
