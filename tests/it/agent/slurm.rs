//! Files of hints for Slurm; `tests/python/test_slurm.py` has the real slurmctld read them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::hints::{ADVISOR, fixture};
use super::{PATIENCE, Running};
use crate::policy::PolicyFixture;

/// Starts the agent of `lab`, which writes hints for some names, and waits for the file of `name`.
fn with_hints(lab: &PolicyFixture, name: &str) -> (Running, PathBuf, String) {
    let folder = lab.user.work().join("hints");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("left%20over"), "towline 1\n").unwrap();
    // The agent is where everything may be read.
    lab.user.ok(&["identity", "issue", "home/ctl", "--to", "ctl"]);
    let settings = String::from_utf8(ADVISOR.to_vec()).unwrap().replace("identity = 'n1'", "identity = 'ctl'")
        + "slurm_hints = 'hints'\n[[advisor.slurm]]\nusers = ['alice', 'bob']\nnames = 'open/**'\n\
           [[advisor.slurm]]\nusers = '*'\nnames = 'raw/**'\n[[advisor.slurm]]\nusers = 'carol'\nnames = 'raw/x'\n";
    lab.user.write("agent.toml", settings.as_bytes());
    let agent = Running::from_file(&lab.user, "agent.toml");
    let end = Instant::now() + PATIENCE;
    while !folder.join(name).exists() || folder.join("left%20over").exists() {
        assert!(Instant::now() < end, "no hint about {name}");
        sleep(Duration::from_millis(20));
    }
    let text = fs::read_to_string(folder.join(name)).unwrap();
    (agent, folder, text)
}

#[test]
fn each_name_has_a_file_with_its_users_and_sites() {
    let lab = fixture();
    lab.user.ok(&["save", "data/one", "other/x"]);
    // No file can be called so; the others are written.
    lab.user.ok(&["save", "data/one", &format!("open/{}", "long".repeat(70))]);
    lab.user.ok(&["save", "data/one", "open/step-2"]);
    let (agent, folder, text) = with_hints(&lab, "raw%2fx");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines[0], lines[2]), ("towline 1", "users *"), "{text}");
    assert!(lines[1].strip_prefix("at ").unwrap().parse::<u64>().unwrap() > 1_700_000_000);
    let mut sites: Vec<Vec<&str>> = lines[4..].iter().map(|line| line.split('\t').collect()).collect();
    sites.sort();
    assert_eq!((sites[0][0], sites[0][1], sites[1][0], sites[1][1]), ("cloud", "deny", "home", "allow"), "{text}");
    assert!(sites[0][5].ends_with("raw data stays at home") && sites[1][5].is_empty(), "{text}");
    // Of a run, its latest step alone.
    let mut names: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["open%2fstep-2", "open@latest", "raw%2fx"]);
    let latest = fs::read_to_string(folder.join("open@latest")).unwrap();
    assert!(latest.contains("\nusers alice,bob\n"), "{latest}");
    let mode = fs::metadata(folder.join("open@latest")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    agent.stop();
}

#[test]
fn both_settings_are_needed() {
    let lab = fixture();
    let user = &lab.user;
    for (settings, said) in [
        ("slurm_hints = 'hints'\n", "need each other"),
        ("[[advisor.slurm]]\nusers = '*'\nnames = '**'\n", "need each other"),
        ("slurm_hints = 'hints'\n[[advisor.slurm]]\nusers = []\nnames = '**'\n", "permits nothing"),
        ("slurm_hints = 'hints'\n[[advisor.slurm]]\nusers = 'a,b'\nnames = '**'\n", "permits nothing"),
    ] {
        user.write("agent.toml", [ADVISOR, settings.as_bytes()].concat().as_slice());
        let error = user.fails(&["agent", "--config", "agent.toml"], 2);
        assert!(error["message"].as_str().unwrap().contains(said), "{error}");
    }
}
