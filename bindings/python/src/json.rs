//! Reports as JSON, in which they cross into Python.

use std::io::{self, Write};

use serde::Serialize;
use towline::{Error, Result, size};

/// `report` as JSON.
pub(crate) fn json(report: &impl Serialize) -> Result<String> {
    json_within(report, u64::MAX)
}

/// As [`json`], but of at most `limit` bytes.
///
/// # Errors
/// Exhausted, if it is longer.
pub(crate) fn json_within(report: &impl Serialize, limit: u64) -> Result<String> {
    let mut bounded = Bounded { bytes: Vec::new(), limit };
    serde_json::to_writer(&mut bounded, report).map_err(|error| {
        if error.is_io() {
            return Error::exhausted("report is too long for memory")
                .expected(format!("at most {}, a quarter of the memory", size::show(limit)))
                .help("give open() more `memory`, or list a part: towline show NAME:PATH --json");
        }
        Error::other("cannot write the report as JSON").source(error)
    })?;
    String::from_utf8(bounded.bytes).map_err(|error| Error::other("cannot write the report as JSON").source(error))
}

/// Bytes up to a limit.
struct Bounded {
    bytes: Vec<u8>,
    limit: u64,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.bytes.len() + bytes.len()) as u64 > self.limit {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
