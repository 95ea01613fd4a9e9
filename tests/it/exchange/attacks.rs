//! Peers that may do nothing and try everything: what they cost is counted, and who may is not kept waiting. G4 and G7 of
//! docs/semantics.md.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpStream, UdpSocket};
use tokio::runtime::Handle;
use towline::id::{ChunkId, ManifestId};
use towline::ops::UndeleteOptions;
use towline::transfer::calls::call;
use towline::transfer::protocol::{
    AskedChunk, EndCode, FrameRequest, Grant, OutgoingFrame, Priority, RequestOutcome, Runs, Survey, Wanted,
};
use towline::transfer::{self, Admission, Client, Dial, Gate, Reply, quic, tcp};
use towline::{ErrorKind, Result};

use super::*;

/// Time limit for what must happen at some time.
pub(super) const PATIENCE: Duration = Duration::from_mins(1);
pub(super) const ANY: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

/// Never finds out what anybody may read; counts how often it is asked, and how many it works for.
#[derive(Default)]
struct Stuck {
    asked: AtomicUsize,
    working: Arc<AtomicUsize>,
    most: AtomicUsize,
}

struct Working(Arc<AtomicUsize>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl ServedChunks for Stuck {
    async fn authorise(&self, _: &Identity, _: &ManifestId) -> Result<Option<Arc<Grant>>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let working = self.working.fetch_add(1, Ordering::SeqCst) + 1;
        let _working = Working(Arc::clone(&self.working));
        self.most.fetch_max(working, Ordering::SeqCst);
        std::future::pending().await
    }

    async fn survey(&self, _: &Grant, _: u32) -> Result<Survey> {
        Ok(Survey::default())
    }

    async fn frame(&self, _: &Identity, _: &FrameRequest, _: AskedChunk) -> Result<Option<OutgoingFrame>> {
        Ok(None)
    }
}

/// Serves on both transports through one gate.
pub(super) async fn serve_through(
    credentials: &Credentials,
    served_chunks: Arc<dyn ServedChunks>,
    gate: &Gate,
) -> SocketAddr {
    let (tcp, quic) = transfer::listen(SocketAddr::from(ANY), credentials).await.unwrap();
    let (mut tcp, quic) = (tcp.through(gate.clone()), quic.through(gate.clone()));
    let address = tcp.address().unwrap();
    let mut calls = tcp.take_calls();
    tokio::spawn(tcp.serve(Arc::clone(&served_chunks), CancellationToken::new()));
    tokio::spawn(quic.serve(served_chunks, CancellationToken::new()));
    // Calls are taken, and kept open.
    tokio::spawn(async move {
        let mut taken = Vec::new();
        while let Some(line) = calls.next().await {
            taken.push(line);
        }
    });
    address
}

pub(super) async fn dial(quic: bool, to: SocketAddr, credentials: &Credentials) -> Result<Client> {
    let budget = Budget::new(64 * MIB).unwrap();
    let dial = Dial { expected: None, budget: &budget, window: 8 * MIB };
    if quic { quic::connect(to, credentials, &dial).await } else { tcp::connect(to, credentials, &dial).await }
}

pub(super) fn unknown(n: u64) -> ManifestId {
    ManifestId::of(&n.to_le_bytes())
}

fn some_chunks() -> Wanted {
    Wanted { chunks: Runs::of(0..10), bases: Vec::new(), ..Wanted::default() }
}

pub(super) async fn until(what: &str, done: impl Fn() -> bool) {
    let waited = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waited).await.unwrap_or_else(|_| panic!("{what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_requests_leave_no_work_behind() {
    let world = Fixture::new();
    for quic in [false, true] {
        let stuck = Arc::new(Stuck::default());
        let gate = Gate::new(Admission { requests_per_second: 1_000_000, ..Admission::default() });
        let to = serve_through(&world.credentials("east", "server"), Arc::clone(&stuck) as _, &gate).await;
        let attacker = world.credentials("west", "attacker");
        let links = join_all((0..4).map(|_| dial(quic, to, &attacker))).await;
        let links: Vec<Client> = links.into_iter().map(Result::unwrap).collect();
        until("a link is not counted", || gate.stat().links == links.len()).await;
        let alive = Handle::current().metrics().num_alive_tasks();
        join_all(links.iter().map(|link| flood(link, 1000))).await;
        until("work goes on for what was cancelled", || stuck.working.load(Ordering::SeqCst) == 0).await;
        let (asked, most) = (stuck.asked.load(Ordering::SeqCst), stuck.most.load(Ordering::SeqCst));
        assert!(most <= 64, "one agent's links have one share: {most} of {asked}");
        until("tasks are left behind", || Handle::current().metrics().num_alive_tasks() <= alive + 64).await;
        // It may still ask.
        drop(links[0].fetch(Priority::Restore, unknown(0), some_chunks()).await.unwrap());
    }
}

/// Makes requests and cancels each at once.
async fn flood(link: &Client, count: u64) {
    let mut made = 0;
    while made < count {
        match link.fetch(Priority::Restore, unknown(made), some_chunks()).await {
            Ok(fetching) => {
                made += 1;
                drop(fetching);
            }
            // As many are open as the other side takes.
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_unknown_names_reads_the_log_once_for_all() {
    let world = Fixture::new();
    let allow = only("cloud/*", "public/*");
    let home = world.agent_with("home", "a", allow, Transports::Auto).await;
    world.save(&home.plain, "public/one", 6, 1).await;
    let requests = || home.plain.store().counters().get(Metric::GetRequests);
    let one = requests();
    home.plain.state().await.unwrap();
    let one = requests() - one;
    let asker = Identity::new("cloud", "b").unwrap();
    let ask = |n: u64| {
        let asker = &asker;
        let exchange = &home.exchange;
        async move { ServedChunks::authorise(&**exchange, asker, &unknown(n)).await.unwrap().is_none() }
    };
    let before = requests();
    assert!(join_all((0..20_000).map(&ask)).await.into_iter().all(|none| none));
    let cost = requests() - before;
    // As many as it takes reads to poll them all, of which those that ask within 20 ms share one.
    assert!(cost <= 200, "{cost} requests, where one read takes {one}");
    assert_eq!(home.exchange.cache().stat().misses, 0);

    // What was not there a moment ago is not looked for again.
    let before = requests();
    for n in 19_500..20_000 {
        assert!(ask(n).await);
    }
    let cost = requests() - before;
    assert!(cost <= 100, "{cost} requests for what was asked before");

    // What is saved after that is found: the log is newer. A read that began before the save stands for 20 ms.
    let folder = world.save(&home.plain, "public/two", 9, 1).await;
    assert!(folder.exists());
    tokio::time::sleep(Duration::from_millis(20)).await;
    let state = home.plain.state().await.unwrap();
    let manifest = state.refs[&name("public/two")].manifest;
    assert!(ServedChunks::authorise(&*home.exchange, &asker, &manifest).await.unwrap().is_some());
}

/// B3: "A kept value has no name: no command, agent or HTTP request can read it".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_of_a_removed_name_is_given_to_nobody() {
    let world = Fixture::new();
    let home = world.agent_with("home", "a", only("cloud/*", "public/*"), Transports::Auto).await;
    world.save(&home.plain, "public/one", 6, 1).await;
    world.save(&home.plain, "public/two", 7, 1).await;
    let manifest = home.plain.state().await.unwrap().refs[&name("public/two")].manifest;
    let asker = Identity::new("cloud", "b").unwrap();
    let may = async || ServedChunks::authorise(&*home.exchange, &asker, &manifest).await.unwrap().is_some();
    // An agent reads the log again after a second.
    let settle = || tokio::time::sleep(Duration::from_millis(1100));
    assert!(may().await);
    home.plain.remove(&name("public/two")).await.unwrap();
    settle().await;
    assert!(!may().await, "removed, and kept");
    home.plain.undelete(&name("public/two"), &UndeleteOptions::default()).await.unwrap();
    settle().await;
    assert!(may().await, "taken back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_and_absent_cost_the_same_reads() {
    let world = Fixture::new();
    let writer = world.agent("home", "writer").await;
    world.save(&writer.plain, "public/one", 6, 1).await;
    world.save(&writer.plain, "secret/one", 7, 1).await;
    let state = writer.plain.state().await.unwrap();
    let forbidden = state.refs[&name("secret/one")].manifest;
    let open = state.refs[&name("public/one")].manifest;
    let asker = Identity::new("cloud", "b").unwrap();
    let mut seen = Vec::new();
    for (n, manifest) in [forbidden, unknown(1), forbidden, unknown(2)].into_iter().enumerate() {
        let allow = only("cloud/*", "public/*");
        let home = world.agent_with("home", &format!("a{n}"), allow, Transports::Auto).await;
        let counted = |home: &Agent| {
            let counters = home.plain.store().counters();
            let stat = home.exchange.cache().stat();
            (Metric::ALL.map(|metric| counters.get(metric)), stat.hits, stat.misses)
        };
        let mut steps = Vec::new();
        // Cold, then with all that is remembered.
        for _ in 0..3 {
            assert!(ServedChunks::authorise(&*home.exchange, &asker, &manifest).await.unwrap().is_none());
            steps.push(counted(&home));
        }
        seen.push(steps);
        assert!(ServedChunks::authorise(&*home.exchange, &asker, &open).await.unwrap().is_some());
    }
    // The first answers say it all; later ones may or may not read the log again, by the clock.
    let first: Vec<_> = seen.iter().map(|steps| steps[0]).collect();
    assert!(first.iter().all(|steps| *steps == first[0]), "{first:?}");
    assert!(seen.iter().flatten().all(|(_, hits, misses)| (*hits, *misses) == (0, 0)), "the cache was looked into");
}

/// S6 of docs/security.md.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_calls_with_unknown_names_reads_the_log_seldom() {
    let world = Fixture::new();
    let home = world.agent_with("home", "a", only("cloud/*", "public/*"), Transports::Auto).await;
    world.save(&home.plain, "public/step-1", 6, 1).await;
    let requests = || home.plain.store().counters().get(Metric::GetRequests);
    let ask = async |caller: usize, selector: String| {
        let caller = Identity::new("cloud", &format!("b{caller}")).unwrap();
        home.exchange.resolve(&caller, &home.plain, &selector.parse().unwrap()).await
    };
    let (before, begun) = (requests(), std::time::Instant::now());
    for round in 0..5 {
        let names = (0..1000).map(|n| ask(n % 8, format!("public/none-{round}-{n}")));
        assert!(join_all(names).await.into_iter().all(|resolved| resolved.unwrap_err().kind() == ErrorKind::NotFound));
    }
    // Reads are 20 ms apart, each of a few requests; without sharing it would be 5000 reads.
    let most = 4 * (2 + begun.elapsed().as_millis() / 20);
    let cost = requests() - before;
    assert!(u128::from(cost) <= most, "{cost} requests, where {most} may be");

    // What is readable is found at once, also what was saved just now.
    for step in 2..5 {
        world.save(&home.plain, &format!("public/step-{step}"), step, 1).await;
        for selector in [format!("public/step-{step}"), "public@latest".to_owned()] {
            assert_eq!(ask(0, selector).await.unwrap(), name(&format!("public/step-{step}")));
        }
    }
}

/// S6 of docs/security.md.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_with_forbidden_and_absent_names_cost_the_same_reads() {
    let world = Fixture::new();
    let writer = world.agent("home", "writer").await;
    world.save(&writer.plain, "public/step-1", 6, 1).await;
    world.save(&writer.plain, "secret/step-1", 7, 1).await;
    let caller = Identity::new("cloud", "b").unwrap();
    for (n, pair) in [["secret/step-1", "absent/step-1"], ["secret@latest", "absent@latest"]].iter().enumerate() {
        let mut seen = Vec::new();
        for (m, selector) in pair.iter().enumerate() {
            let allow = only("cloud/*", "public/*");
            let home = world.agent_with("home", &format!("a{n}{m}"), allow, Transports::Auto).await;
            let counted = || Metric::ALL.map(|metric| home.plain.store().counters().get(metric));
            let mut steps = Vec::new();
            for _ in 0..3 {
                let error = home.exchange.resolve(&caller, &home.plain, &selector.parse().unwrap()).await.unwrap_err();
                let told = serde_json::to_string(&error).unwrap();
                steps.push((counted(), told.replace("secret", "absent")));
            }
            seen.push(steps);
        }
        assert_eq!(seen[0], seen[1]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_sockets_do_not_keep_out_who_speaks() {
    let world = Fixture::new();
    // A handshake may take for ever here: nobody gets in because others are given up.
    let gate = Gate::new(Admission { handshake: Duration::from_hours(1), ..Admission::default() });
    let server = world.credentials("east", "server");
    let to = serve_through(&server, Arc::new(Stuck::default()), &gate).await;
    let good = world.credentials("west", "good");
    let mut silent = Vec::new();
    for _ in 0..320 {
        silent.push(TcpStream::connect(to).await.unwrap());
    }
    until("silent connections are not let go", || gate.stat().refused >= 320 - 32).await;
    assert!(gate.stat().handshakes <= 32, "{:?}", gate.stat());
    for quic in [false, true] {
        let client = dial(quic, to, &good).await.unwrap();
        assert_eq!(client.peer(), &Identity::new("east", "server").unwrap());
    }
    // Those that gave way are closed, and need not be waited for.
    assert_eq!(silent[0].read(&mut [0; 8]).await.unwrap_or(0), 0);
    drop(silent);
    until("who is gone is still counted", || gate.stat().handshakes == 0).await;
}

/// A request as long as requests may be.
fn many_chunks(n: u64) -> Wanted {
    let bases = (0..1024u64).map(|base| ChunkId::of(&[n.to_le_bytes(), base.to_le_bytes()].concat())).collect();
    Wanted { chunks: (0..4096).map(|place| 2 * place).collect(), bases, ..Wanted::default() }
}

/// S5 of docs/security.md.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_requests_of_one_agent_take_so_much_memory_and_no_more() {
    let world = Fixture::new();
    let stuck = Arc::new(Stuck::default());
    let gate = Gate::default();
    let to = serve_through(&world.credentials("east", "server"), Arc::clone(&stuck) as _, &gate).await;
    let attacker = world.credentials("west", "attacker");
    let links = [dial(false, to, &attacker).await.unwrap(), dial(true, to, &attacker).await.unwrap()];
    let mut open = Vec::new();
    for n in 0..80 {
        let mut fetching =
            links[n % 2].fetch(Priority::Restore, unknown(n as u64), many_chunks(n as u64)).await.unwrap();
        // Nothing comes of those that are taken on.
        match tokio::time::timeout(Duration::from_millis(if n < 10 { 0 } else { 100 }), fetching.next()).await {
            Err(_) => open.push(fetching),
            Ok(Some(Reply::Ended { how: RequestOutcome::Refused(EndCode::Busy, text), .. })) => {
                assert!(text.starts_with("too many chunks are requested at a time"), "{text}");
            }
            Ok(other) => panic!("{other:?}"),
        }
    }
    assert!((10..20).contains(&open.len()), "{} are open", open.len());
    let other = dial(false, to, &world.credentials("west", "other")).await.unwrap();
    let mut fetching = other.fetch(Priority::Restore, unknown(1), many_chunks(1)).await.unwrap();
    let nothing = tokio::time::timeout(Duration::from_millis(100), fetching.next()).await;
    assert!(nothing.is_err(), "others are not touched: {nothing:?}");
    // What is cancelled counts no more.
    open.clear();
    until("work goes on for what was cancelled", || stuck.working.load(Ordering::SeqCst) == 1).await;
    // The work is counted until it is dropped, a moment later.
    let again = async {
        loop {
            let mut again = links[0].fetch(Priority::Restore, unknown(0), many_chunks(0)).await.unwrap();
            match tokio::time::timeout(Duration::from_millis(100), again.next()).await {
                Err(_) => break,
                Ok(Some(Reply::Ended { how: RequestOutcome::Refused(EndCode::Busy, _), .. })) => {}
                Ok(other) => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, again).await.expect("it is served again");
}

/// Sends the first packet of `count` handshakes of QUIC to `to`, and nothing after it.
async fn half_open(count: usize, to: SocketAddr, credentials: &Credentials) -> UdpSocket {
    let relay = UdpSocket::bind(ANY).await.unwrap();
    let at = relay.local_addr().unwrap();
    let (mut packet, mut known) = ([0; 2048], BTreeSet::new());
    for _ in 0..count {
        let credentials = credentials.clone();
        let dialing = tokio::spawn(async move { dial(true, at, &credentials).await.is_ok() });
        // What one sends later, such as that it gives up, is kept back.
        let len = loop {
            let (len, from) = relay.recv_from(&mut packet).await.unwrap();
            if known.insert(from) {
                break len;
            }
        };
        dialing.abort();
        relay.send_to(&packet[..len], to).await.unwrap();
    }
    relay
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_quic_handshakes_do_not_keep_out_who_goes_on() {
    let world = Fixture::new();
    let gate = Gate::new(Admission { handshake: Duration::from_hours(1), ..Admission::default() });
    let to = serve_through(&world.credentials("east", "server"), Arc::new(Stuck::default()), &gate).await;
    let good = world.credentials("west", "good");
    let _relay = half_open(100, to, &world.credentials("west", "attacker")).await;
    until("nothing came", || gate.stat().handshakes >= 16).await;
    assert!(gate.stat().handshakes <= 32, "{:?}", gate.stat());
    // While many wait, an address is validated first: that, too, ends well.
    for _ in 0..3 {
        dial(true, to, &good).await.unwrap();
    }
    assert!(gate.stat().handshakes <= 33, "{:?}", gate.stat());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_agent_has_so_many_connections_and_is_told() {
    let world = Fixture::new();
    for quic in [false, true] {
        let gate = Gate::new(Admission { links_per_agent: 3, ..Admission::default() });
        let to = serve_through(&world.credentials("east", "server"), Arc::new(Stuck::default()), &gate).await;
        let greedy = world.credentials("west", "greedy");
        let mut held = Vec::new();
        for _ in 0..3 {
            held.push(dial(quic, to, &greedy).await.unwrap());
            until("a link is not counted", || gate.stat().links == held.len()).await;
        }
        for _ in 0..20 {
            let error = match dial(quic, to, &greedy).await {
                Ok(client) => client.find(unknown(1), 0).await.unwrap_err(),
                Err(error) => error,
            };
            assert_eq!(error.kind(), ErrorKind::Unreachable);
            let told = format!("{error:?}");
            assert!(told.contains("too many connections of one agent: at most 3"), "{told}");
        }
        assert_eq!(gate.stat().links, 3);
        // A call is a connection, too, and is told in its own language.
        let callee = Identity::new("east", "server").unwrap();
        let mut line = call(&to.to_string(), &greedy, &callee, &Arc::default()).await.unwrap();
        let mut answer = String::new();
        line.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("at most 3"), "{answer}");
        // Others are not touched, and it may come again when one of its own is gone.
        dial(quic, to, &world.credentials("west", "other")).await.unwrap();
        held.clear();
        until("what is gone counts", || gate.stat().links == 0).await;
        assert!(dial(quic, to, &greedy).await.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_agent_makes_so_many_requests_and_is_told() {
    let world = Fixture::new();
    let home = world.agent("east", "home").await;
    let gate = Gate::new(Admission { requests_per_second: 10, ..Admission::default() });
    let credentials = world.credentials("east", "server");
    let to = serve_through(&credentials, Arc::clone(&home.exchange) as _, &gate).await;
    let asker = world.credentials("west", "asker");
    let links = [dial(false, to, &asker).await.unwrap(), dial(true, to, &asker).await.unwrap()];
    let ask = |n: usize| links[n % 2].fetch(Priority::Restore, unknown(0), some_chunks());
    let mut ends = Vec::new();
    for n in 0..60 {
        let mut fetching = ask(n).await.unwrap();
        let Some(Reply::Ended { how: RequestOutcome::Refused(code, text), .. }) = fetching.next().await else {
            panic!("no end")
        };
        ends.push((code, text));
    }
    let told = "too many requests of one agent: at most 10 a second".to_owned();
    assert!(ends.contains(&(EndCode::Busy, told)), "{ends:?}");
    assert_eq!(ends[0], (EndCode::NotHere, String::new()));
    // Another one is not touched.
    let other = dial(false, to, &world.credentials("west", "other")).await.unwrap();
    let error = other.find(unknown(0), 0).await.unwrap_err();
    assert!(error.to_string().contains("not here"), "{error}");
}
