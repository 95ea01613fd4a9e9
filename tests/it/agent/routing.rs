//! `--at`: another agent is asked to warm and pin, over mutual TLS, by way of the agent here.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Runtime;
use towline::ErrorKind;
use towline::clock::SystemClock;
use towline::identity::Identity;
use towline::transfer::calls::{ALPN_HTTP, CallStream, call};
use towline::transfer::identity::Credentials;

use super::together::{EVERYTHING, had, hide_packs, identities, start_peer_with};
use super::{PATIENCE, Running, exchange, told, told_json, with_tree};
use crate::cli::User;
use crate::data::noise;
use crate::ports::free_address;

/// An agent at home, `home/a`, and one in the cloud, `cloud/c`, that know each other; `callers` may ask the one in the cloud. Then
/// sections of the settings of either.
pub(super) fn two_sites(user: &User, callers: &str, (home, cloud): (&str, &str)) -> (Running, Running) {
    user.ok(&["save", "tree", "run/step-1"]);
    identities(user);
    // Whoever starts first must know where the other will be. What cannot be saved is not waited for long.
    let free = free_address();
    let own = format!("listen = '127.0.0.1:0'\ncallers = [{callers}]");
    let cloud = start_peer_with(user, "c", std::slice::from_ref(&free), (&own, cloud));
    let home = start_peer_with(
        user,
        "a",
        &[cloud.listen.clone().unwrap()],
        (&format!("listen = '{free}'\ngrace = '5s'"), home),
    );
    linked(&home, "towline://cloud/c");
    (home, cloud)
}

/// Waits until `agent` has a link to the agent called `to`.
pub(super) fn linked(agent: &Running, to: &str) {
    let until = Instant::now() + PATIENCE;
    loop {
        let peers = agent.get("/v1/peers");
        if peers["peers"].as_array().unwrap().iter().any(|peer| peer["identity"] == to && !peer["transport"].is_null())
        {
            return;
        }
        assert!(Instant::now() < until, "no link: {peers}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn run(user: &User, agent: &Running, args: &[&str]) -> Output {
    user.command(&[args, &["--json"]].concat()).env("TOWLINE_AGENT", &agent.socket).output().unwrap()
}

/// The error that a command ends with, by this exit code.
pub(super) fn fails(user: &User, agent: &Running, args: &[&str], code: i32) -> Value {
    let output = run(user, agent, args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"))["error"].clone()
}

fn text<'a>(error: &'a Value, field: &str) -> &'a str {
    error[field].as_str().unwrap()
}

#[test]
fn a_site_is_warmed_and_pinned_from_another() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "'home/*'", ("", ""));
    linked(&cloud, "towline://home/a");
    told(&user, &home, &["warm", "run@latest", "--wait"]);
    let own = told_json(&user, &cloud, &["pin", "run@latest", "--owner", "home"]);

    let warm = ["warm", "run/step-1", "--at", "cloud", "--pin", "1h", "--owner", "me", "--from", "home", "--wait"];
    let warmed = &told_json(&user, &home, &warm)["tasks"][0];
    assert_eq!(
        (&warmed["at"], &warmed["caller"], &warmed["state"]),
        (&json!("cloud/c"), &json!("home/a"), &json!("done"))
    );
    assert_eq!(warmed["report"]["missing"], 0);
    assert!(had(&cloud, "remote") > 20 << 20, "all of it came from the other site");
    assert_eq!(had(&cloud, "repository"), 0);
    hide_packs(&user);
    told(&user, &cloud, &["restore", "run/step-1", "out"]);
    assert_eq!(user.read("out/sub/b.bin"), noise(1, 20 << 20));

    // Again is as good as once, and nothing is brought.
    let again = told(&user, &home, &warm);
    assert!(again.contains("warm: run/step-1 at cloud/c") && again.contains("fetched: 0 B in 0 chunks"), "{again}");
    let pins = told_json(&user, &home, &["pins", "--at", "cloud/c"]);
    let pins = pins["pins"].as_array().unwrap();
    assert_eq!((pins.len(), &pins[0]["owner"]), (1, &json!("home/a/me")), "the agent's own pins are its own affair");
    assert_eq!(cloud.get("/v1/pins")["pins"].as_array().unwrap().len(), 2);
    let here = told_json(&user, &home, &["cache", "stat"]);
    let there = told_json(&user, &home, &["cache", "stat", "--at", "cloud"]);
    assert_eq!((&here["pins"], &there["pins"]), (&json!(0), &json!(2)));
    // Where things lie on a node is its own affair.
    assert!(here["dir"].is_string() && there.get("dir").is_none(), "{there}");
    let asked = format!("/v1/tasks/{}", warmed["id"].as_str().unwrap());
    assert!(cloud.get(&asked)["repository"].is_string());
    for path in ["/v1/tasks", &asked, &format!("{asked}/events")] {
        let answer = home.ask("GET", path, "Towline-At: cloud/c\r\n", "");
        let told = String::from_utf8_lossy(&answer.body);
        assert!(told.contains("home/a") && !told.contains("\"repository\":\""), "{told}");
    }
    assert!(warmed.get("repository").is_none(), "{warmed}");
    let top = told(&user, &home, &["top", "--once", "--at", "cloud/c"]);
    assert!(top.contains("run/step-1") && top.contains("home/a/me"), "{top}");

    let own = own["id"].as_str().unwrap();
    assert_eq!(fails(&user, &home, &["unpin", own, "--at", "cloud/c"], 3)["kind"], "not-found");
    told(&user, &home, &["unpin", pins[0]["id"].as_str().unwrap(), "--at", "cloud/c"]);
    assert_eq!(told_json(&user, &home, &["pins", "--at", "cloud"]), json!({ "pins": [] }));
    let pinned = told_json(&user, &home, &["pin", "run/step-1", "--at", "cloud", "--owner", "me", "--for", "1h"]);
    assert_eq!((&pinned["at"], &pinned["owner"]), (&json!("cloud/c"), &json!("home/a/me")));
    // What the agent does for its own node is not for others to see or stop.
    let checked = cloud.done("/v1/cache/check", &Value::Null);
    let check = format!("/v1/tasks/{}", checked["id"].as_str().unwrap());
    assert_eq!(home.ask("GET", &check, "Towline-At: cloud/c\r\n", "").refuses(404), "not-found");
    // One agent of a site is the one that was asked.
    let itself = told_json(&user, &home, &["warm", "run/step-1", "--at", "home", "--wait"]);
    assert_eq!(itself["tasks"][0]["at"], "home/a");
    home.stop();
    cloud.stop();
}

#[test]
fn who_may_not_is_told_why() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "'mars/*', 'home/b'", ("", ""));
    for args in [&["warm", "run/step-1", "--at", "cloud"][..], &["pins", "--at", "cloud/c"], &["top", "--at", "cloud"]]
    {
        let error = fails(&user, &home, args, 7);
        assert!(text(&error, "message").contains("agent cloud/c accepts no requests of home/a"), "{error}");
        assert!(text(&error, "help").contains("callers = [\"home/a\"]"), "{error}");
    }
    assert_eq!(cloud.get("/v1/tasks"), json!({ "tasks": [] }));
    for (at, what) in [("mars", "no agent of this site"), ("cloud/x", "this agent is not known here")] {
        let error = fails(&user, &home, &["warm", "run/step-1", "--at", at], 3);
        assert!(text(&error, "message").contains(what), "{error}");
        assert!(text(&error, "message").contains("cloud/c, home/a"), "those that are known: {error}");
    }
    assert_eq!(home.ask("GET", "/v1/pins", "Towline-At: a/b/c\r\n", "").refuses(400), "usage");
    home.stop();
    cloud.stop();
    let alone = Running::start(&user, "");
    let error = fails(&user, &alone, &["pins", "--at", "cloud"], 2);
    assert!(text(&error, "help").contains("towline identity issue"), "{error}");
    alone.stop();
}

#[test]
fn pins_of_a_caller_are_limited_and_those_of_the_node_are_not() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "'home/*'", ("", "[caller_pins]\nmax_time = '1h'\nmax_bytes = '25M'"));
    user.write("other/b.bin", &noise(2, 20 << 20));
    user.ok(&["save", "other", "run/step-2"]);
    for verb in [&["pin", "run/step-1", "--for", "2h"][..], &["warm", "run/step-1", "--pin", "2h"]] {
        let error = fails(&user, &home, &[verb, &["--at", "cloud"]].concat(), 7);
        assert!(
            text(&error, "message").contains("pin of another agent lasts too long: expected at most 1h"),
            "{error}"
        );
        assert!(text(&error, "help").contains("max_time in [caller_pins]"), "{error}");
    }
    let pinned = told_json(&user, &home, &["pin", "run/step-1", "--at", "cloud"]);
    assert!(pinned["expires"].is_string(), "without a time it lasts as long as it may: {pinned}");
    for verb in [&["pin", "run/step-2"][..], &["warm", "run/step-2", "--pin", "1h", "--wait"]] {
        let error = fails(&user, &home, &[verb, &["--at", "cloud"]].concat(), 1);
        assert!(text(&error, "message").contains("pins of home/a would keep too much"), "{error}");
        assert!(text(&error, "help").contains("towline unpin"), "{error}");
    }
    // Again is as good as once: the same chunks count once.
    told_json(&user, &home, &["warm", "run/step-1", "--pin", "1h", "--wait", "--at", "cloud"]);
    let own = told_json(&user, &cloud, &["pin", "run/step-2", "--for", "9d"]);
    assert!(told_json(&user, &cloud, &["pin", "run/step-2"])["expires"].is_null(), "{own}");
    home.stop();
    cloud.stop();
}

#[test]
fn what_nobody_may_ask_from_elsewhere() {
    let user = with_tree();
    let allow = "[[allow]]\nagents = 'home/*'\nnames = ['run/*']";
    let (home, cloud) = two_sites(&user, "'**'", ("", allow));
    let at = "Towline-At: cloud/c\r\n";
    let save = json!({ "path": user.work().join("tree"), "name": "stolen" }).to_string();
    for (method, path, body) in [
        ("POST", "/v1/save", save.as_str()),
        ("POST", "/v1/restore", "{}"),
        ("POST", "/v1/cache/evict", "{\"bytes\":1}"),
        ("GET", "/v1/files/run@latest/a.txt", ""),
        ("GET", "/v1/chunks", ""),
        ("GET", "/metrics", ""),
    ] {
        let answer = home.ask(method, path, at, body);
        assert_eq!(answer.headers["towline-at"], "cloud/c");
        // `scrapers` is for these alone.
        let why = if path == "/metrics" { "read no metrics" } else { "does not serve this to other agents" };
        assert!(String::from_utf8_lossy(&answer.body).contains(why), "{path}");
        assert_eq!(answer.refuses(403), "denied", "{path}");
    }
    assert!(!user.ok(&["ls"]).contains("stolen"));
    let long = format!("{{\"name\":\"{}\"}}", "a".repeat(2 << 20));
    assert_eq!(home.ask("POST", "/v1/warm", at, &long).refuses(413), "usage");

    // Names that the caller may not read are not brought for it.
    user.ok(&["save", "tree", "secret"]);
    let error = fails(&user, &home, &["warm", "secret", "--at", "cloud", "--wait"], 3);
    assert!(text(&error, "help").contains("or agent home/a may not read it: see [[allow]]"), "{error}");
    assert_eq!(fails(&user, &home, &["pin", "secret", "--at", "cloud"], 3)["kind"], "not-found");
    // Nor is a repository opened because somebody names its place: the agent here names it by its id.
    let address = cloud.listen.clone().unwrap();
    let call = || line(&user, "b", &address, ("cloud", "c")).unwrap();
    let warm = |repository: &str| {
        let body = json!({ "name": "run/step-1", "repository": repository }).to_string();
        exchange(call(), "POST", "/v1/warm", "", &body)
    };
    assert_eq!(warm(user.repository().to_str().unwrap()).refuses(400), "usage");
    assert_eq!(warm("01ARZ3NDEKTSV4RRFFQ69G5FAV").refuses(404), "not-found");
    let id = cloud.get("/health")["repositories"][0]["id"].clone();
    let health = exchange(call(), "GET", "/health", "", "").json(200);
    assert_eq!(health["repositories"], json!([{ "id": id }]), "where it is is not told");
    assert_eq!(warm(id.as_str().unwrap()).json(202)["caller"], "home/b");
    // Nor are requests passed on.
    let chain = exchange(call(), "GET", "/v1/pins", "Towline-At: home/a\r\n", "");
    assert!(String::from_utf8_lossy(&chain.body).contains("not forwarded"));
    assert_eq!(chain.refuses(403), "denied");
    home.stop();
    cloud.stop();
}

#[test]
fn forbidden_and_absent_are_answered_alike() {
    let user = with_tree();
    let allow = "[[allow]]\nagents = 'home/*'\nnames = ['run/*']";
    let (home, cloud) = two_sites(&user, "'**'", ("", allow));
    let asked = [
        "hidden/step-7",
        "hidden/step-8",
        "hidden",
        "hidden@latest",
        "hidden@upto=9",
        "hidden@min=loss",
        "hidden@max=nothing",
    ];
    let at = "Towline-At: cloud/c\r\n";
    let answers = || {
        let mut told = Vec::new();
        for name in asked {
            for (path, body) in [
                ("/v1/warm", json!({ "name": name })),
                ("/v1/warm", json!({ "name": name, "dry_run": true })),
                ("/v1/pins", json!({ "name": name })),
            ] {
                let answer = home.ask("POST", path, at, &body.to_string());
                assert_eq!(answer.status, 404, "{name}");
                told.push((answer.status, answer.headers, answer.body));
            }
            for args in [["warm", name, "--at", "cloud"], ["pin", name, "--at", "cloud"]] {
                let output = run(&user, &home, &args);
                assert_eq!(output.status.code(), Some(3), "{name}");
                told.push((0, BTreeMap::new(), [output.stdout, output.stderr].concat()));
            }
        }
        told
    };
    let absent = answers();
    for (step, loss) in [("7", "0.5"), ("8", "0.25")] {
        user.ok(&["save", "tree", &format!("hidden/step-{step}"), "--metric", &format!("loss={loss}")]);
    }
    let forbidden = answers();
    for (absent, forbidden) in absent.iter().zip(&forbidden) {
        assert_eq!(absent.0, forbidden.0);
        let [a, b] = [absent, forbidden].map(|answer| String::from_utf8_lossy(&answer.2).into_owned());
        assert_eq!(a, b);
        let [mut a, mut b] = [absent, forbidden].map(|answer| answer.1.clone());
        assert_eq!((a.remove("date").is_some(), a), (b.remove("date").is_some(), b));
    }
    // Its own node sees them, and so does who may.
    assert_eq!(told_json(&user, &cloud, &["pin", "hidden@min=loss"])["reason"], "hidden/step-8");
    assert_eq!(told_json(&user, &home, &["pin", "run@latest", "--at", "cloud"])["reason"], "run/step-1");
    home.stop();
    cloud.stop();
}

/// A line that is read and written as a socket is.
struct Plain(CallStream, Runtime);

impl Read for Plain {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.1.block_on(self.0.read(buffer))
    }
}

impl Write for Plain {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.block_on(self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.block_on(self.0.flush())
    }
}

/// Calls the agent `callee`, which is at `address`, with the certificate in a folder.
fn line(user: &User, folder: &str, address: &str, callee: (&str, &str)) -> towline::Result<Plain> {
    let credentials = Credentials::open(&user.work().join(folder), Arc::new(SystemClock))?;
    let callee = Identity::new(callee.0, callee.1)?;
    let runtime = Runtime::new().unwrap();
    let line = runtime.block_on(call(address, &credentials, &callee, &Arc::default()))?;
    Ok(Plain(line, runtime))
}

/// S6 of docs/security.md.
#[test]
fn calls_count_as_requests_and_one_too_many_is_told() {
    let user = with_tree();
    let admission = "[admission]\nrequests_per_second = 20";
    let (home, cloud) = two_sites(&user, "'home/*'", ("", admission));
    let mut call = line(&user, "b", cloud.listen.as_ref().unwrap(), ("cloud", "c")).unwrap();
    // All in one go, over one connection: what is forbidden counts, too.
    for n in 0..300 {
        let (path, end) = (["/v1/pins", "/v1/ledger"][n % 2], ["", "Connection: close\r\n"][n / 299]);
        write!(call, "GET {path} HTTP/1.1\r\nHost: agent\r\n{end}\r\n").unwrap();
    }
    let mut answers = String::new();
    let _ = call.read_to_string(&mut answers);
    let busy: Vec<_> = answers.split("HTTP/1.1 ").filter(|answer| answer.starts_with("429 ")).collect();
    assert!(answers.starts_with("HTTP/1.1 200 ") && answers.contains("HTTP/1.1 403 "), "{answers}");
    assert!(busy.len() > 100, "{} of 300 are refused: {answers}", busy.len());
    assert!(busy[0].to_lowercase().contains("retry-after: 1\r\n"), "{}", busy[0]);
    let error: Value = serde_json::from_str(busy[0].split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(
        (&error["error"]["kind"], text(&error["error"], "message")),
        (&json!("exhausted"), "too many requests of one agent: at most 20 a second",)
    );
    // Another agent is not touched, nor is the agent's own node.
    assert_eq!(told_json(&user, &home, &["pins", "--at", "cloud"]), json!({ "pins": [] }));
    for _ in 0..60 {
        cloud.get("/v1/pins");
    }
    home.stop();
    cloud.stop();
}

/// S7 of docs/security.md.
#[test]
fn silent_calls_do_not_keep_out_who_asks() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "'home/*'", ("", "[admission]\nlinks = 1024\nlinks_per_agent = 400"));
    let address = cloud.listen.clone().unwrap();
    let credentials = Credentials::open(&user.work().join("b"), Arc::new(SystemClock)).unwrap();
    let callee = Identity::new("cloud", "c").unwrap();
    let runtime = Runtime::new().unwrap();
    // One after another: few handshakes may be under way at a time.
    let silent: Vec<CallStream> =
        (0..300).map(|_| runtime.block_on(call(&address, &credentials, &callee, &Arc::default())).unwrap()).collect();
    let ready = async {
        let mut line = call(&address, &credentials, &callee, &Arc::default()).await.unwrap();
        line.write_all(b"GET /ready HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        line.read_to_string(&mut answer).await.unwrap();
        answer
    };
    // Less than a silent call may last.
    let ready = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), ready).await.unwrap() });
    assert!(ready.starts_with("HTTP/1.1 200 "), "{ready}");
    drop((silent, runtime));
    home.stop();
    cloud.stop();
}

#[test]
fn strangers_are_not_listened_to() {
    let user = with_tree();
    let (home, cloud) = two_sites(&user, "'**'", ("", ""));
    let address = cloud.listen.clone().unwrap();
    let known = line(&user, "b", &address, ("cloud", "c")).unwrap();
    assert_eq!(exchange(known, "GET", "/ready", "", "").status, 200);
    let error = line(&user, "b", &address, ("cloud", "d")).err().unwrap();
    assert!(error.kind() == ErrorKind::Denied && error.to_string().contains("another agent answers"), "{error}");

    // Another authority, of the same name: neither side trusts the other.
    user.ok(&["identity", "init", "--authority", "others"]);
    user.ok(&["identity", "issue", "home/a", "--to", "stranger", "--authority", "others"]);
    let error = line(&user, "stranger", &address, ("cloud", "c")).err().unwrap();
    assert!(error.to_string().contains("authority that is not trusted"), "{error}");
    // One that would take anybody for the agent is not taken for one.
    for folder in [None, Some("stranger")] {
        let got = ask_trusting(&user, folder, &address);
        assert!(got.is_empty(), "{folder:?}: {}", String::from_utf8_lossy(&got));
    }
    let stranger = "listen = '127.0.0.1:0'\nidentity = 'stranger'";
    let own = "repository = '../repo'\nsocket = 's.sock'\nmemory = '512M'\n";
    let cache = "[cache]\ndir = 'cache-s'\ncapacity = '256M'\nfree_floor = '0'\n";
    user.write(
        "s.toml",
        format!("{own}{stranger}\n{cache}[peers]\naddresses = ['{address}']\n{EVERYTHING}").as_bytes(),
    );
    let stranger = Running::from_file(&user, "s.toml");
    let error = fails(&user, &stranger, &["warm", "run/step-1", "--at", "cloud"], 3);
    assert!(text(&error, "message").contains(&format!("an agent at {address} (certificate was signed")), "{error}");
    stranger.stop();

    // One that was known and is revoked: the other side says so, after the handshake.
    let certificate = user.json(&["identity", "show", "a/tls.crt"], 0)["certificates"][0].clone();
    user.write("c/revoked", certificate["serial"].as_str().unwrap().as_bytes());
    let until = Instant::now() + PATIENCE;
    let refused = loop {
        let output = run(&user, &home, &["pins", "--at", "cloud/c"]);
        if !output.status.success() {
            break output;
        }
        assert!(Instant::now() < until, "the agent that was revoked is still listened to");
        std::thread::sleep(Duration::from_millis(100));
    };
    let error = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(7), "{error}");
    assert!(error.contains("agent cloud/c cannot be asked") && error.contains("revoked"), "{error}");
    home.stop();
    cloud.stop();
}

/// What the agent at `address` answers to one that verifies nobody, with the certificate in a folder or without one.
fn ask_trusting(user: &User, folder: Option<&str>, address: &str) -> Vec<u8> {
    let provider = Arc::new(default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(&[&TLS13]).unwrap();
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody));
    let mut config = match folder {
        None => builder.with_no_client_auth(),
        Some(folder) => {
            let file = |name: &str| user.work().join(folder).join(name);
            let chain = CertificateDer::pem_file_iter(file("tls.crt")).unwrap().map(Result::unwrap).collect();
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(file("tls.key")).unwrap()).unwrap()
        }
    };
    config.alpn_protocols = vec![ALPN_HTTP.to_vec()];
    let connection = ClientConnection::new(Arc::new(config), "towline".try_into().unwrap()).unwrap();
    let mut stream = StreamOwned::new(connection, TcpStream::connect(address).unwrap());
    let _ = stream.write_all(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let mut answer = Vec::new();
    assert!(stream.read_to_end(&mut answer).is_err(), "the handshake is refused");
    answer
}

/// Takes anybody for the server.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// TCP connections that the port of `address` has (<https://www.kernel.org/doc/html/latest/networking/proc_net_tcp.html>).
pub(super) fn connections(address: &str) -> usize {
    let port: u16 = address.rsplit_once(':').unwrap().1.parse().unwrap();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let (local, established) = (format!(":{port:04X}"), "01");
    let fields = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.filter(|fields| fields[1].ends_with(&local) && fields[3] == established).count()
}

#[test]
fn who_goes_away_is_let_go_and_who_dies_is_named() {
    let user = with_tree();
    // 20 MiB at a mebibyte a second: there is time to die.
    let slow = "transport = 'quic'\n[[limits]]\nsite = 'cloud'\nrate = '1M'";
    let (home, cloud) = two_sites(&user, "'home/a'", (slow, ""));
    linked(&cloud, "towline://home/a");
    told(&user, &home, &["warm", "run/step-1", "--wait"]);
    let begun = Instant::now();
    let warm = ["warm", "run/step-1", "--at", "cloud", "--from", "home", "--wait", "--json"];
    let waiting = user.command(&warm).env("TOWLINE_AGENT", &home.socket).spawn().unwrap();
    while cloud.get("/v1/tasks")["tasks"][0]["progress"]["done"].as_u64().unwrap_or(0) == 0 {
        assert!(begun.elapsed() < PATIENCE, "nothing comes");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Who follows for a while is followed through: the other agent keeps no connection for nobody.
    let until = |count: usize| {
        while connections(cloud.listen.as_ref().unwrap()) != count {
            assert!(begun.elapsed() < PATIENCE, "there are not {count} connections");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until(1);
    let id = cloud.get("/v1/tasks")["tasks"][0]["id"].as_str().unwrap().to_owned();
    let mut follower = UnixStream::connect(&home.socket).unwrap();
    let head = "HTTP/1.1\r\nHost: localhost\r\nTowline-At: cloud/c\r\n\r\n";
    follower.write_all(format!("GET /v1/tasks/{id}/events {head}").as_bytes()).unwrap();
    follower.read_exact(&mut [0; 64]).unwrap();
    until(2);
    drop(follower);
    until(1);
    cloud.signal(Signal::KILL);
    let output = waiting.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{error}");
    assert!(error.contains("cloud/c") && begun.elapsed() < PATIENCE, "{error}");
    cloud.ended();
    let error = fails(&user, &home, &["warm", "run/step-1", "--at", "cloud"], 6);
    assert!(text(&error, "message").contains("agent cloud/c cannot be asked"), "{error}");
    home.stop();
}

#[test]
fn a_source_that_is_restarted_is_waited_for() {
    let user = with_tree();
    // 20 MiB at four a second: there is time for a restart.
    let slow = "transport = 'quic'\n[[limits]]\nsite = 'cloud'\nrate = '4M'";
    let (home, cloud) = two_sites(&user, "'home/a'", (slow, ""));
    linked(&cloud, "towline://home/a");
    told(&user, &home, &["warm", "run/step-1", "--wait"]);
    let begun = cloud.post("/v1/warm", &json!({ "name": "run/step-1", "from": "home" }), 202);
    let until = Instant::now() + PATIENCE;
    while cloud.get("/v1/tasks")["tasks"][0]["progress"]["done"].as_u64().unwrap_or(0) == 0 {
        assert!(Instant::now() < until, "nothing comes");
        std::thread::sleep(Duration::from_millis(20));
    }
    home.signal(Signal::KILL);
    home.ended();
    let home = Running::from_file(&user, "a.toml");
    let (_, end) = cloud.events(&begun).pop().unwrap();
    assert_eq!((&end["state"], &end["report"]["missing"]), (&json!("done"), &json!(0)), "{end}");
    assert!(had(&cloud, "repository") == 0 && had(&cloud, "remote") >= 20 << 20, "{end}");
    home.stop();
    cloud.stop();
}
