//! Exchanges of real agents on loopback, with real certificates: what is near is not fetched from afar, what is afar is fetched
//! once, and who lies, leaves or may not read costs nothing but time.

mod attacks;
mod bases;
mod cold;
mod denied;
mod faults;
mod finding;
mod memory;
mod mesh;
mod moving;
mod policy;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use object_store::{ObjectStore, ObjectStoreExt as _};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use towline::agent::{WarmOptions, Warmed, warm};
use towline::budget::Budget;
use towline::cache::{Cache, CacheOptions, TenantQuotas};
use towline::clock::{Clock, SystemClock};
use towline::identity::Identity;
use towline::metrics::Metric;
use towline::ops::{RestoreOptions, SaveOptions};
use towline::pattern::Patterns;
use towline::policy::{AllowList, AllowRule};
use towline::repository::layout::{self, Family};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;
use towline::transfer::exchange::{
    Exchange, ExchangeOptions, FetchPolicy, From, Limits, NAMED_PATIENCE, TransferStats,
};
use towline::transfer::identity::{Authority, Credentials};
use towline::transfer::peers::{Peers, PeersOptions, Transports};
use towline::transfer::policy::Policies;
use towline::transfer::{self, ServedChunks};

use crate::data::{name, safetensors, tree_digest};

const MIB: u64 = 1 << 20;

/// One repository, one authority, and a folder for everybody.
struct Fixture {
    dir: TempDir,
    objects: Arc<ThrottledStore<InMemory>>,
    /// Time limit of named sources, for new agents.
    named_patience: Duration,
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

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(&dir.path().join("ca"), "test", 10, SystemClock.now()).unwrap();
        let objects = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
        Self { dir, objects, named_patience: NAMED_PATIENCE }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn repository(&self, cache: &str) -> Repository {
        let options = OpenOptions { cache: Some(self.path(cache)), memory: Some(128 << 20), ..OpenOptions::default() };
        let objects = Arc::clone(&self.objects) as Arc<dyn ObjectStore>;
        Repository::create(Store::from_objects(objects), options).await.unwrap().0
    }

    fn credentials(&self, site: &str, agent: &str) -> Credentials {
        self.credentials_of(&Identity::new(site, agent).unwrap())
    }

    fn credentials_of(&self, identity: &Identity) -> Credentials {
        let folder = self.path(&format!("tls-{}", identity.path().replace('/', "-")));
        let authority = Authority::open(&self.path("ca")).unwrap();
        authority.issue(&identity.into(), &folder, (5, SystemClock.now()), true).unwrap();
        Credentials::open(&folder, Arc::new(SystemClock)).unwrap()
    }

    async fn agent(&self, site: &str, agent: &str) -> Agent {
        self.agent_with(site, agent, AllowList::everybody(), Transports::Auto).await
    }

    async fn agent_with(&self, site: &str, agent: &str, allow: AllowList, transports: Transports) -> Agent {
        let credentials = self.credentials(site, agent);
        let plain = self.repository(&format!("index-{site}-{agent}")).await;
        let policies = Policies::new(Some(credentials.clone()), None);
        self.agent_of(credentials, plain, (allow, policies), transports).await
    }

    /// The agent that `credentials` name, with its repository and the rules that it obeys.
    async fn agent_of(
        &self,
        credentials: Credentials,
        plain: Repository,
        (allow, policies): (AllowList, Arc<Policies>),
        transports: Transports,
    ) -> Agent {
        let own = credentials.identity().path().replace('/', "-");
        let quotas = TenantQuotas { each: Some(256 * MIB), ..TenantQuotas::default() };
        let cache = CacheOptions { free_floor: 0, quotas, ..CacheOptions::new(512 * MIB) };
        let cache = Arc::new(Cache::open(&self.path(&format!("cache-{own}")), cache).unwrap());
        let budget = Budget::new(256 * MIB).unwrap();
        let options = PeersOptions { transports, connections: 2, window: 8 * MIB, ..PeersOptions::default() };
        let peers = Peers::new(credentials.clone(), budget.clone(), options);
        let identity = credentials.identity();
        let (ahead, limits) = (budget.carve(32 * MIB).await.unwrap(), Limits::default());
        let named_patience = self.named_patience;
        let exchange = Exchange::new(ExchangeOptions {
            identity,
            cache,
            budget,
            ahead,
            peers,
            allow,
            policies,
            limits,
            named_patience,
        });
        exchange.serve_repository(&plain);
        let leaving = CancellationToken::new();
        let address = serve(&credentials, Arc::clone(&exchange) as Arc<dyn ServedChunks>, &leaving).await;
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

    /// From now on each read of the store takes `time` before its first byte.
    fn origin_is_far(&self, time: Duration) {
        self.objects.config_mut(|config| config.wait_get_per_call = time);
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

/// Agents that match `agents` may read names that match `names`.
fn only(agents: &str, names: &str) -> AllowList {
    let patterns = |text| Patterns::of(&[text]).unwrap();
    AllowList::only(vec![AllowRule { agents: patterns(agents), names: patterns(names) }])
}

/// Serves on both transports at one port.
async fn serve(credentials: &Credentials, served_chunks: Arc<dyn ServedChunks>, leaving: &CancellationToken) -> String {
    let (tcp, quic) = transfer::listen("127.0.0.1:0".parse().unwrap(), credentials).await.unwrap();
    let address = tcp.address().unwrap();
    tokio::spawn(tcp.serve(Arc::clone(&served_chunks), leaving.clone()));
    tokio::spawn(quic.serve(served_chunks, leaving.clone()));
    address.to_string()
}

impl Agent {
    fn knows(&self, others: &[&Self]) {
        others.iter().for_each(|other| self.exchange.peers().add(&other.address).unwrap());
    }

    /// Waits until it has a link to each agent that it knows: a plan is made for those that are there.
    async fn is_linked(&self) {
        let peers = self.exchange.peers();
        while peers.live().await.len() < peers.list().len() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn warm(&self, what: &str, from: From) -> Warmed {
        let policy = FetchPolicy { from, ..FetchPolicy::default() };
        let options = WarmOptions { policy, ..WarmOptions::default() };
        warm(&self.exchange, &self.plain, &name(what), &options).await.unwrap()
    }

    /// Restores to a fresh folder, and compares with `expected`.
    async fn restore(&self, what: &str, expected: &Path) {
        let target = tempfile::tempdir().unwrap();
        let to = target.path().join("restored");
        self.near.restore(&name(what), None, &to, &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(&to), tree_digest(expected));
    }

    fn stats(&self) -> TransferStats {
        self.exchange.stats()
    }

    /// Bytes that came from the store, whoever asked.
    fn stored_bytes_read(&self) -> u64 {
        self.plain.store().counters().get(Metric::GetBytes)
    }
}
