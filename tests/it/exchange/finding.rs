//! How agents find each other.

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
