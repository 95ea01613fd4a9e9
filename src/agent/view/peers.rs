//! Peers, and the bytes that moved between them and this agent.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::transfer::ledger::{LedgerEntry, LinkEntry};
use crate::transfer::peers::PeerStat;

/// Peer, as the API shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Configured or announced address.
    pub address: String,
    /// Identity, once it has shown its certificate.
    #[schema(required)]
    pub identity: Option<String>,
    /// Transport of its link, if that is up: `quic` or `tcp`.
    #[schema(required)]
    pub transport: Option<String>,
    /// Number of connections of the link.
    pub connections: usize,
    /// Round-trip time in milliseconds.
    #[schema(required)]
    pub rtt_ms: Option<f64>,
    /// Recent rate of bytes received per second.
    #[schema(required)]
    pub rate: Option<f64>,
    /// Bytes of frames received from it.
    pub received: u64,
    /// Last error.
    #[schema(required)]
    pub error: Option<String>,
}

impl From<PeerStat> for Peer {
    fn from(stat: PeerStat) -> Self {
        Self {
            address: stat.address,
            identity: stat.identity.map(|identity| identity.to_string()),
            transport: stat.transport.map(|transport| transport.to_string()),
            connections: stat.connections,
            rtt_ms: stat.rtt.map(|rtt| rtt.as_secs_f64() * 1000.0),
            rate: stat.rate,
            received: stat.received,
            error: stat.error,
        }
    }
}

/// Bytes that moved between this agent and others.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Ledger {
    /// Bytes by agent, direction and tree.
    pub entries: Vec<LedgerEntry>,
    /// Bytes on the wire by agent and transport.
    pub links: Vec<LinkEntry>,
}

/// List of peers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PeerList {
    /// Peers, sorted by address.
    pub peers: Vec<Peer>,
}
