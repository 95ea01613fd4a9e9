//! Heads: the last entry of a log at some time, signed, as objects of the repository (docs/format.md).

use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::wire::{Malformed, Reader, Writer};
use crate::id::{AuditLogId, EntryHash};

/// Maximum length of an origin.
pub(super) const ORIGIN_LEN_MAX: usize = 256;
/// Maximum length of a signature.
const SIGNATURE_LEN_MAX: usize = 48 << 10;

/// Head of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The log.
    pub log: AuditLogId,
    /// Owner of the log: `towline://SITE/AGENT`.
    pub origin: String,
    /// Number of its last entry.
    pub seq: u64,
    /// Hash of that entry.
    pub hash: EntryHash,
    /// Time of the head.
    pub time: Timestamp,
}

/// Head with the signature of its agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedHead {
    /// The head.
    pub head: Head,
    /// Signature of [`Head::encode`], not checked.
    pub signature: Vec<u8>,
}

impl Head {
    /// Signed bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.bytes(&self.log.to_bytes()).string(self.origin.as_bytes()).varint(self.seq);
        out.bytes(self.hash.as_bytes()).signed(self.time.0);
        out.into_bytes()
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            log: AuditLogId::from_bytes(reader.array()?),
            origin: reader.text(ORIGIN_LEN_MAX)?.to_owned(),
            seq: reader.varint()?,
            hash: EntryHash::from_bytes(reader.array()?),
            time: Timestamp(reader.signed()?),
        })
    }
}

impl SignedHead {
    /// Body of its object.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.bytes(&self.head.encode()).string(&self.signature);
        out.into_bytes()
    }

    /// Parses the body of an object.
    ///
    /// # Errors
    /// Damaged, if it is not a head.
    pub fn decode(body: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(body);
        let read = (|| {
            let head = Head::read(&mut reader)?;
            let signature = reader.string(SIGNATURE_LEN_MAX)?.to_vec();
            reader.finish()?;
            Ok::<_, Malformed>(Self { head, signature })
        })();
        read.map_err(|source| Error::damaged("head of an audit log is malformed").source(Error::from(source)))
    }
}
