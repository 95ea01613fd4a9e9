//! The pipeline of a save, for a verb that makes a larger tree of what it stored.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::store::Counts;
use super::{SaveOptions, SaveReport, SaveSource, Saving};
use crate::error::Result;
use crate::format::Manifest;
use crate::repository::log::RefValue;
use crate::repository::{Known, Name, Place, Repository, Writer};
use crate::tree::coarse_now;

/// Files that are to be stored, as a save stores them.
pub(in crate::ops) struct Putting<'a> {
    saving: Saving<'a>,
    counts: Counts,
    begun: Instant,
}

impl<'a> Putting<'a> {
    /// Finds what there is to store, and the tree that it may be stored as differences to.
    pub(in crate::ops) async fn begin(
        repository: &'a Repository,
        source: SaveSource,
        name: &'a Name,
        options: &'a SaveOptions,
    ) -> Result<Self> {
        let (begun, started) = (Instant::now(), coarse_now());
        let (walk, looking) = repository.look(source, options).await?;
        let parent = repository.parent(&*repository.state().await?, name, options).await?;
        let derive = AtomicBool::new(true);
        let saving = Saving { repository, name, options, walk, looking, parent, derive, started };
        Ok(Self { saving, counts: Counts::default(), begun })
    }

    /// Takes in the trees that the files may be stored as differences to, or have chunks of.
    pub(in crate::ops) async fn add_bases(&self, known: &mut Known) -> Result<()> {
        self.saving.add_base(known, None).await.map(drop)
    }

    /// Stores the files; their tree alone. None if it has to be done again.
    pub(in crate::ops) async fn store(&mut self, known: &mut Known, writer: &mut Writer) -> Result<Option<Manifest>> {
        Ok(self.saving.tree(known, writer, &mut self.counts).await?.map(|(manifest, ..)| manifest))
    }

    /// Saves since the key step that chunks at `places` are differences to.
    pub(in crate::ops) fn behind(&self, places: &[Place]) -> u32 {
        self.saving.behind(places)
    }

    /// Report; `value` is the current value of the name.
    pub(in crate::ops) fn report(mut self, value: &RefValue, stored_bytes: u64) -> SaveReport {
        // What an index names and these files lack, the rest of the tree may have.
        self.counts.lacking.clear();
        self.saving.report(value, self.counts, stored_bytes, self.begun.elapsed().as_secs_f64())
    }
}
