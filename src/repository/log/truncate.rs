//! Forgetting old entries: the boundary moves first, then what lies below it goes.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path;

use super::{Boundary, Log};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, seal};
use crate::format::wire::Writer;
use crate::repository::layout::Numbered;
use crate::repository::objects;

impl Log {
    /// Truncates the log up to a snapshot that leaves the last `keep` entries: returns how many objects went. Entries that
    /// touched an open session last stay, since their age tells whether it is alive. What an earlier truncation left behind is
    /// deleted only if the store says that its boundary was written before `limit`: whoever may write can move the boundary,
    /// and nothing must be lost by that at once.
    ///
    /// The boundary's object is created before anything is deleted, so whoever finds an entry missing can find out why;
    /// a crash in between leaves objects that the next truncation deletes.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: the next truncation goes on.
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

    /// The floor of the newest boundary that was written before `limit`, if there is one.
    async fn floor_before(&self, limit: Option<Timestamp>) -> Result<Option<u64>> {
        let newest = self.advance_boundary().await?;
        let Some(limit) = limit else { return Ok(Some(newest.floor)) };
        let prefix = Numbered::Boundary.prefix();
        let old = objects::retry(|| async {
            let listed = self.objects.list(Some(&prefix)).map_err(Error::from);
            let old = listed.try_filter_map(|meta| async move {
                let is_old =
                    meta.last_modified.timestamp_nanos_opt().is_some_and(|written| Timestamp(written) <= limit);
                Ok(Numbered::Boundary.number(&meta.location).filter(|_| is_old))
            });
            old.try_collect::<Vec<u64>>().await
        });
        // A number that is not reached from the first was planted.
        let Some(number) = old.await?.into_iter().filter(|&number| number <= newest.number).max() else {
            return Ok(None);
        };
        Ok(self.boundary(number).await?.map(|boundary| boundary.floor))
    }

    /// Creates one boundary object. Losing the race to another truncation is as good as winning it.
    pub(super) async fn raise(&self, boundary: Boundary) -> Result<()> {
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
