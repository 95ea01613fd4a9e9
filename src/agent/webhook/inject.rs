//! The sidecar as a patch of a pod (<https://datatracker.ietf.org/doc/html/rfc6902>). Pure: the same pod gives the same patch.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::config::SidecarTemplate;
use super::pod::{Container, Pod, SIDECAR, VolumeMount};
use super::settings::settings;
use crate::agent::pods::{AUTHORITIES, PodAnnotations, SETTINGS};
use crate::error::{Error, Result};
use crate::limits::MIB;

/// Label of pods that the network policy of the chart lets connect to agents.
const PEER: &str = "towline.dev/peer";
/// Folder with the files below.
const SETTINGS_FOLDER: &str = "/etc/towline";
/// The projected token.
pub(super) const TOKEN_FILE: &str = "/etc/towline/token/token";
/// Certificates of the authorities.
pub(super) const AUTHORITIES_FILE: &str = "/etc/towline/settings/ca.crt";
/// Audience of the token.
pub(super) const AUDIENCE: &str = "towline";
/// Seconds that a token is valid; the kubelet renews it before.
const TOKEN_SECONDS: u64 = 3600;
/// Volumes of the sidecar.
const RUN: &str = "towline-run";
const CACHE: &str = "towline-cache";
const FILES: &str = "towline-settings";
const TOKEN: &str = "towline-token";
/// Beginning of the names of volumes for folders that no volume of the pod has.
const FOLDER: &str = "towline-folder";
/// Folders of the sidecar's image and its volumes.
const OF_SIDECAR: [&str; 9] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/run/towline", "/var/lib/towline", "/proc"];
/// Memory of the process beside its budget, in bytes.
const OVERHEAD: u64 = 64 * MIB;
/// Chunks of a cache are not all of its volume.
const CACHE_MARGIN: u64 = 1 << 30;

/// A patch that is being made.
struct Patch<'p> {
    pod: &'p Pod,
    /// Index of the container that trains.
    trains: usize,
    operations: Vec<Value>,
    volumes: Vec<Value>,
    /// Mounts of the sidecar.
    mounts: Vec<Value>,
    /// Further mounts of the container that trains.
    shared: Vec<Value>,
}

/// Operations that give `pod` the sidecar that `wanted` asks for.
///
/// # Errors
/// Usage, for a pod that cannot have it: the reason, and what to change.
pub(super) fn inject(pod: &Pod, wanted: &PodAnnotations, template: &SidecarTemplate) -> Result<Vec<Value>> {
    if pod.spec.os.as_ref().is_some_and(|os| os.name != "linux") {
        return Err(Error::usage("the sidecar runs on Linux only").at("spec.os.name"));
    }
    if pod.spec.host_network
        && pod.spec.dns_policy.as_deref() != Some("ClusterFirstWithHostNet")
        && !template.peers.is_empty()
    {
        return Err(Error::usage("a pod in the network of its node does not find the agents of the cluster")
            .at("spec.dnsPolicy")
            .expected("ClusterFirstWithHostNet"));
    }
    let seconds = pod.termination_seconds();
    // The training ends first; what it leaves is the sidecar's.
    let grace = wanted.grace.map_or(seconds / 2, |grace| grace.as_secs());
    if wanted.grace.is_some() && grace >= seconds {
        return Err(Error::usage("the last saves have no time")
            .at("towline.dev/grace")
            .expected(format!("less than terminationGracePeriodSeconds, {seconds}"))
            .got(format!("{grace}s")));
    }
    let mut patch = Patch {
        pod,
        trains: training(pod, wanted)?,
        operations: Vec::new(),
        volumes: Vec::new(),
        mounts: Vec::new(),
        shared: Vec::new(),
    };
    patch.own_volumes(wanted, template)?;
    for folder in wanted.folders() {
        patch.share(folder)?;
    }
    let sidecar = patch.sidecar(wanted, template)?;
    patch.operations.push(annotate(SETTINGS, &settings(template, wanted, grace)));
    if let Some(identity) = &template.identity {
        patch.operations.push(annotate(AUTHORITIES, &identity.authorities));
    }
    patch.label();
    patch.append("/spec/volumes", pod.spec.volumes.is_none());
    patch.train();
    if pod.spec.init_containers.is_none() {
        patch.operations.push(add("/spec/initContainers", &json!([])));
    }
    patch.operations.push(add("/spec/initContainers/-", &sidecar));
    Ok(patch.operations)
}

/// Index of the container that trains: the named one, else the first that mounts one of the folders, else the first.
fn training(pod: &Pod, wanted: &PodAnnotations) -> Result<usize> {
    let containers = &pod.spec.containers.0;
    if containers.is_empty() {
        return Err(Error::usage("pod has no container"));
    }
    if let Some(name) = &wanted.container {
        return containers.iter().position(|container| *container.name == **name).ok_or_else(|| {
            Error::usage("pod has no such container")
                .at("towline.dev/container")
                .expected(containers.iter().map(|container| &*container.name).collect::<Vec<_>>().join(", "))
                .got(name)
        });
    }
    let mounts_one = |container: &Container| wanted.folders().any(|folder| mount_of(container, folder).is_some());
    Ok(containers.iter().position(mounts_one).unwrap_or(0))
}

/// True if a mount at `path` would hide what the sidecar needs.
fn hides(path: &str) -> bool {
    let path = std::path::Path::new(path);
    OF_SIDECAR.iter().any(|own| path.starts_with(own) || std::path::Path::new(own).starts_with(path))
}

/// The mount of `container` that `folder` lies in: the deepest.
fn mount_of<'c>(container: &'c Container, folder: &str) -> Option<&'c VolumeMount> {
    let holds = |mount: &&VolumeMount| std::path::Path::new(folder).starts_with(&*mount.mount_path);
    container
        .volume_mounts
        .iter()
        .flat_map(|list| &list.0)
        .filter(holds)
        .max_by_key(|mount| mount.mount_path.trim_end_matches('/').len())
}

impl Patch<'_> {
    fn training(&self) -> &Container {
        &self.pod.spec.containers.0[self.trains]
    }

    fn volume(&mut self, name: &str, (source, of): (&str, Value), folder: &str, read_only: bool) -> Result<()> {
        if self.pod.volume(name).is_some() {
            return Err(Error::usage("name of a volume is reserved for the sidecar").at("spec.volumes").got(name));
        }
        self.volumes.push(json!({ "name": name, source: of }));
        let mut mount = json!({ "name": name, "mountPath": folder });
        if read_only {
            mount["readOnly"] = true.into();
        }
        self.mounts.push(mount);
        Ok(())
    }

    /// Volumes of the sidecar, and their mounts.
    fn own_volumes(&mut self, wanted: &PodAnnotations, template: &SidecarTemplate) -> Result<()> {
        let cache = wanted.cache.unwrap_or(template.cache).saturating_add(CACHE_MARGIN);
        self.volume(RUN, ("emptyDir", json!({ "sizeLimit": "16Mi" })), "/run/towline", false)?;
        self.volume(CACHE, ("emptyDir", json!({ "sizeLimit": mebibytes(cache) })), "/var/lib/towline", false)?;
        let file = |path: &str, annotation: &str| {
            let field = format!("metadata.annotations['{annotation}']");
            json!({ "path": path, "fieldRef": { "fieldPath": field } })
        };
        let mut files = vec![file("agent.toml", SETTINGS)];
        if template.identity.is_some() {
            files.push(file("ca.crt", AUTHORITIES));
            let token = json!({ "audience": AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": "token" });
            let source = ("projected", json!({ "sources": [{ "serviceAccountToken": token }] }));
            self.volume(TOKEN, source, &format!("{SETTINGS_FOLDER}/token"), true)?;
        }
        self.volume(FILES, ("downwardAPI", json!({ "items": files })), &format!("{SETTINGS_FOLDER}/settings"), true)
    }

    /// Makes `folder` one that both containers have: by the volume that the training mounts there, else by a new one.
    fn share(&mut self, folder: &str) -> Result<()> {
        let Some(mount) = mount_of(self.training(), folder).cloned() else {
            let name = format!("{FOLDER}-{}", self.shared.len());
            self.volume(&name, ("emptyDir", json!({})), folder, false)?;
            self.shared.push(json!({ "name": name, "mountPath": folder }));
            return Ok(());
        };
        let unusable =
            |what: &'static str| Error::usage(what).at(format!("volume {} at {}", mount.name, mount.mount_path));
        if mount.sub_path_expr.is_some() {
            return Err(unusable("subPathExpr names variables that the sidecar does not have").help("use subPath"));
        }
        if hides(&mount.mount_path) {
            return Err(unusable("this mount would hide files of the sidecar").help("mount a folder of its own"));
        }
        if self.pod.volume(&mount.name).is_some_and(|volume| volume.read_only) {
            return Err(unusable("nothing can be written to this volume").help("use an emptyDir or a claim"));
        }
        if self.mounts.iter().all(|other| other["mountPath"] != *mount.mount_path) {
            let mut own = json!({ "name": mount.name, "mountPath": mount.mount_path });
            if let Some(path) = mount.sub_path.filter(|path| !path.is_empty()) {
                own["subPath"] = String::from(path).into();
            }
            self.mounts.push(own);
        }
        Ok(())
    }

    /// The container.
    fn sidecar(&self, wanted: &PodAnnotations, template: &SidecarTemplate) -> Result<Value> {
        let memory = template.memory.saturating_add(wanted.stage_memory.unwrap_or(0));
        let most = memory.saturating_add(template.memory).saturating_add(OVERHEAD);
        let mut env = BTreeMap::from([
            ("TOWLINE_AGENT", "/run/towline/agent/agent.sock"),
            ("XDG_CACHE_HOME", "/var/lib/towline/index"),
            ("STATE_DIRECTORY", "/var/lib/towline/state"),
            ("RUST_LOG", "info"),
        ]);
        env.extend(template.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let env: Vec<Value> = env.into_iter().map(|(name, value)| json!({ "name": name, "value": value })).collect();
        let mut sidecar = json!({
            "name": SIDECAR,
            "image": template.image,
            "restartPolicy": "Always",
            "command": ["towline"],
            "args": ["agent", "--config", format!("{SETTINGS_FOLDER}/settings/agent.toml")],
            "env": env,
            "startupProbe": {
                "exec": { "command": ["towline", "top", "--ready"] },
                "periodSeconds": 5,
                "timeoutSeconds": 10,
                "failureThreshold": template.start_seconds.div_ceil(5).max(1),
            },
            "securityContext": self.security()?,
            "resources": {
                "requests": { "cpu": template.cpu, "memory": mebibytes(memory) },
                "limits": { "memory": mebibytes(most) },
            },
            "volumeMounts": self.mounts,
        });
        if let Some(secret) = &wanted.credentials {
            sidecar["envFrom"] = json!([{ "secretRef": { "name": secret } }]);
        }
        Ok(sidecar)
    }

    /// The user of the training, who alone may use the agent's socket, and nothing else.
    fn security(&self) -> Result<Value> {
        let (own, of_pod) = (self.training().security_context.as_ref(), self.pod.spec.security_context.as_ref());
        let either = [own, of_pod];
        let user = either.iter().find_map(|context| context.as_ref()?.run_as_user).ok_or_else(|| {
            Error::usage("user of the training is unknown, and the sidecar runs as the same one")
                .at(format!("container {}", self.training().name))
                .expected("securityContext.runAsUser of the pod or of this container")
        })?;
        let mut security = json!({
            "runAsUser": user,
            "runAsNonRoot": user != 0,
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
            "seccompProfile": { "type": "RuntimeDefault" },
        });
        if let Some(group) = either.iter().find_map(|context| context.as_ref()?.run_as_group) {
            security["runAsGroup"] = group.into();
        }
        if let Some(options) = either.iter().find_map(|context| context.as_ref()?.se_linux_options.as_ref()) {
            security["seLinuxOptions"] = json!(options);
        }
        Ok(security)
    }

    /// Environment and mounts of the container that trains.
    fn train(&mut self) {
        let at = format!("/spec/containers/{}", self.trains);
        let training = self.training();
        let (env, mounts) = (training.env.is_none(), training.volume_mounts.is_none());
        if !training.env.iter().flat_map(|list| &list.0).any(|variable| &*variable.name == "TOWLINE_AGENT") {
            if env {
                self.operations.push(add(&format!("{at}/env"), &json!([])));
            }
            let variable = json!({ "name": "TOWLINE_AGENT", "value": "/run/towline/agent/agent.sock" });
            self.operations.push(add(&format!("{at}/env/-"), &variable));
        }
        if mounts {
            self.operations.push(add(&format!("{at}/volumeMounts"), &json!([])));
        }
        let run = json!({ "name": RUN, "mountPath": "/run/towline" });
        let added = [run].into_iter().chain(self.shared.drain(..));
        self.operations.extend(added.map(|mount| add(&format!("{at}/volumeMounts/-"), &mount)));
    }

    fn label(&mut self) {
        if self.pod.metadata.labels.is_none() {
            self.operations.push(add("/metadata/labels", &json!({})));
        }
        self.operations.push(add(&format!("/metadata/labels/{}", escaped(PEER)), &"true".into()));
    }

    /// Adds the volumes to the list at `list`, which is `absent` or not.
    fn append(&mut self, list: &str, absent: bool) {
        if absent {
            self.operations.push(add(list, &json!([])));
        }
        let each = format!("{list}/-");
        self.operations.extend(self.volumes.drain(..).map(|volume| add(&each, &volume)));
    }
}

/// An operation that adds `value` at `path`, or replaces what is there.
pub(super) fn add(path: &str, value: &Value) -> Value {
    json!({ "op": "add", "path": path, "value": value })
}

/// An operation that sets an annotation of a pod that has some.
pub(super) fn annotate(key: &str, value: &str) -> Value {
    add(&format!("/metadata/annotations/{}", escaped(key)), &value.into())
}

/// A part of a JSON pointer (<https://datatracker.ietf.org/doc/html/rfc6901>).
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Bytes as a quantity (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>).
fn mebibytes(bytes: u64) -> String {
    format!("{}Mi", bytes.div_ceil(MIB))
}
