//! Who lies, leaves, dawdles or may not read costs nothing but time. G1 and G2 of docs/semantics.md, between
//! agents.

use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt as _;
use tokio::sync::Notify;
use towline::Result;
use towline::codec::{Codec, Encoded};
use towline::id::{ChunkId, ManifestId};
use towline::ops::CollectOptions;
use towline::policy::LocalCaller;
use towline::transfer::Reply;
use towline::transfer::protocol::{AskedChunk, FrameRequest, Grant, OutgoingFrame, Priority, Runs, Survey, Wanted};

use super::*;
use crate::data::noise;
use crate::differences::{file, weights};

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_read_gets_nothing() {
    let world = Fixture::new();
    let allow = only("cloud/*", "public/*");
    let home = world.agent_with("home", "a", allow, Transports::Auto).await;
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
    let before = cloud.stats().from_remote;
    let closed = cloud.warm("secret/one", From::Site("home".to_owned())).await;
    // What it has already, because both trees share it, is all that is there.
    assert_eq!((closed.missing, cloud.stats().from_remote), (closed.lacking, before));
}

/// S1 of docs/security.md.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_read_a_difference_may_read_its_bases_and_nothing_else_of_theirs() {
    let world = Fixture::new();
    let allow = only("cloud/*", "run/step-2");
    let home = world.agent_with("home", "a", allow, Transports::Auto).await;
    let cloud = world.agent("cloud", "b").await;
    cloud.knows(&[&home]);
    for step in [1, 2] {
        let (folder, name) = (world.path(&format!("step-{step}")), name(&format!("run/step-{step}")));
        fs::create_dir(&folder).unwrap();
        let state = [("w", "F32", weights(step)), ("own", "F32", noise(step.into(), 1 << 20))];
        fs::write(folder.join("state.safetensors"), file(&state)).unwrap();
        home.plain.save(&folder, &name, &SaveOptions::default()).await.unwrap();
        assert_eq!(home.warm(name.as_str(), From::Anywhere).await.missing, 0);
    }
    let saved = home.plain.saved(&name("run/step-2")).await.unwrap();
    let bases: Vec<ChunkId> = (0..u32::try_from(saved.map.chunks()).unwrap())
        .filter_map(|chunk| saved.locate(chunk).unwrap().place.base)
        .collect();
    let first = home.plain.saved(&name("run/step-1")).await.unwrap();
    let others: Vec<ChunkId> = first.manifest.chunks.ids.iter().filter(|id| !bases.contains(id)).copied().collect();
    assert!(!bases.is_empty() && !others.is_empty());
    let peer = cloud.exchange.peers().live().await.remove(0);
    let came = async |bases: &[ChunkId]| {
        let wanted = Wanted { chunks: Runs::default(), bases: bases.to_vec(), ..Wanted::default() };
        let mut fetching = peer.link().unwrap().fetch(Priority::Restore, saved.value.manifest, wanted).await.unwrap();
        let mut came = 0;
        while let Some(reply) = fetching.next().await {
            came += usize::from(matches!(reply, Reply::Frame(_)));
        }
        came
    };
    assert_eq!((came(&bases).await, came(&others).await), (bases.len(), 0));
}

/// Says that it holds everything, and gives something else.
struct MaliciousPeer(Arc<Exchange>);

#[async_trait]
impl ServedChunks for MaliciousPeer {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        ServedChunks::authorise(&*self.0, identity, manifest).await
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        let chunks = u32::try_from(grant.chunks.ids.len()).unwrap();
        Ok(Survey { chunks, upto: chunks, held: (from..chunks).collect() })
    }

    async fn frame(&self, _: &Identity, _: &FrameRequest, _: AskedChunk) -> Result<Option<OutgoingFrame>> {
        let bytes = Bytes::from(noise(9, 1000));
        Ok(Some(OutgoingFrame { encoded: Encoded { codec: Codec::Raw, bytes, base: None }, plain_len: 1000 }))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_lies_is_not_asked_again_and_nothing_wrong_is_kept() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    let other = world.agent("west", "other").await;
    let leaving = CancellationToken::new();
    let liar =
        serve(&world.credentials("west", "liar"), Arc::new(MaliciousPeer(Arc::clone(&other.exchange))), &leaving).await;
    agent.exchange.peers().add(&liar).unwrap();
    let folder = world.save(&agent.plain, "run/step-1", 8, 24).await;
    agent.restore("run/step-1", &folder).await;
    let stats = agent.stats();
    assert!(stats.corrupt >= 1 && stats.from_site == 0, "{stats:?}");
    assert!(agent.exchange.cache().check().damaged.is_empty());
    let stat = &agent.exchange.peers().list()[0];
    assert!(stat.error.is_some() && stat.transport.is_none(), "{stat:?}");
    assert!(agent.exchange.peers().live().await.is_empty());
}

/// Gives what another has, each chunk after a minute.
struct Slow(Arc<Exchange>);

#[async_trait]
impl ServedChunks for Slow {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        ServedChunks::authorise(&*self.0, identity, manifest).await
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        ServedChunks::survey(&*self.0, grant, from).await
    }

    async fn frame(
        &self,
        identity: &Identity,
        asked: &FrameRequest,
        chunk: AskedChunk,
    ) -> Result<Option<OutgoingFrame>> {
        tokio::time::sleep(Duration::from_mins(1)).await;
        ServedChunks::frame(&*self.0, identity, asked, chunk).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_slower_than_going_direct_is_dropped() {
    let world = Fixture::new();
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
    assert_eq!(agent.stats().from_site, 0);
    // Nothing waits for it again.
    assert!(agent.exchange.peers().live().await.iter().all(|peer| peer.is_late()));
}

/// A source that sends next to nothing does not hold a place for ever, though a token has named it; a user may wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_a_token_named_must_send_at_the_least_rate() {
    let world = Fixture { named_patience: Duration::from_millis(300), ..Fixture::new() };
    let (agent, other) = (world.agent("west", "a").await, world.agent("east", "other").await);
    let leaving = CancellationToken::new();
    let slow = serve(&world.credentials("east", "slow"), Arc::new(Slow(Arc::clone(&other.exchange))), &leaving).await;
    // A tenth of a second at 64 KiB/s.
    let folder = world.path("small");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("file"), noise(3, 6000)).unwrap();
    agent.plain.save(&folder, &name("run/step-1"), &SaveOptions::default()).await.unwrap();
    assert_eq!(other.warm("run/step-1", From::Anywhere).await.missing, 0);
    agent.exchange.peers().add(&slow).unwrap();
    agent.is_linked().await;
    let policy = FetchPolicy { from: From::Site("east".to_owned()), ..FetchPolicy::default() };
    let options = WarmOptions { policy, ..WarmOptions::default() };
    let warm_for = async |caller| {
        let repository = agent.plain.for_caller(Some(caller));
        warm(&agent.exchange, &repository, &name("run/step-1"), &options).await
    };
    // Each of its chunks takes a minute.
    let limited = tokio::time::timeout(Duration::from_secs(40), warm_for(LocalCaller::token("job", None))).await;
    assert!(limited.expect("it ends before a chunk comes").is_ok_and(|warmed| warmed.missing > 0));
    assert!(agent.exchange.peers().live().await.iter().all(|peer| peer.is_late()));
    let patient = tokio::time::timeout(Duration::from_secs(2), warm_for(LocalCaller::user("ann"))).await;
    assert!(patient.is_err(), "it has no limit, as the user can end it");
}

/// Says that it holds what another has, and gives nothing of it.
struct Stuck {
    exchange: Arc<Exchange>,
    asked: Notify,
}

#[async_trait]
impl ServedChunks for Stuck {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        ServedChunks::authorise(&*self.exchange, identity, manifest).await
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        ServedChunks::survey(&*self.exchange, grant, from).await
    }

    async fn frame(&self, _: &Identity, _: &FrameRequest, _: AskedChunk) -> Result<Option<OutgoingFrame>> {
        self.asked.notify_one();
        std::future::pending().await
    }
}

/// Whoever may name the source of a fetch could name one that never answers.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_a_slow_source_that_another_has_named() {
    let world = Fixture::new();
    let (agent, other) = (world.agent("west", "a").await, world.agent("east", "other").await);
    let stuck = Arc::new(Stuck { exchange: Arc::clone(&other.exchange), asked: Notify::new() });
    let leaving = CancellationToken::new();
    let address =
        serve(&world.credentials("east", "stuck"), Arc::clone(&stuck) as Arc<dyn ServedChunks>, &leaving).await;
    let folder = world.save(&agent.plain, "run/step-1", 15, 12).await;
    assert_eq!(other.warm("run/step-1", From::Anywhere).await.missing, 0);
    // It knows how fast the repository is.
    world.save(&agent.plain, "first", 16, 12).await;
    assert_eq!(agent.warm("first", From::Anywhere).await.missing, 0);
    agent.exchange.peers().add(&address).unwrap();
    assert_eq!(agent.exchange.peers().live().await.len(), 1);
    let mut named = std::pin::pin!(agent.warm("run/step-1", From::Site("east".to_owned())));
    tokio::select! {
        _ = &mut named => panic!("nothing is sent"),
        () = stuck.asked.notified() => {}
    }
    // The protocol's own watchdog would take half a minute, and a source that drips would never end.
    tokio::select! {
        _ = &mut named => panic!("nothing is sent"),
        restored = tokio::time::timeout(Duration::from_secs(25), agent.restore("run/step-1", &folder)) => {
            assert!(restored.is_ok());
        }
    }
}

/// Whoever may register addresses could make each read wait once for each of them.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_does_not_answer_is_not_asked_again_at_other_addresses() {
    let world = Fixture::new();
    let (agent, other) = (world.agent("west", "a").await, world.agent("east", "other").await);
    let folder = world.save(&agent.plain, "run/step-1", 15, 1).await;
    assert_eq!(other.warm("run/step-1", From::Anywhere).await.missing, 0);
    let (credentials, leaving) = (world.credentials("east", "stuck"), CancellationToken::new());
    let mut all = Vec::new();
    for _ in 0..4 {
        let stuck = Arc::new(Stuck { exchange: Arc::clone(&other.exchange), asked: Notify::new() });
        let address = serve(&credentials, Arc::clone(&stuck) as Arc<dyn ServedChunks>, &leaving).await;
        agent.exchange.peers().add(&address).unwrap();
        all.push(stuck);
    }
    assert_eq!(agent.exchange.peers().live().await.len(), 4);
    agent.restore("run/step-1", &folder).await;
    let was_asked = all.iter().filter(|stuck| stuck.asked.notified().now_or_never().is_some()).count();
    assert_eq!(was_asked, 1, "it is one agent");
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_peer_is_revoked_in_the_middle_the_rest_comes_from_elsewhere() {
    for transports in [Transports::Quic, Transports::Tcp] {
        let world = Fixture::new();
        let agent = world.agent_with("west", "a", AllowList::everybody(), transports).await;
        let other = world.agent("west", "other").await;
        let credentials = world.credentials("west", "stuck");
        let stuck = Arc::new(Stuck { exchange: Arc::clone(&other.exchange), asked: Notify::new() });
        let address = serve(&credentials, Arc::clone(&stuck) as Arc<dyn ServedChunks>, &CancellationToken::new()).await;
        let folder = world.save(&agent.plain, "run/step-1", 17, 12).await;
        assert_eq!(other.warm("run/step-1", From::Anywhere).await.missing, 0);
        agent.exchange.peers().add(&address).unwrap();
        assert_eq!(agent.exchange.peers().live().await.len(), 1);
        let revoked = async {
            stuck.asked.notified().await;
            let line = format!("{}\n", credentials.certificate().serial);
            fs::write(world.path("tls-west-a/revoked"), line).unwrap();
        };
        let (warmed, ()) = tokio::join!(agent.warm("run/step-1", From::Anywhere), revoked);
        assert_eq!((warmed.missing, agent.stats().from_site), (0, 0));
        let refused = async {
            let says = |error: &String| error.contains("certificate was revoked");
            while !agent.exchange.peers().list()[0].error.as_ref().is_some_and(says) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), refused).await.unwrap();
        assert!(agent.exchange.peers().live().await.is_empty());
        world.remove_packs().await;
        agent.restore("run/step-1", &folder).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_peer_goes_in_the_middle_the_rest_comes_from_elsewhere() {
    for transports in [Transports::Quic, Transports::Tcp] {
        let world = Fixture::new();
        let agent = world.agent_with("west", "a", AllowList::everybody(), transports).await;
        let (first, second) = (world.agent("west", "b").await, world.agent("west", "c").await);
        let folder = world.save(&agent.plain, "run/step-1", 10, 64).await;
        for other in [&first, &second] {
            assert_eq!(other.warm("run/step-1", From::Anywhere).await.missing, 0);
        }
        agent.knows(&[&first, &second]);
        assert_eq!(agent.exchange.peers().live().await.len(), 2);
        let gone = first.address.clone();
        let cut = async {
            while agent.stats().from_site < 4 * MIB {
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
async fn what_is_repacked_meanwhile_is_found_again() {
    let world = Fixture::new();
    let agent = world.agent("west", "a").await;
    let folder = world.save(&agent.plain, "run/step-1", 13, 12).await;
    let gone = world.save(&agent.plain, "run/step-2", 14, 12).await;
    drop(fs::remove_dir_all(gone));
    let other = world.repository("index-other").await;
    other.remove(&name("run/step-2")).await.unwrap();
    let options = CollectOptions::at_once();
    for _ in 0..3 {
        other.collect(&options).await.unwrap();
    }
    agent.restore("run/step-1", &folder).await;
}

/// Gives what another agent has, and never says what that is.
struct Silent(Arc<Exchange>);

#[async_trait]
impl ServedChunks for Silent {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        ServedChunks::authorise(&*self.0, identity, manifest).await
    }

    async fn survey(&self, _: &Grant, _: u32) -> Result<Survey> {
        std::future::pending().await
    }

    async fn frame(
        &self,
        identity: &Identity,
        asked: &FrameRequest,
        chunk: AskedChunk,
    ) -> Result<Option<OutgoingFrame>> {
        ServedChunks::frame(&*self.0, identity, asked, chunk).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_source_is_asked_for_chunks_before_it_says_which_it_holds() {
    let world = Fixture::new();
    let (cloud, home) = (world.agent("cloud", "c").await, world.agent("home", "h").await);
    let folder = world.save(&home.plain, "run/step-1", 31, 8).await;
    assert_eq!(home.warm("run/step-1", From::Anywhere).await.missing, 0);
    let leaving = CancellationToken::new();
    let silent =
        serve(&world.credentials("home", "silent"), Arc::new(Silent(Arc::clone(&home.exchange))), &leaving).await;
    cloud.exchange.peers().add(&silent).unwrap();
    cloud.is_linked().await;
    let warmed = cloud.warm("run/step-1", From::Site("home".to_owned())).await;
    assert_eq!(warmed.missing, 0, "{warmed:?}");
    let stats = cloud.stats();
    assert!(stats.from_remote > 0 && stats.from_repository == 0, "{stats:?}");
    cloud.restore("run/step-1", &folder).await;
    // Chunks that the peer lacks come from the repository.
    let second = world.save(&home.plain, "run/step-2", 32, 8).await;
    cloud.restore("run/step-2", &second).await;
    assert!(cloud.stats().from_repository > 0);
}
