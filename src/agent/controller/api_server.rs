//! The API server of a cluster, as watches show it, and writes to it.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Api, DynamicObject, PatchParams, ValidationDirective};
use kube::core::{ApiResource, ObjectMeta};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::watcher::{self, watcher};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::agent::state::AgentState;
use crate::error::{Error, Result};

/// Objects of a page of a list: workloads and pods are long.
const PAGE: u32 = 50;
/// Bytes of the note of an event, and of the name of its reporter
/// (<https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/>).
const NOTE_LEN_MAX: usize = 1000;
const REPORTER_LEN_MAX: usize = 128;
/// Time for one call of the API server, besides watches.
const CALL_MAX: Duration = Duration::from_secs(10);

/// Objects of one kind, by namespace and name.
pub(in crate::agent) type Objects<K> = BTreeMap<Key, Arc<K>>;
/// Namespace, empty for objects of the cluster, and name.
pub(in crate::agent) type Key = (String, String);

/// Names of a controller: for its lease and events, and for the problems of its parts.
#[derive(Clone, Copy, Debug)]
pub(in crate::agent) struct Role {
    /// Section of the settings.
    pub(in crate::agent) section: &'static str,
    pub(in crate::agent) lease: &'static str,
    pub(in crate::agent) reporter: &'static str,
    pub(in crate::agent) election: &'static str,
    pub(in crate::agent) watches: &'static str,
    pub(in crate::agent) writes: &'static str,
    /// Task of the elected one, such as "decides ...".
    pub(in crate::agent) task: &'static str,
}

/// Objects that are kept without the parts that do not count.
pub(in crate::agent) trait Trim: Resource {
    /// Drops these parts, to bound the memory: users choose how long annotations are.
    fn trim(&mut self) {
        self.meta_mut().annotations = None;
    }
}

/// Copy of the objects of one kind.
pub(in crate::agent) struct Mirror<K> {
    objects: Mutex<Objects<K>>,
    /// True once all of them were listed.
    listed: AtomicBool,
    /// Field selector; none: all.
    fields: Option<&'static str>,
}

/// Calls of the API server by a controller.
pub(in crate::agent) struct ApiServer {
    pub(in crate::agent) client: Client,
    recorder: Recorder,
    role: Role,
    /// The agent, whose problems are those with the API server.
    agent: Arc<AgentState>,
    /// Number of changes so far.
    pub(in crate::agent) changed: watch::Sender<u64>,
}

/// Content of an event about an object. The same one with another note counts as a repetition, and shows the first note.
pub(in crate::agent) struct Told<'a> {
    pub(in crate::agent) type_: EventType,
    /// Action of the controller: the same reason with another one is another event, whose note is shown.
    pub(in crate::agent) action: &'a str,
    pub(in crate::agent) reason: &'a str,
    pub(in crate::agent) note: &'a str,
    /// Another object that it is about.
    pub(in crate::agent) secondary: Option<ObjectReference>,
}

impl<K> Default for Mirror<K> {
    fn default() -> Self {
        Self { objects: Mutex::default(), listed: AtomicBool::new(false), fields: None }
    }
}

impl<K> Mirror<K> {
    fn lock(&self) -> MutexGuard<'_, Objects<K>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copy of the objects that a field selector finds
    /// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/field-selectors/>).
    pub(in crate::agent) fn of_fields(fields: &'static str) -> Self {
        Self { fields: Some(fields), ..Self::default() }
    }

    /// The objects as they were seen last; none before all were listed.
    pub(in crate::agent) fn seen(&self) -> Option<Objects<K>> {
        self.listed.load(Ordering::Relaxed).then(|| self.lock().clone())
    }
}

impl<K: Trim + Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static> Mirror<K> {
    /// Follows all objects, until dropped.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::agent) async fn follow(&self, server: &ApiServer) {
        loop {
            self.follow_from_list(server).await;
        }
    }

    /// Lists all objects and follows their changes, until these are forgotten.
    async fn follow_from_list(&self, server: &ApiServer) {
        let ApiServer { client, changed, agent, role, .. } = server;
        let config = watcher::Config { field_selector: self.fields.map(str::to_owned), ..watcher::Config::default() };
        let config = config.page_size(PAGE);
        let mut events = pin!(watcher(Api::<K>::all(client.clone()), config).default_backoff());
        let mut listing = Objects::new();
        while let Some(event) = events.next().await {
            if event.is_ok() {
                agent.background.clear(role.watches);
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
                Err(error) => trouble(agent, role.watches, &format!("cannot watch {}: {error}", K::plural(&()))),
            }
        }
    }
}

/// True if the server does not know the changes since a version any more, and says so by the status of its answer.
fn is_forgotten(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if status.code == 410)
}

impl ApiServer {
    /// The API server that `client` reaches; `own` names this process in events.
    pub(in crate::agent) fn new(agent: Arc<AgentState>, client: Client, own: &str, role: Role) -> Self {
        let reporter = Reporter { controller: role.reporter.to_owned(), instance: Some(cut(own, REPORTER_LEN_MAX)) };
        let recorder = Recorder::new(client.clone(), reporter);
        Self { recorder, client, role, agent, changed: watch::Sender::new(0) }
    }

    /// Tells of an object in an event, which `kubectl describe` shows.
    pub(in crate::agent) async fn tell<K: Resource<DynamicType = ()>>(&self, object: &K, what: Told<'_>) {
        let Told { type_, action, reason, note, secondary } = what;
        let note = Some(cut(note, NOTE_LEN_MAX));
        let event = Event { type_, reason: reason.to_owned(), note, action: action.to_owned(), secondary };
        match timeout(CALL_MAX, self.recorder.publish(&event, &reference(object))).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("{}: cannot write an event: {error}", self.role.writes),
            Err(_) => tracing::warn!("{}: cannot write an event: no answer in time", self.role.writes),
        }
    }

    /// True if a write has arrived; false if the object was another by then, or is gone: the watch tells of it.
    ///
    /// # Errors
    /// Unreachable, for those of the API server.
    pub(in crate::agent) async fn written(
        &self,
        write: impl Future<Output = Result<DynamicObject, kube::Error>>,
    ) -> Result<bool> {
        match in_time(write).await {
            // An object may have metadata that cannot be read; the watch shows what came of the write.
            Ok(_) | Err(kube::Error::SerdeError(_)) => {
                self.agent.background.clear(self.role.writes);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_not_found() => Ok(false),
            Err(error) => {
                trouble(&self.agent, self.role.writes, &format!("cannot write: {error}"));
                Err(Error::unreachable("API server has refused a write, or did not answer")
                    .got(error.to_string())
                    .source(error))
            }
        }
    }

    /// Objects of one kind, by their fields.
    pub(in crate::agent) fn any<K: Resource<DynamicType = ()>>(&self, namespace: Option<&str>) -> Api<DynamicObject> {
        let kind = ApiResource::erase::<K>(&());
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &kind),
            None => Api::all_with(self.client.clone(), &kind),
        }
    }
}

/// Reference to an object.
fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    let ObjectMeta { name, namespace, uid, .. } = object.meta().clone();
    let version = K::api_version(&()).into_owned();
    ObjectReference {
        api_version: Some(version),
        kind: Some(K::kind(&()).into_owned()),
        name,
        namespace,
        uid,
        ..ObjectReference::default()
    }
}

/// Result of a call of the API server, or an error if there is none in time: connections die without a notice.
pub(in crate::agent) async fn in_time<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let late = || kube::Error::Service("no answer in time".into());
    timeout(CALL_MAX, call).await.unwrap_or_else(|_| Err(late()))
}

/// Keeps a problem with the API server until something succeeds; logs the first one.
pub(in crate::agent) fn trouble(agent: &AgentState, what: &'static str, problem: &str) {
    if agent.background.set(what, problem.to_owned()) {
        tracing::warn!("{what}: {problem}");
    }
}

/// Parameters of a write by `manager`.
pub(in crate::agent) fn managed(manager: &str) -> PatchParams {
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
pub(in crate::agent) fn cut(text: &str, len: usize) -> String {
    let end = (0..=len.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.get(..end).unwrap_or_default().to_owned()
}

/// Key of an object.
pub(in crate::agent) fn key<K: Resource>(object: &K) -> Key {
    let metadata = object.meta();
    (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
}

/// Name of an object.
pub(in crate::agent) fn name<K: Resource>(object: &K) -> &str {
    object.meta().name.as_deref().unwrap_or_default()
}
