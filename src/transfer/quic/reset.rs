//! Stateless resets that survive a restart: an agent that restarts after a crash tells peers at their next packet that
//! it does not know their connections (<https://www.rfc-editor.org/rfc/rfc9000#section-10.3>). Otherwise they would
//! wait for a timeout.

use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::{CryptoError, HmacKey};
use quinn::{ConnectionId, ConnectionIdGenerator, EndpointConfig};

use crate::id::WriteId;

/// Bytes of a connection id.
const ID_LEN: usize = 8;
/// Bytes of a signature.
const SIGNATURE_LEN: usize = 32;

/// Settings of an endpoint whose resets are valid as long as `secret` stays the same.
pub(super) fn endpoint_config(secret: &[u8; 32]) -> EndpointConfig {
    let key = Key(blake3::derive_key("towline 2026-11-23 quic stateless reset", secret));
    let mut config = EndpointConfig::new(Arc::new(key));
    config.cid_generator(|| Box::new(Ids));
    config
}

/// Key of a keyed BLAKE3.
struct Key([u8; 32]);

impl Key {
    fn signature(&self, data: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, data)
    }
}

impl HmacKey for Key {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        signature_out.copy_from_slice(self.signature(data).as_bytes());
    }

    fn signature_len(&self) -> usize {
        SIGNATURE_LEN
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        // Hashes are compared in constant time.
        let given: [u8; SIGNATURE_LEN] = signature.try_into().map_err(|_| CryptoError)?;
        if self.signature(data) == blake3::Hash::from_bytes(given) { Ok(()) } else { Err(CryptoError) }
    }
}

/// Random connection ids, any of which may be from before a restart. (quinn's own ids carry a key of the process, and
/// those of an earlier process get no reset.)
struct Ids;

impl ConnectionIdGenerator for Ids {
    fn generate_cid(&mut self) -> ConnectionId {
        let [_, _, _, _, _, _, _, _, random @ ..] = WriteId::random().to_bytes();
        ConnectionId::new(&random)
    }

    fn cid_len(&self) -> usize {
        ID_LEN
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}
