//! Distributed checkpoints of `PyTorch` (DCP): a folder with a pickle called `.metadata` and a file of parts for each rank.
//!
//! Facts: torch/distributed/checkpoint/metadata.py and filesystem.py in <https://github.com/pytorch/pytorch>, and what torch 2.15
//! writes. The metadata has for each tensor its type, its whole shape and the boxes of its parts, and for each part its file,
//! offset and length; there, a torch file contains that one tensor. Transformed (compressed) parts, and objects that are no
//! tensors, are ignored.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;

use thiserror::Error;

use super::pickle::{self, Pickle, Ref, Value};
use super::torch::{self, dtypes};
use super::{Dtype, Elements, Growth, Layout, ReadAt, ReserveMemory, Tensor, TensorSlice, in_blocks};
use crate::limits::{PATH_LEN_MAX, RANK_MAX, TENSOR_NAME_MAX, TENSORS_MAX};

/// File name of the metadata.
pub const METADATA_NAME: &str = ".metadata";

/// Maximum number of parts of all tensors.
pub const PARTS_MAX: usize = 1 << 22;
/// Maximum number of offsets and sizes of all parts: a pickle can repeat one part many times at no cost.
const NUMBERS_MAX: usize = 1 << 23;
/// Maximum number of attributes of an object.
const ATTRIBUTES_MAX: usize = 64;

/// Bytes of memory for a tensor, beside its name and its numbers: in a list that doubles, and in two tables.
const TENSOR_WEIGHT: usize = 3 * size_of::<Whole>() + 128;
/// Bytes of memory for a part of a tensor: in a list that doubles.
const ITEM_WEIGHT: usize = 2 * size_of::<Item>();
/// Bytes of memory for a file, beside its path.
const FILE_WEIGHT: usize = 128;
/// Bytes of memory for a name that stands in the places, in a table that doubles.
const NAME_WEIGHT: usize = 32;

const CLASSES: &str = "torch.distributed.checkpoint.metadata";
const STORAGE: &str = "torch.distributed.checkpoint.filesystem";

/// Reason why a file is not valid DCP metadata for this version.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The pickle cannot be read.
    #[error("the metadata cannot be read")]
    Pickle(#[from] pickle::ParseError),
    /// A pickle of something else, or with something missing.
    #[error("{0}")]
    Metadata(&'static str),
    /// A part is outside of its file, or overlaps another.
    #[error("a part of {name:?} lies at {start}..{end}, outside its file or over another part")]
    OutOfRange {
        /// The tensor's name.
        name: String,
        /// Start of the part.
        start: u64,
        /// End of the part.
        end: u64,
    },
    /// No memory is left for what it has.
    #[error("it takes too much memory (--memory)")]
    Memory,
    /// A part that is no torch file.
    #[error("the part of {name:?} at byte {start} cannot be read")]
    Item {
        /// The tensor's name.
        name: String,
        /// Start of the part.
        start: u64,
        /// Reason.
        #[source]
        source: torch::ParseError,
    },
    /// A part contains another tensor than the metadata says.
    #[error("the part of {name:?} at byte {start} is not one tensor of the type and shape that the metadata says")]
    Mismatch {
        /// The tensor's name.
        name: String,
        /// Start of the part.
        start: u64,
    },
}

/// Content of `.metadata`.
#[derive(Debug, Default)]
pub struct Metadata {
    tensors: Vec<Whole>,
    /// The parts of all tensors, one after the other: the offsets of each, then its sizes.
    boxes: Vec<u64>,
    /// The parts in each file, by its path from the metadata's folder; sorted by where they lie.
    files: HashMap<Box<str>, Vec<Item>>,
}

/// A tensor in parts.
#[derive(Debug)]
struct Whole {
    name: Box<str>,
    /// None if it is not known.
    dtype: Option<Dtype>,
    shape: Box<[u64]>,
    /// First of its parts among all, sorted by where they begin, and their number.
    from: usize,
    parts: usize,
}

/// Place of a part in its file.
#[derive(Debug)]
struct Item {
    tensor: u32,
    part: u32,
    at: Range<u64>,
}

/// Reads the metadata. Memory for the values of its pickle, tensors and parts is reserved before it is taken.
///
/// # Errors
/// The pickle is no consistent `Metadata` of tensors, boxes and places, or has more than [`TENSORS_MAX`] tensors or
/// [`PARTS_MAX`] parts, or takes more memory than `reserve` has.
pub fn parse(bytes: &[u8], reserve: ReserveMemory<'_>) -> Result<Metadata, ParseError> {
    let pickle = Pickle::parse(bytes, reserve)?;
    let mut memory = Growth::new(reserve);
    let mut used = 0;
    let reader = Reader::new(&pickle);
    let state = reader.state(pickle.root(), &reader.metadata);
    let state = state.ok_or(ParseError::Metadata("not the metadata of a distributed checkpoint"))?;
    let dicts = (pickle.entry(state, "state_dict_metadata"), pickle.entry(state, "storage_data"));
    let (Some(tensors), Some(places)) = dicts else { return Err(ParseError::Metadata("metadata lacks a part")) };
    let mut metadata = Metadata::default();
    let mut names = Names::default();
    let mut names_len = 0;
    for (key, described) in reader.pairs(tensors)? {
        let Some(name) = pickle.text(key) else { return Err(ParseError::Metadata("a name is not text")) };
        if let Some(tensor) = reader.tensor(name, described, &mut metadata.boxes)? {
            names_len += name.len();
            used += TENSOR_WEIGHT + name.len() + size_of_val(&*tensor.shape);
            if !memory.is_reserved(used + 2 * size_of_val(&*metadata.boxes)) {
                return Err(ParseError::Memory);
            }
            if metadata.tensors.len() == TENSORS_MAX || names_len > torch::NAMES_LEN_MAX {
                return Err(ParseError::Metadata("too many tensors, or too long names"));
            }
            let number = u32::try_from(metadata.tensors.len()).unwrap_or(u32::MAX);
            names.by_value.insert(key, Some(number));
            names.by_text.insert(name, number);
            metadata.tensors.push(tensor);
        }
    }
    let places = reader.pairs(places)?;
    if places.len() > PARTS_MAX {
        return Err(ParseError::Metadata("too many parts"));
    }
    used += 2 * size_of_val(&*metadata.boxes);
    let mut scratch = Vec::new();
    for (index, place) in places {
        if let Some((file, item)) = reader.item((index, place), &mut names, &metadata, &mut scratch)? {
            used += ITEM_WEIGHT;
            if let Some(items) = metadata.files.get_mut(file) {
                items.push(item);
            } else {
                used += FILE_WEIGHT + file.len();
                metadata.files.insert(file.into(), vec![item]);
            }
        }
        if !memory.is_reserved(used + names.by_value.len() * NAME_WEIGHT) {
            return Err(ParseError::Memory);
        }
    }
    metadata.files.values_mut().for_each(|items| items.sort_by_key(|item| item.at.start));
    Ok(metadata)
}

impl Metadata {
    /// Approximate bytes of memory.
    #[must_use]
    pub fn weight(&self) -> u64 {
        let tensors =
            self.tensors.iter().map(|whole| size_of_val(whole) + whole.name.len() + size_of_val(&*whole.shape));
        let files = self.files.iter().map(|(file, items)| file.len() + size_of_val(&**items));
        (tensors.sum::<usize>() + size_of_val(&*self.boxes) + files.sum::<usize>()) as u64
    }

    /// Files with parts, by path relative to the metadata's folder.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(AsRef::as_ref)
    }

    /// The tensors of the file at `path`, which has `len` bytes. Each is a [`TensorSlice`] of its whole.
    ///
    /// # Errors
    /// A part is outside of the file, overlaps another, or its content does not match the metadata.
    pub fn layout(
        &self,
        path: &str,
        read: ReadAt<'_>,
        len: u64,
        reserve: ReserveMemory<'_>,
    ) -> Result<Layout, ParseError> {
        let mut layout = Layout::default();
        let mut read = in_blocks(read, len);
        let (mut end, mut free) = (0, 0);
        for item in self.files.get(path).map(Vec::as_slice).unwrap_or_default() {
            let Some(whole) = self.tensors.get(item.tensor as usize) else { continue };
            let (offsets, sizes) = self.part(whole, item.part as usize);
            let (name, start) = (|| whole.name.to_string(), item.at.start);
            if start < end || item.at.end > len {
                return Err(ParseError::OutOfRange { name: name(), start, end: item.at.end });
            }
            end = item.at.end;
            let mut within = |at: u64, out: &mut [u8]| -> io::Result<()> { read(start + at, out) };
            // Memory for parsing one part is free again for the next; what is kept of it is reserved below.
            let mut taken = 0;
            let mut reserve_again = |bytes: u64| {
                taken += bytes;
                let more = bytes.saturating_sub(free);
                free = free.saturating_sub(bytes);
                more == 0 || reserve(more)
            };
            let inner = torch::parse(&mut within, end - start, &mut reserve_again);
            free += taken;
            let inner = inner.map_err(|source| ParseError::Item { name: name(), start, source })?;
            let refuse = || ParseError::Item { name: name(), start, source: torch::ParseError::Memory };
            if !reserve(size_of_val(&*inner.elements) as u64) {
                return Err(refuse());
            }
            let mut tensors = inner.tensors.into_iter();
            if let Some(tensor) = tensors.next() {
                let is_it = Some(&tensor.dtype) == whole.dtype.as_ref() && *tensor.shape == *sizes;
                if !is_it || tensors.next().is_some() {
                    return Err(ParseError::Mismatch { name: name(), start });
                }
                let weight = size_of::<Tensor>() + whole.name.len() + 3 * size_of_val(&*whole.shape);
                if !reserve(weight as u64) {
                    return Err(refuse());
                }
                layout.tensors.push(Tensor {
                    name: name(),
                    start: start + tensor.start,
                    end: start + tensor.end,
                    part: Some(TensorSlice { shape: whole.shape.clone(), offsets: offsets.into() }),
                    ..tensor
                });
            }
            let moved = |one: Elements| Elements { start: start + one.start, end: start + one.end, ..one };
            layout.elements.extend(inner.elements.into_iter().map(moved));
        }
        Ok(layout)
    }

    /// Offsets of a part of a tensor, and its sizes.
    fn part(&self, whole: &Whole, part: usize) -> (&[u64], &[u64]) {
        let rank = whole.shape.len();
        let from = whole.from + part * 2 * rank;
        let boxed = self.boxes.get(from..from + 2 * rank).unwrap_or_default();
        boxed.split_at_checked(rank).unwrap_or_default()
    }

    /// Part of a tensor that begins at `offsets`.
    fn part_at(&self, whole: &Whole, offsets: &[u64]) -> Option<usize> {
        let (mut low, mut high) = (0, whole.parts);
        while low < high {
            let middle = low.midpoint(high);
            match self.part(whole, middle).0.cmp(offsets) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }
}

/// The tensors' numbers. Where a pickler remembers names, a name is one value, which is found faster than its text: none for one that
/// is no tensor's, however often it stands there.
#[derive(Default)]
struct Names<'p> {
    by_value: HashMap<Ref, Option<u32>>,
    by_text: HashMap<&'p str, u32>,
}

/// A text or class that is repeated often, usually as the same value.
struct Interned<T> {
    what: T,
    seen: Cell<Option<Ref>>,
}

impl<T> Interned<T> {
    const fn new(what: T) -> Self {
        Self { what, seen: Cell::new(None) }
    }
}

type Class = Interned<(&'static str, &'static str)>;
type Key = Interned<&'static str>;

/// Reads the classes of the metadata.
struct Reader<'p, 'a> {
    pickle: &'p Pickle<'a>,
    /// Parts of all tensors that were read.
    parts: Cell<usize>,
    metadata: Class,
    size: Class,
    tensor: Class,
    properties: Class,
    chunk: Class,
    index: Class,
    place: Class,
    shape: Key,
    of_tensor: Key,
    chunks: Key,
    offsets: Key,
    sizes: Key,
    fqn: Key,
    offset: Key,
    path: Key,
    start: Key,
    length: Key,
    transforms: Key,
}

impl<'p, 'a> Reader<'p, 'a> {
    fn new(pickle: &'p Pickle<'a>) -> Self {
        let class = |name| Interned::new((CLASSES, name));
        Self {
            pickle,
            parts: Cell::new(0),
            metadata: class("Metadata"),
            size: Interned::new(("torch", "Size")),
            tensor: class("TensorStorageMetadata"),
            properties: class("TensorProperties"),
            chunk: class("ChunkStorageMetadata"),
            index: class("MetadataIndex"),
            place: Interned::new((STORAGE, "_StorageInfo")),
            shape: Interned::new("size"),
            of_tensor: Interned::new("properties"),
            chunks: Interned::new("chunks"),
            offsets: Interned::new("offsets"),
            sizes: Interned::new("sizes"),
            fqn: Interned::new("fqn"),
            offset: Interned::new("offset"),
            path: Interned::new("relative_path"),
            start: Interned::new("offset"),
            length: Interned::new("length"),
            transforms: Interned::new("transform_descriptors"),
        }
    }

    fn is(&self, value: Ref, class: &Class) -> bool {
        let known = class.seen.get() == Some(value) || self.pickle.is(value, class.what.0, class.what.1);
        if known {
            class.seen.set(Some(value));
        }
        known
    }

    /// The attributes of an object of `class`.
    fn state(&self, value: Ref, class: &Class) -> Option<Ref> {
        match self.pickle.value(value) {
            Value::Object(object) if self.is(object.class, class) => Some(object.state),
            _ => None,
        }
    }

    /// Value of `key` in a dict.
    fn entry(&self, dict: Ref, key: &Key) -> Option<Ref> {
        let Value::Dict(members) = self.pickle.value(dict) else { return None };
        // Objects of these classes have a few attributes; one dict with very many may be that of each of very many objects.
        if members.len() > 2 * ATTRIBUTES_MAX {
            return None;
        }
        let mut pairs = members.chunks_exact(2);
        let seen = key.seen.get();
        let found = pairs.clone().find(|pair| Some(pair[0]) == seen);
        let found = found.or_else(|| pairs.find(|pair| self.pickle.text(pair[0]) == Some(key.what)))?;
        key.seen.set(Some(found[0]));
        Some(found[1])
    }

    fn pairs(&self, dict: Ref) -> Result<impl ExactSizeIterator<Item = (Ref, Ref)> + 'p, ParseError> {
        match self.pickle.value(dict) {
            Value::Dict(members) => Ok(members.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            _ => Err(ParseError::Metadata("metadata lacks a part")),
        }
    }

    /// Adds a `torch.Size`, or a plain tuple, to `out`; returns its length.
    fn size(&self, value: Ref, out: &mut Vec<u64>) -> Option<usize> {
        let members = match self.pickle.value(value) {
            Value::Object(object) if self.is(object.class, &self.size) => {
                self.pickle.sequence(*self.pickle.sequence(object.args)?.first()?)?
            }
            Value::Sequence(members) => members,
            _ => return None,
        };
        if members.len() > RANK_MAX {
            return None;
        }
        for &member in members {
            out.push(self.pickle.number(member)?);
        }
        Some(members.len())
    }

    /// Reads a `TensorStorageMetadata`; none for an object that is no tensor.
    fn tensor(&self, name: &str, value: Ref, boxes: &mut Vec<u64>) -> Result<Option<Whole>, ParseError> {
        let Some(state) = self.state(value, &self.tensor) else { return Ok(None) };
        let refuse = || ParseError::Metadata("a tensor is not described as one");
        let (pickle, field) = (self.pickle, |key| self.entry(state, key).ok_or_else(refuse));
        if name.len() > TENSOR_NAME_MAX {
            return Err(ParseError::Metadata("a name is too long"));
        }
        let mut shape = Vec::new();
        self.size(field(&self.shape)?, &mut shape).ok_or_else(refuse)?;
        // The properties' state is a tuple that begins with the type.
        let properties = self.state(field(&self.of_tensor)?, &self.properties);
        let dtype = properties.and_then(|state| pickle.sequence(state)?.first().copied());
        let dtype = match dtype.map(|dtype| pickle.value(dtype)) {
            Some(Value::Global { module: "torch", name }) => dtypes::by_name(name),
            _ => None,
        };
        let (from, rank) = (boxes.len(), shape.len());
        let chunks = pickle.sequence(field(&self.chunks)?).ok_or_else(refuse)?;
        self.parts.set(self.parts.get().saturating_add(chunks.len()));
        if self.parts.get() > PARTS_MAX || from + chunks.len().saturating_mul(2 * rank) > NUMBERS_MAX {
            return Err(ParseError::Metadata("too many parts"));
        }
        for &chunk in chunks {
            let chunk = self.state(chunk, &self.chunk).ok_or_else(refuse)?;
            let read = |key, boxes: &mut Vec<u64>| self.entry(chunk, key).and_then(|value| self.size(value, boxes));
            let at = boxes.len();
            let ranks = (read(&self.offsets, boxes), read(&self.sizes, boxes));
            let (Some(offsets), Some(sizes)) = ranks else { return Err(refuse()) };
            let boxed = boxes.get(at..).and_then(|boxed| boxed.split_at_checked(rank));
            if (offsets, sizes) != (rank, rank) || !boxed.is_some_and(|(offsets, sizes)| fits(&shape, offsets, sizes)) {
                return Err(ParseError::Metadata("a part does not lie in its tensor"));
            }
        }
        sort_boxes(boxes.get_mut(from..).unwrap_or_default(), 2 * rank);
        Ok(Some(Whole { name: name.into(), dtype, shape: shape.into(), from, parts: chunks.len() }))
    }

    /// Reads a `MetadataIndex` and its `_StorageInfo`: the file, and the place of the part in it. None for an object that is no
    /// tensor, or was transformed.
    fn item(
        &self,
        (index, place): (Ref, Ref),
        names: &mut Names<'p>,
        metadata: &Metadata,
        scratch: &mut Vec<u64>,
    ) -> Result<Option<(&'p str, Item)>, ParseError> {
        let refuse = || ParseError::Metadata("a part is not described as one");
        let pickle = self.pickle;
        let index = self.state(index, &self.index).ok_or_else(refuse)?;
        let fqn = self.entry(index, &self.fqn).ok_or_else(refuse)?;
        let tensor = match names.by_value.get(&fqn) {
            Some(known) => *known,
            None => {
                let found = names.by_text.get(pickle.text(fqn).ok_or_else(refuse)?).copied();
                names.by_value.insert(fqn, found);
                found
            }
        };
        let Some(tensor) = tensor else { return Ok(None) };
        // Other writers use other classes.
        let Some(place) = self.state(place, &self.place) else { return Ok(None) };
        let transformed = self.entry(place, &self.transforms).and_then(|list| pickle.sequence(list));
        if transformed.is_some_and(|list| !list.is_empty()) {
            return Ok(None);
        }
        scratch.clear();
        let offsets = self.entry(index, &self.offset).and_then(|offset| self.size(offset, scratch));
        let file = self.entry(place, &self.path).and_then(|path| pickle.text(path));
        let file = file.filter(|file| file.len() <= PATH_LEN_MAX);
        let number = |key| self.entry(place, key).and_then(|value| pickle.number(value));
        let (Some(file), Some(start), Some(len)) = (file, number(&self.start), number(&self.length)) else {
            return Err(refuse());
        };
        let whole = metadata.tensors.get(tensor as usize).ok_or_else(refuse)?;
        let part = match offsets {
            Some(_) => metadata.part_at(whole, scratch),
            // A tensor in one part may be indexed by its name alone.
            None => (whole.parts == 1).then_some(0),
        };
        let part = part.and_then(|part| u32::try_from(part).ok()).ok_or_else(refuse)?;
        let end = start.checked_add(len).ok_or_else(refuse)?;
        Ok(Some((file, Item { tensor, part, at: start..end })))
    }
}

/// Sorts boxes of `numbers` each, which are usually sorted already.
fn sort_boxes(boxes: &mut [u64], numbers: usize) {
    if numbers == 0 || boxes.chunks_exact(numbers).is_sorted() {
        return;
    }
    let before = boxes.to_vec();
    let mut sorted: Vec<&[u64]> = before.chunks_exact(numbers).collect();
    sorted.sort_unstable();
    for (place, sorted) in boxes.chunks_exact_mut(numbers).zip(sorted) {
        place.copy_from_slice(sorted);
    }
}

/// True if a box of `sizes` at `offsets` is inside a tensor of `shape`.
fn fits(shape: &[u64], offsets: &[u64], sizes: &[u64]) -> bool {
    let ends = offsets.iter().zip(sizes).map(|(offset, size)| offset.checked_add(*size));
    offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && shape.iter().zip(ends).all(|(dim, end)| end.is_some_and(|end| end <= *dim))
}
