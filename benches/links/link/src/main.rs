//! A network in user space: nodes, each a network namespace, joined in the middle of a star by links of set rate, delay
//! and loss. For a kernel without netem; needs root and /dev/net/tun.
//!
//! `link [--seed N] [--mtu 1500] [--capture FILE] NODE NODE...`, a NODE as `far,rate=300M,up.delay=25ms,up.loss=0.1%`: `rate`, `delay`,
//! `loss` and `queue` of its link, both ways or `up.` (from the node) and `down.`. A packet passes its sender's link up
//! and its receiver's link down. A queue that is not set holds one bandwidth-delay product, and 64 packets at least. What
//! nodes send goes into FILE too, as pcap.
//!
//! Says as one line of JSON where the nodes are (`nsenter --net=PATH PROGRAM` runs in one), then does what the lines of its
//! standard input say, a line of JSON for each: `counts`, `cut NODE`, `heal NODE`. When the input ends it says the counts
//! and ends, and nothing is left: the namespaces live as long as it and the programs in them.

mod capture;
mod lane;
mod node;
mod relay;
mod spec;

use std::io::{self, BufRead as _, Write as _};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};

use self::capture::Capture;
use self::lane::{Counts, Lane};
use self::node::Place;
use self::relay::Port;
use self::spec::{Node, shapes};

/// Nodes that a star may have: more than one machine carries at the rates that are asked for here.
const NODES_MAX: usize = 32;
const SUBNET: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 0);

/// Arguments of the command line.
struct Arguments {
    seed: u64,
    /// Ethernet's: the forwarder carries 1 Gbit/s with it, so no larger one flatters anybody.
    mtu: u16,
    capture: Option<PathBuf>,
    nodes: Vec<Node>,
}

fn main() -> io::Result<()> {
    let asked = arguments(std::env::args().skip(1)).map_err(io::Error::other)?;
    let (mut ports, mut places) = (Vec::new(), Vec::new());
    let shapes = shapes(&asked.nodes, u64::from(asked.mtu));
    for ((node, (up, down)), number) in asked.nodes.iter().zip(shapes).zip(0_u8..) {
        let [a, b, c, _] = SUBNET.octets();
        let address = Ipv4Addr::new(a, b, c, number + 1);
        let place = Place::make(address, asked.mtu)?;
        let seed = asked.seed.wrapping_mul(0x1_0000) + u64::from(number) * 2;
        let device = place.device.try_clone()?;
        ports.push(Port::new(device, Lane::new(up, seed), Lane::new(down, seed + 1)));
        places.push((json!({ "name": node.name, "address": address, "net": place.path() }), place));
    }
    let ports: Arc<[Port]> = ports.into();
    let capture = asked.capture.as_deref().map(Capture::create).transpose()?.map(Arc::new);
    relay::start(&ports, SUBNET, capture.as_ref());
    say(&json!({ "nodes": places.iter().map(|(told, _)| told).collect::<Vec<_>>() }))?;
    for line in io::stdin().lock().lines() {
        if let Some(capture) = &capture {
            capture.flush()?;
        }
        say(&answer(&line?, &asked.nodes, &ports))?;
    }
    if let Some(capture) = &capture {
        capture.flush()?;
    }
    say(&counts(&asked.nodes, &ports))
}

/// Tells the caller, if it still listens.
fn say(answer: &Value) -> io::Result<()> {
    writeln!(io::stdout(), "{answer}")
}

fn arguments(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut asked = Arguments { seed: 1, mtu: 1500, capture: None, nodes: Vec::new() };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} wants a value"));
        match word.as_str() {
            "--seed" => asked.seed = value()?.parse().map_err(|e| format!("--seed: {e}"))?,
            "--mtu" => asked.mtu = value()?.parse().map_err(|e| format!("--mtu: {e}"))?,
            "--capture" => asked.capture = Some(value()?.into()),
            node => asked.nodes.push(Node::parse(node)?),
        }
    }
    let names: std::collections::BTreeSet<&str> = asked.nodes.iter().map(|node| node.name.as_str()).collect();
    let told = "usage: link [--seed N] [--mtu N] [--capture FILE] NODE,rate=300M,up.delay=25ms,up.loss=0.1% NODE... (two to 32)";
    let good = names.len() == asked.nodes.len() && (2..=NODES_MAX).contains(&names.len());
    good.then_some(asked).ok_or_else(|| told.to_owned())
}

fn answer(line: &str, nodes: &[Node], ports: &[Port]) -> Value {
    let words: Vec<&str> = line.split_whitespace().collect();
    let port = |name: &str| nodes.iter().position(|node| node.name == name).map(|at| &ports[at]);
    let (port, cut) = match words[..] {
        ["counts"] => return counts(nodes, ports),
        ["cut", name] => (port(name), true),
        ["heal", name] => (port(name), false),
        _ => (None, false),
    };
    match port {
        Some(port) => {
            port.cut(cut);
            json!({ "cut": cut })
        }
        None => json!({ "error": format!("{line:?} is none of: counts, cut NODE, heal NODE") }),
    }
}

/// Counts of the links, by node and direction.
fn counts(nodes: &[Node], ports: &[Port]) -> Value {
    let told = |c: Counts| {
        json!({
            "packets": c.packets, "bytes": c.bytes, "lost_packets": c.lost_packets, "lost_bytes": c.lost_bytes,
            "refused_packets": c.refused_packets, "refused_bytes": c.refused_bytes,
        })
    };
    let one = |(node, port): (&Node, &Port)| {
        let (up, down, cut_bytes) = port.counts();
        (node.name.clone(), json!({ "up": told(up), "down": told(down), "cut_bytes": cut_bytes }))
    };
    nodes.iter().zip(ports).map(one).collect::<serde_json::Map<_, _>>().into()
}
