//! The journal: fixed-size records of the place of each chunk. It is only a hint; extents are always verified.
//!
//! ```text
//! 0   8  magic "TWLCJRN1"      8  16  the cache's id       24  4  seed       28  4  CRC-32C of the 28 bytes before
//! 32  20n  records
//! ```
//!
//! Appends are not synced: after a power loss the file may be truncated or end in garbage. A record counts only if it and all
//! records before it are valid, so replay yields the state of one moment. A journal that does not end in a complete record is
//! rewritten at once, never continued. A rewrite creates a new file, syncs it and renames it.

mod record;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) use self::record::Record;
use self::record::{LEN as RECORD_LEN, crc32c};
use super::medium::{Medium, MediumFile};

const MAGIC: &[u8; 8] = b"TWLCJRN1";
const HEADER_LEN: usize = 32;
/// Records that are read, checked or written at once: 640 KiB.
const BATCH: usize = 32 << 10;
/// Records that are passed on at once.
const TAKEN: usize = 256;

/// Id of a cache, which its journal contains.
pub(super) type CacheId = [u8; 16];

/// An open journal.
#[derive(Debug)]
pub(super) struct Journal {
    file: Arc<dyn MediumFile>,
    seed: u32,
    records: u64,
}

/// Path of a cache's journal.
pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join("journal")
}

/// Reads the journal in `dir` and passes batches of its records to `take`, in order, with the total number, until one is damaged
/// or `take` refuses one as impossible. Returns the journal if it can be continued, else none: it must then be rewritten.
pub(super) fn replay(
    medium: &dyn Medium,
    dir: &Path,
    id: &CacheId,
    mut take: impl FnMut(&[Record], u64) -> bool,
) -> Option<Journal> {
    let file = medium.open(&path(dir), false).ok()?;
    let len = file.len().ok()?;
    let mut header = [0; HEADER_LEN];
    file.read_at(&mut header, 0).ok()?;
    let seed = open_header(&header, id)?;
    let whole = (len - HEADER_LEN as u64) / RECORD_LEN as u64;
    let mut number = 0;
    let mut buffer = vec![0; BATCH * RECORD_LEN];
    let mut records = Vec::with_capacity(TAKEN);
    while number < whole {
        let count = usize::try_from(whole - number).unwrap_or(BATCH).min(BATCH);
        let bytes = &mut buffer[..count * RECORD_LEN];
        file.read_at(bytes, offset(number)).ok()?;
        for some in bytes.as_chunks::<RECORD_LEN>().0.chunks(TAKEN) {
            let decoded = (number..).zip(some).map_while(|(number, bytes)| Record::decode(bytes, seed, number));
            records.clear();
            records.extend(decoded);
            if !take(&records, whole) || records.len() < some.len() {
                return None;
            }
            number += some.len() as u64;
        }
    }
    (offset(whole) == len).then_some(Journal { file, seed, records: whole })
}

impl Journal {
    /// Replaces the journal by a new one with `records`.
    pub(super) fn rewrite(medium: &dyn Medium, dir: &Path, id: &CacheId, records: &[Record]) -> io::Result<Self> {
        let (new, seed) = (dir.join("journal.new"), fresh_seed());
        let mut journal = Self { file: medium.open(&new, true)?, seed, records: 0 };
        journal.file.write_at(&[&header(seed, id)], 0)?;
        records.chunks(BATCH).try_for_each(|batch| journal.append(batch))?;
        journal.file.sync()?;
        medium.rename(&new, &path(dir))?;
        medium.sync_folder(dir)?;
        Ok(journal)
    }

    /// Appends records. After an error, do not append again: the file may end in a partial record.
    pub(super) fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(records.len() * RECORD_LEN);
        for (number, record) in (self.records..).zip(records) {
            bytes.extend_from_slice(&record.encode(self.seed, number));
        }
        self.file.write_at(&[&bytes], offset(self.records))?;
        self.records += records.len() as u64;
        Ok(())
    }

    /// Syncs the journal: appended records then survive a power loss.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    /// Records in it.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        offset(self.records)
    }
}

fn offset(number: u64) -> u64 {
    HEADER_LEN as u64 + number * RECORD_LEN as u64
}

/// Random seed, unlikely to be that of an earlier journal.
fn fresh_seed() -> u32 {
    crc32c(0, &crate::id::ObjectId::random().to_bytes())
}

fn header(seed: u32, id: &CacheId) -> [u8; HEADER_LEN] {
    let mut out = [0; HEADER_LEN];
    out[..8].copy_from_slice(MAGIC);
    out[8..24].copy_from_slice(id);
    out[24..28].copy_from_slice(&seed.to_le_bytes());
    let crc = crc32c(0, &out[..28]);
    out[28..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Seed in the header, if it is a journal of this cache.
fn open_header(bytes: &[u8; HEADER_LEN], id: &CacheId) -> Option<u32> {
    let seed = u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]);
    (*bytes == header(seed, id)).then_some(seed)
}
