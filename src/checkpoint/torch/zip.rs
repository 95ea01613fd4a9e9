//! The zip archive of a torch file: finds the bytes of each record.
//!
//! Facts: <https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT>, and the subset that `PyTorch` writes: entries
//! stored without compression, no comment at the end, zip64 where a number needs it
//! (<https://github.com/pytorch/pytorch/blob/main/caffe2/serialize/inline_container.cc>). The directory at the end has
//! the offset of an entry's header. Only that header determines where its bytes begin, because `PyTorch` pads it for alignment.

use std::collections::HashMap;
use std::ops::Range;

use super::{ParseError, ReadAt, ReserveMemory};

/// Maximum bytes of the central directory.
const DIRECTORY_LEN_MAX: u64 = 128 << 20;

/// Bytes of memory for one byte of the directory, at most: its entries are in a table that doubles.
const DIRECTORY_MEMORY: u64 = 5;

const END_LEN: usize = 22;
const LOCATOR_LEN: usize = 20;
const END64_LEN: usize = 56;
const CENTRAL_LEN: usize = 46;
const LOCAL_LEN: usize = 30;
const LOCAL: &[u8] = b"PK\x03\x04";
const CENTRAL: &[u8] = b"PK\x01\x02";
/// An extra field with the numbers that do not fit 32 bits.
const EXTRA64: u64 = 1;
/// Value of a field of 32 or 16 bits whose number is in the zip64 field.
const FULL32: u64 = u32::MAX as u64;
const FULL16: u64 = u16::MAX as u64;

/// The entries of an archive.
#[derive(Debug)]
pub(super) struct Archive {
    /// Start of the directory, which is the end of all entries.
    end: u64,
    entries: HashMap<Box<[u8]>, ZipEntry>,
}

/// One entry of the directory.
#[derive(Clone, Copy, Debug)]
struct ZipEntry {
    /// Offset of its header.
    header: u64,
    len: u64,
    /// Neither compressed nor encrypted.
    plain: bool,
}

impl Archive {
    /// Reads the directory of the archive in a file of `len` bytes; none if the file does not end like an archive.
    pub(super) fn open(read: ReadAt<'_>, len: u64, reserve: ReserveMemory<'_>) -> Result<Option<Self>, ParseError> {
        let Some(Directory { start, len, count, .. }) = find_directory(read, len)? else { return Ok(None) };
        // Each entry takes its fixed part and a name.
        if len > DIRECTORY_LEN_MAX || count > len / (CENTRAL_LEN as u64) {
            return Err(ParseError::Zip { what: "the directory cannot hold what it counts", at: start });
        }
        if !reserve(len.saturating_mul(DIRECTORY_MEMORY)) {
            return Err(ParseError::Memory);
        }
        let mut directory = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        read(start, &mut directory)?;
        let mut archive = Self { end: start, entries: HashMap::new() };
        archive.index(&directory, count)?;
        Ok(Some(archive))
    }

    fn index(&mut self, directory: &[u8], count: u64) -> Result<(), ParseError> {
        let mut rest = directory;
        for _ in 0..count {
            let at = self.end + (directory.len() - rest.len()) as u64;
            let (name, entry, len) = entry(rest).ok_or(ParseError::Zip { what: "an entry is malformed", at })?;
            if self.entries.insert(name.into(), entry).is_some() {
                return Err(ParseError::Zip { what: "two entries have one name", at });
            }
            rest = rest.get(len..).unwrap_or_default();
        }
        if rest.is_empty() {
            return Ok(());
        }
        Err(ParseError::Zip { what: "the directory holds more than it counts", at: self.end })
    }

    /// The only top folder with the record `record`: `PyTorch` writes all records to one folder, with the name of the file.
    pub(super) fn folder_with(&self, record: &[u8]) -> Option<&[u8]> {
        let mut found = self.entries.keys().filter_map(|name| {
            let folder = name.strip_suffix(record)?.strip_suffix(b"/")?;
            (!folder.contains(&b'/')).then_some(folder)
        });
        found.next().filter(|_| found.next().is_none())
    }

    /// Range of the bytes of the entry `name` in the file; none if there is no such entry.
    pub(super) fn locate(&self, read: ReadAt<'_>, name: &[u8]) -> Result<Option<Range<u64>>, ParseError> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let at = entry.header;
        let refuse = |what| ParseError::Zip { what, at };
        if !entry.plain {
            return Err(refuse("an entry is compressed or encrypted"));
        }
        let mut header = vec![0; LOCAL_LEN + name.len()];
        if at.checked_add(header.len() as u64).is_none_or(|end| end > self.end) {
            return Err(refuse("an entry lies outside the archive"));
        }
        read(at, &mut header)?;
        let fields = Fields(&header);
        let same = header.starts_with(LOCAL) && fields.u16(26) == Some(name.len() as u64) && header.ends_with(name);
        let extra = fields.u16(28).filter(|_| same).ok_or(refuse("an entry's own header says otherwise"))?;
        let start = at + header.len() as u64 + extra;
        match start.checked_add(entry.len) {
            Some(end) if end <= self.end => Ok(Some(start..end)),
            _ => Err(refuse("an entry lies outside the archive")),
        }
    }
}

/// Directory, by the end of an archive.
struct Directory {
    start: u64,
    len: u64,
    /// Number of entries.
    count: u64,
    /// Offset of the record that names it: where the directory must end.
    end: u64,
}

fn find_directory(read: ReadAt<'_>, len: u64) -> Result<Option<Directory>, ParseError> {
    let mut end = [0; END_LEN];
    let Some(end_at) = len.checked_sub(END_LEN as u64) else { return Ok(None) };
    read(end_at, &mut end)?;
    // Without a comment the archive ends here.
    if !end.starts_with(b"PK\x05\x06") || !end.ends_with(&[0, 0]) {
        return Ok(None);
    }
    let fields = Fields(&end);
    let short = (fields.u32(16), fields.u32(12), fields.u16(10));
    let (Some(start), Some(len), Some(count)) = short else { return Ok(None) };
    let directory = match find_directory64(read, end_at)? {
        Some(wide) => wide,
        None if start == FULL32 || len == FULL32 || count == FULL16 => {
            return Err(ParseError::Zip { what: "no zip64 record is where one must be", at: end_at });
        }
        None => Directory { start, len, count, end: end_at },
    };
    if directory.start.checked_add(directory.len) != Some(directory.end) {
        return Err(ParseError::Zip { what: "the directory is not where the archive's end says", at: end_at });
    }
    Ok(Some(directory))
}

/// The same from the zip64 record; none if there is none.
fn find_directory64(read: ReadAt<'_>, end_at: u64) -> Result<Option<Directory>, ParseError> {
    let Some(locator_at) = end_at.checked_sub(LOCATOR_LEN as u64) else { return Ok(None) };
    let mut locator = [0; LOCATOR_LEN];
    read(locator_at, &mut locator)?;
    if !locator.starts_with(b"PK\x06\x07") {
        return Ok(None);
    }
    let refuse = ParseError::Zip { what: "the zip64 record is malformed", at: locator_at };
    let at = Fields(&locator).u64(8).filter(|&at| at.checked_add(END64_LEN as u64) == Some(locator_at));
    let Some(at) = at else { return Err(refuse) };
    let mut end = [0; END64_LEN];
    read(at, &mut end)?;
    let fields = Fields(&end);
    match (fields.u64(48), fields.u64(40), fields.u64(32)) {
        (Some(start), Some(len), Some(count)) if end.starts_with(b"PK\x06\x06") => {
            Ok(Some(Directory { start, len, count, end: at }))
        }
        _ => Err(refuse),
    }
}

/// Entry at the start of `rest` of a directory: its name, its data, and its length.
fn entry(rest: &[u8]) -> Option<(&[u8], ZipEntry, usize)> {
    if !rest.starts_with(CENTRAL) {
        return None;
    }
    let fields = Fields(rest);
    let len = |at| fields.u16(at).and_then(|len| usize::try_from(len).ok());
    let (name_len, extra_len, comment_len) = (len(28)?, len(30)?, len(32)?);
    let name = rest.get(CENTRAL_LEN..CENTRAL_LEN + name_len)?;
    let extra = rest.get(CENTRAL_LEN + name_len..)?.get(..extra_len)?;
    let whole = CENTRAL_LEN + name_len + extra_len + comment_len;
    rest.get(..whole)?;
    // The wide numbers are in this order, each only if its short field has the marker value.
    let mut wide = extra64(extra);
    let mut number = |at| match fields.u32(at)? {
        FULL32 => {
            let found = Fields(wide).u64(0)?;
            wide = wide.get(8..)?;
            Some(found)
        }
        short => Some(short),
    };
    let (plain_len, stored_len, header) = (number(24)?, number(20)?, number(42)?);
    let plain = fields.u16(10)? == 0 && fields.u16(8)? & 1 == 0 && plain_len == stored_len;
    Some((name, ZipEntry { header, len: plain_len, plain }, whole))
}

/// The zip64 part of an entry's extra fields; empty if there is none.
fn extra64(mut extra: &[u8]) -> &[u8] {
    while let (Some(id), Some(len)) = (Fields(extra).u16(0), Fields(extra).u16(2)) {
        let end = 4 + usize::try_from(len).unwrap_or(usize::MAX);
        if id == EXTRA64 {
            return extra.get(4..end).unwrap_or_default();
        }
        extra = extra.get(end..).unwrap_or_default();
    }
    &[]
}

/// Little-endian numbers at offsets.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn number<const N: usize>(&self, at: usize) -> Option<u64> {
        let bytes: &[u8; N] = self.0.get(at..)?.first_chunk()?;
        Some(bytes.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte)))
    }

    fn u16(&self, at: usize) -> Option<u64> {
        self.number::<2>(at)
    }

    fn u32(&self, at: usize) -> Option<u64> {
        self.number::<4>(at)
    }

    fn u64(&self, at: usize) -> Option<u64> {
        self.number::<8>(at)
    }
}
