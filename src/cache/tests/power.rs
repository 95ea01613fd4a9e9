//! The power goes, or the process dies, after any deed: no wrong byte, pins as promised, and after a kill everything is warm.

use proptest::prelude::*;

use super::medium::Loss;
use super::*;

const NUMBERS: u64 = 60;

/// Knowledge of the user of the cache, up to the moment of the power failure.
#[derive(Default)]
struct Known {
    /// Frames that were acknowledged.
    kept: HashMap<u64, ChunkId>,
    /// Pins that were promised, and those whose end was.
    pins: Vec<PinId>,
    ended: Vec<PinId>,
    /// The pin that was being ended when the power went.
    doubtful: Option<PinId>,
}

/// Uses a cache until the power goes or `steps` are done; returns what was known then, with the cache as it stood.
fn use_it(memory: &Memory, dir: &tempfile::TempDir, steps: u64, seed: u64) -> (Known, Option<Cache>) {
    let (mut rng, mut known) = (Rng(seed | 1), Known::default());
    let open = || Cache::open_on(Arc::new(memory.clone()), dir.path(), options());
    let Ok(mut cache) = open() else { return (known, None) };
    for _ in 0..steps {
        let n = rng.below(NUMBERS);
        match rng.below(20) {
            0 => drop(cache.sync()),
            1 => {
                let pinned = cache.pin(request([n, n + 1, n + 2]));
                if let (Ok(Pinned::Kept(pin)), false) = (pinned, memory.is_off()) {
                    known.pins.push(pin.id);
                }
            }
            2 => {
                let at = rng.below(known.pins.len() as u64 + 1);
                if let Some(id) = known.pins.get(usize::try_from(at).unwrap()).copied() {
                    known.doubtful = Some(id);
                    let unpinned = cache.unpin(id);
                    if unpinned.is_ok() && !memory.is_off() {
                        known.pins.retain(|pin| *pin != id);
                        known.ended.push(id);
                        known.doubtful = None;
                    }
                }
            }
            3 => assert!(cache.evict(rng.below(10) * UNIT) <= SLABS * SLAB_LEN),
            4 => {
                memory.world().available = rng.below(2) * SLABS * SLAB_LEN;
                let _ = cache.trim();
            }
            5 => {
                drop(cache);
                let Ok(again) = open() else { return (known, None) };
                cache = again;
            }
            6..10 => drop(cache.get(&frame(n).id())),
            _ => {
                // One that was evicted since is only there again once that is acknowledged.
                if !cache.contains(&frame(n).id()) {
                    known.kept.remove(&n);
                }
                if cache.insert(&frame(n)) == Inserted::Kept && !memory.is_off() {
                    known.kept.insert(n, frame(n).id());
                }
            }
        }
        if memory.is_off() {
            break;
        }
    }
    (known, Some(cache))
}

/// Opens what is left and holds it against what was known.
fn judge(
    memory: &Memory,
    dir: &tempfile::TempDir,
    known: &Known,
    loss: Loss,
    stood: &[u64],
) -> Result<(), TestCaseError> {
    memory.world().available = u64::MAX / 4;
    let cache = Cache::open_on(Arc::new(memory.clone()), dir.path(), options()).unwrap();
    let pins: Vec<PinId> = cache.pins().iter().map(|pin| pin.id).collect();
    for pin in known.pins.iter().filter(|pin| known.doubtful != Some(**pin)) {
        prop_assert!(pins.contains(pin), "a pin that was promised is lost: {:?}", loss);
    }
    prop_assert!(known.ended.iter().all(|pin| !pins.contains(pin)), "a pin that was ended is back");
    for n in 0..NUMBERS + 2 {
        let found = cache.get(&frame(n).id());
        prop_assert!(found.as_ref().is_none_or(|found| *found == frame(n)), "wrong bytes for {}", n);
        if stood.contains(&n) && loss == Loss::Nothing {
            prop_assert!(found.is_some(), "{} was there when the process died", n);
        }
    }
    if loss == Loss::Nothing {
        prop_assert_eq!(cache.stat().damaged, 0, "a kill damages nothing");
    }
    drop(cache.check());
    // It is a cache like any other: it takes what it is given, and the next restart finds nothing wrong.
    for n in 100..160 {
        prop_assert!(!matches!(cache.insert(&frame(n)), Inserted::Refused(Refusal::Unwritable | Refusal::DiskFull)));
    }
    prop_assert_eq!(cache.check().damaged, []);
    drop(cache);
    let again = Cache::open_on(Arc::new(memory.clone()), dir.path(), options()).unwrap();
    prop_assert_eq!((again.check().damaged, again.stat().damaged), (Vec::new(), 0));
    Ok(())
}

/// Uses a cache with power for `left` deeds, and judges what a kill and what a power loss leave. False if the power lasted.
fn cut(left: usize, steps: u64, seed: u64) -> Result<bool, TestCaseError> {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    memory.world().left = Some(left);
    let (known, cache) = use_it(&memory, &dir, steps, seed);
    let off = memory.is_off();
    let stood: Vec<u64> = match &cache {
        Some(cache) => known.kept.iter().filter(|(_, id)| cache.contains(id)).map(|(n, _)| *n).collect(),
        None => Vec::new(),
    };
    drop(cache);
    for loss in [Loss::Nothing, Loss::Some(seed ^ left as u64), Loss::Some(seed.wrapping_mul(31) + left as u64)] {
        judge(&memory.after(loss), &dir, &known, loss, &stood)?;
    }
    Ok(off)
}

#[test]
fn the_power_goes_after_each_deed_of_a_long_use() {
    let (memory, dir) = (Memory::new(), tempfile::tempdir().unwrap());
    drop(use_it(&memory, &dir, 150, 42));
    let deeds = memory.deeds();
    assert!(deeds > 200, "{deeds} deeds");
    for left in 0..deeds {
        assert!(cut(left, 150, 42).unwrap(), "the power lasted beyond deed {left} of {deeds}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn the_power_goes_after_any_deed_of_any_use(left in 0usize..900, steps in 1u64..400, seed in any::<u64>()) {
        cut(left, steps, seed)?;
    }
}
