//! Time from the start of an agent until the controller for Kueue has decided on a queue of `KUEUE_WORKLOADS` workloads (default 1,000),
//! whose data is there: 100 names of a repository. The API server is the one of the tests, in the same process.
//!
//! `cargo bench --bench kueue`

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and fails by panicking")]

#[expect(dead_code, reason = "the tests use all of it")]
#[path = "../tests/it/kubernetes/mod.rs"]
mod kubernetes;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline::agent::{Agent, Client, Config};
use towline::clock::{Clock as _, SystemClock};
use towline::identity::Identity;
use towline::ops::SaveOptions;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{self, Location, StoreOptions};
use towline::transfer::identity::{AGENT_DAYS, AUTHORITY_DAYS, Authority, Subject};

use self::kubernetes::ApiServer;

const NAMES: usize = 100;
const AT: &str = "2026-11-01T00:00:01Z";

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let workloads = std::env::var("KUEUE_WORKLOADS").map_or(1000, |count| count.parse().unwrap());
    runtime.block_on(prepare(folder.path()));
    let api = ApiServer::start(&folder.path().join("agent"), include_str!("../tests/it/kubernetes/kueue.json"));
    api.write_kubeconfig(&folder.path().join("kubeconfig"), &folder.path().join("agent/ca.crt"), None);
    runtime.block_on(warm(folder.path()));
    println!("{workloads} workloads, {NAMES} names; seconds from the start of the agent until all are decided");
    for run in 0..5 {
        fill(&api, run, workloads);
        let begun = Instant::now();
        let agent = runtime.block_on(start(folder.path(), true));
        let started = begun.elapsed();
        while api.counted("patch workloads/status") < ((run + 1) * workloads) as u64 {
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("{:.2} (agent listens after {:.2})", begun.elapsed().as_secs_f64(), started.as_secs_f64());
        runtime.block_on(agent.shut_down(std::future::pending())).unwrap();
        let states = api.all("workloads");
        let ready = |one: &Value| one["status"]["admissionChecks"][0]["state"] == "Ready";
        assert!(states.iter().all(ready), "{}", states.iter().find(|one| !ready(one)).unwrap());
        for workload in 0..workloads {
            api.delete("workloads", "ml", &format!("w-{run}-{workload}"));
        }
    }
    assert_eq!(api.wrong(), [""; 0]);
}

/// A repository, certificates and sites.
async fn prepare(folder: &Path) {
    let path = |name: &str| folder.join(name);
    let now = SystemClock.now();
    let authority = Authority::create(&path("authority"), "bench", AUTHORITY_DAYS, now).unwrap();
    let (identity, dns_names) = (Identity::new("home", "agent").unwrap(), ["localhost".to_owned()]);
    let subject = Subject { identity: &identity, dns_names: &dns_names };
    authority.issue(&subject, &path("agent"), (AGENT_DAYS, now), false).unwrap();
    std::fs::create_dir(path("tree")).unwrap();
    let location = Location::directory(path("repository")).unwrap();
    let store = storage::open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let options = OpenOptions { cache: Some(path("index")), ..OpenOptions::default() };
    let (repository, _) = Repository::create(store, options).await.unwrap();
    for step in 0..NAMES {
        std::fs::write(path("tree/weights.bin"), step.to_string().repeat(20_000)).unwrap();
        repository
            .save(&path("tree"), &format!("run/step-{step}").parse().unwrap(), &SaveOptions::default())
            .await
            .unwrap();
    }
    std::fs::write(path("sites.toml"), "[[site]]\nname = \"home\"\n").unwrap();
}

async fn start(folder: &Path, controls: bool) -> Agent {
    let place = folder.display();
    let kueue =
        format!("[kueue]\nkubeconfig = \"{place}/kubeconfig\"\nallow = [{{ namespaces = \"ml\", names = \"**\" }}]\n");
    let settings = format!(
        r#"
repository = "{place}/repository"
socket = "{place}/run/agent.sock"
memory = "512M"
identity = "{place}/agent"
cache = {{ dir = "{place}/cache", capacity = "256M", free_floor = 0, inventory = "1s" }}
advisor = {{ sites = "{place}/sites.toml" }}

{}"#,
        if controls { &kueue } else { "" }
    );
    let file = folder.join("agent.toml");
    std::fs::write(&file, settings).unwrap();
    Agent::start(Config::read(&file).unwrap()).await.unwrap()
}

/// Fetches all names into the agent's cache, and waits until its inventory has them.
async fn warm(folder: &Path) {
    let agent = start(folder, false).await;
    let client = Client::at(agent.socket());
    for step in 0..NAMES {
        let begun: Value = client.post("/v1/warm", &json!({ "name": format!("run/step-{step}") })).await.unwrap();
        client.follow(begun["id"].as_str().unwrap(), |_| {}).await.unwrap();
    }
    let inputs: Vec<Value> = (0..NAMES).map(|step| json!({ "ref": format!("run/step-{step}") })).collect();
    let asked = json!({ "apiVersion": "towline.dev/v1", "inputs": inputs });
    loop {
        let hint: Value = client.post("/v1/hints?wait=10s", &asked).await.unwrap();
        if hint["candidates"][0]["bytes"]["missing"] == 0 && hint["candidates"][0]["bytes"]["in_flight"] == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    agent.shut_down(std::future::pending()).await.unwrap();
}

/// Workloads that have their quota.
fn fill(api: &ApiServer, run: usize, workloads: usize) {
    if run == 0 {
        let check = json!({ "metadata": { "name": "warm" }, "spec": { "controllerName": "towline.dev/warm" } });
        api.create("admissionchecks", check);
    }
    for workload in 0..workloads {
        let name = format!("w-{run}-{workload}");
        let containers: Vec<Value> = (0..4)
            .map(|n| json!({ "name": format!("c{n}"), "image": "registry.example.com/training:1", "command": ["python", "train.py"] }))
            .collect();
        let annotations = json!({ "towline.dev/inputs": format!("run/step-{}", workload % NAMES) });
        let template = json!({ "metadata": { "annotations": annotations }, "spec": { "containers": containers } });
        let spec = json!({ "podSets": [{ "name": "main", "count": 1, "template": template }] });
        let object = json!({ "metadata": { "name": name, "namespace": "ml" }, "spec": spec });
        api.create("workloads", object);
        let status = json!({
            "admission": { "clusterQueue": "q", "podSetAssignments": [{ "name": "main", "count": 1 }] },
            "conditions": [{ "type": "QuotaReserved", "status": "True", "lastTransitionTime": AT,
                             "reason": "QuotaReserved", "message": "" }],
            "admissionChecks": [{ "name": "warm", "state": "Pending", "lastTransitionTime": AT, "message": "" }],
        });
        api.apply("workloads", "ml", &name, &status);
    }
}
