//! Arguments of `towline audit`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use crate::cli::help::audit as help;
use crate::identity::Identity;
use crate::pattern::Pattern;
use crate::span;

/// `towline audit`.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum AuditVerb {
    /// Show the entries of an audit log
    #[command(after_help = help::SHOW)]
    Show(AuditShow),
    /// Write the lines of an audit log to standard output, as they are in its files
    #[command(after_help = help::EXPORT)]
    Export {
        #[command(flatten)]
        log: AuditFolder,
        /// Only the last entries: 1h, 7d
        #[arg(long, value_name = "DURATION", value_parser = span::parse)]
        since: Option<Duration>,
    },
    /// Verify that an audit log is unchanged
    #[command(after_help = help::VERIFY)]
    Verify(AuditVerify),
}

/// `towline audit show`.
#[derive(Debug, Args)]
pub(in crate::cli) struct AuditShow {
    #[command(flatten)]
    pub(in crate::cli) log: AuditFolder,
    /// Only the last entries: 1h, 7d
    #[arg(long, value_name = "DURATION", value_parser = span::parse)]
    pub(in crate::cli) since: Option<Duration>,
    /// Only decisions about names that match
    #[arg(long, value_name = "PATTERN", value_parser = |text: &str| Pattern::new(text))]
    pub(in crate::cli) name: Option<Pattern>,
    /// Only denied requests
    #[arg(long)]
    pub(in crate::cli) denied: bool,
}

/// `towline audit verify`.
#[derive(Debug, Args)]
pub(in crate::cli) struct AuditVerify {
    #[command(flatten)]
    pub(in crate::cli) log: AuditFolder,
    /// Agent whose log it must be [default: the one that the log names]
    #[arg(long, value_name = "SITE/AGENT", value_parser = super::agents::identity)]
    pub(in crate::cli) agent: Option<Identity>,
    /// User whose commands the log must be of; the agent has signed its heads
    #[arg(long, value_name = "NAME", requires = "agent")]
    pub(in crate::cli) user: Option<String>,
    /// Authority of the agents: a file of certificates, or a folder with ca.crt and perhaps `revoked`
    /// [default: ~/.config/towline/authority]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(in crate::cli) trusted: Option<PathBuf>,
    /// Do not read the published heads from the repository
    #[arg(long, conflicts_with = "trusted")]
    pub(in crate::cli) offline: bool,
    /// Compare only the newest N heads: faster, but whoever has the agent's key can have published N heads after a cut
    #[arg(long, value_name = "N", conflicts_with = "offline")]
    pub(in crate::cli) heads: Option<usize>,
    /// Number of the first entry, if segments before it were moved elsewhere
    #[arg(long, value_name = "ENTRY", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(in crate::cli) first: u64,
}

/// Folder of an audit log.
#[derive(Debug, Args)]
pub(in crate::cli) struct AuditFolder {
    /// The folder of the log [also: the variable `TOWLINE_AUDIT`]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(in crate::cli) dir: Option<PathBuf>,
}
