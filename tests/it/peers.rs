//! Peers on loopback, over both transports, with real certificates: frames move, strangers do not, and nothing is readable. G4 of
//! docs/semantics.md.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use towline::budget::Budget;
use towline::clock::{Clock, ManualClock, SystemClock, Timestamp};
use towline::codec::{self, Compression};
use towline::format::ChunkList;
use towline::id::{ChunkId, ManifestId};
use towline::identity::Identity;
use towline::transfer::calls::call;
use towline::transfer::identity::{Authority, Credentials};
use towline::transfer::protocol::{
    AskedChunk, Closed, EndCode, FrameRequest, Grant, OutgoingFrame, Priority, RequestOutcome, Runs, Survey, Wanted,
};
use towline::transfer::{self, Client, Dial, Reply, ServedChunks, quic, tcp};
use towline::{ErrorKind, Result};

use crate::ports::ClosedPort;

const MIB: u64 = 1 << 20;

/// Words that stand in every chunk, to be looked for on the wire.
const PLAIN: &[u8] = b"weights that nobody else may read ";

/// Chunks in memory: one manifest that agents of the site west may read.
struct Memory {
    manifest: ManifestId,
    grant: Arc<Grant>,
    frames: BTreeMap<ChunkId, OutgoingFrame>,
    reads: AtomicU64,
}

impl Memory {
    /// `count` chunks of about 300 KB, half of which compress; each 50th is listed, but not held.
    fn new(count: u32) -> Self {
        let (mut chunks, mut frames) = (ChunkList::default(), BTreeMap::new());
        for n in 0..count {
            let mut plain = PLAIN.repeat(if n % 2 == 0 { 8000 } else { 2 });
            let noise = plain.len();
            plain.resize(300_000 + n as usize, 0);
            blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut plain[noise..]);
            let plain = Bytes::from(plain);
            let id = ChunkId::of(&plain);
            chunks.ids.push(id);
            chunks.lens.push(u32::try_from(plain.len()).unwrap());
            if n % 50 != 49 {
                let plain_len = u32::try_from(plain.len()).unwrap();
                frames.insert(id, OutgoingFrame { encoded: codec::encode(&plain, Compression::Auto, None), plain_len });
            }
        }
        let grant = Arc::new(Grant { chunks: Arc::new(chunks), bases: Vec::new() });
        Self { manifest: ManifestId::of(b"tree"), grant, frames, reads: AtomicU64::new(0) }
    }

    fn every(&self) -> Wanted {
        let chunks = Runs::of(0..u32::try_from(self.grant.chunks.ids.len()).unwrap());
        Wanted { chunks, bases: Vec::new(), ..Wanted::default() }
    }
}

#[async_trait]
impl ServedChunks for Memory {
    async fn authorise(&self, identity: &Identity, manifest: &ManifestId) -> Result<Option<Arc<Grant>>> {
        Ok((*manifest == self.manifest && identity.site() == "west").then(|| Arc::clone(&self.grant)))
    }

    async fn survey(&self, grant: &Grant, from: u32) -> Result<Survey> {
        let chunks = u32::try_from(grant.chunks.ids.len()).unwrap();
        let holds = |n: &u32| self.frames.contains_key(&grant.chunks.ids[*n as usize]);
        Ok(Survey { chunks, upto: chunks, held: (from..chunks).filter(holds).collect() })
    }

    async fn frame(&self, _: &Identity, _: &FrameRequest, chunk: AskedChunk) -> Result<Option<OutgoingFrame>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
        Ok(self.frames.get(&chunk.id).cloned())
    }
}

/// Certificates of one authority.
struct Authorities(TempDir);

impl Authorities {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Authority::create(&folder.path().join("ca"), "test", 10, SystemClock.now()).unwrap();
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// An agent whose certificate holds for five days from now on, by its own `clock`.
    fn agent_by(&self, site: &str, agent: &str, clock: &Arc<ManualClock>) -> Credentials {
        drop(self.agent(site, agent));
        Credentials::open(&self.path().join(format!("{site}-{agent}")), Arc::clone(clock) as _).unwrap()
    }

    fn agent(&self, site: &str, agent: &str) -> Credentials {
        let authority = Authority::open(&self.path().join("ca")).unwrap();
        let folder = self.path().join(format!("{site}-{agent}"));
        let identity = Identity::new(site, agent).unwrap();
        authority.issue(&(&identity).into(), &folder, (5, SystemClock.now()), true).unwrap();
        Credentials::open(&folder, Arc::new(SystemClock)).unwrap()
    }
}

#[derive(Clone, Copy, Debug)]
enum Transport {
    Quic,
    Tcp,
}

const TRANSPORTS: [Transport; 2] = [Transport::Quic, Transport::Tcp];

/// A peer that serves.
struct Server {
    address: SocketAddr,
    leaving: CancellationToken,
    task: JoinHandle<Result<()>>,
}

impl Server {
    async fn start(transport: Transport, credentials: Credentials, served_chunks: Arc<Memory>) -> Self {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let leaving = CancellationToken::new();
        let token = leaving.clone();
        let (address, task) = match transport {
            Transport::Quic => {
                let listener = quic::Listener::bind(any, credentials).unwrap();
                (listener.address().unwrap(), tokio::spawn(listener.serve(served_chunks, token)))
            }
            Transport::Tcp => {
                let listener = tcp::Listener::bind(any, credentials).await.unwrap();
                (listener.address().unwrap(), tokio::spawn(listener.serve(served_chunks, token)))
            }
        };
        Self { address, leaving, task }
    }
}

async fn dial(
    transport: Transport,
    to: SocketAddr,
    credentials: &Credentials,
    expected: Option<&Identity>,
) -> Result<Client> {
    let budget = Budget::new(64 * MIB).unwrap();
    let dial = Dial { expected, budget: &budget, window: 8 * MIB };
    match transport {
        Transport::Quic => quic::connect(to, credentials, &dial).await,
        Transport::Tcp => tcp::connect(to, credentials, &dial).await,
    }
}

/// What comes of a request: the chunks that came, each verified, and what is missing.
async fn fetch(client: &Client, memory: &Memory, wanted: Wanted) -> (usize, Runs, RequestOutcome) {
    let mut fetching = client.fetch(Priority::Restore, memory.manifest, wanted.clone()).await.unwrap();
    let (mut came, mut missing) = (0, Vec::new());
    loop {
        match fetching.next().await {
            Some(Reply::Frame(frame)) => {
                let place = wanted.chunks.get(frame.ordinal.into()).unwrap();
                let encoded = &frame.encoded;
                let plain = codec::decode(encoded.codec, &encoded.bytes, None, frame.plain_len).unwrap();
                assert_eq!(ChunkId::of(&plain), memory.grant.chunks.ids[place as usize]);
                came += 1;
            }
            Some(Reply::Missing(ordinals)) => missing.extend(ordinals.iter()),
            Some(Reply::Ended { how, left }) => {
                assert_eq!(left.len() + came as u64 + missing.len() as u64, wanted.len());
                missing.sort_unstable();
                return (came, missing.into_iter().collect(), how);
            }
            None => panic!("ended without an end"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_move_over_both_transports() {
    let certificates = Authorities::new();
    let memory = Arc::new(Memory::new(100));
    for transport in TRANSPORTS {
        let server = Server::start(transport, certificates.agent("east", "server"), Arc::clone(&memory)).await;
        let name = Identity::new("east", "server").unwrap();
        let asker = certificates.agent("west", "asker");
        let client = dial(transport, server.address, &asker, Some(&name)).await.unwrap();
        assert_eq!(client.peer(), &name);
        let survey = client.find(memory.manifest, 0).await.unwrap();
        assert_eq!((survey.chunks, survey.held.len()), (100, 98), "{transport:?}");
        let (came, missing, how) = fetch(&client, &memory, memory.every()).await;
        assert_eq!(
            (came, missing.iter().collect::<Vec<_>>(), how),
            (98, vec![49, 99], RequestOutcome::Complete),
            "{transport:?}"
        );

        // Several at once, and one that nobody listens to any more.
        let some = |from: u32| Wanted { chunks: Runs::of(from..from + 20), bases: Vec::new(), ..Wanted::default() };
        drop(client.fetch(Priority::Replicate, memory.manifest, memory.every()).await.unwrap());
        let all = tokio::join!(
            fetch(&client, &memory, some(0)),
            fetch(&client, &memory, some(30)),
            fetch(&client, &memory, some(60))
        );
        assert_eq!((all.0.0, all.1.0, all.2.0), (20, 19, 20), "{transport:?}");
        assert_eq!(client.goodbye().await, Closed::Done, "{transport:?}");
        server.leaving.cancel();
        server.task.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_read_a_manifest_is_told_what_who_asks_for_none_is_told() {
    let certificates = Authorities::new();
    let memory = Arc::new(Memory::new(4));
    for transport in TRANSPORTS {
        let server = Server::start(transport, certificates.agent("east", "server"), Arc::clone(&memory)).await;
        let stranger = dial(transport, server.address, &certificates.agent("north", "a"), None).await.unwrap();
        let friend = dial(transport, server.address, &certificates.agent("west", "a"), None).await.unwrap();
        let refused = RequestOutcome::Refused(EndCode::NotHere, String::new());
        assert_eq!(fetch(&stranger, &memory, memory.every()).await, (0, Runs::default(), refused.clone()));
        let mut none = friend.fetch(Priority::Warm, ManifestId::of(b"none"), memory.every()).await.unwrap();
        assert!(matches!(none.next().await, Some(Reply::Ended { how, .. }) if how == refused));
        assert!(none.next().await.is_none());
        let errors = [stranger.find(memory.manifest, 0).await, friend.find(ManifestId::of(b"none"), 0).await];
        let [a, b] = errors.map(|found| found.unwrap_err());
        assert_eq!((a.kind(), a.to_string().replace("north", "west")), (b.kind(), b.to_string()));
        assert_eq!(memory.reads.load(Ordering::Relaxed), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_revoked_or_unexpected_certificate_is_refused() {
    let (certificates, others) = (Authorities::new(), Authorities::new());
    let memory = Arc::new(Memory::new(2));
    for transport in TRANSPORTS {
        let serving = certificates.agent("east", "server");
        let server = Server::start(transport, serving, Arc::clone(&memory)).await;
        let dial = |credentials, expected| async move { dial(transport, server.address, credentials, expected).await };

        // The server is of an authority that this asker does not trust.
        let stranger = others.agent("west", "a");
        let error = dial(&stranger, None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{transport:?}: {error:?}");
        assert!(error.to_string().contains("authority that is not trusted"), "{transport:?}: {error}");

        // Another answers than was called.
        let asker = certificates.agent("west", "a");
        let other = Identity::new("east", "other").unwrap();
        let error = dial(&asker, Some(&other)).await.unwrap_err();
        assert_eq!((error.kind(), error.to_string().contains("another agent answers")), (ErrorKind::Denied, true));

        // The asker was revoked; in TLS 1.3 it only learns of that once it has asked.
        let revoked = certificates.path().join("east-server/revoked");
        std::fs::write(&revoked, asker.certificate().serial).unwrap();
        tokio::time::sleep(Duration::from_millis(1100)).await;
        if let Ok(client) = dial(&asker, None).await {
            let error = client.find(memory.manifest, 0).await.unwrap_err();
            assert!(error.to_string().contains("our certificate was revoked"), "{transport:?}: {error}");
        }
        std::fs::remove_file(&revoked).unwrap();
    }
    assert_eq!(memory.reads.load(Ordering::Relaxed), 0);
}

/// What one side of a connection finds out about the other while it lasts.
#[derive(Clone, Copy, Debug)]
enum Found {
    Revoked,
    Expired,
}

/// Lets the side with `clock` and the folder `own` find out what `found` says about the certificate with the number `serial`.
fn find_out(found: Found, clock: &ManualClock, own: &Path, serial: &str) {
    let later = match found {
        Found::Revoked => {
            std::fs::write(own.join("revoked"), format!("{serial}\n")).unwrap();
            2
        }
        Found::Expired => 6 * 24 * 3600,
    };
    clock.set(Timestamp(clock.now().0 + later * 1_000_000_000));
}

/// "A link ends as soon as either side finds the other's certificate revoked or expired"
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_ends_in_mid_transfer_when_a_certificate_is_revoked_or_expires() {
    let memory = Arc::new(Memory::new(100));
    for (transport, server_finds, found) in [
        (Transport::Quic, true, Found::Revoked),
        (Transport::Quic, false, Found::Revoked),
        (Transport::Quic, true, Found::Expired),
        (Transport::Quic, false, Found::Expired),
        (Transport::Tcp, true, Found::Revoked),
        (Transport::Tcp, false, Found::Revoked),
        (Transport::Tcp, true, Found::Expired),
        (Transport::Tcp, false, Found::Expired),
    ] {
        let case = format!("{transport:?}, {found:?}, by the server: {server_finds}");
        let certificates = Authorities::new();
        let clock = || Arc::new(ManualClock::at(SystemClock.now()));
        let (asking, serving) = (clock(), clock());
        let asker = certificates.agent_by("west", "asker", &asking);
        let serves = certificates.agent_by("east", "server", &serving);
        let server = Server::start(transport, serves.clone(), Arc::clone(&memory)).await;
        let client = dial(transport, server.address, &asker, None).await.unwrap();
        let mut fetching = client.fetch(Priority::Restore, memory.manifest, memory.every()).await.unwrap();
        // What is held keeps the window full, so the rest cannot have come.
        let mut held = vec![fetching.next().await.unwrap()];
        if server_finds {
            find_out(found, &serving, &certificates.path().join("east-server"), &asker.certificate().serial);
        } else {
            find_out(found, &asking, &certificates.path().join("west-asker"), &serves.certificate().serial);
        }
        let left = loop {
            match fetching.next().await.unwrap() {
                Reply::Ended { how, left } => {
                    assert_ne!(how, RequestOutcome::Complete, "{case}");
                    break left;
                }
                reply => held.push(reply),
            }
        };
        assert!(!left.is_empty(), "{case}");
        let error = client.find(memory.manifest, 0).await.unwrap_err();
        let says = match found {
            Found::Revoked => "certificate was revoked",
            Found::Expired => "certificate has expired",
        };
        assert!(server_finds || error.to_string().contains(says), "{case}: {error}");
        // Nor is another made.
        if let Ok(client) = dial(transport, server.address, &asker, None).await {
            client.find(memory.manifest, 0).await.unwrap_err();
        }
        server.leaving.cancel();
        server.task.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_ends_when_a_certificate_is_revoked() {
    for server_finds in [true, false] {
        let certificates = Authorities::new();
        let clock = Arc::new(ManualClock::at(SystemClock.now()));
        let asker = certificates.agent_by("west", "asker", &clock);
        let server = certificates.agent_by("east", "server", &clock);
        let mut listener = tcp::Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), server.clone()).await.unwrap();
        let (mut calls, address) = (listener.take_calls(), listener.address().unwrap());
        tokio::spawn(listener.serve(Arc::new(Memory::new(1)), CancellationToken::new()));
        let mut line = call(&address.to_string(), &asker, &server.identity(), &Arc::default()).await.unwrap();
        let (mut taken, _) = calls.next().await.unwrap();
        let (own, serial) = if server_finds {
            ("east-server", asker.certificate().serial)
        } else {
            ("west-asker", server.certificate().serial)
        };
        find_out(Found::Revoked, &clock, &certificates.path().join(own), &serial);
        let mut heard = [0; 5];
        // Nothing is said on it; both wait.
        let (finds, other) = if server_finds { (&mut taken, line) } else { (&mut line, taken) };
        let error = finds.read(&mut heard).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
        assert_eq!(finds.write(b"hello").await.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        drop(other);
    }
}

/// Passes bytes on both ways, and keeps a copy of them.
async fn sniff(to: SocketAddr) -> (SocketAddr, JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (inner, _) = listener.accept().await.unwrap();
        let outer = TcpStream::connect(to).await.unwrap();
        let (up, down) = (inner.into_split(), outer.into_split());
        let ways = tokio::join!(copy(up.0, down.1), copy(down.0, up.1));
        [ways.0, ways.1].concat()
    });
    (address, task)
}

async fn copy(mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin) -> Vec<u8> {
    let (mut seen, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while let Ok(len @ 1..) = from.read(&mut buffer).await {
        seen.extend_from_slice(&buffer[..len]);
        if to.write_all(&buffer[..len]).await.is_err() {
            break;
        }
    }
    // Whoever reads there may be gone.
    let _ = to.shutdown().await;
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_on_the_wire_is_readable() {
    let certificates = Authorities::new();
    let memory = Arc::new(Memory::new(20));
    let server = Server::start(Transport::Tcp, certificates.agent("east", "server"), Arc::clone(&memory)).await;
    let (proxy, sniffed) = sniff(server.address).await;
    let client = dial(Transport::Tcp, proxy, &certificates.agent("west", "asker"), None).await.unwrap();
    assert_eq!(fetch(&client, &memory, memory.every()).await.0, 20);
    assert_eq!(client.goodbye().await, Closed::Done);
    let seen = sniffed.await.unwrap();
    let stored: usize = memory.frames.values().map(|supply| supply.encoded.bytes.len()).sum();
    assert!(seen.len() > stored && seen.len() < stored + stored / 20 + 20_000, "{} of {stored}", seen.len());
    let magic = b"TWLP".as_slice();
    let id = memory.grant.chunks.ids[0].as_bytes().as_slice();
    let zstd = [0x28, 0xb5, 0x2f, 0xfd].as_slice();
    let raw = memory.frames.values().find(|supply| supply.encoded.codec == codec::Codec::Raw).unwrap();
    let texts = [PLAIN, magic, b"towline://", b"asker", id, zstd, &raw.encoded.bytes[1000..1016]];
    for text in texts.into_iter().filter(|text| text.len() > 4) {
        assert!(!seen.windows(text.len()).any(|window| window == text), "{:?}", String::from_utf8_lossy(text));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_leaves_serves_what_is_open_and_takes_nothing_new() {
    let certificates = Authorities::new();
    let memory = Arc::new(Memory::new(100));
    for transport in TRANSPORTS {
        let server = Server::start(transport, certificates.agent("east", "server"), Arc::clone(&memory)).await;
        let client = dial(transport, server.address, &certificates.agent("west", "asker"), None).await.unwrap();
        let mut fetching = client.fetch(Priority::Restore, memory.manifest, memory.every()).await.unwrap();
        let mut came = 0;
        let how = loop {
            match fetching.next().await.unwrap() {
                Reply::Frame(_) => came += 1,
                Reply::Missing(_) => {}
                Reply::Ended { how, .. } => break how,
            }
            if came == 3 {
                server.leaving.cancel();
            }
        };
        assert_eq!((came, how), (98, RequestOutcome::Complete), "{transport:?}");
        server.task.await.unwrap().unwrap();
        assert_eq!(
            client.fetch(Priority::Warm, memory.manifest, memory.every()).await.unwrap_err().kind(),
            ErrorKind::Unreachable
        );
    }
}

/// A client of a peer that was killed is told so by its successor, and need not wait until the connection times out.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_back_after_a_kill_resets_connections() {
    let certificates = Authorities::new();
    let memory = Arc::new(Memory::new(100));
    let credentials = certificates.agent("east", "server");
    // A server that dies with its runtime closes no connection.
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = Server::start(Transport::Quic, credentials.clone(), Arc::clone(&memory));
    let first = doomed.spawn(first).await.unwrap();
    let client = dial(Transport::Quic, first.address, &certificates.agent("west", "asker"), None).await.unwrap();
    assert_eq!(fetch(&client, &memory, memory.every()).await.0, 98);
    doomed.shutdown_background();

    let begun = Instant::now();
    let listener = loop {
        match quic::Listener::bind(first.address, credentials.clone()) {
            Ok(listener) => break listener,
            Err(error) => assert!(begun.elapsed() < Duration::from_mins(1), "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let leaving = CancellationToken::new();
    let second = tokio::spawn(listener.serve(Arc::clone(&memory) as Arc<dyn ServedChunks>, leaving.clone()));
    let error = loop {
        match client.fetch(Priority::Restore, memory.manifest, memory.every()).await {
            Err(error) => break error,
            Ok(mut fetching) => while fetching.next().await.is_some() {},
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(format!("{error:?}").contains("cannot be reached"), "it did not time out: {error:?}");
    leaving.cancel();
    second.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_slow_reader_holds_stays_in_its_window() {
    let certificates = Authorities::new();
    let memory = Arc::new(Memory::new(100));
    for transport in TRANSPORTS {
        let server = Server::start(transport, certificates.agent("east", "server"), Arc::clone(&memory)).await;
        let client = dial(transport, server.address, &certificates.agent("west", "asker"), None).await.unwrap();
        memory.reads.store(0, Ordering::Relaxed);
        let mut fetching = client.fetch(Priority::Restore, memory.manifest, memory.every()).await.unwrap();
        let mut held = Vec::new();
        // All that the window lets through, and no more, though nobody says stop.
        while let Ok(Some(reply)) = tokio::time::timeout(Duration::from_secs(2), fetching.next()).await {
            held.push(reply);
        }
        let bytes: usize =
            held.iter().map(|reply| if let Reply::Frame(frame) = reply { frame.encoded.bytes.len() } else { 0 }).sum();
        assert!(bytes as u64 <= 8 * MIB && bytes as u64 > 6 * MIB, "{transport:?}: {bytes}");
        let before = held.len();
        held.clear();
        while let Some(reply) = fetching.next().await {
            held.push(reply);
            if held.len() > 3 {
                held.remove(0);
            }
        }
        assert!(
            matches!(held.last(), Some(Reply::Ended { how: RequestOutcome::Complete, .. })),
            "{transport:?}, after {before}"
        );
        assert_eq!(memory.reads.load(Ordering::Relaxed), 100);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_that_are_taken_or_dead_are_told() {
    let certificates = Authorities::new();
    let credentials = certificates.agent("west", "a");
    let port = ClosedPort::new();
    let error = dial(Transport::Tcp, port.address(), &credentials, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    let (tcp, quic) = transfer::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &credentials).await.unwrap();
    let error = tcp::Listener::bind(tcp.address().unwrap(), credentials.clone()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    let error = quic::Listener::bind(quic.address().unwrap(), credentials).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_taken_only_where_somebody_answers_them() {
    let certificates = Authorities::new();
    let asker = certificates.agent("west", "asker");
    let callee = Identity::new("east", "server").unwrap();
    let server = certificates.agent("east", "server");
    let deaf = Server::start(Transport::Tcp, server.clone(), Arc::new(Memory::new(1))).await;
    let error = call(&deaf.address.to_string(), &asker, &callee, &Arc::default()).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("another protocol"), "{error}");

    let mut listener = tcp::Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), server).await.unwrap();
    let (mut calls, address) = (listener.take_calls(), listener.address().unwrap());
    tokio::spawn(listener.serve(Arc::new(Memory::new(1)), CancellationToken::new()));
    let mut line = call(&address.to_string(), &asker, &callee, &Arc::default()).await.unwrap();
    let (mut taken, caller) = calls.next().await.unwrap();
    assert_eq!(caller.identity(), &Identity::new("west", "asker").unwrap());
    line.write_all(b"hello").await.unwrap();
    let mut heard = [0; 5];
    taken.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"hello");
    // Peers are served there all the same.
    dial(Transport::Tcp, address, &asker, None).await.unwrap();
    // Nobody answers any more: the line is closed, and nobody else is kept waiting.
    drop(calls);
    let mut line = call(&address.to_string(), &asker, &callee, &Arc::default()).await.unwrap();
    assert!(!matches!(line.read(&mut heard).await, Ok(1..)));
}
