//! Partial save: stores some files for an operation that adds them to a larger tree.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::store::Counts;
use super::{ParentQuery, SaveOptions, SaveReport, SaveSource, Saving};
use crate::error::Result;
use crate::format::Manifest;
use crate::name::Name;
use crate::policy::Labels;
use crate::repository::log::RefValue;
use crate::repository::{ChunkPlace, Repository, StoredChunks, Writer};
use crate::tree::coarse_now;

/// Files to store through the save pipeline.
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
        let (walk, formats) = repository.scan(source, options).await?;
        let labels = Labels::default();
        let state = repository.state().await?;
        let parent = repository.parent(ParentQuery { state: &state, name, options, labels: &labels }).await?;
        let derive = AtomicBool::new(true);
        let saving = Saving { repository, name, options, labels, walk, formats, parent, derive, started };
        Ok(Self { saving, counts: Counts::default(), begun })
    }

    /// Loads the trees that the files may share chunks with, or use as bases.
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

    /// Number of saves since the key step whose chunks are the bases of those at `places`.
    pub(in crate::ops) fn behind(&self, places: &[ChunkPlace], known: &StoredChunks) -> u32 {
        self.saving.behind(places, known)
    }

    /// Report; `value` is the current value of the name.
    pub(in crate::ops) fn report(mut self, value: &RefValue, stored_bytes: u64) -> SaveReport {
        // Files that an index names and that are missing here may be in the rest of the tree.
        self.counts.lacking.clear();
        self.saving.report(value, self.counts, stored_bytes, self.begun.elapsed().as_secs_f64())
    }
}
