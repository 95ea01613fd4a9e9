//! Settings of an agent: a TOML file, read at the start. Its rules are read again when it changes (`rules.rs`).

mod accept;
mod account_rules;
mod admission;
mod advisor;
mod audit;
mod cluster_access;
mod gates;
mod handoff;
mod kueue;
mod peers;
mod pins;
mod quantity;
mod sidecar;
mod staging;
#[cfg(test)]
mod tests;
mod webhook;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

#[cfg(test)]
pub(super) use self::accept::tests::accepts;
pub use self::accept::{Accepts, SenderQuota};
use self::admission::AdmissionSection;
use self::advisor::AdvisorSection;
pub use self::audit::AuditConfig;
use self::audit::AuditSection;
use self::cluster_access::HELD_NAMES;
use self::gates::GatesSection;
pub use self::handoff::HandoffConfig;
use self::handoff::HandoffSection;
use self::kueue::KueueSection;
pub use self::peers::PeersConfig;
use self::peers::{LimitSection, PeersSection};
pub use self::pins::CallerPins;
use self::pins::CallerPinsSection;
pub(super) use self::quantity::{Bytes, Span};
use self::sidecar::SidecarSection;
pub use self::sidecar::{RestoredInput, SidecarConfig, WatchedFolder};
pub use self::staging::StagingConfig;
use self::staging::StagingSection;
use self::webhook::WebhookSection;
use super::advisor::SitesPaths;
use super::gates::GatesConfig;
use super::kube::KubeRules;
use super::kueue::KueueConfig;
use super::service_account::ServiceAccountConfig;
use super::slurm::SlurmHints;
use super::socket::{self, SOCKET_PATH_MAX};
use super::user_rules::UserRules;
use super::webhook::WebhookConfig;
use crate::cache::TenantQuotas;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::GIB;
use crate::pattern::Patterns;
use crate::policy::{AllowList, AllowRule, Callers, agents};
use crate::storage::{Location, StoreOptions};
use crate::transfer::Admission;
use crate::tree::{FileStamp, read_own_target};

/// Limit of the settings file, in bytes.
const FILE_LEN_MAX: u64 = 1 << 20;
/// Default grace period: less than the 30 seconds that Kubernetes gives
/// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination>).
const GRACE: Duration = Duration::from_secs(25);
/// Default interval of inventories.
const INVENTORY_EVERY: Duration = Duration::from_mins(1);
/// Default interval of reports of usage.
const USAGE_EVERY: Duration = Duration::from_mins(10);

/// The settings of an agent.
#[derive(Clone, Debug)]
pub struct Config {
    /// The settings file.
    pub file: PathBuf,
    /// State of the settings file when it was read.
    pub(super) stamp: FileStamp,
    /// Unix socket.
    pub socket: PathBuf,
    /// Loopback address of the API, if any.
    pub http: Option<SocketAddr>,
    /// Serve `/metrics` on loopback without the token.
    pub open_metrics: bool,
    /// Repositories, the default one first; at least one.
    pub repositories: Vec<Location>,
    /// Options of their stores.
    pub store: StoreOptions,
    /// Memory for the buffers of all repositories together, in bytes, if it is set.
    pub memory: Option<u64>,
    /// Cache, if one is configured.
    pub cache: Option<CacheConfig>,
    /// Memory for tensors that the processes of this node share, if there is any.
    pub staging: Option<StagingConfig>,
    /// Files of the advisor, if the agent is one.
    pub advisor: Option<SitesPaths>,
    /// Rules for the pods of a scheduler that asks; if there are none, it may not.
    pub kube: KubeRules,
    /// Rules for tasks of `SkyPilot`.
    pub skypilot: UserRules,
    /// Files of hints for Slurm, if it writes any.
    pub slurm: Option<SlurmHints>,
    /// Grace period: time that running tasks have after a shutdown request.
    pub grace: Duration,
    /// Folder with certificate, key and authority, if the agent has an identity.
    pub identity: Option<PathBuf>,
    /// Address for other agents, over QUIC and TCP; only with an identity and a cache.
    pub listen: Option<SocketAddr>,
    /// Limits of connections and requests of other agents.
    pub admission: Admission,
    /// Discovery of other agents.
    pub peers: PeersConfig,
    /// Names that other agents may read; none without a rule.
    pub allow: AllowList,
    /// Agents that may call this one.
    pub callers: Callers,
    /// Agents that may read the metrics of this one.
    pub scrapers: Callers,
    /// Limits of the pins of each caller.
    pub caller_pins: CallerPins,
    /// File of the tokens for the API on loopback, if there may be any.
    pub tokens: Option<PathBuf>,
    /// Limits of the pins of the tokens of one tenant, or of a token without one.
    pub token_pins: CallerPins,
    /// Settings of the handoff store, if it is enabled.
    pub handoff: Option<HandoffConfig>,
    /// The audit log, if decisions are recorded.
    pub audit: Option<AuditConfig>,
    /// Settings of the sidecar.
    pub sidecar: SidecarConfig,
    /// Source of the certificate, if it comes from a webhook.
    pub service_account: Option<ServiceAccountConfig>,
    /// Webhook for the API server of Kubernetes, if it has one.
    pub webhook: Option<Box<WebhookConfig>>,
    /// Controller for Kueue, if the agent is one.
    pub kueue: Option<Box<KueueConfig>>,
    /// Controller of scheduling gates, if the agent is one.
    pub gates: Option<Box<GatesConfig>>,
}

/// Folder and size of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Its directory.
    pub dir: PathBuf,
    /// Maximum size in bytes.
    pub capacity: u64,
    /// Free bytes to leave on the disk, whatever the capacity.
    pub free_floor: u64,
    /// Quotas of tenants.
    pub quotas: TenantQuotas,
    /// Interval at which the agent publishes what the cache holds; zero: never.
    pub inventory: Duration,
    /// Interval at which the agent publishes what it has moved; zero: never.
    pub usage: Duration,
}

/// The settings file as TOML.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    socket: Option<PathBuf>,
    http: Option<SocketAddr>,
    #[serde(default)]
    open_metrics: bool,
    repository: Option<String>,
    #[serde(default)]
    repositories: Vec<String>,
    endpoint: Option<String>,
    #[serde(default)]
    allow_http: bool,
    memory: Option<Bytes>,
    cache: Option<CacheSection>,
    staging: Option<StagingSection>,
    advisor: Option<AdvisorSection>,
    grace: Option<Span>,
    identity: Option<PathBuf>,
    listen: Option<SocketAddr>,
    admission: Option<AdmissionSection>,
    peers: Option<PeersSection>,
    #[serde(default, deserialize_with = "agents")]
    callers: Patterns,
    #[serde(default, deserialize_with = "agents")]
    scrapers: Patterns,
    #[serde(default)]
    caller_pins: CallerPinsSection,
    tokens: Option<PathBuf>,
    #[serde(default)]
    token_pins: CallerPinsSection,
    #[serde(default)]
    allow: Vec<AllowRule>,
    #[serde(default)]
    limits: Vec<LimitSection>,
    handoff: Option<HandoffSection>,
    audit: Option<AuditSection>,
    #[serde(default)]
    sidecar: SidecarSection,
    service_account: Option<ServiceAccountSection>,
    webhook: Option<WebhookSection>,
    kueue: Option<KueueSection>,
    gates: Option<GatesSection>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceAccountSection {
    url: String,
    token: PathBuf,
    authorities: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheSection {
    dir: PathBuf,
    capacity: Bytes,
    free_floor: Option<Bytes>,
    tenant_quota: Option<Bytes>,
    #[serde(default)]
    tenants: BTreeMap<String, Bytes>,
    inventory: Option<Span>,
    usage: Option<Span>,
}

impl Config {
    /// Reads the settings in the file at `path`.
    ///
    /// # Errors
    /// Usage, for invalid settings; errors of the file system.
    pub fn read(path: &Path) -> Result<Self> {
        let io = |error| Error::io("cannot read the agent's settings", path, error);
        let path = &std::path::absolute(path).map_err(io)?;
        let stamp = FileStamp::at(path);
        let text = read_own_target(path, FILE_LEN_MAX).map_err(|error| match error.kind() {
            ErrorKind::NotFound => error.help("write the file first; `towline help agent` has an example"),
            _ => error,
        })?;
        Ok(Self { stamp, ..Self::parse(&text, path)? })
    }

    /// Parses the settings in `text`; relative paths are relative to the folder of `path`, the settings file.
    ///
    /// # Errors
    /// Usage, for invalid settings.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let file: File = toml::from_str(text).map_err(|source| {
            Error::usage("settings of the agent are malformed")
                .at(path.display())
                .help("docs/operations.md lists the keys")
                .source(source)
        })?;
        file.settle(path).map_err(|error| if error.place().is_none() { error.at(path.display()) } else { error })
    }
}

impl File {
    fn settle(self, path: &Path) -> Result<Config> {
        self.can_have_peers()?;
        let (folder, held_names) = (path.parent().unwrap_or(Path::new("/")), self.held_names());
        let socket = match self.socket {
            Some(path) => folder.join(path),
            None => socket::well_known(),
        };
        socket_fits(&socket)?;
        if let Some(http) = self.http.filter(|http| !http.ip().is_loopback()) {
            return Err(Error::usage("`http` is not a loopback address: it is not encrypted")
                .expected("127.0.0.1:PORT or [::1]:PORT")
                .got(http)
                .help("put a TLS proxy on this machine in front of it"));
        }
        let several = self.repositories.len() > 1;
        let webhook = self.webhook.map(|webhook| {
            let first = self.repository.as_ref().or(self.repositories.first()).map_or("", String::as_str);
            webhook.settle(folder, (first, self.endpoint.as_deref(), self.allow_http))
        });
        let cache = self.cache.map(|cache| CacheConfig {
            dir: folder.join(cache.dir),
            capacity: cache.capacity.0,
            free_floor: cache.free_floor.map_or(GIB, |bytes| bytes.0),
            quotas: TenantQuotas {
                each: cache.tenant_quota.map(|bytes| bytes.0),
                tenants: cache.tenants.into_iter().map(|(tenant, bytes)| (tenant, bytes.0)).collect(),
            },
            // It lists the chunks of all repositories, which readers of one should not learn of another by default.
            inventory: cache.inventory.map_or(if several { Duration::ZERO } else { INVENTORY_EVERY }, |span| span.0),
            usage: cache.usage.map_or(USAGE_EVERY, |span| span.0),
        });
        let capacity = cache.as_ref().map_or(0, |cache| cache.capacity);
        Ok(Config {
            file: path.to_owned(),
            stamp: FileStamp::default(),
            socket,
            http: self.http,
            open_metrics: self.open_metrics,
            repositories: repositories(folder, self.repository, self.repositories)?,
            store: StoreOptions { endpoint: self.endpoint, allow_http: self.allow_http, ..StoreOptions::default() },
            memory: self.memory.map(|bytes| bytes.0),
            cache,
            kube: self.advisor.as_ref().map(AdvisorSection::kube).transpose()?.unwrap_or_default(),
            skypilot: self.advisor.as_ref().map(AdvisorSection::skypilot).transpose()?.unwrap_or_default(),
            slurm: self.advisor.as_ref().map(|advisor| advisor.slurm(folder)).transpose()?.flatten(),
            advisor: self.advisor.map(|advisor| SitesPaths {
                sites: folder.join(advisor.sites),
                prices: advisor.prices.map(|prices| folder.join(prices)),
            }),
            grace: self.grace.map_or(GRACE, |span| span.0),
            identity: self.identity.as_ref().map(|path| folder.join(path)),
            listen: self.listen,
            admission: self.admission.unwrap_or_default().settle()?,
            peers: self.peers.unwrap_or_default().settle(self.limits),
            allow: AllowList::only(self.allow),
            callers: Callers::of(self.callers),
            scrapers: Callers::of(self.scrapers),
            caller_pins: self.caller_pins.settle(capacity),
            tokens: self.tokens.map(|path| folder.join(path)),
            token_pins: self.token_pins.settle(capacity),
            staging: self.staging.map(StagingSection::settle),
            handoff: self.handoff.map(|handoff| handoff.settle(folder)).transpose()?,
            audit: self.audit.map(|audit| audit.settle(folder, self.identity.is_some())).transpose()?,
            sidecar: self.sidecar.settle(folder)?,
            service_account: self.service_account.zip(self.identity).map(|found| service_account(found, folder)),
            webhook: webhook.transpose()?.map(Box::new),
            kueue: self.kueue.map(|kueue| kueue.settle(folder, held_names)).transpose()?.map(Box::new),
            gates: self.gates.map(|gates| gates.settle(folder, held_names)).transpose()?.map(Box::new),
        })
    }

    /// Default of what a controller holds: both controllers of an agent share its pins at others.
    fn held_names(&self) -> usize {
        if self.kueue.is_some() && self.gates.is_some() { HELD_NAMES / 2 } else { HELD_NAMES }
    }

    /// Checks the dependencies between settings: peers need an identity, and chunks are served from the cache.
    fn can_have_peers(&self) -> Result<()> {
        if self.listen.is_none() && !self.callers.is_empty() {
            return Err(Error::usage("`callers` is set, but not `listen`").help("set both, or neither"));
        }
        if self.listen.is_none() && !self.scrapers.is_empty() {
            return Err(Error::usage("`scrapers` is set, but not `listen`").help("set both, or neither"));
        }
        if self.listen.is_none() && self.handoff.is_some() {
            return Err(Error::usage("[handoff] is set, but not `listen`").help("set both, or neither"));
        }
        if self.listen.is_none() && self.admission.is_some() {
            return Err(Error::usage("[admission] is set, but not `listen`").help("set both, or neither"));
        }
        if self.http.is_none() && self.open_metrics {
            return Err(Error::usage("`open_metrics` is set, but not `http`").help("set both, or neither"));
        }
        if self.http.is_none() && self.tokens.is_some() {
            return Err(Error::usage("`tokens` is set, but not `http`: tokens are used on loopback")
                .help("set both, or neither; the socket needs no token"));
        }
        if self.identity.is_none() && self.service_account.is_some() {
            return Err(Error::usage("[service_account] is set, but not `identity`: the folder for its certificate"));
        }
        if self.cache.is_none() && self.webhook.is_some() {
            return Err(Error::usage("[webhook] is set, but no cache").help("set [cache] dir and capacity"));
        }
        let controllers = [("kueue", self.kueue.is_some()), ("gates", self.gates.is_some())];
        for (section, _) in controllers.iter().filter(|(_, set)| *set) {
            let needed = [
                (self.advisor.is_none(), "[advisor]"),
                (self.cache.is_none(), "[cache]"),
                (self.identity.is_none(), "`identity`"),
            ];
            if let Some((_, lacking)) = needed.iter().find(|(lacks, _)| *lacks) {
                return Err(Error::usage(format!("[{section}] is set, but not {lacking}"))
                    .help("it asks the advisor of its own agent, and other agents by its certificate"));
            }
        }
        self.sidecar.check_inputs(self.cache.is_some(), self.staging.is_some())?;
        let names_others = self.peers.as_ref().is_some_and(PeersSection::wants);
        if self.sidecar.hands_off() && !names_others {
            return Err(Error::usage("[sidecar] handoff_to is set, but [peers] names no other agent")
                .help("configure their addresses: addresses, dns or registered in [peers]"));
        }
        let wants = match (self.listen, names_others) {
            (Some(_), _) => "`listen` is set",
            (None, true) => "[peers] names other agents",
            (None, false) => return Ok(()),
        };
        if self.listen.is_none() && self.peers.as_ref().is_some_and(PeersSection::registers) {
            return Err(Error::usage("[peers] register is set, but not `listen`").help("set both, or neither"));
        }
        if self.identity.is_none() {
            return Err(Error::usage(format!("{wants}, but no identity"))
                .help("create one: towline identity issue SITE/AGENT --to DIR; then set `identity` to DIR"));
        }
        if self.cache.is_none() {
            return Err(Error::usage(format!("{wants}, but no cache")).help("set [cache] dir and capacity"));
        }
        if self.listen.is_some() && self.allow.is_empty() {
            return Err(Error::usage("`listen` is set, but no [[allow]] says which agents may read which names")
                .expected("a rule, such as [[allow]] agents = \"cloud/*\" names = \"run-7/**\"")
                .help(
                    "add one; a rule for everything and every agent of the authority is: [[allow]] agents = \"**\" names = \"**\"",
                ));
        }
        Ok(())
    }
}

/// Source of the certificate of a pod, whose folder is `identity`.
fn service_account((account, identity): (ServiceAccountSection, PathBuf), folder: &Path) -> ServiceAccountConfig {
    ServiceAccountConfig {
        url: account.url,
        token: folder.join(account.token),
        authorities: folder.join(account.authorities),
        folder: folder.join(identity),
    }
}

/// The address of a socket has at most 107 bytes and a zero (<https://man7.org/linux/man-pages/man7/unix.7.html>).
fn socket_fits(socket: &Path) -> Result<()> {
    let len = socket.as_os_str().len();
    if len <= SOCKET_PATH_MAX {
        return Ok(());
    }
    Err(Error::usage("path of the socket is too long")
        .at(socket.display())
        .expected(format!("at most {SOCKET_PATH_MAX} bytes"))
        .got(len)
        .help("set `socket` to a shorter path, such as /run/towline/agent.sock"))
}

fn repositories(folder: &Path, one: Option<String>, several: Vec<String>) -> Result<Vec<Location>> {
    if one.is_some() && !several.is_empty() {
        return Err(Error::usage("both `repository` and `repositories` are set").help("list all in `repositories`"));
    }
    let located = |text: String| {
        let location: Location = text.parse()?;
        if text.contains("://") { Ok(location) } else { Location::directory(folder.join(text)) }
    };
    let found: Vec<Location> = one.into_iter().chain(several).map(located).collect::<Result<_>>()?;
    if found.is_empty() {
        return Err(Error::usage("no repository is set").help("set `repository` to a path or s3://BUCKET/PREFIX"));
    }
    Ok(found)
}
