//! The command line as types.

#[cfg(feature = "agent")]
mod agents;
#[cfg(feature = "agent")]
mod audit;
mod moves;

use std::ffi::OsString;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum, ValueHint};

#[cfg(feature = "agent")]
pub(super) use self::agents::{
    AgentVerb, AtOption, AuthorityFolder, CacheVerb, DeviceName, HandoffVerb, IdentityVerb, Pin, PolicyVerb, Stage,
    TokenVerb, Warm,
};
#[cfg(feature = "agent")]
pub(super) use self::audit::{AuditFolder, AuditShow, AuditVerb, AuditVerify};
pub(super) use self::moves::{Cp, Rm, Sync, Undelete};
use super::config::Flags;
use super::help;
use super::target::Target;
use crate::checkpoint::boxes::Shard;
use crate::codec::Compression;
use crate::error::Error;
use crate::name::Name;
use crate::ops::{CutChoice, LoggedMetric, TensorSelector};
use crate::repository::log::AttemptId;
use crate::selector::Selector;
use crate::size::{self, ByteRange};
use crate::span;
use crate::storage::Sharing;

/// Save once, move only what the other side lacks, check every byte.
#[derive(Debug, Parser)]
#[command(name = "towline", version, long_about = help::ABOUT, after_help = help::SHORT, after_long_help = help::MANUAL)]
#[command(max_term_width = 100, subcommand_required = true, arg_required_else_help = true)]
pub(super) struct Cli {
    #[command(flatten)]
    pub(super) globals: Globals,
    #[command(subcommand)]
    pub(super) verb: Verb,
}

/// Options of every command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Everywhere")]
pub(super) struct Globals {
    #[arg(long, global = true, value_name = "URL", value_hint = ValueHint::DirPath, help = help::REPO)]
    repo: Option<String>,
    #[arg(long, global = true, value_name = "URL", value_hint = ValueHint::Url, help = help::ENDPOINT)]
    #[arg(visible_alias = "endpoint-url")]
    endpoint: Option<String>,
    /// Allow plain http to other machines
    #[arg(long, global = true)]
    allow_http: bool,
    /// Memory budget for buffers: 256M, 1G, ... [default: a quarter of the memory of the cgroup or machine]
    #[arg(long, global = true, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// Print one JSON object on standard output; errors and progress go to standard error
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Print only results and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Print details on standard error; -vv prints more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(super) verbose: u8,
}

impl Globals {
    /// Flags for the choice of the repository.
    pub(super) fn flags(&self) -> Flags {
        Flags {
            repository: self.repo.clone(),
            endpoint: self.endpoint.clone(),
            allow_http: self.allow_http,
            memory: self.memory,
            places: Vec::new(),
        }
    }
}

/// Commands.
#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Create a repository, if it does not exist
    #[command(after_help = help::INIT)]
    Init {
        /// Repository to create [default: see `towline help`]
        #[arg(value_name = "URL", value_hint = ValueHint::DirPath)]
        url: Option<String>,
        /// Share a directory: `group` (the default value) may read and write it, or `all` may read it
        #[arg(long, value_name = "WHOM", num_args = 0..=1, default_missing_value = "group", require_equals = true)]
        shared: Option<Sharing>,
    },
    /// Save a file or a folder under a name
    #[command(after_help = help::SAVE)]
    Save(Save),
    /// Save the checkpoints in a folder as a training finishes them
    #[command(after_help = help::WATCH)]
    Watch(Watch),
    /// Restore a saved file or folder
    #[command(after_help = help::RESTORE)]
    Restore(Restore),
    /// List saved names
    #[command(after_help = help::LS, visible_alias = "list")]
    Ls {
        /// Only this name and those below it
        prefix: Option<Name>,
        /// Also files, chunks, the manifest's digest, and the facts of steps
        #[arg(short, long)]
        long: bool,
    },
    /// List training runs, or the steps of one
    #[command(after_help = help::RUNS)]
    Runs {
        /// Only the runs below this name; or one run, with its steps
        #[arg(value_name = "PREFIX|RUN")]
        prefix: Option<Name>,
    },
    /// Remove the steps of a run that no rule keeps
    #[command(after_help = help::EXPIRE, visible_alias = "forget")]
    Expire(Expire),
    /// Show the contents of a name
    #[command(after_help = help::SHOW)]
    Show(Show),
    /// List the tensors of a name
    #[command(after_help = help::TENSORS)]
    Tensors {
        /// Name or choice of a step
        name: Selector,
        /// Only tensors that match, or in files that match
        #[arg(value_name = "[PATH:]GLOB")]
        only: Vec<TensorSelector>,
    },
    /// Compare two names
    #[command(after_help = help::DIFF)]
    Diff {
        /// Old name
        a: Selector,
        /// New name
        b: Selector,
    },
    /// Write a saved file, or part of it, to standard output
    #[command(after_help = help::CAT)]
    Cat {
        /// Name, and file in it; a tree of one file needs no path
        #[arg(value_name = "NAME[:PATH]", value_parser = target())]
        file: Target,
        /// Only these bytes: A-B (inclusive), A- or -N (the last N)
        #[arg(long, value_name = "A-B", allow_hyphen_values = true)]
        range: Option<ByteRange>,
    },
    /// Remove names; `undelete` restores them for a while
    #[command(after_help = help::RM)]
    Rm(Rm),
    /// Restore the old value of a removed or replaced name
    #[command(after_help = help::UNDELETE)]
    Undelete(Undelete),
    /// List the old values of a name that `undelete` can restore
    #[command(after_help = help::HISTORY)]
    History {
        /// Which
        name: Name,
    },
    /// Copy a name; moves no content
    #[command(after_help = help::CP)]
    Cp(Cp),
    /// Store a step without others, so that a restore reads nothing else
    #[command(after_help = help::SETTLE)]
    Settle(Settle),
    /// Show or tighten the labels of a name
    #[command(after_help = help::LABEL)]
    Label {
        /// Name, or a prefix of names; without labels to add also RUN@latest
        name: Selector,
        /// Labels to add: residency, sensitivity, tenant, purpose, derived-from
        #[arg(value_name = "K=V", value_parser = label)]
        labels: Vec<(String, String)>,
    },
    /// Copy names from one repository to another
    #[command(after_help = help::SYNC)]
    Sync(Sync),
    /// Check that what was saved can be restored
    #[command(after_help = help::VERIFY)]
    Verify {
        /// Only this name
        name: Option<Selector>,
        /// Read and check every byte, not just the structure
        #[arg(long)]
        data: bool,
        /// Rebuild indexes and condemn damaged packs, so that saving again heals them
        #[arg(long)]
        repair: bool,
        /// With --repair: go on without unreadable entries of the log, even if labels or a policy are lost with them
        #[arg(long, requires = "repair")]
        accept_lost_labels: bool,
        /// With --repair: trust this snapshot of the log, although entries before it are unreadable
        #[arg(long, value_name = "NUMBER", requires = "repair")]
        accept_snapshot: Option<u64>,
    },
    /// Delete content that no name needs
    #[command(after_help = help::COLLECT, visible_aliases = ["prune", "gc"])]
    Collect {
        /// Only report what would be done
        #[arg(long)]
        dry_run: bool,
        /// Time to keep unneeded objects after they were first found: 24h, 30m, 0
        #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = span::parse)]
        grace: Duration,
        /// Time for which removed and replaced names can be undeleted, by the store's clock: 168h, 30m, 0
        #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = span::parse)]
        keep_removed: Duration,
    },
    /// Test the store, the credentials and this machine
    #[command(after_help = help::DOCTOR)]
    Doctor {
        /// Repository to test [default: the one that would be used]
        #[arg(value_name = "URL", value_hint = ValueHint::DirPath)]
        url: Option<String>,
    },
    #[cfg(feature = "agent")]
    #[command(flatten)]
    Agents(AgentVerb),
    /// A command that this build may lack
    #[cfg(not(feature = "agent"))]
    #[command(external_subcommand)]
    Other(Vec<OsString>),
    /// Trust settings files
    #[command(after_help = help::CONFIG, subcommand_required = true, arg_required_else_help = true)]
    Config {
        #[command(subcommand)]
        what: ConfigVerb,
    },
    /// Print completions for a shell
    #[command(after_help = help::COMPLETIONS)]
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
}

impl Verb {
    /// The repositories that its arguments name, in place of the one that was chosen.
    pub(super) fn places(&self) -> Vec<String> {
        match self {
            Self::Sync(Sync { from, to, .. }) => vec![from.to_string(), to.to_string()],
            Self::Init { url: Some(url), .. } | Self::Doctor { url: Some(url) } => vec![url.clone()],
            _ => Vec::new(),
        }
    }

    /// True if the command reads `towline.toml`: not if it needs no repository, or asks the agent for its state.
    pub(super) fn reads_settings(&self) -> bool {
        match self {
            Self::Config { .. } | Self::Completions { .. } => false,
            #[cfg(feature = "agent")]
            Self::Agents(verb) => verb.reads_settings(),
            #[cfg(not(feature = "agent"))]
            Self::Other(_) => false,
            _ => true,
        }
    }

    /// Help for the user after an interruption.
    pub(super) fn help_when_interrupted(&self) -> &'static str {
        match self {
            Self::Save(_) | Self::Sync(_) | Self::Restore(_) | Self::Collect { .. } => {
                "run the same command again to resume"
            }
            #[cfg(feature = "agent")]
            Self::Agents(AgentVerb::Warm(_)) => "the agent goes on; `towline top` shows it",
            _ => "run the same command again",
        }
    }

    /// True for commands that handle signals themselves.
    pub(super) fn handles_signals(&self) -> bool {
        match self {
            Self::Watch(_) => true,
            #[cfg(feature = "agent")]
            Self::Agents(AgentVerb::Agent { .. } | AgentVerb::Page { .. } | AgentVerb::Top { .. }) => true,
            _ => false,
        }
    }
}

/// `towline config`.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigVerb {
    /// Let a towline.toml set the repository and the endpoint, until it changes
    Trust {
        /// The file, or its folder
        #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
        path: PathBuf,
    },
    /// Stop trusting a towline.toml
    Untrust {
        /// The file, or its folder
        #[arg(value_name = "PATH", value_hint = ValueHint::AnyPath)]
        path: PathBuf,
    },
}

/// `towline save`.
#[derive(Debug, Args)]
pub(super) struct Save {
    /// The file or folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub(super) path: PathBuf,
    /// The name to save it under
    pub(super) name: Name,
    /// A name with similar content [default: for RUN/step-N, the previous step]
    #[arg(long, value_name = "NAME")]
    pub(super) base: Option<Selector>,
    #[command(flatten)]
    pub(super) manner: SaveFlags,
    /// Metric of the step; may be given several times
    #[arg(long = "metric", value_name = "NAME=VALUE", value_parser = metric)]
    pub(super) metrics: Vec<(String, f64)>,
    /// Save PATH as the part of this rank, from 0: the name appears once all ranks have saved theirs
    #[arg(long, value_name = "R", requires = "world_size")]
    pub(super) rank: Option<u32>,
    /// Attempt of all ranks: the same for each rank, a new one whenever they restart [default: 0]
    #[arg(long, value_name = "ID", requires = "rank")]
    pub(super) attempt: Option<AttemptId>,
    /// Read every file, even those that look unchanged
    #[arg(long)]
    pub(super) reread: bool,
    /// Report how each tensor is stored, and why
    #[arg(long)]
    pub(super) explain: bool,
    /// Replace nothing: end with exit code 5 if the name exists
    #[arg(long)]
    pub(super) if_absent: bool,
}

/// Options of any save.
#[derive(Debug, Args)]
pub(super) struct SaveFlags {
    /// How files are cut into chunks
    #[arg(long, value_enum, default_value_t = Cut::Auto)]
    pub(super) cut: Cut,
    /// Keep a label with it; residency, sensitivity, tenant, purpose and derived-from bind where it may go (see `towline help label`),
    /// other keys bind nothing; may be given several times
    #[arg(long = "label", value_name = "K=V", value_parser = label)]
    pub(super) labels: Vec<(String, String)>,
    /// Number of ranks that took part
    #[arg(long, value_name = "RANKS")]
    pub(super) world_size: Option<NonZeroU32>,
    /// Framework that wrote the step
    #[arg(long, value_name = "NAME")]
    pub(super) framework: Option<String>,
    /// Leave out files that match, as in .gitignore; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub(super) exclude: Vec<String>,
    /// How chunks are compressed
    #[arg(long, value_enum, default_value_t = Compress::Auto)]
    pub(super) compression: Compress,
    /// Store one of every K steps of a run whole, the others as differences to it, or predicted [default: 8]
    #[arg(long, value_name = "K", value_parser = positive::<NonZeroU32>)]
    pub(super) key_every: Option<NonZeroU32>,
}

/// `towline watch`.
#[derive(Debug, Args)]
pub(super) struct Watch {
    /// Folder that the training writes its checkpoints to
    #[arg(value_hint = ValueHint::DirPath)]
    pub(super) dir: PathBuf,
    /// Run to save them in
    pub(super) run: Name,
    /// Restore the latest step first, if DIR holds no checkpoint
    #[arg(long)]
    pub(super) restore_latest: bool,
    /// At SIGTERM or Ctrl-C, save what is finished within this time, then end
    #[arg(long, value_name = "DURATION", default_value = "25s", value_parser = span::parse)]
    pub(super) on_term: Duration,
    /// Take a checkpoint to be whole when nothing in it changed for so long
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = span::parse)]
    pub(super) settle: Duration,
    /// Save finished checkpoints, then end
    #[arg(long)]
    pub(super) once: bool,
    #[arg(long = "metric", help = help::WATCHED_METRIC, value_name = "NAME=VALUE|NAME[=KEY]", value_parser = watched_metric)]
    pub(super) metrics: Vec<WatchedMetric>,
    #[command(flatten)]
    pub(super) manner: SaveFlags,
}

/// `towline restore`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(super) struct Restore {
    /// A name, or one file or folder of it
    #[arg(value_name = "NAME[:SUBPATH]", value_parser = target())]
    pub(super) from: Target,
    /// Destination
    #[arg(value_hint = ValueHint::AnyPath)]
    pub(super) dest: PathBuf,
    /// Replace existing files that differ
    #[arg(long)]
    pub(super) overwrite: bool,
    /// Delete other files and folders in DEST, but not what .towlineignore files in it leave out of a save
    #[arg(long, conflicts_with = "tensors")]
    pub(super) delete: bool,
    /// With --delete, empty DEST even if the restored tree has no files
    #[arg(long, requires = "delete")]
    pub(super) yes: bool,
    /// Only report what would be written, fetched, replaced and deleted
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Only these files and folders, or those that match; may be given several times
    #[arg(long = "path", value_name = "PATH|GLOB", conflicts_with_all = ["delete", "tensors"])]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) only: Vec<String>,
    /// Keep setuid and setgid bits, for trees whose writers are trusted
    #[arg(long, conflicts_with = "tensors")]
    pub(super) keep_setuid: bool,
    /// Only these tensors, or a box of each, into one safetensors file in DEST; may be given several times
    #[arg(long = "tensor", value_name = "[PATH:]GLOB[BOX]")]
    pub(super) tensors: Vec<TensorSelector>,
    /// Only the I-th of N equal parts of each tensor along its first dimension, from 0
    #[arg(long, value_name = "I/N", requires = "tensors")]
    pub(super) shard: Option<Shard>,
}

/// `towline show`.
#[derive(Debug, Args)]
pub(super) struct Show {
    /// A name, or one file or folder of it
    #[arg(value_name = "NAME[:SUBPATH]", value_parser = target())]
    pub(super) what: Target,
    /// List the files and folders
    #[arg(long)]
    pub(super) files: bool,
    /// List the tensors in each file, and how each is stored
    #[arg(long)]
    pub(super) tensors: bool,
}

/// `towline settle`.
#[derive(Debug, Args)]
pub(super) struct Settle {
    /// Names, RUN@latest or other choices; with --paused, runs: all without any
    #[arg(value_name = "NAME", required_unless_present = "paused")]
    pub(super) names: Vec<Selector>,
    /// The latest step of each run to which nothing was saved for so long
    #[arg(long, value_name = "DURATION", value_parser = span::parse)]
    pub(super) paused: Option<Duration>,
}

/// `towline expire`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("policy").required(true).multiple(true)))]
pub(super) struct Expire {
    /// The run
    pub(super) run: Name,
    /// Keep the last N steps
    #[arg(long, value_name = "N", group = "policy", value_parser = positive::<NonZeroU64>)]
    pub(super) keep_last: Option<NonZeroU64>,
    /// Keep the steps whose number is a multiple of K
    #[arg(long, value_name = "K", group = "policy", value_parser = positive::<NonZeroU64>)]
    pub(super) keep_every: Option<NonZeroU64>,
    /// Keep the step where this metric is least; may be given several times
    #[arg(long, value_name = "METRIC", group = "policy")]
    pub(super) keep_min: Vec<String>,
    /// Keep the step where this metric is greatest; may be given several times
    #[arg(long, value_name = "METRIC", group = "policy")]
    pub(super) keep_max: Vec<String>,
    /// Let `undelete` restore the removed steps for a while, as with `towline rm`
    #[arg(long)]
    pub(super) keep_removed: bool,
    /// Only report what would be removed
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// Cutting of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Cut {
    /// By the format of each file
    Auto,
    /// At the tensors that a checkpoint file names
    Tensor,
    /// By content, so that an insertion moves no later cut
    Content,
    /// Into equal pieces
    Fixed,
}

impl From<Cut> for CutChoice {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::Auto => Self::Auto,
            Cut::Tensor => Self::Tensor,
            Cut::Content => Self::Content,
            Cut::Fixed => Self::Fixed,
        }
    }
}

/// Compression of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Compress {
    /// If it makes a sample smaller: the fewest bytes
    Auto,
    /// Like auto, but raw while the repository accepts bytes faster than they can be compressed: the shortest save
    IfFaster,
    /// Like auto, and weights are predicted from the step before: for runs that save each step
    Predict,
    /// No compression
    Off,
}

impl From<Compress> for Compression {
    fn from(compress: Compress) -> Self {
        match compress {
            Compress::Auto => Self::Auto,
            Compress::IfFaster => Self::IfFaster,
            Compress::Predict => Self::Predict,
            Compress::Off => Self::Off,
        }
    }
}

/// File names need not be UTF-8.
fn target() -> impl TypedValueParser<Value = Target> {
    OsStringValueParser::new().try_map(|text: OsString| Target::parse(&text))
}

fn label(text: &str) -> Result<(String, String), &'static str> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("a label is KEY=VALUE"),
    }
}

fn positive<N: FromStr>(text: &str) -> Result<N, &'static str> {
    text.parse().map_err(|_| "expected a whole number from 1")
}

/// [`StepFacts`](crate::repository::log::StepFacts) checks the number.
fn metric(text: &str) -> Result<(String, f64), &'static str> {
    let parsed = text.rsplit_once('=').and_then(|(name, value)| Some((name.to_owned(), value.parse().ok()?)));
    parsed.ok_or("a metric is NAME=NUMBER")
}

/// A value of `towline watch --metric`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum WatchedMetric {
    /// This number, of each step.
    Value(String, f64),
    /// A value that the trainer logged.
    Logged(LoggedMetric),
}

fn watched_metric(text: &str) -> Result<WatchedMetric, Error> {
    match metric(text) {
        Ok((name, value)) => Ok(WatchedMetric::Value(name, value)),
        Err(_) => text.parse().map(WatchedMetric::Logged),
    }
}
