//! Tests of what needs neither an agent nor a cluster; `tests/python/test_webhook.py` has the others.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::affinity::OwnAffinity;
use super::config::SidecarTemplate;
use super::inject::inject;
use super::pod::Pod;
use super::settings::settings;
use crate::agent::Config;
use crate::agent::pods::PodAnnotations;

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
    Pod::of(&object.to_string()).unwrap()
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
    assert_eq!(config.sidecar.restore[0].to.to_str(), Some("/data #1'"));
    assert_eq!(config.sidecar.restore[0].name.to_string(), "data/v3");
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
fn an_affinity_and_lists_beyond_those_of_a_pod_are_refused() {
    let size = |affinity: &str| {
        let raw: Box<RawValue> = serde_json::from_str(affinity).unwrap();
        OwnAffinity::of(Some(&raw)).map(|own| own.memory())
    };
    let nested = |depth: usize| format!("{}0{}", r#"{"":"#.repeat(depth), "}".repeat(depth));
    let list = |count: usize| format!("[{}]", vec!["0"; count].join(","));
    assert!(size(&nested(100)).unwrap() > 100 * 640, "an object of one member takes as much");
    assert!(size(&list(2000)).is_ok() && size(&list(2100)).is_err());
    assert!(size(&format!("\"{}\"", "x".repeat(65 << 10))).is_err());
    assert!(OwnAffinity::of(None).is_ok());
    let pod = |containers: usize| {
        Pod::of(&json!({ "spec": { "containers": vec![json!({ "name": "c" }); containers] } }).to_string())
    };
    assert!(pod(1000).is_ok() && pod(1001).is_err());
}

#[test]
fn volumes_that_nothing_can_be_written_to_are_known_and_the_context_is_that_of_the_training() {
    let object = json!({
        "metadata": { "annotations": { "other": 7 }, "labels": null },
        "spec": {
            "containers": [{ "name": "c", "securityContext": { "seLinuxOptions": { "level": "s0", "type": "t" } } }],
            "securityContext": { "runAsUser": 7 },
            "volumes": [
                { "name": "a", "emptyDir": {} },
                { "configMap": { "name": "x" }, "name": "b" },
                { "name": "c", "persistentVolumeClaim": { "claimName": "x", "readOnly": true } },
                { "name": "d", "nfs": { "readOnly": false } },
                { "name": "e", "emptyDir": null },
            ],
        },
    });
    let pod = Pod::of(&object.to_string()).unwrap();
    let read_only = |name: &str| pod.volume(name).map(|volume| volume.read_only);
    let told = ["a", "b", "c", "d", "e", "f"].map(read_only);
    assert_eq!(told, [Some(false), Some(true), Some(true), Some(false), Some(false), None]);
    let patch = inject(&pod, &wanted(&[("watch", "/ckpt -> run")]), &template()).unwrap();
    let context = &patch.last().unwrap()["value"]["securityContext"];
    assert_eq!(context["seLinuxOptions"], json!({ "level": "s0", "type": "t" }));
    assert!(patch.iter().any(|operation| operation["path"] == "/metadata/labels"));
}
