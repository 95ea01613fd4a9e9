//! Pods of Kubernetes: what their annotations ask for, and what their service accounts may use.

mod accounts;
mod annotations;

pub use self::accounts::AccountRule;
pub(super) use self::accounts::{AccountRights, ResolvedNames, ServiceAccount};
pub(super) use self::annotations::{AUTHORITIES, GATED, HintUse, PLACED, PodAnnotations, PodNames, SETTINGS, WARM_AT};

/// Scheduling gate of a pod that waits for its data.
pub(super) const GATE: &str = "towline.dev/warm";
