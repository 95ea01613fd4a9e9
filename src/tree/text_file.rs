//! Text files of users.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::error::{Error, Result};
use crate::size;

/// Reads the text file at `path`, of at most `len_max` bytes. Blocking.
///
/// # Errors
/// Usage, if it is longer, or not UTF-8; errors of the file system.
pub fn read_text_file(path: &Path, len_max: u64) -> Result<String> {
    let unreadable = |source| Error::io("cannot read the file", path, source);
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(len_max + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    if bytes.len() as u64 > len_max {
        return Err(Error::usage("file is too long")
            .at(path.display())
            .expected(format!("at most {}", size::show(len_max))));
    }
    String::from_utf8(bytes).map_err(|source| Error::usage("file is not UTF-8").at(path.display()).source(source))
}
