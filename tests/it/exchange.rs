//! Exchanges of real agents on loopback, with real certificates: what is near is not fetched from afar, what is afar is fetched
//! once, and who lies, leaves or may not read costs nothing but time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt as _};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use towline::budget::Budget;
use towline::cache::{Cache, CacheOptions};
use towline::clock::{Clock, SystemClock};
use towline::codec::{Codec, Encoded};
use towline::id::{ChunkId, ManifestId};
use towline::metrics::Metric;
use towline::ops::{CollectOptions, Pinning, RestoreOptions, SaveOptions, WarmOptions, Warmed, warm};
use towline::repository::layout::{self, Family};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;
use towline::transfer::exchange::{Exchange, ExchangeOptions, Figures, From, Limits, Local, Policy};
use towline::transfer::identity::{Authority, Credentials, Identity};
use towline::transfer::ledger::{Ledger, Way};
use towline::transfer::local::{LocalSource, attend};
use towline::transfer::peers::{Carriers, Peers, PeersOptions};
use towline::transfer::protocol::{Asked, Grant, Supply, Survey};
use towline::transfer::{Holdings, quic, tcp};
use towline::{ErrorKind, Result};

use crate::data::{name, noise, safetensors, tree_digest};

const MIB: u64 = 1 << 20;

/// One repository, one authority, and a folder for everybody.
struct World {
    dir: TempDir,
    objects: Arc<dyn ObjectStore>,
}

/// An agent in this process.
struct Agent {
    exchange: Arc<Exchange>,
    /// Straight to the store, which counts.
    plain: Repository,
    /// By way of the exchange.
    near: Repository,
    address: String,
    leaving: CancellationToken,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(&dir.path().join("ca"), "test", 10, SystemClock.now()).unwrap();
        Self { dir, objects: Arc::new(InMemory::new()) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn repository(&self, cache: &str) -> Repository {
        let options = OpenOptions { cache: Some(self.path(cache)), memory: Some(128 << 20) };
        Repository::create(Store::from_objects(Arc::clone(&self.objects)), options).await.unwrap().0
    }

    fn credentials(&self, site: &str, agent: &str) -> Credentials {
        let folder = self.path(&format!("tls-{site}-{agent}"));
        let authority = Authority::open(&self.path("ca")).unwrap();
        authority.issue(&Identity::new(site, agent).unwrap(), &folder, (5, SystemClock.now()), true).unwrap();
        Credentials::open(&folder, Arc::new(SystemClock)).unwrap()
    }

    async fn agent(&self, site: &str, agent: &str) -> Agent {
        self.agent_with(site, agent, Policy::everybody(), Carriers::Auto).await
    }

    async fn agent_with(&self, site: &str, agent: &str, policy: Policy, carriers: Carriers) -> Agent {
        let credentials = self.credentials(site, agent);
        let plain = self.repository(&format!("index-{site}-{agent}")).await;
        let cache = CacheOptions { free_floor: 0, ..CacheOptions::new(512 * MIB) };
        let cache = Arc::new(Cache::open(&self.path(&format!("cache-{site}-{agent}")), cache).unwrap());
        let budget = Budget::new(256 * MIB).unwrap();
        let options = PeersOptions { carriers, connections: 2, window: 8 * MIB };
        let peers = Peers::new(credentials.clone(), budget.clone(), options);
        let identity = credentials.identity();
        let exchange =
            Exchange::new(ExchangeOptions { identity, cache, budget, peers, policy, limits: Limits::default() });
        exchange.serve_repository(&plain);
        let leaving = CancellationToken::new();
        let address = serve(&credentials, Arc::clone(&exchange) as Arc<dyn Holdings>, &leaving).await;
        let near = plain.with_source(Arc::clone(&exchange) as Arc<_>);
        Agent { exchange, plain, near, address, leaving }
    }

    /// A folder with tensors and other files, saved as `name`.
    async fn save(&self, repository: &Repository, as_name: &str, seed: u64, mib: usize) -> PathBuf {
        let folder = self.path(&as_name.replace('/', "-"));
        fs::create_dir_all(&folder).unwrap();
        let tensors = [("a", mib << 17), ("b", mib << 17)];
        fs::write(folder.join("model.safetensors"), safetensors(seed, &tensors)).unwrap();
        fs::write(folder.join("notes.txt"), "words ".repeat(40_000)).unwrap();
        repository.save(&folder, &name(as_name), &SaveOptions::default()).await.unwrap();
        folder
    }

    /// Removes every pack: what is restored now comes from elsewhere.
    async fn remove_packs(&self) {
        let prefix = layout::family(Family::Pack);
        let packs: Vec<_> = self.objects.list(Some(&prefix)).map_ok(|meta| meta.location).try_collect().await.unwrap();
        assert!(!packs.is_empty());
        for pack in packs {
            self.objects.delete(&pack).await.unwrap();
        }
    }
}

/// Serves on both carriers at one port.
async fn serve(credentials: &Credentials, holdings: Arc<dyn Holdings>, leaving: &CancellationToken) -> String {
    let listener = tcp::Listener::bind("127.0.0.1:0".parse().unwrap(), credentials.clone()).await.unwrap();
    let address = listener.address().unwrap();
    let datagrams = quic::Listener::bind(address, credentials.clone()).unwrap();
    tokio::spawn(listener.serve(Arc::clone(&holdings), leaving.clone()));
    tokio::spawn(datagrams.serve(holdings, leaving.clone()));
    address.to_string()
}

impl Agent {
    fn knows(&self, others: &[&Self]) {
        others.iter().for_each(|other| self.exchange.peers().add(&other.address).unwrap());
    }

    async fn warm(&self, what: &str, from: From) -> Warmed {
        let options = WarmOptions { from, ..WarmOptions::default() };
        warm(&self.exchange, &self.plain, &name(what), &options).await.unwrap()
    }

    /// Restores to a fresh folder, and compares with `expected`.
    async fn restore(&self, what: &str, expected: &Path) {
        let target = tempfile::tempdir().unwrap();
        let to = target.path().join("restored");
        self.near.restore(&name(what), None, &to, &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(&to), tree_digest(expected));
    }

    fn figures(&self) -> Figures {
        self.exchange.figures()
    }

    /// Bytes that came from the store, whoever asked.
    fn stored_bytes_read(&self) -> u64 {
        self.plain.store().counters().get(Metric::GetBytes)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_restore_reads_no_pack() {
    let world = World::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 1, 24).await;
    agent.restore("run/step-1", &folder).await;
    let first = agent.figures();
    assert!(first.from_repository > 20 * MIB && first.from_cache == 0, "{first:?}");
    world.remove_packs().await;
    agent.restore("run/step-1", &folder).await;
    let second = agent.figures();
    assert_eq!(second.from_repository, first.from_repository);
    assert!(second.from_cache > 20 * MIB, "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_site_is_warmed_from_this_one() {
    let world = World::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    let folder = world.save(&home.plain, "run/step-1", 2, 24).await;
    assert_eq!(home.warm("run/step-1", From::Anywhere).await.missing, 0);
    world.remove_packs().await;
    let warmed = cloud.warm("run/step-1", From::Site("home".to_owned())).await;
    assert_eq!((warmed.missing, warmed.lacking), (0, warmed.chunks));
    let figures = cloud.figures();
    assert_eq!((figures.from_repository, figures.from_remote), (0, warmed.bytes));
    assert_eq!(home.figures().to_remote, warmed.bytes);
    // Again: nothing is lacking, and nothing moves.
    let again = cloud.warm("run/step-1", From::Anywhere).await;
    assert_eq!((again.lacking, cloud.figures().from_remote), (0, warmed.bytes));
    // The ledgers of both say so, and what the sockets carried is little more.
    let (came, went) = (cloud.exchange.peers().ledger(), home.exchange.peers().ledger());
    let moved = |ledger: &Ledger, way: Way| {
        ledger.entries().iter().filter(|entry| entry.way == way).map(|entry| entry.bytes).sum::<u64>()
    };
    assert_eq!((moved(came, Way::In), moved(went, Way::Out)), (warmed.bytes, warmed.bytes));
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
    let world = World::new();
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
    let warmed = futures::future::join_all(gang.iter().map(|agent| agent.warm("run/step-1", From::Anywhere))).await;
    assert!(warmed.iter().all(|warmed| warmed.missing == 0));
    let figures: Vec<Figures> = gang.iter().map(Agent::figures).collect();
    let origin: u64 = figures.iter().map(|figures| figures.from_repository).sum();
    assert!(origin <= warmed[0].bytes * 105 / 100, "{origin} of {}: {figures:?}", warmed[0].bytes);
    let metadata = 4 * MIB;
    let read = gang.iter().map(Agent::stored_bytes_read).sum::<u64>() - before;
    assert!(read <= origin + metadata, "{read} read, {origin} told");
    assert!(figures.iter().all(|figures| figures.from_site > 20 * MIB), "{figures:?}");
    world.remove_packs().await;
    gang[3].restore("run/step-1", &folder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_who_wait_for_the_same_cause_one_fetch() {
    let world = World::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 4, 32).await;
    let restores = (0..6).map(|_| agent.restore("run/step-1", &folder));
    futures::future::join_all(restores).await;
    let figures = agent.figures();
    assert!(figures.from_repository < 36 * MIB, "{figures:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_of_a_node_take_from_its_agent() {
    let world = World::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 5, 24).await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        let (here, there) = tokio::net::UnixStream::pair().unwrap();
        streams.push(here);
        tokio::spawn(attend(there, Arc::new(Local(Arc::clone(&agent.exchange))), agent.leaving.clone()));
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
    assert!(agent.figures().to_local > 2 * 20 * MIB, "{:?}", agent.figures());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_step_moves_what_is_new() {
    let world = World::new();
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
        let before = cloud.figures().from_remote;
        let there = cloud.warm(&format!("run/step-{n}"), From::Site("home".to_owned())).await;
        assert_eq!(there.missing, 0);
        let moved = cloud.figures().from_remote - before;
        assert!(moved <= saved.stored_bytes * 101 / 100, "{moved} moved, {} new", saved.stored_bytes);
        assert!(n == 1 || moved < there.bytes / 2, "{moved} of {}", there.bytes);
    }
    assert_eq!(cloud.figures().from_repository, 0);
    world.remove_packs().await;
    cloud.restore("run/step-2", &folder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_read_gets_nothing() {
    let world = World::new();
    let public = ["public/*".to_owned()];
    let policy = Policy::only([("cloud/*", public.as_slice())]).unwrap();
    let home = world.agent_with("home", "a", policy, Carriers::Auto).await;
    let cloud = world.agent("cloud", "b").await;
    cloud.knows(&[&home]);
    world.save(&home.plain, "public/one", 6, 12).await;
    world.save(&home.plain, "secret/one", 7, 12).await;
    for what in ["public/one", "secret/one"] {
        assert_eq!(home.warm(what, From::Anywhere).await.missing, 0);
    }
    world.remove_packs().await;
    let open = cloud.warm("public/one", From::Site("home".to_owned())).await;
    assert_eq!(open.missing, 0);
    let before = cloud.figures().from_remote;
    let closed = cloud.warm("secret/one", From::Site("home".to_owned())).await;
    // What it has already, because both trees share it, is all that is there.
    assert_eq!((closed.missing, cloud.figures().from_remote), (closed.lacking, before));
}

/// Says that it holds everything, and gives something else.
struct Liar(Arc<Exchange>);

#[async_trait]
impl Holdings for Liar {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        Holdings::authorise(&*self.0, identity, manifest).await
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        let chunks = u32::try_from(grant.chunks.ids.len()).unwrap();
        Ok(Survey { chunks, upto: chunks, held: (from..chunks).collect() })
    }

    async fn frame(&self, _: &Identity, _: &Asked, _: &ChunkId) -> Result<Option<Supply>> {
        let bytes = Bytes::from(noise(9, 1000));
        Ok(Some(Supply { encoded: Encoded { codec: Codec::Raw, bytes, base: None }, plain_len: 1000 }))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_lies_is_not_asked_again_and_nothing_wrong_is_kept() {
    let world = World::new();
    let agent = world.agent("west", "a").await;
    let other = world.agent("west", "other").await;
    let leaving = CancellationToken::new();
    let liar = serve(&world.credentials("west", "liar"), Arc::new(Liar(Arc::clone(&other.exchange))), &leaving).await;
    agent.exchange.peers().add(&liar).unwrap();
    let folder = world.save(&agent.plain, "run/step-1", 8, 24).await;
    agent.restore("run/step-1", &folder).await;
    let figures = agent.figures();
    assert!(figures.untrue >= 1 && figures.from_site == 0, "{figures:?}");
    assert!(agent.exchange.cache().check().damaged.is_empty());
    let stat = &agent.exchange.peers().list()[0];
    assert!(stat.error.is_some() && stat.carrier.is_none(), "{stat:?}");
    assert!(agent.exchange.peers().live().await.is_empty());
}

/// Gives what another has, each chunk after a minute.
struct Slow(Arc<Exchange>);

#[async_trait]
impl Holdings for Slow {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        Holdings::authorise(&*self.0, identity, manifest).await
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        Holdings::survey(&*self.0, grant, from).await
    }

    async fn frame(&self, identity: &Identity, asked: &Asked, id: &ChunkId) -> Result<Option<Supply>> {
        tokio::time::sleep(Duration::from_mins(1)).await;
        Holdings::frame(&*self.0, identity, asked, id).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_slower_than_going_direct_is_dropped() {
    let world = World::new();
    let (agent, other) = (world.agent("west", "a").await, world.agent("west", "other").await);
    let leaving = CancellationToken::new();
    let slow = serve(&world.credentials("west", "slow"), Arc::new(Slow(Arc::clone(&other.exchange))), &leaving).await;
    let folder = world.save(&agent.plain, "run/step-1", 15, 24).await;
    assert_eq!(other.warm("run/step-1", From::Anywhere).await.missing, 0);
    // It knows how fast the repository is.
    world.save(&agent.plain, "first", 16, 12).await;
    assert_eq!(agent.warm("first", From::Anywhere).await.missing, 0);
    agent.exchange.peers().add(&slow).unwrap();
    assert_eq!(agent.exchange.peers().live().await.len(), 1);
    // The protocol's own watchdog would take half a minute.
    let restored = tokio::time::timeout(Duration::from_secs(25), agent.restore("run/step-1", &folder)).await;
    assert!(restored.is_ok());
    assert_eq!(agent.figures().from_site, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_peer_goes_in_the_middle_the_rest_comes_from_elsewhere() {
    for carriers in [Carriers::Quic, Carriers::Tcp] {
        let world = World::new();
        let agent = world.agent_with("west", "a", Policy::everybody(), carriers).await;
        let (first, second) = (world.agent("west", "b").await, world.agent("west", "c").await);
        let folder = world.save(&agent.plain, "run/step-1", 10, 64).await;
        for other in [&first, &second] {
            assert_eq!(other.warm("run/step-1", From::Anywhere).await.missing, 0);
        }
        agent.knows(&[&first, &second]);
        assert_eq!(agent.exchange.peers().live().await.len(), 2);
        let gone = first.address.clone();
        let cut = async {
            while agent.figures().from_site < 4 * MIB {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // Its end of every connection breaks.
            agent.exchange.peers().remove(&gone);
        };
        let (warmed, ()) = tokio::join!(agent.warm("run/step-1", From::Anywhere), cut);
        assert_eq!(warmed.missing, 0);
        world.remove_packs().await;
        agent.restore("run/step-1", &folder).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_are_renewed_and_refused_with_what_they_lack() {
    let world = World::new();
    let agent = world.agent("west", "a").await;
    world.save(&agent.plain, "run/step-1", 11, 12).await;
    let pinned = |owner: &str| WarmOptions {
        pin: Some(Pinning { owner: owner.to_owned(), expires: None }),
        ..WarmOptions::default()
    };
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
    let before = agent.figures();
    let error = warm(&agent.exchange, &agent.plain, &name("big"), &pinned("me")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(format!("{error:?}").contains("bytes too few"), "{error:?}");
    assert_eq!(agent.figures(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_repacked_meanwhile_is_found_again() {
    let world = World::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 13, 12).await;
    let gone = world.save(&agent.plain, "run/step-2", 14, 12).await;
    drop(fs::remove_dir_all(gone));
    let other = world.repository("index-other").await;
    other.remove(&name("run/step-2")).await.unwrap();
    let options = CollectOptions { grace: Duration::ZERO, ..CollectOptions::default() };
    for _ in 0..3 {
        other.collect(&options).await.unwrap();
    }
    agent.restore("run/step-1", &folder).await;
}
