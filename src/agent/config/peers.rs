//! Other agents: where they are, how to link to them, what they may read.

use serde::Deserialize;

use crate::error::Result;
use crate::transfer::exchange::Policy;
use crate::transfer::peers::Carriers;

/// Connections of a link, at most.
const CONNECTIONS_MAX: usize = 16;

/// The section `[peers]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeersSection {
    #[serde(default)]
    pub(super) addresses: Vec<String>,
    carrier: Option<Carrier>,
    connections: Option<usize>,
}

/// What may carry a link.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Carrier {
    Auto,
    Quic,
    Tcp,
}

/// A section `[[allow]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AllowSection {
    agents: String,
    names: Vec<String>,
}

/// How other agents are linked to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeersConfig {
    /// Where they are: `host:port` each.
    pub addresses: Vec<String>,
    /// What carries links.
    pub carriers: Carriers,
    /// Connections of a link, if it is told.
    pub connections: Option<usize>,
}

impl PeersSection {
    pub(super) fn settle(self) -> PeersConfig {
        let carriers = match self.carrier.unwrap_or(Carrier::Auto) {
            Carrier::Auto => Carriers::Auto,
            Carrier::Quic => Carriers::Quic,
            Carrier::Tcp => Carriers::Tcp,
        };
        let connections = self.connections.map(|count| count.clamp(1, CONNECTIONS_MAX));
        PeersConfig { addresses: self.addresses, carriers, connections }
    }
}

/// What the rules say; without any, every agent of the authority may read every name.
pub(super) fn policy(rules: &[AllowSection]) -> Result<Policy> {
    if rules.is_empty() {
        return Ok(Policy::everybody());
    }
    Policy::only(rules.iter().map(|rule| (rule.agents.as_str(), rule.names.as_slice())))
}
