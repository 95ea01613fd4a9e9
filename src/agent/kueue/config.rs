//! Settings of the controller for Kueue.

use std::path::PathBuf;
use std::time::Duration;

use crate::agent::pods::AccountRule;
use crate::identity::Identity;

/// Settings of the controller for Kueue.
#[derive(Clone, Debug)]
pub struct KueueConfig {
    /// Kubeconfig file; none: the service account of this pod.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the lease by which one of several controllers is elected; none: the one of this pod or of the kubeconfig.
    pub namespace: Option<String>,
    /// Time without a renewal after which another controller takes over.
    pub lease: Duration,
    /// Agents that fetch and hold what workloads wait for; at a site without any, one of its agents is chosen.
    pub holders: Vec<Identity>,
    /// Warms under way at a time.
    pub warms: usize,
    /// `controllerName` of the admission checks that it decides.
    pub controller: String,
    /// Time for which data may be absent, or a warm fail, before a workload gives its quota back.
    pub retry_after: Duration,
    /// Time after which a workload is admitted although its data is not there; none: never.
    pub admit_after: Option<Duration>,
    /// Rounds in which clusters are nominated for `MultiKueue`; none: the controller nominates none.
    pub dispatch: Option<Duration>,
    /// Trust domain of the SPIFFE ids of service accounts; the site of the agent if there is none.
    pub trust_domain: Option<String>,
    /// Names that workloads may wait for, by the service accounts of their pods.
    pub allow: Vec<AccountRule>,
}
