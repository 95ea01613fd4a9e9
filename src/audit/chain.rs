//! The chain: a line is an entry with the hash of itself and of all lines before it.
//!
//! ```text
//! {"seq":17,"time":"...","kind":"decision",...,"hash":"<64 digits>"}\n
//! hash = BLAKE3(key "towline 2026-11-24 entry of an audit log", hash of the line before, bytes of the line up to ,"hash")
//! ```

use serde::Deserialize;

use super::entry::{Entry, EntryKind};
use crate::error::{Error, Result};
use crate::id::{AuditLogId, EntryHash};

/// Maximum length of a line, its end included.
pub const LINE_LEN_MAX: usize = 16 << 10;
/// Hash before the first line.
pub(super) const START: EntryHash = EntryHash::from_bytes([0; 32]);
/// Text before and after the digits of the hash.
const OPENING: &str = ",\"hash\":\"";
const CLOSING: &str = "\"}";
const DIGITS: usize = 2 * EntryHash::LEN;

/// Reason why a line is not the expected next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// Not a line of an audit log.
    Malformed,
    /// It, or a line before it, was changed.
    Changed,
    /// It has another number: a line is missing or out of order.
    Number(u64),
}

fn hash(previous: &EntryHash, entry: &[u8]) -> EntryHash {
    let mut hasher = blake3::Hasher::new_derive_key("towline 2026-11-24 entry of an audit log");
    hasher.update(previous.as_bytes()).update(entry);
    EntryHash::from_bytes(*hasher.finalize().as_bytes())
}

/// Line of `entry`, with its end, and its hash.
///
/// # Errors
/// Usage, if it is too long.
pub(super) fn seal(previous: &EntryHash, entry: &Entry) -> Result<(Vec<u8>, EntryHash)> {
    let unwritten = |source| Error::other("cannot write entry of the audit log").source(source);
    let mut line = serde_json::to_vec(entry).map_err(unwritten)?;
    // The closing brace comes after the hash.
    line.pop();
    let hash = hash(previous, &line);
    line.extend_from_slice(format!("{OPENING}{hash}{CLOSING}\n").as_bytes());
    if line.len() > LINE_LEN_MAX {
        let error = Error::usage("entry of the audit log is too long");
        return Err(error.expected(format!("at most {LINE_LEN_MAX} bytes")).got(line.len()));
    }
    Ok((line, hash))
}

/// Parses `line`, without its end, which must be number `seq` and follow `previous`; returns the entry and its hash.
pub(super) fn open(previous: &EntryHash, seq: u64, line: &[u8]) -> Result<(Entry, EntryHash), Broken> {
    let content = content(line).ok_or(Broken::Malformed)?;
    let hash = hash(previous, content);
    let tail = format!("{OPENING}{hash}{CLOSING}");
    if line.get(content.len()..) != Some(tail.as_bytes()) {
        return Err(match number(line) {
            Some(found) if found != seq => Broken::Number(found),
            _ => Broken::Changed,
        });
    }
    let entry = [content, b"}"].concat();
    let entry: Entry = serde_json::from_slice(&entry).map_err(|_| Broken::Malformed)?;
    if entry.seq != seq {
        return Err(Broken::Number(entry.seq));
    }
    Ok((entry, hash))
}

/// Hash, log and origin in the first line of a segment; not checked.
pub(super) fn beginning(line: &[u8]) -> Option<(EntryHash, AuditLogId, String)> {
    let entry: Entry = serde_json::from_slice(&[content(line)?, b"}"].concat()).ok()?;
    let EntryKind::Begin { log, origin, previous, .. } = entry.what else { return None };
    Some((digits(&previous)?, log.parse().ok()?, origin))
}

/// Parses the hash in `text`.
fn digits(text: &str) -> Option<EntryHash> {
    let mut bytes = [0; EntryHash::LEN];
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != bytes.len() || !rest.is_empty() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(EntryHash::from_bytes(bytes))
}

/// Bytes of a line that its hash covers.
fn content(line: &[u8]) -> Option<&[u8]> {
    if line.len() >= LINE_LEN_MAX {
        return None;
    }
    line.get(..line.len().checked_sub(OPENING.len() + DIGITS + CLOSING.len())?)
}

/// Number in a line, even if the line is malformed otherwise.
fn number(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Numbered {
        seq: u64,
    }
    serde_json::from_slice::<Numbered>(line).ok().map(|numbered| numbered.seq)
}
