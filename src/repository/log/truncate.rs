//! Truncation: the boundary is moved first, then older entries are deleted.

use std::collections::BTreeMap;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::ObjectMeta;
use object_store::path::Path;

use super::commit::used_up;
use super::fold::NUMBER_MAX;
use super::{Boundary, Log};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, seal};
use crate::format::wire::Writer;
use crate::repository::layout::Numbered;
use crate::repository::listing::listed;
use crate::repository::objects;

impl Log {
    /// Truncates the log up to a snapshot, and keeps the last `keep` entries; returns the number of deleted objects. The last
    /// entry of each open session stays, because its age shows whether the session is alive. Objects below an earlier boundary
    /// are deleted only if the store shows that the boundary was written before `limit`: anybody with write access can move the
    /// boundary, and this must not cause an immediate loss.
    ///
    /// The boundary object is created before anything is deleted, so that a reader that misses an entry finds the reason. A crash
    /// in between leaves objects that the next truncation deletes.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: the next truncation continues.
    pub async fn truncate(&self, keep: u64, limit: Option<Timestamp>) -> Result<u64> {
        let state = self.refresh().await?;
        let boundary = self.advance_boundary().await?;
        if state.seq.saturating_sub(keep) > boundary.floor {
            if keep == 0 {
                self.write_snapshot(&state).await?;
            }
            let alive = state.sessions.values().map(|session| session.touched).min().unwrap_or(u64::MAX);
            let usable = |&number: &u64| number > boundary.floor && number + keep <= state.seq && number < alive;
            let floor = self.numbers(Numbered::Snapshot).await?.into_iter().filter(usable).max();
            if let Some(floor) = floor {
                self.raise(Boundary { number: boundary.number + 1, floor }).await?;
            }
        }
        let Some(floor) = self.floor_before(limit).await? else { return Ok(0) };
        let entries = self.numbers(Numbered::Entry).await?.into_iter().filter(|&number| number <= floor);
        let snapshots = self.numbers(Numbered::Snapshot).await?.into_iter().filter(|&number| number < floor);
        let keys = entries.map(|n| Numbered::Entry.key(n)).chain(snapshots.map(|n| Numbered::Snapshot.key(n)));
        self.delete(keys.collect()).await
    }

    /// Floor of the newest boundary that was written before `limit`, if there is one.
    async fn floor_before(&self, limit: Option<Timestamp>) -> Result<Option<u64>> {
        let newest = self.advance_boundary().await?;
        let Some(limit) = limit else { return Ok(Some(newest.floor)) };
        let written = self.boundaries_written().await?;
        let old = written.into_iter().filter(|(_, written)| *written <= limit).map(|(number, _)| number);
        // A number that is not reached from the first was planted.
        let Some(number) = old.filter(|&number| number <= newest.number).max() else { return Ok(None) };
        Ok(self.boundary(number).await?.map(|boundary| boundary.floor))
    }

    /// Time when the first boundary that allows entry `number` to be missing was written, by the store's clock: after
    /// the entry.
    ///
    /// # Errors
    /// Unreachable, if the store is; damaged, if a boundary is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn passed(&self, number: u64) -> Result<Option<Timestamp>> {
        let newest = self.advance_boundary().await?;
        if newest.floor < number {
            return Ok(None);
        }
        // Floors grow with the numbers of their boundaries.
        let (mut below, mut first) = (0, newest.number);
        while first - below > 1 {
            let middle = below + (first - below) / 2;
            let floor = self.boundary(middle).await?.map_or(0, |boundary| boundary.floor);
            if floor < number {
                below = middle;
            } else {
                first = middle;
            }
        }
        Ok(self.boundaries_written().await?.get(&first).copied())
    }

    /// Times when the listed boundaries were written, by the store's clock.
    async fn boundaries_written(&self) -> Result<BTreeMap<u64, Timestamp>> {
        let pick = |meta: ObjectMeta| {
            let written = meta.last_modified.timestamp_nanos_opt().map(Timestamp);
            Numbered::Boundary.number(&meta.location).zip(written)
        };
        let (written, _memory) =
            listed(&*self.objects, &self.budget, &Numbered::Boundary.prefix(), pick, |_| 0).await?;
        Ok(written.into_iter().collect())
    }

    /// Creates one boundary object. Losing the race to another truncation is as good as winning it.
    pub(super) async fn raise(&self, boundary: Boundary) -> Result<()> {
        // Nothing could be committed after it.
        if boundary.floor >= NUMBER_MAX {
            return Err(used_up(boundary.floor));
        }
        let mut body = Writer::new();
        body.varint(boundary.floor);
        let object = seal(Kind::Boundary, &body.into_bytes(), false);
        objects::create(&*self.objects, &Numbered::Boundary.key(boundary.number), object).await.map(drop)
    }

    async fn delete(&self, keys: Vec<Path>) -> Result<u64> {
        let keys = stream::iter(keys.into_iter().map(Ok)).boxed();
        let deleted = self.objects.delete_stream(keys).filter_map(|result| async move {
            match result {
                Ok(_) => Some(Ok(1)),
                Err(object_store::Error::NotFound { .. }) => None,
                Err(error) => Some(Err(Error::from(error))),
            }
        });
        deleted.try_fold(0, |sum, one| async move { Ok(sum + one) }).await
    }
}
