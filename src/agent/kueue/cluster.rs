//! The cluster, as watches show it, and the writes to it.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::join5;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Api, DynamicObject, Patch, PatchParams, ValidationDirective};
use kube::core::ApiResource;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::watcher::{self, watcher};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::objects::{
    API_VERSION, AdmissionCheck, MultiKueueCluster, MultiKueueConfig, ResourceFlavor, Trim, Workload,
};
use crate::agent::state::AgentState;
use crate::error::{Error, Result};

/// Manager of the fields that the controller writes.
const MANAGER: &str = "towline";
/// Objects of a page of a list: workloads carry the templates of their pods.
const PAGE: u32 = 50;
/// Parts of the controller that have problems.
const WATCHES: &str = "Kueue, watches";
const WRITES: &str = "Kueue, writes";
/// Bytes of the note of an event, and of the name of its reporter
/// (<https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/>).
const NOTE_LEN_MAX: usize = 1000;
const REPORTER_LEN_MAX: usize = 128;
/// Time for one call of the API server, besides watches.
pub(super) const CALL_MAX: Duration = Duration::from_secs(10);

/// Objects of one kind, by namespace and name.
pub(super) type Objects<K> = BTreeMap<Key, Arc<K>>;
/// Namespace, empty for objects of the cluster, and name.
pub(super) type Key = (String, String);

/// Copy of the objects of one kind.
struct Mirror<K> {
    objects: Mutex<Objects<K>>,
    /// True once all of them were listed.
    listed: AtomicBool,
}

/// The cluster.
pub(super) struct Cluster {
    client: Client,
    recorder: Recorder,
    workloads: Mirror<Workload>,
    checks: Mirror<AdmissionCheck>,
    flavors: Mirror<ResourceFlavor>,
    configs: Mirror<MultiKueueConfig>,
    clusters: Mirror<MultiKueueCluster>,
    dispatches: bool,
    /// The agent, whose problems are those with the API server.
    agent: Arc<AgentState>,
    /// Number of changes so far.
    pub(super) changed: watch::Sender<u64>,
}

/// Content of an event about a workload. The same one with another note counts as a repetition.
pub(super) struct Told<'a> {
    pub(super) type_: EventType,
    pub(super) reason: &'a str,
    pub(super) note: &'a str,
    pub(super) cluster: Option<&'a str>,
}

/// Objects at one moment.
pub(super) struct Seen {
    pub(super) workloads: Objects<Workload>,
    pub(super) checks: Objects<AdmissionCheck>,
    pub(super) flavors: Objects<ResourceFlavor>,
    pub(super) configs: Objects<MultiKueueConfig>,
    pub(super) clusters: Objects<MultiKueueCluster>,
}

impl<K> Default for Mirror<K> {
    fn default() -> Self {
        Self { objects: Mutex::default(), listed: AtomicBool::new(false) }
    }
}

impl<K> Mirror<K> {
    fn lock(&self) -> MutexGuard<'_, Objects<K>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copy(&self) -> Objects<K> {
        self.lock().clone()
    }
}

impl<K: Trim + Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static> Mirror<K> {
    /// Follows all objects, until dropped.
    async fn follow(&self, cluster: &Cluster) {
        loop {
            self.follow_from_list(cluster).await;
        }
    }

    /// Lists all objects and follows their changes, until these are forgotten.
    async fn follow_from_list(&self, Cluster { client, changed, agent, .. }: &Cluster) {
        let config = watcher::Config::default().page_size(PAGE);
        let mut events = pin!(watcher(Api::<K>::all(client.clone()), config).default_backoff());
        let mut listing = Objects::new();
        while let Some(event) = events.next().await {
            if event.is_ok() {
                agent.background.clear(WATCHES);
            }
            match event {
                Ok(watcher::Event::Init) => listing.clear(),
                Ok(watcher::Event::InitApply(object)) => drop(listing.insert(key(&object), trimmed(object))),
                Ok(watcher::Event::InitDone) => {
                    *self.lock() = std::mem::take(&mut listing);
                    self.listed.store(true, Ordering::Relaxed);
                    changed.send_modify(|changes| *changes += 1);
                }
                Ok(watcher::Event::Apply(object)) => {
                    self.lock().insert(key(&object), trimmed(object));
                    changed.send_modify(|changes| *changes += 1);
                }
                Ok(watcher::Event::Delete(object)) => {
                    self.lock().remove(&key(&object));
                    changed.send_modify(|changes| *changes += 1);
                }
                // The watcher itself would ask for them again.
                Err(error) if is_forgotten(&error) => return,
                Err(error) => trouble(agent, WATCHES, &format!("cannot watch {}: {error}", K::plural(&()))),
            }
        }
    }
}

/// True if the server does not know the changes since a version any more, and says so by the status of its answer.
fn is_forgotten(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
}

impl Cluster {
    /// The cluster that `client` reaches; `own` names this process in events. `dispatches`: also clusters of `MultiKueue`.
    pub(super) fn new(agent: Arc<AgentState>, client: Client, own: &str, dispatches: bool) -> Self {
        let reporter =
            Reporter { controller: "towline.dev/kueue".to_owned(), instance: Some(cut(own, REPORTER_LEN_MAX)) };
        Self {
            recorder: Recorder::new(client.clone(), reporter),
            client,
            workloads: Mirror::default(),
            checks: Mirror::default(),
            flavors: Mirror::default(),
            configs: Mirror::default(),
            clusters: Mirror::default(),
            dispatches,
            agent,
            changed: watch::Sender::new(0),
        }
    }

    /// Follows the objects, until dropped.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn follow(&self) {
        let clusters = async {
            if self.dispatches {
                self.clusters.follow(self).await;
            }
        };
        let configs = async {
            if self.dispatches {
                self.configs.follow(self).await;
            }
        };
        let (checks, flavors) = (self.checks.follow(self), self.flavors.follow(self));
        join5(self.workloads.follow(self), checks, flavors, configs, clusters).await;
    }

    /// The objects as they were seen last; none before all were listed.
    pub(super) fn seen(&self) -> Option<Seen> {
        let listed = |listed: &AtomicBool| listed.load(Ordering::Relaxed);
        let multi = listed(&self.configs.listed) && listed(&self.clusters.listed);
        let all = listed(&self.workloads.listed) && listed(&self.checks.listed) && listed(&self.flavors.listed);
        (all && (multi || !self.dispatches)).then(|| Seen {
            workloads: self.workloads.copy(),
            checks: self.checks.copy(),
            flavors: self.flavors.copy(),
            configs: self.configs.copy(),
            clusters: self.clusters.copy(),
        })
    }

    /// Applies `status` to an object that is still as it was seen; false if it has changed, or is gone: the watch tells of it.
    ///
    /// # Errors
    /// Unreachable, for those of the API server.
    pub(super) async fn apply_status<K>(&self, object: &K, status: &Value) -> Result<bool>
    where
        K: Resource<DynamicType = ()>,
    {
        let patch = Patch::Apply(with_status(object, status));
        let parameters = PatchParams { force: true, ..managed(MANAGER) };
        let api = self.any::<K>(object.meta().namespace.as_deref());
        self.written(api.patch_status(name(object), &parameters, &patch)).await
    }

    /// As [`Cluster::apply_status`], with a patch of any kind, by any manager.
    ///
    /// # Errors
    /// Unreachable, for those of the API server.
    pub(super) async fn patch_status(&self, workload: &Workload, manager: &str, patch: &Patch<Value>) -> Result<bool> {
        let force = matches!(patch, Patch::Apply(_));
        let parameters = PatchParams { force, ..managed(manager) };
        let api = self.any::<Workload>(workload.metadata.namespace.as_deref());
        self.written(api.patch_status(name(workload), &parameters, patch)).await
    }

    /// A workload with all of its fields, if it is still as it was seen.
    ///
    /// # Errors
    /// Unreachable, for those of the API server.
    pub(super) async fn whole(&self, workload: &Workload) -> Result<Option<DynamicObject>> {
        let api = self.any::<Workload>(workload.metadata.namespace.as_deref());
        let found = in_time(api.get_opt(name(workload))).await;
        let found =
            found.map_err(|source| Error::unreachable("API server has not told of a workload").source(source))?;
        Ok(found.filter(|found| found.metadata.resource_version == workload.metadata.resource_version))
    }

    /// Tells of a workload in an event, which `kubectl describe` shows; one about a `cluster` of `MultiKueue` names it.
    pub(super) async fn tell(&self, workload: &Workload, what: &Told<'_>) {
        let Told { type_, reason, note, cluster } = *what;
        let reference = ObjectReference {
            api_version: Some(API_VERSION.to_owned()),
            kind: Some("Workload".to_owned()),
            name: workload.metadata.name.clone(),
            namespace: workload.metadata.namespace.clone(),
            uid: workload.metadata.uid.clone(),
            ..ObjectReference::default()
        };
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(cut(note, NOTE_LEN_MAX)),
            action: "CheckData".to_owned(),
            secondary: cluster.map(|cluster| ObjectReference {
                api_version: Some(API_VERSION.to_owned()),
                kind: Some("MultiKueueCluster".to_owned()),
                name: Some(cluster.to_owned()),
                ..ObjectReference::default()
            }),
        };
        match timeout(CALL_MAX, self.recorder.publish(&event, &reference)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("Kueue: cannot tell of a workload in an event: {error}"),
            Err(_) => tracing::warn!("Kueue: cannot tell of a workload in an event: no answer in time"),
        }
    }

    /// True if a write has arrived; false if the object was another by then.
    async fn written(&self, write: impl Future<Output = Result<DynamicObject, kube::Error>>) -> Result<bool> {
        match in_time(write).await {
            Ok(_) => {
                self.agent.background.clear(WRITES);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => Ok(false),
            Err(error) => {
                trouble(&self.agent, WRITES, &format!("cannot write: {error}"));
                Err(Error::unreachable("API server has not taken a write").source(error))
            }
        }
    }

    fn any<K: Resource<DynamicType = ()>>(&self, namespace: Option<&str>) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<K>(&());
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &kind),
            None => Api::all_with(self.client.clone(), &kind),
        }
    }
}

/// `object` by its name and version, with `status`.
pub(super) fn with_status<K: Resource<DynamicType = ()>>(object: &K, status: &Value) -> Value {
    let metadata = object.meta();
    let mut known = json!({
        "name": metadata.name, "uid": metadata.uid, "resourceVersion": metadata.resource_version,
    });
    if let Some(namespace) = &metadata.namespace {
        known["namespace"] = namespace.as_str().into();
    }
    json!({ "apiVersion": API_VERSION, "kind": K::kind(&()), "metadata": known, "status": status })
}

/// Result of a call of the API server, or an error if there is none in time: connections die without a notice.
pub(super) async fn in_time<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let late = || kube::Error::Service("no answer in time".into());
    timeout(CALL_MAX, call).await.unwrap_or_else(|_| Err(late()))
}

/// Keeps a problem with the API server until something succeeds; logs the first one.
pub(super) fn trouble(agent: &AgentState, what: &'static str, problem: &str) {
    if agent.background.set(what, problem.to_owned()) {
        tracing::warn!("{what}: {problem}");
    }
}

fn managed(manager: &str) -> PatchParams {
    PatchParams {
        field_manager: Some(manager.to_owned()),
        field_validation: Some(ValidationDirective::Strict),
        ..PatchParams::default()
    }
}

fn trimmed<K: Trim>(mut object: K) -> Arc<K> {
    object.trim();
    Arc::new(object)
}

/// The beginning of a text, at most `len` bytes.
fn cut(text: &str, len: usize) -> String {
    let end = (0..=len.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.get(..end).unwrap_or_default().to_owned()
}

fn key<K: Resource>(object: &K) -> Key {
    let metadata = object.meta();
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}

fn name<K: Resource>(object: &K) -> &str {
    object.meta().name.as_deref().unwrap_or_default()
}
