//! The API over the socket and on loopback: work, files by ranges, figures, and what it refuses.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use towline::metrics::{FAMILIES, Metric};

use super::sidecar::until;
use super::{Running, exchange, told, told_json, with_tree};
use crate::cli::{User, has_members};
use crate::data::{noise, safetensors};

#[test]
fn what_goes_in_comes_out_in_whole_and_in_part() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    let save = json!({
        "path": user.work().join("tree"), "name": "run/step-1", "metrics": { "loss": 0.5 }, "labels": { "a": "b" },
        "world_size": 8, "framework": "pytorch", "exclude": ["*.tmp"], "compression": "auto", "cut": "auto",
    });
    let saved = agent.done("/v1/save", &save);
    has_members(&saved, "id kind name repository state started seconds progress report");
    assert_eq!((&saved["kind"], &saved["report"]["files"]), (&json!("save"), &json!(2)));
    assert_eq!(user.json(&["show", "run/step-1"], 0)["metrics"]["loss"], 0.5);

    let to = user.work().join("out");
    let restored = agent.done("/v1/restore", &json!({ "name": "run@latest", "to": to }));
    assert_eq!(restored["report"]["name"], "run/step-1");
    assert_eq!(user.read("out/sub/b.bin"), noise(1, 20 << 20));
    let one = json!({ "name": "run/step-1", "path": "a.txt", "to": user.work().join("one.txt") });
    agent.done("/v1/restore", &one);
    assert_eq!(user.read("one.txt"), b"hello, world");
    user.write("one.txt", b"in the way");
    let begun = agent.post("/v1/restore", &one, 202);
    let (_, failed) = agent.events(&begun).pop().unwrap();
    assert_eq!((&failed["state"], &failed["error"]["kind"]), (&json!("failed"), &json!("conflict")));

    let listed = agent.get("/v1/tasks");
    let states: Vec<_> = listed["tasks"].as_array().unwrap().iter().map(|one| one["state"].clone()).collect();
    assert_eq!(states, ["done", "done", "done", "failed"]);
    let same = agent.get(&format!("/v1/tasks/{}", saved["id"].as_str().unwrap()));
    assert_eq!(same["report"], saved["report"]);
    agent.stop();
}

/// F12: "Once a restore has ended, with success, an error or a stop, it changes nothing in DEST any more".
#[test]
fn a_restore_whose_stop_was_answered_writes_no_more_files() {
    const FILES: usize = 6000;
    let user = User::with_repository();
    for file in 0..FILES {
        user.write(&format!("small/{file:05}"), &noise(file as u64, 64));
    }
    user.ok(&["save", "small", "small"]);
    let agent = Running::start(&user, "");
    let count = |to: &Path| {
        let names = fs::read_dir(to).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        names.filter(|name| !name.to_str().unwrap().starts_with('.')).count()
    };
    let stopped = (0..50).any(|attempt| {
        let (to, other) = (user.work().join(format!("out-{attempt}")), user.work().join(format!("other-{attempt}")));
        let begun = agent.post("/v1/restore", &json!({ "name": "small", "to": to }), 202);
        until("a file is there", || count(&to) > 0);
        let task = agent.ask("DELETE", &format!("/v1/tasks/{}", begun["id"].as_str().unwrap()), "", "").json(200);
        let there = count(&to);
        // Takes as long as the first would have taken.
        agent.done("/v1/restore", &json!({ "name": "small", "to": other }));
        assert_eq!(count(&to), there, "{task}");
        task["state"] == "cancelled" && there < FILES
    });
    assert!(stopped, "each restore was over before it was stopped");
    agent.stop();
}

#[test]
fn files_are_read_by_ranges() {
    let user = with_tree();
    let whole = noise(1, 20 << 20);
    user.write("tree/hole", b"");
    fs::OpenOptions::new().write(true).open(user.work().join("tree/hole")).unwrap().set_len(9 << 20).unwrap();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    let path = "/v1/files/run%2Fstep-1/sub/b.bin";
    let all = agent.ask("GET", path, "", "");
    assert_eq!((all.status, all.headers["content-length"].as_str()), (200, "20971520"));
    assert!(all.body == whole && all.headers["accept-ranges"] == "bytes");
    for (range, part, told) in [
        ("0-0", &whole[..1], "bytes 0-0/20971520"),
        ("100-20000000", &whole[100..=20_000_000], "bytes 100-20000000/20971520"),
        ("20971519-", &whole[20_971_519..], "bytes 20971519-20971519/20971520"),
        ("-5", &whole[20_971_515..], "bytes 20971515-20971519/20971520"),
    ] {
        let answer = agent.ask("GET", path, &format!("Range: bytes={range}\r\n"), "");
        assert_eq!((answer.status, answer.headers["content-range"].as_str()), (206, told));
        assert!(answer.body == part, "{range}");
    }
    let outside = agent.ask("GET", path, "Range: bytes=20971520-\r\n", "");
    assert_eq!((outside.status, outside.headers["content-range"].as_str()), (416, "bytes */20971520"));
    let head = agent.ask("HEAD", path, "", "");
    assert_eq!((head.status, head.headers["content-length"].as_str(), head.body.len()), (200, "20971520", 0));

    let tag = &all.headers["etag"];
    let unchanged = agent.ask("GET", path, &format!("If-None-Match: {tag}\r\n"), "");
    assert_eq!((unchanged.status, unchanged.body.len()), (304, 0));
    let stale = agent.ask("GET", path, "Range: bytes=0-0\r\nIf-Range: \"other\"\r\n", "");
    assert_eq!((stale.status, stale.body.len()), (200, whole.len()));
    let fresh = agent.ask("GET", path, &format!("Range: bytes=0-0\r\nIf-Range: {tag}\r\n"), "");
    assert_eq!(fresh.status, 206);

    let hole = agent.ask("GET", "/v1/files/run@latest/hole", "", "");
    assert!(hole.status == 200 && hole.body == vec![0; 9 << 20]);
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/none", "", "").refuses(404), "not-found");
    assert_eq!(agent.ask("GET", "/v1/files/other/a.txt", "", "").refuses(404), "not-found");
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/a.txt?repository=/other", "", "").refuses(404), "not-found");
    assert_eq!(agent.ask("GET", "/v1/files/run@latest/a.txt?repo=/other", "", "").refuses(400), "usage");

    // What a name stands for now is what is read.
    user.write("tree/sub/b.bin", b"shorter");
    user.ok(&["save", "tree", "run/step-1"]);
    let moved = agent.ask("GET", path, "", "");
    assert!(moved.body == b"shorter" && moved.headers["etag"] != *tag);
    agent.stop();
}

#[test]
fn figures_and_commands_tell_the_same() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    agent.done("/v1/save", &json!({ "path": user.work().join("tree"), "name": "run/step-1" }));
    let checked = agent.done("/v1/cache/check", &Value::Null);
    assert_eq!(checked["report"], json!({ "chunks": 0, "bytes": 0, "damaged": [] }));
    assert!(told(&user, &agent, &["cache", "check"]).contains("all good"));
    assert_eq!(told_json(&user, &agent, &["cache", "evict", "1G"]), json!({ "freed_bytes": 0 }));

    let answer = agent.ask("GET", "/metrics", "", "");
    assert_eq!(answer.headers["content-type"], "application/openmetrics-text; version=1.0.0; charset=utf-8");
    let figures = parsed(&String::from_utf8(answer.body).unwrap());
    assert_eq!(figures["towline_tasks_total{kind=\"save\",result=\"done\"}"], 1);
    assert_eq!(figures["towline_tasks_total{kind=\"check\",result=\"done\"}"], 2);
    let moved = figures["towline_task_bytes_total{kind=\"save\"}"];
    assert!(moved > 20 << 20);
    assert_eq!(figures["towline_task_size_bytes_sum{kind=\"save\"}"], moved);
    assert_eq!(figures["towline_task_seconds_count{kind=\"check\",result=\"done\"}"], 2);
    assert_eq!(figures["towline_task_seconds_bucket{le=\"+Inf\",kind=\"check\",result=\"done\"}"], 2);
    assert_eq!(figures["towline_cache_capacity_bytes"], 256 << 20);
    assert_eq!(figures["towline_ready"], 1);
    assert!(figures["process_resident_memory_bytes"] > 1 << 20);
    let repository = user.repository().canonicalize().unwrap().display().to_string();
    assert!(figures[&format!("towline_store_put_requests_total{{repository=\"{repository}\"}}")] > 0);

    let top = told_json(&user, &agent, &["top"]);
    has_members(&top, "health tasks cache pins peers hints sites");
    assert_eq!(top["tasks"].as_array().unwrap().len(), 3);
    assert_eq!(top["health"]["repositories"][0]["location"], repository);
    let text = told(&user, &agent, &["top", "--once"]);
    assert!(text.contains("run/step-1") && text.contains("ready") && text.contains("Cache:"), "{text}");
    agent.stop();
}

/// Reads what Prometheus would; each family must be known and described once, before its samples.
fn parsed(text: &str) -> BTreeMap<String, u64> {
    let (mut found, mut described) = (BTreeMap::new(), BTreeMap::new());
    let text = text.strip_suffix("# EOF\n").expect("all of it");
    let endings = [
        ("", "gauge"),
        ("_total", "counter"),
        ("_bucket", "histogram"),
        ("_sum", "histogram"),
        ("_count", "histogram"),
    ];
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(endings.iter().any(|(_, known)| *known == kind), "{line}");
            assert!(described.insert(name.to_owned(), kind).is_none(), "{name} twice");
        } else if !line.starts_with("# HELP ") {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            let name = sample.split('{').next().unwrap();
            let is_described = |(ending, kind): &(&str, &str)| {
                name.strip_suffix(ending).is_some_and(|family| described.get(family) == Some(kind))
            };
            assert!(endings.iter().any(is_described), "{line}");
            // A sum is a float: its whole part.
            let value = value.split('.').next().unwrap().parse().unwrap();
            assert!(found.insert(sample.to_owned(), value).is_none(), "{sample} twice");
        }
    }
    let known = FAMILIES.iter().map(|family| family.name).chain(Metric::ALL.map(Metric::name));
    // OpenMetrics has the ending of a counter on its samples alone.
    let known: Vec<&str> = known.map(|name| name.trim_end_matches("_total")).collect();
    for name in described.keys() {
        assert!(known.contains(&name.as_str()), "{name} is not in the list of names");
    }
    found
}

/// S7 of docs/security.md.
#[test]
fn silent_connections_do_not_keep_out_who_asks() {
    let user = with_tree();
    let agent = Running::start(&user, "http = '127.0.0.1:0'");
    let address = agent.http.clone().unwrap();
    let connect = || {
        let stream = TcpStream::connect(&address).unwrap();
        // Less than a silent connection may last.
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    };
    let mut silent: Vec<TcpStream> = (0..1000).map(|_| connect()).collect();
    for _ in 0..3 {
        let health = exchange(connect(), "GET", "/health", "", "").json(200);
        assert_eq!(health["alive"], true);
    }
    assert_eq!(silent[0].read(&mut [0; 8]).unwrap(), 0, "the first gave way");
    // Half a head is as silent, and those that were answered and stay are, too.
    for n in 0..400 {
        let end = ["", "\r\n"][n % 2];
        silent[n] = connect();
        write!(silent[n], "GET /health HTTP/1.1\r\nHost: localhost\r\n{end}").unwrap();
    }
    assert_eq!(exchange(connect(), "GET", "/health", "", "").json(200)["alive"], true);
    drop(silent);

    let mut half = connect();
    let _ = write!(half, "GET /health HTTP/1.1\r\nHost: localhost\r\nLong: {}", "a".repeat(100 << 10));
    let mut answer = Vec::new();
    let _ = half.read_to_end(&mut answer);
    assert!(answer.starts_with(b"HTTP/1.1 431 "), "{}", String::from_utf8_lossy(&answer));
    agent.stop();
}

#[test]
fn loopback_wants_the_token_and_goes_with_the_agent() {
    let user = with_tree();
    let agent = Running::start(&user, "http = '127.0.0.1:0'");
    let address = agent.http.clone().unwrap();
    let ask = |method, path, headers: &str| exchange(TcpStream::connect(&address).unwrap(), method, path, headers, "");
    let token_file = agent.socket.with_extension("token");
    assert_eq!(fs::metadata(&token_file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(&agent.socket).unwrap().permissions().mode() & 0o777, 0o600);
    let token = fs::read_to_string(&token_file).unwrap();
    let token = format!("Authorization: Bearer {}\r\n", token.trim());
    for open in ["/health", "/ready", "/openapi.json"] {
        assert_eq!(ask("GET", open, "").status, 200, "{open}");
        assert_eq!(ask("GET", open, "Host: evil.example\r\n").refuses(403), "denied");
    }
    for vital in ["/health", "/ready"] {
        assert_eq!(ask("GET", vital, "").json(200), json!({ "alive": true, "ready": true }));
        let all = ask("GET", vital, &token).json(200);
        assert_eq!(all["repositories"][0]["location"], user.repository().canonicalize().unwrap().to_str().unwrap());
    }
    // Another agent would be asked in this agent's name.
    for at in ["cloud/k", "mars", "home"] {
        let header = format!("Towline-At: {at}\r\n");
        assert_eq!(ask("GET", "/health", &header).refuses(401), "denied", "{at}");
    }
    let long = format!("{{\"name\": \"run/step-1\", \"path\": \"{}\"}}", "p".repeat(60_000));
    let refused = exchange(TcpStream::connect(&address).unwrap(), "POST", "/v1/warm", &token, &long);
    assert!(refused.status == 400 && refused.body.len() < 4096, "{}", refused.status);
    assert_eq!(ask("GET", "/metrics", &token).status, 200);
    for path in ["/metrics", "/v1/pins", "/v1/tasks", "/v1/files/a/b", "/v1/none"] {
        let refused = ask("GET", path, "");
        assert_eq!((refused.refuses(401).as_str(), refused.headers["www-authenticate"].as_str()), ("denied", "Bearer"));
        let help = refused.json(401)["error"]["help"].as_str().unwrap().to_owned();
        assert!(help.contains(token_file.to_str().unwrap()), "{help}");
        assert_eq!(ask("GET", path, "Authorization: Bearer wrong\r\n").refuses(401), "denied");
    }
    assert_eq!(ask("GET", "/v1/pins", &token).json(200), json!({ "pins": [] }));
    assert_eq!(ask("GET", "/v1/pins", &format!("{token}Host: evil.example\r\n")).refuses(403), "denied");
    let socket = agent.socket.clone();
    agent.stop();
    assert!(!socket.exists() && !token_file.exists() && TcpStream::connect(&address).is_err());

    let open = Running::start(&user, "http = '127.0.0.1:0'\nopen_metrics = true");
    let address = open.http.clone().unwrap();
    let ask = |path| exchange(TcpStream::connect(&address).unwrap(), "GET", path, "", "");
    assert_eq!((ask("/metrics").status, ask("/v1/pins").status), (200, 401));
    open.stop();
}

#[test]
fn what_makes_no_sense_is_refused() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    let refused = |method, path, body: &str| agent.ask(method, path, "", body);
    assert_eq!(refused("GET", "/v1/none", "").refuses(404), "not-found");
    assert_eq!(refused("DELETE", "/v1/save", "").refuses(405), "usage");
    assert_eq!(refused("GET", "/v1/tasks/none", "").refuses(404), "not-found");
    for body in [
        "",
        "{",
        "{}",
        "{\"name\":\"a\",\"path\":\"/a\",\"colour\":1}",
        "{\"name\":\"a\",\"path\":\"relative\"}",
        "{\"name\":\"a//b\",\"path\":\"/a\"}",
        "{\"name\":\"a\",\"path\":\"/a\",\"cut\":\"none\"}",
        "{\"name\":\"a\",\"path\":\"/a\",\"metrics\":{\"\":1}}",
    ] {
        assert_eq!(refused("POST", "/v1/save", body).refuses(400), "usage", "{body}");
    }
    let elsewhere = "{\"name\":\"a\",\"path\":\"/a\",\"repository\":\"/elsewhere\"}";
    assert_eq!(refused("POST", "/v1/save", elsewhere).refuses(404), "not-found");
    let long = format!("{{\"name\":\"{}\",\"path\":\"/a\"}}", "a".repeat(2 << 20));
    assert_eq!(refused("POST", "/v1/save", &long).refuses(413), "usage");
    assert_eq!(refused("POST", "/v1/cache/evict", "{\"bytes\":\"much\"}").refuses(400), "usage");
    // A client that sends rubbish, or nothing, costs nobody else anything.
    UnixStream::connect(&agent.socket).unwrap().write_all(b"\x16\x03\x01rubbish\r\n\r\n").unwrap();
    let _idle = UnixStream::connect(&agent.socket).unwrap();
    assert_eq!(agent.get("/health")["ready"], true);
    agent.stop();
}

#[test]
fn the_manual_names_every_figure_and_path() {
    let manual = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md")).unwrap();
    for name in FAMILIES.iter().map(|family| family.name).chain(Metric::ALL.map(Metric::name)) {
        assert!(manual.contains(&format!("`{name}`")), "{name} is not in docs/operations.md");
    }
    let user = with_tree();
    let agent = Running::start(&user, "");
    for path in agent.get("/openapi.json")["paths"].as_object().unwrap().keys() {
        assert!(manual.contains(path.split('{').next().unwrap()), "{path} is not in docs/operations.md");
    }
    agent.stop();
}

/// A copy that stands alone is another map of the same tree, whose name may come first.
#[test]
fn a_copy_that_stands_alone_does_not_keep_the_agent_from_giving_bases() {
    let user = User::with_repository();
    let smooth = |shift: f32| -> Vec<u8> {
        let mut file = safetensors(1, &[("w", 1 << 19)]);
        let data = file.len() - (4 << 19);
        for (at, number) in file[data..].chunks_exact_mut(4).enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "any values")]
            let value = (at as f32 / 1e5).sin() + shift;
            number.copy_from_slice(&value.to_le_bytes());
        }
        file
    };
    for (step, shift) in [(1, 0.0), (2, 1e-6)] {
        user.write("ckpt/model.safetensors", &smooth(shift));
        user.ok(&["save", "ckpt", &format!("run/step-{step}")]);
    }
    assert!(user.json(&["show", "run/step-2"], 0)["base_bytes"].as_u64().unwrap() > 0);
    user.ok(&["cp", "run/step-2", "best", "--stand-alone"]);
    let agent = Running::start(&user, "");
    told(&user, &agent, &["warm", "run/step-2", "--wait"]);
    // Without packs, all chunks must come from the cache.
    fs::rename(user.repository().join("pack"), user.work().join("away")).unwrap();
    let restored = told_json(&user, &agent, &["restore", "run/step-2", "out"]);
    assert_eq!(restored["sources"]["agent"], restored["fetched_bytes"], "{restored}");
    assert_eq!(user.read("out/model.safetensors"), smooth(1e-6));
    agent.stop();
}
