//! Bytes that removing names would free: of chunks that no other name uses.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::error::{Error, ErrorKind, Result};
use crate::repository::collect::Marks;
use crate::repository::log::{RefValue, State};
use crate::repository::{Name, Repository};

/// Plan of a removal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemovePlan {
    /// The names.
    pub names: Vec<PlannedRemoval>,
    /// Stored bytes that nothing would need any more; the next collect frees them. None, if a damaged map keeps this from
    /// being told.
    pub freed_bytes: Option<u64>,
}

/// A name that would go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedRemoval {
    /// The name.
    pub name: Name,
    /// Bytes in all files.
    pub bytes: u64,
}

impl Repository {
    /// Plans [`Repository::remove_all`].
    ///
    /// # Errors
    /// Not found, if there is no such name; unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn plan_remove(&self, names: &[Name], recursive: bool) -> Result<RemovePlan> {
        let state = self.state().await?;
        let chosen = self.chosen(&state, names, recursive)?;
        let planned =
            |(name, value): (&Name, &RefValue)| PlannedRemoval { name: name.clone(), bytes: value.logical_bytes };
        let names: Vec<Name> = chosen.keys().cloned().collect();
        let freed_bytes = self.freed_without(&state, &names).await?;
        Ok(RemovePlan { names: chosen.iter().map(planned).collect(), freed_bytes })
    }

    /// Stored bytes that only `names` use, by the maps of all names of `state`; None if a map is damaged.
    async fn freed_without(&self, state: &State, names: &[Name]) -> Result<Option<u64>> {
        let (gone, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
            state.refs.iter().partition(|(name, _)| names.contains(*name));
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
