//! Requests without a credential, to the webhook and to the paths for schedulers: they take no more memory than the agent was given,
//! and keep no other request out.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::{Value, json};

use super::hints::fixture;
use super::{Answer, Running, exchange};
use crate::policy::PolicyFixture;
use crate::ports::free_address;

const MIB: u64 = 1 << 20;
/// Bytes that the longest request may have.
const LEN_MAX: usize = 4 << 20;
/// Limit of the memory that one request takes beside its own bytes.
const TAKEN_MAX: u64 = 48 * MIB;

/// An agent with a webhook and an advisor.
struct Lab {
    fixture: PolicyFixture,
    agent: Running,
    webhook: String,
}

impl Lab {
    fn new() -> Self {
        let lab = fixture();
        for (agent, folder) in [("home/wh", "wh"), ("home/h1", "h1")] {
            lab.user.ok(&["identity", "issue", agent, "--to", folder, "--dns", "localhost"]);
        }
        let sites = std::fs::read_to_string(lab.user.work().join("sites.toml")).unwrap();
        let sites = sites.replace("name = 'cloud'\n\n", "name = 'cloud'\ninfra = 'aws/us-east-1'\n\n");
        lab.user.write("sites.toml", sites.as_bytes());
        let webhook = free_address();
        let settings = format!(
            "repository = '../repo'\nsocket = 'run/agent.sock'\nmemory = '256M'\nidentity = 'h1'\nhttp = '127.0.0.1:0'\n\
             [advisor]\nsites = 'sites.toml'\n[[advisor.skypilot]]\nusers = '*'\nnames = ['open/**', 'raw/**']\n\
             [cache]\ndir = 'cache'\ncapacity = '64M'\nfree_floor = '0'\n\
             [webhook]\nlisten = '{webhook}'\ncertificate = 'wh'\nimage = 'towline:1'\n\
             [[webhook.allow]]\nnamespaces = 'ml'\nnames = ['open/**', 'raw/**', 'run']\n"
        );
        lab.user.write("strangers.toml", settings.as_bytes());
        let agent = Running::from_file(&lab.user, "strangers.toml");
        Self { fixture: lab, agent, webhook }
    }

    fn tls(&self, from: TcpStream) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.fixture.user.work().join("wh/ca.crt")).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
        StreamOwned::new(client, from)
    }

    /// The answer to a review of `object`.
    fn review(&self, operation: &str, object: &str) -> Value {
        let body = format!(
            r#"{{"request":{{"uid":"u","kind":{{"group":"","kind":"Pod"}},"namespace":"ml","operation":"{operation}","object":{object}}}}}"#
        );
        let stream = self.tls(TcpStream::connect(&self.webhook).unwrap());
        exchange(stream, "POST", "/mutate", "", &body).json(200)["response"].clone()
    }

    fn skypilot(&self, task: &str) -> Answer {
        let inner = json!({ "task": task, "skypilot_config": "", "user": "name: a\n" }).to_string();
        let stream = TcpStream::connect(self.agent.http.as_ref().unwrap()).unwrap();
        exchange(stream, "POST", "/skypilot", "Content-Type: application/json\r\n", &json!(inner).to_string())
    }

    /// The result of `work`, and the most bytes of memory that the agent took meanwhile.
    fn taken<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        let (before, over) = (self.agent.own_bytes(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let watched = scope.spawn(|| {
                let mut peak = 0;
                while !over.load(Ordering::Relaxed) {
                    peak = peak.max(self.agent.own_bytes());
                    sleep(Duration::from_millis(2));
                }
                peak
            });
            let made = work();
            over.store(true, Ordering::Relaxed);
            (made, watched.join().unwrap().saturating_sub(before))
        })
    }
}

/// A list of as many of `each` as a request may have.
fn list_of(each: &str, len: usize) -> String {
    format!("[{}]", vec![each; len / (each.len() + 1)].join(","))
}

#[test]
fn a_review_takes_little_memory_whatever_is_in_it() {
    let lab = Lab::new();
    let asks = r#""metadata":{"annotations":{"towline.dev/watch":"/ckpt -> run"}}"#;
    let len = LEN_MAX - 600;
    let nested = format!("{}0{}", r#"{"":"#.repeat(120), "}".repeat(120));
    let deep = list_of(&nested, len);
    let mounts = list_of(r#"{"name":"","mountPath":""}"#, 20_000);
    let containers = list_of(&format!(r#"{{"name":"","volumeMounts":{mounts}}}"#), len);
    let names: Vec<String> = (0..len / 12).map(|at| format!(r#""{at:06x}":"""#)).collect();
    let objects = [
        format!(r#"{{"metadata":{{}},"spec":{{}},"x":{deep}}}"#),
        format!(r#"{{{asks},"spec":{{"containers":[],"affinity":{deep}}}}}"#),
        format!(r#"{{{asks},"spec":{{"containers":[],"volumes":{deep}}}}}"#),
        format!(r#"{{{asks},"spec":{{"containers":{containers}}}}}"#),
        format!(r#"{{"metadata":{{"annotations":{{{}}}}},"spec":{{}}}}"#, names.join(",")),
    ];
    assert_eq!(lab.review("CREATE", r#"{"metadata":{},"spec":{"containers":[]}}"#)["allowed"], true);
    for (at, object) in objects.iter().enumerate() {
        for operation in ["CREATE", "DELETE"] {
            let (answer, taken) = lab.taken(|| lab.review(operation, object));
            assert!(taken < TAKEN_MAX, "{operation} {at}: {} MiB, {answer}", taken / MIB);
        }
    }
    lab.agent.stop();
}

/// Values that stand for many others take their memory, as do objects of one member, lines, and choices for each place.
#[test]
fn a_task_takes_little_memory_whatever_is_in_it() {
    let lab = Lab::new();
    let reads = "name: x\nenvs:\n  TOWLINE_INPUTS: open/step-1\n";
    let answer = lab.skypilot(reads);
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    let aliases = |first: &str, ones: usize, twos: usize| {
        let (ones, twos) = (vec!["*a"; ones].join(","), vec!["*c"; twos].join(","));
        format!("{reads}a: &a {first}\nc: &c [{ones}]\nd: [{twos}]\n")
    };
    let len = LEN_MAX - 600;
    let tasks = [
        (aliases("{a: 0}", 1000, 240), false),
        (aliases(&format!("\"{}\"", "x".repeat(100_000)), 400, 1), false),
        (format!("{reads}x: {}\n", list_of("{a: 0}", len)), false),
        (format!("{reads}{}", "#\n".repeat(len / 10)), true),
        (format!("{reads}resources:\n  x: \"{}\"\n", "1,".repeat(len / 3)), true),
        (format!("{reads}{}x: [\n", "\n".repeat(len / 4)), false),
    ];
    for (at, (task, readable)) in tasks.iter().enumerate() {
        let (answer, taken) = lab.taken(|| lab.skypilot(task));
        assert!(taken < TAKEN_MAX, "{at}: {} MiB", taken / MIB);
        assert_eq!(answer.status, if *readable { 200 } else { 400 }, "{at}: {}", String::from_utf8_lossy(&answer.body));
    }
    lab.agent.stop();
}

#[test]
fn calls_whose_bodies_do_not_come_keep_no_scheduler_out() {
    let lab = Lab::new();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for len in [60, LEN_MAX].repeat(6) {
            let (lab, over) = (&lab, &over);
            scope.spawn(move || {
                let head = format!("POST /skypilot HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len}\r\n\r\n\"");
                while !over.load(Ordering::Relaxed) {
                    let mut stream = TcpStream::connect(lab.agent.http.as_ref().unwrap()).unwrap();
                    stream.write_all(head.as_bytes()).unwrap();
                    // Nothing comes until the agent gives up.
                    let _ = std::io::Read::read(&mut stream, &mut [0; 16]);
                }
            });
        }
        sleep(Duration::from_millis(500));
        let statuses: Vec<u16> = (0..20).map(|_| lab.skypilot("name: x\n").status).collect();
        over.store(true, Ordering::Relaxed);
        assert_eq!(statuses, [200; 20]);
    });
    lab.agent.stop();
}
