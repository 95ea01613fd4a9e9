//! A world of nodes: network namespaces that the example `link` joins with set rates, delays and losses.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;

/// A way between two sites: 200 Mbit/s, a round trip of 20 ms, a packet in a thousand lost.
pub(crate) const FAR: &str = "rate=200M,up.delay=10ms,up.loss=0.1%";

/// A world. Its namespaces go with it.
pub(crate) struct World {
    link: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    nodes: BTreeMap<String, (Ipv4Addr, PathBuf)>,
}

/// What a node's link has carried in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carried {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) lost_packets: u64,
}

impl World {
    /// A world of nodes, each told as `link` is: `far,rate=300M,up.delay=25ms,up.loss=0.1%`. None where this machine or
    /// user cannot make one, which it says; root that is to have everything must have this.
    pub(crate) fn make(nodes: &[&str]) -> Option<Self> {
        let root = rustix::process::geteuid().is_root();
        let lacking = if !root {
            "not root"
        } else if !Path::new("/dev/net/tun").exists() {
            "no /dev/net/tun"
        } else {
            return Some(Self::start(nodes));
        };
        assert!(!root || std::env::var_os("TOWLINE_TEST_REQUIRE_SERVERS").is_none(), "a world is required: {lacking}");
        eprintln!("skipped: no world of network namespaces: {lacking}");
        None
    }

    fn start(nodes: &[&str]) -> Self {
        let mut command = Command::new(link());
        command.args(nodes).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut link = command.spawn().unwrap();
        let (ask, answers) = (link.stdin.take(), BufReader::new(link.stdout.take().unwrap()));
        let mut world = Self { link, ask, answers, nodes: BTreeMap::new() };
        let told = world.announced_at();
        world.nodes = told["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|node| {
                let text = |key: &str| node[key].as_str().unwrap();
                (text("name").to_owned(), (text("address").parse().unwrap(), text("net").into()))
            })
            .collect();
        world
    }

    pub(crate) fn address(&self, node: &str) -> Ipv4Addr {
        self.nodes[node].0
    }

    /// A program in a node. It ends with the thread that starts it.
    pub(crate) fn command(&self, node: &str, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "nsenter"]).arg(format!("--net={}", self.nodes[node].1.display()));
        command.arg(program);
        command
    }

    /// Runs `work` on a thread in a node: the sockets that it opens are the node's, wherever they are used then.
    pub(crate) fn inside<T: Send>(&self, node: &str, work: impl FnOnce() -> T + Send) -> T {
        let space = File::open(&self.nodes[node].1).unwrap();
        let inside = || {
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            work()
        };
        std::thread::scope(|scope| scope.spawn(inside).join().unwrap())
    }

    /// What a node has sent, and what has come to it.
    pub(crate) fn carried(&mut self, node: &str) -> (Carried, Carried) {
        let counts = self.asked("counts");
        let of = |way: &str| {
            let count = |what: &str| counts[node][way][what].as_u64().unwrap();
            Carried { packets: count("packets"), bytes: count("bytes"), lost_packets: count("lost_packets") }
        };
        (of("up"), of("down"))
    }

    /// From now on nothing passes to or from the node.
    pub(crate) fn cut(&mut self, node: &str) {
        assert_eq!(self.asked(&format!("cut {node}"))["cut"], true);
    }

    /// Undoes a cut.
    pub(crate) fn heal(&mut self, node: &str) {
        assert_eq!(self.asked(&format!("heal {node}"))["cut"], false);
    }

    fn asked(&mut self, what: &str) -> Value {
        writeln!(self.ask.as_mut().unwrap(), "{what}").unwrap();
        self.announced_at()
    }

    fn announced_at(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "link has ended: {:?}", self.link.wait());
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // It ends with its input.
        self.ask = None;
        let _ = self.link.wait();
    }
}

/// The program `link`, built by cargo, as this test was.
fn link() -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--package", "link"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    assert!(build.status().unwrap().success(), "`link` does not build");
    Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name("link")
}
