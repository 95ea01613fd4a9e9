//! Arguments of commands for agents and certificates.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use super::{Target, target};
use crate::agent::AgentSelector;
use crate::cli::help::agents as help;
use crate::repository::Selector;
use crate::transfer::exchange;
use crate::transfer::identity::{AGENT_DAYS, AUTHORITY_DAYS, Identity};
use crate::{size, span};

/// Commands for agents and certificates.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum AgentVerb {
    /// Make the certificates by which agents know each other
    #[command(after_help = help::IDENTITY, subcommand_required = true, arg_required_else_help = true)]
    Identity {
        #[command(subcommand)]
        what: IdentityVerb,
    },
    /// Run an agent: a cache, repositories and an API for the processes of this node
    #[command(after_help = help::AGENT)]
    Agent {
        /// Its settings
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        config: PathBuf,
    },
    /// Have the agent bring what names hold into its cache, before somebody needs it
    #[command(after_help = help::WARM)]
    Warm(Warm),
    /// Have the agent keep what a name holds in its cache
    #[command(after_help = help::PIN)]
    Pin(Pin),
    /// End pins
    #[command(after_help = help::UNPIN)]
    Unpin {
        /// Which, as `towline pins` lists them
        #[arg(value_name = "PIN", required = true)]
        pins: Vec<String>,
        #[command(flatten)]
        at: AtOption,
    },
    /// List the agent's pins
    #[command(after_help = help::PINS)]
    Pins(AtOption),
    /// Look at the agent's cache, check it, make room in it
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
    /// Watch what the agent does
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
    /// True if `towline.toml` bears on it: not if it needs no repository, or asks the agent for its state.
    pub(super) fn reads_settings(&self) -> bool {
        matches!(self, Self::Warm(_) | Self::Pin(_))
    }
}

/// `towline warm`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Warm {
    /// Name to fetch: all that a restore of it needs; or of one file or folder of it
    #[arg(value_name = "NAME[:SUBPATH]", required = true, value_parser = target())]
    pub(in crate::cli) what: Vec<Target>,
    /// Keep it so long: 24h, 7d; what was pinned before for the same name and owner ends
    #[arg(long, value_name = "DURATION", value_parser = span::parse)]
    pub(in crate::cli) pin: Option<Duration>,
    /// Owner of the pin [default: the user's name]
    #[arg(long, value_name = "TEXT", requires = "pin")]
    pub(in crate::cli) owner: Option<String>,
    /// Where from, and nowhere else: the agents of a site, one agent, or `repository` [default: the nearest that has it]
    #[arg(long, value_name = "SITE|SITE/AGENT|repository")]
    pub(in crate::cli) from: Option<exchange::From>,
    /// Read from the repository what that place lacks
    #[arg(long, requires = "from")]
    pub(in crate::cli) or_repository: bool,
    /// Wait until it is there
    #[arg(long)]
    pub(in crate::cli) wait: bool,
    /// Only say what is lacking
    #[arg(long, conflicts_with = "wait")]
    pub(in crate::cli) dry_run: bool,
    #[command(flatten)]
    pub(in crate::cli) at: AtOption,
}

/// The agent that does it.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct AtOption {
    /// Ask another agent, by way of the one here: the one of a site that the name falls to, or this one
    #[arg(long, value_name = "SITE|SITE/AGENT")]
    pub(in crate::cli) at: Option<AgentSelector>,
}

/// `towline pin`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Pin {
    /// Name to keep: all that its restore needs
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
    /// Show its figures
    Stat(AtOption),
    /// Read all of it, and drop what is damaged
    Check,
    /// Drop what is not pinned until so much is free that was not before
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
    /// Save checkpoints that were set aside now
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

/// `towline identity`.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum IdentityVerb {
    /// Make an authority: what it signs, its agents trust
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
        /// Which agent of which site
        #[arg(value_name = "SITE/AGENT", value_parser = identity)]
        agent: Identity,
        /// The folder for tls.crt, tls.key and ca.crt
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        to: PathBuf,
        #[command(flatten)]
        authority: AuthorityFolder,
        /// Validity of the certificate
        #[arg(long, value_name = "DAYS", default_value_t = AGENT_DAYS)]
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
    /// Tell what certificates say
    Show {
        /// A file of certificates, or a folder with tls.crt or ca.crt
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

fn identity(text: &str) -> Result<Identity, String> {
    let names = text.strip_prefix("towline://").unwrap_or(text).split_once('/');
    let (site, agent) = names.ok_or("an agent is SITE/AGENT")?;
    Identity::new(site, agent).map_err(|error| error.to_string())
}
