//! A step at a site that holds nothing of it: it moves as the bytes that it would be stored in for itself. D4 of docs/semantics.md.

use async_trait::async_trait;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use towline::codec::{Codec, rounded};
use towline::error::Result;
use towline::id::ManifestId;
use towline::policy::LocalCaller;
use towline::repository::Guard;
use towline::storage::{Location, StoreOptions, open};
use towline::transfer::Transport;
use towline::transfer::exchange::Local;
use towline::transfer::local::{LocalSource, serve_local};
use towline::transfer::protocol::{AskedChunk, FrameRequest, Grant, OutgoingFrame, Survey};

use super::policy::ALL;
use super::*;
use crate::data::noise;
use crate::differences::{file, stored_by, weights};
use crate::predictions::{Training, predicting};

/// A run whose third step is stored as differences to its first, with 16-bit copies that derive from these.
pub(super) async fn run(world: &Fixture, home: &Agent) -> PathBuf {
    let folder = world.path("training");
    fs::create_dir_all(&folder).unwrap();
    for step in 1..=3 {
        write(&folder, step);
        let report = home.plain.save(&folder, &name(&format!("run/step-{step}")), &SaveOptions::default()).await;
        assert!(report.unwrap().new_chunks > 0);
    }
    folder
}

fn write(folder: &Path, step: u32) {
    let weights = weights(step);
    fs::write(folder.join("copy.safetensors"), file(&[("w", "BF16", rounded(&weights))])).unwrap();
    let state = [("exp_avg", "F32", noise(step.into(), 1 << 20)), ("w", "F32", weights)];
    fs::write(folder.join("state.safetensors"), file(&state)).unwrap();
}

/// Bytes that `path` takes in a repository that has nothing else.
async fn stored_alone(path: &Path) -> u64 {
    let alone = Fixture::new();
    let repository = alone.repository("index").await;
    repository.save(path, &name("alone"), &SaveOptions::default()).await.unwrap().stored_bytes
}

fn within(bytes: u64, of: u64, per_mille: u64) -> bool {
    bytes.abs_diff(of) * 1000 <= of * per_mille
}

/// D4: "A step moves to a site that holds nothing of it as the bytes that it would be stored in for itself."
#[tokio::test(flavor = "multi_thread")]
async fn a_step_moves_to_a_cold_site_as_if_it_were_stored_alone() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    cloud.is_linked().await;
    let folder = run(&world, &home).await;
    let saved = home.plain.saved(&name("run/step-3")).await.unwrap();
    let bases = saved.map.further.clone();
    assert!(!bases.is_empty(), "the step is stored as differences to another");
    let warmed = home.warm("run/step-3", From::Anywhere).await;
    assert_eq!((warmed.missing, warmed.alone), (0, 0), "from a store it comes as it is stored");
    world.remove_packs().await;

    let dry = WarmOptions { dry_run: true, ..WarmOptions::default() };
    let planned = warm(&cloud.exchange, &cloud.plain, &name("run/step-3"), &dry).await.unwrap();
    let warmed = cloud.warm("run/step-3", From::Site("home".to_owned())).await;
    let (moved, alone) = (cloud.stats().from_remote, stored_alone(&folder).await);
    assert_eq!((warmed.missing, warmed.estimated), (0, false));
    assert!(warmed.alone > 0 && moved <= alone * 102 / 100, "{moved} moved, {alone} alone: {warmed:?}");
    assert!(within(moved, planned.lacking_bytes, 1), "{moved} moved, {} foreseen", planned.lacking_bytes);
    assert_eq!(warmed.lacking_bytes, planned.lacking_bytes);
    let cache = cloud.exchange.cache();
    assert!(bases.iter().all(|(id, _)| !cache.contains(id)), "no base came");
    // Again nothing is lacking, and what is there is enough.
    let again = cloud.warm("run/step-3", From::Site("home".to_owned())).await;
    assert_eq!((again.lacking, again.bytes, cloud.stats().from_remote), (0, warmed.bytes, moved));
    cloud.restore("run/step-3", &folder).await;
    assert_eq!(cloud.stats().from_repository, 0);
}

/// Address of the agent at `to` in a network that drops UDP: it passes TCP on, and takes datagrams that nobody reads.
async fn without_udp(to: &str) -> (String, UdpSocket) {
    let (tcp, udp) = loop {
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()).await {
            break (tcp, udp);
        }
    };
    let (at, to) = (tcp.local_addr().unwrap().to_string(), to.to_owned());
    tokio::spawn(async move {
        while let Ok((mut from, _)) = tcp.accept().await {
            let mut onward = TcpStream::connect(&to).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut from, &mut onward).await });
        }
    });
    (at, udp)
}

/// A job at a cold site does not wait until a handshake of QUIC has failed, nor does it go to the repository meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_warm_finds_its_peers_also_where_udp_is_blocked() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    run(&world, &home).await;
    home.warm("run/step-3", From::Anywhere).await;
    let (address, _udp) = without_udp(&home.address).await;
    cloud.exchange.peers().add(&address).unwrap();
    // A handshake of QUIC that nobody answers takes ten seconds.
    tokio::time::timeout(Duration::from_secs(9), cloud.is_linked()).await.expect("TCP answers before QUIC has failed");
    let warmed = cloud.warm("run/step-3", From::Anywhere).await;
    assert!(warmed.alone > 0 && warmed.sources.remote > 0, "{warmed:?}");
    assert_eq!((warmed.missing, warmed.sources.repository), (0, 0));
    let transport = cloud.exchange.peers().list().first().and_then(|peer| peer.transport);
    assert_eq!(transport, Some(Transport::Tcp));
}

/// The agents of a gang at two sites want the same chunks without their bases.
#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_is_encoded_once_for_several_cold_sites() {
    let world = Fixture::new();
    let home = world.agent("home", "a").await;
    let clouds = [world.agent("cloud", "b").await, world.agent("burst", "c").await];
    for cloud in &clouds {
        cloud.knows(&[&home]);
        cloud.is_linked().await;
    }
    run(&world, &home).await;
    assert_eq!(home.warm("run/step-3", From::Anywhere).await.missing, 0);
    world.remove_packs().await;
    let from = || From::Site("home".to_owned());
    let (one, other) = tokio::join!(clouds[0].warm("run/step-3", from()), clouds[1].warm("run/step-3", from()));
    assert_eq!((one.missing, other.missing, one.alone), (0, 0, other.alone));
    assert_eq!(home.stats().reencoded, one.alone, "{one:?}");
    for cloud in &clouds {
        let entries = cloud.exchange.peers().ledger().entries();
        let moved: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let stored: u64 = entries.iter().map(|entry| entry.stored_bytes).sum();
        assert_eq!(moved, cloud.stats().from_remote);
        assert!(stored < moved, "as differences they are smaller: {stored} stored, {moved} moved");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_in_16_bits_moves_without_its_masters() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    cloud.is_linked().await;
    let folder = run(&world, &home).await;
    assert_eq!(home.warm("run/step-3", From::Anywhere).await.missing, 0);
    world.remove_packs().await;
    let policy = FetchPolicy { from: From::Site("home".to_owned()), ..FetchPolicy::default() };
    let below = Some(b"copy.safetensors".to_vec());
    let options = WarmOptions { policy, below, ..WarmOptions::default() };
    let warmed = warm(&cloud.exchange, &cloud.plain, &name("run/step-3"), &options).await.unwrap();
    let (moved, alone) = (cloud.stats().from_remote, stored_alone(&folder.join("copy.safetensors")).await);
    assert_eq!(warmed.missing, 0);
    assert!(moved <= alone * 102 / 100, "{moved} moved, {alone} alone: {warmed:?}");
    assert!(within(moved, warmed.lacking_bytes, 1), "{moved} moved, {} foreseen", warmed.lacking_bytes);
}

/// A process asks its agent for a restore; the agent decides how the chunks come.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_through_the_agent_of_a_cold_site_moves_as_little() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    cloud.is_linked().await;
    let folder = run(&world, &home).await;
    assert_eq!(home.warm("run/step-3", From::Anywhere).await.missing, 0);
    world.remove_packs().await;
    let (here, there) = tokio::net::UnixStream::pair().unwrap();
    let chunks = Local::new(Arc::clone(&cloud.exchange), LocalCaller::user("ann"));
    tokio::spawn(serve_local(there, Arc::new(chunks), cloud.leaving.clone()));
    let process = world.repository("index-process").await;
    let source = LocalSource::new(vec![here], process.budget(), 8 * MIB).await.unwrap();
    let near = process.with_source(Arc::new(source));
    let alone = stored_alone(&folder).await;
    for round in 0..2 {
        let to = world.path(&format!("out-{round}"));
        near.restore(&name("run/step-3"), None, &to, &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(&to), tree_digest(&folder));
        let moved = cloud.stats().from_remote;
        assert!(moved <= alone * 102 / 100, "{moved} moved, {alone} alone");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_already_is_built_upon() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    cloud.is_linked().await;
    let folder = run(&world, &home).await;
    for step in ["run/step-1", "run/step-3"] {
        assert_eq!(home.warm(step, From::Anywhere).await.missing, 0);
    }
    world.remove_packs().await;
    assert_eq!(cloud.warm("run/step-1", From::Site("home".to_owned())).await.missing, 0);
    let before = cloud.stats().from_remote;
    let warmed = cloud.warm("run/step-3", From::Site("home".to_owned())).await;
    let moved = cloud.stats().from_remote - before;
    let saved = home.plain.saved(&name("run/step-3")).await.unwrap();
    let own = saved.map.frames.iter().take(saved.map.chunks());
    assert_eq!((warmed.missing, warmed.alone), (0, 0));
    assert!(moved <= own.map(|frame| u64::from(frame.stored_len)).sum::<u64>(), "{moved}");
    cloud.restore("run/step-3", &folder).await;
}

impl Fixture {
    /// An agent that obeys the policy, whose repository is a folder.
    async fn in_folder(&self, site: &str) -> Agent {
        let credentials = self.credentials(site, "a");
        let policies = Policies::new(Some(credentials.clone()), None);
        let guard: Arc<dyn Guard> = Arc::<Policies>::clone(&policies);
        let location = Location::directory(self.path("folder")).unwrap();
        let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
        let index = self.path(&format!("index-{site}"));
        let options = OpenOptions { cache: Some(index), memory: Some(128 << 20), guard: Some(guard) };
        let plain = Repository::create(store, options).await.unwrap().0;
        self.agent_of(credentials, plain, (AllowList::everybody(), policies), Transports::Auto).await
    }
}

/// A folder that the policy puts at another site is a mount of it here: the agents there, on whose disk it is, send less.
#[tokio::test(flavor = "multi_thread")]
async fn a_folder_at_another_site_is_read_by_agents_there() {
    let world = Fixture::new();
    let (home, cloud) = (world.in_folder("home").await, world.in_folder("cloud").await);
    cloud.knows(&[&home]);
    cloud.is_linked().await;
    let folder = run(&world, &home).await;
    // Without a policy it counts as a folder of its own disk.
    let dry = WarmOptions { dry_run: true, ..WarmOptions::default() };
    let planned = warm(&cloud.exchange, &cloud.plain, &name("run/step-3"), &dry).await.unwrap();
    assert_eq!(planned.alone, 0);
    world.set_policy(&home.plain, 1, ALL).await;
    let warmed = cloud.warm("run/step-3", From::Anywhere).await;
    let (stats, alone) = (cloud.stats(), stored_alone(&folder).await);
    assert_eq!((warmed.missing, stats.from_repository), (0, 0));
    assert!(warmed.alone > 0 && stats.from_remote <= alone * 102 / 100, "{stats:?}, {alone} alone");
    cloud.restore("run/step-3", &folder).await;
    assert_eq!(cloud.stats().from_repository, 0);
    // Where it lies, it is read from the disk.
    home.restore("run/step-3", &folder).await;
    assert_eq!(home.stats().from_remote, 0);
}

/// Two sites with a mount each would otherwise each wait for what the other says that it holds.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_holds_nothing_of_a_mount_for_other_sites() {
    let world = Fixture::new();
    let (home, cloud, near) =
        (world.in_folder("home").await, world.in_folder("cloud").await, world.in_folder("near").await);
    world.set_policy(&home.plain, 1, ALL).await;
    cloud.knows(&[&near]);
    cloud.is_linked().await;
    near.knows(&[&cloud]);
    near.is_linked().await;
    let folder = run(&world, &home).await;
    assert_eq!(cloud.warm("run/step-3", From::Anywhere).await.missing, 0);
    assert_eq!((cloud.stats().from_remote, near.stats().from_repository), (0, 0), "it comes from the mount of its own");
    cloud.restore("run/step-3", &folder).await;
}

/// Holds everything, but gives nothing without its base, as one does whose bases are damaged or gone.
struct WithoutBases(Arc<Exchange>);

#[async_trait]
impl ServedChunks for WithoutBases {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        ServedChunks::authorise(&*self.0, identity, manifest).await
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        ServedChunks::survey(&*self.0, grant, from).await
    }

    async fn frame(&self, by: &Identity, asked: &FrameRequest, chunk: AskedChunk) -> Result<Option<OutgoingFrame>> {
        if chunk.alone { Ok(None) } else { ServedChunks::frame(&*self.0, by, asked, chunk).await }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_peer_can_send_alone_comes_from_the_repository_and_is_kept_alone() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    let folder = run(&world, &home).await;
    assert_eq!(home.warm("run/step-3", From::Anywhere).await.missing, 0);
    let leaving = CancellationToken::new();
    let chunks = Arc::new(WithoutBases(Arc::clone(&home.exchange)));
    let address = serve(&world.credentials("home", "poor"), chunks, &leaving).await;
    cloud.exchange.peers().add(&address).unwrap();
    cloud.is_linked().await;
    let warmed = cloud.warm("run/step-3", From::Anywhere).await;
    assert_eq!(warmed.missing, 0);
    assert!(warmed.alone > 0 && cloud.stats().from_repository > 0, "{warmed:?}");
    let bases = home.plain.saved(&name("run/step-3")).await.unwrap().map.further;
    assert!(bases.iter().all(|(id, _)| !cloud.exchange.cache().contains(id)), "no base is kept");
    world.remove_packs().await;
    cloud.restore("run/step-3", &folder).await;
}

/// D5: "a step is read with the steps back to its key step, at most seven, unless an agent sends it to a site without them"
#[tokio::test(flavor = "multi_thread")]
async fn a_predicted_step_moves_without_those_before() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    cloud.knows(&[&home]);
    cloud.is_linked().await;
    let (folder, mut training) = (world.path("training"), Training::new());
    for step in 1..=4 {
        training.go_on();
        training.write(&folder);
        home.plain.save(&folder, &name(&format!("run/step-{step}")), &predicting()).await.unwrap();
    }
    let saved = home.plain.saved(&name("run/step-4")).await.unwrap();
    assert_eq!((saved.value.behind, stored_by(&saved, Codec::Part)), (3, 9));
    assert_eq!(home.warm("run/step-4", From::Anywhere).await.missing, 0);
    world.remove_packs().await;
    let dry = WarmOptions { dry_run: true, ..WarmOptions::default() };
    let planned = warm(&cloud.exchange, &cloud.plain, &name("run/step-4"), &dry).await.unwrap();
    let warmed = cloud.warm("run/step-4", From::Site("home".to_owned())).await;
    let (moved, alone) = (cloud.stats().from_remote, stored_alone(&folder).await);
    assert_eq!((warmed.missing, warmed.estimated, warmed.alone), (0, false, 9), "{warmed:?}");
    assert!(moved <= alone * 102 / 100, "{moved} moved, {alone} alone");
    assert!(within(moved, planned.lacking_bytes, 1), "{moved} moved, {} foreseen", planned.lacking_bytes);
    cloud.restore("run/step-4", &folder).await;
    home.restore("run/step-4", &folder).await;
}
