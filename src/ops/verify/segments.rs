//! Check of the index: compares every live segment in the store with the packs that it covers.

use std::sync::Arc;

use super::groups::grouped;
use super::{Subject, Verifying};
use crate::error::{Error, Result};
use crate::format::PackRef;
use crate::id::{PackId, SegmentId};
use crate::repository::SegmentAudit;
use crate::repository::layout::{self, Family};
use crate::work::blocking;

/// Bytes of memory of a pack in an intact segment, in the nodes of its tree.
const INDEXED_WEIGHT: usize = 2 * size_of::<PackId>();

impl Verifying<'_> {
    pub(super) async fn check_segments(&mut self) -> Result<()> {
        self.options.progress.phase("reading the index", 0);
        let segments: Vec<_> = self.state.segments.iter().map(|(id, info)| (*id, *info)).collect();
        for (id, info) in segments {
            match self.repository.audit_segment(id, &info).await? {
                Ok(segment) => {
                    let compared = self.compare_segment(Arc::new(segment)).await?;
                    if let Err((error, packs)) = compared {
                        self.add_bad_segment(id, error, packs)?;
                    }
                }
                Err(bad) => {
                    self.add_bad_segment(id, bad.error, bad.packs)?;
                }
            }
        }
        self.find_unindexed()
    }

    fn add_bad_segment(&mut self, id: SegmentId, error: Error, packs: Vec<PackRef>) -> Result<()> {
        self.memory.add(size_of_val(&*packs) as u64)?;
        self.bad_segments.insert(id, packs);
        self.findings.add(Subject::Segment(id), layout::owned(Family::Index, id).to_string(), error)
    }

    /// Compares a segment with the footers of its live packs; returns the error and all its packs if it is wrong.
    async fn compare_segment(&mut self, segment: Arc<SegmentAudit>) -> Result<Result<(), (Error, Vec<PackRef>)>> {
        let packs = segment.packs();
        let listed: u64 = packs.iter().map(|pack| u64::from(pack.chunks)).sum();
        if listed != segment.chunks() {
            let error = Error::damaged("index segment lists another number of chunks than its packs hold");
            return Ok(Err((error.expected(listed).got(segment.chunks()), packs)));
        }
        let live: Vec<(u32, PackRef)> =
            (0u32..).zip(packs.iter().copied()).filter(|(_, pack)| self.state.is_target(&pack.id)).collect();
        for group in grouped(&live, self.repository.budget().total(), |(_, pack)| pack.chunks) {
            let wanted: Vec<PackRef> = group.iter().map(|(_, pack)| *pack).collect();
            let footers = self.footers(&wanted).await?;
            let (segment, group) = (Arc::clone(&segment), group.to_vec());
            let compared = blocking(move || {
                let pairs = group.iter().filter_map(|(number, pack)| Some((*number, footers.get(&pack.id)?)));
                Ok(pairs.map(|(number, footer)| segment.matches(number, footer)).find(Result::is_err))
            });
            if let Some(Err(error)) = compared.await? {
                return Ok(Err((error, packs)));
            }
        }
        self.memory.add((packs.len() * INDEXED_WEIGHT) as u64)?;
        self.indexed.extend(packs.iter().map(|pack| pack.id));
        Ok(Ok(()))
    }

    /// Finds chunks that names need and no segment lists, which would be stored twice. Skipped while a segment is unreadable.
    fn find_unindexed(&mut self) -> Result<()> {
        if !self.bad_segments.is_empty() {
            return Ok(());
        }
        let sound = self.packs.values().filter(|(_, sound)| *sound).map(|(pack, _)| pack.id);
        let lost: Vec<_> = sound.filter(|id| self.state.is_target(id) && !self.indexed.contains(id)).collect();
        for id in lost {
            let key = layout::owned(Family::Pack, id).to_string();
            let error = Error::damaged("pack is in no index segment").at(&key);
            self.findings.add(Subject::Unindexed(id), key, error)?;
        }
        Ok(())
    }
}
