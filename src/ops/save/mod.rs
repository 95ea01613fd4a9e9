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
mod hard_links;
mod if_faster;
mod options;
mod parent;
mod partial;
mod ranks;
mod read;
mod report;
mod scan;
mod sharded;
mod short_list;
pub(super) mod source;
mod store;
mod unchanged;
mod units;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use self::assemble::{Assembly, KNOWN};
use self::detect::Formats;
pub use self::explain::Explained;
use self::explain::Explanation;
use self::options::moved;
pub use self::options::{CutChoice, Expected, RootLink, SaveOptions, SaveSource};
use self::parent::{NoParent, Parent};
pub(super) use self::partial::PartialSave;
pub(super) use self::ranks::facts;
pub use self::ranks::{PartOptions, PartReport};
pub use self::report::SaveReport;
use self::store::{Counts, store};
use self::unchanged::Unchanged;
use super::label::BoundOptions;
use super::names::{Replaced, exists};
use super::recorded::Record;
use super::stopping::{end_stopped, unless_stopped};
use crate::budget::GrowingMemory;
use crate::clock::Timestamp;
use crate::codec::{Codec, Compression};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Manifest;
use crate::id::{ChunkId, ManifestId};
use crate::name::Name;
use crate::policy::Labels;
use crate::repository::log::{Keeping, RefValue, State, StepFacts, labelled_name};
use crate::repository::{ChunkPlace, Publication, Published, Repository, Run, Saved, StoredChunks, Writer};
use crate::tree::{StatCache, Walk, WalkKind, coarse_now};
use crate::work::blocking;

/// Limit of restarts of a save after a collector purged packs that it relied on.
const ATTEMPTS: usize = 5;

/// Default interval of key steps, in saves of a run.
pub(super) const KEY_EVERY: u32 = 8;

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
                    if before.is_none()
                        && Run::find_among(&state.refs, name, |step| options.readable.includes(step)).is_some()
                    {
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
        let (parent, value) = match parent::choose(state, name, options) {
            Ok(chosen) => chosen,
            Err(reason) => return Ok(Err(reason)),
        };
        let view = self.label_view(state);
        let own = view.of(name).joined(labels);
        let sources = parent::sources(state, &parent, value.behind);
        if !sources.iter().all(|source| options.readable.includes(source)) {
            return Ok(Err(NoParent::Unfit));
        }
        if !sources.iter().all(|source| own.imply(&view.of(source))) {
            return Ok(Err(NoParent::Stricter));
        }
        let memory = self.budget().tree_memory(options.caller.as_deref());
        let key = sources.last().filter(|_| options.readable.is_limited());
        match Parent::open(self, &parent, &value, memory, key).await {
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

/// Manifest, its chunks in order, the place of each, and the memory of all that, if it counts.
type StoredTree = (Manifest, Vec<ChunkId>, Vec<ChunkPlace>, Option<GrowingMemory>);
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
        let mut known = self.repository.stored_for(&self.options.label_scope).await?;
        let current = known.state().refs.get(self.name).cloned();
        if current.as_ref().map(|value| value.version) != expected {
            return Err(self.moved());
        }
        let intact = self.add_base(&mut known, current.as_ref()).await?;
        let tree = self.tree(&mut known, writer, counts).await?;
        let Some((manifest, ids, places, _memory)) = tree else { return Ok(None) };
        manifest.check_total()?;
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
                    keep: Keeping::Quota,
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
        let (labels, modes) = (self.options.labels.clone(), &self.options.modes);
        let mut assembly = Assembly::new(&self.walk, labels, modes, self.chunk_memory());
        assembly.count(known.near(), 0)?;
        let (to_read, mut assembly) = self.add_unchanged(known, assembly).await?;
        let sizes = to_read.iter().filter_map(|&at| self.walk.found.get(at)).map(|found| found.stat.size);
        // Sparse files may exceed 2^64 bytes together: such a tree is refused once it is read.
        let total = sizes.fold(0, u64::saturating_add);
        self.options.progress.phase("saving", total);
        self.read(to_read, known, writer, &mut assembly, counts).await?;
        assembly.count(known.near(), 0)?;
        let (manifest, ids, memory) = assembly.finish();
        let places: Option<Vec<_>> = known.locate(&ids).await?.into_iter().collect();
        if let Some(places) = places {
            return Ok(Some((manifest, ids, places, memory)));
        }
        // Masters are read separately, so the file may have changed or have other boundaries.
        if self.derive.swap(false, Ordering::Relaxed) {
            writer.close(|_| Ok(Vec::new())).await?;
            return Ok(None);
        }
        Err(Error::other("a stored chunk is missing from the list of known chunks"))
    }

    /// Adds files that need not be read to the assembly; returns the others with it.
    async fn add_unchanged(&self, known: &mut StoredChunks, mut assembly: Assembly) -> Result<(Vec<usize>, Assembly)> {
        let (cache, memory) = (self.cache().filter(|_| !self.options.reread), self.memory());
        let load = move || Ok(cache.and_then(|cache| Record::load(&cache, memory)));
        let Some(record) = blocking(load).await? else { return Ok((files_of(&self.walk).collect(), assembly)) };
        let unchanged = Unchanged::find(record, &self.walk, &self.formats, known).await?;
        let (walk, formats, near) = (Arc::clone(&self.walk), Arc::clone(&self.formats), known.near());
        // It drops the record: files that are read need memory.
        let add = move || {
            let to_read = unchanged.add_unchanged(&walk, &formats, near, &mut assembly);
            Ok((to_read, assembly))
        };
        blocking(add).await
    }

    /// Memory, none yet, for lists of chunks. Those of saves that the user asks for, which may be of any length, do not count.
    fn chunk_memory(&self) -> Option<GrowingMemory> {
        self.options.caller.is_some().then(|| self.memory())
    }

    /// Memory, none yet, for what the save knows about files.
    fn memory(&self) -> GrowingMemory {
        self.repository.budget().tree_memory(self.options.caller.as_deref())
    }

    /// Adds the chunks of a tree, unless they take too much memory: those that are needed are looked up then.
    fn add_chunks(&self, known: &mut StoredChunks, saved: &Saved) {
        let chunks = known.near() as u64 + u64::from(saved.located_chunks());
        if self.chunk_memory().is_none_or(|mut memory| memory.try_add(chunks.saturating_mul(KNOWN))) {
            known.add(saved);
        } else {
            tracing::info!("the chunks of {} are looked up one by one: too little memory is left", saved.name);
        }
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
    /// costs time. Where the save may not rely on others' differences, it takes those of `--base` only if that is the parent. Returns true
    /// if all chunks of the current value are in live packs.
    async fn add_base(&self, known: &mut StoredChunks, current: Option<&RefValue>) -> Result<bool> {
        if let Ok(parent) = &self.parent {
            self.add_chunks(known, &parent.saved);
        } else if let Some(base) = &self.options.base {
            match self.repository.saved(base).await {
                Ok(saved) => self.add_chunks(known, &saved),
                Err(error) if error.kind() == ErrorKind::Damaged => tracing::warn!("{base} cannot be used: {error:?}"),
                Err(error) => return Err(error),
            }
            if known.takes_no_differences() {
                known.forget_differences();
            }
        }
        let Some(value) = current else { return Ok(false) };
        match self.repository.saved_as(self.name, value).await {
            Ok(saved) => {
                self.add_chunks(known, &saved);
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
        let files = files.filter(|found| self.walk.times_tell(found));
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
}

/// Indexes of the files among the found entries.
fn files_of(walk: &Walk) -> impl Iterator<Item = usize> {
    walk.found.iter().enumerate().filter(|(_, found)| found.kind == WalkKind::File).map(|(at, _)| at)
}
