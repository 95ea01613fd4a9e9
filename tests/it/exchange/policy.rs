//! The signed policy between agents: a site that it denies gets not one byte of a name, whatever `[[allow]]` says.

use towline::policy::Labels;
use towline::repository::Guard;
use towline::repository::log::PolicyMark;
use towline::transfer::Dial;
use towline::transfer::identity::PolicyKey;
use towline::transfer::policy::{Policies, sign};
use towline::transfer::protocol::{AskedChunk, FrameRequest, Priority, Wanted};
use towline::transfer::tcp;

use super::*;

const SITES: &str = "\
[[site]]
name = 'home'
jurisdiction = 'DE'
private_store = true

[[site]]
name = 'cloud'
jurisdiction = 'US'
private_store = true

[[site]]
name = 'near'
jurisdiction = 'DE'

[[link]]
between = ['home', 'cloud']
addresses = '127.0.0.0/8'
";

fn rules(text: &str) -> String {
    SITES.replace("'127.0.0.0/8'", "['127.0.0.0/8']") + text
}

impl Fixture {
    /// A repository of an agent whose guard is `policies`.
    async fn guarded(&self, cache: &str, policies: &Arc<Policies>) -> Repository {
        let guard: Arc<dyn Guard> = Arc::<Policies>::clone(policies);
        let options = OpenOptions { cache: Some(self.path(cache)), memory: Some(128 << 20), guard: Some(guard) };
        let objects = Arc::clone(&self.objects) as Arc<dyn ObjectStore>;
        Repository::create(Store::from_objects(objects), options).await.unwrap().0
    }

    /// An agent that obeys the policy.
    pub(super) async fn obedient(&self, site: &str, agent: &str, transports: Transports) -> Agent {
        self.obedient_as(&Identity::new(site, agent).unwrap(), transports).await
    }

    async fn obedient_as(&self, identity: &Identity, transports: Transports) -> Agent {
        let credentials = self.credentials_of(identity);
        let policies = Policies::new(Some(credentials.clone()), None);
        let plain = self.guarded(&format!("index-{}", identity.path().replace('/', "-")), &policies).await;
        self.agent_of(credentials, plain, (AllowList::everybody(), policies), transports).await
    }

    /// Puts a policy with these rules in force.
    pub(super) async fn set_policy(&self, repository: &Repository, version: u64, text: &str) {
        let folder = self.path("policy-key");
        if !folder.exists() {
            let authority = Authority::open(&self.path("ca")).unwrap();
            authority.issue_policy_key(&folder, 5, SystemClock.now()).unwrap();
        }
        let id = repository.id();
        let rules = rules(text).replacen("name = 'home'\n", &format!("name = 'home'\nrepositories = '{id}'\n"), 1);
        let text = format!("version = {version}\nrepository = '{id}'\n{rules}");
        let signed = sign(&text, &PolicyKey::open(&folder).unwrap()).unwrap();
        repository.set_policy(version, signed.into_bytes().into()).await.unwrap();
    }
}

pub(super) async fn label(repository: &Repository, what: &str, key: &str, value: &str) {
    repository.tighten(&name(what), &Labels::default().with(key, value).unwrap()).await.unwrap();
}

pub(super) const ALL: &str = "[[rule]]\nverdict = 'allow'\nwhy = 'all'\n";

/// Y3: "An agent that serves, an agent that asks [...] each check the policy; an agent's `[[allow]]` must allow the
/// request, too." P5: "No byte reaches a site that the policy denies".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_site_gets_nothing_of_a_denied_name() {
    for transports in [Transports::Quic, Transports::Tcp] {
        let world = Fixture::new();
        let home = world.obedient("home", "a", transports).await;
        world
            .set_policy(
                &home.plain,
                1,
                &format!("[[rule]]\nverdict = 'deny'\nnames = 'raw/**'\nto = 'cloud'\nwhy = 'stays'\n{ALL}"),
            )
            .await;
        let raw = world.save(&home.plain, "raw/set", 1, 2).await;
        let free = world.save(&home.plain, "free/set", 2, 2).await;
        home.warm("raw/set", From::Repository).await;
        home.warm("free/set", From::Repository).await;
        let cloud = world.obedient("cloud", "b", transports).await;
        let near = world.obedient("near", "c", transports).await;
        for agent in [&cloud, &near] {
            agent.knows(&[&home]);
        }
        near.restore("raw/set", &raw).await;
        cloud.restore("free/set", &free).await;
        let given = home.stats();
        let denied = cloud.near.restore(&name("raw/set"), None, &world.path("out"), &RestoreOptions::default()).await;
        assert_eq!(denied.unwrap_err().kind(), towline::ErrorKind::Denied);

        // One that does not obey, with the same certificate and no look at the policy, gets nothing either: the provider decides.
        let plain = world.repository("index-rogue").await;
        let nobody = Policies::new(None, None);
        let rogue =
            world.agent_of(world.credentials("cloud", "r"), plain, (AllowList::everybody(), nobody), transports).await;
        rogue.knows(&[&home]);
        let manifest = home.plain.state().await.unwrap().refs[&name("raw/set")].manifest;
        world.remove_packs().await;
        let lost = rogue.near.restore(&name("raw/set"), None, &world.path("out"), &RestoreOptions::default()).await;
        assert!(lost.is_err());
        assert_eq!(home.stats().to_remote, given.to_remote, "not a byte, over {transports:?}");
        let ledger = home.exchange.peers().ledger();
        let moved = ledger
            .entries()
            .into_iter()
            .filter(|entry| entry.peer.starts_with("towline://cloud/") && entry.manifest == manifest.to_string());
        assert_eq!(moved.map(|entry| entry.bytes).sum::<u64>(), 0);
    }
}

/// Y3: "A name whose rule requires a private path takes no other."
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_for_private_links_goes_over_none_else() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    let private =
        "[[rule]]\nverdict = 'allow'\nsensitivity-at-most = 'restricted'\npath = 'private'\nwhy = 'our line'\n";
    world.set_policy(&home.plain, 1, private).await;
    let folder = world.save(&home.plain, "set", 1, 2).await;
    label(&home.plain, "set", "sensitivity", "restricted").await;
    home.warm("set", From::Repository).await;
    // Loopback is the private line of home and cloud; near has none.
    let cloud = world.obedient("cloud", "b", Transports::Auto).await;
    cloud.knows(&[&home]);
    cloud.warm("set", From::Site("home".into())).await;
    cloud.restore("set", &folder).await;
    assert!(home.stats().to_remote > 1 << 20);
    let near = world.obedient("near", "c", Transports::Auto).await;
    near.knows(&[&home]);
    let denied = near.near.restore(&name("set"), None, &world.path("out"), &RestoreOptions::default()).await;
    assert_eq!(denied.unwrap_err().kind(), towline::ErrorKind::Denied);
    let manifest = home.plain.state().await.unwrap().refs[&name("set")].manifest;
    let asker = Identity::new("near", "c").unwrap();
    assert!(ServedChunks::authorise(&*home.exchange, &asker, &manifest).await.unwrap().is_none());
}

/// Y6: "An id that it does not map is at no site and nobody: no `[[allow]]` lets it read, whatever its patterns, and what has labels
/// does not go there."
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_workload_gets_what_the_agent_may_have_that_the_policy_maps_it_to() {
    for transports in [Transports::Quic, Transports::Tcp] {
        let world = Fixture::new();
        let home = world.obedient("home", "a", transports).await;
        let text = format!(
            "[[spiffe]]\nid = 'spiffe://example.org/ml/**'\nagent = 'cloud/ml'\n\
             [[rule]]\nverdict = 'deny'\nnames = 'raw/**'\nto = 'cloud'\nwhy = 'stays'\n{ALL}"
        );
        world.set_policy(&home.plain, 1, &text).await;
        let free = world.save(&home.plain, "free/set", 1, 2).await;
        world.save(&home.plain, "raw/set", 2, 2).await;
        home.warm("free/set", From::Repository).await;
        home.warm("raw/set", From::Repository).await;
        let mapped =
            Identity::spiffe("spiffe://example.org/ml/ns/with-a-rather-long-name/sa/trainer-of-models-1").unwrap();
        let unmapped = Identity::spiffe("spiffe://example.org/ops/a").unwrap();
        let state = home.plain.state().await.unwrap();
        let [free_tree, raw_tree] = ["free/set", "raw/set"].map(|tree| state.refs[&name(tree)].manifest);
        for (who, tree, may) in [
            (&mapped, free_tree, true),
            (&mapped, raw_tree, false),
            (&unmapped, free_tree, false),
            (&unmapped, raw_tree, false),
        ] {
            let asked = ServedChunks::authorise(&*home.exchange, who, &tree).await.unwrap();
            assert_eq!(asked.is_some(), may, "{who}");
        }
        // Over the wire, with the certificates: the mapped one is served, the other gets not a byte.
        let workload = world.obedient_as(&mapped, transports).await;
        workload.knows(&[&home]);
        workload.warm("free/set", From::Site("home".into())).await;
        workload.restore("free/set", &free).await;
        let given = home.stats().to_remote;
        assert!(given > 0);
        let denied =
            workload.near.restore(&name("raw/set"), None, &world.path("out"), &RestoreOptions::default()).await;
        assert_eq!(denied.unwrap_err().kind(), towline::ErrorKind::Denied);
        let stranger = world.obedient_as(&unmapped, transports).await;
        stranger.knows(&[&home]);
        label(&home.plain, "free", "sensitivity", "internal").await;
        let denied =
            stranger.near.restore(&name("free/set"), None, &world.path("out"), &RestoreOptions::default()).await;
        assert_eq!(denied.unwrap_err().kind(), towline::ErrorKind::Denied);
        assert_eq!(home.stats().to_remote, given, "not a byte, over {transports:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_without_a_policy_and_labels_of_another_name_hold_too() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    world.set_policy(&home.plain, 1, ALL).await;
    world.save(&home.plain, "open/set", 1, 1).await;
    home.plain.copy(&name("open/set"), &name("bound/set")).await.unwrap();
    let asker = Identity::new("cloud", "b").unwrap();
    let manifest = home.plain.state().await.unwrap().refs[&name("open/set")].manifest;
    assert!(ServedChunks::authorise(&*home.exchange, &asker, &manifest).await.unwrap().is_some());
    label(&home.plain, "bound", "residency", "DE").await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let asked = ServedChunks::authorise(&*home.exchange, &asker, &manifest).await.unwrap();
    assert!(asked.is_none(), "the tree has the labels of its other name");

    // An agent that cannot verify the policy denies what has labels.
    let nobody = Policies::new(None, None);
    let plain = world.repository("index-blind").await;
    let blind =
        world.agent_of(world.credentials("home", "z"), plain, (AllowList::everybody(), nobody), Transports::Auto).await;
    let near = Identity::new("near", "c").unwrap();
    assert!(ServedChunks::authorise(&*blind.exchange, &near, &manifest).await.unwrap().is_none());
    assert!(ServedChunks::authorise(&*home.exchange, &near, &manifest).await.unwrap().is_some());
}

/// Y4: "refuses an older one, or none, in the repository from then on": by who serves, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_saw_a_later_policy_serves_nothing_by_an_older_one() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    world.save(&home.plain, "set", 1, 1).await;
    let manifest = home.plain.state().await.unwrap().refs[&name("set")].manifest;
    let cloud = Identity::new("cloud", "b").unwrap();
    assert!(ServedChunks::authorise(&*home.exchange, &cloud, &manifest).await.unwrap().is_some());
    let seen = world.path("seen");
    fs::create_dir(&seen).unwrap();
    fs::write(seen.join(home.plain.id().to_string()), "1\n").unwrap();
    let credentials = world.credentials("home", "wise");
    let policies = Policies::new(Some(credentials.clone()), Some(seen));
    let plain = world.guarded("index-wise", &policies).await;
    let wise = world.agent_of(credentials, plain, (AllowList::everybody(), policies), Transports::Auto).await;
    assert!(ServedChunks::authorise(&*wise.exchange, &cloud, &manifest).await.unwrap().is_none());
}

/// Y4: "The signature covers repository and version."
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_that_was_verified_for_one_repository_is_none_for_another() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    world.set_policy(&home.plain, 1, ALL).await;
    let policy = home.plain.policy_of(&home.plain.state().await.unwrap()).await.unwrap().unwrap();
    let policies = Policies::new(Some(world.credentials("home", "b")), None);
    policies.rules(home.plain.id(), &policy).unwrap();
    let other = "01M87GQC5GMM45TJSWEDZE9MS3".parse().unwrap();
    let refused = policies.rules(other, &policy).unwrap_err();
    assert!(refused.to_string().contains("another repository"), "{refused}");
    // Nor is another text of the version that was seen.
    assert!(policies.check_version(home.plain.id(), Some(policy.mark)).is_ok());
    let another = PolicyMark { digest: [7; 32], ..policy.mark };
    let refused = policies.check_version(home.plain.id(), Some(another)).unwrap_err();
    assert!(refused.to_string().contains("another text"), "{refused}");
}

/// Y8: "One that hears of a later one than its own reads the log again before it rules on anything"
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_with_an_old_log_does_not_serve_by_it_after_a_peer_told_it_of_a_later_policy() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    world.set_policy(&home.plain, 1, ALL).await;
    world.save(&home.plain, "set", 1, 1).await;
    let manifest = home.plain.state().await.unwrap().refs[&name("set")].manifest;
    let cloud = Identity::new("cloud", "b").unwrap();
    assert!(ServedChunks::authorise(&*home.exchange, &cloud, &manifest).await.unwrap().is_some());
    let reads = async || home.plain.check_readable(&name("set"), &manifest).await.map_err(|error| error.kind());
    assert_eq!(reads().await, Ok(()));

    // Another machine sets a policy, and sees it.
    let credentials = world.credentials("near", "c");
    let policies = Policies::new(Some(credentials.clone()), None);
    let near = world.guarded("index-near", &policies).await;
    let denies = "[[rule]]\nverdict = 'deny'\nnames = 'set'\nto = ['home', 'cloud']\nwhy = 'no more'\n";
    world.set_policy(&near, 2, &format!("{denies}{ALL}")).await;
    near.state().await.unwrap();
    near.check_readable(&name("set"), &manifest).await.unwrap();
    assert_eq!(reads().await, Ok(()), "the log that was read last is good enough");

    // It says so when it connects, and nothing else.
    let budget = Budget::new(64 * MIB).unwrap();
    let dial = Dial { expected: None, budget: &budget, window: 8 * MIB };
    let told = tcp::connect(home.address.parse().unwrap(), &credentials, &dial).await.unwrap();
    for _ in 0..500 {
        if told.rtt().is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(told.rtt().is_some(), "its hello was answered");
    assert_eq!(reads().await, Err(towline::ErrorKind::Denied));
    assert!(ServedChunks::authorise(&*home.exchange, &cloud, &manifest).await.unwrap().is_none());
}

/// Y3: "A change of policy or labels stops what is not sent yet within two seconds"
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_that_changes_during_a_transfer_stops_it() {
    let world = Fixture::new();
    let home = world.obedient("home", "a", Transports::Auto).await;
    world.set_policy(&home.plain, 1, ALL).await;
    world.save(&home.plain, "set", 1, 1).await;
    home.warm("set", From::Repository).await;
    let state = home.plain.state().await.unwrap();
    let manifest = state.refs[&name("set")].manifest;
    let saved = home.plain.saved(&name("set")).await.unwrap();
    let id = saved.manifest.chunks.ids[0];
    let cloud = Identity::new("cloud", "b").unwrap();
    let asked = FrameRequest { priority: Priority::Restore, manifest, wanted: Arc::new(Wanted::default()) };
    assert!(ServedChunks::authorise(&*home.exchange, &cloud, &manifest).await.unwrap().is_some());
    let frame =
        async || ServedChunks::frame(&*home.exchange, &cloud, &asked, AskedChunk { id, alone: false }).await.unwrap();
    assert!(frame().await.is_some());
    world
        .set_policy(&home.plain, 2, &format!("[[rule]]\nverdict = 'deny'\nto = 'cloud'\nwhy = 'no more'\n{ALL}"))
        .await;
    tokio::time::sleep(Duration::from_millis(2100)).await;
    assert!(frame().await.is_none(), "what is not sent yet is not sent");
}
