//! Forgetting old entries: the boundary moves first, then what lies below it goes.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::path::Path;

use super::{Boundary, Log};
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, seal};
use crate::format::wire::Writer;
use crate::repository::layout::Numbered;
use crate::repository::objects;

impl Log {
    /// Truncates the log up to a snapshot that leaves the last `keep` entries: returns how many objects went. Entries that
    /// touched an open session last stay, since their age tells whether it is alive.
    ///
    /// The boundary's object is created before anything is deleted, so whoever finds an entry missing can find out why;
    /// a crash in between leaves objects that the next truncation deletes.
    ///
    /// # Errors
    /// Unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: the next truncation goes on.
    pub async fn truncate(&self, keep: u64) -> Result<u64> {
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
        let floor = self.advance_boundary().await?.floor;
        let entries = self.numbers(Numbered::Entry).await?.into_iter().filter(|&number| number <= floor);
        let snapshots = self.numbers(Numbered::Snapshot).await?.into_iter().filter(|&number| number < floor);
        let keys = entries.map(|n| Numbered::Entry.key(n)).chain(snapshots.map(|n| Numbered::Snapshot.key(n)));
        self.delete(keys.collect()).await
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
