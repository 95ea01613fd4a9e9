//! Decisions without a disk: how well room is used, and that the journal leads to the same state.

use super::*;

const SLAB_UNITS: u32 = 16_384;
const SLABS: usize = 16;

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn state() -> State {
    let mut state = State::new(SLAB_UNITS, 5);
    (0..SLABS).for_each(|slab| assert!(state.allocator.add(slab)));
    state
}

/// Frames from 4 KiB to 4 MiB, every order of magnitude as often: the worst mixture for a room without holes.
fn weight_of(key: u64) -> u16 {
    let mut rng = Rng(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    (0..3).for_each(|_| assert!(rng.below(2) < 2));
    let most = 1 << rng.below(10);
    u16::try_from(most + rng.below(most)).unwrap()
}

/// Reads `key`, bringing it in if it is not there; false if a region had to be cleared, which is done here by evicting what is in it.
fn read(state: &mut State, key: u64) -> bool {
    let weight = weight_of(key);
    let mut straight = true;
    loop {
        match state.queue.touch(key).map_or_else(|| state.admit(key, weight, false), |_| Admission::Known) {
            Admission::Known => return straight,
            Admission::At(place) => {
                assert!(state.publish(key, place, weight));
                return straight;
            }
            Admission::Clear(places) => {
                straight = false;
                let chunks: Vec<Resident> = state.residents_in(&places, 0..usize::MAX).collect();
                for chunk in chunks.into_iter().filter(|chunk| chunk.standing != QueueKind::Held) {
                    assert!(state.remove(chunk.key, chunk.place, true));
                }
            }
            other => {
                panic!("{other:?} for {weight} units with {} of {}", state.allocator.taken(), state.allocator.total())
            }
        }
    }
}

#[test]
fn room_is_used_well_whatever_is_mixed() {
    let mut state = state();
    let mut rng = Rng(3);
    let (mut used, mut cleared, mut steps) = (0.0, 0, 0);
    for step in 0..50_000u64 {
        // Half new, half from a set that is larger than the cache, the lower the hotter.
        let key = if rng.below(2) == 0 { 1_000_000 + step } else { rng.below(8000).min(rng.below(8000)) };
        cleared += u32::from(!read(&mut state, key));
        state.pending.clear();
        if step > 25_000 {
            used += state.allocator.taken() as f64 / state.allocator.total() as f64;
            steps += 1;
        }
    }
    let used = used / f64::from(steps);
    println!("{:.1} % used, {cleared} regions cleared", used * 100.0);
    assert!(used > 0.85, "only {used} of the room is used");
    assert!(cleared < 200, "{cleared} regions were cleared");
}

#[test]
fn the_journal_leads_to_the_same_state() {
    let (mut first, mut again) = (state(), State::new(SLAB_UNITS, 9));
    let mut rng = Rng(4);
    for step in 0..8000u64 {
        read(&mut first, rng.below(1000 + step));
        if let Some(chunk) = first.queue.peek(rng.below(1000)).filter(|_| step % 7 == 0) {
            assert!(first.remove(chunk.key, chunk.place, true));
        }
        let pending = std::mem::take(&mut first.pending);
        assert!(pending.into_iter().all(|record| again.replay(record)), "step {step}");
    }
    let places = |state: &State| {
        let mut found: Vec<_> =
            state.queue.among(0..usize::MAX).map(|c| (c.key, c.place, c.weight, c.standing)).collect();
        found.sort_unstable_by_key(|(key, ..)| *key);
        found
    };
    assert_eq!(places(&again), places(&first));
    assert_eq!(again.allocator.taken(), first.allocator.taken());
    let mut third = State::new(SLAB_UNITS, 1);
    assert!(first.snapshot().into_iter().all(|record| third.replay(record)));
    assert_eq!(places(&third), places(&first));
    let clash = first.queue.among(0..usize::MAX).next().unwrap();
    assert!(!third.replay(Record::Insert(Resident { key: u64::MAX, ..clash })), "two chunks at one place");
}
