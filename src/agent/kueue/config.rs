//! Settings of the controller for Kueue.

use std::time::Duration;

use crate::agent::controller::ClusterAccess;

/// Settings of the controller for Kueue.
#[derive(Clone, Debug)]
pub struct KueueConfig {
    /// The cluster, and who may wait for what.
    pub access: ClusterAccess,
    /// `controllerName` of the admission checks that it decides.
    pub controller: String,
    /// Time for which data may be absent, or a warm fail, before a workload gives its quota back.
    pub retry_after: Duration,
    /// Time after which a workload is admitted although its data is not there; none: never.
    pub admit_after: Option<Duration>,
    /// Rounds in which clusters are nominated for `MultiKueue`; none: the controller nominates none.
    pub dispatch: Option<Duration>,
}
