//! Save: input -> cut -> name (hash) -> skip what is known -> encode -> pack -> put -> commit.
//!
//! ```text
//! units (a thread) -> read + cut + hash (workers, in order) -> locate -> encode (workers) -> writer -> publish
//! ```

pub(super) mod assemble;
mod contents;
mod detect;
mod encode;
mod explain;
mod pace;
mod parent;
mod partial;
mod ranks;
mod read;
mod sharded;
mod store;
mod unchanged;
mod units;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use self::assemble::Assembly;
use self::detect::Formats;
pub use self::explain::Explained;
use self::explain::Explanation;
use self::parent::{NoParent, Parent};
pub(super) use self::partial::PartialSave;
pub(super) use self::ranks::facts;
pub use self::ranks::{PartOptions, PartReport};
use self::store::{Counts, store};
use self::unchanged::Unchanged;
use super::names::{Replaced, exists};
use super::shown;
use super::stopping::{unless_stopped, wind_up};
use crate::clock::Timestamp;
use crate::codec::{Codec, Compression};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Manifest;
use crate::id::{ChunkId, ManifestId};
use crate::progress::Progress;
use crate::repository::log::{RefValue, State, StepFacts};
use crate::repository::{ChunkPlace, Name, Publication, Published, Repository, StoredChunks, Writer};
use crate::tree::{MemoryFile, Rules, SeenCache, Walk, WalkKind, coarse_now, walk};
use crate::work::blocking;

/// Times a save starts over because a collector purged packs that it relied on.
const ATTEMPTS: usize = 5;

/// Saves of a run of which one stands for itself, by default.
pub(super) const KEY_EVERY: u32 = 8;

/// Warning about a repository that is saved as files.
const REPOSITORY_WARNING: &str =
    "a repository: if it is being written to, a commit may be saved in part; `towline sync` copies one whole";

/// Choice of cutting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutChoice {
    /// By format: at tensors where a file is a checkpoint, by content otherwise.
    #[default]
    Auto,
    /// At tensors; files without any by content.
    Tensor,
    /// By content.
    Content,
    /// In equal pieces.
    Fixed,
}

impl FromStr for CutChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "tensor" => Ok(Self::Tensor),
            "content" => Ok(Self::Content),
            "fixed" => Ok(Self::Fixed),
            _ => Err(Error::usage("unknown way to cut").expected("auto, tensor, content or fixed").got(text)),
        }
    }
}

/// Source of a save.
#[derive(Clone, Debug)]
pub enum SaveSource {
    /// The file or folder at a path.
    Path(PathBuf),
    /// A tree of files in memory.
    Memory(Vec<MemoryFile>),
}

impl Default for SaveSource {
    /// No files.
    fn default() -> Self {
        Self::Memory(Vec::new())
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for SaveSource {
    fn from(path: &P) -> Self {
        Self::Path(path.as_ref().to_path_buf())
    }
}

impl From<Vec<MemoryFile>> for SaveSource {
    fn from(files: Vec<MemoryFile>) -> Self {
        Self::Memory(files)
    }
}

/// Options of a save.
#[derive(Clone, Debug, Default)]
pub struct SaveOptions {
    /// A name whose tree is likely to share much with this one; by default the name's present tree. Its tensors are what
    /// this one's are differences to, instead of those of the step before in the run.
    pub base: Option<Name>,
    /// Cutting of files.
    pub cut: CutChoice,
    /// Labels of the tree.
    pub labels: BTreeMap<String, String>,
    /// Facts for the log, where runs are listed and their steps chosen.
    pub facts: StepFacts,
    /// Patterns to leave out, in gitignore syntax.
    pub exclude: Vec<String>,
    /// Read every file, whatever the stat cache says.
    pub reread: bool,
    /// Whether to compress.
    pub compression: Compression,
    /// Of so many saves of a run one stands for itself, and the others are stored as differences to it (8 by
    /// default; 1: each stands for itself). It is read with each of them, and kept as long as they are.
    pub key_every: Option<NonZeroU32>,
    /// Tell how each tensor is stored, and why.
    pub explain: bool,
    /// Required state of the name when the save begins, else a conflict; it must not change until the commit either.
    pub expected: Expected,
    /// Permission bits to record instead of those on the disk, by path in the tree (empty: its root folder).
    pub modes: Arc<BTreeMap<Vec<u8>, u32>>,
    /// Treatment of a symbolic link at the path itself.
    pub root_link: RootLink,
    /// Save what ignore files leave out, too.
    pub no_ignore_files: bool,
    /// Progress counters.
    pub progress: Progress,
    /// Cancel it to stop: what was stored by then is recorded within seconds, and used by the next save. A save that is about
    /// to commit ends as if it had not been stopped.
    pub stop: CancellationToken,
}

/// Treatment of a symbolic link at the path that is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RootLink {
    /// Follow it.
    #[default]
    Follow,
    /// Refuse it: others may have put it there.
    Refuse,
}

/// Required state of a name when a save begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// Whatever it does: the save replaces it.
    #[default]
    Anything,
    /// Nothing: the name is new.
    Nothing,
    /// The version that the log gave it.
    Version(u64),
}

impl Expected {
    /// Compares with the `version` that `name` has.
    ///
    /// # Errors
    /// Conflict, if it is another.
    fn check(self, name: &Name, version: Option<u64>) -> Result<()> {
        match self {
            Self::Nothing if version.is_some() => Err(exists(name)),
            Self::Version(expected) if version != Some(expected) => Err(moved(name)),
            _ => Ok(()),
        }
    }
}

fn moved(name: &Name) -> Error {
    Error::conflict("name moved since this save began")
        .at(name)
        .help("somebody else saved or removed it; look at it (`towline show`), then save again")
}

/// Result of a save.
#[derive(Clone, Debug, Serialize)]
pub struct SaveReport {
    /// The name.
    pub name: String,
    /// The manifest's id.
    pub manifest: String,
    /// Bytes in all files, holes included.
    pub logical_bytes: u64,
    /// Plain bytes of newly stored chunks.
    pub new_bytes: u64,
    /// Bytes of the packs written.
    pub stored_bytes: u64,
    /// Distinct chunks of the tree.
    pub chunks: u64,
    /// Chunks that were not in the repository.
    pub new_chunks: u64,
    /// Files.
    pub files: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Files that were found and not saved: path and reason.
    pub skipped: Vec<String>,
    /// Files that were saved and may not be what they seem: path and reason.
    pub warnings: Vec<String>,
    /// The previous value of the name, if it was replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
    /// Storage of what was read, with reasons, if that was asked for. Files that look unchanged are not read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub explained: Vec<Explained>,
}

impl Repository {
    /// Saves `source`, a path or files in memory, under `name`, in place of what the name stood for when the save began.
    ///
    /// # Errors
    /// Not found, if there is nothing at the path; usage, if a tree in memory is none; conflict, if the name moved, or exists and
    /// must not, or a file changed while it was read; exhausted, if the store is full; cancelled, if it was stopped. Nothing of a
    /// failed save is visible, and what it uploaded is used again.
    ///
    /// # Cancel safety
    /// Safe: a dropped save leaves at most garbage for the collector. To keep what it uploaded, stop it instead.
    #[tracing::instrument(skip_all, fields(%name))]
    pub async fn save(&self, source: impl Into<SaveSource>, name: &Name, options: &SaveOptions) -> Result<SaveReport> {
        Box::pin(self.save_from(source.into(), name, options)).await
    }

    async fn save_from(&self, source: SaveSource, name: &Name, options: &SaveOptions) -> Result<SaveReport> {
        let begun = std::time::Instant::now();
        let started = coarse_now();
        let (walk, formats) = unless_stopped(&options.stop, self.look(source, options)).await?;
        let state = self.state().await?;
        let before = state.refs.get(name);
        let expected = before.map(|value| value.version);
        options.expected.check(name, expected)?;
        let parent = self.parent(&state, name, options).await?;
        let derive = AtomicBool::new(true);
        let saving = Saving { repository: self, name, options, walk, formats, parent, derive, started };
        let mut writer = Writer::new(self, &options.progress);
        let mut counts = Counts::default();
        for _ in 0..ATTEMPTS {
            match saving.pass(&mut writer, &mut counts, expected).await {
                Ok(Some(value)) => {
                    let stored_bytes = writer.stored_bytes();
                    let replaced = before.filter(|before| before.version != value.version).map(Replaced::of);
                    let report = saving.report(&value, counts, stored_bytes, begun.elapsed().as_secs_f64());
                    return Ok(SaveReport { replaced, ..report });
                }
                Ok(None) => tracing::info!("something that this save relied on is not there: starting over"),
                Err(error) => {
                    return Err(wind_up(&mut writer, &options.stop, format!("the save of {name}"), error).await);
                }
            }
        }
        Err(Error::conflict("collectors purge packs faster than this save can use them")
            .at(name)
            .help("collect less often, or with a longer --grace"))
    }

    /// Finds what there is to save.
    async fn look(&self, source: SaveSource, options: &SaveOptions) -> Result<(Arc<Walk>, Arc<Formats>)> {
        options.progress.phase("scanning", 0);
        let rules = Rules {
            excludes: options.exclude.clone(),
            skip: self.store().directory().map(Path::to_path_buf).into_iter().collect(),
            no_follow: options.root_link == RootLink::Refuse,
            no_ignore_files: options.no_ignore_files,
        };
        let (cut, now) = (options.cut, self.clock().now());
        let look = move || {
            let walked = match source {
                SaveSource::Path(root) => walk(&root, &rules)?,
                SaveSource::Memory(files) => Walk::in_memory(files, now)?,
            };
            let formats = Formats::new(&walked, cut);
            Ok((Arc::new(walked), Arc::new(formats)))
        };
        blocking(look).await
    }

    /// The tree that this one is stored as differences to, or why there is none.
    async fn parent(&self, state: &State, name: &Name, options: &SaveOptions) -> Result<ParentChoice> {
        if options.compression == Compression::Off {
            return Ok(Err(NoParent::Off));
        }
        let key_every = options.key_every.map_or(KEY_EVERY, NonZeroU32::get);
        let (parent, value) = match parent::choose(state, name, options.base.as_ref(), key_every) {
            Ok(chosen) => chosen,
            Err(orphan) => return Ok(Err(orphan)),
        };
        match Parent::open(self, &parent, &value).await {
            Ok(Some(parent)) => Ok(Ok(Arc::new(parent))),
            Ok(None) => Ok(Err(NoParent::Unfit)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Damaged) => {
                tracing::warn!("no differences are taken to {parent}: {error:?}");
                Ok(Err(NoParent::Unfit))
            }
            Err(error) => Err(error),
        }
    }
}

/// A manifest, the chunks of that in its order, and where each is.
type StoredTree = (Manifest, Vec<ChunkId>, Vec<ChunkPlace>);
/// The parent of a tree, or why it has none.
type ParentChoice = std::result::Result<Arc<Parent>, NoParent>;

/// One save under way.
struct Saving<'a> {
    repository: &'a Repository,
    name: &'a Name,
    options: &'a SaveOptions,
    walk: Arc<Walk>,
    formats: Arc<Formats>,
    parent: ParentChoice,
    /// True if chunks may be derived; cleared once a master turned out not to be stored.
    derive: AtomicBool,
    started: Timestamp,
}

impl Saving<'_> {
    /// Reads, stores and publishes; `None` if packs or chunks that it relied on are not there.
    async fn pass(&self, writer: &mut Writer, counts: &mut Counts, expected: Option<u64>) -> Result<Option<RefValue>> {
        let mut known = StoredChunks::load(self.repository).await?;
        let current = known.state().refs.get(self.name).cloned();
        if current.as_ref().map(|value| value.version) != expected {
            return Err(self.moved());
        }
        let intact = self.add_base(&mut known, current.as_ref()).await?;
        let Some((manifest, ids, places)) = self.tree(&mut known, writer, counts).await? else { return Ok(None) };
        let (id, body) = manifest.encode();
        // If the name stands for exactly this already, in packs that are not condemned, there is nothing to say.
        let facts = self.options.facts.clone();
        let same = |value: &RefValue| intact && value.manifest == id && value.facts == facts;
        let unmoved = current.filter(|value| same(value) && writer.is_idle());
        let value = match unmoved {
            Some(value) => value,
            None => {
                let behind = self.behind(&places);
                let (logical_bytes, files) = (manifest.logical_bytes(), manifest.files().count() as u64);
                let manifest = (id, body.clone());
                let (name, chunks, places, known) = (self.name, ids.as_slice(), places.as_slice(), &known);
                let saved = self.repository.clock().now();
                let publication = Publication {
                    name,
                    expected,
                    manifest,
                    chunks,
                    places,
                    known,
                    logical_bytes,
                    files,
                    saved,
                    behind,
                    facts,
                };
                match writer.publish(publication).await? {
                    Published::Done(value) => *value,
                    Published::Lost(_) => return Ok(None),
                    Published::Moved => return Err(self.moved()),
                }
            }
        };
        self.remember(id, &body);
        Ok(Some(value))
    }

    /// The name is not what it was when the save began.
    fn moved(&self) -> Error {
        if self.options.expected == Expected::Nothing { exists(self.name) } else { moved(self.name) }
    }

    /// Cache of the tree's earlier state; none for files in memory.
    fn cache(&self) -> Option<SeenCache> {
        let root = self.walk.root()?;
        Some(SeenCache::new(&self.repository.cache().join("seen"), self.repository.id(), root))
    }

    /// Saves since the key step that chunks at `places` are differences to.
    fn behind(&self, places: &[ChunkPlace]) -> u32 {
        let differs = places.iter().any(|place| place.codec == Codec::Difference);
        self.parent.as_ref().ok().filter(|_| differs).map_or(0, |parent| parent.behind())
    }

    /// Reads and stores the tree, unless it is stopped: its manifest, the chunks of that, and where each is. None if it has to
    /// be done again.
    async fn tree(
        &self,
        known: &mut StoredChunks,
        writer: &mut Writer,
        counts: &mut Counts,
    ) -> Result<Option<StoredTree>> {
        let stored = async {
            let tree = self.whole_tree(known, writer, counts).await?;
            writer.settle().await?;
            Ok(tree)
        };
        unless_stopped(&self.options.stop, stored).await
    }

    async fn whole_tree(
        &self,
        known: &mut StoredChunks,
        writer: &mut Writer,
        counts: &mut Counts,
    ) -> Result<Option<StoredTree>> {
        let unchanged = match self.cache().filter(|_| !self.options.reread) {
            Some(cache) => Unchanged::load(&cache, &self.walk, &self.formats, known).await?,
            None => None,
        };
        let mut assembly = Assembly::new(&self.walk, self.options.labels.clone(), &self.options.modes);
        let to_read: Vec<usize> = match &unchanged {
            Some(unchanged) => unchanged.take(&self.walk, &self.formats, &mut assembly),
            None => files_of(&self.walk).collect(),
        };
        let total = to_read.iter().filter_map(|&at| self.walk.found.get(at)).map(|found| found.stat.size).sum();
        self.options.progress.phase("saving", total);
        self.read(to_read, known, writer, &mut assembly, counts).await?;
        let (manifest, ids) = assembly.finish();
        let places: Option<Vec<_>> = known.locate(&ids).await?.into_iter().collect();
        if let Some(places) = places {
            return Ok(Some((manifest, ids, places)));
        }
        // Masters are read separately: the file may be cut differently, or have changed.
        if self.derive.swap(false, Ordering::Relaxed) {
            writer.close(|_| Ok(Vec::new())).await?;
            return Ok(None);
        }
        Err(Error::other("a chunk that was stored is not known"))
    }

    /// Reads and stores files, and says what became of them.
    async fn read(
        &self,
        to_read: Vec<usize>,
        known: &mut StoredChunks,
        writer: &mut Writer,
        assembly: &mut Assembly,
        counts: &mut Counts,
    ) -> Result<()> {
        counts.explanation = self.options.explain.then(|| Explanation::new(self.parent.as_ref().err().copied()));
        store(self, to_read, known, writer, assembly, counts).await?;
        counts.lacking = sharded::lacking(&self.walk, &self.formats.indexes, assembly.manifest());
        if let Some(explanation) = counts.explanation.take() {
            let parent = self.parent.as_ref().ok().map(|parent| parent.saved.name.as_str());
            counts.explained = explanation.finish(&self.walk, assembly, parent);
        }
        Ok(())
    }

    /// Takes in the trees that this one probably resembles: the name's own and `--base`. A damaged one only costs speed.
    /// Says whether the name's own lies whole in live packs.
    async fn add_base(&self, known: &mut StoredChunks, current: Option<&RefValue>) -> Result<bool> {
        if let Ok(parent) = &self.parent {
            known.add(&parent.saved);
        } else if let Some(base) = &self.options.base {
            match self.repository.saved(base).await {
                Ok(saved) => known.add(&saved),
                Err(error) if error.kind() == ErrorKind::Damaged => tracing::warn!("{base} cannot be used: {error:?}"),
                Err(error) => return Err(error),
            }
        }
        let Some(value) = current else { return Ok(false) };
        match self.repository.saved_as(self.name, value).await {
            Ok(saved) => {
                known.add(&saved);
                Ok(saved.map.packs.iter().all(|pack| known.state().is_target(&pack.id)))
            }
            Err(error) => {
                tracing::warn!("the tree that {} stands for cannot be used: {error:?}", self.name);
                Ok(false)
            }
        }
    }

    /// Fills the stat cache. A save is no worse for not being remembered.
    fn remember(&self, id: ManifestId, body: &[u8]) {
        let Some(cache) = self.cache() else { return };
        let files = files_of(&self.walk).filter_map(|at| self.walk.found.get(at));
        let files = files.map(|found| (found.path.as_slice(), &found.stat));
        if let Err(error) = cache.store(id, body, self.started, files) {
            tracing::debug!("the stat cache was not written: {error:?}");
        }
    }

    fn report(&self, value: &RefValue, counts: Counts, stored_bytes: u64, seconds: f64) -> SaveReport {
        let skipped = self.walk.skipped.iter().map(|skip| format!("{}: {}", shown(&skip.path), skip.reason));
        let warnings = self.walk.repositories.iter().map(|path| format!("{}: {REPOSITORY_WARNING}", shown(path)));
        SaveReport {
            name: self.name.to_string(),
            manifest: value.manifest.to_string(),
            logical_bytes: value.logical_bytes,
            new_bytes: counts.new_bytes,
            stored_bytes,
            chunks: value.chunks,
            new_chunks: counts.new_chunks,
            files: value.files,
            seconds,
            skipped: skipped.collect(),
            warnings: self.name.step_warning().into_iter().chain(warnings).chain(counts.lacking).collect(),
            replaced: None,
            explained: counts.explained,
        }
    }
}

/// The files among what was found, by index.
fn files_of(walk: &Walk) -> impl Iterator<Item = usize> {
    walk.found.iter().enumerate().filter(|(_, found)| found.kind == WalkKind::File).map(|(at, _)| at)
}
