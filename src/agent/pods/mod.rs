//! Pods of Kubernetes: what their annotations ask for, and what their service accounts may use.

mod accounts;
mod annotations;

pub use self::accounts::AccountRule;
pub(super) use self::accounts::{AccountRights, ResolvedNames, ServiceAccount};
pub(super) use self::annotations::{
    AUTHORITIES, GATE, GATED_LABEL, HintUse, PLACED, PREFIX, PodAnnotations, PodNames, SETTINGS, WARM_AT,
};
