//! Text files of users.

use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

use crate::error::{Error, Result};
use crate::size;

/// Reads the text file at `path`, of at most `len_max` bytes. Blocking, but not on a pipe that nobody writes to.
///
/// # Errors
/// Usage, if it is longer, not UTF-8, or no regular file; errors of the file system.
pub fn read_text_file(path: &Path, len_max: u64) -> Result<String> {
    let unreadable = |source| Error::io("cannot read the file", path, source);
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Error::usage("not a regular file").at(path.display()));
    }
    let mut bytes = Vec::new();
    file.take(len_max + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > len_max {
        return Err(Error::usage("file is too long")
            .at(path.display())
            .expected(format!("at most {}", size::show(len_max))));
    }
    String::from_utf8(bytes).map_err(|source| Error::usage("file is not UTF-8").at(path.display()).source(source))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{FileType, Mode, mknodat};

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn only_a_regular_file_of_bounded_length_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "text").unwrap();
        assert_eq!(read_text_file(&path, 4).unwrap(), "text");
        assert_eq!(read_text_file(&path, 3).unwrap_err().kind(), ErrorKind::Usage);
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_text_file(&path, 4).unwrap_err().kind(), ErrorKind::Usage);
        let pipe = folder.path().join("pipe");
        mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for other in [pipe.as_path(), folder.path(), Path::new("/dev/zero")] {
            assert_eq!(
                read_text_file(other, 4).unwrap_err().to_string(),
                format!("not a regular file at {}", other.display())
            );
        }
        assert_eq!(read_text_file(&folder.path().join("none"), 4).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
