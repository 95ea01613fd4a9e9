//! Chunks that two trees share, each stored with a base of its own: what an agent has for one tree reaches readers of the other without
//! that base. S1 and Y5 of docs.

use async_trait::async_trait;
use towline::cache::BaseKey;
use towline::error::Result;
use towline::id::{ChunkId, ManifestId};
use towline::progress::Progress;
use towline::transfer::protocol::{AskedChunk, FrameRequest, Grant, OutgoingFrame, Priority, Survey, Wanted};

use super::cold::run;
use super::*;

/// A run whose third step has differences, and `public/model`, a copy of that step that needs no other.
async fn copied(world: &Fixture, home: &Agent) -> (PathBuf, Vec<ChunkId>) {
    let folder = run(world, home).await;
    let (from, to) = (name("run/step-3"), name("public/model"));
    home.plain.copy_stand_alone(&from, &to, false, &Progress::default()).await.unwrap();
    let (private, public) = (home.plain.saved(&from).await.unwrap(), home.plain.saved(&to).await.unwrap());
    assert!(!private.map.further.is_empty() && public.map.further.is_empty());
    (folder, public.manifest.chunks.ids.clone())
}

fn with_bases(agent: &Agent, ids: &[ChunkId]) -> Vec<ChunkId> {
    let cache = agent.exchange.cache();
    ids.iter().filter(|id| cache.base(id).is_some_and(|base| base != BaseKey::NONE)).copied().collect()
}

/// S1: "A chunk that two trees share is sent with the base that the map of the requested name lists, or with none, whatever the
/// agent has it with."
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_a_copy_gets_no_base_that_it_may_not_read() {
    let world = Fixture::new();
    let home = world.agent_with("home", "a", only("**", "public/**"), Transports::Auto).await;
    let cloud = world.agent("cloud", "b").await;
    cloud.knows(&[&home]);
    cloud.is_linked().await;
    let (folder, ids) = copied(&world, &home).await;
    assert_eq!(home.warm("run/step-3", From::Anywhere).await.missing, 0);
    let shared = with_bases(&home, &ids);
    assert!(!shared.is_empty(), "they came for the step, as differences");
    world.remove_packs().await;

    // Asked for directly, as somebody who lies about what it has.
    let reader = Identity::new("cloud", "b").unwrap();
    let private = home.plain.saved(&name("run/step-3")).await.unwrap().value.manifest;
    let manifest = home.plain.saved(&name("public/model")).await.unwrap().value.manifest;
    assert_eq!(private, manifest, "one tree, two names: the grant is for the name that may be read");
    assert!(ServedChunks::authorise(&*home.exchange, &reader, &manifest).await.unwrap().is_some());
    let asked = FrameRequest { priority: Priority::Restore, manifest, wanted: Arc::new(Wanted::default()) };
    for id in shared {
        let chunk = AskedChunk { id, alone: false };
        let frame = ServedChunks::frame(&*home.exchange, &reader, &asked, chunk).await.unwrap();
        assert_eq!(frame.expect("its base is here, so it is encoded anew").encoded.base, None);
    }
    let warmed = cloud.warm("public/model", From::Site("home".to_owned())).await;
    assert_eq!(warmed.missing, 0);
    assert_eq!(with_bases(&cloud, &ids), []);
    cloud.restore("public/model", &folder).await;
    // The step is still there.
    home.restore("run/step-3", &folder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_of_a_copy_does_not_rely_on_bases_of_another_tree() {
    let world = Fixture::new();
    let home = world.agent("home", "a").await;
    let (folder, ids) = copied(&world, &home).await;
    assert_eq!(home.warm("run/step-3", From::Anywhere).await.missing, 0);
    assert!(!with_bases(&home, &ids).is_empty());
    let warmed = home.warm("public/model", From::Anywhere).await;
    assert_eq!((warmed.missing, with_bases(&home, &ids)), (0, vec![]));
    // The bases go, as no pin of the copy keeps them.
    let cache = home.exchange.cache();
    let bases: Vec<ChunkId> =
        home.plain.saved(&name("run/step-3")).await.unwrap().map.further.iter().map(|(id, _)| *id).collect();
    for id in &bases {
        if let Some(frame) = cache.get(id) {
            cache.replace(&frame, None);
        }
    }
    world.remove_packs().await;
    home.restore("public/model", &folder).await;
}

/// Sends what its cache has, with whatever base.
struct AsCached(Arc<Exchange>);

#[async_trait]
impl ServedChunks for AsCached {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        ServedChunks::authorise(&*self.0, identity, manifest).await
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        ServedChunks::survey(&*self.0, grant, from).await
    }

    async fn frame(&self, _: &Identity, _: &FrameRequest, chunk: AskedChunk) -> Result<Option<OutgoingFrame>> {
        let frame = self.0.cache().get(&chunk.id);
        Ok(frame.map(|frame| OutgoingFrame { encoded: frame.encoded(), plain_len: frame.plain_len() }))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_names_other_bases_does_not_have_them_kept() {
    let world = Fixture::new();
    let (home, cloud) = (world.agent("home", "a").await, world.agent("cloud", "b").await);
    let (folder, ids) = copied(&world, &home).await;
    assert_eq!(home.warm("run/step-3", From::Anywhere).await.missing, 0);
    assert_eq!(cloud.warm("run/step-1", From::Repository).await.missing, 0);
    let leaving = CancellationToken::new();
    let chunks = Arc::new(AsCached(Arc::clone(&home.exchange)));
    let address = serve(&world.credentials("home", "liar"), chunks, &leaving).await;
    cloud.exchange.peers().add(&address).unwrap();
    cloud.is_linked().await;
    let warmed = cloud.warm("public/model", From::Site("home".to_owned())).await;
    assert_eq!((warmed.missing, with_bases(&cloud, &ids)), (0, vec![]));
    assert!(cloud.stats().from_remote > 0 && cloud.stats().corrupt == 0, "{:?}", cloud.stats());
    cloud.restore("public/model", &folder).await;
}
