//! Amend: puts, removes or renames files of a saved tree in one commit; unchanged files are neither read nor stored again.
//!
//! ```text
//! store new files like a save -> current tree with the changes -> publish, if the name is unchanged
//!                                `----------- retry, if it changed: nothing is stored twice -----------'
//! ```

mod changes;
mod graft;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::Serialize;

use self::changes::amended;
pub use self::graft::Graft;
use super::save::{PartialSave, facts};
use super::stopping::end_stopped;
use super::{SaveOptions, SaveReport, SaveSource};
use crate::codec::Codec;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Manifest;
use crate::id::{ChunkId, WriteId};
use crate::name::Name;
use crate::policy::Labels;
use crate::repository::log::{Keeping, RefValue};
use crate::repository::{ChunkPlace, NameScope, Publication, Published, Repository, Saved, StoredChunks, Writer};

/// Maximum retries because others changed the name; each time one of them has succeeded.
const RACES: u32 = 1000;
/// Maximum retries because packs or objects that it relied on were deleted.
const ATTEMPTS: u32 = 5;
/// Longest pause before a retry.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Changes of a tree: first removals, then renames, in order, then parts of other trees, then puts.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// New files: in memory by path, those of a folder, or a file under its own name. They replace existing files; missing parent
    /// folders are created.
    pub put: SaveSource,
    /// Paths to remove: files, links, and folders with their content.
    pub remove: Vec<Vec<u8>>,
    /// Renames: old and new path. A file replaces an existing file; a folder moves with its content.
    pub rename: Vec<(Vec<u8>, Vec<u8>)>,
    /// Parts of other trees. A file replaces an existing file.
    pub graft: Vec<Graft>,
    /// Keep the old tree for undelete.
    pub keep: bool,
}

impl Changes {
    fn is_empty(&self) -> bool {
        self.puts_nothing() && self.remove.is_empty() && self.rename.is_empty() && self.graft.is_empty()
    }

    fn puts_nothing(&self) -> bool {
        matches!(&self.put, SaveSource::Memory(files) if files.is_empty())
    }
}

/// Result of an amendment.
#[derive(Clone, Debug, Serialize)]
pub struct AmendReport {
    /// Report of the new tree, as of a save.
    #[serde(flatten)]
    pub tree: SaveReport,
    /// Number of changes by others that came first.
    pub overtaken: u32,
}

impl Repository {
    /// Changes paths of the tree `name`, or of an empty folder if there is no such name, in one commit: readers see all changes
    /// or none. All other entries stay unchanged and are not read. If another process changes the name meanwhile, the changes are
    /// applied to its new value.
    ///
    /// `options` are as for a save; labels and facts are added to the existing ones.
    ///
    /// # Errors
    /// Not found, if a path to remove or rename does not exist; conflict, if a folder is in the way of a file, or the other way
    /// round, or others change the name too fast; usage, for an invalid path, without changes, or if the tree is a single file;
    /// damaged, if an unchanged file is in a damaged pack; else as [`Repository::save`]. Failed changes are not visible.
    ///
    /// # Cancel safety
    /// Safe: all changes are made or none; leftovers are deleted by a collect.
    #[tracing::instrument(skip_all, fields(%name))]
    pub async fn amend(&self, name: &Name, changes: &Changes, options: &SaveOptions) -> Result<AmendReport> {
        if changes.is_empty() {
            return Err(Error::usage("nothing is to change").at(name));
        }
        let options = &self.bind_first(name, options).await?;
        let mut writer = Writer::new(self, &options.progress);
        let partial = PartialSave::begin(self, changes.put.clone(), name, options).await?;
        let stored = None;
        let mut amending = Amending { repository: self, name, changes, options, partial, stored };
        match amending.run(&mut writer).await {
            Ok((value, overtaken)) => {
                let tree = amending.partial.report(&value, writer.stored_bytes());
                Ok(AmendReport { tree, overtaken })
            }
            Err(error) => Err(end_stopped(&mut writer, &options.stop, format!("the change of {name}"), error).await),
        }
    }
}

/// Outcome of one try.
enum TryOutcome {
    Done(Box<RefValue>),
    /// Another writer changed the name.
    Moved,
    /// An object that this relied on is missing; with the error, if known.
    Lost(Option<Error>),
}

/// An amendment in progress.
struct Amending<'a> {
    repository: &'a Repository,
    name: &'a Name,
    changes: &'a Changes,
    options: &'a SaveOptions,
    partial: PartialSave<'a>,
    /// Tree of the new files, once stored, and places of its chunks.
    stored: Option<(Manifest, Vec<(ChunkId, ChunkPlace)>)>,
}

impl Amending<'_> {
    /// Retries until the changes are made; returns the new value, and the number of lost races.
    async fn run(&mut self, writer: &mut Writer) -> Result<(Box<RefValue>, u32)> {
        let (mut races, mut lost) = (0, 0);
        let mut why = None;
        while races < RACES && lost < ATTEMPTS {
            match self.attempt(writer).await? {
                TryOutcome::Done(value) => return Ok((value, races)),
                TryOutcome::Moved => races += 1,
                TryOutcome::Lost(reason) => (lost, why) = (lost + 1, reason),
            }
            tokio::time::sleep(pause(races)).await;
        }
        let error = Error::busy("the tree changes faster than these changes can be made to it")
            .at(self.name)
            .help("try again when fewer write; `towline verify` tells if something is missing");
        Err(match why {
            Some(why) => error.source(why),
            None => error,
        })
    }

    async fn attempt(&mut self, writer: &mut Writer) -> Result<TryOutcome> {
        let mut known = self.repository.stored_for(&NameScope::default()).await?;
        let current = known.state().refs.get(self.name).cloned();
        let base = match &current {
            Some(value) => match self.repository.saved_as(self.name, value).await {
                Ok(base) => Some(base),
                // Replaced or repacked since.
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(TryOutcome::Lost(Some(error))),
                Err(error) => return Err(error),
            },
            None => None,
        };
        if let Some(base) = &base {
            known.add(base);
        }
        self.changes.graft.iter().for_each(|graft| known.add(&graft.tree));
        if !self.store(&mut known, writer).await? {
            return Ok(TryOutcome::Lost(None));
        }
        let new = self.stored.as_ref().map(|(manifest, _)| manifest);
        let now = self.repository.clock().now();
        let tree = amended(base.as_ref().map(|base| &base.manifest), new, self.changes, now)?;
        let Some(places) = self.places(&tree, &mut known).await? else { return Ok(TryOutcome::Lost(None)) };
        self.publish(writer, (&tree, &places), (&known, base.as_ref())).await
    }

    /// Stores the new files, unless that is done; false if it must be repeated.
    async fn store(&mut self, known: &mut StoredChunks, writer: &mut Writer) -> Result<bool> {
        self.partial.add_bases(known).await?;
        if let Some((_, own)) = &self.stored {
            own.iter().for_each(|(id, place)| known.stored(*id, *place));
            return Ok(true);
        }
        if self.changes.puts_nothing() {
            return Ok(true);
        }
        let Some(new) = self.partial.store(known, writer).await? else { return Ok(false) };
        writer.settle().await?;
        let ids = &new.chunks.ids;
        let places = known.locate(ids).await?;
        let own = ids.iter().copied().zip(places.into_iter().flatten());
        let own = own.filter(|(_, place)| writer.pack(place.pack).is_some()).collect();
        self.stored = Some((new, own));
        Ok(true)
    }

    /// Places of the chunks of the whole tree; none if some new files must be stored again.
    async fn places(&mut self, tree: &Manifest, known: &mut StoredChunks) -> Result<Option<Vec<ChunkPlace>>> {
        let found = known.locate(&tree.chunks.ids).await?;
        let places: Option<Vec<ChunkPlace>> = found.iter().copied().collect();
        if places.is_some() {
            return Ok(places);
        }
        let lacking = tree.chunks.ids.iter().zip(&found).filter(|(_, place)| place.is_none()).map(|(id, _)| id);
        let put = |id: &&ChunkId| self.stored.as_ref().is_some_and(|(new, _)| new.chunks.ids.contains(id));
        if let Some(stays) = lacking.clone().find(|id| !put(id)) {
            return Err(Error::damaged("a chunk of a file that stays cannot be relied on")
                .at(self.name)
                .got(stays)
                .help("`towline verify --data` tells what is damaged; save that again, or remove it from the tree"));
        }
        self.stored = None;
        Ok(None)
    }

    async fn publish(
        &self,
        writer: &mut Writer,
        (tree, places): (&Manifest, &[ChunkPlace]),
        (known, base): (&StoredChunks, Option<&Saved>),
    ) -> Result<TryOutcome> {
        tree.check_total()?;
        let (id, body) = tree.encode();
        let before = base.map(|base| &base.value);
        let facts = facts(std::iter::once(&self.options.facts).chain(before.map(|value| &value.facts)))?;
        if let Some(value) = before.filter(|value| value.manifest == id && value.facts == facts && writer.is_idle()) {
            return Ok(TryOutcome::Done(Box::new(value.clone())));
        }
        let differs = places.iter().any(|place| matches!(place.codec, Codec::Difference | Codec::Part));
        let grafted = self.changes.graft.iter().map(|graft| &graft.tree.value);
        let behind = grafted.chain(before).filter(|_| differs).map(|value| value.behind).max().unwrap_or_default();
        let grafted_from = self.changes.graft.iter().map(|graft| (&graft.name, graft.tree.value.manifest));
        let publication = Publication {
            name: self.name,
            expected: before.map(|value| value.version),
            // Each of many small changes would keep a value of its own, so it is not the default.
            keep: if self.changes.keep { Keeping::Quota } else { Keeping::Nothing },
            manifest: (id, body),
            chunks: &tree.chunks.ids,
            places,
            known,
            logical_bytes: tree.logical_bytes(),
            files: tree.files().count() as u64,
            saved: self.repository.clock().now(),
            behind: behind.max(self.partial.behind(places, known)),
            facts,
            labels: Labels::default(),
            label_scope: NameScope::default(),
            from: before.map(|value| (self.name, value.manifest)).into_iter().chain(grafted_from).collect(),
        };
        Ok(match writer.publish(publication).await? {
            Published::Done(value) => TryOutcome::Done(value),
            Published::Lost(_) => TryOutcome::Lost(None),
            Published::Moved => TryOutcome::Moved,
        })
    }
}

/// Pause after the given number of lost races, with jitter, so that the losers do not retry at the same time.
fn pause(races: u32) -> Duration {
    let [.., random] = WriteId::random().to_bytes();
    let longest = Duration::from_millis(5).saturating_mul(races).min(PAUSE_MAX);
    longest * u32::from(random) / 256
}
