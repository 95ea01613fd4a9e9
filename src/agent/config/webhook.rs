//! `[webhook]`: sidecars for annotated pods, and certificates for their service accounts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::account_rules::AccountSection;
use super::quantity::{Bytes, Span};
use crate::agent::webhook::{IssuerConfig, SidecarTemplate, WebhookConfig};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::limits::{GIB, MIB};
use crate::toml_text::OneOrSeveral;

/// Default memory budget of a sidecar: the least that an agent with a cache and links takes.
const MEMORY: u64 = 256 * MIB;
/// Default cache of a sidecar.
const CACHE: u64 = 20 * GIB;
/// Default time for restores and warms.
const START_SECONDS: u64 = 3600;
/// Folder that the kubelet mounts (<https://kubernetes.io/docs/concepts/security/service-accounts/>).
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The section `[webhook]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WebhookSection {
    listen: SocketAddr,
    certificate: PathBuf,
    image: String,
    repository: Option<String>,
    peers: Option<OneOrSeveral>,
    memory: Option<Bytes>,
    cache: Option<Bytes>,
    cpu: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    start: Option<Span>,
    trust_domain: Option<String>,
    issuer: Option<IssuerSection>,
    #[serde(default)]
    gates: bool,
    #[serde(default)]
    allow: Vec<AccountSection>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct IssuerSection {
    authority: PathBuf,
    url: String,
    account: Option<PathBuf>,
}

impl WebhookSection {
    /// Resolves relative paths from `folder`. Without an own one, sidecars have `repository` and the `endpoint` of the agent.
    pub(super) fn settle(
        self,
        folder: &Path,
        (repository, endpoint, allow_http): (&str, Option<&str>, bool),
    ) -> Result<WebhookConfig> {
        if let Some(domain) = &self.trust_domain {
            Identity::spiffe(&format!("spiffe://{domain}/ns/any/sa/any")).map_err(|error| error.at("trust_domain"))?;
        }
        let peers = self.peers.map(OneOrSeveral::list).unwrap_or_default();
        if !peers.is_empty() && self.issuer.is_none() {
            return Err(Error::usage("[webhook] peers is set, but not [webhook.issuer]")
                .expected("both: agents answer sidecars with a certificate only"));
        }
        if self.allow.is_empty() {
            return Err(Error::usage("[webhook] without [[webhook.allow]] injects nothing")
                .expected("the names that pods may restore and save, by namespace and service account"));
        }
        Ok(WebhookConfig {
            listen: self.listen,
            certificate: folder.join(self.certificate),
            trust_domain: self.trust_domain,
            sidecar: SidecarTemplate {
                image: self.image,
                repository: self.repository.unwrap_or_else(|| repository.to_owned()),
                endpoint: endpoint.map(str::to_owned),
                allow_http,
                peers,
                memory: self.memory.map_or(MEMORY, |bytes| bytes.0),
                cache: self.cache.map_or(CACHE, |bytes| bytes.0),
                cpu: self.cpu.unwrap_or_else(|| "100m".to_owned()),
                env: self.env,
                start_seconds: self.start.map_or(START_SECONDS, |span| span.0.as_secs()),
                identity: None,
            },
            issuer: self.issuer.map(|issuer| issuer.settle(folder)).transpose()?,
            gates: self.gates,
            allow: AccountSection::rules(self.allow, "webhook.allow")?,
        })
    }
}

impl IssuerSection {
    fn settle(self, folder: &Path) -> Result<IssuerConfig> {
        let url = url::Url::parse(&self.url).ok().filter(|url| url.scheme() == "https" && url.path() == "/");
        if url.is_none() {
            return Err(Error::usage("[webhook.issuer] url is malformed").expected("https://HOST:PORT").got(self.url));
        }
        Ok(IssuerConfig {
            authority: folder.join(self.authority),
            url: self.url.trim_end_matches('/').to_owned(),
            account: self.account.map_or_else(|| ACCOUNT.into(), |account| folder.join(account)),
        })
    }
}
