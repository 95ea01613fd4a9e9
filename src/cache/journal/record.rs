//! One record of the journal: 16 bytes, and a checksum that includes the record's number.
//!
//! ```text
//! 0  1  kind: 1 insert, 2 remove, 3 promote, 4 charge
//! 1  1  bits 0-1 frequency, bit 2 main queue (insert)
//! 2  2  weight in units (insert); number of a tenant (charge)         4  4  place (insert)
//! 8  8  key: the first eight bytes of the id, as a big-endian number, stored little-endian
//! 16 4  CRC-32C of the 16 bytes, begun with the journal's seed and the record's number
//! ```

use crate::cache::queue::{QueueKind, Resident};
use crate::cache::quotas::TenantNumber;

/// Bytes of a record.
pub(super) const LEN: usize = 20;
const PAYLOAD: usize = 16;
const MAIN: u8 = 4;

/// A change of the cache's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// A chunk was inserted at a place.
    Insert(Resident),
    /// The chunk of this key was removed.
    Remove(u64),
    /// The chunk of this key has moved to the main queue.
    Promote(u64),
    /// The chunk of this key counts for a tenant.
    TenantCharge(u64, TenantNumber),
}

impl Record {
    /// Encodes it as record `number` of a journal.
    pub(super) fn encode(self, seed: u32, number: u64) -> [u8; LEN] {
        let mut out = [0; LEN];
        let key = match self {
            Self::Insert(chunk) => {
                let main = if chunk.standing == QueueKind::Main { MAIN } else { 0 };
                (out[0], out[1]) = (1, chunk.frequency & 3 | main);
                out[2..4].copy_from_slice(&chunk.weight.to_le_bytes());
                out[4..8].copy_from_slice(&chunk.place.to_le_bytes());
                chunk.key
            }
            Self::Remove(key) => {
                out[0] = 2;
                key
            }
            Self::Promote(key) => {
                out[0] = 3;
                key
            }
            Self::TenantCharge(key, tenant) => {
                out[0] = 4;
                out[2..4].copy_from_slice(&tenant.to_le_bytes());
                key
            }
        };
        out[8..16].copy_from_slice(&key.to_le_bytes());
        let crc = crc32c(start(seed, number), &out[..PAYLOAD]);
        out[PAYLOAD..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes record `number` of a journal; none if it is damaged.
    pub(super) fn decode(bytes: &[u8; LEN], seed: u32, number: u64) -> Option<Self> {
        let [kind, heat, w0, w1, p0, p1, p2, p3, k0, k1, k2, k3, k4, k5, k6, k7, c0, c1, c2, c3] = *bytes;
        if crc32c(start(seed, number), &bytes[..PAYLOAD]) != u32::from_le_bytes([c0, c1, c2, c3]) {
            return None;
        }
        let key = u64::from_le_bytes([k0, k1, k2, k3, k4, k5, k6, k7]);
        let standing = if heat & MAIN == 0 { QueueKind::Small } else { QueueKind::Main };
        let (weight, place) = (u16::from_le_bytes([w0, w1]), u32::from_le_bytes([p0, p1, p2, p3]));
        match kind {
            1 if weight > 0 => Some(Self::Insert(Resident { key, place, weight, standing, frequency: heat & 3 })),
            2 => Some(Self::Remove(key)),
            3 => Some(Self::Promote(key)),
            4 if weight > 0 => Some(Self::TenantCharge(key, weight)),
            _ => None,
        }
    }
}

/// Initial value of a record's checksum, by which a leftover record of another journal or place does not match.
fn start(seed: u32, number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    seed ^ u32::from_le_bytes([a, b, c, d])
}

/// The Castagnoli polynomial, reflected (<https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4>).
const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0_u32;
    while byte < 256 {
        let mut value = byte;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 0 { value >> 1 } else { value >> 1 ^ POLYNOMIAL };
            bit += 1;
        }
        table[byte as usize] = value;
        byte += 1;
    }
    table
};

/// CRC-32C of `bytes`, continued from `start` (0 for the CRC itself).
pub(super) fn crc32c(start: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!start, |crc, byte| TABLE[usize::from(crc.to_le_bytes()[0] ^ byte)] ^ crc >> 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc_32c() {
        // The check value of the catalogue, https://reveng.sourceforge.io/crc-catalogue/17plus.htm#crc.cat.crc-32-iscsi
        assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_survive_and_no_flipped_bit_passes() {
        let chunk = Resident { key: 77 << 40, place: 123_456, weight: 513, standing: QueueKind::Main, frequency: 2 };
        for record in
            [Record::Insert(chunk), Record::Remove(u64::MAX), Record::Promote(5), Record::TenantCharge(6, 65_535)]
        {
            let bytes = record.encode(99, 7);
            assert_eq!(Record::decode(&bytes, 99, 7), Some(record));
            assert_eq!(Record::decode(&bytes, 99, 8), None);
            assert_eq!(Record::decode(&bytes, 98, 7), None);
            for bit in 0..LEN * 8 {
                let mut bent = bytes;
                bent[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Record::decode(&bent, 99, 7), None, "bit {bit}");
            }
        }
        assert_eq!(Record::decode(&[0; LEN], 0, 0), None);
    }
}
