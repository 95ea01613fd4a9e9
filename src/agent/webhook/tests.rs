//! Tests of what needs neither an agent nor a cluster; `tests/python/test_webhook.py` has the others.

use serde_json::{Value, json};

use super::annotations::PodAnnotations;
use super::config::{AccountRule, ServiceAccount, SidecarTemplate, WebhookConfig};
use super::inject::inject;
use super::pod::Pod;
use super::settings::settings;
use crate::agent::Config;
use crate::pattern::Patterns;

fn template() -> SidecarTemplate {
    SidecarTemplate {
        image: "towline:1".to_owned(),
        repository: "s3://models/team".to_owned(),
        endpoint: Some("https://s3.example.com".to_owned()),
        allow_http: false,
        peers: Vec::new(),
        memory: 256 << 20,
        cache: 1 << 30,
        cpu: "100m".to_owned(),
        env: [("TOWLINE_AGENT".to_owned(), "other".to_owned())].into(),
        start_seconds: 3600,
        identity: None,
    }
}

fn wanted(annotations: &[(&str, &str)]) -> PodAnnotations {
    let annotations = annotations.iter().map(|(key, text)| (format!("towline.dev/{key}"), (*text).to_owned()));
    PodAnnotations::of(&annotations.collect()).unwrap()
}

fn pod(containers: &Value) -> Pod {
    let object = json!({
        "metadata": { "annotations": {} },
        "spec": { "containers": containers, "securityContext": { "runAsUser": 7 }, "volumes": null },
    });
    Pod::of(&object).unwrap()
}

#[test]
fn settings_are_those_of_an_agent_whatever_names_and_folders_hold() {
    let wanted = wanted(&[
        ("watch", "/a\"b\\c] -> run"),
        ("restore", "data/v3 -> /data #1'"),
        ("stage", "models/base"),
        ("stage-memory", "2G"),
    ]);
    let text = settings(&template(), &wanted, 30);
    let config = Config::parse(&text, std::path::Path::new("/etc/towline/settings/agent.toml")).unwrap();
    assert_eq!(config.sidecar.watch[0].folder.to_str(), Some("/a\"b\\c]"));
    assert_eq!(config.sidecar.restore[0].1.to_str(), Some("/data #1'"));
    assert_eq!(config.sidecar.restore[0].0.to_string(), "data/v3");
    assert_eq!((config.grace.as_secs(), config.sidecar.stage.len()), (30, 1));
    assert_eq!(config.repositories[0].to_string(), "s3://models/team");
}

#[test]
fn the_container_that_mounts_the_folder_trains() {
    let mounts = json!([{ "name": "c", "mountPath": "/ckpt/" }]);
    let pod = pod(&json!([{ "name": "log" }, { "name": "train", "volumeMounts": mounts, "env": null }]));
    let patch = inject(&pod, &wanted(&[("watch", "/ckpt/7 -> run")]), &template()).unwrap();
    let paths: Vec<&str> = patch.iter().filter_map(|operation| operation["path"].as_str()).collect();
    assert!(paths.contains(&"/spec/containers/1/env/-") && !paths.iter().any(|path| path.contains("containers/0")));
    let sidecar = &patch.last().unwrap()["value"];
    let own = sidecar["volumeMounts"].as_array().unwrap();
    assert!(own.contains(&json!({ "name": "c", "mountPath": "/ckpt/" })), "{own:?}");
    assert_eq!(sidecar["securityContext"]["runAsUser"], 7);
    let agents = sidecar["env"].as_array().unwrap().iter().filter(|one| one["name"] == "TOWLINE_AGENT");
    assert_eq!(agents.count(), 1, "each variable once");
}

#[test]
fn a_service_account_has_its_own_names_alone() {
    let all = |text: &str| Patterns::of(&[text]).unwrap();
    let rule =
        |accounts: &str, names: &str| AccountRule { namespaces: all("ml"), accounts: all(accounts), names: all(names) };
    let config = WebhookConfig {
        listen: "127.0.0.1:0".parse().unwrap(),
        certificate: "/none".into(),
        sidecar: template(),
        trust_domain: None,
        issuer: None,
        allow: vec![rule("trainer", "run-7/*"), rule("**", "public/**")],
    };
    let account =
        |namespace: &str, name: &str| ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() };
    let may = |account: &ServiceAccount, name: &str| config.allows(account, &name.parse().unwrap());
    let trainer = account("ml", "trainer");
    assert!(may(&trainer, "run-7/step-1") && may(&trainer, "public/a/b") && !may(&trainer, "run-8/step-1"));
    let other = account("ml", "trainer.other");
    assert!(!may(&other, "run-7/step-1") && may(&other, "public/a"));
    assert!(!may(&account("ml2", "trainer"), "run-7/step-1") && !config.knows(&account("m", "trainer")));
    assert_eq!(trainer.identity("cluster.local").unwrap().to_string(), "spiffe://cluster.local/ns/ml/sa/trainer");
    assert!(account("ml/sa/x", "..").identity("cluster.local").is_err());
}

#[test]
fn users_that_are_no_service_accounts_are_nobody() {
    let account = ServiceAccount::of_user("system:serviceaccount:ml:trainer").unwrap();
    assert_eq!((account.namespace.as_str(), account.name.as_str()), ("ml", "trainer"));
    for user in ["ann", "", "system:serviceaccount:ml", "system:serviceaccount::a", "system:serviceaccount:ml:"] {
        assert!(ServiceAccount::of_user(user).is_err(), "{user}");
    }
}
