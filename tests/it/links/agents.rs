//! Real agents in a world: what is warmed over links, what a kill and a cut leave, what strangers get.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::world::{FAR, World};
use crate::data::tree_digest;

const MIB: u64 = 1 << 20;
/// What is moved: enough for seconds on the link.
const LEN: u64 = 24 * MIB;
/// Words that stand in every file, all over, to be looked for on the wire.
const PLAIN: &[u8] = b"weights that nobody else may read ";
/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(2);

/// Sites: agents of one authority, each in a node of its name, and a repository in a folder that all can read.
struct Sites {
    room: TempDir,
    world: World,
    running: Vec<(String, Child)>,
}

impl Sites {
    /// A repository with one tree of `LEN` bytes, of which nothing compresses away.
    fn make(nodes: &[&str]) -> Option<Self> {
        let room = tempfile::tempdir().unwrap();
        let capture = room.path().join("capture");
        let nodes: Vec<&str> = ["--capture", capture.to_str().unwrap()].iter().chain(nodes).copied().collect();
        let sites = Self { world: World::make(&nodes)?, room, running: Vec::new() };
        let source = sites.path("source");
        fs::create_dir(&source).unwrap();
        for file in 0..3_u64 {
            let mut bytes = vec![0; usize::try_from(LEN / 3).unwrap()];
            blake3::Hasher::new().update(&file.to_le_bytes()).finalize_xof().fill(&mut bytes);
            for piece in bytes.chunks_mut(10_000) {
                let len = PLAIN.len().min(piece.len());
                piece[..len].copy_from_slice(&PLAIN[..len]);
            }
            fs::write(source.join(format!("{file}.bin")), bytes).unwrap();
        }
        sites.alone(&["identity", "init", "--authority", "authority"]);
        sites.alone(&["init", "repository"]);
        sites.alone(&["save", "source", "run", "--repo", "repository", "--compression", "off"]);
        Some(sites)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.room.path().join(name)
    }

    fn socket(&self, node: &str) -> PathBuf {
        self.path(&format!("{node}.sock"))
    }

    fn told(&self, command: &mut Command) -> &Self {
        command.env_clear().env("HOME", self.room.path()).env("PATH", std::env::var_os("PATH").unwrap());
        command.current_dir(self.room.path());
        self
    }

    /// Runs a verb without an agent.
    fn alone(&self, args: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        self.told(&mut command);
        succeeded(&mut command, args);
    }

    /// A verb that the agent in `node` is asked for.
    fn asking(&self, node: &str) -> Command {
        let mut command = self.world.command(node, env!("CARGO_BIN_EXE_towline"));
        self.told(&mut command);
        command.env("TOWLINE_AGENT", self.socket(node)).arg("--json");
        command
    }

    /// Starts the agent of `node`, of the site of that name without digits, which knows `peers`.
    fn start(&mut self, node: &str, peers: &[&str], authority: &str) {
        let site = node.trim_end_matches(|c: char| c.is_ascii_digit());
        let identity = format!("identity-{node}");
        if !self.path(&identity).exists() {
            let name = format!("{site}/{node}");
            self.alone(&["identity", "issue", &name, "--to", &identity, "--authority", authority]);
        }
        let peers: Vec<String> = peers.iter().map(|peer| format!("\"{}:7071\"", self.world.address(peer))).collect();
        let config = self.path(&format!("{node}.toml"));
        let text = format!(
            "identity = \"{identity}\"\nsocket = \"{node}.sock\"\nlisten = \"{}:7071\"\nrepository = \"repository\"\n\
             memory = \"256M\"\n[cache]\ndir = \"cache-{node}\"\ncapacity = \"256M\"\nfree_floor = \"16M\"\n\
             [peers]\naddresses = [{}]\n[[allow]]\nagents = \"**\"\nnames = \"**\"\n",
            self.world.address(node),
            peers.join(", ")
        );
        fs::write(&config, text).unwrap();
        let mut command = self.world.command(node, env!("CARGO_BIN_EXE_towline"));
        self.told(&mut command);
        command.args(["--json", "agent", "--config"]).arg(config).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("listening"), "{node}: {line:?}");
        self.running.push((node.to_owned(), child));
    }

    fn kill(&mut self, node: &str) {
        let at = self.running.iter().position(|(name, _)| name == node).unwrap();
        let (_, mut child) = self.running.swap_remove(at);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Begins to warm in `node`.
    fn warming(&self, node: &str, from: &str) -> Child {
        let mut command = self.asking(node);
        command.args(["warm", "run", "--wait", "--from", from]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Warms in `node`: everything is there after it.
    fn warm(&self, node: &str, from: &str) {
        warmed(self.warming(node, from));
    }

    /// Bytes that have come to a node.
    fn come(&mut self, node: &str) -> u64 {
        self.world.carried(node).1.bytes
    }

    /// Waits until so many bytes have come to a node.
    fn until(&mut self, node: &str, bytes: u64) {
        let began = Instant::now();
        while self.come(node) < bytes {
            assert!(began.elapsed() < PATIENCE, "{} bytes have come to {node}, not {bytes}", self.come(node));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Restores with the agent of `node`, and compares.
    fn restored(&self, node: &str) {
        let out = format!("out-{node}");
        succeeded(&mut self.asking(node), &["restore", "run", &out, "--repo", "repository"]);
        assert_eq!(tree_digest(&self.path("source")), tree_digest(&self.path(&out)), "restored at {node}");
    }
}

impl Drop for Sites {
    fn drop(&mut self) {
        for (_, child) in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a verb prints, which must succeed.
fn succeeded(command: &mut Command, args: &[&str]) -> Vec<u8> {
    let output = command.args(args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "towline {args:?}: {}: {said}", output.status);
    output.stdout
}

/// Waits for a warm to end: nothing is missing.
fn warmed(child: Child) {
    let output = child.wait_with_output().unwrap();
    let (told, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "warm: {}: {told} {said}", output.status);
    let told: Value = serde_json::from_str(told.lines().last().unwrap_or_default()).unwrap();
    assert_eq!(told["tasks"][0]["report"]["missing"], 0, "{told}");
}

fn holds(file: &Path, words: &[u8]) -> bool {
    let bytes = fs::read(file).unwrap();
    bytes.windows(words.len()).any(|window| window == words)
}

fn two() -> Option<Sites> {
    let mut sites = Sites::make(&[&format!("near,{FAR}"), &format!("far,{FAR}")])?;
    sites.start("near", &[], "authority");
    sites.warm("near", "repository");
    sites.start("far", &["near"], "authority");
    Some(sites)
}

#[test]
fn a_site_is_warmed_from_another_over_the_link_and_nothing_on_it_can_be_read() {
    let Some(mut sites) = two() else { return };
    sites.warm("far", "near/near");
    let come = sites.come("far");
    assert!((LEN..LEN * 6 / 5).contains(&come), "{come} bytes came for {LEN}");
    sites.restored("far");
    sites.warm("far", "near/near");
    assert!(sites.come("far") < come + LEN / 50, "what is there is not moved again");

    let capture = sites.path("capture");
    assert!(fs::metadata(&capture).unwrap().len() > LEN, "the capture holds what was carried");
    assert!(holds(&sites.path("source/0.bin"), PLAIN));
    assert!(!holds(&capture, &PLAIN[..16]), "a file's words on the wire");
}

#[test]
fn an_agent_that_was_killed_at_half_moves_the_other_half() {
    let Some(mut sites) = two() else { return };
    let mut warming = sites.warming("far", "near/near");
    sites.until("far", LEN / 2);
    sites.kill("far");
    warming.kill().unwrap();
    warming.wait().unwrap();
    let before = sites.come("far");
    sites.start("far", &["near"], "authority");
    sites.warm("far", "near/near");
    let rest = sites.come("far") - before;
    // What had come in part is lost: a chunk on each of four streams of two connections; and there are headers.
    let lacking = (LEN - before.min(LEN)) + 8 * MIB;
    assert!(rest < lacking + LEN / 20, "{rest} bytes of {LEN} after {before} had come");
    sites.restored("far");
}

#[test]
fn a_provider_that_is_cut_off_is_done_without_and_comes_back() {
    let nodes = ["near1", "near2", "far"].map(|node| format!("{node},{FAR}"));
    let Some(mut sites) = Sites::make(&nodes.each_ref().map(String::as_str)) else { return };
    for node in ["near1", "near2"] {
        sites.start(node, &[], "authority");
        sites.warm(node, "repository");
    }
    sites.start("far", &["near1", "near2"], "authority");
    let warming = sites.warming("far", "near");
    sites.until("far", LEN / 4);
    sites.world.cut("near1");
    warmed(warming);
    sites.restored("far");
    sites.world.heal("near1");
}

#[test]
fn an_agent_of_another_authority_gets_nothing() {
    let Some(mut sites) = Sites::make(&[&format!("near,{FAR}"), &format!("far,{FAR}")]) else { return };
    sites.start("near", &[], "authority");
    sites.warm("near", "repository");
    sites.alone(&["identity", "init", "--authority", "other"]);
    sites.start("far", &["near"], "other");
    let refused = sites.warming("far", "near/near").wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(6), "an agent whose certificate does not hold has no name");
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("has not answered yet: got no answer from ") && said.contains("certificate"), "{said}");
    let come = sites.come("far");
    assert!(come < MIB / 4, "{come} bytes came from an agent that does not know this one");
}
