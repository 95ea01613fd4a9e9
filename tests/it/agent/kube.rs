//! Scheduler extender: kube-scheduler's own wire format, filtered by the policy, scored by the data.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::hints::fixture;
use super::{Answer, PATIENCE, Running, exchange};
use crate::policy::PolicyFixture;

/// As the upstream test has it: <https://github.com/kubernetes/kube-scheduler/blob/e87dbdd/extender/v1/types_test.go>.
const UPSTREAM_ARGS: &str = r#"{"Pod":{"metadata":{"name":"podname"},"spec":{"containers":null},"status":{}},"Nodes":{"metadata":{},"items":[{"metadata":{"name":"nodename"},"spec":{},"status":{"daemonEndpoints":{"kubeletEndpoint":{"Port":0}},"nodeInfo":{"machineID":"","systemUUID":"","bootID":"","kernelVersion":"","osImage":"","containerRuntimeVersion":"","kubeletVersion":"","kubeProxyVersion":"","operatingSystem":"","architecture":""}}}]},"NodeNames":["node1"]}"#;

const RULES: &str = "[[advisor.kube]]\nnamespaces = 'team-*'\nnames = ['open/**', 'raw/**']\n";

/// An agent at `home` that answers a scheduler by `rules`.
fn advisor(lab: &PolicyFixture, rules: &str) -> Running {
    if !lab.user.work().join("h1").exists() {
        lab.user.ok(&["identity", "issue", "home/h1", "--to", "h1"]);
    }
    let sites = std::fs::read_to_string(lab.user.work().join("sites.toml")).unwrap();
    let sites = sites
        .replace("name = 'home'\nrepo", "name = 'home'\nnodes = 'home-*'\nrepo")
        .replace("name = 'cloud'\n\n", "name = 'cloud'\nnodes = ['cloud-*', 'gke-*']\n\n");
    lab.user.write("sites.toml", sites.as_bytes());
    let settings = format!(
        "repository = '../repo'\nsocket = 'run/agent.sock'\nmemory = '256M'\nidentity = 'h1'\nhttp = '127.0.0.1:0'\n\
         [advisor]\nsites = 'sites.toml'\n{rules}"
    );
    lab.user.write("advisor.toml", settings.as_bytes());
    Running::from_file(&lab.user, "advisor.toml")
}

/// Calls as kube-scheduler does: without a token.
fn call(agent: &Running, verb: &str, body: &str) -> Answer {
    let stream = TcpStream::connect(agent.http.as_ref().unwrap()).unwrap();
    exchange(stream, "POST", &format!("/kube/{verb}"), "Content-Type: application/json\r\n", body)
}

fn pod(namespace: &str, inputs: &str) -> Value {
    json!({
        "metadata": {
            "name": "train", "namespace": namespace, "creationTimestamp": null,
            "annotations": { "towline.dev/inputs": inputs },
        },
        "spec": { "containers": [{ "name": "c", "resources": { "limits": { "nvidia.com/gpu": "8", "cpu": 4 } } }] },
        "status": {},
    })
}

fn by_name(namespace: &str, inputs: &str, nodes: &[&str]) -> String {
    json!({ "Pod": pod(namespace, inputs), "Nodes": null, "NodeNames": nodes }).to_string()
}

#[test]
fn the_vectors_of_upstream_are_understood() {
    let lab = fixture();
    let agent = advisor(&lab, RULES);
    let sent: Value = serde_json::from_str(UPSTREAM_ARGS).unwrap();
    let filtered = call(&agent, "filter", UPSTREAM_ARGS).json(200);
    // Nodes count, if both are there, and come back as they were sent.
    let expected = json!({
        "Nodes": sent["Nodes"], "NodeNames": null, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": "",
    });
    assert_eq!(filtered, expected);
    let text = String::from_utf8(call(&agent, "filter", UPSTREAM_ARGS).body).unwrap();
    let nodes = &UPSTREAM_ARGS[UPSTREAM_ARGS.find("\"Nodes\"").unwrap()..UPSTREAM_ARGS.find(",\"NodeNames\"").unwrap()];
    assert!(text.contains(nodes), "{text}");
    let scored = String::from_utf8(call(&agent, "prioritize", UPSTREAM_ARGS).body).unwrap();
    assert_eq!(scored, r#"[{"Host":"nodename","Score":0}]"#);
    // All in lower case, as upstream reads it, too.
    let lower = call(&agent, "filter", &UPSTREAM_ARGS.to_lowercase()).json(200);
    assert_eq!(lower["Nodes"]["items"].as_array().unwrap().len(), 1);
    let names = r#"{"pod":{"metadata":{"name":"podname"}},"nodenames":["node1"]}"#;
    assert_eq!(call(&agent, "filter", names).json(200)["NodeNames"], json!(["node1"]));
    for wrong in ["", "[]", r#"{"Nodes":{}}"#, r#"{"Pod":{},"Nodes":{"items":[7]}}"#] {
        assert_ne!(call(&agent, "filter", wrong).json(200)["Error"], "", "{wrong}");
        assert_eq!(call(&agent, "prioritize", wrong).status, 400, "{wrong}");
    }
    agent.stop();
}

#[test]
fn nodes_fail_by_the_policy_alone_and_are_scored_by_the_data() {
    let lab = fixture();
    lab.user.ok(&["save", "data", "raw/x", "--label", "sensitivity=restricted"]);
    let agent = advisor(&lab, RULES);
    let nodes = ["home-1", "cloud-1", "gke-a-1", "elsewhere"];
    let filter = |body: &str| call(&agent, "filter", body).json(200);
    let raw = filter(&by_name("team-a", "raw/x", &nodes));
    assert_eq!((&raw["NodeNames"], &raw["Nodes"]), (&json!(["home-1"]), &Value::Null), "{raw}");
    let failed = &raw["FailedAndUnresolvableNodes"];
    let reason = failed["cloud-1"].as_str().unwrap();
    assert!(reason.starts_with("towline: raw/x: ") && reason.contains("raw data stays at home"), "{reason}");
    assert_eq!(failed["gke-a-1"], failed["cloud-1"]);
    assert!(failed["elsewhere"].as_str().unwrap().contains("the node has no site"), "{failed}");
    assert_eq!((&raw["FailedNodes"], &raw["Error"]), (&json!({}), &json!("")));

    // Every node has the reason, so it is short.
    for name in ["raw/y", "raw/z"] {
        lab.user.ok(&["cp", "raw/x", name]);
    }
    let end = Instant::now() + PATIENCE;
    let several = loop {
        let several = filter(&by_name("team-a", "raw/x, raw/y, raw/z, raw/x", &nodes[..2]));
        // Names that were saved within the last second may be absent.
        if several["Error"] == "" {
            break several;
        }
        assert!(Instant::now() < end, "{several}");
        sleep(Duration::from_millis(50));
    };
    let reason = several["FailedAndUnresolvableNodes"]["cloud-1"].as_str().unwrap();
    assert!(reason.contains("raw data stays at home, and other inputs: may not go to site cloud"), "{reason}");

    // Data that may go anywhere fails no node, however much must move there.
    let body = by_name("team-a", "open@latest", &nodes[..3]);
    assert_eq!(filter(&body)["NodeNames"], json!(nodes[..3]));
    let scores = call(&agent, "prioritize", &body).json(200);
    let score =
        |host: &str| scores.as_array().unwrap().iter().find(|one| one["Host"] == host).unwrap()["Score"].clone();
    assert_eq!(score("home-1"), 10, "the repository is there");
    assert!(score("cloud-1").as_u64().unwrap() < 10 && score("cloud-1") == score("gke-a-1"), "{scores}");

    // Whole nodes: their label, then their name, then their zone.
    let node = |name: &str, labels: Value| json!({ "metadata": { "name": name, "labels": labels } });
    let nodes = json!({ "metadata": {}, "items": [
        node("a", json!({ "towline.dev/site": "home" })),
        node("home-2", json!({ "towline.dev/site": "cloud" })),
        node("b", json!({ "topology.kubernetes.io/zone": "home" })),
        node("home-3", json!({ "towline.dev/site": "moon" })),
        node("c", Value::Null),
    ]});
    let body = json!({ "Pod": pod("team-b", "raw/x"), "Nodes": nodes, "NodeNames": null }).to_string();
    let whole = filter(&body);
    let passed = whole["Nodes"]["items"].as_array().unwrap();
    let passed: Vec<_> = passed.iter().map(|node| node["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!((passed, &whole["NodeNames"]), (vec!["a", "b"], &Value::Null), "{whole}");
    assert_eq!(whole["FailedAndUnresolvableNodes"].as_object().unwrap().len(), 3);

    // Many nodes in one call.
    let many: Vec<String> = (0..5_000).map(|at| format!("{}-{at}", ["home", "cloud", "other"][at % 3])).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let passed = filter(&by_name("team-a", "raw/x", &many))["NodeNames"].as_array().unwrap().len();
    assert_eq!(passed, many.iter().filter(|name| name.starts_with("home")).count());
    agent.stop();
}

#[test]
fn a_scheduler_asks_only_for_what_the_rules_permit() {
    let lab = fixture();
    let agent = advisor(&lab, RULES);
    let error = |namespace: &str, inputs: &str| {
        let answer = call(&agent, "filter", &by_name(namespace, inputs, &["home-1"])).json(200);
        assert_eq!(answer["NodeNames"], Value::Null);
        answer["Error"].as_str().unwrap().to_owned()
    };
    // Names that the pods of a namespace may not read are as absent ones.
    let told = |namespace: &str, name: &str| error(namespace, name).replace(name, "NAME");
    assert_eq!(told("other", "open/step-1"), told("other", "open/step-9"));
    assert!(told("other", "open/step-1").starts_with("towline: no such name"), "{}", told("other", "open/step-1"));
    assert!(error("team-a", "open/step-9").contains("open/step-1"), "the nearest name that it may read");
    assert!(error("team-a", "no name").starts_with("towline: "), "a malformed name");
    // Scores are no reason to fail a pod.
    let scored = call(&agent, "prioritize", &by_name("other", "open/step-1", &["home-1"])).json(200);
    assert_eq!(scored, json!([{ "Host": "home-1", "Score": 0 }]));
    // A pod that names nothing runs anywhere.
    let silent = call(&agent, "filter", &by_name("other", " , ", &["home-1", "x"])).json(200);
    assert_eq!(silent["NodeNames"], json!(["home-1", "x"]));
    let mut wrong = pod("team-a", "open/step-1");
    wrong["metadata"]["annotations"]["towline.dev/objective"] = json!("fast");
    let wrong = json!({ "Pod": wrong, "NodeNames": ["home-1"] }).to_string();
    let message = call(&agent, "filter", &wrong).json(200);
    assert!(message["Error"].as_str().unwrap().contains("train: towline.dev/objective"), "{message}");
    assert!(error("team-a", &"open/step-1,".repeat(257)).contains("at most 256 names"));
    let many = |count: usize| {
        let answer = call(&agent, "filter", &by_name("team-a", "open/step-1", &vec!["n"; count])).json(200);
        answer["Error"].as_str().unwrap().to_owned()
    };
    assert_eq!(many(20_000), "");
    assert!(many(20_001).contains("not ExtenderArgs"), "{}", many(20_001));
    let long = format!("{}{}", " ".repeat(17 << 20), by_name("team-a", "open/step-1", &["home-1"]));
    assert!(matches!(call(&agent, "filter", &long).status, 413 | 507), "more than a call may have");
    // Not for web pages, which could send it without being asked.
    let stream = TcpStream::connect(agent.http.as_ref().unwrap()).unwrap();
    let body = by_name("team-a", "open/step-1", &["home-1"]);
    let page = exchange(stream, "POST", "/kube/filter", "Origin: http://example.com\r\n", &body);
    assert_eq!(page.refuses(403), "denied");
    // Nothing else is open without the token.
    let stream = TcpStream::connect(agent.http.as_ref().unwrap()).unwrap();
    assert_eq!(exchange(stream, "POST", "/v1/hints", "", "{}").status, 401);
    agent.stop();

    let closed = advisor(&lab, "");
    assert_eq!(call(&closed, "filter", UPSTREAM_ARGS).status, 401);
    assert_eq!(closed.ask("POST", "/kube/filter", "", UPSTREAM_ARGS).refuses(404), "not-found");
    closed.stop();
}

/// Answers are in memory until they are sent, and nobody needs a token for them.
#[test]
fn who_does_not_read_an_answer_is_cut_off_soon() {
    let lab = fixture();
    let agent = advisor(&lab, RULES);
    let node = json!({ "metadata": { "name": "n", "annotations": { "long": "x".repeat(14 << 20) } } });
    let nodes = json!({ "metadata": {}, "items": [node] });
    let body = json!({ "Pod": pod("other", " , "), "Nodes": nodes, "NodeNames": null }).to_string();
    let head = format!("POST /kube/filter HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    // Any other client has a minute.
    let is_cut_off = |seconds: u64| {
        let mut stream = TcpStream::connect(agent.http.as_ref().unwrap()).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut begin = [0; 12];
        stream.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200");
        sleep(Duration::from_secs(seconds));
        let mut read = Vec::new();
        // It may end with a reset.
        let _ = stream.read_to_end(&mut read);
        read.len() < body.len()
    };
    assert!([7, 14, 28].into_iter().any(is_cut_off));
    agent.stop();
}

/// Nobody needs a token for calls, so one caller must not keep another one out.
#[test]
fn who_sends_slowly_or_does_not_read_keeps_no_scheduler_out() {
    let lab = fixture();
    let agent = advisor(&lab, RULES);
    let send = |len: usize, sent: &[u8]| {
        let mut stream = TcpStream::connect(agent.http.as_ref().unwrap()).unwrap();
        let head = format!("POST /kube/filter HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        // It may have been cut off already.
        let _ = stream.write_all(sent);
        stream
    };
    let answered = || {
        let body = by_name("team-a", "open/step-1", &["home-1"]);
        assert_eq!(call(&agent, "filter", &body).json(200)["NodeNames"], json!(["home-1"]));
    };
    let slow: Vec<_> = (0..300).map(|_| send(100, b"{")).collect();
    answered();
    let long: Vec<_> = (0..3).map(|_| send(16 << 20, &vec![b' '; (16 << 20) - 1])).collect();
    answered();
    let node = json!({ "metadata": { "name": "n", "annotations": { "long": "x".repeat(5 << 20) } } });
    let nodes = json!({ "metadata": {}, "items": [node] });
    let body = json!({ "Pod": pod("other", " , "), "Nodes": nodes, "NodeNames": null }).to_string();
    let unread: Vec<_> = (0..12)
        .map(|_| {
            let mut stream = send(body.len(), body.as_bytes());
            let mut begin = [0; 12];
            stream.read_exact(&mut begin).unwrap();
            assert_eq!(&begin, b"HTTP/1.1 200");
            stream
        })
        .collect();
    answered();
    drop((slow, long, unread));
    agent.stop();
}
