//! Reports as JSON, in which they cross into Python.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::Formatter;
use towline::{Error, Result, size};

/// `report` as JSON.
pub(crate) fn json(report: &impl Serialize) -> Result<String> {
    json_within(report, u64::MAX)
}

/// As [`json`], but of at most `limit` bytes. All of them are ASCII: another text takes up to four bytes for each character in Python
/// (<https://peps.python.org/pep-0393/>).
///
/// # Errors
/// Exhausted, if it is longer.
pub(crate) fn json_within(report: &impl Serialize, limit: u64) -> Result<String> {
    let mut bounded = Bounded { bytes: Vec::new(), limit };
    report.serialize(&mut serde_json::Serializer::with_formatter(&mut bounded, Ascii)).map_err(|error| {
        if error.is_io() {
            return Error::exhausted("report is too long for memory")
                .expected(format!("at most {}, a quarter of the memory", size::show(limit)))
                .help("give open() more `memory`, or list a part: towline show NAME:PATH --json, towline tensors NAME PATH:");
        }
        Error::other("cannot write the report as JSON").source(error)
    })?;
    String::from_utf8(bounded.bytes).map_err(|error| Error::other("cannot write the report as JSON").source(error))
}

/// Compact JSON whose other characters are escaped.
struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W: Write + ?Sized>(&mut self, out: &mut W, mut fragment: &str) -> io::Result<()> {
        while let Some(at) = fragment.find(|c: char| !c.is_ascii()) {
            let (plain, rest) = fragment.split_at(at);
            let end = rest.find(|c: char| c.is_ascii()).unwrap_or(rest.len());
            out.write_all(plain.as_bytes())?;
            for unit in rest[..end].encode_utf16() {
                write!(out, "\\u{unit:04x}")?;
            }
            fragment = &rest[end..];
        }
        out.write_all(fragment.as_bytes())
    }
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
