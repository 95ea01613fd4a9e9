//! How an agent starts and ends: signals, kills, restarts, and what is in its way.

use std::fs::{File, Permissions};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{PATIENCE, Running, told, told_json, with_tree};
use crate::cli::{User, has_members, ran};
use crate::data::noise;
use crate::ports::ClosedPort;

#[test]
fn pins_outlive_the_agent() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    let pinned = told_json(&user, &agent, &["pin", "run@latest", "--for", "24h", "--owner", "me"]);
    has_members(&pinned, "id owner reason created expires chunks bytes");
    assert!(pinned["bytes"].as_u64().unwrap() > 20 << 20);
    assert_eq!((&pinned["owner"], &pinned["reason"]), (&json!("me"), &json!("run/step-1")));
    let told_name = told(&user, &agent, &["pin", "run@latest", "--for", "1ms"]);
    assert!(told_name.starts_with("pinned run/step-1 until "), "{told_name}");
    let second = agent.post("/v1/pins", &json!({ "name": "run/step-1", "for": 60, "reason": "a burst" }), 201);
    assert!(told(&user, &agent, &["pins"]).contains("a burst"));
    assert!(told_json(&user, &agent, &["cache", "stat"])["promised_bytes"].as_u64().unwrap() > 20 << 20);
    agent.stop();

    let agent = Running::start(&user, "");
    let pins = told_json(&user, &agent, &["pins"]);
    assert_eq!(pins["pins"], json!([pinned, second]));
    let id = second["id"].as_str().unwrap();
    assert!(told(&user, &agent, &["unpin", id]).contains(id));
    assert_eq!(agent.ask("DELETE", &format!("/v1/pins/{id}"), "", "").refuses(404), "not-found");
    agent.signal(Signal::KILL);
    assert_eq!(agent.ended().0, None);

    // Its socket is still there, and nobody behind it.
    let agent = Running::start(&user, "");
    assert_eq!(agent.get("/v1/pins")["pins"], json!([pinned]));
    assert_eq!(agent.ask("POST", "/v1/pins", "", "{\"name\":\"none\"}").refuses(404), "not-found");
    user.write("tree/large", &noise(3, 300 << 20));
    user.ok(&["save", "tree", "large"]);
    let lacking = agent.ask("POST", "/v1/pins", "", "{\"name\":\"large\"}");
    assert!(String::from_utf8_lossy(&lacking.body).contains("pin does not fit into the cache"));
    assert_eq!(lacking.refuses(507), "exhausted");
    agent.stop();
}

/// Commands report an agent that is stopped, instead of waiting for it. A command that began before ends as well.
#[test]
fn a_stopped_agent_holds_no_command_up() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    agent.signal(Signal::STOP);
    let commands: [&[&str]; 4] =
        [&["pins"], &["cache", "stat"], &["warm", "run@latest", "--wait"], &["stage", "--list"]];
    let ended: Vec<_> = std::thread::scope(|scope| {
        let begun = commands.map(|args| scope.spawn(|| ran(user.command(args).env("TOWLINE_AGENT", &agent.socket))));
        begun.into_iter().map(|command| command.join().unwrap()).collect()
    });
    for (args, ended) in commands.iter().zip(ended) {
        assert_eq!(ended.code, Some(6), "{args:?}: {}", ended.err);
        assert!(ended.err.contains("agent does not answer at "), "{args:?}: {}", ended.err);
    }
    agent.signal(Signal::CONT);
    assert!(told(&user, &agent, &["warm", "run@latest", "--wait"]).contains("run/step-1"));
    agent.stop();
}

/// Answers `/health` at `socket` as `agent` does, and nothing else: other connections stay open without an answer.
fn answer_health_alone(socket: &Path, agent: PathBuf) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let mut silent = Vec::new();
        for stream in listener.incoming().map_while(Result::ok) {
            let mut head = [0; 11];
            (&stream).read_exact(&mut head).unwrap();
            if head != *b"GET /health" {
                silent.push(stream);
                continue;
            }
            let behind = UnixStream::connect(&agent).unwrap();
            (&behind).write_all(&head).unwrap();
            let (from, mut to) = (stream.try_clone().unwrap(), behind.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut &from, &mut to));
            std::thread::spawn(move || std::io::copy(&mut &behind, &mut &stream));
        }
    });
}

#[test]
fn an_agent_that_sends_no_chunks_is_left_out() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    let socket = agent.socket.with_extension("fake");
    answer_health_alone(&socket, agent.socket.clone());
    let restored = ran(user.command(&["restore", "run@latest", "back"]).env("TOWLINE_AGENT", &socket));
    assert_eq!(restored.code, Some(0), "{}", restored.err);
    assert!(restored.err.contains("sends no chunks"), "{}", restored.err);
    agent.stop();
}

/// Begins a save that takes a while; returns when it has begun to read.
fn begin_long_save(user: &User, agent: &Running) -> Value {
    user.write("large/file", &noise(7, 400 << 20));
    let begun = agent.post("/v1/save", &json!({ "path": user.work().join("large"), "name": "large" }), 202);
    let path = format!("/v1/tasks/{}", begun["id"].as_str().unwrap());
    let until = Instant::now() + PATIENCE;
    while agent.get(&path)["progress"]["done"].as_u64().unwrap() == 0 {
        assert!(Instant::now() < until, "the save does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    begun
}

#[test]
fn a_save_is_finished_before_the_agent_ends() {
    let user = User::with_repository();
    let agent = Running::start(&user, "grace = '10m'");
    begin_long_save(&user, &agent);
    agent.signal(Signal::TERM);
    let until = Instant::now() + PATIENCE;
    while agent.ask("GET", "/ready", "", "").status == 200 {
        assert!(Instant::now() < until, "the agent does not hear the signal");
    }
    let late = json!({ "path": user.work().join("large"), "name": "late" }).to_string();
    assert_eq!(agent.ask("POST", "/v1/save", "", &late).refuses(503), "unreachable");
    assert_eq!(agent.ended(), (Some(0), String::new()));
    assert!(user.ok(&["ls"]).contains("large"));
    assert_eq!(user.json(&["verify", "--data"], 0)["damaged"], json!([]));
}

#[test]
fn without_grace_what_runs_is_stopped_and_named() {
    let user = User::with_repository();
    let agent = Running::start(&user, "grace = 0");
    begin_long_save(&user, &agent);
    agent.signal(Signal::TERM);
    let (code, error) = agent.ended();
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("save large") && error.contains("cancelled"), "{error}");
    assert!(!user.ok(&["ls"]).contains("large"));
}

#[test]
fn a_transfer_is_stopped_by_its_id() {
    let user = User::with_repository();
    let agent = Running::start(&user, "");
    let begun = begin_long_save(&user, &agent);
    let path = format!("/v1/tasks/{}", begun["id"].as_str().unwrap());
    assert_eq!(agent.ask("DELETE", &path, "", "").json(200)["state"], "cancelled");
    let (name, last) = agent.events(&begun).pop().unwrap();
    assert_eq!((name.as_str(), &last["state"]), ("end", &json!("cancelled")));
    agent.stop();
}

#[test]
fn what_is_in_the_way_of_a_start_is_named() {
    let user = with_tree();
    let agent = Running::start(&user, "http = '127.0.0.1:0'");
    let config = user.work().join("agent.toml").display().to_string();
    let start = ["agent", "--config", &config];
    let error = user.fails(&start, 5);
    assert!(error["message"].as_str().unwrap().contains("another agent"), "{error}");

    let write = |text: &str| user.write("agent.toml", text.as_bytes());
    let port = agent.http.clone().unwrap();
    write(&format!("repository = '../repo'\nsocket = 'other/agent.sock'\nhttp = '{port}'\n"));
    let error = user.fails(&start, 5);
    assert!(error["message"].as_str().unwrap().starts_with("address in use: cannot listen on 127.0.0.1:"), "{error}");
    let cache = "[cache]\ndir = 'cache'\ncapacity = '256M'\n";
    write(&format!("repository = '../repo'\nsocket = 'other/agent.sock'\n{cache}"));
    let error = user.fails(&start, 5);
    assert!(error["message"].as_str().unwrap().contains("cache is in use"), "{error}");
    write("repository = '../none'\nsocket = 'other/agent.sock'\n");
    let error = user.fails(&start, 3);
    assert!(error["help"].as_str().unwrap().contains("towline init"), "{error}");
    write("repository = '../repo'\nsocket = 'other/agent.sock'\nmemory = '64M'\n");
    assert!(user.fails(&start, 2)["message"].as_str().unwrap().contains("at least 128 MiB"));
    write("repository = '../repo'\ncolour = 'red'\n");
    let error = user.fails(&start, 2);
    assert!(error["causes"][0].as_str().unwrap().contains("colour"), "{error}");
    write(&format!("repository = '../repo'\nsocket = '/{}'\n", "s".repeat(107)));
    assert!(user.fails(&start, 2)["message"].as_str().unwrap().contains("at most 107 bytes"));
    write("repository = '../repo'\nhttp = '0.0.0.0:7070'\n");
    assert!(user.fails(&start, 2)["message"].as_str().unwrap().contains("loopback"));
    assert_eq!(user.fails(&["agent", "--config", "none.toml"], 3)["kind"], "not-found");
    agent.stop();
    // A section without the other one that it needs.
    let plain = "repository = '../repo'\nsocket = 'other/agent.sock'\n";
    for section in
        ["[sidecar]\nwarm = ['run/1']", "[sidecar]\nstage = ['run/1']", "listen = '127.0.0.1:0'", "tokens = 't'"]
    {
        write(&format!("{plain}{section}\n"));
        let error = user.fails(&start, 2);
        assert!(error["message"].as_str().unwrap().contains(" is set, but n"), "{error}");
    }
    let port = ClosedPort::new();
    let closed = format!("repository = 's3://bucket/p'\nendpoint = 'http://{}'\n", port.address());
    write(&format!("{closed}socket = 'other/agent.sock'\n"));
    let mut unreachable = user.command(&start);
    let unreachable = ran(unreachable.env("AWS_ACCESS_KEY_ID", "k").env("AWS_SECRET_ACCESS_KEY", "s"));
    assert_eq!(unreachable.code, Some(6), "{}", unreachable.err);
    write(plain);
    std::fs::set_permissions(user.work().join("agent.toml"), Permissions::from_mode(0o666)).unwrap();
    assert_eq!(user.fails(&start, 7)["kind"], "denied");
}

#[test]
fn what_a_killed_agent_holds_for_a_moment_is_waited_for() {
    let user = with_tree();
    Running::start(&user, "").stop();
    for lock in ["run/agent.lock", "cache/lock"] {
        let held = File::options().write(true).open(user.work().join(lock)).unwrap();
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        let mut command = user.command(&["agent", "--json", "--config", "agent.toml"]);
        let mut child = command.env("RUST_LOG", "towline=warn").spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
        assert!(said.contains("waiting 3s for another process to release the "), "{said}");
        drop(held);
        let mut listening = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut listening).unwrap();
        assert!(listening.contains("listening"), "{lock}: {listening}");
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn an_agent_that_accepts_no_handoff_says_so() {
    let user = with_tree();
    user.ok(&["identity", "init", "--authority", "ca"]);
    user.ok(&["identity", "issue", "home/a", "--authority", "ca", "--to", "tls"]);
    let listening = "identity = 'tls'\nlisten = '127.0.0.1:0'\n[[allow]]\nagents = '**'\nnames = '**'\n\
                     [handoff]\ndir = 'kept'\ncapacity = '1G'\n";
    let accept = "[[handoff.accept]]\nfrom = 'home/*'\nnames = 'run/*'\n";
    for (more, says) in [("", true), (accept, false)] {
        super::configure(&user, &format!("{listening}{more}"));
        let mut command = user.command(&["agent", "--json", "--config", "agent.toml"]);
        let agent = Running::from_command(command.env("RUST_LOG", "towline=warn"));
        agent.signal(Signal::TERM);
        let (code, log) = agent.ended();
        assert_eq!((code, log.contains("[handoff] accepts nothing")), (Some(0), says), "{log}");
    }
}

#[test]
fn without_an_agent_it_is_said_how_to_start_one() {
    let user = with_tree();
    for args in [&["pins"][..], &["pin", "run/1"], &["unpin", "01ABC"], &["cache", "stat"], &["top"]] {
        let error = user.fails(args, 3);
        assert!(error["help"].as_str().unwrap().contains("towline agent --config"), "{error}");
    }
    let both = user.fails(&["warm", "run/1", "--wait", "--dry-run"], 2);
    assert!(both["help"].as_str().unwrap().contains("drop --wait to see"), "{both}");
    let gone = user.command(&["pins", "--json"]).env("TOWLINE_AGENT", "/none/agent.sock").output().unwrap();
    assert_eq!(gone.status.code(), Some(6));
}

/// More saves at once than there are threads for blocking work, and than find memory to compare with a step before: none waits for
/// what another holds.
#[test]
fn any_number_of_saves_at_once_comes_to_an_end() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    user.write("large/file", &noise(5, 24 << 20));
    user.ok(&["save", "large", "many/step-1000"]);
    let path = user.work().join("large").display().to_string();
    let threads = 2 * std::thread::available_parallelism().unwrap().get() + 8;
    let body =
        |n: usize| json!({ "path": path, "name": format!("many/step-{n}"), "reread": true, "compression": "off" });
    // An agent runs 64 tasks at a time.
    let begun: Vec<Value> = (0..(threads + 8).min(60)).map(|n| agent.post("/v1/save", &body(n), 202)).collect();
    for task in &begun {
        let events = agent.events(task);
        assert_eq!(events.last().unwrap().1["state"], "done", "{events:?}");
    }
    agent.stop();
}
