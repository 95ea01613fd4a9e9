//! Partial save: stores some files, for an operation that makes a larger tree of them.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::store::Counts;
use super::{SaveOptions, SaveReport, SaveSource, Saving};
use crate::error::Result;
use crate::format::Manifest;
use crate::repository::log::RefValue;
use crate::repository::{ChunkPlace, Name, Repository, StoredChunks, Writer};
use crate::tree::coarse_now;

/// Files to store as a save stores them.
pub(in crate::ops) struct PartialSave<'a> {
    saving: Saving<'a>,
    counts: Counts,
    begun: Instant,
}

impl<'a> PartialSave<'a> {
    /// Finds the files to store, and their parent.
    pub(in crate::ops) async fn begin(
        repository: &'a Repository,
        source: SaveSource,
        name: &'a Name,
        options: &'a SaveOptions,
    ) -> Result<Self> {
        let (begun, started) = (Instant::now(), coarse_now());
        let (walk, formats) = repository.look(source, options).await?;
        let parent = repository.parent(&*repository.state().await?, name, options).await?;
        let derive = AtomicBool::new(true);
        let saving = Saving { repository, name, options, walk, formats, parent, derive, started };
        Ok(Self { saving, counts: Counts::default(), begun })
    }

    /// Adds the trees that the files may share chunks with, or be stored as differences to.
    pub(in crate::ops) async fn add_bases(&self, known: &mut StoredChunks) -> Result<()> {
        self.saving.add_base(known, None).await.map(drop)
    }

    /// Stores the files; returns their manifest. None if it must be repeated.
    pub(in crate::ops) async fn store(
        &mut self,
        known: &mut StoredChunks,
        writer: &mut Writer,
    ) -> Result<Option<Manifest>> {
        Ok(self.saving.tree(known, writer, &mut self.counts).await?.map(|(manifest, ..)| manifest))
    }

    /// Saves since the key step that chunks at `places` are differences to.
    pub(in crate::ops) fn behind(&self, places: &[ChunkPlace]) -> u32 {
        self.saving.behind(places)
    }

    /// Report; `value` is the current value of the name.
    pub(in crate::ops) fn report(mut self, value: &RefValue, stored_bytes: u64) -> SaveReport {
        // Files that an index names and these lack may be in the rest of the tree.
        self.counts.lacking.clear();
        self.saving.report(value, self.counts, stored_bytes, self.begun.elapsed().as_secs_f64())
    }
}
