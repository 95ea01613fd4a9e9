//! Time of an admission by the webhook: reviews of pods that ask for a sidecar and for a hint, over TLS, one after the other and
//! 16 at a time, as an API server sends them; the repository has `WEBHOOK_NAMES` names (default 1,000).
//!
//! `cargo bench --bench webhook`

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::stream::{self, StreamExt as _};
use reqwest::{Certificate, Client};
use serde_json::{Value, json};
use towline::agent::{Agent, Config};
use towline::clock::{Clock as _, SystemClock};
use towline::identity::Identity;
use towline::ops::SaveOptions;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{self, Location, StoreOptions};
use towline::transfer::identity::{AGENT_DAYS, AUTHORITY_DAYS, Authority, Subject};

/// Reviews that are measured, of either kind.
const REVIEWS: usize = 2000;
const AT_A_TIME: usize = 16;

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(measure());
}

async fn measure() {
    let folder = tempfile::tempdir().unwrap();
    let names = std::env::var("WEBHOOK_NAMES").map_or(1000, |names| names.parse().unwrap());
    prepare(folder.path(), names).await;
    let agent = Agent::start(Config::read(&folder.path().join("agent.toml")).unwrap()).await.unwrap();
    let authority = std::fs::read(folder.path().join("webhook/ca.crt")).unwrap();
    let client =
        Client::builder().tls_certs_only(Certificate::from_pem_bundle(&authority).unwrap()).no_proxy().build().unwrap();
    let url: Arc<str> = format!("https://localhost:{}/mutate", agent.webhook().unwrap().port()).into();
    println!("{names} names, {REVIEWS} reviews of each kind; milliseconds");
    println!("| pod | at a time | p50 | p99 | most | reviews a second |\n| --- | --- | --- | --- | --- | --- |");
    for (kind, annotations) in [
        ("watch", json!({ "towline.dev/watch": "/ckpt -> run", "towline.dev/warm": "models/base" })),
        ("hint", json!({ "towline.dev/inputs": "models/base", "towline.dev/hint": "preferred" })),
    ] {
        let body = review(&annotations);
        let ask = || {
            let (client, url, body) = (client.clone(), Arc::clone(&url), body.clone());
            async move {
                let begun = Instant::now();
                let answer = client.post(&*url).body(body).send().await.unwrap();
                let answer: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
                assert!(answer["response"]["patch"].is_string(), "{answer}");
                begun.elapsed()
            }
        };
        // Connections, and the first look at the repository.
        stream::iter(0..AT_A_TIME).map(|_| ask()).buffer_unordered(AT_A_TIME).collect::<Vec<_>>().await;
        for at_a_time in [1, AT_A_TIME] {
            let begun = Instant::now();
            let mut took: Vec<_> = stream::iter(0..REVIEWS).map(|_| ask()).buffer_unordered(at_a_time).collect().await;
            let rate = REVIEWS as f64 / begun.elapsed().as_secs_f64();
            took.sort_unstable();
            let millis = |took: Duration| took.as_secs_f64() * 1000.0;
            let (half, most) = (millis(took[REVIEWS / 2]), millis(took[REVIEWS - 1]));
            let tail = millis(took[REVIEWS * 99 / 100]);
            println!("| {kind} | {at_a_time} | {half:.2} | {tail:.2} | {most:.2} | {rate:.0} |");
        }
    }
    agent.shut_down(std::future::pending()).await.unwrap();
}

/// A repository, certificates, sites and settings.
async fn prepare(folder: &Path, names: usize) {
    let path = |name: &str| folder.join(name);
    let now = SystemClock.now();
    let authority = Authority::create(&path("authority"), "bench", AUTHORITY_DAYS, now).unwrap();
    let (identity, dns_names) = (Identity::new("home", "webhook").unwrap(), ["localhost".to_owned()]);
    let subject = Subject { identity: &identity, dns_names: &dns_names };
    authority.issue(&subject, &path("webhook"), (AGENT_DAYS, now), false).unwrap();
    std::fs::create_dir(path("tree")).unwrap();
    std::fs::write(path("tree/weights.bin"), vec![7; 100_000]).unwrap();
    let location = Location::directory(path("repository")).unwrap();
    let store = storage::open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let options = OpenOptions { cache: Some(path("index")), ..OpenOptions::default() };
    let (repository, _) = Repository::create(store, options).await.unwrap();
    let others = (0..names.saturating_sub(2)).map(|step| format!("run/step-{step}"));
    for name in others.chain(["models/base".to_owned()]) {
        repository.save(&path("tree"), &name.parse().unwrap(), &SaveOptions::default()).await.unwrap();
    }
    let sites = "[[site]]\nname = \"home\"\n\n[[site]]\nname = \"cloud\"\n";
    std::fs::write(path("sites.toml"), sites).unwrap();
    let folder = folder.display();
    let settings = format!(
        r#"
repository = "{folder}/repository"
socket = "{folder}/agent/agent.sock"
memory = "512M"
identity = "{folder}/webhook"
cache = {{ dir = "{folder}/cache", capacity = "64M", free_floor = 0, inventory = 0 }}
advisor = {{ sites = "{folder}/sites.toml" }}

[webhook]
listen = "127.0.0.1:0"
certificate = "{folder}/webhook"
image = "registry.example.com/towline:1"
allow = [{{ namespaces = "ml", names = "**" }}]
"#
    );
    std::fs::write(path("agent.toml"), settings).unwrap();
}

fn review(annotations: &Value) -> String {
    let containers: Vec<Value> = (0..4)
        .map(|n| json!({ "name": format!("c{n}"), "image": "registry.example.com/training:1", "command": ["python", "train.py"] }))
        .collect();
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": { "group": "", "version": "v1", "kind": "Pod" },
            "namespace": "ml",
            "operation": "CREATE",
            "object": {
                "metadata": { "annotations": annotations },
                "spec": { "containers": containers, "securityContext": { "runAsUser": 1000 }, "serviceAccountName": "trainer" },
            },
        },
    })
    .to_string()
}
