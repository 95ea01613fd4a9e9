//! The controller of scheduling gates, at a stand-in for the API server that is as strict as a real one.

use std::ops::Deref;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{PATIENCE, Running};

const RULES: &str =
    "[[gates.allow]]\nnamespaces = 'ml'\naccounts = 'trainer'\nnames = ['open/**', 'raw/**', 'new/*']\n";

/// A cluster with pods.
struct Pods(Cluster);

impl Deref for Pods {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0
    }
}

impl Pods {
    fn new() -> Self {
        Self(Cluster::new(include_str!("../kubernetes/gates.json")))
    }

    /// The agent of the cluster: advisor, cache and controller.
    fn agent(&self, more: &str) -> Running {
        self.agent_with("agent.toml", "cloud/n1", more)
    }

    fn agent_with(&self, file: &str, agent: &str, more: &str) -> Running {
        let section = format!("[gates]\nkubeconfig = 'kubeconfig'\nlease = '2s'\n{more}\n{RULES}");
        self.0.agent(file, agent, &section)
    }

    /// A pod of namespace `ml` with annotations, as the webhook leaves it, beside the gate of somebody else.
    fn pod(&self, name: &str, annotations: &Value) {
        let gates = json!([{ "name": "example.com/quota" }, { "name": "towline.dev/warm" }]);
        self.api.create(
            "pods",
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": name, "namespace": "ml", "annotations": annotations, "labels": { "app": "train" } },
                "spec": { "serviceAccountName": "trainer", "schedulingGates": gates,
                          "containers": [{ "name": "c", "image": "registry.example.com/t" }] },
                "status": { "phase": "Pending" },
            }),
        );
    }

    fn waiting(&self, name: &str, inputs: &str) {
        let annotations =
            json!({ "towline.dev/gate": "warm", "towline.dev/inputs": inputs, "towline.dev/warm-at": "cloud" });
        self.pod(name, &annotations);
    }

    fn is_gated(&self, name: &str) -> bool {
        let pod = self.api.get("pods", "ml", name);
        let gates: Vec<&str> = pod["spec"]["schedulingGates"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|gate| gate["name"].as_str())
            .collect();
        assert!(gates.contains(&"example.com/quota"), "{pod}");
        assert_eq!(pod["metadata"]["labels"]["app"], "train");
        gates.contains(&"towline.dev/warm")
    }

    fn until_open(&self, name: &str) {
        let end = Instant::now() + PATIENCE;
        while self.is_gated(name) {
            assert!(Instant::now() < end, "{name}: {:?}; wrong: {:?}", self.api.all("events"), self.api.wrong());
            sleep(Duration::from_millis(20));
        }
    }

    fn fine(self, agents: Vec<Running>) {
        self.0.fine(agents);
    }
}

#[test]
fn a_pod_is_scheduled_once_its_data_is_there() {
    let pods = Pods::new();
    pods.waiting("early", "open/step-1");
    let agent = pods.agent("");
    pods.until_open("early");
    assert_eq!(pods.events("DataReady"), ["warm: 2.0 MiB at site cloud"]);
    // It is held for the pod, which starts now.
    assert!(agent.get("/v1/hints")["commitments"][0]["ready"] == true, "{}", agent.get("/v1/hints"));
    pods.waiting("late", "open@latest");
    pods.until_open("late");
    pods.pod("fresh", &json!({ "towline.dev/gate": "warm", "towline.dev/watch": "/ckpt -> new" }));
    pods.until_open("fresh");
    // A pod that does not ask to wait any more, whoever gave it the gate.
    pods.pod("changed", &json!({ "other": "x" }));
    pods.until_open("changed");
    let figures = || String::from_utf8(agent.ask("GET", "/metrics", "", "").body).unwrap();
    let end = Instant::now() + PATIENCE;
    let expected = ["towline_gates_leader 1", "towline_gates_waiting_pods 0", "towline_gates_opened_total 4"];
    while !expected.iter().all(|figure| figures().lines().any(|line| line == *figure)) {
        assert!(Instant::now() < end, "{}", figures());
        sleep(Duration::from_millis(50));
    }
    pods.fine(vec![agent]);
}

#[test]
fn what_may_not_be_or_is_absent_keeps_a_pod_waiting_and_is_told() {
    let pods = Pods::new();
    pods.lab.user.ok(&["save", "data", "secret/x"]);
    let agent = pods.agent("");
    pods.waiting("denied", "raw/x");
    assert!(pods.events("DataRejected")[0].contains("may not go to site cloud"), "{:?}", pods.events("DataRejected"));
    pods.waiting("forbidden", "secret/x");
    pods.waiting("absent", "open/none");
    let end = Instant::now() + PATIENCE;
    while pods.events("DataAbsent").len() < 2 {
        assert!(Instant::now() < end, "{:?}", pods.events("DataAbsent"));
        sleep(Duration::from_millis(20));
    }
    let notes = pods.events("DataAbsent");
    assert!(
        notes.iter().all(|note| note.starts_with("there is no such name that service account ml/trainer may read"))
    );
    // Misspelt annotations: no webhook has seen this pod.
    pods.pod("impossible", &json!({ "towline.dev/gate": "warm", "towline.dev/input": "open/step-1" }));
    let end = Instant::now() + PATIENCE;
    while !pods.events("DataRejected").iter().any(|note| note.contains("annotation is unknown")) {
        assert!(Instant::now() < end, "{:?}", pods.events("DataRejected"));
        sleep(Duration::from_millis(20));
    }
    pods.lab.user.ok(&["save", "data", "open/none"]);
    pods.until_open("absent");
    for name in ["denied", "forbidden", "impossible"] {
        assert!(pods.is_gated(name), "{name}");
    }
    pods.fine(vec![agent]);
}

#[test]
fn more_than_may_be_held_waits_until_other_pods_are_gone() {
    let pods = Pods::new();
    pods.lab.user.ok(&["save", "data", "open/other"]);
    let agent = pods.agent("held_names = 1");
    pods.waiting("one", "open/step-1");
    pods.until_open("one");
    // Its data is there, and only must be held.
    pods.waiting("two", "open/other");
    let end = Instant::now() + PATIENCE;
    let is_told = |event: &Value| event["regarding"]["name"] == "two" && event["reason"] == "DataQueued";
    while !pods.api.all("events").iter().any(is_told) {
        assert!(Instant::now() < end, "{:?}", pods.api.all("events"));
        sleep(Duration::from_millis(20));
    }
    sleep(Duration::from_secs(1));
    assert!(pods.is_gated("two"));
    pods.api.delete("pods", "ml", "one");
    pods.until_open("two");
    pods.fine(vec![agent]);
}

#[test]
fn what_does_not_fit_starts_cold_if_so_set() {
    let pods = Pods::new();
    pods.lab.user.write("large/a", &crate::data::noise(9, 70 << 20));
    pods.lab.user.ok(&["save", "large", "open/large"]);
    let agent = pods.agent("admit_after = '1s'");
    // Created long ago, by the clock of the stand-in.
    pods.waiting("large", "open/large");
    pods.until_open("large");
    let notes = pods.events("DataNotReady");
    assert!(notes.iter().any(|note| note.starts_with("starts without its data after 1s: ")), "{notes:?}");
    pods.fine(vec![agent]);
}

#[test]
fn conflicts_outages_and_forgotten_changes_hold_no_pod_back_for_good() {
    let pods = Pods::new();
    pods.api.faults(|faults| faults.unavailable = true);
    let agent = pods.agent("");
    pods.waiting("one", "open/step-1");
    let end = Instant::now() + PATIENCE;
    while !agent.get("/health")["problems"].to_string().contains("gates, ") {
        assert!(Instant::now() < end, "{}", agent.get("/health"));
        sleep(Duration::from_millis(20));
    }
    pods.api.faults(|faults| (faults.unavailable, faults.conflicts) = (false, 2));
    pods.until_open("one");
    for forget in [false, true] {
        pods.api.cut_watches(forget);
        let name = if forget { "three" } else { "two" };
        pods.waiting(name, "open/step-1");
        pods.until_open(name);
    }
    // A pod that is deleted while it waits is forgotten.
    pods.waiting("gone", "open/none");
    sleep(Duration::from_millis(300));
    pods.api.delete("pods", "ml", "gone");
    pods.waiting("four", "open@latest");
    pods.until_open("four");
    pods.fine(vec![agent]);
}

#[test]
fn an_inventory_alone_opens_no_gate() {
    let pods = Pods::new();
    let agent = pods.agent("");
    pods.waiting("one", "open/step-1");
    pods.until_open("one");
    // The data is at its site by the inventory, but the agent there, which would hold it, does not answer.
    agent.stop();
    let other = pods.agent_with("other.toml", "home/a", "trust_domain = 'cloud'");
    pods.waiting("two", "open/step-1");
    assert!(pods.events("DataWarmFails")[0].contains("site cloud"), "{:?}", pods.events("DataWarmFails"));
    assert!(pods.is_gated("two"));
    let again = pods.agent_with("agent.toml", "cloud/n1", "");
    // Its own controller opens it, once it is elected.
    other.stop();
    pods.until_open("two");
    pods.fine(vec![again]);
}

#[test]
fn a_slow_api_server_for_events_opens_gates_all_the_same() {
    let pods = Pods::new();
    pods.api.faults(|faults| faults.no_events = true);
    let agent = pods.agent("");
    for n in 0..40 {
        pods.waiting(&format!("absent-{n}"), "open/none");
    }
    pods.waiting("there", "open/step-1");
    pods.until_open("there");
    pods.api.faults(|faults| faults.no_events = false);
    drop(agent);
}

#[test]
fn a_gate_that_may_not_be_opened_is_told_and_tried_again_after_a_pause() {
    let pods = Pods::new();
    pods.api.faults(|faults| faults.refuses_pods = true);
    let agent = pods.agent("");
    pods.waiting("one", "open/step-1");
    let note = pods.events("GateNotOpened").remove(0);
    assert!(note.contains("denied by policy keep-gates") && note.contains("warm: 2.0 MiB at site cloud"), "{note}");
    // Passes go on many times a second.
    sleep(Duration::from_secs(1));
    assert_eq!(pods.api.counted("patch pods"), 1);
    pods.api.faults(|faults| faults.refuses_pods = false);
    pods.until_open("one");
    pods.fine(vec![agent]);
}

#[test]
fn another_controller_goes_on() {
    let pods = Pods::new();
    let first = pods.agent("");
    pods.waiting("one", "open/step-1");
    pods.until_open("one");
    let second = pods.agent_with("second.toml", "cloud/n2", "");
    drop(first);
    pods.waiting("two", "open@latest");
    pods.until_open("two");
    // Each gate was opened once.
    assert_eq!(pods.api.counted("patch pods"), 2);
    pods.fine(vec![second]);
}
