//! Peers that make an agent keep what it sends or receives: they do not read, do not acknowledge, or open streams for ever. S5 of
//! docs/security.md.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Endpoint, ServerConfig};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use towline::codec::{Codec, Encoded};
use towline::format::ChunkList;
use towline::id::{ChunkId, ManifestId};
use towline::transfer::identity::server_config;
use towline::transfer::protocol::limits::LANES_MAX;
use towline::transfer::protocol::{AskedChunk, FrameRequest, Grant, OutgoingFrame, Priority, Runs, Survey, Wanted};
use towline::transfer::{Client, Gate, ReadAhead, ReadAheadShare, Reply};
use towline::{ErrorKind, Result};

use super::attacks::{ANY, PATIENCE, dial, serve_through, unknown, until};
use super::*;

/// Gives chunks of a MiB to all, and counts the bytes that are in memory.
struct Counting {
    ahead: Arc<ReadAhead>,
    held: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

struct CountedBytes(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.1.fetch_sub(self.0.len(), Ordering::SeqCst);
    }
}

const CHUNK: usize = 1 << 20;
const CHUNK_LEN: u32 = 1 << 20;
const CHUNKS: u32 = 16;

#[async_trait]
impl ServedChunks for Counting {
    fn read_ahead_share(&self, identity: &Identity) -> ReadAheadShare {
        self.ahead.share(Some(identity))
    }

    async fn authorise(&self, _: &Identity, _: &ManifestId) -> Result<Option<Arc<Grant>>> {
        let ids = (0..CHUNKS).map(|n| ChunkId::of(&n.to_le_bytes())).collect();
        let chunks = Arc::new(ChunkList { ids, lens: vec![CHUNK_LEN; CHUNKS as usize] });
        Ok(Some(Arc::new(Grant { chunks, bases: Vec::new() })))
    }

    async fn survey(&self, _: &Grant, _: u32) -> Result<Survey> {
        Ok(Survey::default())
    }

    async fn frame(&self, _: &Identity, _: &FrameRequest, _: AskedChunk) -> Result<Option<OutgoingFrame>> {
        let held = self.held.fetch_add(CHUNK, Ordering::SeqCst) + CHUNK;
        self.most.fetch_max(held, Ordering::SeqCst);
        let bytes = Bytes::from_owner(CountedBytes(vec![0; CHUNK], Arc::clone(&self.held)));
        Ok(Some(OutgoingFrame { encoded: Encoded { codec: Codec::Raw, bytes, base: None }, plain_len: CHUNK_LEN }))
    }
}

/// Passes connections on to `to`; once `stopped`, nothing comes back to whoever connected.
async fn one_way(to: SocketAddr, stopped: CancellationToken) -> SocketAddr {
    let socket = TcpListener::bind(ANY).await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = socket.accept().await {
            let (far, stopped) = (TcpStream::connect(to).await.unwrap(), stopped.clone());
            tokio::spawn(async move {
                let ((mut from_near, mut to_near), (mut from_far, mut to_far)) = (near.into_split(), far.into_split());
                let back = async {
                    tokio::select! {
                        _ = tokio::io::copy(&mut from_far, &mut to_near) => {}
                        () = stopped.cancelled() => std::future::pending().await,
                    }
                };
                tokio::select! {
                    _ = tokio::io::copy(&mut from_near, &mut to_far) => {}
                    () = back => {}
                }
            });
        }
    });
    address
}

/// As [`one_way`], for packets.
async fn one_way_udp(to: SocketAddr, stopped: CancellationToken) -> SocketAddr {
    let socket = Arc::new(UdpSocket::bind(ANY).await.unwrap());
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut packet, mut known) = (vec![0; 64 << 10], HashMap::new());
        while let Ok((len, from)) = socket.recv_from(&mut packet).await {
            if let Entry::Vacant(entry) = known.entry(from) {
                let far = Arc::new(UdpSocket::bind(ANY).await.unwrap());
                far.connect(to).await.unwrap();
                tokio::spawn(send_back(Arc::clone(&far), Arc::clone(&socket), from, stopped.clone()));
                entry.insert(far);
            }
            let _ = known[&from].send(&packet[..len]).await;
        }
    });
    address
}

/// Passes packets from `far` on to `to`, through `near`, until `stopped`.
async fn send_back(far: Arc<UdpSocket>, near: Arc<UdpSocket>, to: SocketAddr, stopped: CancellationToken) {
    let mut packet = vec![0; 64 << 10];
    while let Ok(len) = far.recv(&mut packet).await {
        if !stopped.is_cancelled() {
            let _ = near.send_to(&packet[..len], to).await;
        }
    }
}

/// S5 of docs/security.md.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_does_not_read_holds_half_of_the_memory_for_frames() {
    for quic in [false, true] {
        hold_frames(quic).await;
    }
}

/// Requests of an agent to which no answer comes through: it neither reads nor acknowledges.
async fn hold_frames(quic: bool) {
    let world = Fixture::new();
    let memory = Budget::new(64 * MIB).unwrap().carve(16 * MIB).await.unwrap();
    let (held, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let counting = Counting { ahead: ReadAhead::new(memory), held: Arc::clone(&held), most: Arc::clone(&most) };
    let to = serve_through(&world.credentials("east", "server"), Arc::new(counting), &Gate::default()).await;
    let stopped = CancellationToken::new();
    let through = if quic { one_way_udp(to, stopped.clone()).await } else { one_way(to, stopped.clone()).await };
    let attacker = world.credentials("west", "attacker");
    let links: Vec<Client> =
        join_all((0..24).map(|_| dial(quic, through, &attacker))).await.into_iter().map(Result::unwrap).collect();
    // A hello that is lost would make the requests of the others wait.
    join_all(links.iter().map(Client::may_ask_alone)).await;
    stopped.cancel();
    let wanted = || Wanted { chunks: Runs::of(0..CHUNKS), bases: Vec::new(), ..Wanted::default() };
    let fetching = join_all(links.iter().map(|link| link.fetch(Priority::Restore, unknown(0), wanted()))).await;
    until("nothing is read", || held.load(Ordering::SeqCst) >= 6 * CHUNK).await;
    // Sockets take a part of it, and then nothing moves.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (stuck, peak) = (held.load(Ordering::SeqCst), most.load(Ordering::SeqCst));
    assert!(stuck >= 6 * CHUNK && peak <= 8 * CHUNK, "{stuck} bytes are held, {peak} were");
    // Others are served meanwhile.
    let other = dial(false, to, &world.credentials("west", "other")).await.unwrap();
    let mut reading = other.fetch(Priority::Restore, unknown(0), wanted()).await.unwrap();
    let mut came = 0;
    while let Some(reply) = reading.next().await {
        came += u32::from(matches!(reply, Reply::Frame(_)));
    }
    assert_eq!(came, CHUNKS);
    assert!(most.load(Ordering::SeqCst) <= 16 * CHUNK);
    drop((fetching, links));
    until("what nobody takes is kept", || held.load(Ordering::SeqCst) == 0).await;
}

/// Answers connections over QUIC with streams that end at once, for ever; returns how many a connection took.
async fn open_streams(endpoint: Endpoint) -> u64 {
    let connection = endpoint.accept().await.unwrap().await.unwrap();
    let mut opened = 0;
    while let Ok(mut stream) = connection.open_uni().await {
        stream.finish().unwrap();
        opened += 1;
    }
    opened
}

/// S5 of docs/security.md.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_opens_streams_for_ever_is_given_up() {
    let world = Fixture::new();
    let asker = world.credentials("west", "asker");
    let tls = server_config(&world.credentials("east", "server")).unwrap();
    let config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls).unwrap()));
    let endpoint = Endpoint::server(config, SocketAddr::from(ANY)).unwrap();
    let to = endpoint.local_addr().unwrap();
    let opening = tokio::spawn(open_streams(endpoint));
    let client = dial(true, to, &asker).await.unwrap();
    let error = tokio::time::timeout(PATIENCE, client.find(unknown(1), 0)).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(format!("{error:?}").contains("opened more than 16 streams"), "{error:?}");
    drop(client);
    let opened = tokio::time::timeout(PATIENCE, opening).await.unwrap().unwrap();
    assert!(opened <= u64::from(3 * LANES_MAX), "{opened} streams were taken");
}
