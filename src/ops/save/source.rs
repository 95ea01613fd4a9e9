//! Files to save, checked against the state in which they were found.

use crate::error::{Error, ErrorKind, Result};
use crate::ops::shown;
use crate::tree::{Opened, Walk, WalkEntry};

/// Length limit of files that are read whole before they are parsed.
pub(super) const SMALL: u64 = 1 << 20;

/// Opens a found file if it is unchanged.
pub(in crate::ops) fn open(walk: &Walk, found: &WalkEntry) -> Result<Opened> {
    walk.open(found).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::Conflict => changed(found).source(error),
        _ => error,
    })
}

/// Checks that the file is unchanged, so that all bytes read before are of one version.
pub(in crate::ops) fn check_unchanged(file: &Opened, found: &WalkEntry) -> Result<()> {
    let still = file
        .is_still(&found.stat)
        .map_err(|source| Error::other("look at a file again").at(shown(&found.path)).source(source))?;
    if still { Ok(()) } else { Err(changed(found)) }
}

fn changed(found: &WalkEntry) -> Error {
    Error::conflict("file changed while the tree was being saved")
        .at(shown(&found.path))
        .help("save again when its writer is done, or leave it out with --exclude")
}
