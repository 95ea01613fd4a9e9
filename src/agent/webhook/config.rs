//! Settings of the webhook, and the rules for service accounts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::pattern::Patterns;

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

/// Names that some service accounts may restore, stage, warm and save.
#[derive(Clone, Debug)]
pub struct AccountRule {
    /// Namespaces.
    pub namespaces: Patterns,
    /// Service accounts in these.
    pub accounts: Patterns,
    /// Names.
    pub names: Patterns,
}

/// A service account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServiceAccount {
    pub(super) namespace: String,
    pub(super) name: String,
}

impl ServiceAccount {
    /// SPIFFE id, as Istio and others write it
    /// (<https://istio.io/latest/docs/concepts/security/#istio-identity>).
    ///
    /// # Errors
    /// Usage, if a part is malformed.
    pub(super) fn identity(&self, trust_domain: &str) -> Result<Identity> {
        Identity::spiffe(&format!("spiffe://{trust_domain}/ns/{}/sa/{}", self.namespace, self.name))
    }

    /// Reads the name of the user that it is for the API server
    /// (<https://kubernetes.io/docs/reference/access-authn-authz/authentication/#service-account-tokens>).
    ///
    /// # Errors
    /// Denied, for another user.
    pub(super) fn of_user(user: &str) -> Result<Self> {
        let rest = user.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
        let (namespace, name) = rest
            .filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
            .ok_or_else(|| Error::denied("token is not of a service account").got(format!("{user:.200?}")))?;
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

impl WebhookConfig {
    /// True if pods of `account` may name `name`.
    pub(super) fn allows(&self, account: &ServiceAccount, name: &Name) -> bool {
        self.rules_of(account).any(|rule| rule.names.take(name.as_str()))
    }

    /// True if a rule is about `account`.
    pub(super) fn knows(&self, account: &ServiceAccount) -> bool {
        self.rules_of(account).next().is_some()
    }

    fn rules_of(&self, account: &ServiceAccount) -> impl Iterator<Item = &AccountRule> {
        let of = |rule: &&AccountRule| rule.namespaces.take(&account.namespace) && rule.accounts.take(&account.name);
        self.allow.iter().filter(of)
    }
}
