//! How agents find each other.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;
use towline::transfer::peers::{Discovery, discover};

use super::*;

/// Waits until `agent` is linked to `count` others.
async fn linked(agent: &Agent, count: usize) {
    let linked = async {
        while agent.exchange.peers().live().await.len() != count {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), linked).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_find_each_other_by_what_they_say_in_the_repository() {
    let world = Fixture::new();
    let (first, second) = (world.agent("west", "a").await, world.agent("west", "b").await);
    let over = CancellationToken::new();
    let mut tasks = Vec::new();
    for agent in [&second, &first] {
        let register = Some((agent.exchange.identity().clone(), agent.address.clone()));
        let repositories = vec![agent.plain.clone()];
        let found = Discovery { register, repositories, ..Discovery::default() };
        tasks.push(tokio::spawn(discover(Arc::clone(agent.exchange.peers()), found, over.clone())));
        while agent.plain.announced(Duration::from_mins(1)).await.unwrap().len() < tasks.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    linked(&first, 1).await;
    // What is no registration, or an old one, is passed over.
    let rubbish = layout::agent("west", "rubbish");
    world.objects.put(&rubbish, b"rubbish".as_slice().into()).await.unwrap();
    assert_eq!(first.plain.announced(Duration::from_mins(1)).await.unwrap().len(), 2);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(first.plain.announced(Duration::from_millis(1)).await.unwrap().is_empty());
    // Who ends takes it back.
    over.cancel();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(first.plain.announced(Duration::from_mins(1)).await.unwrap().is_empty());
}

/// Serves at an address where another agent has just stopped.
async fn serve_again(address: &str, credentials: &Credentials, served_chunks: Arc<dyn ServedChunks>) {
    let listeners = loop {
        match transfer::listen(address.parse().unwrap(), credentials).await {
            Ok(listeners) => break listeners,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let (tcp, quic) = listeners;
    tokio::spawn(tcp.serve(Arc::clone(&served_chunks), CancellationToken::new()));
    tokio::spawn(quic.serve(served_chunks, CancellationToken::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_runs_again_is_found_when_it_is_asked_for() {
    let world = Fixture::new();
    let (asker, other) = (world.agent("west", "a").await, world.agent("east", "b").await);
    asker.knows(&[&other]);
    linked(&asker, 1).await;
    let policy = FetchPolicy { from: From::Site("east".into()), ..FetchPolicy::default() };
    asker.exchange.check_reachable(&policy).await.unwrap();
    other.leaving.cancel();
    linked(&asker, 0).await;
    let error = asker.exchange.check_reachable(&policy).await.unwrap_err();
    assert_eq!(error.kind(), towline::ErrorKind::Unreachable, "{error}");
    // By now the asker tries it again every few seconds.
    tokio::time::sleep(Duration::from_secs(4)).await;
    serve_again(&other.address, &world.credentials("east", "b"), Arc::clone(&other.exchange) as _).await;
    asker.exchange.check_reachable(&policy).await.unwrap();
}

/// A registration of `agent`, as whoever may write to the store can plant it.
async fn plant(world: &Fixture, agent: &str, address: &str) {
    world.repository("planter").await.announce(&Identity::new("west", agent).unwrap(), address).await.unwrap();
}

/// Starts looking for agents in the repository, by `agent`.
fn look(agent: &Agent) -> tokio::task::JoinHandle<()> {
    let found = Discovery { repositories: vec![agent.plain.clone()], ..Discovery::default() };
    tokio::spawn(discover(Arc::clone(agent.exchange.peers()), found, CancellationToken::new()))
}

/// S14 of docs/security.md.
#[tokio::test(flavor = "multi_thread")]
async fn who_plants_registrations_gains_connections_that_tell_nothing_and_no_peer_that_is_not_one() {
    let (world, strangers) = (Fixture::new(), Fixture::new());
    let looking = world.agent_with("west", "a", AllowList::everybody(), Transports::Tcp).await;
    let honest = world.agent("west", "b").await;
    let stranger = strangers.agent("west", "c").await;
    // A listener without a certificate, which keeps what it is sent.
    let trap = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    plant(&world, "trap", &trap.local_addr().unwrap().to_string()).await;
    // An agent of another authority, and one under the name of another agent.
    plant(&world, "c", &stranger.address).await;
    plant(&world, "somebody-else", &honest.address).await;
    let task = look(&looking);
    let (mut socket, _) = trap.accept().await.unwrap();
    let mut sent = vec![0; 16 << 10];
    let len = tokio::io::AsyncReadExt::read(&mut socket, &mut sent).await.unwrap();
    // The first message of a handshake, in the clear: no name, site or certificate of the one that looks.
    assert!(len > 0 && sent[0] == 22, "{len} bytes that begin with {}", sent[0]);
    let text = String::from_utf8_lossy(&sent[..len]).into_owned();
    assert!(!text.contains("west") && !text.contains("towline://"), "{text}");
    drop((socket, trap));
    linked(&looking, 1).await;
    let refused = async {
        loop {
            let peers = looking.exchange.peers().list();
            let of = |address: &str| peers.iter().find(|peer| peer.address == address).cloned();
            let (by_stranger, by_honest) = (of(&stranger.address), of(&honest.address));
            if let (Some(stranger), Some(honest)) = (by_stranger, by_honest)
                && stranger.error.is_some()
            {
                return (stranger, honest);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (by_stranger, by_honest) = tokio::time::timeout(Duration::from_mins(1), refused).await.unwrap();
    assert!(by_stranger.identity.is_none() && by_stranger.transport.is_none(), "{by_stranger:?}");
    // It is who its certificate says, whatever the registration is called.
    assert_eq!(by_honest.identity.as_ref(), Some(honest.exchange.identity()));
    task.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn few_announced_addresses_are_dialled_at_a_time() {
    const MOST: usize = 32;
    const ALL: usize = 44;
    let world = Fixture::new();
    let looking = world.agent_with("west", "a", AllowList::everybody(), Transports::Tcp).await;
    let (open, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let dialled = Arc::new(Mutex::new(BTreeSet::new()));
    let may_close = Arc::new(Semaphore::new(0));
    for number in 0..ALL {
        let trap = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        plant(&world, &format!("trap-{number}"), &trap.local_addr().unwrap().to_string()).await;
        let (open, most, dialled) = (Arc::clone(&open), Arc::clone(&most), Arc::clone(&dialled));
        let may_close = Arc::clone(&may_close);
        tokio::spawn(async move {
            while let Ok((socket, _)) = trap.accept().await {
                most.fetch_max(open.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                dialled.lock().unwrap().insert(number);
                may_close.acquire().await.unwrap().forget();
                // Whoever dialled goes on to another address when it sees the end, which comes after this.
                open.fetch_sub(1, Ordering::SeqCst);
                drop(socket);
            }
        });
    }
    let task = look(&looking);
    let all = async {
        while open.load(Ordering::SeqCst) < MOST {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Time in which others would be dialled as well.
        tokio::time::sleep(Duration::from_millis(500)).await;
        while dialled.lock().unwrap().len() < ALL {
            may_close.add_permits(1);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), all).await.unwrap();
    assert_eq!(most.load(Ordering::SeqCst), MOST);
    task.abort();
}
