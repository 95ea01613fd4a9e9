//! The parent: an earlier tree with the same tensors, whose chunks this one's may be stored as differences to.
//!
//! The base of a difference is never itself a difference: it is the parent's own chunk, or the one that the parent's is a
//! difference to. So steps reach back to one of them, the key step, and each is read with one hop.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::Dtype;
use crate::codec::{Codec, Element};
use crate::error::Result;
use crate::format::{Content, EntryKind, TensorEntry, TensorPart};
use crate::repository::log::{RefValue, State};
use crate::repository::{Located, Name, Repository, Run, Saved};

/// The part of their bases that differences between short numbers may take in the parent, if another is to be added: they are
/// longer in each step.
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
}

/// Properties by which a tensor is the same one in another step, whatever its file is called.
type TensorKey = (String, String, Vec<u64>, Option<TensorPart>);

/// Start of a tensor of the parent: its entry, and the offset.
#[derive(Clone, Copy, Debug)]
struct TensorStart {
    entry: usize,
    start: u64,
}

/// The tensors of one new file that the parent has, by where they start.
#[derive(Debug, Default)]
pub(super) struct Pairs(Vec<(Range<u64>, TensorStart)>);

/// Possible base of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Basis {
    /// This chunk of the parent.
    Chunk(u32),
    /// The parent has no such tensor, or not cut alike.
    NoTensor,
    /// The parent's chunk is derived, or lies where it cannot be relied on.
    Unusable,
    /// It did not pay in the parent.
    NotWorth,
    /// It could be one, but the parent's own differences got long.
    Far,
}

/// Why a tree has no parent.
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
}

/// Name that the tree `name` should be stored as differences to: `base`, if it is given, else the step of its run before it.
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
    /// Opens the tree called `name`; none if it has no tensors.
    pub(super) async fn open(repository: &Repository, name: &Name, value: &RefValue) -> Result<Option<Self>> {
        Ok(Self::new(&repository.saved_as(name, value).await?.shared()))
    }

    fn new(saved: &Arc<Saved>) -> Option<Self> {
        let mut parent =
            Self { saved: Arc::clone(saved), tensors: HashMap::new(), chunks: HashMap::new(), short: (0, 0) };
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

    /// Adds up what differences between short numbers take, and their bases.
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

    /// Saves since the key step for a tree that has this parent.
    pub(super) fn behind(&self) -> u32 {
        self.saved.value.behind.saturating_add(1)
    }

    /// Tensors of the parent that match those of the file at `path`.
    pub(super) fn pair(&self, path: &[u8], tensors: &[TensorEntry]) -> Pairs {
        let pair = |tensor: &TensorEntry| {
            let spots = self.tensors.get(&identity(tensor))?;
            // One name may stand in several files; the file of the same path, or at least of the same name, is the likeliest.
            let path_of =
                |spot: &TensorStart| self.saved.manifest.entries.get(spot.entry).map(|entry| entry.path.as_slice());
            let last = |path: &[u8]| path.rsplit(|&byte| byte == b'/').next().map(<[u8]>::to_vec);
            let likeness = |spot: &&TensorStart| match path_of(spot) {
                Some(other) if other == path => 2,
                Some(other) if last(other) == last(path) => 1,
                _ => 0,
            };
            // The first of those that are alike.
            let spot = spots.iter().rev().max_by_key(likeness)?;
            Some((tensor.range.clone(), *spot))
        };
        Pairs(tensors.iter().filter(|tensor| !tensor.range.is_empty()).filter_map(pair).collect())
    }

    /// Possible base of a chunk that fills `range` of a file with these `pairs`.
    pub(super) fn basis(&self, pairs: &Pairs, range: &Range<u64>, number: Option<Element>) -> Basis {
        let Some((chunk, located)) = self.counterpart(pairs, range) else { return Basis::NoTensor };
        match (located.place.codec, located.base) {
            (Codec::Difference, Some(_)) if number.is_some_and(short) && self.short_is_far() => Basis::Far,
            (Codec::Difference, Some(base)) => Basis::Chunk(base),
            (Codec::Difference | Codec::Derived, _) => Basis::Unusable,
            _ if self.was_not_worth(&located, number) => Basis::NotWorth,
            _ => Basis::Chunk(chunk),
        }
    }

    /// Short numbers are what is loaded to be used, over and over: reading them is to read little more than them.
    fn short_is_far(&self) -> bool {
        let (differences, bases) = self.short;
        differences as f64 > bases as f64 * SHORT_FAR
    }

    /// Was a chunk of the parent new then, and stored without difference although there were some? What its optimizer knows of a
    /// weight's last steps is forgotten too fast: it is not read again to find that out. Short numbers only got too far away
    /// from their base, and that chunk is the next.
    fn was_not_worth(&self, located: &Located, number: Option<Element>) -> bool {
        let long = !number.is_some_and(short);
        let value = &self.saved.value;
        long && value.behind > 0 && located.place.pack.session == value.map_key.session
    }

    /// The parent's chunk of the same piece of the same tensor.
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
