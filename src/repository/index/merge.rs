//! Merging of segments: keeps their number small, and drops purged packs.

use std::sync::Arc;

use super::{Index, Repository, Segment};
use crate::error::{Error, Result};
use crate::format::{PackRef, Row};
use crate::id::SegmentId;
use crate::id::SessionId;
use crate::limits::SEGMENTS_MAX;
use crate::repository::layout::{self, Family};
use crate::repository::log::{Action, State};
use crate::repository::writer::put_segment;

/// Maximum number of chunks in a merged segment: 64 MiB of entries in memory while merging.
const MERGED_MAX: u64 = 4 << 20;

/// Number of recorded purges above which all older segments are rebuilt, so that the records can be dropped.
const PURGED_MANY: usize = 1024;

/// Segments to replace by one. Pure, so that a dry run can print them.
///
/// The smallest are merged while they stay small together.
pub(crate) fn choose(state: &State, most: usize) -> Vec<SegmentId> {
    let mut by_size: Vec<_> = state.segments.iter().map(|(id, info)| (info.chunks, *id)).collect();
    by_size.sort_unstable();
    if by_size.len() <= most {
        return Vec::new();
    }
    let mut sum = 0_u64;
    let small = by_size.iter().take_while(|(chunks, _)| {
        sum = sum.saturating_add(*chunks);
        sum <= MERGED_MAX
    });
    let chosen: Vec<_> = small.map(|(_, id)| *id).collect();
    if chosen.len() > 1 { chosen } else { Vec::new() }
}

impl Index {
    /// Groups of segments to replace by one each: those that list purged packs, and small ones while there are more than
    /// `most`.
    #[must_use]
    pub fn to_rebuild(&self, state: &State, most: usize) -> Vec<Vec<SegmentId>> {
        let last = state.purged.values().map(|purged| purged.at).max().unwrap_or(0);
        let keeps_memory = |id: &SegmentId| {
            let built = state.segments.get(id).map_or(0, |info| info.built);
            state.purged.len() > PURGED_MANY && built < last
        };
        let lists_purged = |segment: &Segment| segment.packs().any(|pack| state.purged.contains_key(&pack.id));
        let many = choose(state, most);
        let stale = self.segments.iter().filter(|(id, segment)| lists_purged(segment) || keeps_memory(id));
        let stale = stale.filter(|(id, _)| !many.contains(id));
        let mut groups: Vec<Vec<SegmentId>> = stale.map(|(id, _)| vec![*id]).collect();
        groups.extend(Some(many).filter(|many| !many.is_empty()));
        groups
    }
}

impl Repository {
    /// Replaces `old` by one segment without the packs that `state` says are purged.
    ///
    /// # Errors
    /// Conflict, if another process replaced one of them meanwhile.
    ///
    /// # Cancel safety
    /// Safe: one commit decides.
    pub(crate) async fn merge(&self, state: &State, old: Vec<SegmentId>, session: SessionId) -> Result<()> {
        let mut packs: Vec<PackRef> = Vec::new();
        let mut rows: Vec<Row> = Vec::new();
        for &id in &old {
            let lacking = || Error::conflict("index segment was replaced meanwhile").help("run the command again");
            let info = state.segments.get(&id).ok_or_else(lacking)?;
            let segment = self.segment(id, info).await?;
            // The log's number decides what is merged at once, so a larger segment would take any amount of memory.
            if segment.view.chunks() as u64 != info.chunks {
                return Err(Error::damaged("index segment does not hold the number of chunks that the log says")
                    .at(layout::owned(Family::Index, id))
                    .expected(info.chunks)
                    .got(segment.view.chunks())
                    .help("`towline verify --repair` rebuilds it"));
            }
            append(&segment, state, &mut packs, &mut rows);
        }
        let mut new = Vec::new();
        if !rows.is_empty() {
            new.push(put_segment(self, session, &packs, rows).await?);
        }
        let built = state.seq;
        let commit = self
            .log()
            .commit(Some(session), |_| Ok(vec![Action::ReplaceSegments { old: old.clone(), new: new.clone(), built }]));
        commit.await.map(drop)
    }
}

fn append(segment: &Arc<Segment>, state: &State, packs: &mut Vec<PackRef>, rows: &mut Vec<Row>) {
    let kept: Vec<Option<u32>> = segment
        .numbered_packs()
        .map(|pack| {
            let live = pack.filter(|pack| !state.purged.contains_key(&pack.id))?;
            packs.push(live);
            u32::try_from(packs.len() - 1).ok()
        })
        .collect();
    let moved = |row: Row| {
        let pack = (*kept.get(row.pack as usize)?)?;
        Some(Row { pack, ..row })
    };
    rows.extend(segment.rows().filter_map(moved));
}

/// Merges if there are too many segments. Best effort: a lost race or an unreachable store costs only speed.
pub(crate) async fn merge_if_many(repository: &Repository, state: &State) {
    let old = choose(state, SEGMENTS_MAX);
    if old.is_empty() {
        return;
    }
    let merged = async {
        let session = SessionId::random();
        repository.log().commit(Some(session), |_| Ok(vec![Action::Open(session)])).await?;
        let merged = repository.merge(state, old, session).await;
        repository.log().commit(Some(session), |_| Ok(vec![Action::Close(session)])).await?;
        merged
    };
    if let Err(error) = merged.await {
        tracing::debug!("index segments were not merged: {error:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Owned, SessionId};
    use crate::repository::log::SegmentInfo;

    #[test]
    fn counts_that_no_segment_can_have_do_not_overflow() {
        let mut state = State::default();
        for chunks in [1, 2, u64::MAX, u64::MAX] {
            let info = SegmentInfo { len: 0, packs: 0, chunks, built: 0 };
            state.segments.insert(Owned::fresh(SessionId::random()), info);
        }
        assert_eq!(choose(&state, 3).len(), 2);
    }
}
