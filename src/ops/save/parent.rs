//! Parent: an earlier tree with the same tensors, whose chunks are bases of differences.
//!
//! The base of a difference is never a difference itself: it is the parent's chunk, or the base of that. So all steps refer to
//! one key step and are read with one hop.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::Dtype;
use crate::codec::{Codec, Element};
use crate::error::Result;
use crate::format::{Content, EntryKind, TensorEntry, TensorPart};
use crate::name::Name;
use crate::repository::log::{RefValue, State};
use crate::repository::{Located, Repository, Run, Saved};

/// Maximum size of the parent's differences between short numbers, relative to their bases, for another difference: they grow
/// with each step.
const SHORT_FAR: f64 = 0.36;

/// Numbers of 16 bits or less.
fn short(number: Element) -> bool {
    number.width().bytes() <= 2
}

/// A tree to take differences to.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) saved: Arc<Saved>,
    /// Its tensors.
    tensors: HashMap<TensorKey, Vec<TensorStart>>,
    /// Starts of the chunks of its files, by entry.
    chunks: HashMap<usize, Vec<(u64, u32)>>,
    /// Bytes of its differences between short numbers, and of their bases.
    short: (u64, u64),
    /// True if it has differences; a settled one has none.
    differs: bool,
}

/// Properties that identify the same tensor in another step, whatever its file is called.
type TensorKey = (String, String, Vec<u64>, Option<TensorPart>);

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
    /// The parent's chunk is derived, or is in a pack that cannot be relied on.
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
    /// The earlier tree has no tensors, or is unreadable.
    Unfit,
    /// The earlier tree has stricter labels.
    Stricter,
}

/// Name of the parent of the tree `name`: `base` if given, else the previous step of its run.
pub(super) fn choose(
    state: &State,
    name: &Name,
    base: Option<&Name>,
    key_every: u32,
) -> std::result::Result<(Name, RefValue), NoParent> {
    let before = |(run, number): (Name, u64)| {
        let run = Run::find(&state.refs, &run).ok()?;
        let before = run.counting().take_while(|step| step.number < number).last()?;
        Some((before.name.clone(), before.value.clone()))
    };
    let parent = match base {
        Some(base) => state.refs.get(base).map(|value| (base.clone(), value.clone())),
        None => name.step().and_then(before),
    };
    match parent {
        None => Err(NoParent::First),
        Some((_, value)) if value.behind.saturating_add(1) >= key_every => Err(NoParent::KeyStep),
        Some(parent) => Ok(parent),
    }
}

impl Parent {
    /// Opens the tree `name`; None if it has no tensors.
    pub(super) async fn open(repository: &Repository, name: &Name, value: &RefValue) -> Result<Option<Self>> {
        Ok(Self::new(&repository.saved_as(name, value).await?.shared()))
    }

    fn new(saved: &Arc<Saved>) -> Option<Self> {
        let differs = saved.map.frames.iter().any(|frame| frame.codec == Codec::Difference);
        let (tensors, chunks) = Default::default();
        let mut parent = Self { saved: Arc::clone(saved), tensors, chunks, short: (0, 0), differs };
        for (at, entry) in saved.manifest.entries.iter().enumerate() {
            let EntryKind::File(content) = &entry.kind else { continue };
            for tensor in &content.tensors {
                let spot = TensorStart { entry: at, start: tensor.range.start };
                parent.tensors.entry(identity(tensor)).or_default().push(spot);
            }
            if !content.tensors.is_empty() {
                let placed = content.placed(&saved.manifest.chunks);
                parent.chunks.insert(at, placed.map(|(chunk, range)| (range.start, chunk)).collect());
                parent.count_short(content);
            }
        }
        (!parent.tensors.is_empty()).then_some(parent)
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
        let pair = |tensor: &TensorEntry| {
            let spots = self.tensors.get(&identity(tensor))?;
            // Several files may have a tensor of this name: prefers the same path, then the same file name.
            let path_of =
                |spot: &TensorStart| self.saved.manifest.entries.get(spot.entry).map(|entry| entry.path.as_slice());
            let last = |path: &[u8]| path.rsplit(|&byte| byte == b'/').next().map(<[u8]>::to_vec);
            let likeness = |spot: &&TensorStart| match path_of(spot) {
                Some(other) if other == path => 2,
                Some(other) if last(other) == last(path) => 1,
                _ => 0,
            };
            // First of equally good candidates.
            let spot = spots.iter().rev().max_by_key(likeness)?;
            Some((tensor.range.clone(), *spot))
        };
        Pairs(tensors.iter().filter(|tensor| !tensor.range.is_empty()).filter_map(pair).collect())
    }

    /// Candidate for the base of a chunk that fills `range` of a file with these `pairs`.
    pub(super) fn base_candidate(&self, pairs: &Pairs, range: &Range<u64>, number: Option<Element>) -> BaseCandidate {
        let Some((chunk, located)) = self.counterpart(pairs, range) else { return BaseCandidate::NoTensor };
        match (located.place.codec, located.base) {
            (Codec::Difference, Some(_)) if number.is_some_and(short) && self.short_is_far() => BaseCandidate::Far,
            (Codec::Difference, Some(base)) => BaseCandidate::Chunk(base),
            (Codec::Difference | Codec::Derived, _) => BaseCandidate::Unusable,
            _ if self.was_not_worth(&located, number) => BaseCandidate::NotWorth,
            _ => BaseCandidate::Chunk(chunk),
        }
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

fn identity(tensor: &TensorEntry) -> TensorKey {
    (tensor.name.clone(), tensor.dtype.clone(), tensor.shape.clone(), tensor.part.clone())
}
