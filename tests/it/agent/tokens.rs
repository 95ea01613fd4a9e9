//! Tokens of the API on loopback: what each opens, what it does not see, and when it ends. S12 of docs/security.md.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::sidecar::until;
use super::{Answer, Running, configure, exchange, told, told_json, with_tree};
use crate::cli::{User, has_members};
use crate::data::noise;
use crate::policy::PolicyFixture;
use crate::semantics::Tmpfs;

pub(super) const SETTINGS: &str = "http = '127.0.0.1:0'\ntokens = 'own/tokens'\n";

/// A token as a process that has its secret uses it.
pub(super) struct Holder<'a> {
    agent: &'a Running,
    pub(super) secret: String,
    pub(super) id: String,
}

impl Holder<'_> {
    pub(super) fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        self.ask_with(method, path, "", body)
    }

    fn ask_with(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let headers = format!("Authorization: Bearer {}\r\n{headers}", self.secret);
        exchange(connect(self.agent), method, path, &headers, body)
    }

    fn get(&self, path: &str) -> Value {
        self.ask("GET", path, "").json(200)
    }

    pub(super) fn post(&self, path: &str, body: &Value, status: u16) -> Value {
        self.ask("POST", path, &body.to_string()).json(status)
    }

    /// How a task ended that it began.
    pub(super) fn ended(&self, begun: &Value) -> Value {
        let path = format!("/v1/tasks/{}/events", begun["id"].as_str().unwrap());
        let answer = self.ask("GET", &path, "");
        let text = String::from_utf8(answer.body).unwrap();
        let last = text.lines().rfind(|line| line.starts_with("data: ")).unwrap();
        serde_json::from_str(&last["data: ".len()..]).unwrap()
    }
}

pub(super) fn connect(agent: &Running) -> TcpStream {
    let stream = TcpStream::connect(agent.http.as_ref().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    stream
}

/// A token with `scopes`, and what else `more` says on the command line.
pub(super) fn token<'a>(user: &User, agent: &'a Running, scopes: &[&str], more: &[&str]) -> Holder<'a> {
    let mut args = vec!["token", "new"];
    scopes.iter().for_each(|scope| args.extend(["--scope", scope]));
    args.extend(more);
    let made = told_json(user, agent, &args);
    has_members(&made, "id name tenant scopes created expires used secret");
    let text = |name: &str| made[name].as_str().unwrap().to_owned();
    assert!(text("secret").starts_with("towline_"));
    Holder { agent, secret: text("secret"), id: text("id") }
}

/// Status, headers and body, without what tells the time.
fn told_of(answer: Answer) -> (u16, Vec<(String, String)>, String) {
    let headers = answer.headers.into_iter().filter(|(name, _)| name != "date");
    (answer.status, headers.collect(), String::from_utf8(answer.body).unwrap())
}

/// Requests of an agent to its store, by the figures that it gives.
fn requests(agent: &Running) -> u64 {
    let text = String::from_utf8(agent.ask("GET", "/metrics", "", "").body).unwrap();
    let counts = text.lines().filter(|line| line.starts_with("towline_store_") && line.contains("_requests_total{"));
    counts.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
}

/// S12: "A token opens the routes of its scopes and no other."
#[test]
fn each_scope_opens_its_own_routes_alone() {
    let user = with_tree();
    user.ok(&["save", "tree", "run-7/step-1"]);
    let agent = Running::start(&user, SETTINGS);
    let folder = format!("folder={}", user.work().display());
    let described = agent.get("/openapi.json");
    for (scopes, opened) in [
        (&["read=run-7/**"][..], &["read"][..]),
        (&["read=run-7/**", "warm"], &["read", "warm"]),
        (&["read=run-7/**", "pins"], &["read", "pins"]),
        (&["save=run-7/**", &folder], &["save"]),
        (&["metrics"], &["metrics"]),
        (&["admin"], &["read", "warm", "pins", "save", "metrics", "admin"]),
    ] {
        let holder = token(&user, &agent, scopes, &[]);
        let mut seen = 0;
        for (path, operations) in described["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let Some(needed) = operation["x-towline-scope"].as_str() else { continue };
                let parts: Vec<_> =
                    path.split('/').map(|part| if part.starts_with('{') { "none" } else { part }).collect();
                let answer = holder.ask(&method.to_uppercase(), &parts.join("/"), "{}");
                let text = String::from_utf8_lossy(&answer.body).into_owned();
                let lacks = answer.status == 403 && text.contains("token lacks the scope");
                let may = needed == "own" || opened.contains(&needed);
                assert_eq!(lacks, !may, "{scopes:?} {method} {path}: {} {text}", answer.status);
                assert_ne!(answer.status, 401, "{scopes:?} {method} {path}");
                seen += 1;
            }
        }
        assert!(seen > 25, "{seen}");
    }
    // A pin by the way of a warm is a pin.
    let warms = token(&user, &agent, &["read=**", "warm"], &[]);
    assert_eq!(warms.post("/v1/warm", &json!({ "name": "run-7/step-1", "pin": "1h" }), 403)["error"]["kind"], "denied");
    // Without a scope it is told what anybody is told, and nothing is passed on in this agent's name.
    assert_eq!(warms.get("/health"), json!({ "alive": true, "ready": true }));
    let passed = warms.ask_with("GET", "/v1/tasks", "Towline-At: cloud\r\n", "");
    assert!(passed.json(403)["error"]["message"].as_str().unwrap().contains("not forwarded"));
    assert_eq!(warms.ask("GET", "/v1/none", "").refuses(403), "denied");
    agent.stop();
}

/// Y7: "Who asks is known where it happens: to an agent by its API (files, pins, warms, saves, restores, and chunks that a process of
/// its node reads through its socket), and to a command or a Python program (its user)."
#[test]
fn rules_about_callers_bind_tokens_by_name_and_tenant() {
    let user = with_tree();
    user.ok(&["identity", "init"]);
    user.ok(&["identity", "issue-policy", "--to", "policy-key"]);
    let folder = user.work().join("../home/.config/towline/identity");
    user.ok(&["identity", "issue", "home/a", "--to", folder.to_str().unwrap()]);
    let id = user.json(&["init"], 0)["id"].as_str().unwrap().to_owned();
    let place = user.repository().canonicalize().unwrap();
    let policy = format!(
        "version = 1\nrepository = '{id}'\n[[site]]\nname = 'home'\nrepositories = ['{}', '{id}']\n\
         [[rule]]\nverdict = 'deny'\ncallers = 'token:intern'\nwhy = 'no interns'\n\
         [[rule]]\nverdict = 'deny'\ncaller-tenants = 'guests'\nnames = 'run-7/**'\nwhy = 'no guests'\n\
         [[rule]]\nverdict = 'allow'\nwhy = 'ours'\n",
        place.display()
    );
    user.write("policy.toml", policy.as_bytes());
    user.ok(&["policy", "sign", "policy.toml", "--key", "policy-key"]);
    user.ok(&["policy", "set", "policy.toml"]);
    user.ok(&["save", "tree", "run-7/step-1", "--label", "sensitivity=restricted"]);
    user.ok(&["save", "tree", "free/set"]);
    user.ok(&["restore", "run-7/step-1", "out"]);

    let agent = Running::start(&user, &format!("{SETTINGS}identity = '{}'\n", folder.display()));
    let from = format!("folder={}", user.work().display());
    let scopes = ["read=**", "save=**", from.as_str(), "warm", "pins"];
    let named = |name: &str, tenant: &[&str]| token(&user, &agent, &scopes, &[&["--name", name], tenant].concat());
    let (ci, intern) = (named("ci", &[]), named("intern", &[]));
    let guest = named("guest", &["--tenant", "guests"]);
    let tree = user.work().join("tree").display().to_string();
    for (holder, run, free) in [(&ci, true, true), (&guest, false, true), (&intern, false, false)] {
        for (name, may) in [("run-7/step-1", run), ("free/set", free)] {
            let path = format!("/v1/files/{}/a.txt", name.replace('/', "%2F"));
            let answer = holder.ask("GET", &path, "");
            assert_eq!(answer.status, if may { 200 } else { 403 }, "{name}");
            let warmed = holder.post("/v1/warm", &json!({ "name": name }), if may { 202 } else { 403 });
            assert!(!may || holder.ended(&warmed)["state"] == "done", "warm {name}: {warmed}");
            let pinned = holder.ask("POST", "/v1/pins", &json!({ "name": name, "for": "1h" }).to_string());
            assert_eq!(pinned.status, if may { 201 } else { 403 }, "pin {name}");
            let again = name.replace("set", "again").replace("step-1", "step-2");
            let saved = holder.ended(&holder.post("/v1/save", &json!({ "path": tree, "name": again }), 202));
            assert_eq!(saved["state"] == "done", may, "save {again}: {saved}");
            if !may {
                assert!(saved.to_string().contains("denied"), "{saved}");
            }
        }
    }
    agent.stop();
    let explained = |caller: &str| {
        user.json(&["policy", "explain", "run-7/step-1", "--to", "home", "--caller", caller], 0)["basis"]["why"].clone()
    };
    assert_eq!((explained("token:intern"), explained("user:ann")), (json!("no interns"), json!("ours")));
    let unknown = user.json(&["policy", "explain", "run-7/step-1", "--to", "home"], 0);
    assert_eq!((&unknown["verdict"], &unknown["basis"]["by"]), (&json!("deny"), &json!("unknown-caller")));
}

/// S12: "A name that it may not read is answered as one that is not there, to the byte"
#[test]
fn what_a_token_may_not_read_is_as_what_is_not_there() {
    let user = with_tree();
    for name in ["run-7/step-1", "run-7/step-2", "secret/step-1", "secret"] {
        user.ok(&["save", "tree", name]);
    }
    let agent = Running::start(&user, SETTINGS);
    let folder = format!("folder={}", user.work().display());
    let holder = token(&user, &agent, &["read=run-7/step-1", "warm", "pins", "save=mine/**", &folder], &[]);
    let names = |query: &str| {
        let list = holder.get(&format!("/v1/names{query}"));
        let names = list["names"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned());
        (names.collect::<Vec<_>>(), list["next"].clone())
    };
    assert_eq!(names(""), (vec!["run-7/step-1".to_owned()], Value::Null));
    assert_eq!(names("?limit=1"), (vec!["run-7/step-1".to_owned()], Value::Null));
    assert_eq!(names("?prefix=secret"), (vec![], Value::Null));
    assert_eq!(holder.ask("GET", "/v1/files/run-7%2Fstep-1/a.txt", "").body, b"hello, world");
    // The choice is made among what it may read.
    assert_eq!(holder.get("/v1/files/run-7@latest/")["name"], "run-7/step-1");
    let begun = holder.post("/v1/warm", &json!({ "name": "run-7@latest" }), 202);
    assert_eq!((begun["name"].as_str(), begun["repository"].is_null()), (Some("run-7/step-1"), true));
    assert_eq!(holder.ended(&begun)["state"], "done");

    let asked = |name: &str, escaped: &str| {
        let named = json!({ "name": name }).to_string();
        let mut told: Vec<_> = [
            ("GET", format!("/v1/files/{escaped}/a.txt"), ""),
            ("HEAD", format!("/v1/files/{escaped}/a.txt"), ""),
            ("GET", format!("/v1/files/{escaped}/"), ""),
            ("GET", format!("/v1/files/{escaped}/none"), ""),
            ("GET", format!("/v1/names?prefix={name}"), ""),
            ("POST", "/v1/warm".to_owned(), &named),
            ("POST", "/v1/fetch".to_owned(), &named),
            ("POST", "/v1/pins".to_owned(), &named),
        ]
        .into_iter()
        .map(|(method, path, body)| told_of(holder.ask(method, &path, body)))
        .collect();
        let base = json!({ "path": user.work().join("tree"), "name": "mine/a", "base": name });
        let ended = holder.ended(&holder.post("/v1/save", &base, 202));
        told.push((0, vec![], ended["error"].to_string()));
        told
    };
    // Requests to the store that one question costs, once what was there before is known.
    let cost = |escaped: &str| {
        let ask = || holder.ask("GET", &format!("/v1/files/{escaped}/a.txt"), "").refuses(404);
        ask();
        let before = requests(&agent);
        ask();
        requests(&agent) - before
    };
    let cases = [("secret/step-1", "secret%2Fstep-1"), ("secret", "secret"), ("run-7/step-2", "run-7%2Fstep-2")];
    let forbidden: Vec<_> = cases.iter().map(|(name, escaped)| asked(name, escaped)).collect();
    let chosen = told_of(holder.ask("GET", "/v1/files/secret@latest/a.txt", ""));
    let forbidden_cost = cost("secret%2Fstep-1");
    assert!(forbidden_cost > 0, "reads are counted");
    user.ok(&["rm", "run-7/step-2", "secret/step-1", "secret"]);
    assert_eq!(forbidden_cost, cost("secret%2Fstep-1"), "the same reads");
    let absent: Vec<_> = cases.iter().map(|(name, escaped)| asked(name, escaped)).collect();
    assert_eq!(forbidden, absent);
    assert_eq!(chosen, told_of(holder.ask("GET", "/v1/files/secret@latest/a.txt", "")));
    let told_statuses: Vec<_> = absent[0].iter().map(|(status, ..)| *status).collect();
    assert_eq!(told_statuses, [404, 404, 404, 404, 200, 404, 404, 404, 0]);
    let repository = user.repository().canonicalize().unwrap().display().to_string();
    for (_, headers, body) in forbidden.concat() {
        assert!(!format!("{headers:?}{body}").contains(&repository), "{body}");
    }
    // Locations are this node's own affair.
    let located = json!({ "name": "run-7/step-1", "repository": repository });
    assert_eq!(holder.post("/v1/warm", &located, 400)["error"]["kind"], "usage");
    agent.stop();
}

/// S12: "An expired, revoked, malformed or unknown token gets one and the same answer"
#[test]
fn a_token_ends_when_it_expires_or_is_revoked_and_not_when_the_agent_does() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, SETTINGS);
    let short = token(&user, &agent, &["read=**"], &["--expires", "1s"]);
    let long = token(&user, &agent, &["read=**"], &["--name", "dashboard", "--tenant", "team-a", "--expires", "30d"]);
    let unknown = Holder { agent: &agent, secret: format!("towline_{}", "0".repeat(64)), id: String::new() };
    let malformed = Holder { agent: &agent, secret: "rubbish".to_owned(), id: String::new() };
    let names = |holder: &Holder<'_>| told_of(holder.ask("GET", "/v1/names", ""));
    assert_eq!(names(&long).0, 200);
    until("it expires", || names(&short).0 == 401);
    let refused = [&short, &unknown, &malformed].map(names);
    assert!(refused.iter().all(|told| *told == refused[0]), "{refused:?}");

    let list = told_json(&user, &agent, &["token", "list"]);
    has_members(&list["tokens"][1], "id name tenant scopes created expires used");
    assert_eq!((&list["tokens"][1]["name"], &list["tokens"][1]["scopes"]), (&json!("dashboard"), &json!(["read=**"])));
    assert!(list["tokens"][1]["used"].is_string() && !list.to_string().contains(&long.secret));
    assert!(told(&user, &agent, &["token", "list"]).contains("team-a"));
    let (secret, id) = (long.secret.clone(), long.id.clone());
    let told_by = |agent: &Running| names(&Holder { agent, secret: secret.clone(), id: id.clone() });
    let kept = fs::read_to_string(user.work().join("own/tokens")).unwrap();
    assert!(!kept.contains(&secret["towline_".len()..]), "only a hash is kept");
    agent.stop();

    let agent = Running::start(&user, SETTINGS);
    assert_eq!(told_by(&agent).0, 200, "it survives a restart");
    assert_eq!(told_json(&user, &agent, &["token", "revoke", &id]), json!({ "revoked": [id] }));
    let now_unknown = Holder { agent: &agent, secret: "towline_x".to_owned(), id: String::new() };
    assert_eq!(told_by(&agent), names(&now_unknown));
    assert_eq!(told_by(&agent).0, 401);
    let again = user.command(&["token", "revoke", &id]).env("TOWLINE_AGENT", &agent.socket).output().unwrap();
    assert_eq!(again.status.code(), Some(3), "{again:?}");
    agent.stop();

    // However often somebody tries, the log stays short, and does not say what was tried.
    let mut command = user.command(&["agent", "--json", "--config", "agent.toml"]);
    let agent = Running::from_command(command.env("RUST_LOG", "towline=warn"));
    (0..50).for_each(|_| assert_eq!(told_by(&agent).0, 401, "revoked is revoked"));
    agent.signal(Signal::TERM);
    let (code, log) = agent.ended();
    assert!(code == Some(0) && !log.contains(&secret), "{log}");
    assert_eq!(log.matches("has an invalid token").count(), 10, "{log}");
}

#[test]
fn an_answer_under_way_breaks_off_when_its_token_is_revoked() {
    let user = with_tree();
    user.write("tree/large.bin", &noise(3, 64 << 20));
    user.ok(&["save", "tree", "run/step-1"]);
    fs::create_dir(user.work().join("ckpt")).unwrap();
    let agent =
        Running::start(&user, &format!("{SETTINGS}[sidecar]\nwatch = [{{ folder = 'ckpt', run = 'other' }}]\n"));
    let begin = |holder: &Holder<'_>, path: &str| {
        let mut stream = connect(&agent);
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\r\n", holder.secret)
            .unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        stream
    };
    let rest = |mut stream: TcpStream| {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        rest
    };
    // Half a file is not taken for all of it: fewer bytes come than were promised.
    let reads = token(&user, &agent, &["read=run/**"], &[]);
    let file = begin(&reads, "/v1/files/run%2Fstep-1/large.bin");
    told(&user, &agent, &["token", "revoke", &reads.id]);
    assert!(rest(file).len() < 64 << 20);
    // One that is silent ends, too.
    let admin = token(&user, &agent, &["admin"], &[]);
    let watch = agent.get("/v1/tasks")["tasks"][0]["id"].as_str().unwrap().to_owned();
    let events = begin(&admin, &format!("/v1/tasks/{watch}/events"));
    told(&user, &agent, &["token", "revoke", &admin.id]);
    let asked = Instant::now();
    let text = String::from_utf8_lossy(&rest(events)).into_owned();
    assert!(asked.elapsed() < Duration::from_secs(5) && !text.contains("event: end"), "{text}");
    let short = token(&user, &agent, &["admin"], &["--expires", "2s"]);
    let events = begin(&short, &format!("/v1/tasks/{watch}/events"));
    let asked = Instant::now();
    rest(events);
    assert!(asked.elapsed() < Duration::from_secs(10));
    agent.stop();
}

/// S12: "At most 64 of its requests are in progress at a time."
#[test]
fn one_token_does_not_take_all_places() {
    let user = with_tree();
    user.write("tree/large.bin", &noise(3, 64 << 20));
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, SETTINGS);
    let reads = token(&user, &agent, &["read=run/**"], &[]);
    let begin = || {
        let mut stream = connect(&agent);
        let path = "/v1/files/run%2Fstep-1/large.bin";
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\r\n", reads.secret)
            .unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        stream
    };
    let mut slow: Vec<TcpStream> = (0..64).map(|_| begin()).collect();
    assert_eq!(reads.ask("GET", "/v1/names", "").refuses(429), "exhausted");
    let probe = exchange(connect(&agent), "GET", "/health", "", "");
    assert_eq!(probe.status, 200, "others are served");
    drop(slow.split_off(60));
    until("places are free again", || reads.ask("GET", "/v1/names", "").status == 200);
    agent.stop();
}

/// S12: "It sees and ends only the tasks and pins that it asked for itself"
#[test]
fn each_token_has_its_own_tasks_and_pins_and_a_tenant_has_a_quota() {
    let user = with_tree();
    for name in ["run/step-1", "run/step-2"] {
        user.ok(&["save", "tree", name]);
    }
    let agent = Running::start(&user, &format!("{SETTINGS}token_pins = {{ max_pins = 1, max_time = '1h' }}\n"));
    let scopes = ["read=run/**", "warm", "pins"];
    let of = |tenant: &str| token(&user, &agent, &scopes, &["--tenant", tenant, "--name", "job"]);
    let (one, other, else_where) = (of("team-a"), of("team-a"), of("team-b"));
    let task = one.post("/v1/warm", &json!({ "name": "run/step-1", "pin": "30m" }), 202);
    assert_eq!(one.ended(&task)["state"], "done");
    let path = format!("/v1/tasks/{}", task["id"].as_str().unwrap());
    let caller = format!("token:team-a/{}", one.id);
    assert_eq!(agent.get(&path)["caller"], caller.as_str());
    for stranger in [&other, &else_where] {
        assert_eq!(stranger.get("/v1/tasks"), json!({ "tasks": [] }));
        assert_eq!(stranger.get("/v1/pins"), json!({ "pins": [] }));
        for (method, path) in [("GET", path.clone()), ("DELETE", path.clone()), ("GET", format!("{path}/events"))] {
            assert_eq!(stranger.ask(method, &path, "").refuses(404), "not-found");
        }
    }
    let pins = one.get("/v1/pins");
    let pin = &pins["pins"][0];
    assert_eq!(pin["owner"], format!("{caller}/job"));
    let unpin = format!("/v1/pins/{}", pin["id"].as_str().unwrap());
    assert_eq!(other.ask("DELETE", &unpin, "").refuses(404), "not-found");

    let second = json!({ "name": "run/step-2", "for": "30m" });
    let refused = other.post("/v1/pins", &second, 507);
    assert!(refused["error"]["message"].as_str().unwrap().contains("too many pins"), "{refused}");
    else_where.post("/v1/pins", &second, 201);
    let long = else_where.post("/v1/pins", &json!({ "name": "run/step-2", "for": "2h" }), 403);
    assert!(long["error"]["help"].as_str().unwrap().contains("[token_pins]"), "{long}");
    assert_eq!(one.ask("DELETE", &unpin, "").status, 200);
    other.post("/v1/pins", &second, 201);
    assert_eq!(agent.get("/v1/pins")["pins"].as_array().unwrap().len(), 2, "the socket's owner sees all");
    told(&user, &agent, &["token", "revoke", &other.id]);
    let left = agent.get("/v1/pins");
    let owners: Vec<_> = left["pins"].as_array().unwrap().iter().map(|pin| pin["owner"].clone()).collect();
    assert_eq!(owners, [format!("token:team-b/{}/job", else_where.id)], "a revoked token keeps nothing");
    agent.stop();
}

/// S12: "It can name only paths at or below its folders"
#[test]
fn a_token_saves_its_names_from_its_folders_alone() {
    let user = with_tree();
    let agent = Running::start(&user, SETTINGS);
    let top = user.work().canonicalize().unwrap();
    symlink(top.join("tree"), top.join("link")).unwrap();
    fs::create_dir(top.join("job")).unwrap();
    fs::rename(top.join("tree"), top.join("job/step-1")).unwrap();
    symlink("/etc", top.join("job/etc")).unwrap();
    let folder = format!("folder={}", top.join("job").display());
    let holder = token(&user, &agent, &["save=run/*", "read=run/*", &folder], &[]);
    let save = |path: &str, name: &str| json!({ "path": top.join(path), "name": name });
    let saved = holder.ended(&holder.post("/v1/save", &save("job/step-1", "run/step-1"), 202));
    assert_eq!(saved["state"], "done", "{saved}");
    assert_eq!(holder.ask("GET", "/v1/files/run%2Fstep-1/a.txt", "").body, b"hello, world");
    for (path, name) in [
        ("job/step-1", "other/step-1"),
        ("job/step-1", "run/a/b"),
        ("agent.toml", "run/step-2"),
        ("link", "run/step-2"),
        ("job/../agent.toml", "run/step-2"),
        ("job/etc/passwd", "run/step-2"),
        ("/etc/passwd", "run/step-2"),
    ] {
        let refused = holder.post("/v1/save", &save(path, name), 403);
        assert_eq!(refused["error"]["kind"], "denied", "{path} {refused}");
    }
    // A name that the token may not read is refused as an origin, whether it exists or not.
    user.ok(&["save", "job/step-1", "hidden/one"]);
    let mut answers = ["hidden/one", "hidden/two"].map(|origin| {
        let labels = json!({ "derived-from": origin });
        let body = json!({ "path": top.join("job/step-1"), "name": "run/step-2", "labels": labels });
        holder.post("/v1/save", &body, 403)["error"]["message"].as_str().unwrap().replace(origin, "ORIGIN")
    });
    answers.sort_unstable();
    assert_eq!(answers[0], answers[1]);
    // A link in the last place is not followed.
    let link = holder.ended(&holder.post("/v1/save", &save("job/etc", "run/step-2"), 202));
    assert_eq!(link["state"], "failed", "{link}");
    let restore = json!({ "name": "run/step-1", "to": top.join("job/out") });
    assert_eq!(holder.post("/v1/restore", &restore, 403)["error"]["kind"], "denied");
    assert_eq!(user.json(&["ls", "run"], 0)["refs"].as_array().unwrap().len(), 1);
    agent.stop();
}

/// A token that may save one name makes no other name stricter, and learns nothing of a name that it replaces but may not read.
#[test]
fn labels_of_a_token_bind_its_own_names_alone() {
    let lab = PolicyFixture::at("home");
    let user = &lab.user;
    user.ok(&["identity", "issue", "home/n1", "--to", "n1"]);
    let settings =
        b"repository = '../repo'\nsocket = 'run/agent.sock'\nmemory = '256M'\nidentity = 'n1'\nhttp = '127.0.0.1:0'\n\
        tokens = 'own/tokens'\n[cache]\ndir = 'cache'\ncapacity = '64M'\nfree_floor = '0'\n";
    user.write("agent.toml", settings);
    user.write("shared/model", b"weights");
    user.ok(&["save", "shared", "pub/model"]);
    let agent = Running::from_file(user, "agent.toml");
    let path = user.work().canonicalize().unwrap().join("shared");
    let modified = fs::metadata(path.join("model")).unwrap().modified().unwrap();
    let holder = token(user, &agent, &["save=mine/**", "read=mine/**", &format!("folder={}", path.display())], &[]);
    let save_as = |name: &str, labels: Value| {
        let body = json!({ "path": path, "name": name, "labels": labels });
        holder.ended(&holder.post("/v1/save", &body, 202))
    };
    let save = |labels: Value| save_as("mine/model", labels);
    let refused = save(json!({ "residency": "DE" }));
    assert_eq!((&refused["state"], &refused["error"]["kind"]), (&json!("failed"), &json!("denied")), "{refused}");
    assert_eq!(save(json!({}))["state"], "done");
    assert_eq!(save_as("mine/run/step-1", json!({}))["state"], "done");
    // An origin could get labels later, and so could the run, with a later step.
    assert_eq!(save_as("mine/made", json!({ "derived-from": "mine/origin" }))["error"]["kind"], "denied");
    user.write("shared/model", b"its own");
    assert_eq!(save_as("mine/run/step-2", json!({ "residency": "DE" }))["error"]["kind"], "denied");
    // Other content may have them.
    let saved = save(json!({ "residency": "DE" }));
    assert_eq!((&saved["state"], saved["report"].get("replaced")), (&json!("done"), None), "{saved}");
    // From then on the name has them, and may not hold what others have: the same file, with the same time.
    user.write("shared/model", b"weights");
    fs::File::options().write(true).open(path.join("model")).unwrap().set_modified(modified).unwrap();
    assert_eq!(save(json!({}))["state"], "failed");
    assert_eq!(user.json(&["label", "pub/model"], 0)["labels"], json!({}));
    agent.stop();
}

#[test]
fn a_file_of_tokens_that_others_may_write_and_a_full_disk() {
    let user = with_tree();
    configure(&user, SETTINGS);
    let file = user.work().join("own/tokens");
    let disk = Tmpfs::mount(&user.work().join("own"), "64k");
    if disk.is_some() {
        fs::set_permissions(file.parent().unwrap(), fs::Permissions::from_mode(0o700)).unwrap();
    }
    let agent = Running::from_file(&user, "agent.toml");
    let holder = token(&user, &agent, &["metrics"], &[]);
    let before = fs::read_to_string(&file).unwrap();
    if disk.is_some() {
        let ballast = user.work().join("own/ballast");
        assert!(fs::write(&ballast, vec![1; 1 << 20]).is_err(), "the disk is full");
        let scopes = ["--scope", "read=run-7/**"];
        let mut command = user.command(&[&["token", "new", "--json"], &scopes[..]].concat());
        let output = command.env("TOWLINE_AGENT", &agent.socket).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("disk full") && error.contains("no token was made"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), before);
        assert_eq!(holder.ask("GET", "/metrics", "").status, 200, "what there was holds");
        fs::remove_file(&ballast).unwrap();
        token(&user, &agent, &["metrics"], &[]);
    }
    agent.stop();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    let error = user.fails(&["agent", "--config", "agent.toml"], 7);
    assert!(error["message"].as_str().unwrap().contains("can be written by others"), "{error}");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let agent = Running::from_file(&user, "agent.toml");
    agent.stop();
    drop(disk);

    // Without the setting there are none, and it is said how to have some.
    let agent = Running::start(&user, "http = '127.0.0.1:0'");
    let mut command = user.command(&["token", "list"]);
    let output = command.env("TOWLINE_AGENT", &agent.socket).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8(output.stderr).unwrap().contains("set `http` and `tokens`"));
    agent.stop();
}

/// The commands about tokens in docs/operations.md, typed.
#[test]
fn what_the_manual_says_about_tokens_works() {
    let user = with_tree();
    user.ok(&["save", "tree", "run-7/step-1"]);
    let agent = Running::start(&user, SETTINGS);
    let manual = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md")).unwrap();
    let lines = manual
        .lines()
        .filter_map(|line| line.strip_prefix("$ "))
        .filter(|line| line.starts_with("towline token ") || line.contains("Bearer $(cat ./token)"));
    let port = agent.http.as_ref().unwrap().rsplit_once(':').unwrap().1.to_owned();
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_towline")).parent().unwrap();
    let mut typed = 0;
    for line in lines {
        let id = told_json(&user, &agent, &["token", "list"])["tokens"][0]["id"].as_str().unwrap_or("none").to_owned();
        let line = line.replace("7070", &port).replace("01KB2M0Q7X8V5C1N3T9Z4R6S2W", &id);
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("set -e; {line}")]).current_dir(user.work()).env("TOWLINE_AGENT", &agent.socket);
        let output = shell.env("PATH", format!("{}:/usr/bin:/bin", binary.display())).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        typed += 1;
    }
    assert!(typed >= 5, "{typed}");
    agent.stop();
}
