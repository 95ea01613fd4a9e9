//! Bodies that agents sign: heads of inventories, and reports of usage.

use super::wire::{Reader, Writer};
use crate::error::Result;

/// Maximum bytes of a signature.
const SIGNATURE_LEN_MAX: usize = 32 << 10;

/// Bytes with the signature of their agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedBytes {
    /// Bytes.
    pub bytes: Vec<u8>,
    /// Signature of them, not checked.
    pub signature: Vec<u8>,
}

impl SignedBytes {
    /// Body of its object.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.string(&self.signature).bytes(&self.bytes);
        writer.into_bytes()
    }

    /// Reads the body of an object.
    ///
    /// # Errors
    /// Damaged.
    pub fn decode(body: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(body);
        let signature = reader.string(SIGNATURE_LEN_MAX)?.to_vec();
        let bytes = reader.take(reader.remaining())?.to_vec();
        Ok(Self { bytes, signature })
    }
}
