//! What an agent takes of memory while many read: no more than it was given, and no more after an hour than after a minute. P4 of
//! docs/semantics.md.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Running;
use crate::cli::User;
use crate::data::{Rng, noise};

const MIB: u64 = 1 << 20;
const READERS: u64 = 64;
const NAMES: u64 = 6;
const FILE_LEN: u64 = 20 << 20;
/// What the agent is given for buffers.
const MEMORY: u64 = 256 * MIB;
/// Whatever is no buffer: threads' stacks, indexes, the allocator's slack.
const BESIDES: u64 = 48 * MIB;
/// How long `make soak` goes on, in minutes.
const MINUTES: &str = "TOWLINE_SOAK_MINUTES";

/// A repository, and the digests of the files in it.
fn world() -> (User, Vec<blake3::Hash>) {
    let user = User::with_repository();
    let mut digests = Vec::new();
    for n in 0..NAMES {
        let file = noise(n, usize::try_from(FILE_LEN).unwrap());
        user.write(&format!("tree-{n}/file"), &file);
        user.ok(&["save", &format!("tree-{n}"), &format!("run/{n}")]);
        digests.push(blake3::hash(&file));
    }
    // Less than the files, so that there is always something to bring.
    let config = format!(
        "repository = '../repo'\nsocket = 'agent.sock'\nmemory = '{MEMORY}'\n\
         [cache]\ndir = 'cache'\ncapacity = '96M'\nfree_floor = '0'\n"
    );
    user.write("agent.toml", config.as_bytes());
    (user, digests)
}

impl Running {
    /// Bytes of memory that are the agent's own: no file's, such as those of its cache.
    pub(super) fn own_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

/// Reads whole files over and over, `pause` between two.
fn read(
    agent: &Running,
    digests: &[blake3::Hash],
    mut rng: Rng,
    pause: Duration,
    (over, reads): (&AtomicBool, &AtomicU64),
) {
    while !over.load(Ordering::Relaxed) {
        let n = rng.below(NAMES);
        let answer = agent.ask("GET", &format!("/v1/files/run%2F{n}/file"), "", "");
        assert_eq!(answer.status, 200);
        assert_eq!(blake3::hash(&answer.body), digests[usize::try_from(n).unwrap()]);
        reads.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(pause);
    }
}

/// All readers at once, until `enough` of them: it is told again and again how many there were.
fn load(agent: &Running, digests: &[blake3::Hash], pause: Duration, mut enough: impl FnMut(u64) -> bool) {
    let (over, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (over, reads) = (&over, &reads);
        for n in 1..=READERS {
            scope.spawn(move || read(agent, digests, Rng(n), pause, (over, reads)));
        }
        while !enough(reads.load(Ordering::Relaxed)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn sixty_four_readers_fit_in_what_the_agent_was_given() {
    let (user, digests) = world();
    let agent = Running::from_file(&user, "agent.toml");
    let mut peak = 0;
    load(&agent, &digests, Duration::ZERO, |reads| {
        peak = peak.max(agent.own_bytes());
        reads > 2 * READERS
    });
    assert!(peak < MEMORY + BESIDES, "{} MiB", peak / MIB);
    agent.stop();
}

/// What an agent has at a moment of a soak.
#[derive(Debug)]
struct Usage {
    bytes: u64,
    files: usize,
    threads: usize,
}

impl Usage {
    fn by(agent: &Running) -> Self {
        let count = |what: &str| fs::read_dir(format!("/proc/{}/{what}", agent.child.id())).unwrap().count();
        Self { bytes: agent.own_bytes(), files: count("fd"), threads: count("task") }
    }

    /// The most of each.
    fn most(self, other: &Self) -> Self {
        Self {
            bytes: self.bytes.max(other.bytes),
            files: self.files.max(other.files),
            threads: self.threads.max(other.threads),
        }
    }
}

#[test]
#[ignore = "an hour: make soak"]
fn an_hour_takes_no_more_than_its_first_minutes() {
    let minutes: u64 = std::env::var(MINUTES).map_or(60, |minutes| minutes.parse().unwrap());
    let (user, digests) = world();
    let agent = Running::from_file(&user, "agent.toml");
    let (begun, part) = (Instant::now(), Duration::from_secs(minutes * 6));
    let mut parts: Vec<Usage> = Vec::new();
    load(&agent, &digests, Duration::from_secs(10), |reads| {
        let now = Usage::by(&agent);
        if parts.len() < 10 && begun.elapsed() >= part * u32::try_from(parts.len()).unwrap() {
            eprintln!("{:>5.0} s, {reads} reads: {now:?}", begun.elapsed().as_secs_f64());
            parts.push(now);
        } else if let Some(last) = parts.pop() {
            parts.push(last.most(&now));
        }
        begun.elapsed() > part * 10
    });
    // The first part is warming up.
    let (early, late) = (&parts[1], parts.last().unwrap());
    assert!(late.bytes < early.bytes + 32 * MIB, "{parts:?}");
    assert!(late.files <= early.files + 8 && late.threads <= early.threads + 8, "{parts:?}");
    assert!(parts.iter().all(|part| part.bytes < MEMORY + BESIDES), "{parts:?}");
    agent.stop();
}
