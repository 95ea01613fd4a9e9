//! Arguments of commands for agents and certificates.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueHint};

use super::audit::AuditVerb;
use super::{Target, target};
use crate::agent::AgentSelector;
use crate::cli::help::{agents as help, audit as audit_help};
use crate::cli::hint::HintArgs;
use crate::cli::sites::SitesArgs;
use crate::cli::usage::UsageArgs;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::ops::{DecodeOn, TensorSelector};
use crate::policy::Sensitivity;
use crate::selector::Selector;
use crate::transfer::exchange;
use crate::transfer::identity::{AGENT_DAYS, AUTHORITY_DAYS, POLICY_DAYS};
use crate::{size, span};

/// Commands for agents and certificates.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum AgentVerb {
    /// Make the certificates that identify agents to each other
    #[command(after_help = help::IDENTITY, subcommand_required = true, arg_required_else_help = true)]
    Identity {
        #[command(subcommand)]
        what: IdentityVerb,
    },
    /// Run an agent: a cache, repositories and an API for the processes of this node
    #[command(after_help = help::AGENT)]
    Agent {
        /// Settings file of the agent
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        config: PathBuf,
    },
    /// Show, check, sign, set and explain the policy of a repository
    #[command(after_help = help::POLICY, subcommand_required = true, arg_required_else_help = true)]
    Policy {
        #[command(subcommand)]
        what: PolicyVerb,
    },
    /// List the sites where jobs may run
    #[command(after_help = help::SITES)]
    Sites {
        #[command(flatten)]
        files: SitesArgs,
        /// Fail unless the repository has a policy to check the file against
        #[arg(long)]
        check: bool,
        /// Print the JSON schema of sites files
        #[arg(long, conflicts_with = "check")]
        schema: bool,
    },
    /// List the links between sites, with their prices
    #[command(after_help = help::LINKS)]
    Links {
        #[command(flatten)]
        files: SitesArgs,
        /// Show what agents have measured, and how well hints have predicted their transfers
        #[arg(long)]
        measured: bool,
    },
    /// Compare the sites where a job may run: bytes to move, time, dollars, and what the policy says
    #[command(after_help = help::HINT)]
    Hint(HintArgs),
    /// Show what agents moved in a month, and what it cost
    #[command(after_help = help::USAGE)]
    Usage(UsageArgs),
    /// Loosen the labels of a name, signed by the policy key
    #[command(after_help = help::DECLASSIFY)]
    Declassify {
        /// Name
        name: Name,
        /// New sensitivity
        #[arg(long, value_name = "LEVEL")]
        sensitivity: Sensitivity,
        /// New residency: jurisdictions, or `any` [default: unchanged]
        #[arg(long, value_name = "LIST")]
        residency: Option<String>,
        /// Reason, for the audit
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Folder of the policy key
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        key: PathBuf,
    },
    /// Have the agent prefetch names into its cache
    #[command(after_help = help::WARM)]
    Warm(Warm),
    /// Have the agent read tensors into memory, which processes of this node map
    #[command(after_help = help::STAGE)]
    Stage(Stage),
    /// Have the agent keep a name's chunks in its cache
    #[command(after_help = help::PIN)]
    Pin(Pin),
    /// End pins
    #[command(after_help = help::UNPIN)]
    Unpin {
        /// Ids that `towline pins` shows
        #[arg(value_name = "PIN", required = true)]
        pins: Vec<String>,
        #[command(flatten)]
        at: AtOption,
    },
    /// List the agent's pins
    #[command(after_help = help::PINS)]
    Pins(AtOption),
    /// Show, check and evict from the agent's cache
    #[command(after_help = help::CACHE, subcommand_required = true, arg_required_else_help = true)]
    Cache {
        #[command(subcommand)]
        what: CacheVerb,
    },
    /// List, retry or drop the checkpoints that other agents handed off to this one
    #[command(after_help = help::HANDOFF, subcommand_required = true, arg_required_else_help = true)]
    Handoff {
        #[command(subcommand)]
        what: HandoffVerb,
    },
    /// Show and verify an audit log
    #[command(after_help = audit_help::AUDIT, subcommand_required = true, arg_required_else_help = true)]
    Audit {
        #[command(subcommand)]
        what: AuditVerb,
    },
    /// Make, list and revoke tokens with limited rights for the agent's API on loopback
    #[command(after_help = help::TOKEN, subcommand_required = true, arg_required_else_help = true)]
    Token {
        #[command(subcommand)]
        what: TokenVerb,
    },
    /// Serve the agent's page on loopback, for a browser
    #[command(after_help = help::PAGE)]
    Page {
        /// Port on loopback; default: one that the system chooses
        #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
        port: u16,
    },
    /// Show the agent's tasks, cache, peers and committed hints, and an advisor's sites, as they change
    #[command(after_help = help::TOP)]
    Top {
        /// Show it once, then end
        #[arg(long)]
        once: bool,
        /// Show nothing, and end with exit code 6 unless the agent is ready: for probes
        #[arg(long, conflicts_with = "once")]
        ready: bool,
        #[command(flatten)]
        at: AtOption,
    },
}

impl AgentVerb {
    /// True if the command reads `towline.toml`: not if it needs no repository, or asks the agent for its state.
    pub(super) fn reads_settings(&self) -> bool {
        matches!(
            self,
            Self::Warm(_)
                | Self::Stage(_)
                | Self::Pin(_)
                | Self::Audit { .. }
                | Self::Policy { .. }
                | Self::Declassify { .. }
                | Self::Sites { .. }
                | Self::Links { .. }
                | Self::Hint(_)
                | Self::Usage(_)
        )
    }
}

/// `towline policy`.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum PolicyVerb {
    /// Show the policy in force
    Show,
    /// Check a policy that is not set yet: its syntax, and rules that are never reached
    Check {
        /// The policy
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Sign a policy
    Sign {
        /// The policy
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Folder of the policy key
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        key: PathBuf,
        /// Where to write the signed policy [default: over FILE]
        #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
        to: Option<PathBuf>,
    },
    /// Put a signed policy in force
    Set {
        /// The signed policy
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Set it even if it lets this machine read nothing
        #[arg(long)]
        lock_out: bool,
    },
    /// Check that a policy decides as a file of cases expects; ends with exit code 1 if it does not
    Test {
        /// The cases
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// The policy [default: the one that the cases name, else the one in force]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        policy: Option<PathBuf>,
    },
    /// Say which rule decides whether a name may go to a site
    Explain {
        /// Name
        name: Selector,
        /// Destination site
        #[arg(long, value_name = "SITE")]
        to: String,
        /// Agent that asks, as SITE/AGENT [default: any of that site]
        #[arg(long, value_name = "SITE/AGENT")]
        agent: Option<String>,
        /// Whoever asks there, as user:NAME or token:NAME [default: unknown, as for the agents of other machines]
        #[arg(long, value_name = "CALLER")]
        caller: Option<String>,
        /// Tenant of that token
        #[arg(long, value_name = "TENANT", requires = "caller")]
        caller_tenant: Option<String>,
        /// By this policy, not the one in force
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        policy: Option<PathBuf>,
    },
}

/// `towline warm`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Warm {
    /// Name to fetch, or one file or folder of it: all that its restore needs
    #[arg(value_name = "NAME[:SUBPATH]", required = true, value_parser = target())]
    pub(in crate::cli) what: Vec<Target>,
    /// Pin it for this time: 24h, 7d; replaces a pin of the same name and owner that ends earlier
    #[arg(long, value_name = "DURATION", value_parser = span::parse)]
    pub(in crate::cli) pin: Option<Duration>,
    /// Owner of the pin [default: the user's name]
    #[arg(long, value_name = "TEXT", requires = "pin")]
    pub(in crate::cli) owner: Option<String>,
    /// Only source: the agents of a site, one agent, or `repository` [default: the nearest that has it]
    #[arg(long, value_name = "SITE|SITE/AGENT|repository")]
    pub(in crate::cli) from: Option<exchange::From>,
    /// Read from the repository what that source lacks
    #[arg(long, requires = "from")]
    pub(in crate::cli) or_repository: bool,
    /// Wait until it is in the cache
    #[arg(long)]
    pub(in crate::cli) wait: bool,
    /// Only report what is missing
    #[arg(long)]
    pub(in crate::cli) dry_run: bool,
    #[command(flatten)]
    pub(in crate::cli) at: AtOption,
}

/// `towline stage`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("stage").required(true).args(["what", "list", "clear"])))]
pub(in crate::cli) struct Stage {
    /// Name to stage, or one file or folder of it
    #[arg(value_name = "NAME[:SUBPATH]", value_parser = target())]
    pub(in crate::cli) what: Option<Target>,
    /// Only these tensors, or a box of each; may be given several times
    #[arg(long = "tensor", value_name = "[PATH:]GLOB[BOX]", requires = "what")]
    pub(in crate::cli) tensors: Vec<TensorSelector>,
    /// List what is in memory
    #[arg(long)]
    pub(in crate::cli) list: bool,
    /// Free the memory that no process uses
    #[arg(long)]
    pub(in crate::cli) clear: bool,
    /// Load them without the agent's memory, print the times of the stages, and free them
    #[arg(long, requires = "what", conflicts_with_all = ["list", "clear"])]
    pub(in crate::cli) bench: bool,
    /// Load them there: host, or cuda:N [default: host]
    #[arg(long, value_name = "DEVICE", requires = "bench")]
    pub(in crate::cli) device: Option<DeviceName>,
    /// Decode and verify them there, on their way to a GPU: cpu, or gpu [default: cpu]
    #[arg(long, value_name = "DEVICE", requires = "device")]
    pub(in crate::cli) decode_on: Option<DecodeOn>,
}

/// Memory that tensors are loaded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum DeviceName {
    /// Memory of this machine.
    Host,
    /// Memory of the GPU with this number.
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let gpu = match text {
            "host" | "cpu" => return Ok(Self::Host),
            "cuda" => Some(0),
            other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        let unknown = || Error::usage("no such device").expected("host, or cuda:N").got(format!("{text:?}"));
        gpu.map(Self::Cuda).ok_or_else(unknown)
    }
}

/// Choice of the agent.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct AtOption {
    /// Use another agent, through the local one: an agent, or a site, whose agent the name decides
    #[arg(long, value_name = "SITE|SITE/AGENT")]
    pub(in crate::cli) at: Option<AgentSelector>,
}

/// `towline pin`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Pin {
    /// Name to pin: all that its restore needs
    pub(in crate::cli) name: Selector,
    /// Duration: 24h, 7d [default: until it is unpinned]
    #[arg(long = "for", value_name = "DURATION", value_parser = span::parse)]
    pub(in crate::cli) lasting: Option<Duration>,
    /// Owner of the pin [default: the user's name]
    #[arg(long, value_name = "TEXT")]
    pub(in crate::cli) owner: Option<String>,
    /// Reason [default: the name]
    #[arg(long, value_name = "TEXT")]
    pub(in crate::cli) reason: Option<String>,
    #[command(flatten)]
    pub(in crate::cli) at: AtOption,
}

/// `towline cache`.
#[derive(Clone, Debug, Subcommand)]
pub(in crate::cli) enum CacheVerb {
    /// Show statistics
    Stat(AtOption),
    /// Read all chunks, and drop damaged ones
    Check,
    /// Evict unpinned chunks until this many more bytes are free
    Evict {
        /// Bytes to evict: 512M, 10G
        #[arg(value_name = "SIZE", value_parser = size::parse)]
        bytes: u64,
    },
}

/// `towline handoff`.
#[derive(Clone, Debug, Subcommand)]
pub(in crate::cli) enum HandoffVerb {
    /// List stored checkpoints, and why some were set aside
    List(AtOption),
    /// Retry checkpoints that were set aside, now
    Retry {
        /// Ids that `towline handoff list` shows
        #[arg(value_name = "ID", required = true)]
        ids: Vec<String>,
    },
    /// Delete checkpoints without saving them
    Drop {
        /// Ids that `towline handoff list` shows
        #[arg(value_name = "ID", required = true)]
        ids: Vec<String>,
    },
}

/// `towline token`.
#[derive(Clone, Debug, Subcommand)]
pub(in crate::cli) enum TokenVerb {
    /// Make a token, and print its secret, which is shown only once
    New {
        /// Scope: read=PATTERN, save=PATTERN, folder=DIR, warm, pins, metrics or admin
        #[arg(long = "scope", value_name = "SCOPE", required = true)]
        scopes: Vec<String>,
        /// Label, for people
        #[arg(long, value_name = "TEXT")]
        name: Option<String>,
        /// Tenant whose quota its pins count against [default: it has a quota of its own]
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
        /// Validity: 24h, 30d [default: until it is revoked]
        #[arg(long, value_name = "DURATION", value_parser = span::parse)]
        expires: Option<Duration>,
    },
    /// List tokens, without their secrets
    List,
    /// Revoke tokens
    Revoke {
        /// Ids that `towline token list` shows
        #[arg(value_name = "ID", required = true)]
        ids: Vec<String>,
    },
}

/// `towline identity`.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum IdentityVerb {
    /// Make an authority, which signs the certificates of agents
    Init {
        #[command(flatten)]
        authority: AuthorityFolder,
        /// Name of the authority
        #[arg(long, value_name = "NAME", default_value = "towline")]
        name: String,
        /// Validity of its certificate
        #[arg(long, value_name = "DAYS", default_value_t = AUTHORITY_DAYS)]
        days: u32,
    },
    /// Make the key and the certificate of an agent
    Issue {
        /// Name of the agent
        #[arg(value_name = "SITE/AGENT", value_parser = identity)]
        agent: Identity,
        /// The folder for tls.crt, tls.key and ca.crt
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        to: PathBuf,
        /// A DNS name for clients that are no agents, such as the API server of Kubernetes; repeatable
        #[arg(long, value_name = "NAME")]
        dns: Vec<String>,
        #[command(flatten)]
        authority: AuthorityFolder,
        /// Validity of the certificate
        #[arg(long, value_name = "DAYS", default_value_t = AGENT_DAYS)]
        days: u32,
    },
    /// Make a key that signs policies, and its certificate
    IssuePolicy {
        /// The folder for policy.key and policy.crt
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        to: PathBuf,
        #[command(flatten)]
        authority: AuthorityFolder,
        /// Validity of the certificate
        #[arg(long, value_name = "DAYS", default_value_t = POLICY_DAYS)]
        days: u32,
    },
    /// Replace the key and the certificate of an agent by new ones
    Rotate {
        /// The folder with its tls.crt
        #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
        folder: PathBuf,
        #[command(flatten)]
        authority: AuthorityFolder,
        /// Validity of the new certificate
        #[arg(long, value_name = "DAYS", default_value_t = AGENT_DAYS)]
        days: u32,
    },
    /// Show certificates
    Show {
        /// A file of certificates, or a folder with tls.crt, policy.crt or ca.crt
        #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
        path: PathBuf,
    },
}

/// Folder of an authority.
#[derive(Debug, Args)]
pub(in crate::cli) struct AuthorityFolder {
    /// The folder with the authority's ca.crt and ca.key [default: ~/.config/towline/authority]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(in crate::cli) authority: Option<PathBuf>,
}

pub(super) fn identity(text: &str) -> Result<Identity, String> {
    let names = text.strip_prefix("towline://").unwrap_or(text).split_once('/');
    let (site, agent) = names.ok_or("an agent is SITE/AGENT")?;
    Identity::new(site, agent).map_err(|error| error.to_string())
}
