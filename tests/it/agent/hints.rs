//! Hints from what agents say that their caches hold.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::together::EVERYTHING;
use super::tokens::token;
use super::{PATIENCE, Running, told_json};
use crate::data::noise;
use crate::policy::PolicyFixture;
use crate::ports::free_address;

/// A site `cloud` with an agent, and `home` with the repository.
pub(super) fn fixture() -> PolicyFixture {
    let lab = PolicyFixture::at("home");
    let user = &lab.user;
    let place = user.repository().canonicalize().unwrap();
    let sites = format!(
        "[[site]]\nname = 'home'\nrepositories = '{}'\n\n[[site]]\nname = 'cloud'\n\n\
         [[link]]\nfrom = 'home'\nto = 'cloud'\nrate = '1Gbit'\ndelay = '10ms'\nprice = {{ unit = 'GB', usd = '0.09' }}\n",
        place.display()
    );
    user.write("sites.toml", sites.as_bytes());
    for (file, seed) in [("data/one", 1), ("data/two", 2), ("data/three", 3)] {
        user.write(file, &noise(seed, 700_000));
    }
    user.ok(&["save", "data", "open/step-1"]);
    user.ok(&["save", "data", "raw/x"]);
    user.ok(&["identity", "issue", "cloud/n1", "--to", "n1"]);
    user.write(
        "agent.toml",
        b"repository = '../repo'\nsocket = 'run/agent.sock'\nmemory = '256M'\nidentity = 'n1'\n\
          [cache]\ndir = 'cache'\ncapacity = '64M'\nfree_floor = '0'\ninventory = '100ms'\n",
    );
    lab
}

fn candidate(lab: &PolicyFixture, name: &str, site: &str) -> Value {
    let hint = lab.user.json(&["hint", name, "--at", "home", "--at", "cloud"], 0);
    let all = hint["candidates"].as_array().unwrap();
    all.iter().find(|candidate| candidate["site"] == site).unwrap().clone()
}

/// Asks until `cloud` holds what `wanted` says.
fn until(lab: &PolicyFixture, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = candidate(lab, name, "cloud");
        if wanted(&found) {
            return found;
        }
        assert!(Instant::now() < end, "{found}");
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn what_a_hint_says_would_move_is_what_moves() {
    let mut lab = fixture();
    let absent = lab.user.fails(&["hint", "open/step-9"], 3);
    assert!(absent["message"].as_str().unwrap().contains("the nearest is `open/step-1`"), "{absent}");
    let before = candidate(&lab, "open/step-1", "cloud");
    let stored = before["bytes"]["missing"].as_u64().unwrap();
    assert!((2_100_000..2_110_000).contains(&stored), "{before}");
    assert_eq!((&before["bytes"]["present"], &before["inventory_age_s"]), (&0.into(), &Value::Null));
    assert_eq!((&before["sources"][0]["repository"], &before["sources"][0]["site"]), (&true.into(), &"home".into()));
    // 0.09 dollars for 10^9 bytes.
    let egress = before["usd_micro"]["egress"].as_u64().unwrap();
    assert_eq!(egress, (stored * 90_000 + 500_000_000) / 1_000_000_000);
    assert_eq!(before["eta_s"]["basis"], "modelled");

    let agent = Running::from_file(&lab.user, "agent.toml");
    let warm = |more: &[&str]| {
        let told = told_json(&lab.user, &agent, &[&["warm"], more].concat());
        assert!(told["tasks"][0]["report"].is_object(), "{told}");
        told["tasks"][0]["report"].clone()
    };
    // Half of it, then all of it: each time the dry run of the agent and the hint agree to the byte.
    warm(&["open/step-1:one", "--wait"]);
    let half = until(&lab, "open/step-1", |found| found["bytes"]["present"].as_u64().unwrap() > 0);
    let planned = warm(&["open/step-1", "--dry-run"]);
    assert_eq!(half["bytes"]["missing"], planned["lacking_bytes"], "{half} {planned}");
    assert_eq!(half["bytes"]["present"], planned["hit_bytes"]);
    let moved = warm(&["open/step-1", "--pin", "1h", "--wait"]);
    assert_eq!(moved["fetched_bytes"], half["bytes"]["missing"], "{moved}");
    let after = until(&lab, "open/step-1", |found| found["bytes"]["pinned"] == stored);
    assert_eq!((&after["bytes"]["missing"], &after["eta_s"]["p90"]), (&0.into(), &0.0.into()));
    assert_eq!((&after["usd_micro"]["total"], &after["score"], &after["rank"]), (&0.into(), &100.into(), &1.into()));
    agent.stop();

    // A name that may not go there, with the same chunks.
    let denied = candidate(&lab, "raw/x", "cloud");
    assert_eq!((&denied["verdict"], &denied["score"]), (&"deny".into(), &0.into()));
    assert!(denied["deny"][0]["rule"].as_str().unwrap().ends_with("raw data stays at home"), "{denied}");
    let shown = lab.user.ok(&["hint", "raw/x", "open/step-1", "--explain"]);
    assert!(shown.lines().next().unwrap().starts_with("RANK  SITE   VERDICT"), "{shown}");
    assert!(shown.contains("deny: rule") && shown.contains("raw data stays at home"), "{shown}");
    // A rule about the agents of a site counts for those that have told something.
    lab.rules = format!(
        "[[rule]]\nverdict = 'deny'\nnames = 'open/**'\nagents = 'cloud/n1'\nwhy = 'not on n1'\n\n{}",
        lab.rules
    );
    lab.set(&[]);
    let denied = candidate(&lab, "open/step-1", "cloud");
    assert_eq!((&denied["verdict"], &denied["score"]), (&"deny".into(), &0.into()), "{denied}");
    assert!(denied["deny"][0]["rule"].as_str().unwrap().ends_with("not on n1"), "{denied}");
    // Manifests come from the store: where that is forbidden, no private link helps.
    lab.rules = "[[rule]]\nverdict = 'allow'\nnames = 'open/**'\npath = 'private'\nwhy = 'by our line'\n\n\
                 [[rule]]\nverdict = 'deny'\nnames = 'open/**'\nto = 'cloud'\nwhy = 'else not'\n"
        .to_owned();
    lab.set(&[]);
    let denied = candidate(&lab, "open/step-1", "cloud");
    assert_eq!((&denied["verdict"], &denied["rank"]), (&"deny".into(), &2.into()), "{denied}");
}

#[test]
fn an_inventory_that_its_agent_did_not_sign_is_not_used() {
    let lab = fixture();
    let agent = Running::from_file(&lab.user, "agent.toml");
    told_json(&lab.user, &agent, &["warm", "--wait", "open/step-1"]);
    until(&lab, "open/step-1", |found| found["bytes"]["missing"] == 0);
    agent.stop();
    let folder = lab.user.repository().join("inventory/cloud/n1");
    let head = fs::read(folder.join("head")).unwrap();
    // Of another agent, then changed, then garbage.
    let other = lab.user.repository().join("inventory/cloud/n2");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("head"), &head).unwrap();
    let hint = lab.user.json(&["hint", "open/step-1"], 0);
    assert_eq!(hint["complete"], false);
    let note = hint["notes"][0].as_str().unwrap();
    assert!(note.contains("cloud/n2") && note.contains("signed by another agent"), "{note}");
    assert_eq!(candidate(&lab, "open/step-1", "cloud")["bytes"]["missing"], 0, "the true one is used");
    fs::remove_dir_all(&other).unwrap();
    for (at, changed) in [(head.len() / 2, 1_u8), (head.len() - 40, 0x80)] {
        let mut bytes = head.clone();
        bytes[at] ^= changed;
        fs::write(folder.join("head"), bytes).unwrap();
        let hint = lab.user.json(&["hint", "open/step-1", "--at", "cloud"], 0);
        assert_eq!((&hint["complete"], &hint["candidates"][0]["bytes"]["present"]), (&false.into(), &0.into()));
    }
    // A machine that trusts no authority verifies nothing, neither this nor the policy.
    for trusted in ["identity", "authority"] {
        fs::remove_dir_all(lab.user.work().join("../home/.config/towline").join(trusted)).unwrap();
    }
    fs::write(folder.join("head"), head).unwrap();
    let hint = lab.user.json(&["hint", "open/step-1", "--at", "cloud"], 0);
    assert_eq!((&hint["complete"], &hint["candidates"][0]["bytes"]["present"]), (&false.into(), &0.into()), "{hint}");
}

pub(super) const ADVISOR: &[u8] =
    b"repository = '../repo'\nsocket = 'run/agent.sock'\nmemory = '256M'\nidentity = 'n1'\n\
      http = '127.0.0.1:0'\ntokens = 'own/tokens'\n\
      [cache]\ndir = 'cache'\ncapacity = '64M'\nfree_floor = '0'\ninventory = '100ms'\n\
      [advisor]\nsites = 'sites.toml'\n";

pub(super) fn asking(name: &str) -> Value {
    json!({ "apiVersion": "towline.dev/v1", "inputs": [{ "ref": name }], "candidates": [{ "site": "cloud" }] })
}

pub(super) fn bytes(hint: &Value, what: &str) -> u64 {
    hint["candidates"][0]["bytes"][what].as_u64().unwrap()
}

#[test]
fn an_advisor_answers_at_once_and_soon_completely() {
    let lab = fixture();
    lab.user.write("agent.toml", ADVISOR);
    let agent = Running::from_file(&lab.user, "agent.toml");
    // The first answer does not wait for the chunks: until they are read, all bytes count as missing.
    let first = agent.post("/v1/hints?wait=0s", &asking("open/step-1"), 200);
    assert!(bytes(&first, "missing") >= 2_100_000, "{first}");
    assert_eq!(first["complete"] == false, first["notes"].to_string().contains("still being read"), "{first}");
    let whole = agent.post("/v1/hints?wait=1m", &asking("open@latest"), 200);
    assert_eq!((&whole["complete"], &whole["inputs"]), (&json!(true), &json!(["open/step-1"])), "{whole}");
    // The same inputs, however often they are named, are remembered once.
    let mut twice = asking("open/step-1");
    twice["inputs"] = json!([{ "ref": "open/step-1" }, { "ref": "open@latest" }, { "ref": "open/step-1" }]);
    assert_eq!(agent.post("/v1/hints?wait=0s", &twice, 200)["complete"], true);
    let by_command = candidate(&lab, "open/step-1", "cloud");
    for part in ["bytes", "usd_micro", "verdict", "sources"] {
        assert_eq!(whole["candidates"][0][part], by_command[part], "{part}");
    }
    // From one epoch, the same question has the same answer, to the byte.
    let text = asking("open/step-1").to_string();
    let end = Instant::now() + PATIENCE;
    loop {
        let told = || agent.ask("POST", "/v1/hints", "", &text).body;
        let (one, other) = (told(), told());
        if one == other {
            break;
        }
        assert!(Instant::now() < end, "epochs last a second");
    }

    // A later epoch has new names, and chunks that have come to the cache.
    lab.user.ok(&["save", "data", "open/step-2"]);
    agent.post("/v1/hints", &asking("open/step-2"), 200);
    told_json(&lab.user, &agent, &["warm", "--wait", "open/step-2"]);
    loop {
        let now = agent.post("/v1/hints?wait=1m", &asking("open/step-2"), 200);
        if bytes(&now, "missing") == 0 {
            break;
        }
        assert!(Instant::now() < end, "{now}");
        sleep(Duration::from_millis(50));
    }

    // A changed sites file counts, a bad one does not.
    let sites = fs::read_to_string(lab.user.work().join("sites.toml")).unwrap();
    lab.user.write("sites.toml", format!("{sites}\n[[site]]\nname = 'moon'\n").as_bytes());
    let mut moon = asking("open/step-1");
    moon["candidates"] = json!([{ "site": "moon" }]);
    loop {
        if agent.ask("POST", "/v1/hints", "", &moon.to_string()).status == 200 {
            break;
        }
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(50));
    }
    lab.user.write("sites.toml", b"colour = 'red'");
    loop {
        let now = agent.post("/v1/hints", &moon, 200);
        if now["notes"].to_string().contains("the one before holds") {
            break;
        }
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(50));
    }

    let unknown = agent.post("/v1/hints", &asking("open/step-9"), 404);
    assert!(unknown["error"]["message"].as_str().unwrap().contains("open/step-2"), "{unknown}");
    let mut wrong = asking("open/step-1");
    wrong["objective"] = json!({ "quantile": 0.7 });
    agent.post("/v1/hints", &wrong, 400);
    agent.stop();
}

/// Hints "tell a caller only of names that it may read; another is answered as an absent one".
#[test]
fn a_token_gets_hints_for_names_that_it_may_read() {
    let lab = fixture();
    lab.user.write("agent.toml", ADVISOR);
    let agent = Running::from_file(&lab.user, "agent.toml");
    let reader = token(&lab.user, &agent, &["read=open/**"], &[]);
    let ask = |name: &str| reader.ask("POST", "/v1/hints?wait=1m", &asking(name).to_string());
    assert_eq!(ask("open@latest").json(200)["inputs"], json!(["open/step-1"]));
    let told = |name: &str| String::from_utf8(ask(name).body).unwrap().replace(name, "NAME");
    assert_eq!(ask("raw/x").status, 404);
    assert_eq!(told("raw/x"), told("raw/z"), "a name that it may not read, and one that is not there");
    let none = token(&lab.user, &agent, &["metrics"], &[]);
    assert_eq!(none.ask("POST", "/v1/hints", &asking("open/step-1").to_string()).status, 403);
    agent.stop();
}

#[test]
fn an_advisor_answers_from_memory_while_its_repository_is_away() {
    let lab = fixture();
    lab.user.write("agent.toml", ADVISOR);
    let agent = Running::from_file(&lab.user, "agent.toml");
    let before = agent.post("/v1/hints?wait=1m", &asking("open/step-1"), 200);
    assert_eq!(before["complete"], true, "{before}");
    let (place, aside) = (lab.user.repository(), lab.user.work().join("aside"));
    fs::rename(&place, &aside).unwrap();
    // A thousand ask at once, too.
    let text = asking("open/step-1").to_string();
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(agent.ask("POST", "/v1/hints", "", &text).status, 200);
                }
            });
        }
    });
    let end = Instant::now() + PATIENCE;
    loop {
        let now = agent.post("/v1/hints", &asking("open/step-1"), 200);
        assert_eq!(now["candidates"][0]["bytes"], before["candidates"][0]["bytes"]);
        if now["notes"].to_string().contains("cannot be reached") {
            assert_eq!(now["complete"], false);
            break;
        }
        assert!(Instant::now() < end, "{now}");
        sleep(Duration::from_millis(200));
    }
    fs::rename(&aside, &place).unwrap();
    loop {
        if agent.post("/v1/hints", &asking("open/step-1"), 200)["complete"] == true {
            break;
        }
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(200));
    }
    agent.stop();
}

#[test]
fn fetches_are_held_against_what_hints_said_and_rates_survive_a_restart() {
    let lab = fixture();
    let user = &lab.user;
    user.write("agent.toml", ADVISOR);
    let agent = Running::from_file(user, "agent.toml");
    // The first one is not predicted.
    for n in 0..4 {
        user.write("big/f", &noise(200 + n, 17 << 20));
        let name = format!("open/step-{}", n + 2);
        user.ok(&["save", "big", &name]);
        told_json(user, &agent, &["warm", &name, "--wait"]);
    }
    let end = Instant::now() + PATIENCE;
    let measured = |agent: &Running| agent.get("/v1/calibration")["links"][0].clone();
    while measured(&agent)["outcomes"] != 3 {
        assert!(Instant::now() < end, "{}", agent.get("/v1/calibration"));
        sleep(Duration::from_millis(50));
    }
    let link = measured(&agent);
    assert_eq!((&link["from"], &link["to"]), (&Value::Null, &json!("cloud")));
    assert!(link["median_error"].as_f64().unwrap() >= 0.0 && link["p90_coverage"].as_f64().unwrap() <= 1.0, "{link}");
    let shown = user.ok(&["links", "--measured"]);
    assert!(shown.lines().nth(1).unwrap().starts_with("repository  cloud"), "{shown}");
    agent.stop();
    // Without its cache, the rate is all that is left.
    fs::remove_dir_all(user.work().join("cache")).unwrap();
    let agent = Running::from_file(user, "agent.toml");
    while measured(&agent)["outcomes"] != 0 {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(50));
    }
    let again = measured(&agent);
    assert_eq!((&again["samples"], &again["median_error"]), (&link["samples"], &Value::Null), "{again}");
    let (before, after) = (link["rate"].as_f64().unwrap(), again["rate"].as_f64().unwrap());
    assert!((0.99..1.01).contains(&(after / before)), "{link} {again}");
    agent.stop();
}

#[test]
fn an_agent_that_ends_publishes_what_it_holds() {
    let lab = fixture();
    let text = fs::read_to_string(lab.user.work().join("agent.toml")).unwrap();
    lab.user.write("agent.toml", text.replace("inventory = '100ms'", "inventory = '30m'").as_bytes());
    let agent = Running::from_file(&lab.user, "agent.toml");
    told_json(&lab.user, &agent, &["warm", "open/step-1", "--wait"]);
    agent.stop();
    let found = candidate(&lab, "open/step-1", "cloud");
    assert_eq!(found["bytes"]["missing"], 0, "{found}");
}

/// Settings of the agent `name`: some of its `own`, the interval of its inventory, `more` sections, and addresses of its peers.
fn settings(name: &str, (own, more): (&str, &str), inventory: &str, peers: &str) -> String {
    format!(
        "repository = '../repo'\nsocket = '{name}.sock'\nmemory = '512M'\nidentity = '{name}'\n{own}\n\
         [cache]\ndir = 'cache-{name}'\ncapacity = '256M'\nfree_floor = '0'\ninventory = '{inventory}'\n\
         {more}\n[peers]\naddresses = [{peers}]\n{EVERYTHING}"
    )
}

#[test]
fn an_inventory_that_samples_contradict_is_not_believed() {
    let lab = fixture();
    let user = &lab.user;
    user.write("big/file", &noise(7, 12 << 20));
    user.ok(&["save", "big", "open/step-2"]);
    for (agent, folder) in [("cloud/c", "c"), ("home/a", "a")] {
        user.ok(&["identity", "issue", agent, "--to", folder]);
    }
    let listen = format!("listen = '{}'", free_address());
    let address = listen.trim_start_matches("listen = ").to_owned();
    user.write("c.toml", settings("c", (&listen, ""), "100ms", "").as_bytes());
    let cloud = Running::from_file(user, "c.toml");
    told_json(user, &cloud, &["warm", "open/step-2", "--wait"]);
    let advisor = settings("a", ("", "[advisor]\nsites = 'sites.toml'"), "100ms", &address);
    user.write("a.toml", advisor.as_bytes());
    let home = Running::from_file(user, "a.toml");
    let until = |wanted: &dyn Fn(&Value) -> bool| {
        let end = Instant::now() + PATIENCE;
        loop {
            let hint = home.post("/v1/hints?wait=1m", &asking("open/step-2"), 200);
            if wanted(&hint) {
                return hint;
            }
            assert!(Instant::now() < end, "{hint}");
            sleep(Duration::from_millis(100));
        }
    };
    let true_one = until(&|hint| bytes(hint, "present") > 0);
    assert_eq!(true_one["complete"], true, "{true_one}");

    // It loses its cache, and goes on to say that it has everything.
    cloud.stop();
    fs::remove_dir_all(user.work().join("cache-c")).unwrap();
    user.write("c.toml", settings("c", (&listen, ""), "0", "").as_bytes());
    let cloud = Running::from_file(user, "c.toml");
    let doubted = until(&|hint| hint["complete"] == false);
    let note = doubted["notes"][0].as_str().unwrap();
    assert!(note.contains("inventory of cloud/c is false") && note.contains("open/step-2"), "{note}");
    assert!(note.ends_with("its agent has 0"), "{note}");
    assert_eq!((bytes(&doubted, "present"), bytes(&doubted, "missing")), (0, bytes(&true_one, "present")));
    assert_eq!(doubted["candidates"][0]["eta_s"]["basis"], "unknown", "{doubted}");
    assert_ne!(doubted["hint_id"], true_one["hint_id"]);

    // Once it holds what it says, it is believed again.
    told_json(user, &cloud, &["warm", "open/step-2", "--wait"]);
    let again = until(&|hint| hint["complete"] == true);
    assert_eq!(bytes(&again, "present"), bytes(&true_one, "present"), "{again}");
    home.stop();
    cloud.stop();
}
