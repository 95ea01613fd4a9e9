//! Sections `[peers]` and `[[limits]]`: discovery of other agents, and links to them.

use serde::Deserialize;

use super::quantity::Rate;
use crate::transfer::peers::Transports;

/// Limit of connections of a link.
const CONNECTIONS_MAX: usize = 16;

/// The section `[peers]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PeersSection {
    #[serde(default)]
    pub(super) addresses: Vec<String>,
    #[serde(default)]
    dns: Vec<String>,
    register: Option<String>,
    #[serde(default)]
    registered: bool,
    transport: Option<Transport>,
    connections: Option<usize>,
}

/// Transport of a link.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Transport {
    Auto,
    Quic,
    Tcp,
}

/// A section `[[limits]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitSection {
    site: String,
    rate: Rate,
}

/// Discovery of other agents and links to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeersConfig {
    /// Addresses of other agents, `host:port` each.
    pub addresses: Vec<String>,
    /// Names that resolve to the addresses of several agents, `host:port` each.
    pub names: Vec<String>,
    /// Own address, `host:port`, which is registered in the repositories.
    pub register: Option<String>,
    /// Look for agents that are registered in the repositories.
    pub registered: bool,
    /// Limits of bytes per second sent to sites.
    pub limits: Vec<(String, u64)>,
    /// Transports of links.
    pub transports: Transports,
    /// Connections of a link, if configured.
    pub connections: Option<usize>,
}

impl PeersSection {
    /// True if other agents are configured.
    pub(super) fn wants(&self) -> bool {
        !self.addresses.is_empty() || !self.dns.is_empty() || self.register.is_some() || self.registered
    }

    /// True if this agent registers its own address.
    pub(super) fn registers(&self) -> bool {
        self.register.is_some()
    }

    pub(super) fn settle(self, limits: Vec<LimitSection>) -> PeersConfig {
        let transports = match self.transport.unwrap_or(Transport::Auto) {
            Transport::Auto => Transports::Auto,
            Transport::Quic => Transports::Quic,
            Transport::Tcp => Transports::Tcp,
        };
        let connections = self.connections.map(|count| count.clamp(1, CONNECTIONS_MAX));
        PeersConfig {
            addresses: self.addresses,
            names: self.dns,
            registered: self.registered || self.register.is_some(),
            register: self.register,
            limits: limits.into_iter().map(|limit| (limit.site, limit.rate.0)).collect(),
            transports,
            connections,
        }
    }
}
