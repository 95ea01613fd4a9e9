//! Audit of the index: reads segments from the store, past the local cache, and compares them with the packs they cover.

use bytes::Bytes;

use crate::budget::Retained;
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{Kind, open};
use crate::format::{PackFooter, PackRef, Row, SegmentView};
use crate::id::SegmentId;
use crate::repository::Repository;
use crate::repository::layout::{self, Family};
use crate::repository::log::SegmentInfo;
use crate::repository::objects;

/// A fully verified segment.
#[derive(Debug)]
pub struct SegmentAudit {
    id: SegmentId,
    view: SegmentView,
    object: Bytes,
    _memory: Retained,
}

/// A damaged segment.
#[derive(Debug)]
pub struct BadSegment {
    /// Reason.
    pub error: Error,
    /// Packs that it seems to cover; each must be checked against its own footer.
    pub packs: Vec<PackRef>,
}

impl Repository {
    /// Reads a segment from the store and checks it.
    ///
    /// # Errors
    /// Errors of the store, unless they are known to be damage.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn audit_segment(&self, id: SegmentId, info: &SegmentInfo) -> Result<Result<SegmentAudit, BadSegment>> {
        let key = layout::owned(Family::Index, id);
        let bad = |error: Error| Ok(Err(BadSegment { error: error.at(&key), packs: Vec::new() }));
        let (objects, budget) = (&**self.store().objects(), self.budget());
        // Memory is reserved for the length in the store: that in the log may be wrong.
        let len = match objects::len(objects, &key).await {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::NotFound => return bad(Error::not_found("index segment is gone")),
            Err(error) if error.kind() == ErrorKind::Damaged => return bad(error),
            Err(error) => return Err(error),
        };
        if len != info.len {
            let error = Error::damaged("index segment has another length than the log says");
            return bad(error.expected(info.len).got(len));
        }
        let memory = budget.keep(len).map_err(|error| error.at(&key))?;
        match objects::sealed(objects, budget, Kind::Segment, &key).await {
            Ok(Some(object)) => Ok(Self::audited_segment(id, info, object, memory)),
            Ok(None) => bad(Error::not_found("index segment is gone")),
            Err(error) if error.kind() == ErrorKind::Damaged => bad(error),
            Err(error) => Err(error),
        }
    }

    fn audited_segment(
        id: SegmentId,
        info: &SegmentInfo,
        object: Bytes,
        memory: Retained,
    ) -> Result<SegmentAudit, BadSegment> {
        // Parses first, to refuse a compressed segment before it is decompressed.
        let checked = SegmentView::parse(&object).and_then(|view| {
            open(Kind::Segment, &object)?;
            let expected = (info.len, info.packs, info.chunks);
            // An impossible pack does not count.
            let found = (object.len() as u64, view.packs(&object).count() as u64, view.chunks() as u64);
            let show = |(len, packs, chunks)| format!("{len} bytes, {packs} packs, {chunks} chunks");
            if expected == found {
                return Ok(view);
            }
            Err(Error::damaged("index segment is not the one that the log names")
                .expected(show(expected))
                .got(show(found)))
        });
        match checked {
            Ok(view) => Ok(SegmentAudit { id, view, object, _memory: memory }),
            Err(error) => {
                let packs = SegmentView::parse(&object).map(|view| view.packs(&object).collect()).unwrap_or_default();
                Err(BadSegment { error: error.at(layout::owned(Family::Index, id)), packs })
            }
        }
    }
}

impl SegmentAudit {
    /// Packs that it covers.
    #[must_use]
    pub fn packs(&self) -> Vec<PackRef> {
        self.view.packs(&self.object).collect()
    }

    /// Number of chunks that it lists.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.view.chunks() as u64
    }

    /// Checks that it lists every chunk of its pack number `pack`.
    ///
    /// # Errors
    /// Damaged, with the first chunk that it lacks.
    pub fn matches(&self, pack: u32, footer: &PackFooter) -> Result<()> {
        let listed = |(ordinal, entry): (u32, &crate::format::FooterEntry)| {
            self.view.lists(&self.object, &Row { prefix: entry.id.prefix(), pack, ordinal })
        };
        match (0u32..).zip(&footer.entries).find(|&entry| !listed(entry)) {
            None => Ok(()),
            Some((ordinal, entry)) => Err(Error::damaged("index segment does not list a chunk of its pack")
                .at(layout::owned(Family::Index, self.id))
                .expected(format!("{:.16}, chunk {ordinal} of pack {pack}", entry.id))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::codec::Codec;
    use crate::format::envelope::seal;
    use crate::format::{FooterEntry, segment_bytes};
    use crate::id::{ChunkId, Owned, SessionId};
    use crate::limits::MEMORY_MIN;

    /// As many as a few seconds are enough for, if each is compared with a few only.
    #[test]
    fn chunks_with_one_prefix_are_compared_with_few_rows_each() {
        let count = 400_000u32;
        let id = |ordinal: u32| {
            let mut bytes = [7; 32];
            bytes[28..].copy_from_slice(&ordinal.to_be_bytes());
            ChunkId::from_bytes(bytes)
        };
        let entry = |ordinal| FooterEntry {
            id: id(ordinal),
            offset: 0,
            stored_len: 1,
            plain_len: 1,
            codec: Codec::Raw,
            base: None,
        };
        let mut footer = PackFooter { entries: (0..count).map(entry).collect() };
        let rows = (0..count).map(|ordinal| Row { prefix: id(ordinal).prefix(), pack: 0, ordinal }).collect();
        let pack = PackRef { id: Owned::fresh(SessionId::random()), len: 1, footer_len: 100, chunks: count };
        let object = seal(Kind::Segment, &segment_bytes(&[pack], rows), false);
        let memory = Budget::new(MEMORY_MIN).unwrap().keep(1).unwrap();
        let view = SegmentView::parse(&object).unwrap();
        let audit = SegmentAudit { id: Owned::fresh(SessionId::random()), view, object, _memory: memory };
        audit.matches(0, &footer).unwrap();
        assert_eq!(audit.matches(1, &footer).unwrap_err().kind(), ErrorKind::Damaged);
        footer.entries.push(entry(count));
        assert_eq!(audit.matches(0, &footer).unwrap_err().kind(), ErrorKind::Damaged);
    }
}
