//! Save: input -> split -> hash -> skip known chunks -> encode -> pack -> put -> commit.
//!
//! ```text
//! units (a thread) -> read + cut + hash (workers, in order) -> locate -> encode (workers) -> writer -> publish
//! ```

pub(super) mod assemble;
mod bundles;
mod contents;
mod detect;
mod encode;
mod encode_bundle;
mod explain;
mod if_faster;
mod parent;
mod partial;
mod ranks;
mod read;
mod scan;
mod sharded;
mod short_list;
pub(super) mod source;
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
use self::short_list::ShortList;
use self::store::{Counts, store};
use self::unchanged::Unchanged;
use super::label::BoundOptions;
use super::names::{Replaced, exists};
use super::shown;
use super::stopping::{end_stopped, unless_stopped};
use crate::clock::Timestamp;
use crate::codec::{Codec, Compression};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Manifest;
use crate::id::{ChunkId, ManifestId};
use crate::name::Name;
use crate::policy::Labels;
use crate::progress::Progress;
use crate::repository::log::{RefValue, State, StepFacts, labelled_name};
use crate::repository::{ChunkPlace, LabelScope, Publication, Published, Repository, Run, StoredChunks, Writer};
use crate::tree::{MemoryFile, StatCache, Walk, WalkKind, coarse_now};

/// Limit of restarts of a save after a collector purged packs that it relied on.
const ATTEMPTS: usize = 5;

/// Default interval of key steps, in saves of a run.
pub(super) const KEY_EVERY: u32 = 8;

/// Warning for a repository that is saved as plain files.
const REPOSITORY_WARNING: &str =
    "a repository: if it is being written to, a commit may be saved in part; `towline sync` copies one whole";

/// Choice of chunk boundaries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutChoice {
    /// Depends on the format: tensor boundaries in checkpoint files, content-defined ones otherwise.
    #[default]
    Auto,
    /// Tensor boundaries; content-defined ones in files without tensors.
    Tensor,
    /// Content-defined boundaries.
    Content,
    /// Fixed-length chunks.
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
            _ => Err(Error::usage("unknown kind of chunk boundaries")
                .expected("auto, tensor, content or fixed")
                .got(text)),
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
    /// Name of a tree that is likely to share much with this one; by default the current value of the saved name. Its tensors
    /// are the bases of differences, instead of those of the previous step of the run.
    pub base: Option<Name>,
    /// Chunk boundaries of files.
    pub cut: CutChoice,
    /// Labels of the tree.
    pub labels: BTreeMap<String, String>,
    /// Facts for the log, by which runs are listed and steps selected.
    pub facts: StepFacts,
    /// Patterns to leave out, in gitignore syntax.
    pub exclude: Vec<String>,
    /// Read every file, regardless of the stat cache.
    pub reread: bool,
    /// Compression of new chunks.
    pub compression: Compression,
    /// Interval of key steps: one of this many saves of a run is stored whole, the others as differences to it (default 8; 1:
    /// all are stored whole). A key step is read with each of the others, and kept as long as they are.
    pub key_every: Option<NonZeroU32>,
    /// Report how each tensor is stored, and why.
    pub explain: bool,
    /// Required state of the name at the start of the save; it must not change until the commit. Otherwise the save is a
    /// conflict.
    pub expected: Expected,
    /// Permission bits to record instead of those on the disk, by path in the tree (empty: its root folder).
    pub modes: Arc<BTreeMap<Vec<u8>, u32>>,
    /// Treatment of a symbolic link at the path itself.
    pub root_link: RootLink,
    /// Save files that ignore files exclude, too.
    pub no_ignore_files: bool,
    /// Names that the labels of the save may make stricter.
    pub label_scope: LabelScope,
    /// Progress counters.
    pub progress: Progress,
    /// Cancelled to stop the save: uploaded data is recorded within seconds, and the next save uses it. A save that is about to
    /// commit completes.
    pub stop: CancellationToken,
}

/// Treatment of a symbolic link at the path that is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RootLink {
    /// Follow the link.
    #[default]
    Follow,
    /// Refuse the link, because another user may have created it.
    Refuse,
}

/// Required state of a name when a save begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// Any state: the save replaces the current value.
    #[default]
    Anything,
    /// Absent: the name is new.
    Nothing,
    /// Unchanged: the name has this version of the log.
    Version(u64),
}

impl Expected {
    /// Compares with the `version` that `name` has.
    ///
    /// # Errors
    /// Conflict, if the version differs.
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
        .help("another process saved or removed it; check it (`towline show`), then save again")
}

/// Result of a save.
#[derive(Clone, Debug, Serialize)]
pub struct SaveReport {
    /// Name.
    pub name: String,
    /// Id of the manifest.
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
    /// Files that were found but not saved: path and reason.
    pub skipped: Vec<String>,
    /// Files that were saved with a warning: path and reason.
    pub warnings: Vec<String>,
    /// The previous value of the name, if it was replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
    /// Storage of each tensor with reasons, if requested. Files that look unchanged are not read, so they are not listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub explained: Vec<Explained>,
}

impl Repository {
    /// Saves `source`, a path or files in memory, under `name`. Replaces the value that the name had when the save began.
    ///
    /// # Errors
    /// Not found, if the path does not exist; usage, for an invalid tree in memory; conflict, if the name changed, or exists
    /// and must not, or a file changed while it was read; exhausted, if the store is full; cancelled, if it was stopped. A
    /// failed save is not visible, and its uploads are used by the next one.
    ///
    /// # Cancel safety
    /// Safe: a dropped save leaves at most garbage for the collector. To keep what it uploaded, stop it instead.
    #[tracing::instrument(skip_all, fields(%name))]
    pub async fn save(&self, source: impl Into<SaveSource>, name: &Name, options: &SaveOptions) -> Result<SaveReport> {
        Box::pin(self.save_from(source.into(), name, options)).await
    }

    async fn save_from(&self, source: SaveSource, name: &Name, options: &SaveOptions) -> Result<SaveReport> {
        let begun = std::time::Instant::now();
        let BoundOptions { options, labels } = &self.bind(name, options).await?;
        let started = coarse_now();
        let (walk, formats) = unless_stopped(&options.stop, self.scan(source, options)).await?;
        let state = self.state().await?;
        let before = state.refs.get(name);
        let expected = before.map(|value| value.version);
        options.expected.check(name, expected)?;
        let parent = self.parent(ParentQuery { state: &state, name, options, labels }).await?;
        let derive = AtomicBool::new(true);
        let labels = labels.clone();
        let saving = Saving { repository: self, name, options, labels, walk, formats, parent, derive, started };
        let mut writer = Writer::new(self, &options.progress);
        let mut counts = Counts::default();
        for _ in 0..ATTEMPTS {
            match saving.attempt(&mut writer, &mut counts, expected).await {
                Ok(Some(value)) => {
                    let stored_bytes = writer.stored_bytes();
                    let replaced = before.filter(|before| before.version != value.version);
                    let replaced = replaced.map(|before| Replaced::of(before, &value));
                    let mut report = saving.report(&value, counts, stored_bytes, begun.elapsed().as_secs_f64());
                    if before.is_none() && Run::find(&state.refs, name).is_ok() {
                        report
                            .warnings
                            .push(format!("{name} is a run, and this is none of its steps: they are {name}/step-N"));
                    }
                    return Ok(SaveReport { replaced, ..report });
                }
                Ok(None) => tracing::info!("a pack or chunk that this save relied on is gone: starting over"),
                Err(error) => {
                    return Err(end_stopped(&mut writer, &options.stop, format!("the save of {name}"), error).await);
                }
            }
        }
        Err(Error::busy("collectors purge packs faster than this save can use them")
            .at(name)
            .help("collect less often, or with a longer --grace"))
    }

    /// Stat cache of the tree at `root` ([`Walk::root`]).
    pub(super) fn stat_cache(&self, root: &Path) -> StatCache {
        StatCache::new(&self.cache().join("seen"), self.id(), root)
    }

    /// Parent of the tree, or the reason why there is none.
    async fn parent(&self, query: ParentQuery<'_>) -> Result<ParentChoice> {
        let ParentQuery { state, name, options, labels } = query;
        if options.compression == Compression::Off {
            return Ok(Err(NoParent::Off));
        }
        let key_every = options.key_every.map_or(KEY_EVERY, NonZeroU32::get);
        let (parent, value) = match parent::choose(state, name, options.base.as_ref(), key_every) {
            Ok(chosen) => chosen,
            Err(reason) => return Ok(Err(reason)),
        };
        let view = self.label_view(state);
        let own = view.of(name).joined(labels);
        let sources = parent::sources(state, &parent, value.behind);
        if !sources.iter().all(|source| own.imply(&view.of(source))) {
            return Ok(Err(NoParent::Stricter));
        }
        match Parent::open(self, &parent, &value).await {
            Ok(Some(parent)) => Ok(Ok(Arc::new(parent))),
            Ok(None) => Ok(Err(NoParent::Unfit)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Damaged | ErrorKind::Denied) => {
                tracing::warn!("chunks are stored without differences to {parent}: {error:?}");
                Ok(Err(NoParent::Unfit))
            }
            Err(error) => Err(error),
        }
    }
}

/// A tree that needs a parent: its name, the options of its save, and the labels that bind it; `state` has the candidates.
#[derive(Clone, Copy)]
struct ParentQuery<'a> {
    state: &'a State,
    name: &'a Name,
    options: &'a SaveOptions,
    labels: &'a Labels,
}

/// Manifest, its chunks in order, and the place of each.
type StoredTree = (Manifest, Vec<ChunkId>, Vec<ChunkPlace>);
/// Parent of a tree, or the reason why it has none.
type ParentChoice = std::result::Result<Arc<Parent>, NoParent>;

/// State of a running save.
struct Saving<'a> {
    repository: &'a Repository,
    name: &'a Name,
    options: &'a SaveOptions,
    /// Labels that are committed with it.
    labels: Labels,
    walk: Arc<Walk>,
    formats: Arc<Formats>,
    parent: ParentChoice,
    /// True if chunks may be stored as derived; cleared when a master chunk turned out to be missing.
    derive: AtomicBool,
    started: Timestamp,
}

impl Saving<'_> {
    /// Reads, stores and publishes the tree; `None` if packs or chunks that it relied on are gone.
    async fn attempt(
        &self,
        writer: &mut Writer,
        counts: &mut Counts,
        expected: Option<u64>,
    ) -> Result<Option<RefValue>> {
        let mut known = self.repository.stored_for(self.name, &self.options.label_scope).await?;
        let current = known.state().refs.get(self.name).cloned();
        if current.as_ref().map(|value| value.version) != expected {
            return Err(self.moved());
        }
        let intact = self.add_base(&mut known, current.as_ref()).await?;
        let Some((manifest, ids, places)) = self.tree(&mut known, writer, counts).await? else { return Ok(None) };
        let (id, body) = manifest.encode();
        // Skips the commit if the name already has exactly this value, in packs that are not condemned.
        let facts = self.facts(current.as_ref().filter(|value| value.manifest == id));
        let same = |value: &RefValue| intact && value.manifest == id && value.facts == facts;
        let unmoved = current.filter(|value| same(value) && writer.is_idle());
        let value = match unmoved {
            Some(value) => {
                self.repository.add_labels(&labelled_name(self.name), &self.labels, &self.options.label_scope).await?;
                value
            }
            None => {
                let behind = self.behind(&places, &known);
                let (logical_bytes, files) = (manifest.logical_bytes(), manifest.files().count() as u64);
                let manifest = (id, body.clone());
                let (name, chunks, places, known) = (self.name, ids.as_slice(), places.as_slice(), &known);
                let saved = self.repository.clock().now();
                let publication = Publication {
                    name,
                    expected,
                    keep: true,
                    manifest,
                    chunks,
                    places,
                    known,
                    logical_bytes,
                    files,
                    saved,
                    behind,
                    facts,
                    labels: self.labels.clone(),
                    label_scope: self.options.label_scope.clone(),
                    from: Vec::new(),
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

    /// Facts that were given, and those of `same`, the name's value if it is the same tree: they are still true.
    fn facts(&self, same: Option<&RefValue>) -> StepFacts {
        let given = self.options.facts.clone();
        let Some(same) = same else { return given };
        given.clone().or(&same.facts).unwrap_or(given)
    }

    /// Error for a name that changed since the save began, or that exists and must not.
    fn moved(&self) -> Error {
        if self.options.expected == Expected::Nothing { exists(self.name) } else { moved(self.name) }
    }

    /// Stat cache of the tree; none for files in memory.
    fn cache(&self) -> Option<StatCache> {
        Some(self.repository.stat_cache(self.walk.root()?))
    }

    /// Number of saves since the key step whose chunks are the bases of those at `places`.
    fn behind(&self, places: &[ChunkPlace], known: &StoredChunks) -> u32 {
        let differs = places.iter().any(|place| match place.codec {
            Codec::Part => known.base(place).is_some_and(|(_, bundle)| bundle.codec.has_base()),
            codec => codec == Codec::Difference,
        });
        self.parent.as_ref().ok().filter(|_| differs).map_or(0, |parent| parent.behind())
    }

    /// Reads and stores the tree, unless it is stopped. Returns its manifest, the chunks and the place of each; None if it must
    /// be repeated.
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
            Some(unchanged) => unchanged.add_unchanged(&self.walk, &self.formats, &mut assembly),
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
        // Masters are read separately, so the file may have changed or have other boundaries.
        if self.derive.swap(false, Ordering::Relaxed) {
            writer.close(|_| Ok(Vec::new())).await?;
            return Ok(None);
        }
        Err(Error::other("a stored chunk is missing from the list of known chunks"))
    }

    /// Reads and stores files; reports how.
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

    /// Loads the trees that this one probably shares chunks with: the name's current value and `--base`. A damaged tree only
    /// costs time. Returns true if all chunks of the current value are in live packs.
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
                tracing::warn!("the current tree of {} cannot be used: {error:?}", self.name);
                Ok(false)
            }
        }
    }

    /// Writes the stat cache; an error only slows down the next save.
    fn remember(&self, id: ManifestId, body: &[u8]) {
        let Some(cache) = self.cache() else { return };
        let files = files_of(&self.walk).filter_map(|at| self.walk.found.get(at));
        let files = files.map(|found| (found.path.as_slice(), &found.stat));
        match cache.store(id, body, self.started, files) {
            // A read-only folder is taken as intended.
            Err(error) if error.kind() == ErrorKind::Denied => {
                tracing::debug!("the stat cache was not written: {error:?}");
            }
            Err(error) => tracing::warn!("the next save reads every file again: {error}"),
            Ok(()) => {}
        }
    }

    fn report(&self, value: &RefValue, counts: Counts, stored_bytes: u64, seconds: f64) -> SaveReport {
        let (mut skipped, mut warnings) = (ShortList::default(), counts.lacking);
        for skip in &self.walk.skipped {
            skipped.push(|| format!("{}: {}", shown(&skip.path), skip.reason));
        }
        skipped.and_more(self.walk.more_skipped);
        for path in &self.walk.repositories {
            warnings.push(|| format!("{}: {REPOSITORY_WARNING}", shown(path)));
        }
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
            skipped: skipped.into_entries(),
            warnings: self
                .name
                .step_warning()
                .into_iter()
                .chain(self.formats.warning())
                .chain(counts.unpredicted)
                .chain(self.formats.pointer_warning(&self.walk))
                .chain(warnings.into_entries())
                .collect(),
            replaced: None,
            explained: counts.explained,
        }
    }
}

/// Indexes of the files among the found entries.
fn files_of(walk: &Walk) -> impl Iterator<Item = usize> {
    walk.found.iter().enumerate().filter(|(_, found)| found.kind == WalkKind::File).map(|(at, _)| at)
}
