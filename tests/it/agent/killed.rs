//! An agent that is killed at random under load, again and again: no wrong byte, nothing damaged, warm again, and pins kept. G3 of
//! docs/semantics.md.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::Running;
use crate::cli::User;
use crate::data::{Rng, noise};

const KILLS: u64 = 100;
/// A kill comes within this, in milliseconds.
const LIFE_MAX: u64 = 120;
/// A read comes within this, on any machine.
const READ_WITHIN: Duration = Duration::from_secs(30);
const NAMES: u64 = 6;
/// Of the one file of each name: together they are more than the cache holds.
const FILE_LEN: u64 = 20 << 20;
const READ_LEN: u64 = 300_000;
const CONFIG: &str = "repository = '../repo'\nsocket = 'agent.sock'\nmemory = '256M'\ngrace = 1\n\
                      [cache]\ndir = 'cache'\ncapacity = '80M'\nfree_floor = '0'\n";

/// What the agent has said of pins.
#[derive(Default)]
struct Promises {
    kept: BTreeSet<String>,
    /// Somebody asked to end them.
    doubtful: BTreeSet<String>,
    ended: BTreeSet<String>,
}

/// Reads parts of files until the agent is gone, and counts them in `reads`.
fn read(agent: &Running, files: &[Vec<u8>], mut rng: Rng, reads: &AtomicU64) {
    loop {
        let (name, from) = (rng.below(NAMES), rng.below(FILE_LEN - READ_LEN));
        let range = format!("Range: bytes={from}-{}\r\n", from + READ_LEN - 1);
        let Some(answer) = agent.try_ask("GET", &format!("/v1/files/run%2F{name}/file"), &range, "") else {
            return;
        };
        assert_eq!(answer.status, 206, "{}", String::from_utf8_lossy(&answer.body));
        let from = usize::try_from(from).unwrap();
        let expected = &files[usize::try_from(name).unwrap()][from..][..usize::try_from(READ_LEN).unwrap()];
        assert!(answer.body == expected, "wrong bytes of {name} from {from}");
        reads.fetch_add(1, Ordering::Relaxed);
    }
}

/// Pins, unpins, warms and evicts until the agent is gone.
fn disturb(agent: &Running, promises: &Mutex<Promises>, mut rng: Rng) -> Option<()> {
    let mut own: Vec<String> = Vec::new();
    loop {
        let name = format!("run/{}", rng.below(NAMES));
        match rng.below(4) {
            0 => {
                let body = json!({ "name": name, "for": 3600 }).to_string();
                let answer = agent.try_ask("POST", "/v1/pins", "", &body)?;
                // Two files fit, three do not.
                assert!([201, 507].contains(&answer.status), "{}", answer.status);
                if answer.status == 201 {
                    let id = answer.json(201)["id"].as_str().unwrap().to_owned();
                    promises.lock().unwrap().kept.insert(id.clone());
                    own.push(id);
                }
            }
            1 => {
                let Some(id) = own.pop() else { continue };
                promises.lock().unwrap().doubtful.insert(id.clone());
                agent.try_ask("DELETE", &format!("/v1/pins/{id}"), "", "")?;
                promises.lock().unwrap().ended.insert(id);
            }
            2 => {
                let answer = agent.try_ask("POST", "/v1/warm", "", &json!({ "name": name }).to_string())?;
                assert_eq!(answer.status, 202);
            }
            _ => {
                let answer = agent.try_ask("POST", "/v1/cache/evict", "", &json!({ "bytes": 4 << 20 }).to_string())?;
                assert_eq!(answer.status, 200);
            }
        }
        std::thread::sleep(Duration::from_millis(rng.below(10)));
    }
}

/// What must hold after a kill; whether the cache is warm.
fn sound(agent: &Running, before: &Promises) -> bool {
    let pins = agent.get("/v1/pins");
    let pins: BTreeSet<String> =
        pins["pins"].as_array().unwrap().iter().map(|pin| pin["id"].as_str().unwrap().to_owned()).collect();
    assert!(before.kept.iter().all(|pin| pins.contains(pin) || before.doubtful.contains(pin)), "a pin is lost");
    assert!(before.ended.is_disjoint(&pins), "a pin that was ended is back");
    let checked = agent.done("/v1/cache/check", &json!({}));
    assert_eq!(checked["report"]["damaged"], json!([]), "a kill damages nothing");
    for pin in &pins {
        assert_eq!(agent.ask("DELETE", &format!("/v1/pins/{pin}"), "", "").status, 200);
    }
    checked["report"]["chunks"].as_u64().unwrap() > 0
}

#[test]
fn killed_at_random_under_load_it_is_sound_and_warm_and_keeps_its_pins() {
    let user = User::with_repository();
    let files: Vec<Vec<u8>> = (0..NAMES).map(|n| noise(n, usize::try_from(FILE_LEN).unwrap())).collect();
    for (n, file) in files.iter().enumerate() {
        user.write(&format!("tree-{n}/file"), file);
        user.ok(&["save", &format!("tree-{n}"), &format!("run/{n}")]);
    }
    user.write("agent.toml", CONFIG.as_bytes());
    let mut rng = Rng(0x2545_f491_4f6c_dd1d);
    let (mut before, mut warm, reads) = (Promises::default(), 0, AtomicU64::new(0));
    for round in 0..KILLS {
        let agent = Running::from_file(&user, "agent.toml");
        warm += u64::from(sound(&agent, &before));
        let promises = Mutex::<Promises>::default();
        std::thread::scope(|scope| {
            let (agent, files, promises, reads) = (&agent, &files, &promises, &reads);
            let read_before = reads.load(Ordering::Relaxed);
            for n in 1..4 {
                scope.spawn(move || read(agent, files, Rng(round << 8 | n), reads));
            }
            scope.spawn(move || disturb(agent, promises, Rng(round << 8 | 9)));
            // Every other life is long enough for a read, however slow the machine is.
            let begun = Instant::now();
            while round % 2 == 0 && reads.load(Ordering::Relaxed) == read_before && begun.elapsed() < READ_WITHIN {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(rng.below(LIFE_MAX)));
            agent.signal(Signal::KILL);
        });
        assert_eq!(agent.ended().0, None, "it ended by itself in round {round}");
        before = promises.into_inner().unwrap();
    }
    let reads = reads.into_inner();
    assert!(reads >= KILLS / 2, "there was no load: {reads} reads");
    assert!(warm > KILLS * 9 / 10, "warm after {warm} of {KILLS} kills");
    let agent = Running::from_file(&user, "agent.toml");
    sound(&agent, &before);
    assert_eq!(agent.get("/v1/cache")["damaged"], 0);
    agent.stop();
}
