//! `towline rm`, `undelete`, `cp` and `sync`.

use clap::{Args, ValueHint};

use crate::name::Name;
use crate::selector::Selector;
use crate::storage::Location;

/// `towline rm`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Rm {
    /// Names, or with --recursive prefixes
    #[arg(value_name = "NAME|PREFIX", required = true)]
    pub(in crate::cli) names: Vec<Name>,
    /// Also everything below them
    #[arg(short, long)]
    pub(in crate::cli) recursive: bool,
    /// Keep no value for undelete, and forget those that are kept already
    #[arg(long)]
    pub(in crate::cli) now: bool,
    /// Only report what would be removed, and the bytes that would be freed
    #[arg(long)]
    pub(in crate::cli) dry_run: bool,
}

/// `towline undelete`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Undelete {
    /// The name that was removed or replaced
    pub(in crate::cli) name: Name,
    /// Restore all removed names below it, such as the steps of a run
    #[arg(long, conflicts_with_all = ["version", "to", "replace"])]
    pub(in crate::cli) recursive: bool,
    /// Restore this version [default: the last one, or the latest kept of a name that exists]
    #[arg(long, value_name = "V")]
    pub(in crate::cli) version: Option<u64>,
    /// Restore it under another name
    #[arg(long = "as", value_name = "NEW")]
    pub(in crate::cli) to: Option<Name>,
    /// Replace the current value, which is kept in turn
    #[arg(long)]
    pub(in crate::cli) replace: bool,
}

/// `towline cp`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Cp {
    /// Existing name
    pub(in crate::cli) name: Selector,
    /// New name
    pub(in crate::cli) new: Name,
    /// Replace nothing: end with exit code 5 if the new name exists
    #[arg(long)]
    pub(in crate::cli) if_absent: bool,
    /// Store differences to other names' chunks whole, so that the copy needs no other name
    #[arg(long)]
    pub(in crate::cli) stand_alone: bool,
}

/// `towline sync`.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(in crate::cli) struct Sync {
    /// The repository to read
    #[arg(value_name = "SRC_URL", value_hint = ValueHint::DirPath)]
    pub(in crate::cli) from: Location,
    /// The repository to write
    #[arg(value_name = "DST_URL", value_hint = ValueHint::DirPath)]
    pub(in crate::cli) to: Location,
    /// Names, RUN@latest and the like, or prefixes of names [default: all]
    #[arg(value_name = "NAME|PREFIX")]
    pub(in crate::cli) what: Vec<Selector>,
    /// Create the destination if there is no repository
    #[arg(long)]
    pub(in crate::cli) init: bool,
    /// Copy differences from a directory with the bases that they need, also where that is more
    #[arg(long)]
    pub(in crate::cli) as_stored: bool,
    /// Keep every name that the destination has, also with another value
    #[arg(long, conflicts_with = "force")]
    pub(in crate::cli) if_absent: bool,
    /// Replace names also where the destination's value is newer
    #[arg(long)]
    pub(in crate::cli) force: bool,
    /// Replace names also where the destination forgets old values for them that `undelete` can restore
    #[arg(long, conflicts_with = "if_absent")]
    pub(in crate::cli) forget: bool,
    /// Only report what would be copied, replaced and kept
    #[arg(long)]
    pub(in crate::cli) dry_run: bool,
}
