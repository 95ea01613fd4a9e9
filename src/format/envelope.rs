//! Envelope of every object but packs: a header, a body, a digest of both.
//!
//! ```text
//! 0  4  magic "TWLN"        4  1  kind       5  1  version (1; 2 of a snapshot or a map that needs it)
//! 6  1  encryption (0: none; reserved)       7  1  compression (0: none, 1: zstd)
//! 8  8  plain length of the body            16  n  body        16+n  32  BLAKE3 of all before
//! ```

use bytes::Bytes;

use super::wire::{Malformed, Reader, Writer, too_large};
use crate::error::{Error, Result};
use crate::limits::{BODY_LEN_MAX, ENTRY_LEN_MAX, KIB, MIB};

/// The first bytes of every object.
pub const MAGIC: [u8; 4] = *b"TWLN";
/// The version of the format that this program writes, but for snapshots and maps that need [`VERSION_MAX`].
pub const VERSION: u8 = 1;
/// The latest version that this program reads, of snapshots and maps alone.
pub const VERSION_MAX: u8 = 2;
/// Place of the version in a header.
const VERSION_AT: usize = 5;
/// Bytes before the body.
pub const HEADER_LEN: usize = 16;
/// Bytes after it.
pub const DIGEST_LEN: usize = 32;

/// The shortest and the longest window that zstd takes, as powers of two.
const WINDOW_LOG: (u32, u32) = (10, 27);

/// Kind of an object. The byte is part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The repository's own description.
    Repository = b'R',
    /// One entry of the log.
    Entry = b'L',
    /// The log's state at one point.
    Snapshot = b'S',
    /// Boundary of the log's truncation.
    Boundary = b'B',
    /// An index segment.
    Segment = b'I',
    /// A saved tree.
    Manifest = b'M',
    /// Places of a manifest's chunks.
    Map = b'P',
    /// Part of a step that one rank has saved.
    Part = b'H',
    /// Objects that a collect found unneeded.
    Tombstone = b'D',
    /// Address of an agent.
    Agent = b'A',
    /// Head of an agent's audit log.
    AuditHead = b'U',
    /// Head of an agent's inventory.
    Inventory = b'V',
    /// Set of chunks that an inventory is based on.
    KeySet = b'Q',
    /// Usage of a month by an agent.
    Usage = b'E',
    /// A pack's header; its trailer has the lower-case letter.
    Pack = b'K',
}

impl Kind {
    /// Maximum bytes of a body of this kind. Kinds that only have an address or a few numbers have a small limit, to save memory.
    #[must_use]
    pub const fn body_len_max(self) -> u64 {
        match self {
            Self::Boundary | Self::Agent => KIB,
            Self::Repository | Self::AuditHead => 64 * KIB,
            Self::Part => MIB,
            Self::Tombstone | Self::Inventory | Self::Usage => 16 * MIB,
            Self::KeySet => 96 * MIB,
            Self::Entry => ENTRY_LEN_MAX,
            Self::Snapshot | Self::Segment | Self::Manifest | Self::Map | Self::Pack => BODY_LEN_MAX,
        }
    }

    /// The latest version of its body that this program knows.
    const fn version_max(self) -> u8 {
        match self {
            Self::Snapshot | Self::Map => VERSION_MAX,
            _ => VERSION,
        }
    }

    /// Bytes in a whole object of this kind, at most: a body is never compressed to more than it is.
    #[must_use]
    pub const fn object_len_max(self) -> u64 {
        self.body_len_max() + (HEADER_LEN + DIGEST_LEN) as u64
    }
}

/// Wraps `body`, compressed if that helps and `compress` asks for it.
#[must_use]
pub fn seal(kind: Kind, body: &[u8], compress: bool) -> Bytes {
    seal_version(VERSION, kind, body, compress)
}

/// As [`seal`], for a body of another version.
#[must_use]
pub fn seal_version(version: u8, kind: Kind, body: &[u8], compress: bool) -> Bytes {
    let small =
        if compress { zstd::bulk::compress(body, 3).ok().filter(|small| small.len() < body.len()) } else { None };
    let mut header = header(kind, u8::from(small.is_some()), body.len() as u64);
    header[VERSION_AT] = version;
    let mut out = Writer::new();
    out.bytes(&header);
    out.bytes(small.as_deref().unwrap_or(body));
    let mut bytes = out.into_bytes();
    let digest = blake3::hash(&bytes);
    bytes.extend_from_slice(digest.as_bytes());
    bytes.into()
}

/// The sixteen bytes before a body.
#[must_use]
pub fn header(kind: Kind, compression: u8, plain_len: u64) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    let [m0, m1, m2, m3] = MAGIC;
    header[..8].copy_from_slice(&[m0, m1, m2, m3, kind as u8, VERSION, 0, compression]);
    header[8..].copy_from_slice(&plain_len.to_le_bytes());
    header
}

/// The version of an object whose header was read.
#[must_use]
pub fn version(object: &[u8]) -> u8 {
    object.get(VERSION_AT).copied().unwrap_or(VERSION)
}

/// Unwraps an object of `kind`: its plain body, checked.
///
/// # Errors
/// Damaged, if a byte has changed; unsupported, if a later version wrote it or it is encrypted.
pub fn open(kind: Kind, object: &Bytes) -> Result<Bytes> {
    open_within(kind, object, u64::MAX)
}

/// As [`open`], for a body of at most `memory` bytes, which is checked before it is decompressed.
///
/// # Errors
/// As [`open`]; exhausted, if `memory` is too little.
pub fn open_within(kind: Kind, object: &Bytes, memory: u64) -> Result<Bytes> {
    let (compression, plain_len) = read_header(kind, object)?;
    if plain_len > memory {
        return Err(too_large().expected(format!("at most {memory} bytes")).got(plain_len));
    }
    let end = object.len().checked_sub(DIGEST_LEN).filter(|&end| end >= HEADER_LEN);
    let end = end.ok_or_else(|| Error::damaged("object is too short").got(format!("{} bytes", object.len())))?;
    if blake3::hash(&object[..end]).as_bytes()[..] != object[end..] {
        return Err(Error::damaged("object does not match its digest"));
    }
    let stored = object.slice(HEADER_LEN..end);
    let body = match compression {
        0 => stored,
        1 => unzstd(&stored, plain_len)?,
        _ => return Err(Error::unsupported("object is compressed in an unknown way").got(compression)),
    };
    if body.len() as u64 == plain_len {
        return Ok(body);
    }
    Err(Error::damaged("object's body has another length").expected(plain_len).got(body.len()))
}

/// Checks a header; returns the compression and the body's plain length.
///
/// # Errors
/// As [`open`].
pub fn read_header(kind: Kind, object: &[u8]) -> Result<(u8, u64)> {
    let mut reader = Reader::new(object);
    let fields = (|| Ok::<_, Malformed>((reader.array::<4>()?, reader.array::<4>()?, reader.u64()?)))();
    let (magic, [found, version, encryption, compression], plain_len) = fields?;
    if magic != MAGIC || found != kind as u8 {
        let shown = String::from_utf8_lossy(&object[..5.min(object.len())]).into_owned();
        return Err(Error::damaged("object is of another kind")
            .expected(format!("TWLN{}", kind as u8 as char))
            .got(shown));
    }
    let latest = kind.version_max();
    if !(VERSION..=latest).contains(&version) {
        let error = Error::unsupported("object was written by another version of the format");
        return Err(error.expected(format!("at most {latest}")).got(version).help("use a newer towline"));
    }
    if encryption != 0 {
        return Err(Error::unsupported("object is encrypted at rest").got(encryption).help("use a newer towline"));
    }
    if plain_len > kind.body_len_max() {
        return Err(Error::damaged("object's body is impossibly long").expected(kind.body_len_max()).got(plain_len));
    }
    Ok((compression, plain_len))
}

/// Decompresses to at most `plain_len` bytes, with a window of at most that length: without this limit, a frame of a few bytes
/// could demand 128 MiB.
fn unzstd(stored: &Bytes, plain_len: u64) -> Result<Bytes> {
    use std::io::Read as _;
    let damaged = |source: std::io::Error| Error::damaged("object's body does not decompress").source(source);
    let mut decoder = zstd::stream::read::Decoder::new(stored.as_ref()).map_err(damaged)?;
    let window = u64::BITS - plain_len.saturating_sub(1).leading_zeros();
    decoder.window_log_max(window.clamp(WINDOW_LOG.0, WINDOW_LOG.1)).map_err(damaged)?;
    let mut plain = Vec::new();
    // Reads one byte more, to detect a body that is too long.
    let len = usize::try_from(plain_len).unwrap_or(usize::MAX).saturating_add(1);
    let no_room = |_| too_large().got(plain_len);
    plain.try_reserve_exact(len).map_err(no_room)?;
    decoder.take(plain_len.saturating_add(1)).read_to_end(&mut plain).map_err(damaged)?;
    plain.truncate(len);
    Ok(plain.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn what_is_sealed_opens_and_any_flipped_bit_is_found() {
        let body = b"towline ".repeat(50);
        for compress in [false, true] {
            let sealed = seal(Kind::Manifest, &body, compress);
            assert_eq!(open(Kind::Manifest, &sealed).unwrap(), body);
            for bit in 0..sealed.len() * 8 {
                let mut bent = sealed.to_vec();
                bent[bit / 8] ^= 1 << (bit % 8);
                let kind = open(Kind::Manifest, &bent.into()).unwrap_err().kind();
                assert!(matches!(kind, ErrorKind::Damaged | ErrorKind::Unsupported), "bit {bit}: {kind:?}");
            }
            for cut in 0..sealed.len() {
                assert!(open(Kind::Manifest, &sealed.slice(..cut)).is_err());
            }
        }
    }

    #[test]
    fn a_body_is_refused_by_its_announced_length() {
        let zeros = vec![0; 1 << 20];
        let bomb = seal(Kind::Manifest, &zeros, true);
        assert!(bomb.len() < 200);
        assert_eq!(open_within(Kind::Manifest, &bomb, 1 << 20).unwrap(), zeros);
        let error = open_within(Kind::Manifest, &bomb, (1 << 20) - 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        // An agent's object holds an address.
        let error = open(Kind::Agent, &seal(Kind::Agent, &zeros, true)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
    }

    #[test]
    fn only_snapshots_and_maps_have_a_second_version() {
        for kind in [Kind::Snapshot, Kind::Map, Kind::Entry, Kind::Manifest, Kind::Repository] {
            for number in 0..4 {
                let sealed = seal_version(number, kind, b"body", false);
                let known = number == 1 || number == 2 && matches!(kind, Kind::Snapshot | Kind::Map);
                match open(kind, &sealed) {
                    Ok(body) => assert!(known && body == "body" && version(&sealed) == number, "{kind:?} {number}"),
                    Err(error) => {
                        assert_eq!((known, error.kind()), (false, ErrorKind::Unsupported), "{kind:?} {number}");
                    }
                }
            }
        }
    }

    #[test]
    fn one_kind_is_not_another() {
        let error = open(Kind::Map, &seal(Kind::Manifest, b"x", false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
    }
}
