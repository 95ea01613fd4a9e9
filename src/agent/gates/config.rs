//! Settings of the controller of scheduling gates.

use std::time::Duration;

use crate::agent::controller::ClusterAccess;

/// Settings of the controller of scheduling gates.
#[derive(Clone, Debug)]
pub struct GatesConfig {
    /// The cluster, and who may wait for what.
    pub access: ClusterAccess,
    /// Age of a pod from which it starts although its data is not there; none: it waits on.
    pub admit_after: Option<Duration>,
}
