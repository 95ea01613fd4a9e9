//! Amend: some files of a saved tree put, removed or renamed, in one commit; what stays is neither read nor stored again.
//!
//! ```text
//! store what is put, as a save does -> the tree of now, with the changes -> publish, if the name is still there
//!                                      `------------- again, if it moved: nothing is stored twice ----------'
//! ```

mod changes;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::Serialize;

use self::changes::amended;
use super::save::{PartialSave, facts};
use super::stopping::wind_up;
use super::{SaveOptions, SaveReport, SaveSource};
use crate::codec::Codec;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Manifest;
use crate::id::{ChunkId, WriteId};
use crate::repository::log::RefValue;
use crate::repository::{ChunkPlace, Name, Publication, Published, Repository, Saved, StoredChunks, Writer};

/// Times an amendment starts over because others changed the name: each time one of them is done.
const RACES: u32 = 1000;
/// Times it starts over because packs or objects that it relied on went away.
const ATTEMPTS: u32 = 5;
/// The longest pause before starting over.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Changes of a tree: first removals, then renames, in order, then puts.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Files in memory by their paths, or those of a folder, or a file under its own name. They take the place of files that
    /// are there; the folders above them are made.
    pub put: SaveSource,
    /// Paths of files, links and folders, these with all in them.
    pub remove: Vec<Vec<u8>>,
    /// From which path to which. A file takes the place of a file that is there; a folder moves with all in it.
    pub rename: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Changes {
    fn is_empty(&self) -> bool {
        self.puts_nothing() && self.remove.is_empty() && self.rename.is_empty()
    }

    fn puts_nothing(&self) -> bool {
        matches!(&self.put, SaveSource::Memory(files) if files.is_empty())
    }
}

/// Result of an amendment.
#[derive(Clone, Debug, Serialize)]
pub struct AmendReport {
    /// The tree that the name stands for now, and what was stored of it.
    #[serde(flatten)]
    pub tree: SaveReport,
    /// Number of other changes of the name that came in between.
    pub overtaken: u32,
}

impl Repository {
    /// Changes some paths of the tree `name`, or of an empty folder if there is no such name, in one commit: whoever reads
    /// the name sees all of the changes or none. What the changes do not name stays as it is, without being read; modes and
    /// times too. If somebody else changes the name meanwhile, the changes are made to what it stands for then.
    ///
    /// `options` says how files are stored, as for a save; labels and facts are added to those that are there.
    ///
    /// # Errors
    /// Not found, if a path to remove or rename is not there; conflict, if a folder is in the way of a file, or the other
    /// way round, or others change the name faster than this can follow; usage, if a path is none, if nothing is to change,
    /// or if the name stands for a single file; damaged, if a file that stays lies in a pack that is; else as
    /// [`Repository::save`]. Nothing of failed changes is visible.
    ///
    /// # Cancel safety
    /// Safe: dropped changes are made whole or not at all, and leave at most garbage for the collector.
    #[tracing::instrument(skip_all, fields(%name))]
    pub async fn amend(&self, name: &Name, changes: &Changes, options: &SaveOptions) -> Result<AmendReport> {
        if changes.is_empty() {
            return Err(Error::usage("nothing is to change").at(name));
        }
        let mut writer = Writer::new(self, &options.progress);
        let partial = PartialSave::begin(self, changes.put.clone(), name, options).await?;
        let stored = None;
        let mut amending = Amending { repository: self, name, changes, options, partial, stored };
        match amending.run(&mut writer).await {
            Ok((value, overtaken)) => {
                let tree = amending.partial.report(&value, writer.stored_bytes());
                Ok(AmendReport { tree, overtaken })
            }
            Err(error) => Err(wind_up(&mut writer, &options.stop, format!("the change of {name}"), error).await),
        }
    }
}

/// Outcome of one try.
enum Turn {
    Done(Box<RefValue>),
    /// Another writer changed the name.
    Moved,
    /// Something that this relied on is not there, for this reason if one is known.
    Lost(Option<Error>),
}

/// An amendment under way.
struct Amending<'a> {
    repository: &'a Repository,
    name: &'a Name,
    changes: &'a Changes,
    options: &'a SaveOptions,
    partial: PartialSave<'a>,
    /// The tree of what is put, once it is stored, and where the chunks are that this stored.
    stored: Option<(Manifest, Vec<(ChunkId, ChunkPlace)>)>,
}

impl Amending<'_> {
    /// Tries until the changes are made; the name's new value, and how often others were faster.
    async fn run(&mut self, writer: &mut Writer) -> Result<(Box<RefValue>, u32)> {
        let (mut races, mut lost) = (0, 0);
        let mut why = None;
        while races < RACES && lost < ATTEMPTS {
            match self.turn(writer).await? {
                Turn::Done(value) => return Ok((value, races)),
                Turn::Moved => races += 1,
                Turn::Lost(reason) => (lost, why) = (lost + 1, reason),
            }
            tokio::time::sleep(pause(races)).await;
        }
        let error = Error::conflict("the tree changes faster than these changes can be made to it")
            .at(self.name)
            .help("try again when fewer write; `towline verify` tells if something is missing");
        Err(match why {
            Some(why) => error.source(why),
            None => error,
        })
    }

    async fn turn(&mut self, writer: &mut Writer) -> Result<Turn> {
        let mut known = StoredChunks::load(self.repository).await?;
        let current = known.state().refs.get(self.name).cloned();
        let base = match &current {
            Some(value) => match self.repository.saved_as(self.name, value).await {
                Ok(base) => Some(base),
                // Replaced or repacked since.
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Turn::Lost(Some(error))),
                Err(error) => return Err(error),
            },
            None => None,
        };
        if let Some(base) = &base {
            known.add(base);
        }
        if !self.store(&mut known, writer).await? {
            return Ok(Turn::Lost(None));
        }
        let new = self.stored.as_ref().map(|(manifest, _)| manifest);
        let now = self.repository.clock().now();
        let tree = amended(base.as_ref().map(|base| &base.manifest), new, self.changes, now)?;
        let Some(places) = self.places(&tree, &mut known).await? else { return Ok(Turn::Lost(None)) };
        self.publish(writer, (&tree, &places), (&known, base.as_ref())).await
    }

    /// Stores what is put, unless that was done; false if it has to be done again.
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

    /// Places of the chunks of the whole tree; none if some that were put have to be stored again.
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
    ) -> Result<Turn> {
        let (id, body) = tree.encode();
        let before = base.map(|base| &base.value);
        let facts = facts(std::iter::once(&self.options.facts).chain(before.map(|value| &value.facts)))?;
        if let Some(value) = before.filter(|value| value.manifest == id && value.facts == facts && writer.is_idle()) {
            return Ok(Turn::Done(Box::new(value.clone())));
        }
        let differs = places.iter().any(|place| place.codec == Codec::Difference);
        let behind = before.filter(|_| differs).map_or(0, |value| value.behind);
        let publication = Publication {
            name: self.name,
            expected: before.map(|value| value.version),
            manifest: (id, body),
            chunks: &tree.chunks.ids,
            places,
            known,
            logical_bytes: tree.logical_bytes(),
            files: tree.files().count() as u64,
            saved: self.repository.clock().now(),
            behind: behind.max(self.partial.behind(places)),
            facts,
        };
        Ok(match writer.publish(publication).await? {
            Published::Done(value) => Turn::Done(value),
            Published::Lost(_) => Turn::Lost(None),
            Published::Moved => Turn::Moved,
        })
    }
}

/// Pause after so many lost races, jittered: losers do not come back together.
fn pause(races: u32) -> Duration {
    let [.., dice] = WriteId::random().to_bytes();
    let longest = Duration::from_millis(5).saturating_mul(races).min(PAUSE_MAX);
    longest * u32::from(dice) / 256
}
