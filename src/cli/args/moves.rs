//! `towline rm`, `cp` and `sync`.

use clap::{Args, ValueHint};

use crate::repository::{Name, Selector};
use crate::storage::Location;

/// `towline rm`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Rm {
    /// Which
    #[arg(value_name = "NAME|PREFIX", required = true)]
    pub(in crate::cli) names: Vec<Name>,
    /// Also everything below them
    #[arg(short, long)]
    pub(in crate::cli) recursive: bool,
    /// Only say what would be removed, and what that would free
    #[arg(long)]
    pub(in crate::cli) dry_run: bool,
}

/// `towline cp`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Cp {
    /// The name that is there
    pub(in crate::cli) name: Selector,
    /// The name to make
    pub(in crate::cli) new: Name,
    /// Replace nothing: end with exit code 5 if the new name exists
    #[arg(long)]
    pub(in crate::cli) if_absent: bool,
    /// Store again what is stored as a difference to other names' chunks, so that the copy needs none of them
    #[arg(long)]
    pub(in crate::cli) stand_alone: bool,
}

/// `towline sync`.
#[derive(Debug, Args)]
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
    /// Make the destination if there is no repository
    #[arg(long)]
    pub(in crate::cli) init: bool,
    /// Only say what would be moved
    #[arg(long)]
    pub(in crate::cli) dry_run: bool,
}
