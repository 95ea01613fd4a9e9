//! What is near is not fetched from afar, and what is afar is fetched once. G5 of docs/semantics.md.

use towline::ErrorKind;
use towline::agent::Pinning;
use towline::policy::LocalCaller;
use towline::transfer::exchange::Local;
use towline::transfer::ledger::{Direction, Ledger};
use towline::transfer::local::{LocalSource, serve_local};

use super::*;
use crate::data::noise;

#[tokio::test(flavor = "multi_thread")]
async fn the_second_restore_reads_no_pack() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 1, 24).await;
    agent.restore("run/step-1", &folder).await;
    let first = agent.stats();
    assert!(first.from_repository > 20 * MIB && first.from_cache == 0, "{first:?}");
    world.remove_packs().await;
    agent.restore("run/step-1", &folder).await;
    let second = agent.stats();
    assert_eq!(second.from_repository, first.from_repository);
    assert!(second.from_cache > 20 * MIB, "{second:?}");
}

/// Other warms run at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_evicted_between_the_plan_of_a_warm_and_its_pin_is_fetched_again() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    world.save(&agent.plain, "set", 8, 4).await;
    let saved = agent.plain.saved(&name("set")).await.unwrap().shared();
    for pin in [None, Some(Pinning::new("me", None))] {
        agent.warm("set", From::Anywhere).await;
        let tree = (Arc::clone(&saved), (0..saved.located_chunks()).collect());
        let plans = agent.exchange.travel(&agent.plain, vec![tree], &FetchPolicy::default()).await.unwrap();
        assert!(plans[0].as_stored.is_empty() && agent.exchange.cache().evict(u64::MAX) > 0);
        let options = WarmOptions { pin, plan: plans.into_iter().next().map(Arc::new), ..WarmOptions::default() };
        let warmed = warm(&agent.exchange, &agent.plain, &name("set"), &options).await.unwrap();
        assert_eq!((warmed.missing, warmed.full, warmed.fetched), (0, false, warmed.chunks));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_site_is_warmed_from_this_one() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    let folder = world.save(&home.plain, "run/step-1", 2, 24).await;
    assert_eq!(home.warm("run/step-1", From::Anywhere).await.missing, 0);
    world.remove_packs().await;
    let warmed = cloud.warm("run/step-1", From::Site("home".to_owned())).await;
    assert_eq!((warmed.missing, warmed.lacking), (0, warmed.chunks));
    let stats = cloud.stats();
    assert_eq!((stats.from_repository, stats.from_remote), (0, warmed.bytes));
    assert_eq!(home.stats().to_remote, warmed.bytes);
    // Again: nothing is lacking, and nothing moves.
    let again = cloud.warm("run/step-1", From::Anywhere).await;
    assert_eq!((again.lacking, cloud.stats().from_remote), (0, warmed.bytes));
    // The ledgers of both say so, and what the sockets carried is little more.
    let (came, went) = (cloud.exchange.peers().ledger(), home.exchange.peers().ledger());
    let moved = |ledger: &Ledger, way: Direction| {
        ledger.entries().iter().filter(|entry| entry.way == way).map(|entry| entry.bytes).sum::<u64>()
    };
    assert_eq!((moved(came, Direction::In), moved(went, Direction::Out)), (warmed.bytes, warmed.bytes));
    let stored = |ledger: &Ledger| ledger.entries().iter().map(|entry| entry.stored_bytes).sum::<u64>();
    assert_eq!((stored(came), stored(went)), (warmed.bytes, warmed.bytes), "they moved as they are stored");
    home.leaving.cancel();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let received: u64 = came.links().iter().map(|link| link.received).sum();
    let sent: u64 = went.links().iter().map(|link| link.sent).sum();
    assert!(received >= warmed.bytes && received < warmed.bytes * 108 / 100, "{received} for {}", warmed.bytes);
    // Both look now and then, and a last time.
    assert!(sent.abs_diff(received) < received / 50, "{sent} sent, {received} received");
    cloud.restore("run/step-1", &folder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_gang_costs_the_origin_one_copy() {
    let world = Fixture::new();
    let mut gang = Vec::new();
    for n in 0..4 {
        gang.push(world.agent("west", &format!("agent-{n}")).await);
    }
    for agent in &gang {
        let others: Vec<&Agent> = gang.iter().filter(|other| other.address != agent.address).collect();
        agent.knows(&others);
    }
    let folder = world.save(&gang[0].plain, "run/step-1", 3, 96).await;
    // Everybody knows everybody before it begins.
    for agent in &gang {
        assert_eq!(agent.exchange.peers().live().await.len(), 3);
    }
    let before: u64 = gang.iter().map(Agent::stored_bytes_read).sum();
    // A peer that is much slower than the origin is done without. Beside a busy machine any peer is slow: the origin must be far.
    world.origin_is_far(Duration::from_secs(2));
    let warmed = futures::future::join_all(gang.iter().map(|agent| agent.warm("run/step-1", From::Anywhere))).await;
    assert!(warmed.iter().all(|warmed| warmed.missing == 0));
    let stats: Vec<TransferStats> = gang.iter().map(Agent::stats).collect();
    let origin: u64 = stats.iter().map(|stats| stats.from_repository).sum();
    assert!(origin <= warmed[0].bytes * 105 / 100, "{origin} of {}: {stats:?}", warmed[0].bytes);
    let metadata = 4 * MIB;
    let read = gang.iter().map(Agent::stored_bytes_read).sum::<u64>() - before;
    assert!(read <= origin + metadata, "{read} read, {origin} told");
    assert!(stats.iter().all(|stats| stats.from_site > 20 * MIB), "{stats:?}");
    // Who brings for three others reads from its cache what they wait for, and not all of a unit for each chunk of it.
    let own = warmed[0].bytes;
    assert!(stats.iter().all(|stats| stats.from_cache <= stats.to_site + own), "{stats:?}");
    world.remove_packs().await;
    gang[3].restore("run/step-1", &folder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_who_wait_for_the_same_cause_one_fetch() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 4, 32).await;
    let restores = (0..6).map(|_| agent.restore("run/step-1", &folder));
    futures::future::join_all(restores).await;
    let stats = agent.stats();
    assert!(stats.from_repository < 36 * MIB, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_of_a_node_take_from_its_agent() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 5, 24).await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        let (here, there) = tokio::net::UnixStream::pair().unwrap();
        streams.push(here);
        let chunks = Local::new(Arc::clone(&agent.exchange), LocalCaller::user("ann"));
        tokio::spawn(serve_local(there, Arc::new(chunks), agent.leaving.clone()));
    }
    let process = world.repository("index-process").await;
    let source = LocalSource::new(streams, process.budget(), 8 * MIB).await.unwrap();
    let near = process.with_source(Arc::new(source));
    for round in 0..2 {
        let to = world.path(&format!("out-{round}"));
        near.restore(&name("run/step-1"), None, &to, &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(&to), tree_digest(&folder));
        if round == 0 {
            world.remove_packs().await;
        }
    }
    assert!(process.store().counters().get(Metric::GetBytes) < MIB);
    assert!(agent.stats().to_local > 2 * 20 * MIB, "{:?}", agent.stats());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_step_moves_what_is_new() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    let folder = world.path("training");
    fs::create_dir_all(&folder).unwrap();
    // Numbers that change little from step to step: stored as differences to the first.
    let step = |n: u32| {
        let weights: Vec<u8> = (0..2u32 << 20)
            .flat_map(|i| (1.0 + (i % 65_536) as f32 / 7e4 + (n * (i % 5)) as f32 * 1e-6).to_le_bytes())
            .collect();
        let header = format!(r#"{{"w":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{}]}}}}"#, 2 << 20, 8 << 20);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.into_bytes());
        file.extend(weights);
        fs::write(folder.join("model.safetensors"), file).unwrap();
    };
    for n in 1..=2 {
        step(n);
        let saved = home.plain.save(&folder, &name(&format!("run/step-{n}")), &SaveOptions::default()).await.unwrap();
        let warmed = home.warm(&format!("run/step-{n}"), From::Anywhere).await;
        assert_eq!(warmed.missing, 0);
        let before = cloud.stats().from_remote;
        let there = cloud.warm(&format!("run/step-{n}"), From::Site("home".to_owned())).await;
        assert_eq!(there.missing, 0);
        let moved = cloud.stats().from_remote - before;
        assert!(moved <= saved.stored_bytes * 101 / 100, "{moved} moved, {} new", saved.stored_bytes);
        assert!(n == 1 || moved < there.bytes / 2, "{moved} of {}", there.bytes);
    }
    assert_eq!(cloud.stats().from_repository, 0);
    world.remove_packs().await;
    cloud.restore("run/step-2", &folder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_are_renewed_and_refused_with_what_they_lack() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    world.save(&agent.plain, "run/step-1", 11, 12).await;
    let pinned = |owner: &str| WarmOptions { pin: Some(Pinning::new(owner, None)), ..WarmOptions::default() };
    let mut pins = Vec::new();
    for _ in 0..2 {
        let warmed = warm(&agent.exchange, &agent.plain, &name("run/step-1"), &pinned("me")).await.unwrap();
        assert_eq!(warmed.missing, 0);
        pins.push(warmed.pin.unwrap());
    }
    let kept = agent.exchange.cache().pins();
    assert_eq!(kept.len(), 1);
    assert_eq!((kept[0].id.to_string(), kept[0].reason.as_str()), (pins[1].clone(), "run/step-1"));
    world.save(&agent.plain, "big", 12, 600).await;
    let before = agent.stats();
    let error = warm(&agent.exchange, &agent.plain, &name("big"), &pinned("me")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(format!("{error:?}").contains(" more"), "{error:?}");
    assert_eq!(agent.stats(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_never_shortens_a_pin_of_the_same_owner() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    world.save(&agent.plain, "run/step-1", 13, 12).await;
    let now = agent.plain.clock().now();
    let end = |hours: u64| Some(now.after(Duration::from_hours(hours)));
    for (expires, expected) in [(end(2), end(2)), (end(1), end(2)), (end(3), end(3)), (None, None), (end(4), None)] {
        let pin = Some(Pinning::new("me", expires));
        let options = WarmOptions { pin, ..WarmOptions::default() };
        warm(&agent.exchange, &agent.plain, &name("run/step-1"), &options).await.unwrap();
        let ends: Vec<_> = agent.exchange.cache().pins().iter().map(|pin| pin.expires).collect();
        assert_eq!(ends, [expected]);
    }
}

/// A tree of more chunks than one request may name.
#[tokio::test(flavor = "multi_thread")]
async fn many_small_chunks_are_asked_for_in_pieces() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    let folder = world.path("small");
    fs::create_dir_all(&folder).unwrap();
    for n in 0..3000u64 {
        fs::write(folder.join(format!("{n}")), noise(n + 100, 900)).unwrap();
    }
    agent.plain.save(&folder, &name("small"), &SaveOptions::default()).await.unwrap();
    assert_eq!(agent.warm("small", From::Anywhere).await.missing, 0);
    world.remove_packs().await;
    let (here, there) = tokio::net::UnixStream::pair().unwrap();
    let chunks = Local::new(Arc::clone(&agent.exchange), LocalCaller::user("ann"));
    tokio::spawn(serve_local(there, Arc::new(chunks), agent.leaving.clone()));
    let process = world.repository("index-process").await;
    let source = LocalSource::new(vec![here], process.budget(), 8 * MIB).await.unwrap();
    let to = world.path("out");
    process.with_source(Arc::new(source)).restore(&name("small"), None, &to, &RestoreOptions::default()).await.unwrap();
    assert_eq!(tree_digest(&to), tree_digest(&folder));
}
