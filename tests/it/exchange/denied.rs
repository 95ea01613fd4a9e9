//! Routes by which content moves between agents: over none of them does a site that the policy denies receive one byte of a denied
//! name. Counted by the providers, by the ledger, and by a look for the content itself in all that the denied site has on its disk.
//! Y3 of docs/policy.md; P5 of docs/semantics.md.

use towline::cache::TenantUse;
use towline::id::{ChunkId, ManifestId};
use towline::ops::SaveReport;
use towline::transfer::Reply;
use towline::transfer::protocol::{Priority, Runs, Wanted};

use super::policy::{ALL, label};
use super::*;

/// Bytes that are in each block of denied content, and nowhere else.
const MARKER: &[u8] = b"<denied: not one byte of this may be seen>";

const DENIED: &str = "[[rule]]\nverdict = 'deny'\nnames = 'raw/**'\nto = 'cloud'\nwhy = 'stays'\n";

/// Noise with the marker in every 4 KiB, so that it is stored as it is.
fn marked(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = crate::data::noise(seed, len);
    bytes.chunks_mut(4096).filter(|block| block.len() > MARKER.len()).for_each(|block| {
        block[..MARKER.len()].copy_from_slice(MARKER);
    });
    bytes
}

/// Files below `folder` that hold the marker.
fn with_marker(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else { return found };
    for entry in entries.map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(with_marker(&entry));
        } else if fs::read(&entry).unwrap().windows(MARKER.len()).any(|window| window == MARKER) {
            found.push(entry);
        }
    }
    found
}

impl Fixture {
    /// An agent of the denied site that looks at no policy: it has the certificate, and is free to try everything.
    async fn rogue(&self, agent: &str) -> Agent {
        let plain = self.repository(&format!("index-rogue-{agent}")).await;
        let rules = (AllowList::everybody(), Policies::new(None, None));
        self.agent_of(self.credentials("cloud", agent), plain, rules, Transports::Auto).await
    }

    /// Saves files as `as_name`.
    async fn save_files(&self, repository: &Repository, as_name: &str, files: &[(&str, Vec<u8>)]) -> SaveReport {
        let folder = self.path(&format!("tree-{}", as_name.replace('/', "-")));
        fs::create_dir_all(&folder).unwrap();
        files.iter().for_each(|(file, bytes)| fs::write(folder.join(file), bytes).unwrap());
        repository.save(&folder, &name(as_name), &SaveOptions::default()).await.unwrap()
    }

    /// An agent at home, which holds `raw/set`, denied to the cloud, and `free/set`, of which a part is the same content.
    async fn with_denied_content(&self) -> Agent {
        let home = self.obedient("home", "a", Transports::Auto).await;
        self.set_policy(&home.plain, 1, &format!("{DENIED}{ALL}")).await;
        let shared = crate::data::noise(7, 3 << 20);
        let free = [("shared.bin", shared.clone()), ("own.bin", crate::data::noise(8, 1 << 20))];
        self.save_files(&home.plain, "free/set", &free).await;
        let raw = [("shared.bin", shared), ("secret.bin", marked(9, 5 << 20))];
        self.save_files(&home.plain, "raw/set", &raw).await;
        for what in ["raw/set", "free/set"] {
            home.warm(what, From::Repository).await;
        }
        assert!(!with_marker(&self.path("cache-home-a")).is_empty(), "it is found where it may be");
        home
    }

    /// Tries all that a restore does, and what came of it anyway.
    async fn refused(&self, agent: &Agent, what: &str) {
        let out = self.path(&format!("out-{}", agent.exchange.identity().agent()));
        let lost = agent.near.restore(&name(what), None, &out, &RestoreOptions::default()).await;
        assert!(lost.is_err(), "{what}");
        let options = WarmOptions {
            policy: FetchPolicy { from: From::Anywhere, ..FetchPolicy::default() },
            ..WarmOptions::default()
        };
        if let Ok(warmed) = warm(&agent.exchange, &agent.plain, &name(what), &options).await {
            assert!(warmed.missing > 0 && warmed.sources.remote == 0, "{warmed:?}");
        }
        assert_eq!(with_marker(&out), Vec::<PathBuf>::new());
    }

    /// Checks that nothing of the denied content is on the disks of these agents.
    fn clean(&self, agents: &[&Agent]) {
        for agent in agents {
            let own = agent.exchange.identity();
            let cache = self.path(&format!("cache-{}-{}", own.site(), own.agent()));
            assert_eq!(with_marker(&cache), Vec::<PathBuf>::new());
        }
    }
}

/// Bytes that everybody whom `agent` knows gives it for a request that obeys nothing: for all places of the tree `manifest`, and for
/// `bases`.
async fn stolen(agent: &Agent, (manifest, places): (ManifestId, usize), bases: &[ChunkId]) -> usize {
    let places = u32::try_from(places).unwrap();
    let mut bytes = 0;
    for peer in agent.exchange.peers().live().await {
        let mut bases = bases.to_vec();
        bases.sort_unstable();
        let all = [
            Wanted { chunks: Runs::of(0..places), bases: Vec::new(), ..Wanted::default() },
            Wanted { chunks: Runs::default(), bases, ..Wanted::default() },
        ];
        for wanted in all.into_iter().filter(|wanted| !(wanted.chunks.is_empty() && wanted.bases.is_empty())) {
            let mut fetching = peer.link().unwrap().fetch(Priority::Restore, manifest, wanted).await.unwrap();
            while let Some(reply) = fetching.next().await {
                if let Reply::Frame(frame) = reply {
                    bytes += frame.encoded.bytes.len();
                }
            }
        }
    }
    bytes
}

/// Bytes of `what` that an agent gave to agents of the cloud, by its ledger.
async fn given(agent: &Agent, what: &str) -> u64 {
    let manifest = agent.plain.state().await.unwrap().refs[&name(what)].manifest.to_string();
    let entries = agent.exchange.peers().ledger().entries().into_iter();
    let denied = entries.filter(|entry| entry.peer.starts_with("towline://cloud/") && entry.manifest == manifest);
    denied.map(|entry| entry.bytes).sum()
}

/// The gang: agents of the denied site that share one copy of what any of them brings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gang_of_a_denied_site_gets_nothing() {
    let world = Fixture::new();
    let home = world.with_denied_content().await;
    let (b, r, s) = (world.rogue("b").await, world.rogue("r").await, world.rogue("s").await);
    let gang = [&b, &r, &s];
    for agent in gang {
        agent.knows(&[&home]);
        agent.knows(&gang.into_iter().filter(|other| !std::ptr::eq(*other, agent)).collect::<Vec<_>>());
    }
    world.remove_packs().await;
    futures::join!(world.refused(&b, "raw/set"), world.refused(&r, "raw/set"), world.refused(&s, "raw/set"));
    assert_eq!((home.stats().to_remote, given(&home, "raw/set").await), (0, 0), "not a byte");
    for agent in gang {
        assert_eq!((agent.stats().from_remote, agent.stats().from_site), (0, 0));
        assert_eq!(agent.exchange.cache().stat().chunks, 0);
    }
    world.clean(&gang);
}

/// The relay: a third agent, which may have the content, in between; at the denied site, and at another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_who_may_have_it_passes_it_on() {
    let world = Fixture::new();
    let home = world.with_denied_content().await;
    let near = world.obedient("near", "c", Transports::Auto).await;
    near.knows(&[&home]);
    near.warm("raw/set", From::Site("home".into())).await;
    assert!(!with_marker(&world.path("cache-near-c")).is_empty(), "the third one has it");
    let cloud = world.obedient("cloud", "o", Transports::Auto).await;
    let rogue = world.rogue("r").await;
    cloud.knows(&[&near, &home]);
    rogue.knows(&[&near, &cloud]);
    world.remove_packs().await;
    world.refused(&rogue, "raw/set").await;
    world.refused(&cloud, "raw/set").await;
    for holder in [&near, &cloud] {
        assert_eq!((holder.stats().to_remote, holder.stats().to_site, given(holder, "raw/set").await), (0, 0, 0));
    }
    assert_eq!(given(&home, "raw/set").await, 0);
    world.clean(&[&cloud, &rogue]);
}

/// Deduplication: the denied site has a part of the content already, by a name that it may read, and asks for the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_the_same_opens_no_way_to_the_rest() {
    let world = Fixture::new();
    let home = world.with_denied_content().await;
    let rogue = world.rogue("r").await;
    rogue.knows(&[&home]);
    world.remove_packs().await;
    rogue.warm("free/set", From::Site("home".into())).await;
    let free = home.stats().to_remote;
    assert!(free > 3 << 20, "{free}");
    world.refused(&rogue, "raw/set").await;
    assert_eq!((home.stats().to_remote, given(&home, "raw/set").await), (free, 0));

    // Under the name that it may read, it gets none of the other's chunks, whatever it asks for.
    let asker = rogue.exchange.identity().clone();
    let state = home.plain.state().await.unwrap();
    let saved = home.plain.saved(&name("raw/set")).await.unwrap();
    let of = |what: &str| state.refs[&name(what)].manifest;
    assert!(ServedChunks::authorise(&*home.exchange, &asker, &of("raw/set")).await.unwrap().is_none());
    let ids = &saved.manifest.chunks.ids;
    assert_eq!(stolen(&rogue, (of("raw/set"), ids.len()), ids).await, 0);
    let grant = ServedChunks::authorise(&*home.exchange, &asker, &of("free/set")).await.unwrap().unwrap();
    let secret: Vec<ChunkId> = ids.iter().filter(|id| !grant.chunks.ids.contains(id)).copied().collect();
    assert!(!secret.is_empty() && secret.iter().all(|id| home.exchange.cache().contains(id)));
    let free = (of("free/set"), grant.chunks.ids.len());
    let own = stolen(&rogue, free, &[]).await;
    assert!(own > 3 << 20, "what it may read comes: {own}");
    assert_eq!(stolen(&rogue, free, &secret).await, own, "and of the other nothing does");
    world.clean(&[&rogue]);
}

/// Bases: a step stored as differences to a denied one has its labels, and stays, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn differences_to_what_is_denied_are_denied() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    let secret = "[[rule]]\nverdict = 'deny'\nsensitivity-at-least = 'secret'\nto = 'cloud'\nwhy = 'stays'\n";
    world.set_policy(&home.plain, 1, &format!("{secret}{ALL}")).await;
    let content = marked(3, 4 << 20);
    world.save_files(&home.plain, "raw/step-1", &[("a.bin", content.clone())]).await;
    label(&home.plain, "raw", "sensitivity", "secret").await;
    let mut changed = content;
    changed[1 << 20..(1 << 20) + 64].fill(1);
    let folder = world.path("changed");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("a.bin"), &changed).unwrap();
    let based = SaveOptions { base: Some(name("raw/step-1")), ..SaveOptions::default() };
    home.plain.save(&folder, &name("free/step-2"), &based).await.unwrap();
    for what in ["raw/step-1", "free/step-2"] {
        home.warm(what, From::Repository).await;
    }
    let rogue = world.rogue("r").await;
    rogue.knows(&[&home]);
    world.remove_packs().await;
    for what in ["free/step-2", "raw/step-1"] {
        world.refused(&rogue, what).await;
        let saved = home.plain.saved(&name(what)).await.unwrap();
        let further = saved.map.further.iter().map(|(id, _)| *id);
        let ids: Vec<ChunkId> = saved.manifest.chunks.ids.iter().copied().chain(further).collect();
        assert_eq!(stolen(&rogue, (saved.value.manifest, saved.manifest.chunks.ids.len()), &ids).await, 0, "{what}");
        assert_eq!(given(&home, what).await, 0, "{what}");
    }
    assert_eq!(home.stats().to_remote, 0);
    world.clean(&[&rogue]);
}

/// docs/operations.md: "What the agent brings for a name counts for the tenant of its label `tenant`"
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_agents_bring_counts_for_the_tenant_of_the_name() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    world.set_policy(&home.plain, 1, ALL).await;
    world.save_files(&home.plain, "ours/set", &[("a.bin", crate::data::noise(1, 2 << 20))]).await;
    world.save_files(&home.plain, "open/set", &[("a.bin", crate::data::noise(2, 2 << 20))]).await;
    label(&home.plain, "ours", "tenant", "clinic").await;
    for what in ["ours/set", "open/set"] {
        home.warm(what, From::Repository).await;
    }
    let near = world.obedient("near", "c", Transports::Auto).await;
    near.knows(&[&home]);
    world.remove_packs().await;
    near.warm("ours/set", From::Site("home".into())).await;
    let mut counted = Vec::new();
    for agent in [&home, &near] {
        let tenants = agent.exchange.cache().tenants();
        let [TenantUse { tenant, bytes, .. }] = &tenants[..] else { panic!("{tenants:?}") };
        assert!(tenant == "clinic" && (2 << 20..3 << 20).contains(bytes), "{tenants:?}");
        counted.push(*bytes);
    }
    let all = home.exchange.cache().stat().bytes;
    assert!(all >= counted[0] + (2 << 20), "the other set counts for nobody: {all}");
}
