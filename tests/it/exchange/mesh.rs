//! Many agents at a site: all have a link to each, whatever the memory is, as long as a frame fits.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn peers_beyond_those_planned_for_have_links_too() {
    let world = Fixture::new();
    let server = world.agent("home", "server").await;
    let own = world.credentials("home", "own");
    let budget = Budget::new(64 * MIB).unwrap();
    let options = PeersOptions { connections: 2, window: 8 * MIB, planned: 4, ..PeersOptions::default() };
    let peers = Peers::new(own.clone(), budget, options);
    let serve = |credentials: Credentials| {
        let (served_chunks, leaving) = (Arc::clone(&server.exchange) as Arc<dyn ServedChunks>, server.leaving.clone());
        async move { serve(&credentials, served_chunks, &leaving).await }
    };
    // Own addresses leave the list once an answer tells whose they are.
    let all_up = async |count: usize| {
        let linked = async {
            while peers.live().await.len() < count || peers.list().len() > count {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let linked = tokio::time::timeout(Duration::from_mins(1), linked).await;
        assert!(linked.is_ok(), "{:?}", peers.list());
    };
    // Four take all of the memory.
    for nth in 0..4 {
        peers.add(&serve(world.credentials("home", &format!("node-{nth}"))).await).unwrap();
    }
    all_up(4).await;
    assert_eq!(peers.list().iter().map(|peer| peer.connections).sum::<usize>(), 8);
    for nth in 4..10 {
        peers.add(&serve(world.credentials("home", &format!("node-{nth}"))).await).unwrap();
    }
    // A name that resolves to all agents of a site has this one, too.
    peers.add(&serve(own).await).unwrap();
    all_up(10).await;
}
