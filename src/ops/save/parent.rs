//! Parent: an earlier tree with the same tensors, whose chunks are bases of differences.
//!
//! The base of a difference is never a difference itself: it is the parent's chunk, or the base of that. So all differences refer to
//! one key step and are read with one hop. Bundles differ: each is predicted from the parent's bundle.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use super::{KEY_EVERY, SaveOptions};
use crate::budget::GrowingMemory;
use crate::checkpoint::Dtype;
use crate::codec::{Codec, Element};
use crate::error::Result;
use crate::format::{Content, EntryKind, TensorEntry, TensorPart};
use crate::id::ChunkId;
use crate::name::Name;
use crate::repository::log::{RefValue, State};
use crate::repository::{Located, Repository, Run, Saved};

/// Maximum size of the parent's differences between short numbers, relative to their bases, for another difference: they grow
/// with each step.
const SHORT_FAR: f64 = 0.36;

/// Lists of the parent's tensors: its manifest, and by name.
const LISTS: u64 = 2;

/// Numbers of 16 bits or less.
fn short(number: Element) -> bool {
    number.width().bytes() <= 2
}

/// A tree to take differences to.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) saved: Arc<Saved>,
    /// Its tensors.
    tensors: HashMap<TensorKey, AlikeTensors>,
    /// Numbers of its files' names, without their folders.
    file_names: HashMap<Vec<u8>, u32>,
    /// The first of alike tensors in a file of that name, by the numbers of both.
    named: HashMap<(u32, u32), TensorStart>,
    /// Starts of the chunks of its files, by entry.
    chunks: HashMap<usize, Vec<(u64, u32)>>,
    /// Bytes of its differences between short numbers, and of their bases.
    short: (u64, u64),
    /// True if it has differences; a settled one has none.
    differs: bool,
    /// Bytes of each bundle that the tree's own chunks are, for a saver who may read only some names.
    own_parts: Option<HashMap<u32, u64>>,
    /// Chunks of the key step, which such a saver may read: no other chunks outside the tree are bases then.
    of_key: HashSet<ChunkId>,
    _memory: Option<GrowingMemory>,
}

/// Properties that identify the same tensor in another step, whatever its file is called.
type TensorKey = (String, String, Vec<u64>, Option<TensorPart>);

/// Tensors of the parent with one [`TensorKey`]: there may be one in each of very many files.
#[derive(Debug)]
struct AlikeTensors {
    number: u32,
    /// In the order of the entries, of which there is at least one.
    spots: Vec<TensorStart>,
}

/// Start of a tensor of the parent: its entry, and the offset.
#[derive(Clone, Copy, Debug)]
struct TensorStart {
    entry: usize,
    start: u64,
}

/// Tensors of a new file that the parent has, by their start.
#[derive(Debug, Default)]
pub(super) struct Pairs(Vec<(Range<u64>, TensorStart)>);

/// Candidate for the base of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BaseCandidate {
    /// This chunk of the parent.
    Chunk(u32),
    /// The parent has no such tensor, or has other chunk boundaries in it.
    NoTensor,
    /// The parent's chunk is derived, or is in a pack that cannot be relied on; or its base may be of a tree that the saver may not
    /// read.
    Unusable,
    /// A difference was too large in the parent.
    NotWorth,
    /// It is possible, but the parent's own differences are too large.
    Far,
}

/// Reason why a tree has no parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoParent {
    /// No earlier tree.
    First,
    /// Key step: stored whole.
    KeyStep,
    /// Compression is off.
    Off,
    /// The earlier tree has no tensors, or it is unreadable, or a step between it and its key step.
    Unfit,
    /// The earlier tree has stricter labels.
    Stricter,
}

/// Name of the parent of the tree `name`: the base if one is given, else the previous step of its run. What the saver may not read is
/// as if it were absent.
pub(super) fn choose(
    state: &State,
    name: &Name,
    options: &SaveOptions,
) -> std::result::Result<(Name, RefValue), NoParent> {
    let key_every = options.key_every.map_or(KEY_EVERY, NonZeroU32::get);
    let may = |name: &Name| options.readable.includes(name);
    let before = |(run, number): (Name, u64)| {
        let run = Run::find_among(&state.refs, &run, may)?;
        let before = run.counting().take_while(|step| step.number < number).last()?;
        Some((before.name.clone(), before.value.clone()))
    };
    let parent = match &options.base {
        Some(base) => state.refs.get(base).filter(|_| may(base)).map(|value| (base.clone(), value.clone())),
        None => name.step().and_then(before),
    };
    match parent {
        None => Err(NoParent::First),
        Some((_, value)) if value.behind.saturating_add(1) >= key_every => Err(NoParent::KeyStep),
        Some(parent) => Ok(parent),
    }
}

/// Names whose chunks may be bases of a tree with this parent: the parent, and the steps of its run back to its key step, which is so
/// many saves `behind`.
pub(super) fn sources(state: &State, parent: &Name, behind: u32) -> Vec<Name> {
    let mut sources = vec![parent.clone()];
    let Some((run, number)) = parent.step() else { return sources };
    let Ok(run) = Run::find(&state.refs, &run) else { return sources };
    let before = run.counting().rev().skip_while(|step| step.number >= number);
    sources.extend(before.take(behind as usize).map(|step| step.name.clone()));
    sources
}

impl Parent {
    /// Opens the tree `name`; None if it has no tensors, or takes more memory than there is for what saves know about their files. For a
    /// saver with limited rights only its own chunks and those of its `key` step are bases: others may be of steps that were removed.
    pub(super) async fn open(
        repository: &Repository,
        name: &Name,
        value: &RefValue,
        mut memory: GrowingMemory,
        key: Option<&Name>,
    ) -> Result<Option<Self>> {
        let saved = repository.saved_as(name, value).await?.shared();
        if !memory.try_add(saved.weight().saturating_mul(LISTS)) {
            tracing::warn!("chunks are stored without differences to {name}: it takes too much memory (--memory)");
            return Ok(None);
        }
        let mut of_key = HashSet::new();
        if let Some(key) = key.filter(|key| *key != name) {
            let ids = repository.saved(key).await?.manifest.chunks.ids;
            if memory.try_add(2 * size_of_val(&*ids) as u64) {
                of_key.extend(ids);
            }
        }
        let own_parts = key.map(|_| own_parts(&saved));
        Ok(Self::new(&saved).map(|parent| Self { own_parts, of_key, _memory: Some(memory), ..parent }))
    }

    fn new(saved: &Arc<Saved>) -> Option<Self> {
        let differs = saved.map.frames.iter().any(|frame| frame.codec == Codec::Difference);
        let (tensors, file_names, named, chunks) = Default::default();
        let saved = Arc::clone(saved);
        let (short, own_parts, of_key) = ((0, 0), None, HashSet::new());
        let mut parent =
            Self { saved, tensors, file_names, named, chunks, short, differs, own_parts, of_key, _memory: None };
        let saved = Arc::clone(&parent.saved);
        for (at, entry) in saved.manifest.entries.iter().enumerate() {
            let EntryKind::File(content) = &entry.kind else { continue };
            if !content.tensors.is_empty() {
                parent.add(at, file_name(&entry.path), &content.tensors);
                let placed = content.placed(&saved.manifest.chunks);
                parent.chunks.insert(at, placed.map(|(chunk, range)| (range.start, chunk)).collect());
                parent.count_short(content);
            }
        }
        (!parent.tensors.is_empty()).then_some(parent)
    }

    /// Adds the tensors of the file `entry`, which is called `name`.
    fn add(&mut self, entry: usize, name: &[u8], tensors: &[TensorEntry]) {
        let next = u32::try_from(self.file_names.len()).unwrap_or(u32::MAX);
        let name = *self.file_names.entry(name.to_vec()).or_insert(next);
        for tensor in tensors {
            let spot = TensorStart { entry, start: tensor.range.start };
            let number = u32::try_from(self.tensors.len()).unwrap_or(u32::MAX);
            let alike = self.tensors.entry(identity(tensor));
            let alike = alike.or_insert_with(|| AlikeTensors { number, spots: Vec::new() });
            alike.spots.push(spot);
            self.named.entry((alike.number, name)).or_insert(spot);
        }
    }

    /// Sums up the sizes of differences between short numbers, and of their bases.
    fn count_short(&mut self, content: &Content) {
        let mut tensors = content.tensors.iter().peekable();
        for (chunk, range) in content.placed(&self.saved.manifest.chunks) {
            while tensors.next_if(|tensor| tensor.range.end <= range.start).is_some() {}
            let is_short =
                tensors.peek().is_some_and(|tensor| Dtype::from_word(&tensor.dtype).number().is_some_and(short));
            let Ok(located) = self.saved.locate(chunk) else { continue };
            if let (true, Codec::Difference, Some(base)) = (is_short, located.place.codec, located.base) {
                let base = self.saved.locate(base).map_or(0, |base| u64::from(base.place.stored_len));
                self.short = (self.short.0 + u64::from(located.place.stored_len), self.short.1 + base);
            }
        }
    }

    /// Number of saves since the key step, for a child of this parent.
    pub(super) fn behind(&self) -> u32 {
        self.saved.value.behind.saturating_add(1)
    }

    /// Tensors of the parent that match those of the file at `path`.
    pub(super) fn pair(&self, path: &[u8], tensors: &[TensorEntry]) -> Pairs {
        let entries = &self.saved.manifest.entries;
        let same_path = entries.binary_search_by(|entry| entry.path.as_slice().cmp(path)).ok();
        let same_name = self.file_names.get(file_name(path));
        let pair = |tensor: &TensorEntry| {
            let alike = self.tensors.get(&identity(tensor))?;
            // Several files may have a tensor of this name: prefers the same path, then the same file name, then the first.
            let in_same_path = || {
                let from = alike.spots.partition_point(|spot| Some(spot.entry) < same_path);
                alike.spots.get(from).filter(|spot| Some(spot.entry) == same_path)
            };
            let in_same_name = || self.named.get(&(alike.number, *same_name?));
            let spot = in_same_path().or_else(in_same_name).or_else(|| alike.spots.first())?;
            Some((tensor.range.clone(), *spot))
        };
        Pairs(tensors.iter().filter(|tensor| !tensor.range.is_empty()).filter_map(pair).collect())
    }

    /// Candidate for the base of a chunk that fills `range` of a file with these `pairs`.
    pub(super) fn base_candidate(&self, pairs: &Pairs, range: &Range<u64>, number: Option<Element>) -> BaseCandidate {
        let Some((chunk, located)) = self.counterpart(pairs, range) else { return BaseCandidate::NoTensor };
        match (located.place.codec, located.base) {
            (Codec::Difference, Some(base)) if !self.may_use(base) => BaseCandidate::Unusable,
            (Codec::Difference, Some(_)) if number.is_some_and(short) && self.short_is_far() => BaseCandidate::Far,
            (Codec::Difference, Some(base)) => BaseCandidate::Chunk(base),
            (Codec::Difference | Codec::Derived | Codec::Part, _) => BaseCandidate::Unusable,
            _ if self.was_not_worth(&located, number) => BaseCandidate::NotWorth,
            _ => BaseCandidate::Chunk(chunk),
        }
    }

    /// Number and id of the parent's bundle that holds the same range of the same tensor.
    pub(super) fn bundle(&self, pairs: &Pairs, range: &Range<u64>) -> Option<(u32, ChunkId)> {
        let (_, located) = self.counterpart(pairs, range)?;
        let bundle = located.base.filter(|_| located.place.codec == Codec::Part)?;
        self.may_predict_from(bundle).then_some((bundle, located.place.base?))
    }

    /// True if the chunk `base` is one of the tree itself or of its key step, or may be of another one.
    fn may_use(&self, base: u32) -> bool {
        let Some(outside) = (base as usize).checked_sub(self.saved.map.chunks()) else { return true };
        let is_of_key = || self.saved.map.further.get(outside).is_some_and(|(id, _)| self.of_key.contains(id));
        self.own_parts.is_none() || is_of_key()
    }

    /// As [`Self::may_use`], for a `bundle`: all of its parts are chunks of the tree itself.
    fn may_predict_from(&self, bundle: u32) -> bool {
        let Some(own_parts) = &self.own_parts else { return true };
        let len = self.saved.locate(bundle).ok().map(|located| u64::from(located.place.plain_len));
        len.is_some() && own_parts.get(&bundle).copied() == len
    }

    /// Short numbers are usually the weights, which are loaded often, so reading their bases must not cost
    /// much more than reading them alone.
    fn short_is_far(&self) -> bool {
        let (differences, bases) = self.short;
        differences as f64 > bases as f64 * SHORT_FAR
    }

    /// True if the parent stored the chunk new and whole although it stored differences elsewhere: a difference saved too little then,
    /// as for optimizer moments, and is not tried again. Short numbers are excepted: their chunk was stored whole because the old
    /// base was too far, and becomes the next base.
    fn was_not_worth(&self, located: &Located, number: Option<Element>) -> bool {
        let long = !number.is_some_and(short);
        let value = &self.saved.value;
        long && value.behind > 0 && self.differs && located.place.pack.session == value.map_key.session
    }

    /// Chunk of the parent with the same range of the same tensor.
    fn counterpart(&self, pairs: &Pairs, range: &Range<u64>) -> Option<(u32, Located)> {
        let after = pairs.0.partition_point(|(tensor, _)| tensor.start <= range.start);
        let (tensor, spot) = pairs.0.get(after.checked_sub(1)?)?;
        if range.start >= tensor.end {
            return None;
        }
        let start = spot.start + (range.start - tensor.start);
        let chunks = self.chunks.get(&spot.entry)?;
        let (_, chunk) = chunks.get(chunks.binary_search_by_key(&start, |(start, _)| *start).ok()?)?;
        let located = self.saved.locate(*chunk).ok()?;
        (u64::from(located.place.plain_len) == range.end - range.start).then_some((*chunk, located))
    }
}

/// Bytes of each bundle that chunks of the tree are parts of.
fn own_parts(saved: &Saved) -> HashMap<u32, u64> {
    let mut parts = HashMap::new();
    for chunk in (0..).take(saved.map.chunks()) {
        let Ok(located) = saved.locate(chunk) else { continue };
        if let (Codec::Part, Some(bundle)) = (located.place.codec, located.base) {
            *parts.entry(bundle).or_default() += u64::from(located.place.plain_len);
        }
    }
    parts
}

/// Last segment of a path.
fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

fn identity(tensor: &TensorEntry) -> TensorKey {
    (tensor.name.clone(), tensor.dtype.clone(), tensor.shape.clone(), tensor.part.clone())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::ParentQuery;
    use super::*;
    use crate::ops::SaveSource;
    use crate::policy::Labels;
    use crate::repository::{NameScope, OpenOptions};
    use crate::storage::Store;
    use crate::tree::MemoryFile;

    #[tokio::test]
    async fn bases_come_from_the_parent_and_the_steps_back_to_its_key_step() {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions { cache: Some(dir.path().to_owned()), ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        for step in ["run/step-1", "run/step-2", "run/step-4", "run/step-7", "run/step-9", "other"] {
            repository.save(SaveSource::default(), &step.parse().unwrap(), &SaveOptions::default()).await.unwrap();
        }
        let state = repository.state().await.unwrap();
        let sources = |parent: &str, behind| -> Vec<String> {
            let sources = sources(&state, &parent.parse().unwrap(), behind);
            sources.iter().map(ToString::to_string).collect()
        };
        assert_eq!(sources("run/step-7", 2), ["run/step-7", "run/step-4", "run/step-2"]);
        assert_eq!(sources("run/step-7", 0), ["run/step-7"]);
        assert_eq!(sources("run/step-2", 5), ["run/step-2", "run/step-1"]);
        assert_eq!(sources("other", 3), ["other"]);
    }

    #[tokio::test]
    async fn a_tensor_is_paired_with_that_of_its_path_then_of_its_file_name_then_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions { cache: Some(dir.path().to_owned()), ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let header = r#"{"t":{"dtype":"F32","shape":[100],"data_offsets":[0,400]}}"#;
        let file = |of: u8| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[of; 400]].concat();
        let files = ["a/x", "b/x", "b/y", "c/y"].iter().zip(1..);
        let files = files.map(|(path, of)| MemoryFile::new((*path).to_owned(), [Bytes::from(file(of))]));
        let name: Name = "run/step-1".parse().unwrap();
        let source = SaveSource::Memory(files.collect());
        repository.save(source, &name, &SaveOptions::default()).await.unwrap();
        let saved = repository.saved(&name).await.unwrap().shared();
        let parent = Parent::new(&saved).unwrap();
        let tensors = match &saved.manifest.entry(b"a/x").unwrap().kind {
            EntryKind::File(content) => content.tensors.clone(),
            _ => Vec::new(),
        };
        let paired = |path: &str, tensors: &[TensorEntry]| {
            let pairs = parent.pair(path.as_bytes(), tensors);
            let (_, spot) = pairs.0.first()?;
            Some(String::from_utf8(saved.manifest.entries[spot.entry].path.clone()).unwrap())
        };
        for (path, same) in [("b/x", "b/x"), ("c/y", "c/y"), ("d/y", "b/y"), ("x", "a/x"), ("b/z", "a/x")] {
            assert_eq!(paired(path, &tensors).as_deref(), Some(same), "{path}");
        }
        let other = TensorEntry { name: "u".to_owned(), ..tensors[0].clone() };
        assert_eq!(paired("a/x", &[other]), None);
    }

    /// Weights that move a little with each step.
    fn weights(step: u32) -> SaveSource {
        let mut noise = vec![0; 600_000];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        let header = r#"{"t":{"dtype":"F32","shape":[300000],"data_offsets":[0,1200000]}}"#;
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        for (n, pair) in noise.as_chunks::<2>().0.iter().enumerate() {
            let start = f32::from(i16::from_le_bytes(*pair)) * 1e-6;
            let moved = start * (1.0 + step as f32 * 1e-6 * ((n * 31 % 97) as f32 - 48.0));
            file.extend(moved.to_le_bytes());
        }
        SaveSource::Memory(vec![MemoryFile::new("model.safetensors", [Bytes::from(file)])])
    }

    /// Saves weights as `name`, and returns how many chunks are differences.
    async fn differences(repository: &Repository, name: &str, step: u32, options: &SaveOptions) -> usize {
        let name: Name = name.parse().unwrap();
        repository.save(weights(step), &name, options).await.unwrap();
        let saved = repository.saved(&name).await.unwrap();
        let own = &saved.map.frames[..saved.map.chunks()];
        own.iter().filter(|frame| frame.codec == Codec::Difference).count()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_may_read_some_steps_gets_no_bases_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions { cache: Some(dir.path().to_owned()), ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let reads = |names: &'static [&'static str]| SaveOptions {
            readable: NameScope::only(move |name| names.contains(&name.as_str())),
            base: names.first().map(|name| name.parse().unwrap()),
            ..SaveOptions::default()
        };
        assert_eq!(differences(&repository, "run/step-1", 1, &SaveOptions::default()).await, 0);
        // The key step is readable.
        assert!(differences(&repository, "run/step-2", 2, &reads(&["run/step-1"])).await > 0);
        let all = SaveOptions { base: Some("run/step-2".parse().unwrap()), ..SaveOptions::default() };
        assert!(differences(&repository, "all", 3, &all).await > 0);
        // The parent is readable, its key step is not.
        let state = repository.state().await.unwrap();
        let (name, labels): (Name, _) = ("own".parse().unwrap(), Labels::default());
        let parent = async |options: &SaveOptions| {
            let query = ParentQuery { state: &state, name: &name, options, labels: &labels };
            repository.parent(query).await.unwrap().map(|parent| parent.saved.name.clone())
        };
        assert_eq!(parent(&reads(&["run/step-2"])).await, Err(NoParent::Unfit));
        let both = reads(&["run/step-2", "run/step-1"]);
        assert!(parent(&both).await.is_ok());
        assert!(differences(&repository, "both", 7, &both).await > 0);
        assert_eq!(differences(&repository, "own", 4, &reads(&["run/step-2"])).await, 0);
        // Nor are the parent's own chunks taken, that are differences.
        let same = |names| SaveOptions { label_scope: NameScope::only(|_| true), ..reads(names) };
        assert_eq!(differences(&repository, "same", 2, &same(&["run/step-2"])).await, 0);
        assert!(differences(&repository, "same-2", 2, &same(&["run/step-2", "run/step-1"])).await > 0);
        // It was removed, and what relies on it stays.
        repository.remove(&"run/step-1".parse().unwrap()).await.unwrap();
        assert!(differences(&repository, "all", 5, &all).await > 0);
        assert_eq!(differences(&repository, "own", 6, &reads(&["run/step-2"])).await, 0);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn saves_for_callers_and_those_of_the_user_wait_for_no_memory_of_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions { cache: Some(dir.path().to_owned()), ..OpenOptions::default() };
        let repository = Repository::create(Store::memory(), options).await.unwrap().0;
        let budget = repository.budget();
        let own = SaveOptions::default();
        let for_caller = SaveOptions { caller: Some("token:a/".into()), ..SaveOptions::default() };
        assert_eq!(differences(&repository, "run/step-1", 1, &own).await, 0);
        let others = budget.carve_beside_buffers(budget.total() / 2).await.unwrap();
        assert!(differences(&repository, "run/step-2", 2, &for_caller).await > 0);
        drop(others);
        let others = budget.carve_for_caller("token:a/", budget.carved_for_caller_max()).unwrap();
        assert_eq!(differences(&repository, "run/step-3", 3, &for_caller).await, 0, "it is stored without bases");
        assert!(differences(&repository, "run/step-4", 4, &own).await > 0);
        drop(others);
        assert!(differences(&repository, "run/step-5", 5, &for_caller).await > 0);
    }
}
