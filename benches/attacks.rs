//! Cost of peers without rights, beside one idle connection: memory, open files, requests to the store, and
//! how long a good handshake takes meanwhile; and how long the answers to what is forbidden and to what is absent take.
//!
//! `cargo bench --bench attacks` (`ATTACKS_SECONDS` sets how long each goes on). The agent is this program, started once more, so
//! that its memory is its own.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use towline::budget::Budget;
use towline::cache::{Cache, CacheOptions};
use towline::clock::{Clock as _, SystemClock};
use towline::id::ManifestId;
use towline::identity::Identity;
use towline::metrics::Metric;
use towline::name::Name;
use towline::ops::SaveOptions;
use towline::pattern::Patterns;
use towline::policy::{AllowList, AllowRule};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;
use towline::transfer::exchange::{Exchange, ExchangeOptions, Limits, NAMED_PATIENCE};
use towline::transfer::identity::{Authority, Credentials};
use towline::transfer::peers::{Peers, PeersOptions};
use towline::transfer::policy::Policies;
use towline::transfer::protocol::{Priority, Runs, Wanted};
use towline::transfer::{self, Client, Dial, Gate, ServedChunks, tcp};

const MIB: u64 = 1 << 20;
/// The folder of the agent that is started once more.
const FOLDER: &str = "ATTACKS_FOLDER";
/// Connections of the attacker.
const LINKS: usize = 16;
/// Sockets that say nothing.
const SILENT: usize = 400;
/// Answers that are measured, of either kind.
const ANSWERS: usize = 200;

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    match std::env::var_os(FOLDER) {
        Some(folder) => runtime.block_on(agent(Path::new(&folder))),
        None => runtime.block_on(attack()),
    }
}

/// The agent: says where it listens and which manifests there are; then, for each line that it is told, what it has used.
async fn agent(folder: &Path) {
    let store = Store::memory();
    let options = OpenOptions { cache: Some(folder.join("index")), memory: Some(128 * MIB), ..OpenOptions::default() };
    let (repository, _) = Repository::create(store, options).await.unwrap();
    let tree = folder.join("tree");
    std::fs::create_dir_all(&tree).unwrap();
    std::fs::write(tree.join("file"), vec![7; 1 << 20]).unwrap();
    for name in ["public/one", "secret/one"] {
        std::fs::write(tree.join("name"), name).unwrap();
        repository.save(&tree, &name.parse().unwrap(), &SaveOptions::default()).await.unwrap();
    }
    let credentials = Credentials::open(&folder.join("server"), Arc::new(SystemClock)).unwrap();
    let cache = CacheOptions { free_floor: 0, ..CacheOptions::new(64 * MIB) };
    let cache = Arc::new(Cache::open(&folder.join("cache"), cache).unwrap());
    let budget = Budget::new(256 * MIB).unwrap();
    let peers = Peers::new(credentials.clone(), budget.clone(), PeersOptions::default());
    let patterns = |text| Patterns::of(&[text]).unwrap();
    let allow = AllowList::only(vec![AllowRule { agents: patterns("cloud/*"), names: patterns("public/*") }]);
    let (identity, ahead) = (credentials.identity(), budget.carve(32 * MIB).await.unwrap());
    let (limits, policies) = (Limits::default(), Policies::new(Some(credentials.clone()), None));
    let named_patience = NAMED_PATIENCE;
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
    exchange.serve_repository(&repository);
    let (gate, over) = (Gate::default(), CancellationToken::new());
    let any = "127.0.0.1:0".parse().unwrap();
    let (tcp, quic) = transfer::listen(any, &credentials).await.unwrap();
    let (tcp, quic) = (tcp.through(gate.clone()), quic.through(gate));
    let address = tcp.address().unwrap();
    let served_chunks: Arc<dyn ServedChunks> = exchange;
    tokio::spawn(tcp.serve(Arc::clone(&served_chunks), over.clone()));
    tokio::spawn(quic.serve(served_chunks, over));
    let state = repository.state().await.unwrap();
    let manifest = |name: &str| state.refs[&name.parse::<Name>().unwrap()].manifest;
    println!("{address} {} {}", manifest("secret/one"), manifest("public/one"));
    let told = tokio::task::spawn_blocking(move || {
        for _ in std::io::stdin().lines() {
            let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
            let requests = repository.store().counters().get(Metric::GetRequests);
            println!("{} {files} {requests}", resident());
        }
    });
    told.await.unwrap();
}

/// Memory of this process in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// An agent that runs as a process of its own.
struct Agent {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
    secret: ManifestId,
    public: ManifestId,
}

#[derive(Clone, Copy)]
struct Used {
    kib: u64,
    files: u64,
    requests: u64,
}

impl Agent {
    fn start(folder: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(FOLDER, folder).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let (input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let told: Vec<&str> = line.split_whitespace().collect();
        let (address, secret, public) = (told[0].parse().unwrap(), manifest(told[1]), manifest(told[2]));
        Self { child, input, output, address, secret, public }
    }

    fn used(&mut self) -> Used {
        writeln!(self.input).unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        Used { kib: numbers[0], files: numbers[1], requests: numbers[2] }
    }
}

/// A manifest's id, from its hexadecimal digits.
fn manifest(text: &str) -> ManifestId {
    let mut bytes = [0; 32];
    for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    }
    ManifestId::from_bytes(bytes)
}

impl Drop for Agent {
    fn drop(&mut self) {
        // A dropped agent is not reused: its exit status does not matter.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An attack on an agent.
#[derive(Clone, Copy)]
enum Attack {
    Nothing,
    IdleLinks(usize),
    Cancel,
    Find,
    Silent,
}

async fn attack() {
    let seconds: u64 = std::env::var("ATTACKS_SECONDS").map_or(8, |seconds| seconds.parse().unwrap());
    let quick = std::env::args().any(|arg| arg == "--test");
    let lasting = Duration::from_secs(if quick { 1 } else { seconds });
    let folder = tempfile::tempdir().unwrap();
    Authority::create(&folder.path().join("ca"), "bench", 10, SystemClock.now()).unwrap();
    issue(folder.path(), "home/server", "server");
    let (bad, good) = (issue(folder.path(), "cloud/bad", "bad"), issue(folder.path(), "cloud/good", "good"));
    println!(
        "| attack, {} s | sent | memory, MiB more | files more | store requests | good handshake, ms: median, worst |",
        lasting.as_secs()
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for (word, attack) in [
        ("nothing", Attack::Nothing),
        ("one idle connection", Attack::IdleLinks(1)),
        ("16 idle connections", Attack::IdleLinks(LINKS)),
        ("REQUEST and CANCEL, 16 connections", Attack::Cancel),
        ("FIND of unknown manifests, 16 connections", Attack::Find),
        ("400 silent sockets, made again and again", Attack::Silent),
    ] {
        let mut agent = Agent::start(&folder.path().join(fresh(folder.path())));
        // Whatever is made once is there.
        drop(dial(agent.address, &good).await);
        let before = agent.used();
        let (to, over) = (agent.address, Instant::now() + lasting);
        let bad = bad.clone();
        // On one thread of its own: who is good must not wait for the attacker's own work.
        let attacking = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(attacking(attack, to, bad, over))
        });
        let (mut delays, mut most) = (Vec::new(), before);
        while Instant::now() < over {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let begun = Instant::now();
            // A question is answered, not only a handshake made.
            let client = dial(to, &good).await;
            client.find(agent.public, 0).await.unwrap();
            delays.push(begun.elapsed());
            let now = agent.used();
            most = Used { kib: most.kib.max(now.kib), files: most.files.max(now.files), requests: now.requests };
        }
        let sent = attacking.join().unwrap();
        delays.sort_unstable();
        let millis = |delay: Duration| delay.as_secs_f64() * 1000.0;
        println!(
            "| {word} | {sent} | {:.1} | {} | {} | {:.0}, {:.0} |",
            (most.kib.saturating_sub(before.kib)) as f64 / 1024.0,
            most.files.saturating_sub(before.files),
            most.requests - before.requests,
            millis(delays[delays.len() / 2]),
            millis(*delays.last().unwrap()),
        );
    }
    answers(&Agent::start(&folder.path().join(fresh(folder.path()))), &good).await;
}

/// The name of a folder of its own for an agent, with its certificate.
fn fresh(folder: &Path) -> String {
    let name = format!("agent-{}", std::fs::read_dir(folder).unwrap().count());
    let (own, server) = (folder.join(&name).join("server"), folder.join("server"));
    std::fs::create_dir_all(&own).unwrap();
    for file in std::fs::read_dir(server).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), own.join(file.file_name())).unwrap();
    }
    name
}

fn issue(folder: &Path, path: &str, to: &str) -> Credentials {
    let (site, agent) = path.split_once('/').unwrap();
    let to: PathBuf = folder.join(to);
    let authority = Authority::open(&folder.join("ca")).unwrap();
    authority.issue(&(&Identity::new(site, agent).unwrap()).into(), &to, (5, SystemClock.now()), true).unwrap();
    Credentials::open(&to, Arc::new(SystemClock)).unwrap()
}

async fn dial(to: SocketAddr, credentials: &Credentials) -> Client {
    let budget = Budget::new(64 * MIB).unwrap();
    let dial = Dial { expected: None, budget: &budget, window: 8 * MIB };
    tcp::connect(to, credentials, &dial).await.unwrap()
}

fn unknown(n: u64) -> ManifestId {
    ManifestId::of(&n.to_le_bytes())
}

/// Attacks until `over`; how often.
async fn attacking(attack: Attack, to: SocketAddr, bad: Credentials, over: Instant) -> u64 {
    match attack {
        Attack::Nothing => 0,
        Attack::IdleLinks(count) => {
            let links = join_all((0..count).map(|_| dial(to, &bad))).await;
            tokio::time::sleep_until(over.into()).await;
            links.len() as u64
        }
        Attack::Cancel | Attack::Find => {
            let links = join_all((0..LINKS).map(|_| dial(to, &bad))).await;
            let asking = links.iter().zip(0..).map(|(link, n)| async move {
                let mut sent = 0;
                while Instant::now() < over {
                    if matches!(attack, Attack::Cancel) {
                        let wanted = Wanted { chunks: Runs::of(0..10), bases: Vec::new(), ..Wanted::default() };
                        drop(link.fetch(Priority::Restore, unknown(n << 32 | sent), wanted).await);
                        sent += 1;
                    } else {
                        let asked = (0..32).map(|more| link.find(unknown(n << 32 | (sent + more)), 0));
                        let answered = tokio::time::timeout_at(over.into(), join_all(asked)).await;
                        sent += if answered.is_ok() { 32 } else { 0 };
                    }
                }
                sent
            });
            join_all(asking).await.into_iter().sum()
        }
        Attack::Silent => {
            let mut sent = 0;
            while Instant::now() < over {
                let sockets = join_all((0..SILENT).map(|_| TcpStream::connect(to))).await;
                sent += sockets.len() as u64;
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            sent
        }
    }
}

/// Times of the answers for a forbidden and for an absent manifest.
async fn answers(agent: &Agent, good: &Credentials) {
    let client = dial(agent.address, good).await;
    let (mut forbidden, mut absent) = (Vec::new(), Vec::new());
    for n in 0..ANSWERS as u64 {
        for (times, manifest) in [(&mut forbidden, agent.secret), (&mut absent, unknown(n / 50))] {
            // Misses are remembered for a second, so each request asks for a new id.
            tokio::time::sleep(Duration::from_millis(30)).await;
            let begun = Instant::now();
            client.find(manifest, 0).await.unwrap_err();
            times.push(begun.elapsed());
        }
    }
    println!("\n| answer | p5, ms | median, ms | p95, ms | p99, ms |\n| --- | --- | --- | --- | --- |");
    for (word, mut times) in [("forbidden", forbidden), ("absent", absent)] {
        times.sort_unstable();
        let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1000.0;
        println!("| {word} | {:.2} | {:.2} | {:.2} | {:.2} |", at(5), at(50), at(95), at(99));
    }
}
