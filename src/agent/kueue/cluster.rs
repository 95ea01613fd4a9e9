//! The cluster, as watches show it, and the writes to it.

use futures::future::join5;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::runtime::events::EventType;
use serde_json::{Value, json};

use super::objects::{API_VERSION, AdmissionCheck, MultiKueueCluster, MultiKueueConfig, ResourceFlavor, Workload};
use crate::agent::controller::{ApiServer, Mirror, Objects, Told, in_time, managed, name};
use crate::error::{Error, Result};

/// Manager of the fields that the controller writes.
const MANAGER: &str = "towline";

/// The cluster.
pub(super) struct Cluster {
    pub(super) server: ApiServer,
    workloads: Mirror<Workload>,
    checks: Mirror<AdmissionCheck>,
    flavors: Mirror<ResourceFlavor>,
    configs: Mirror<MultiKueueConfig>,
    clusters: Mirror<MultiKueueCluster>,
    dispatches: bool,
}

/// Objects at one moment.
pub(super) struct Seen {
    pub(super) workloads: Objects<Workload>,
    pub(super) checks: Objects<AdmissionCheck>,
    pub(super) flavors: Objects<ResourceFlavor>,
    pub(super) configs: Objects<MultiKueueConfig>,
    pub(super) clusters: Objects<MultiKueueCluster>,
}

impl Cluster {
    /// The cluster of `server`. `dispatches`: also clusters of `MultiKueue`.
    pub(super) fn new(server: ApiServer, dispatches: bool) -> Self {
        Self {
            server,
            workloads: Mirror::default(),
            checks: Mirror::default(),
            flavors: Mirror::default(),
            configs: Mirror::default(),
            clusters: Mirror::default(),
            dispatches,
        }
    }

    /// Follows the objects, until dropped.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn follow(&self) {
        let server = &self.server;
        let clusters = async {
            if self.dispatches {
                self.clusters.follow(server).await;
            }
        };
        let configs = async {
            if self.dispatches {
                self.configs.follow(server).await;
            }
        };
        let (checks, flavors) = (self.checks.follow(server), self.flavors.follow(server));
        join5(self.workloads.follow(server), checks, flavors, configs, clusters).await;
    }

    /// The objects as they were seen last; none before all were listed.
    pub(super) fn seen(&self) -> Option<Seen> {
        let (configs, clusters) = if self.dispatches {
            (self.configs.seen()?, self.clusters.seen()?)
        } else {
            (Objects::new(), Objects::new())
        };
        let (workloads, checks, flavors) = (self.workloads.seen()?, self.checks.seen()?, self.flavors.seen()?);
        Some(Seen { workloads, checks, flavors, configs, clusters })
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
        let api = self.server.any::<K>(object.meta().namespace.as_deref());
        self.server.written(api.patch_status(name(object), &parameters, &patch)).await
    }

    /// As [`Cluster::apply_status`], with a patch of any kind, by any manager.
    ///
    /// # Errors
    /// Unreachable, for those of the API server.
    pub(super) async fn patch_status(&self, workload: &Workload, manager: &str, patch: &Patch<Value>) -> Result<bool> {
        let force = matches!(patch, Patch::Apply(_));
        let parameters = PatchParams { force, ..managed(manager) };
        let api = self.server.any::<Workload>(workload.metadata.namespace.as_deref());
        self.server.written(api.patch_status(name(workload), &parameters, patch)).await
    }

    /// A workload with all of its fields, if it is still as it was seen.
    ///
    /// # Errors
    /// Unreachable, for those of the API server.
    pub(super) async fn whole(&self, workload: &Workload) -> Result<Option<DynamicObject>> {
        let api = self.server.any::<Workload>(workload.metadata.namespace.as_deref());
        let found = in_time(api.get_opt(name(workload))).await;
        let found =
            found.map_err(|source| Error::unreachable("API server has not told of a workload").source(source))?;
        Ok(found.filter(|found| found.metadata.resource_version == workload.metadata.resource_version))
    }

    /// Tells of a workload in an event; one about a `cluster` of `MultiKueue` names it.
    pub(super) async fn tell(
        &self,
        workload: &Workload,
        (type_, reason, note): (EventType, &str, &str),
        cluster: Option<&str>,
    ) {
        let secondary = cluster.map(|cluster| ObjectReference {
            api_version: Some(API_VERSION.to_owned()),
            kind: Some("MultiKueueCluster".to_owned()),
            name: Some(cluster.to_owned()),
            ..ObjectReference::default()
        });
        self.server.tell(workload, Told { type_, action: "CheckData", reason, note, secondary }).await;
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
