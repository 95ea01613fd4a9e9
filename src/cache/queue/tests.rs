//! The queue beside a plain S3-FIFO and an LRU, on what training does to a cache.

use std::collections::{HashMap, VecDeque};

use super::*;

/// A cache of some units, as an eviction policy sees it: a read says whether it was a hit, a miss brings the chunk in.
trait Policy {
    fn read(&mut self, key: u64, weight: u16) -> bool;
}

struct Ours {
    queue: Queue,
    capacity: u64,
}

impl Ours {
    fn new(capacity: u64) -> Self {
        let mut queue = Queue::new(0x1234_5678_9abc_def1);
        queue.set_capacity(capacity);
        Self { queue, capacity }
    }
}

impl Policy for Ours {
    fn read(&mut self, key: u64, weight: u16) -> bool {
        if self.queue.touch(key).is_some() {
            return true;
        }
        let taken = |queue: &Queue| queue.evictable_weight() + queue.held_weight();
        while taken(&self.queue) + u64::from(weight) > self.capacity {
            self.queue.evict(drop).unwrap();
        }
        self.queue.admit(key, 0, weight);
        false
    }
}

/// Algorithm 1 of the paper as it stands there, with sizes in units.
#[derive(Default)]
struct Reference {
    capacity: u64,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghost: VecDeque<u64>,
    /// Weight, frequency.
    chunks: HashMap<u64, (u16, u8)>,
    ghosts: HashMap<u64, u16>,
    small_size: u64,
    main_size: u64,
}

impl Reference {
    fn main_share(&self) -> u64 {
        self.capacity - self.capacity / 10
    }

    fn evict(&mut self) {
        if self.small_size >= self.capacity / 10 || self.main.is_empty() {
            while let Some(key) = self.small.pop_front() {
                let (weight, frequency) = self.chunks[&key];
                self.small_size -= u64::from(weight);
                if frequency > 1 {
                    self.chunks.insert(key, (weight, 0));
                    self.main.push_back(key);
                    self.main_size += u64::from(weight);
                    if self.main_size > self.main_share() {
                        return self.evict_main();
                    }
                } else {
                    self.chunks.remove(&key);
                    self.ghost.push_back(key);
                    self.ghosts.insert(key, weight);
                    while self.ghosts.values().map(|w| u64::from(*w)).sum::<u64>() > self.main_share() {
                        let oldest = self.ghost.pop_front().unwrap();
                        self.ghosts.remove(&oldest);
                    }
                    return;
                }
            }
        }
        self.evict_main();
    }

    fn evict_main(&mut self) {
        while let Some(key) = self.main.pop_front() {
            let (weight, frequency) = self.chunks[&key];
            if frequency == 0 {
                self.chunks.remove(&key);
                self.main_size -= u64::from(weight);
                return;
            }
            self.chunks.insert(key, (weight, frequency - 1));
            self.main.push_back(key);
        }
    }
}

impl Policy for Reference {
    fn read(&mut self, key: u64, weight: u16) -> bool {
        if let Some((_, frequency)) = self.chunks.get_mut(&key) {
            *frequency = (*frequency + 1).min(3);
            return true;
        }
        while self.small_size + self.main_size + u64::from(weight) > self.capacity {
            self.evict();
        }
        self.chunks.insert(key, (weight, 0));
        if self.ghosts.remove(&key).is_some() {
            self.ghost.retain(|ghost| *ghost != key);
            self.main.push_back(key);
            self.main_size += u64::from(weight);
        } else {
            self.small.push_back(key);
            self.small_size += u64::from(weight);
        }
        false
    }
}

#[derive(Default)]
struct Lru {
    capacity: u64,
    taken: u64,
    clock: u64,
    chunks: HashMap<u64, (u64, u16)>,
    order: std::collections::BTreeMap<u64, u64>,
}

impl Policy for Lru {
    fn read(&mut self, key: u64, weight: u16) -> bool {
        self.clock += 1;
        let hit = self.chunks.remove(&key).is_some_and(|(at, weight)| {
            self.order.remove(&at);
            self.taken -= u64::from(weight);
            true
        });
        while self.taken + u64::from(weight) > self.capacity {
            let (_, oldest) = self.order.pop_first().unwrap();
            self.taken -= u64::from(self.chunks.remove(&oldest).unwrap().1);
        }
        self.order.insert(self.clock, key);
        self.chunks.insert(key, (self.clock, weight));
        self.taken += u64::from(weight);
        hit
    }
}

/// A small generator, so that a workload can be repeated.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Chunks of 16 to 256 units; the same chunk always has the same weight.
fn weigh(key: u64) -> u16 {
    u16::try_from(16 + key.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 240).unwrap()
}

/// Six epochs over 40 shards of 50 chunks, in another order of shards each time; each shard is read through by two loader
/// processes, one a little behind the other. Beside it, an evaluation reads the same 4 shards after every tenth one.
fn epochs() -> Vec<u64> {
    let mut rng = Rng(7);
    let mut reads = Vec::new();
    for _ in 0..6 {
        let mut shards: Vec<u64> = (0..40).collect();
        for i in (1..shards.len()).rev() {
            shards.swap(i, usize::try_from(rng.below(i as u64 + 1)).unwrap());
        }
        for (n, shard) in shards.into_iter().enumerate() {
            for chunk in 0..60 {
                reads.extend((chunk < 50).then_some(shard * 1000 + chunk));
                reads.extend((chunk >= 10).then(|| shard * 1000 + chunk - 10));
            }
            if n % 10 == 9 {
                reads.extend((0..4).flat_map(|shard| (0..50).map(move |chunk| 900_000 + shard * 1000 + chunk)));
            }
        }
    }
    reads
}

/// Checkpoints of 400 chunks, a fifth of each as it was in the steps before. Every step passes through once, on its way to
/// another site; from every third one, 8 nodes restart within a while, each at its own pace, and read the base model that all
/// start from as well.
fn fan_out() -> Vec<u64> {
    let mut rng = Rng(11);
    let mut reads = Vec::new();
    let chunk_of = |step: u64, chunk: u64| (if chunk.is_multiple_of(5) { step / 4 } else { step }) * 1000 + chunk;
    for step in 1..60u64 {
        reads.extend((0..400).map(|chunk| chunk_of(step, chunk)));
        if step % 3 > 0 {
            continue;
        }
        let mut readers: Vec<(u64, u64)> = (0..8).map(|_| (step, 0)).chain((0..8).map(|_| (0, 0))).collect();
        while !readers.is_empty() {
            let at = usize::try_from(rng.below(readers.len() as u64)).unwrap();
            let (step, chunk) = &mut readers[at];
            reads.push(chunk_of(*step, *chunk));
            *chunk += 1;
            if *chunk == 400 {
                readers.swap_remove(at);
            }
        }
    }
    reads
}

/// A hot set of 300 chunks, the lower the hotter, while something scans through data that nobody reads again.
fn scan_and_hot_set() -> Vec<u64> {
    let mut rng = Rng(13);
    let mut scanned = 1_000_000;
    let mut read = |_| {
        if rng.below(2) == 0 {
            scanned += 1;
            return scanned;
        }
        rng.below(300).min(rng.below(300))
    };
    (0..60_000).map(&mut read).collect()
}

fn hit_ratio(policy: &mut dyn Policy, reads: &[u64]) -> f64 {
    let hits = reads.iter().filter(|&&key| policy.read(key, weigh(key))).count();
    hits as f64 / reads.len() as f64
}

#[test]
fn hit_ratios_are_those_of_the_paper_and_above_lru() {
    // The capacity as a number of chunks of the usual weight: a part of a data set of 2000, some checkpoints of 400, of a hot set of 300.
    let workloads = [
        ("epochs", epochs(), [200, 500]),
        ("fan-out", fan_out(), [1200, 1400]),
        ("scan", scan_and_hot_set(), [75, 200]),
    ];
    for (name, reads, capacities) in workloads {
        for capacity in capacities.map(|chunks| chunks * 136) {
            let ours = hit_ratio(&mut Ours::new(capacity), &reads);
            let reference = hit_ratio(&mut Reference { capacity, ..Reference::default() }, &reads);
            let lru = hit_ratio(&mut Lru { capacity, ..Lru::default() }, &reads);
            println!("{name} in {capacity} units: {ours:.4}, reference {reference:.4}, LRU {lru:.4}");
            assert!((ours - reference).abs() <= 0.01, "{name} in {capacity}: {ours}, the reference has {reference}");
            assert!(ours > lru, "{name} in {capacity}: {ours}, LRU has {lru}");
        }
    }
}

#[test]
fn what_is_held_stays_whatever_is_read() {
    let mut ours = Ours::new(100_000);
    let pinned: Vec<u64> = (0..300).map(|n| 5_000_000 + n).collect();
    for &key in &pinned {
        ours.read(key, weigh(key));
        assert!(ours.queue.hold(key));
    }
    ours.queue.set_capacity(ours.capacity - ours.queue.held_weight());
    for key in scan_and_hot_set() {
        ours.read(key, weigh(key));
    }
    assert!(pinned.iter().all(|key| ours.queue.peek(*key).is_some_and(|chunk| chunk.standing == QueueKind::Held)));
    assert!(pinned.iter().all(|key| ours.queue.release(*key)));
    for key in 9_000_000..9_002_000 {
        ours.read(key, weigh(key));
    }
    assert!(pinned.iter().all(|key| ours.queue.peek(*key).is_none()), "what was released leaves in its turn");
}

#[test]
fn the_order_can_be_written_down_and_read_again() {
    let mut ours = Ours::new(20_000);
    for key in fan_out().into_iter().take(9000) {
        ours.read(key, weigh(key));
    }
    let order: Vec<Resident> = ours.queue.in_order().collect();
    let mut again = Ours::new(20_000);
    order.iter().for_each(|chunk| again.queue.put(*chunk));
    assert_eq!(again.queue.in_order().collect::<Vec<_>>(), order);
    assert_eq!(again.queue.len(), order.len() as u64);
    assert_eq!(again.queue.evict(drop), ours.queue.evict(drop));
    let mut sorted: Vec<u64> = again.queue.among(0..usize::MAX).map(|chunk| chunk.key).collect();
    sorted.sort_unstable();
    let mut keys: Vec<u64> = again.queue.in_order().map(|chunk| chunk.key).collect();
    keys.sort_unstable();
    assert_eq!(sorted, keys);
}

#[test]
fn a_node_is_as_small_as_is_said() {
    assert_eq!(size_of::<Node>(), 32);
}
