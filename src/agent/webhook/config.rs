//! Settings of the webhook, and the rules for service accounts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::agent::pods::AccountRule;

/// Settings of the webhook.
#[derive(Clone, Debug)]
pub struct WebhookConfig {
    /// Address for the API server, and for sidecars that fetch certificates.
    pub listen: SocketAddr,
    /// Folder with the certificate of the webhook (`tls.crt`) and its key (`tls.key`).
    pub certificate: PathBuf,
    /// The sidecars.
    pub sidecar: SidecarTemplate,
    /// Trust domain of the SPIFFE ids of service accounts; the site of the agent if there is none.
    pub trust_domain: Option<String>,
    /// Certificates for service accounts, if it issues any.
    pub issuer: Option<IssuerConfig>,
    /// True if a controller opens scheduling gates in the cluster, so that pods may have them.
    pub gates: bool,
    /// Names that service accounts may use.
    pub allow: Vec<AccountRule>,
}

/// Parts of sidecars that pods do not decide.
#[derive(Clone, Debug)]
pub struct SidecarTemplate {
    /// Image with `towline` in its PATH.
    pub image: String,
    /// Location of the repository.
    pub repository: String,
    /// Endpoint of its store, if it is not the default.
    pub endpoint: Option<String>,
    /// Allows plain http to the store.
    pub allow_http: bool,
    /// Names with ports that resolve to agents.
    pub peers: Vec<String>,
    /// Memory budget, in bytes.
    pub memory: u64,
    /// Default of the cache, in bytes.
    pub cache: u64,
    /// Requested CPU, as a quantity.
    pub cpu: String,
    /// Further environment.
    pub env: BTreeMap<String, String>,
    /// Seconds that restores and warms before the training may take.
    pub start_seconds: u64,
    /// Where they fetch certificates, if the webhook issues any.
    pub identity: Option<SidecarIdentity>,
}

/// Where a sidecar fetches its certificate.
#[derive(Clone, Debug)]
pub struct SidecarIdentity {
    /// `https://HOST:PORT` of the webhook.
    pub url: String,
    /// Certificates of the authorities, in PEM.
    pub authorities: String,
}

/// Issuer of certificates for service accounts.
#[derive(Clone, Debug)]
pub struct IssuerConfig {
    /// Folder of the authority.
    pub authority: PathBuf,
    /// `https://HOST:PORT` at which sidecars reach the webhook.
    pub url: String,
    /// Folder with the token of this pod's service account, and the authority of the API server.
    pub account: PathBuf,
}
