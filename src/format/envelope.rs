//! What every object but a pack is wrapped in: a header, a body, a digest of both.
//!
//! ```text
//! 0  4  magic "TWLN"        4  1  kind       5  1  version (1)
//! 6  1  encryption (0: none; reserved)       7  1  compression (0: none, 1: zstd)
//! 8  8  plain length of the body            16  n  body        16+n  32  BLAKE3 of all before
//! ```

use bytes::Bytes;

use super::wire::{Malformed, Reader, Writer};
use crate::error::{Error, Result};
use crate::limits::{BODY_LEN_MAX, MIB};

/// The first bytes of every object.
pub const MAGIC: [u8; 4] = *b"TWLN";
/// The version of the format that this program writes.
pub const VERSION: u8 = 1;
/// Bytes before the body.
pub const HEADER_LEN: usize = 16;
/// Bytes after it.
pub const DIGEST_LEN: usize = 32;

/// What an object is. The byte is part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The repository's own description.
    Repository = b'R',
    /// One entry of the log.
    Entry = b'L',
    /// The log's state at one point.
    Snapshot = b'S',
    /// How far the log has been truncated.
    Boundary = b'B',
    /// An index segment.
    Segment = b'I',
    /// A saved tree.
    Manifest = b'M',
    /// Where a manifest's chunks are.
    Map = b'P',
    /// What one rank has saved of a step.
    Part = b'H',
    /// Where an agent listens.
    Agent = b'A',
    /// A pack's header; its trailer has the lower-case letter.
    Pack = b'K',
}

/// Wraps `body`, compressed if that helps and `compress` asks for it.
#[must_use]
pub fn seal(kind: Kind, body: &[u8], compress: bool) -> Bytes {
    let small =
        if compress { zstd::bulk::compress(body, 3).ok().filter(|small| small.len() < body.len()) } else { None };
    let mut out = Writer::new();
    out.bytes(&header(kind, u8::from(small.is_some()), body.len() as u64));
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

/// Unwraps an object of `kind`: its plain body, checked.
///
/// # Errors
/// Damaged, if a byte is not as written; unsupported, if a later version wrote it or it is encrypted.
pub fn open(kind: Kind, object: &Bytes) -> Result<Bytes> {
    let (compression, plain_len) = read_header(kind, object)?;
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
    if version != VERSION {
        let error = Error::unsupported("object was written by another version of the format");
        return Err(error.expected(VERSION).got(version).cure("use a newer towline"));
    }
    if encryption != 0 {
        return Err(Error::unsupported("object is encrypted at rest").got(encryption).cure("use a newer towline"));
    }
    if plain_len > BODY_LEN_MAX {
        return Err(Error::damaged("object's body is impossibly long").got(plain_len));
    }
    Ok((compression, plain_len))
}

/// Decompresses without believing the announced length further than the bytes bear it out.
fn unzstd(stored: &Bytes, plain_len: u64) -> Result<Bytes> {
    use std::io::Read as _;
    let damaged = |source: std::io::Error| Error::damaged("object's body does not decompress").source(source);
    let decoder = zstd::stream::read::Decoder::new(stored.as_ref()).map_err(damaged)?;
    let mut plain = Vec::with_capacity(usize::try_from(plain_len.min(MIB)).unwrap_or(0));
    decoder.take(plain_len.saturating_add(1)).read_to_end(&mut plain).map_err(damaged)?;
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
    fn one_kind_is_not_another() {
        let error = open(Kind::Map, &seal(Kind::Manifest, b"x", false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
    }
}
