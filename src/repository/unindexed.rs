//! Uploaded packs that are not in the index yet, and the decision when to commit them.

use crate::format::PackRef;
use crate::id::ChunkId;
use crate::limits::{GIB, MIB};

/// Minimum bytes of an early commit: a killed save may have to send as many again.
const COMMIT_MIN: u64 = 128 * MIB;
/// Bytes at which a commit is due in any case.
const COMMIT_MAX: u64 = GIB;

/// An uploaded pack, and its chunks in order.
pub(super) type Uploaded = (PackRef, Vec<ChunkId>);

/// The packs of one writer that wait for a segment.
#[derive(Debug, Default)]
pub(super) struct Unindexed {
    packs: Vec<Uploaded>,
    bytes: u64,
    /// Bytes of packs that are in a segment.
    indexed: u64,
}

impl Unindexed {
    pub(super) fn push(&mut self, uploaded: Uploaded) {
        self.bytes += uploaded.0.len;
        self.packs.push(uploaded);
    }

    pub(super) fn packs(&self) -> &[Uploaded] {
        &self.packs
    }

    /// True if a segment should be committed: at a quarter of the bytes already indexed, so that a long save commits rarely and a
    /// short one often enough to resume.
    pub(super) fn is_due(&self) -> bool {
        self.bytes >= (self.indexed / 4).clamp(COMMIT_MIN, COMMIT_MAX)
    }

    /// Records that all packs are in a segment.
    pub(super) fn committed(&mut self) {
        self.indexed += std::mem::take(&mut self.bytes);
        self.packs.clear();
    }

    /// Bytes of the packs that are in segments.
    pub(super) fn indexed(&self) -> u64 {
        self.indexed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Owned, SessionId};

    /// Bytes uploaded when segments are committed, in a save of `total` bytes in packs of 64 MiB.
    fn commits(total: u64) -> Vec<u64> {
        let mut unindexed = Unindexed::default();
        let mut at = Vec::new();
        for sent in (1..=total / (64 * MIB)).map(|packs| packs * 64 * MIB) {
            let id = Owned::fresh(SessionId::random());
            unindexed.push((PackRef { id, len: 64 * MIB, footer_len: 0, chunks: 0 }, Vec::new()));
            if unindexed.is_due() {
                unindexed.committed();
                at.push(sent);
            }
        }
        at
    }

    #[test]
    fn a_short_save_is_indexed_often_and_a_long_one_seldom() {
        let mib: Vec<u64> = commits(GIB).into_iter().map(|at| at / MIB).collect();
        assert_eq!(mib, [128, 256, 384, 512, 640, 832]);
        let long = commits(256 * GIB);
        assert!(long.len() < 300, "{}", long.len());
        assert!(long.windows(2).all(|pair| pair[1] - pair[0] <= GIB));
    }
}
