//! The controller for Kueue, at a stand-in for the API server that is as strict as a real one.

use std::ops::Deref;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{PATIENCE, Running};
use crate::kubernetes::NAMESPACE;

const RULES: &str =
    "[[kueue.allow]]\nnamespaces = 'ml'\naccounts = 'trainer'\nnames = ['open/**', 'raw/**', 'new/*']\n";

/// A cluster with Kueue.
struct Queues(Cluster);

impl Deref for Queues {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0
    }
}

impl Queues {
    fn new() -> Self {
        let queues = Self(Cluster::new(include_str!("../kubernetes/kueue.json")));
        queues.check("warm", None);
        queues.flavor("burst", &json!({ "towline.dev/site": "cloud" }));
        queues.flavor("plain", &json!({ "pool": "a" }));
        queues
    }

    /// The agent of the cluster: advisor, cache and controller.
    fn agent(&self, more: &str) -> Running {
        self.agent_with("agent.toml", "cloud/n1", more)
    }

    fn agent_with(&self, file: &str, agent: &str, more: &str) -> Running {
        let section = format!("[kueue]\nkubeconfig = 'kubeconfig'\nlease = '2s'\n{more}\n{RULES}");
        self.0.agent(file, agent, &section)
    }

    fn check(&self, name: &str, parameters: Option<&Value>) {
        let mut spec = json!({ "controllerName": "towline.dev/warm" });
        if let Some(parameters) = parameters {
            spec["parameters"] = parameters.clone();
        }
        self.api.create("admissionchecks", json!({ "metadata": { "name": name }, "spec": spec }));
    }

    fn flavor(&self, name: &str, labels: &Value) {
        self.api.create("resourceflavors", json!({ "metadata": { "name": name }, "spec": { "nodeLabels": labels } }));
    }

    /// A workload of namespace `ml` that reads `inputs`, before it has quota.
    fn workload(&self, name: &str, annotations: &Value) {
        let template = json!({
            "metadata": { "annotations": annotations },
            "spec": { "serviceAccountName": "trainer", "containers": [{
                "name": "c", "image": "registry.example.com/t", "resources": { "limits": { "nvidia.com/gpu": "8" } } }] },
        });
        let pod_sets = json!([{ "name": "main", "count": 2, "template": template }]);
        let spec = json!({ "queueName": "q", "active": true, "podSets": pod_sets });
        self.api.create(
            "workloads",
            json!({ "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
                    "metadata": { "name": name, "namespace": "ml" }, "spec": spec }),
        );
    }

    /// Gives a workload quota of a flavor, as Kueue does.
    fn reserve(&self, name: &str, flavor: &str) {
        self.reserve_with(name, flavor, &["warm"]);
    }

    fn reserve_with(&self, name: &str, flavor: &str, checks: &[&str]) {
        let at = "2026-11-01T00:00:01Z";
        let checks: Vec<Value> = checks
            .iter()
            .map(|check| json!({ "name": check, "state": "Pending", "lastTransitionTime": at, "message": "" }))
            .collect();
        let status = json!({
            "admission": { "clusterQueue": "q", "podSetAssignments": [
                { "name": "main", "flavors": { "nvidia.com/gpu": flavor }, "count": 2 }] },
            "conditions": [{ "type": "QuotaReserved", "status": "True", "lastTransitionTime": now(),
                             "reason": "QuotaReserved", "message": "", "observedGeneration": 1 }],
            "admissionChecks": checks,
        });
        self.api.apply("workloads", "ml", name, &status);
    }

    /// A workload that waits for the check.
    fn waiting(&self, name: &str, inputs: &str) {
        self.workload(name, &json!({ "towline.dev/inputs": inputs, "other": "x" }));
        self.reserve(name, "burst");
    }

    fn state(&self, name: &str) -> Value {
        let workload = self.api.get("workloads", "ml", name);
        workload["status"]["admissionChecks"][0].clone()
    }

    /// Waits until the check of a workload has a state.
    fn until(&self, name: &str, state: &str) -> Value {
        self.until_it(name, |check| check["state"] == state)
    }

    fn until_it(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            let check = self.state(name);
            if wanted(&check) {
                return check;
            }
            assert!(Instant::now() < end, "{name}: {check}; wrong: {:?}", self.api.wrong());
            sleep(Duration::from_millis(20));
        }
    }

    fn fine(self, agents: Vec<Running>) {
        self.0.fine(agents);
    }
}

fn message(check: &Value) -> &str {
    check["message"].as_str().unwrap()
}

fn now() -> String {
    chrono::Utc::now().format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[test]
fn a_workload_starts_once_its_data_is_there() {
    let cluster = Queues::new();
    cluster.waiting("early", "open/step-1");
    let agent = cluster.agent("");
    let check = cluster.until("early", "Ready");
    assert_eq!(message(&check), "warm: 2.0 MiB at site cloud");
    assert_ne!(check["lastTransitionTime"], "2026-11-01T00:00:01Z", "the state has changed");
    // Fields that Kueue manages are unchanged.
    let workload = cluster.api.get("workloads", "ml", "early");
    assert_eq!(workload["status"]["conditions"][0]["type"], "QuotaReserved");
    let managers: Vec<_> =
        workload["metadata"]["managedFields"].as_array().unwrap().iter().map(|one| one["manager"].clone()).collect();
    assert_eq!(managers, ["kueue-admission", "towline"]);
    // It is held for the pods that start now.
    let pins = agent.get("/v1/cache");
    assert!(pins["pinned"].as_u64().unwrap_or(0) > 2_000_000 || pins.to_string().contains("pin"), "{pins}");
    let active = cluster.api.get("admissionchecks", "", "warm")["status"]["conditions"][0].clone();
    assert_eq!(
        (&active["type"], &active["status"], &active["observedGeneration"]),
        (&json!("Active"), &json!("True"), &json!(1))
    );

    // Later ones, with and without data.
    cluster.waiting("late", "open@latest");
    assert_eq!(message(&cluster.until("late", "Ready")), "warm: 2.0 MiB at site cloud");
    cluster.workload("nothing", &json!({ "other": "x" }));
    cluster.reserve("nothing", "burst");
    assert_eq!(message(&cluster.until("nothing", "Ready")), "no data is named");
    cluster.workload("fresh", &json!({ "towline.dev/watch": "/ckpt -> new" }));
    cluster.reserve("fresh", "burst");
    let check = cluster.until("fresh", "Ready");
    assert_eq!(message(&check), "no data is named; there is no step new@latest yet, so none is restored");
    // Two checks of this controller are decided together.
    cluster.check("again", None);
    cluster.workload("twice", &json!({ "towline.dev/inputs": "open/step-1" }));
    cluster.reserve_with("twice", "burst", &["warm", "again"]);
    cluster.until("twice", "Ready");
    let twice = cluster.api.get("workloads", "ml", "twice")["status"]["admissionChecks"].clone();
    assert!(twice.as_array().unwrap().iter().all(|check| check["state"] == "Ready"), "{twice}");
    // One of them is reset, as Kueue does.
    let reset =
        json!({ "name": "again", "state": "Pending", "lastTransitionTime": now(), "message": "Reset to Pending" });
    let other = twice.as_array().unwrap().iter().find(|check| check["name"] == "warm").unwrap();
    cluster.api.merge("workloads", "ml", "twice", &json!({ "admissionChecks": [other, reset] }));
    cluster.until_it("twice", |_| {
        let checks = cluster.api.get("workloads", "ml", "twice")["status"]["admissionChecks"].clone();
        checks.as_array().unwrap().iter().all(|check| check["state"] == "Ready" && !message(check).contains("Reset"))
    });
    // Without a flavor of a site, it is that of the cluster.
    cluster.workload("plain", &json!({ "towline.dev/inputs": "open/step-1" }));
    cluster.reserve("plain", "plain");
    assert_eq!(message(&cluster.until("plain", "Ready")), "warm: 2.0 MiB at site cloud");
    let figures = String::from_utf8(agent.ask("GET", "/metrics", "", "").body).unwrap();
    assert!(figures.lines().any(|line| line == "towline_kueue_leader 1"), "{figures}");
    let decisions =
        figures.lines().find_map(|line| line.strip_prefix("towline_kueue_decisions_total{state=\"ready\"} "));
    // One is made again if the workload changes while it is written.
    let decisions: u64 = decisions.unwrap().parse().unwrap();
    assert!((7..=9).contains(&decisions), "{decisions}");
    cluster.fine(vec![agent]);
}

#[test]
fn only_workloads_with_quota_wait_and_only_for_checks_of_this_controller() {
    let cluster = Queues::new();
    cluster.api.create(
        "admissionchecks",
        json!({ "metadata": { "name": "other" }, "spec": { "controllerName": "example.com/other" } }),
    );
    let parameters = json!({ "apiGroup": "example.com", "kind": "Config", "name": "c" });
    cluster.check("bad", Some(&parameters));
    cluster.workload("no-quota", &json!({ "towline.dev/inputs": "open/step-1" }));
    for name in ["foreign", "bad", "inactive", "over"] {
        cluster.workload(name, &json!({ "towline.dev/inputs": "open/step-1" }));
    }
    cluster.reserve_with("foreign", "burst", &["other"]);
    cluster.reserve_with("bad", "burst", &["bad"]);
    let mut inactive = cluster.api.get("workloads", "ml", "inactive");
    inactive["spec"]["active"] = false.into();
    cluster.api.replace("workloads", inactive);
    cluster.reserve("inactive", "burst");
    cluster.reserve("over", "burst");
    let finished = json!({ "conditions": [{ "type": "Finished", "status": "True", "lastTransitionTime": now(),
        "reason": "Succeeded", "message": "" }] });
    cluster.api.merge("workloads", "ml", "over", &finished);
    let agent = cluster.agent("");
    cluster.waiting("ours", "open/step-1");
    cluster.until("ours", "Ready");
    for name in ["foreign", "bad", "inactive"] {
        assert_eq!(cluster.state(name)["state"], "Pending", "{name}");
    }
    assert_eq!(cluster.state("no-quota"), Value::Null);
    let condition = |check: &str| cluster.api.get("admissionchecks", "", check)["status"]["conditions"][0].clone();
    assert_eq!(condition("other"), Value::Null);
    assert_eq!(
        (&condition("bad")["status"], &condition("bad")["reason"]),
        (&json!("False"), &json!("BadParametersRef"))
    );
    cluster.fine(vec![agent]);
}

#[test]
fn the_policy_rejects_and_what_is_forbidden_is_as_absent() {
    let cluster = Queues::new();
    cluster.lab.user.ok(&["save", "data", "secret/x"]);
    let agent = cluster.agent("retry_after = '25s'");
    cluster.waiting("denied", "open/step-1, raw/x");
    let check = cluster.until("denied", "Rejected");
    assert_eq!(message(&check), "raw/x: the policy does not let it come here: may not go to site cloud");
    assert_eq!(cluster.events("DataRejected").len(), 1);

    let texts: Vec<String> = ["secret/x", "secret/y", "open/none"]
        .iter()
        .enumerate()
        .map(|(n, inputs)| {
            let name = format!("absent-{n}");
            cluster.waiting(&name, inputs);
            message(&cluster.until_it(&name, |check| !message(check).is_empty())).replace(inputs, "NAME")
        })
        .collect();
    assert!(texts[0].starts_with("there is no such name that service account ml/trainer may read"), "{}", texts[0]);
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    // It may come yet; then it gives its quota back.
    assert_eq!(cluster.state("absent-2")["state"], "Pending");
    cluster.lab.user.ok(&["save", "data", "open/none"]);
    cluster.until("absent-2", "Ready");
    for name in ["absent-0", "absent-1"] {
        let check = cluster.until(name, "Retry");
        assert!(check["requeueAfterSeconds"].is_null(), "{check}");
    }

    // Impossible annotations are told at once.
    cluster.workload("impossible", &json!({ "towline.dev/wach": "/ckpt" }));
    cluster.reserve("impossible", "burst");
    let check = cluster.until("impossible", "Rejected");
    assert!(message(&check).contains("annotation is unknown"), "{check}");
    cluster.fine(vec![agent]);
}

#[test]
fn what_does_not_fit_gives_the_quota_back_or_starts_cold_if_so_set() {
    let cluster = Queues::new();
    cluster.lab.user.write("large/a", &crate::data::noise(9, 70 << 20));
    cluster.lab.user.ok(&["save", "large", "open/large"]);
    let agent = cluster.agent("admit_after = '8s'");
    cluster.waiting("large", "open/large");
    cluster.until_it("large", |check| message(check).contains("its bytes do not fit beside what is pinned"));
    let check = cluster.until("large", "Ready");
    // The warm fails, or waits to be tried again.
    assert!(message(&check).starts_with("admitted without its data after 8s: "), "{check}");
    cluster.fine(vec![agent]);
}

#[test]
fn an_api_server_that_is_away_conflicts_or_forgets_holds_nothing_up_for_good() {
    let cluster = Queues::new();
    cluster.api.faults(|faults| faults.unavailable = true);
    let agent = cluster.agent("");
    cluster.waiting("one", "open/step-1");
    // It is told meanwhile, where the metrics count it.
    let problems = || agent.get("/health")["problems"].clone();
    let until = |wanted: &dyn Fn(&Value) -> bool| {
        let end = Instant::now() + PATIENCE;
        while !wanted(&problems()) {
            assert!(Instant::now() < end, "{}", problems());
            sleep(Duration::from_millis(20));
        }
    };
    until(&|problems| problems[0].as_str().is_some_and(|text| text.starts_with("Kueue, election: cannot take part")));
    cluster.api.faults(|faults| (faults.unavailable, faults.conflicts) = (false, 3));
    cluster.until("one", "Ready");
    until(&|problems| *problems == json!([]));
    assert!(cluster.api.counted("patch workloads/status") >= 2);
    // Watches that end, with and without the changes meanwhile.
    cluster.api.cut_watches(false);
    cluster.waiting("two", "open/step-1");
    cluster.until("two", "Ready");
    cluster.waiting("three", "open/step-1");
    cluster.api.cut_watches(true);
    cluster.until("three", "Ready");
    cluster.api.delete("workloads", "ml", "three");
    cluster.api.faults(|faults| faults.gone_by_status = true);
    cluster.waiting("gone", "open/step-1");
    cluster.api.cut_watches(true);
    cluster.until("gone", "Ready");
    cluster.api.faults(|faults| faults.delay = Duration::from_millis(100));
    cluster.waiting("four", "open/step-1");
    cluster.until("four", "Ready");
    cluster.fine(vec![agent]);
}

#[test]
fn of_two_controllers_one_acts_and_the_other_goes_on() {
    let cluster = Queues::new();
    let first = cluster.agent("");
    cluster.waiting("one", "open/step-1");
    cluster.until("one", "Ready");
    let second = cluster.agent_with("second.toml", "cloud/n2", "");
    let holder = || cluster.api.get("leases", NAMESPACE, "towline-kueue")["spec"]["holderIdentity"].clone();
    let before = holder();
    assert!(before.as_str().unwrap().starts_with("cloud/n1-"), "{before}");
    cluster.waiting("two", "open/step-1");
    cluster.until("two", "Ready");
    assert_eq!(holder(), before);
    // Killed, it gives nothing back: its lease must run out.
    first.signal(rustix::process::Signal::KILL);
    cluster.waiting("three", "open/step-1");
    cluster.until("three", "Ready");
    assert!(holder().as_str().unwrap().starts_with("cloud/n2-"));
    assert_eq!(cluster.api.get("leases", NAMESPACE, "towline-kueue")["spec"]["leaseTransitions"], 1);
    // Asked to end, it does.
    second.stop();
    assert_eq!(holder(), "");
    assert_eq!(cluster.api.wrong(), [""; 0]);
}

/// Clusters of `MultiKueue` and their check; `home` is not connected.
fn clusters(cluster: &Queues) {
    let parameters = json!({ "apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": "all" });
    let spec = json!({ "controllerName": "kueue.x-k8s.io/multikueue", "parameters": parameters });
    cluster.api.create("admissionchecks", json!({ "metadata": { "name": "multi" }, "spec": spec }));
    let names = ["far", "elsewhere", "home", "cloud"];
    cluster.api.create("multikueueconfigs", json!({ "metadata": { "name": "all" }, "spec": { "clusters": names } }));
    for name in names {
        let labels = if name == "far" { json!({ "towline.dev/site": "home" }) } else { json!({}) };
        cluster.api.create("multikueueclusters", json!({ "metadata": { "name": name, "labels": labels }, "spec": {} }));
        let status = json!({ "conditions": [{ "type": "Active", "status": if name == "home" { "False" } else { "True" },
            "lastTransitionTime": now(), "reason": "Active", "message": "" }] });
        cluster.api.apply("multikueueclusters", "", name, &status);
    }
}

#[test]
fn clusters_are_nominated_where_the_data_costs_least_one_more_each_round() {
    let cluster = Queues::new();
    clusters(&cluster);
    // One at the site that may look at all data.
    let agent = cluster.agent_with("a.toml", "home/a", "dispatch = true\nround = '700ms'\ntrust_domain = 'cloud'");
    cluster.waiting("denied", "raw/x, open/step-1");
    assert_eq!(
        message(&cluster.until("denied", "Rejected")),
        "raw/x: rule at line 17: raw data stays at home: may not go to site cloud"
    );
    let nominated = |name: &str| {
        let workload = cluster.api.get("workloads", "ml", name);
        workload["status"]["nominatedClusterNames"].as_array().cloned().unwrap_or_default()
    };
    let until = |name: &str, wanted: &dyn Fn(&[Value]) -> bool| {
        let end = Instant::now() + PATIENCE;
        loop {
            let names = nominated(name);
            if wanted(&names) {
                return names;
            }
            assert!(Instant::now() < end, "{names:?}; wrong: {:?}", cluster.api.wrong());
            sleep(Duration::from_millis(20));
        }
    };
    let waiting = |name: &str, inputs: &str| {
        cluster.workload(name, &json!({ "towline.dev/inputs": inputs }));
        cluster.reserve_with(name, "plain", &["multi"]);
    };
    // The repository is at home, where `far` is; the others follow in their order.
    waiting("one", "open/step-1");
    assert_eq!(until("one", &|names| !names.is_empty())[0], "far");
    let all = until("one", &|names| names.len() == 3);
    assert_eq!(all, ["far", "cloud", "elsewhere"]);
    assert!(cluster.events("ClusterNominated")[0].starts_with("cluster far is nominated"));

    // Raw data goes anywhere but to `cloud`.
    waiting("raw", "raw/x");
    assert_eq!(until("raw", &|names| names.len() == 2), ["far", "elsewhere"]);
    // Kueue applies its part as a whole, and can so remove what was nominated.
    let mut status = cluster.api.get("workloads", "ml", "one")["status"].clone();
    let status = status.as_object_mut().unwrap();
    status.remove("nominatedClusterNames");
    status.insert("clusterName".to_owned(), "far".into());
    let status = Value::from(status.clone());
    cluster.api.apply("workloads", "ml", "one", &status);
    let after = cluster.api.get("workloads", "ml", "one");
    assert_eq!(after["status"]["clusterName"], "far");
    assert_eq!(
        (&after["status"]["admission"]["clusterQueue"], after["status"]["conditions"].as_array().unwrap().len()),
        (&json!("q"), 1)
    );
    sleep(Duration::from_secs(2));
    assert_eq!(nominated("one"), [""; 0], "it has its cluster");
    assert_eq!(nominated("raw"), ["far", "elsewhere"], "no round names a site where it may not go");

    // Kueue that merges its part instead.
    cluster.workload("merged", &json!({ "towline.dev/inputs": "open/step-1" }));
    let status = cluster.api.get("workloads", "ml", "raw")["status"].clone();
    let mut status = status.as_object().unwrap().clone();
    status.remove("nominatedClusterNames");
    cluster.api.merge("workloads", "ml", "merged", &Value::from(status));
    until("merged", &|names| names.len() == 3);
    cluster.api.merge("workloads", "ml", "merged", &json!({ "nominatedClusterNames": null, "clusterName": "cloud" }));
    sleep(Duration::from_secs(1));
    assert_eq!(nominated("merged"), [""; 0]);

    // Other checks first, and a job without data runs anywhere.
    cluster.workload("any", &json!({ "other": "x" }));
    cluster.reserve_with("any", "plain", &["warm", "multi"]);
    assert_eq!(until("any", &|names| names.len() == 3), ["far", "elsewhere", "cloud"]);
    let forbidden = "secret/x";
    waiting("forbidden", forbidden);
    assert!(cluster.events("NoCluster")[0].contains("there is no such name"));
    cluster.fine(vec![agent]);
}

#[test]
fn a_kubeconfig_that_cannot_be_used_is_told_at_the_start() {
    let cluster = Queues::new();
    let work = cluster.lab.user.work();
    let kubeconfig = std::fs::read_to_string(work.join("kubeconfig")).unwrap();
    let start = |text: &str| {
        std::fs::write(work.join("kubeconfig"), text).unwrap();
        cluster.agent("").stop();
    };
    start(&kubeconfig);
    for (text, told) in [
        (kubeconfig.replace("https://", "http://"), "[kueue] kubeconfig cannot be used"),
        ("{".to_owned(), "[kueue] kubeconfig cannot be used"),
    ] {
        std::fs::write(work.join("kubeconfig"), text).unwrap();
        let error = cluster.lab.user.fails(&["agent", "--config", "agent.toml"], 2);
        assert!(error["message"].as_str().unwrap().contains(told), "{error}");
    }
    std::fs::remove_file(work.join("kubeconfig")).unwrap();
    cluster.lab.user.fails(&["agent", "--config", "agent.toml"], 2);
    // Outside of a cluster there is no service account.
    let settings =
        String::from_utf8(cluster.lab.user.read("agent.toml")).unwrap().replace("kubeconfig = 'kubeconfig'\n", "");
    cluster.lab.user.write("agent.toml", settings.as_bytes());
    let error = cluster.lab.user.fails(&["agent", "--config", "agent.toml"], 3);
    assert!(error["message"].as_str().unwrap().contains("this is no pod of a cluster"), "{error}");
}

#[test]
fn an_agent_of_the_site_that_is_named_fetches_and_holds() {
    let cluster = Queues::new();
    let user = &cluster.lab.user;
    user.ok(&["identity", "issue", "cloud/gateway", "--to", "gateway"]);
    let listen = crate::ports::free_address();
    let settings = |callers: &str| {
        format!(
            "repository = '../repo'\nsocket = 'gateway-run/agent.sock'\nmemory = '256M'\nidentity = 'gateway'\ngrace = '5s'\n\
             listen = '{listen}'\n{callers}\n\
             [cache]\ndir = 'gateway-cache'\ncapacity = '64M'\nfree_floor = '0'\ninventory = '100ms'\n\
             [[allow]]\nagents = '**'\nnames = '**'\n"
        )
    };
    user.write("gateway.toml", settings("").as_bytes());
    let gateway = Running::from_file(user, "gateway.toml");
    let peers = format!("holders = 'cloud/gateway'\ntrust_domain = 'cloud'\n[peers]\naddresses = ['{listen}']\n");
    let agent = cluster.agent_with("a.toml", "home/a", &peers);
    cluster.waiting("one", "open/step-1");
    // It does not let itself be called.
    cluster.until_it("one", |check| message(check).contains("accepts no requests of home/a"));
    gateway.stop();
    user.write("gateway.toml", settings("callers = 'home/*'").as_bytes());
    let gateway = Running::from_file(user, "gateway.toml");
    assert_eq!(message(&cluster.until("one", "Ready")), "warm: 2.0 MiB at site cloud");
    let pins = gateway.get("/v1/pins").to_string();
    assert!(pins.contains("home/a/agent") && pins.contains("hint h_"), "{pins}");

    // The hold of a deleted workload is released.
    user.write("large/a", &crate::data::noise(9, 70 << 20));
    user.ok(&["save", "large", "open/large"]);
    cluster.waiting("two", "open/large");
    cluster.until_it("two", |check| message(check).contains("would keep too much"));
    cluster.api.delete("workloads", "ml", "two");
    assert_eq!(gateway.get("/v1/pins")["pins"].as_array().unwrap().len(), 1);
    cluster.fine(vec![agent, gateway]);
}
