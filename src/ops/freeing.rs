//! Bytes that removing names would free, of chunks that no other name uses.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use super::remove::RemoveOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::repository::Repository;
use crate::repository::collect::Marks;
use crate::repository::log::{KeptKey, KeptValue, RefValue, State};

/// Plan of a removal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemovePlan {
    /// The names.
    pub names: Vec<PlannedRemoval>,
    /// Stored bytes that nothing would need any more once the names are not kept; the next collect frees them then. None, if a
    /// damaged map keeps this from being told.
    pub freed_bytes: Option<u64>,
    /// Values of removed names that can be restored now and could not be then.
    pub forgotten: u64,
}

/// A name to remove.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedRemoval {
    /// The name.
    pub name: Name,
    /// Bytes in all files.
    pub bytes: u64,
}

impl Repository {
    /// True if `error` is that of a full disk, and the repository had some space set aside there, which is free now: what frees space
    /// can be tried again.
    pub(super) async fn has_made_room(&self, error: &Error) -> bool {
        error.is_of_full_disk() && self.store().spend_reserve().await
    }

    /// Plans [`Repository::remove_with`].
    ///
    /// # Errors
    /// Not found, if there is no such name; unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn plan_remove(&self, names: &[Name], options: &RemoveOptions) -> Result<RemovePlan> {
        let state = self.state().await?;
        let chosen = self.chosen(&state, names, *options)?;
        let planned =
            |(name, value): (&Name, &RefValue)| PlannedRemoval { name: name.clone(), bytes: value.logical_bytes };
        let names: Vec<Name> = chosen.refs.keys().cloned().collect();
        let freed_bytes = self.freed_without(&state, &names, &chosen.forget).await?;
        let forgotten = chosen.forget.len() as u64;
        Ok(RemovePlan { names: chosen.refs.iter().map(planned).collect(), freed_bytes, forgotten })
    }

    /// Stored bytes that only `names` use, and values that `forget` forgets, by the maps of all names of `state` and of what is
    /// kept; None if a map is damaged.
    async fn freed_without(
        &self,
        state: &State,
        names: &[Name],
        forget: &BTreeMap<KeptKey, u64>,
    ) -> Result<Option<u64>> {
        let names: HashSet<&Name> = names.iter().collect();
        let (gone, mut kept): (Vec<_>, Vec<_>) = state.refs.iter().partition(|(name, _)| names.contains(*name));
        let (forgotten, stay): (Vec<_>, Vec<_>) = state.removed.iter().partition(|(key, _)| forget.contains_key(key));
        let gone = gone.into_iter().chain(forgotten.into_iter().map(root));
        kept.extend(stay.into_iter().map(root));
        let mut marks = Marks::new(self.budget());
        let estimate = async {
            marks.read(self, kept).await?;
            let before = marks.live_bytes();
            marks.read(self, gone).await?;
            Ok::<_, Error>(marks.live_bytes() - before)
        };
        match estimate.await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if matches!(error.kind(), ErrorKind::Damaged) => {
                tracing::warn!("what would come free cannot be told: {error:?}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

fn root<'a>((key, removed): (&'a KeptKey, &'a KeptValue)) -> (&'a Name, &'a RefValue) {
    (&key.0, &removed.value)
}
