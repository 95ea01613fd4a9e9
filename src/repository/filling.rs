//! The pack that a writer fills.

use bytes::{Bytes, BytesMut};
use object_store::PutPayload;

use super::stored_chunks::ChunkPlace;
use crate::codec::Encoded;
use crate::format::{PackLayout, PackRef, TRAILER_LEN, pack_header};
use crate::id::{ChunkId, PackId};

/// Frames shorter than this are copied together, so that a pack has few pieces.
const GATHER_BELOW: usize = 64 << 10;

/// A pack that is being filled.
#[derive(Debug)]
pub(super) struct Filling {
    id: PackId,
    layout: PackLayout,
    parts: Vec<Bytes>,
    gathered: BytesMut,
    ids: Vec<ChunkId>,
}

impl Filling {
    /// Creates an empty pack.
    pub(super) fn new(id: PackId) -> Self {
        let gathered = BytesMut::from(pack_header().as_slice());
        Self { id, layout: PackLayout::new(), parts: Vec::new(), gathered, ids: Vec::new() }
    }

    /// Adds a chunk. With `share`, `stored` is kept without a copy.
    pub(super) fn push(&mut self, id: ChunkId, stored: Encoded, plain_len: u32, share: bool) -> ChunkPlace {
        let stored_len = u32::try_from(stored.bytes.len()).unwrap_or(u32::MAX);
        let ordinal = u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
        let padding = self.layout.push(id, (stored.codec, stored.base), stored_len, plain_len);
        let offset = self.layout.len() - u64::from(stored_len);
        self.gathered.resize(self.gathered.len() + usize::try_from(padding).unwrap_or(0), 0);
        if share && stored.bytes.len() >= GATHER_BELOW {
            self.parts.push(self.gathered.split().freeze());
            self.parts.push(stored.bytes);
        } else {
            self.gathered.extend_from_slice(&stored.bytes);
        }
        self.ids.push(id);
        let Encoded { codec, base, .. } = stored;
        ChunkPlace { pack: self.id, ordinal, offset, stored_len, plain_len, codec, base, alone_len: 0 }
    }

    /// True if one more frame of `stored_len` bytes fits.
    pub(super) fn has_room(&self, stored_len: usize) -> bool {
        self.layout.has_room(stored_len as u64)
    }

    /// Bytes so far, without the footer.
    pub(super) fn len(&self) -> u64 {
        self.layout.len()
    }

    /// Chunks so far.
    pub(super) fn chunks(&self) -> u64 {
        self.ids.len() as u64
    }

    /// Completes the pack: what to upload, the chunks in it, and its bytes.
    pub(super) fn finish(mut self) -> (PackRef, Vec<ChunkId>, PutPayload) {
        let frames_end = self.layout.len();
        let chunks = u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
        let (_, tail) = self.layout.finish();
        let len = frames_end + tail.len() as u64;
        let footer_len = u32::try_from(tail.len() as u64 - TRAILER_LEN).unwrap_or(u32::MAX);
        self.gathered.extend_from_slice(&tail);
        self.parts.push(self.gathered.freeze());
        let payload = self.parts.into_iter().filter(|part| !part.is_empty()).collect();
        (PackRef { id: self.id, len, footer_len, chunks }, self.ids, payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::id::{Owned, SessionId};
    use crate::limits::{CHUNK_LEN_MAX, PACK_LEN_MAX};

    #[test]
    fn a_pack_has_no_room_beyond_its_maximum() {
        let len = u32::try_from(CHUNK_LEN_MAX).unwrap();
        let bytes = Bytes::from(vec![0; len as usize]);
        let mut filling = Filling::new(Owned::fresh(SessionId::random()));
        while filling.has_room(bytes.len()) {
            let stored = Encoded { codec: Codec::Raw, bytes: bytes.clone(), base: None };
            filling.push(ChunkId::of(&filling.chunks().to_le_bytes()), stored, len, true);
        }
        let (pack, ids, _) = filling.finish();
        assert!(pack.len <= PACK_LEN_MAX && pack.len + CHUNK_LEN_MAX > PACK_LEN_MAX, "{} in {}", ids.len(), pack.len);
    }
}
