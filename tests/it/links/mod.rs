//! Links between sites: nodes in network namespaces, joined with set rates, delays and losses, and what runs in them.

mod agents;
#[path = "../../../benches/links/link/src/lane.rs"]
mod lane;
mod world;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use self::world::World;

const PORT: u16 = 9000;

/// Takes connections in `node` and gives back what comes on them, as long as the test runs.
fn echo(world: &World, node: &str) {
    let listener = world.inside(node, || TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut piece = vec![0; 1 << 16];
                while let Ok(len @ 1..) = stream.read(&mut piece) {
                    stream.write_all(&piece[..len]).unwrap();
                }
            });
        }
    });
}

fn connect(world: &World, from: &str, to: &str) -> TcpStream {
    let to = SocketAddr::from((world.address(to), PORT));
    let stream = world.inside(from, || TcpStream::connect_timeout(&to, Duration::from_secs(10)).unwrap());
    stream.set_nodelay(true).unwrap();
    stream
}

/// Sends `bytes` and takes them back.
fn around(stream: &mut TcpStream, bytes: usize) -> Duration {
    let (began, mut sender) = (Instant::now(), stream.try_clone().unwrap());
    let sending = std::thread::spawn(move || sender.write_all(&vec![7; bytes]).unwrap());
    let mut back = vec![0; bytes];
    stream.read_exact(&mut back).unwrap();
    sending.join().unwrap();
    assert!(back.iter().all(|byte| *byte == 7));
    began.elapsed()
}

#[test]
fn a_world_has_the_delay_and_the_rate_that_it_is_asked_for_and_counts_what_it_carries() {
    const LEN: usize = 2 << 20;
    let Some(mut world) = World::make(&["near,rate=80M,up.delay=10ms", "far,rate=80M,up.delay=10ms"]) else { return };
    echo(&world, "far");
    let mut stream = connect(&world, "near", "far");
    let small = (0..5).map(|_| around(&mut stream, 1)).min().unwrap();
    assert!(small >= Duration::from_millis(20), "{small:?} for a round trip of 20 ms");

    let before = world.carried("near");
    let took = around(&mut stream, LEN);
    let least = Duration::from_secs_f64(LEN as f64 * 8.0 / 80e6);
    assert!(took >= least, "{took:?}: faster than the link");
    let after = world.carried("near");
    let (sent, came) = (after.0.bytes - before.0.bytes, after.1.bytes - before.1.bytes);
    for bytes in [sent, came] {
        assert!((LEN as u64..LEN as u64 * 5 / 4).contains(&bytes), "{bytes} carried for {LEN}");
    }
    // The last acknowledgements are on their way.
    std::thread::sleep(Duration::from_millis(500));
    let (near, far) = (world.carried("near"), world.carried("far"));
    assert_eq!((far.0.lost_packets, far.1.lost_packets), (0, 0));
    assert_eq!(near.0.packets, far.1.packets, "what near has sent has come to far");
}

#[test]
fn losses_are_made_good_by_tcp_and_a_cut_is_healed() {
    let Some(mut world) = World::make(&["near,up.loss=2%,up.delay=1ms", "far,up.loss=2%", "other"]) else { return };
    echo(&world, "far");
    let mut stream = connect(&world, "near", "far");
    around(&mut stream, 1 << 20);
    assert!(world.carried("near").0.lost_packets > 0);
    assert_eq!(world.carried("other").1.bytes, 0, "nobody has sent it anything");

    world.cut("far");
    stream.write_all(b"lost for now").unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let nothing = stream.read(&mut [0; 1]).unwrap_err().kind();
    assert!(matches!(nothing, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{nothing:?}");
    world.heal("far");
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut back = [0; 12];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"lost for now");
}

#[test]
fn programs_run_in_nodes_and_see_nothing_else() {
    let Some(world) = World::make(&["near", "far"]) else { return };
    let listed = world.command("far", "ip").args(["-brief", "address"]).output().unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    assert_eq!(text.lines().count(), 2, "loopback and the link:\n{text}");
    assert!(text.contains(&world.address("far").to_string()), "{text}");
}
