//! Settling: a step is stored again without other steps, in place, so that reading it reads nothing else.
//!
//! A restore of a step that is stored as differences reads the step and its bases. The latest step of a run is the one that is
//! restored, usually from a bucket, which cannot encode chunks anew.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::stand_alone::has_foreign_bases;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::{RepairedTree, Repository, Run, Saved, StoredChunks, Writer};

/// Result of settling a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Settled {
    /// The name.
    pub name: Name,
    /// Chunks that were stored again.
    pub chunks: u64,
    /// Bytes that these take.
    pub stored_bytes: u64,
    /// Stored bytes that a restore of all of it reads, before and now.
    pub read_bytes: [u64; 2],
}

impl Repository {
    /// Latest steps of `runs`, of all runs if there are none, that were saved `paused` ago or earlier: probably nothing follows soon.
    ///
    /// # Errors
    /// Not found, if one of `runs` has no step.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn paused_steps(&self, runs: &[Name], paused: Duration) -> Result<Vec<Name>> {
        let state = self.state().await?;
        let runs = if runs.is_empty() {
            Run::all(&state.refs)
        } else {
            runs.iter().map(|run| Run::find(&state.refs, run)).collect::<Result<_>>()?
        };
        let now = self.clock().now();
        let latest = runs.iter().map(Run::latest).filter(|step| now.since(step.value.saved) >= paused);
        Ok(latest.map(|step| step.name.clone()).collect())
    }

    /// Stores again, without a base, those chunks of `name` whose base is of another tree, and names the new places in its map. What
    /// was there stays until it is collected.
    ///
    /// # Errors
    /// Not found, if there is no such name; damaged, if a chunk is; conflict, if the name changed meanwhile.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn settle(&self, name: &Name, progress: &Progress) -> Result<Settled> {
        let saved = Arc::new(self.saved(name).await?);
        let before = read_bytes(&saved);
        if saved.map.further.is_empty() {
            return Ok(Settled { name: name.clone(), chunks: 0, stored_bytes: 0, read_bytes: [before; 2] });
        }
        let mut known = StoredChunks::load(self).await?;
        known.add(&saved);
        let mut writer = Writer::new(self, progress);
        let stored = self.store_settled(&saved, &mut known, &mut writer, progress).await;
        let Some((chunks, stored_bytes)) = writer.discard_on_error(stored).await? else {
            return Ok(Settled { name: name.clone(), chunks: 0, stored_bytes: 0, read_bytes: [before; 2] });
        };
        let now = self.saved(name).await?;
        // A collector may have moved the chunks meanwhile; then the new map replaced none.
        if now.value.manifest != saved.value.manifest || has_foreign_bases(&now) {
            return Err(Error::conflict("name changed while it was stored again")
                .at(name)
                .help("run the command again"));
        }
        Ok(Settled { name: name.clone(), chunks, stored_bytes, read_bytes: [before, read_bytes(&now)] })
    }

    /// Stores the chunks of a tree that have a foreign base again, and replaces its map. Returns their number and stored bytes; none if
    /// there are none.
    async fn store_settled(
        &self,
        saved: &Arc<Saved>,
        known: &mut StoredChunks,
        writer: &mut Writer,
        progress: &Progress,
    ) -> Result<Option<(u64, u64)>> {
        let (chunks, places) = self.store_alone(saved, writer, progress).await?;
        if chunks.is_empty() {
            return Ok(None);
        }
        let stored_bytes = chunks.values().map(|place| u64::from(place.stored_len)).sum();
        let count = chunks.len() as u64;
        for (id, place) in chunks {
            known.stored(id, place);
        }
        let tree = RepairedTree {
            manifest: saved.value.manifest,
            chunks: &saved.manifest.chunks.ids,
            places: &places,
            bases: &HashMap::new(),
            packs: &saved.map.packs,
        };
        self.remap(writer, known, saved.value.map_key, &tree).await?;
        Ok(Some((count, stored_bytes)))
    }
}

/// Stored bytes of all chunks that the tree needs.
fn read_bytes(saved: &Saved) -> u64 {
    saved.map.frames.iter().map(|frame| u64::from(frame.stored_len)).sum()
}
