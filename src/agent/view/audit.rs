//! The audit log.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Entry;

/// A head of an audit log that was published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditHead {
    /// Number of its last entry.
    pub seq: u64,
}

/// Entries of the audit log, the latest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditTrail {
    /// Entries, as `towline audit show --json` prints them.
    #[schema(value_type = Vec<Object>)]
    pub entries: Vec<Entry>,
    /// Value of `before` for earlier entries, if there may be some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
    /// Lines that are no entries: `towline audit verify` says more about them.
    pub unreadable: u64,
}
