//! Arguments of commands for agents and certificates.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use super::{Target, target};
use crate::agent::AgentSelector;
use crate::repository::Selector;
use crate::transfer::exchange;
use crate::transfer::identity::{AGENT_DAYS, AUTHORITY_DAYS, Identity};
use crate::{size, span};

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
