//! Usage: what agents report of a month, and what hints make of it.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::hints::{ADVISOR, asking, fixture};
use super::routing::two_sites;
use super::{PATIENCE, Running, told_json};
use crate::cli::User;
use crate::data::noise;
use crate::policy::PolicyFixture;

/// The rows of `towline usage` with `more` arguments, and the total.
fn usage(user: &User, more: &[&str]) -> (Vec<Value>, Value) {
    let told = user.json(&[&["usage"], more].concat(), 0);
    (told["rows"].as_array().unwrap().clone(), told["total"].clone())
}

fn bytes_of(rows: &[Value], key: &str, wanted: &str) -> u64 {
    let matching = rows.iter().filter(|row| row[key] == wanted);
    matching.map(|row| row["bytes"].as_u64().unwrap()).sum()
}

/// Objects that agents wrote this month.
fn reports(lab: &PolicyFixture) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![lab.user.repository().join("usage")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found
}

fn counter(agent: &Running, name: &str) -> u64 {
    let text = String::from_utf8(agent.ask("GET", "/metrics", "", "").body).unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

#[test]
fn a_month_adds_up_over_restarts_and_has_a_price() {
    let lab = fixture();
    let user = &lab.user;
    let none = user.json(&["usage"], 0);
    assert_eq!((&none["rows"], &none["total"]["bytes"]), (&json!([]), &json!(0)));
    let mut fetched = 0;
    let mut carried = 0;
    for part in ["one", "two"] {
        let agent = Running::from_file(user, "agent.toml");
        let told = told_json(user, &agent, &["warm", &format!("open/step-1:{part}"), "--wait"]);
        fetched += told["tasks"][0]["report"]["fetched_bytes"].as_u64().unwrap();
        carried += counter(&agent, "towline_store_get_bytes_total");
        agent.stop();
    }
    let found = reports(&lab);
    assert_eq!(found.len(), 2, "one for each start");

    let (rows, total) = usage(user, &["--by", "link"]);
    let (received, sent) = (bytes_of(&rows, "to", "cloud"), bytes_of(&rows, "from", "cloud"));
    assert_eq!(total["bytes"], received + sent);
    // The agents read some more of the log before they ended.
    assert!((carried..carried + 100_000).contains(&received), "{carried} {rows:?}");
    let (rows, _) = usage(user, &["--by", "run"]);
    // Reads have some bytes between the chunks.
    let read = bytes_of(&rows, "name", "open");
    assert!((fetched..fetched + fetched / 20).contains(&read), "{fetched} {rows:?}");
    let (rows, _) = usage(user, &["--by", "site"]);
    assert_eq!(bytes_of(&rows, "name", "cloud"), received);

    // 0.09 dollars for 10^9 bytes from home.
    let (rows, _) = usage(user, &["--by", "link"]);
    let down = rows.iter().find(|row| row["to"] == "cloud").unwrap();
    assert_eq!(down["usd_micro"], (received * 90_000 + 500_000_000) / 1_000_000_000);
    assert_eq!(down["from"], "repository");
    user.write("other.toml", b"[[site]]\nname = 'cloud'\n");
    let noted = user.json(&["usage", "--sites", "other.toml"], 0);
    assert_eq!(noted["total"]["usd_micro"], Value::Null);
    assert!(noted["notes"][0].as_str().unwrap().contains("no site of the sites file has the repository"), "{noted}");

    // Labels say whose a run is when it is reported.
    user.ok(&["label", "open", "tenant=team-a"]);
    user.write("agent.toml", ADVISOR);
    Running::from_file(user, "agent.toml").stop();
    let agent = Running::from_file(user, "agent.toml");
    told_json(user, &agent, &["warm", "open/step-1", "--wait"]);
    agent.stop();
    let (rows, _) = usage(user, &["--by", "tenant"]);
    assert_eq!(bytes_of(&rows, "name", "team-a"), bytes_of(&usage(user, &["--by", "run"]).0, "name", "open"));

    let text = user.ok(&["usage", "--by", "tenant", "--format", "csv"]);
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("month,tenant,bytes,requests,usd,gpu_seconds"));
    assert!(lines.any(|line| line.split(',').nth(1) == Some("team-a")), "{text}");
    assert!(user.ok(&["usage"]).starts_with("FROM"), "a table");
    assert!(user.ok(&["usage", "--format", "json"]).starts_with("{\"month\":"));
    let earlier = user.json(&["usage", "--month", "2025-01"], 0);
    assert_eq!((&earlier["month"], &earlier["rows"]), (&json!("2025-01"), &json!([])));
    user.fails(&["usage", "--month", "2025-13"], 2);

    // One that its agent did not sign for this month does not count.
    let signed = fs::read(&found[0]).unwrap();
    let forged = found[0].with_file_name(format!("{:020}", 7));
    fs::create_dir_all(forged.parent().unwrap().with_file_name("n2")).unwrap();
    fs::write(forged.parent().unwrap().with_file_name("n2").join(forged.file_name().unwrap()), signed).unwrap();
    // Nor does a copy of one.
    let signed = fs::read(&found[0]).unwrap();
    fs::write(&forged, signed).unwrap();
    let told = user.json(&["usage"], 0);
    let notes: Vec<&str> = told["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
    assert!(notes[0].contains("cloud/n1") && notes[0].contains("another repository, month or process"), "{told}");
    assert!(notes[1].contains("cloud/n2"), "{told}");
    assert_eq!(told["total"]["bytes"], usage(user, &[]).1["bytes"]);
}

#[test]
fn a_hint_counts_what_the_month_had_before() {
    let lab = fixture();
    let user = &lab.user;
    let sites = fs::read_to_string(user.work().join("sites.toml")).unwrap();
    let tiers = "tiers = [{ up_to = 1, usd = '0' }, { usd = '0.05' }]";
    user.write("sites.toml", sites.replace("usd = '0.09'", tiers).as_bytes());
    user.write("agent.toml", ADVISOR);
    let before = user.json(&["hint", "open/step-1", "--at", "cloud"], 0);
    let source = &before["candidates"][0]["sources"][0];
    assert_eq!((&source["month_bytes"], &source["egress_micro_usd"]), (&json!(0), &json!(0)));

    user.write("big/file", &noise(77, 30_000_000));
    user.ok(&["save", "big", "big"]);
    let agent = Running::from_file(user, "agent.toml");
    told_json(user, &agent, &["warm", "big", "--wait"]);
    agent.stop();
    let agent = Running::from_file(user, "agent.toml");
    let hint = agent.post("/v1/hints?wait=1m", &asking("open/step-1"), 200);
    agent.stop();
    let (rows, _) = usage(user, &["--by", "link"]);
    let source = &hint["candidates"][0]["sources"][0];
    let so_far = source["month_bytes"].as_u64().unwrap();
    assert!(so_far > 30_000_000 && so_far <= bytes_of(&rows, "to", "cloud"), "{source} {rows:?}");
    // Another month so far is another hint.
    assert_ne!(hint["hint_id"], before["hint_id"]);
}

#[test]
fn both_sides_of_a_link_are_counted_once() {
    let user = User::with_repository();
    user.write("tree/file", &noise(1, 3_000_000));
    let (home, cloud) = two_sites(&user, "'home/a'", ("", ""));
    told_json(&user, &cloud, &["warm", "run/step-1", "--wait"]);
    told_json(&user, &home, &["warm", "run/step-1", "--from", "cloud", "--wait"]);
    let sent = || {
        let ledger = cloud.get("/v1/ledger");
        ledger["links"].as_array().unwrap().iter().map(|link| link["sent"].as_u64().unwrap()).sum::<u64>()
    };
    // Connections over QUIC are counted once a second.
    let end = Instant::now() + PATIENCE;
    while sent() < 3_000_000 {
        assert!(Instant::now() < end);
        sleep(Duration::from_millis(50));
    }
    let sent = sent();
    home.stop();
    cloud.stop();
    let (rows, _) = usage(&user, &[]);
    let down = rows.iter().find(|row| row["from"] == "cloud" && row["to"] == "home").unwrap();
    let moved = down["bytes"].as_u64().unwrap();
    // The connections were closed after the ledger was read.
    assert!((sent..sent + 50_000).contains(&moved), "{sent} {down}");
}

#[test]
fn a_save_that_is_counted_while_it_goes_on_is_counted_once() {
    let lab = fixture();
    let user = &lab.user;
    let settings =
        String::from_utf8(ADVISOR.to_vec()).unwrap().replace("inventory = '100ms'", "inventory = '0'\nusage = '20ms'");
    user.write("agent.toml", settings.as_bytes());
    let agent = Running::from_file(user, "agent.toml");
    user.write("big/file", &noise(5, 60_000_000));
    let path = user.work().join("big");
    let saved = agent.post("/v1/save", &json!({ "path": path, "name": "open/step-5" }), 202);
    agent.events(&json!({ "id": saved["id"] }));
    let written = counter(&agent, "towline_store_put_bytes_total");
    agent.stop();
    let (rows, _) = usage(user, &["--by", "link"]);
    let sent = bytes_of(&rows, "from", "cloud");
    // The reports themselves are written, too.
    assert!((written..written + 200_000).contains(&sent), "{written} {rows:?}");
    let (rows, _) = usage(user, &["--by", "run"]);
    assert!(bytes_of(&rows, "name", "open") >= 60_000_000, "{rows:?}");
}
