//! Sites, the links between them, and what was moved in a month.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::placement::{LinkCalibration, UsageRow};

/// Measured links between sites.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Calibration {
    /// Time of the inventories that were read last, RFC 3339.
    #[schema(format = DateTime)]
    pub generated_at: String,
    /// Links, by their ends.
    pub links: Vec<LinkCalibration>,
}

/// Sites and the links between them, as hints use them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SiteList {
    /// Time of the inventories that were read last, RFC 3339.
    #[schema(format = DateTime)]
    pub generated_at: String,
    /// Sites, by name.
    pub sites: Vec<Site>,
    /// Links of the sites file, in its order.
    pub links: Vec<SiteLink>,
    /// Measured links, by their ends.
    pub measured: Vec<LinkCalibration>,
    /// Remarks on data that cannot be read, and so may be missing here.
    pub notes: Vec<String>,
}

/// A place with compute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Site {
    /// Name.
    pub name: String,
    /// Provider; `own` for machines of one's own.
    pub provider: String,
    /// Region of the provider; empty if there is none.
    pub region: String,
    /// Jurisdictions, as the policy says.
    pub jurisdictions: Vec<String>,
    /// True if the repository is there.
    pub has_repository: bool,
    /// GPUs.
    pub gpus: Vec<Gpus>,
    /// Agents with an inventory, by name.
    pub agents: Vec<SiteAgent>,
}

/// GPUs of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Gpus {
    /// Model, such as `H100`.
    pub model: String,
    /// Number.
    pub count: u64,
    /// Micro-dollars for one and an hour.
    pub usd_micro_hour: u64,
}

/// Cache of an agent, by its inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SiteAgent {
    /// The agent: `SITE/AGENT`.
    pub agent: String,
    /// Time of its inventory, by its clock, RFC 3339.
    #[schema(format = DateTime)]
    pub at: String,
    /// Bytes of its cache.
    pub capacity: u64,
    /// Bytes used by chunks.
    pub used: u64,
    /// Bytes promised to pins, whether their chunks are there or not.
    pub promised: u64,
    /// Chunks.
    pub chunks: u64,
    /// True if samples contradict the inventory, so that what the agent holds is unknown.
    pub is_false: bool,
}

/// A path from one site to another, as the sites file has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SiteLink {
    /// Site that sends.
    pub from: String,
    /// Site that receives.
    pub to: String,
    /// Name of the path.
    pub path: String,
    /// Believed bytes a second.
    #[schema(required)]
    pub rate: Option<u64>,
    /// Believed round trip, in milliseconds.
    #[schema(required)]
    pub delay_ms: Option<f64>,
    /// Micro-dollars of one more GB (10^9 bytes), after what the month has carried.
    pub usd_micro_gb: u64,
}

/// Usage of a month: what agents have moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MonthUsage {
    /// Month in UTC, such as `2026-11`.
    pub month: String,
    /// Grouping: `link`, `site`, `run` or `tenant`.
    pub by: String,
    /// Date of the prices; none, if there is no sites file.
    #[schema(required)]
    pub prices: Option<String>,
    /// Rows, by name.
    pub rows: Vec<UsageRow>,
    /// Sum of the rows.
    pub total: UsageRow,
    /// Remarks on data that cannot be read, and so may be missing here.
    pub notes: Vec<String>,
}
