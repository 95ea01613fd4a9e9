//! Commitments: a hint is committed once, and that survives whatever happens to the agent.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::hints::{ADVISOR, asking, bytes, fixture};
use super::routing::two_sites;
use super::tokens::token;
use super::{PATIENCE, Running, told_json, with_tree};
use crate::data::noise;
use crate::policy::PolicyFixture;

/// An agent of the site `cloud` that gives hints.
fn cloud(lab: &PolicyFixture) -> Running {
    lab.user.write("agent.toml", ADVISOR);
    Running::from_file(&lab.user, "agent.toml")
}

/// The hint for a name at `cloud`, complete.
fn hint(agent: &Running, name: &str) -> Value {
    let hint = agent.post("/v1/hints?wait=1m", &asking(name), 200);
    assert_eq!(hint["complete"], true, "{hint}");
    hint
}

/// Path and body of the commit of `hint` at `cloud`.
fn commit(hint: &Value, lease: &str) -> (String, Value) {
    let path = format!("{}/commit", path(hint));
    (path, json!({ "site": "cloud", "inputs": hint["inputs"], "lease": lease }))
}

fn path(hint: &Value) -> String {
    format!("/v1/hints/{}", hint["hint_id"].as_str().unwrap())
}

/// Waits until everything of a committed hint is there.
fn ready(agent: &Running, hint: &Value) -> Value {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = agent.get(&path(hint));
        if now["ready"] == true {
            return now;
        }
        assert!(Instant::now() < end, "{now}");
        sleep(Duration::from_millis(20));
    }
}

fn pins(agent: &Running) -> Vec<Value> {
    agent.get("/v1/pins")["pins"].as_array().unwrap().clone()
}

/// P6: "What a hint says would move to a site is what moves there when it is committed, to the byte".
#[test]
fn a_committed_hint_moves_what_it_said_and_is_made_once() {
    let lab = fixture();
    let agent = cloud(&lab);
    told_json(&lab.user, &agent, &["warm", "open/step-1:one", "--wait"]);
    let end = Instant::now() + PATIENCE;
    let mut said = hint(&agent, "open/step-1");
    while bytes(&said, "present") == 0 {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(50));
        said = hint(&agent, "open/step-1");
    }
    let (to, body) = commit(&said, "2h");
    let committed = agent.post(&to, &body, 202);
    assert_eq!((&committed["hint_id"], &committed["inputs"]), (&said["hint_id"], &json!(["open/step-1"])));
    assert_eq!(committed["bytes"], bytes(&said, "present") + bytes(&said, "missing"));
    let task = agent.events(&json!({ "id": committed["task"] })).pop().unwrap().1;
    assert_eq!(task["report"]["inputs"][0]["fetched_bytes"], bytes(&said, "missing"), "{task}");
    let there = ready(&agent, &said);
    assert_eq!((&there["pin"], &there["missing_bytes"]), (&committed["pin"], &json!(0)));

    // A repetition changes only the end of the lease.
    let again = agent.post(&to, &commit(&said, "3h").1, 202);
    assert_eq!((&again["pin"], &again["task"], &again["ready"]), (&there["pin"], &there["task"], &json!(true)));
    assert!(again["expires"].as_str() > there["expires"].as_str(), "{again} {there}");
    assert_eq!(pins(&agent)[0]["reason"], format!("hint {}", said["hint_id"].as_str().unwrap()));
    lab.user.ok(&["save", "data/one", "open/step-2"]);
    let mut other = body.clone();
    other["inputs"] = json!(["open/step-2"]);
    assert_eq!(agent.ask("POST", &to, "", &other.to_string()).refuses(409), "conflict");

    // Renewed by its outcome, then ended by it.
    let outcome = format!("{}/outcome", path(&said));
    let renewed = agent.post(&outcome, &json!({ "lease": "5h" }), 200);
    assert!(renewed["expires"].as_str() > again["expires"].as_str(), "{renewed}");
    assert_eq!(agent.post(&outcome, &json!({}), 200)["expires"], renewed["expires"]);
    assert!(pins(&agent).is_empty());
    assert_eq!(agent.ask("GET", &path(&said), "", "").refuses(404), "not-found");
    agent.post(&outcome, &json!({}), 404);

    // A lease ends by itself.
    agent.post(&to, &commit(&said, "4s").1, 202);
    while agent.ask("GET", &path(&said), "", "").status != 404 {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(100));
    }
    assert!(pins(&agent).is_empty());
    // Nothing is left of those that ended, even if nobody looks at them.
    let commit_as = |id: char, lease: &str| {
        let id = format!("h_{}", id.to_string().repeat(32));
        agent.post(&format!("/v1/hints/{id}/commit"), &commit(&said, lease).1, 202);
    };
    ('a'..='e').for_each(|id| commit_as(id, "4s"));
    while !pins(&agent).is_empty() {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(100));
    }
    commit_as('f', "1h");
    let records = || fs::read_dir(lab.user.work().join("cache/commitments")).unwrap().count();
    assert_eq!((pins(&agent).len(), records()), (1, 1));
    agent.stop();
}

#[test]
fn gpus_that_did_not_idle_are_counted_once() {
    let lab = fixture();
    let agent = cloud(&lab);
    let said = hint(&agent, "open/step-1");
    let (to, mut body) = commit(&said, "2h");
    body["gpus"] = json!(1_000_001);
    agent.post(&to, &body, 400);
    body["gpus"] = json!(1_000_000);
    let begun = Instant::now();
    assert_eq!(agent.post(&to, &body, 202)["gpus"], 1_000_000);
    ready(&agent, &said);
    let record = fs::read_dir(lab.user.work().join("cache/commitments")).unwrap().next().unwrap().unwrap().path();
    while !fs::read_to_string(&record).unwrap().contains("ready_ns") {
        assert!(begun.elapsed() < PATIENCE);
        sleep(Duration::from_millis(10));
    }
    let at_most = begun.elapsed().as_millis() * 1000;
    agent.stop();

    // The fetch ended before the restart: its time stays. A start that is told twice counts once.
    let agent = cloud(&lab);
    let outcome = format!("{}/outcome", path(&said));
    for _ in 0..2 {
        assert_eq!(agent.post(&outcome, &json!({ "started": true }), 200)["ready"], true);
    }
    agent.post(&outcome, &json!({ "started": true, "lease": "3h" }), 200);
    agent.post(&outcome, &json!({}), 200);
    agent.post(&outcome, &json!({ "started": true }), 404);
    agent.stop();
    let usage = lab.user.json(&["usage", "--by", "run"], 0);
    let row = usage["rows"].as_array().unwrap().iter().find(|row| row["name"] == "open").unwrap();
    let counted = row["gpu_seconds"].as_u64().unwrap();
    assert!(counted > 0 && u128::from(counted) <= at_most, "{counted} of {at_most}: {usage}");
    assert_eq!(usage["total"]["gpu_seconds"], counted);
}

#[test]
fn a_commit_that_cannot_be_is_refused_as_a_whole() {
    let lab = fixture();
    // Two of them fit beside each other, but not three.
    for step in 2..=4 {
        lab.user.write("big/f", &noise(100 + step, 22 << 20));
        lab.user.ok(&["save", "big", &format!("open/step-{step}")]);
    }
    let agent = cloud(&lab);
    let (one, other) = (hint(&agent, "open/step-2"), hint(&agent, "open/step-3"));
    agent.post(&commit(&one, "2h").0, &commit(&one, "2h").1, 202);
    // Both ask for the last room at once.
    let last = hint(&agent, "open/step-4");
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = [&other, &last]
            .map(|said| {
                let (agent, (to, body)) = (&agent, commit(said, "2h"));
                scope.spawn(move || agent.ask("POST", &to, "", &body.to_string()))
            })
            .into_iter()
            .collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let mut statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [202, 507]);
    let refused = answers.into_iter().find(|answer| answer.status == 507).unwrap().json(507);
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("do not fit beside what is pinned") && message.ends_with("more bytes"), "{message}");
    assert_eq!(pins(&agent).len(), 2);
    assert_eq!(fs::read_dir(lab.user.work().join("cache/commitments")).unwrap().count(), 2);

    let (to, mut body) = commit(&one, "2h");
    body["site"] = json!("moon");
    let elsewhere = agent.post(&to, &body, 409);
    assert!(elsewhere["error"]["help"].as_str().unwrap().contains("Towline-At: moon"), "{elsewhere}");
    body["site"] = json!("cloud");
    body["inputs"] = json!([]);
    agent.post(&to, &body, 400);
    body["inputs"] = json!(["open/step-9"]);
    agent.post(&to, &body, 404);
    agent.post("/v1/hints/h_0/commit", &commit(&one, "2h").1, 400);
    // The policy is checked again: raw data stays at home.
    body["inputs"] = json!(["open/step-1", "raw/x"]);
    let raw = agent.ask("POST", &format!("/v1/hints/h_{}/commit", "0".repeat(32)), "", &body.to_string());
    assert_eq!(raw.refuses(403), "denied");
    assert_eq!(pins(&agent).len(), 2);
    agent.stop();
}

#[test]
fn a_commitment_survives_its_agent_and_is_fetched_to_its_end() {
    let lab = fixture();
    let agent = cloud(&lab);
    let said = hint(&agent, "open/step-1");
    let (to, body) = commit(&said, "2h");
    // The store is away: it is committed all the same, as the tree is known, and fetched later.
    let packs = lab.user.repository().join("pack");
    let aside = lab.user.work().join("packs");
    fs::rename(&packs, &aside).unwrap();
    let committed = agent.post(&to, &body, 202);
    assert_eq!(committed["ready"], false);
    agent.signal(Signal::KILL);
    agent.ended();
    // Half a commit: a record without a pin was never confirmed.
    let folder = lab.user.work().join("cache/commitments");
    let record = fs::read_dir(&folder).unwrap().next().unwrap().unwrap();
    let other = fs::read_to_string(record.path()).unwrap().replace("h_", "h_0");
    fs::write(folder.join("h_half-0123456789abcdef.json"), other).unwrap();
    fs::write(folder.join("h_torn-0123456789abcdef.json"), "{").unwrap();
    fs::write(folder.join("config.json"), "of somebody else").unwrap();
    fs::rename(&aside, &packs).unwrap();

    let agent = Running::from_file(&lab.user, "agent.toml");
    let there = ready(&agent, &said);
    assert_eq!((&there["pin"], &there["expires"]), (&committed["pin"], &committed["expires"]));
    assert_ne!(there["task"], committed["task"]);
    assert!(folder.join("config.json").exists());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    // More than an agent has tasks at a time are no reason not to start.
    for at in 0..70 {
        agent.post(&format!("/v1/hints/h_{at:032}/commit"), &body, 202);
    }
    agent.signal(Signal::KILL);
    agent.ended();
    let agent = Running::from_file(&lab.user, "agent.toml");
    assert_eq!(pins(&agent).len(), 71);
    assert_eq!(agent.get(&format!("/v1/hints/h_{:032}", 69))["ready"], true);
    agent.stop();
}

/// Commitments are "seen by who made them"; names that a token may not read are absent for it.
#[test]
fn a_token_commits_for_itself() {
    let mut lab = fixture();
    let agent = cloud(&lab);
    let said = hint(&agent, "open/step-1");
    let (to, body) = commit(&said, "1h");
    let scopes = ["warm", "pins", "read=open/**"];
    let (one, other) = (token(&lab.user, &agent, &scopes, &[]), token(&lab.user, &agent, &scopes, &[]));
    assert_eq!(one.ask("POST", &to, &body.to_string()).status, 202);
    assert_eq!(one.ask("GET", &path(&said), "").json(200)["hint_id"], said["hint_id"]);
    assert_eq!(other.ask("GET", &path(&said), "").status, 404);
    assert_eq!(other.ask("POST", &format!("{}/outcome", path(&said)), "{}").status, 404);
    // The same hint for another caller is another commitment.
    assert_eq!(other.ask("POST", &to, &body.to_string()).status, 202);
    assert_eq!(pins(&agent).len(), 2);
    let asked = |name: &str| {
        let body = json!({ "site": "cloud", "inputs": [name] }).to_string();
        let answer = one.ask("POST", &to, &body);
        (answer.status, String::from_utf8(answer.body).unwrap().replace(name, "NAME"))
    };
    assert_eq!(asked("raw/x").0, 404);
    assert_eq!(asked("raw/x"), asked("raw/z"));
    let reads = token(&lab.user, &agent, &["read=open/**", "warm"], &[]);
    assert_eq!(reads.ask("POST", &to, &body.to_string()).status, 403);
    // It goes on only while the policy lets the data be here.
    let outcome = format!("{}/outcome", path(&said));
    assert_eq!(one.ask("POST", &outcome, r#"{"lease":"2h"}"#).status, 200);
    lab.rules = format!("[[rule]]\nverdict = 'deny'\nnames = 'open/**'\nwhy = 'not any more'\n\n{}", lab.rules);
    lab.set(&["--lock-out"]);
    let refused = one.ask("POST", &outcome, r#"{"lease":"3h"}"#).json(403);
    assert!(refused["error"]["message"].as_str().unwrap().contains("policy denies"), "{refused}");
    assert_eq!(one.ask("POST", &outcome, "{}").status, 200, "it may end all the same");
    // A lease beyond what a token's pins may have.
    let long = commit(&said, "1000d").1.to_string();
    assert_eq!(one.ask("POST", &to, &long).status, 403);
    agent.stop();
}

/// Each input is an entry of the audit log, which a token must not fill.
#[test]
fn many_inputs_count_as_many_requests() {
    let lab = fixture();
    let names: Vec<String> = (0..40).map(|at| format!("open/many/{at}")).collect();
    names.iter().for_each(|name| drop(lab.user.ok(&["cp", "open/step-1", name])));
    let settings = [ADVISOR, b"[audit]\ndir = 'audit'\n"].concat();
    lab.user.write("agent.toml", &settings);
    let agent = Running::from_file(&lab.user, "agent.toml");
    let holder = token(&lab.user, &agent, &["warm", "pins", "read=open/**"], &[]);
    let body = json!({ "site": "cloud", "inputs": names }).to_string();
    let path = format!("/v1/hints/h_{}/commit", "0".repeat(32));
    let statuses: Vec<u16> = (0..16).map(|_| holder.ask("POST", &path, &body).status).collect();
    // A minute may begin meanwhile.
    let granted = statuses.iter().filter(|status| **status == 202).count();
    assert!((7..=14).contains(&granted) && statuses.contains(&429), "{statuses:?}");
    agent.stop();
    // Each decision has its end, of renewals, too.
    let shown = lab.user.ok(&["audit", "show", "--dir", "audit", "--json"]);
    let entries: Vec<Value> = shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let decisions = entries.iter().filter(|entry| ["warm", "pin"].iter().any(|action| entry["action"] == *action));
    let ends: Vec<_> = entries.iter().filter(|entry| entry["kind"] == "end").collect();
    assert_eq!((decisions.count(), ends.len()), (granted * 80, granted * 80), "{:?}", ends.last());
}

#[test]
fn the_command_commits_at_another_site() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "'home/a'", ("", ""));
    let place = user.repository().canonicalize().unwrap();
    let sites = format!(
        "[[site]]\nname = 'home'\nrepositories = '{}'\n\n[[site]]\nname = 'cloud'\n\n\
         [[link]]\nfrom = 'home'\nto = 'cloud'\nrate = '1Gbit'\nprice = {{ unit = 'GB', usd = '0.09' }}\n",
        place.display()
    );
    user.write("sites.toml", sites.as_bytes());
    let hint = |more: &[&str]| told_json(&user, &home, &[&["hint", "run/step-1"], more].concat());
    let told = hint(&["--at", "cloud", "--gpus", "1000000", "--commit", "--lease", "2h", "--wait"]);
    let committed = &told["commitment"];
    assert_eq!((&committed["site"], &committed["ready"]), (&json!("cloud"), &json!(true)), "{told}");
    assert_eq!(committed["bytes"], bytes(&told, "missing"));
    let pinned = pins(&cloud);
    assert_eq!(pinned[0]["id"], committed["pin"]);
    assert!(pinned[0]["owner"].as_str().unwrap().starts_with("home/a/"), "{pinned:?}");
    let mut elsewhere = user.command(&["hint", "run/step-1", "--at", "cloud", "--commit=home"]);
    let refused = elsewhere.env("TOWLINE_AGENT", &home.socket).output().unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.starts_with("error: site is not among those that are compared at home"), "{error}");
    home.stop();
    cloud.stop();
    // The GPUs that the command was told of were not used while it waited.
    let usage = user.json(&["usage", "--by", "run"], 0);
    let row = usage["rows"].as_array().unwrap().iter().find(|row| row["name"] == "run").unwrap();
    assert!(row["gpu_seconds"].as_u64() > Some(0), "{usage}");
}
