//! Distributed checkpoints of `PyTorch` (DCP): a folder with a pickle called `.metadata` and a file of parts for each rank.
//!
//! Facts: torch/distributed/checkpoint/metadata.py and filesystem.py in <https://github.com/pytorch/pytorch>, and what torch
//! 2.15 writes. The metadata says of each tensor its type and whole shape and into which boxes it is parted, and of each
//! part in which file, from which offset on and for how many bytes it lies: there stands a torch file of that one tensor.
//! Parts that were transformed on their way (compressed), and things that are no tensors, are left alone.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use thiserror::Error;

use super::pickle::{self, Pickle, Ref, Value};
use super::torch::{self, dtypes};
use super::{Dtype, Elements, Layout, Part, ReadAt, Tensor, in_blocks};
use crate::limits::{RANK_MAX, TENSOR_NAME_MAX};

/// What the file with the metadata is called.
pub const METADATA_NAME: &str = ".metadata";

const CLASSES: &str = "torch.distributed.checkpoint.metadata";
const STORAGE: &str = "torch.distributed.checkpoint.filesystem";

/// Why a file is not what this version knows of DCP.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Not a pickle that is read.
    #[error("the metadata cannot be read")]
    Pickle(#[from] pickle::ParseError),
    /// A pickle of something else, or with something missing.
    #[error("{0}")]
    Metadata(&'static str),
    /// A part does not lie in its file, or over another.
    #[error("a part of {name:?} lies at {start}..{end}, outside its file or over another part")]
    OutOfRange {
        /// The tensor's name.
        name: String,
        /// Where the part begins.
        start: u64,
        /// Where it ends.
        end: u64,
    },
    /// What stands where a part should is no torch file.
    #[error("the part of {name:?} at byte {start} cannot be read")]
    Item {
        /// The tensor's name.
        name: String,
        /// Where the part begins.
        start: u64,
        /// Why.
        #[source]
        source: torch::ParseError,
    },
    /// What stands where a part should is another tensor.
    #[error("the part of {name:?} at byte {start} is not of the type and shape that the metadata says")]
    Mismatch {
        /// The tensor's name.
        name: String,
        /// Where the part begins.
        start: u64,
    },
}

/// What `.metadata` says.
#[derive(Debug, Default)]
pub struct Metadata {
    tensors: Vec<Whole>,
    /// The parts in each file, by its path from the metadata's folder; sorted by where they lie.
    files: HashMap<Box<str>, Vec<Item>>,
}

/// A tensor that is kept in parts.
#[derive(Debug)]
struct Whole {
    name: Box<str>,
    /// None if it is not known.
    dtype: Option<Dtype>,
    shape: Box<[u64]>,
    /// Sorted by where they begin.
    boxes: Vec<Region>,
}

/// A part of a tensor.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Region {
    offsets: Box<[u64]>,
    sizes: Box<[u64]>,
}

/// Where a part lies in its file.
#[derive(Debug)]
struct Item {
    tensor: usize,
    part: usize,
    at: Range<u64>,
}

/// Reads the metadata.
///
/// # Errors
/// Not the pickle of a `Metadata` with tensors, boxes and places that fit together.
pub fn parse(bytes: &[u8]) -> Result<Metadata, ParseError> {
    let pickle = Pickle::parse(bytes)?;
    let reader = Reader { pickle: &pickle };
    let state = reader.state(pickle.root(), CLASSES, "Metadata");
    let state = state.ok_or(ParseError::Metadata("not the metadata of a distributed checkpoint"))?;
    let dicts = (pickle.entry(state, "state_dict_metadata"), pickle.entry(state, "storage_data"));
    let (Some(tensors), Some(places)) = dicts else { return Err(ParseError::Metadata("metadata lacks a part")) };
    let mut metadata = Metadata::default();
    let mut names = HashMap::new();
    for (name, described) in reader.pairs(tensors)? {
        let Some(name) = pickle.text(name) else { return Err(ParseError::Metadata("a name is not text")) };
        if let Some(tensor) = reader.tensor(name, described)? {
            names.insert(name, metadata.tensors.len());
            metadata.tensors.push(tensor);
        }
    }
    for (index, place) in reader.pairs(places)? {
        if let Some((file, item)) = reader.item(index, place, &names, &metadata.tensors)? {
            match metadata.files.get_mut(file) {
                Some(items) => items.push(item),
                None => drop(metadata.files.insert(file.into(), vec![item])),
            }
        }
    }
    metadata.files.values_mut().for_each(|items| items.sort_by_key(|item| item.at.start));
    Ok(metadata)
}

impl Metadata {
    /// The files that hold parts, by their paths from the metadata's folder.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(AsRef::as_ref)
    }

    /// The tensors of the file at `path`, which has `len` bytes. Each is a [`Part`] of its whole.
    ///
    /// # Errors
    /// A part lies outside the file or over another, or what lies there is not what the metadata says.
    pub fn layout(&self, path: &str, read: ReadAt<'_>, len: u64) -> Result<Layout, ParseError> {
        let mut layout = Layout::default();
        let mut read = in_blocks(read, len);
        let mut end = 0;
        for item in self.files.get(path).map(Vec::as_slice).unwrap_or_default() {
            let Some(whole) = self.tensors.get(item.tensor) else { continue };
            let Some(part) = whole.boxes.get(item.part) else { continue };
            let (name, start) = (|| whole.name.to_string(), item.at.start);
            if start < end || item.at.end > len {
                return Err(ParseError::OutOfRange { name: name(), start, end: item.at.end });
            }
            end = item.at.end;
            let mut within = |at: u64, out: &mut [u8]| -> io::Result<()> { read(start + at, out) };
            let inner = torch::parse(&mut within, end - start);
            let inner = inner.map_err(|source| ParseError::Item { name: name(), start, source })?;
            for tensor in inner.tensors {
                if Some(&tensor.dtype) != whole.dtype.as_ref() || tensor.shape != part.sizes {
                    return Err(ParseError::Mismatch { name: name(), start });
                }
                layout.tensors.push(Tensor {
                    name: name(),
                    start: start + tensor.start,
                    end: start + tensor.end,
                    part: Some(Part { shape: whole.shape.clone(), offsets: part.offsets.clone() }),
                    ..tensor
                });
            }
            let moved = |one: Elements| Elements { start: start + one.start, end: start + one.end, ..one };
            layout.elements.extend(inner.elements.into_iter().map(moved));
        }
        Ok(layout)
    }
}

/// Reads the classes of the metadata.
struct Reader<'p, 'a> {
    pickle: &'p Pickle<'a>,
}

impl<'p> Reader<'p, '_> {
    /// The attributes of an object of the class `module.name`.
    fn state(&self, value: Ref, module: &str, name: &str) -> Option<Ref> {
        match self.pickle.value(value) {
            Value::Object(object) if self.pickle.is(object.class, module, name) => Some(object.state),
            _ => None,
        }
    }

    fn pairs(&self, dict: Ref) -> Result<impl Iterator<Item = (Ref, Ref)> + 'p, ParseError> {
        match self.pickle.value(dict) {
            Value::Dict(members) => Ok(members.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            _ => Err(ParseError::Metadata("metadata lacks a part")),
        }
    }

    /// A `torch.Size`, or a plain tuple.
    fn size(&self, value: Ref) -> Option<Box<[u64]>> {
        let members = match self.pickle.value(value) {
            Value::Object(object) if self.pickle.is(object.class, "torch", "Size") => {
                self.pickle.sequence(*self.pickle.sequence(object.args)?.first()?)?
            }
            Value::Sequence(members) => members,
            _ => return None,
        };
        if members.len() > RANK_MAX {
            return None;
        }
        members.iter().map(|&member| self.pickle.number(member)).collect()
    }

    /// A `TensorStorageMetadata`; none for anything that is no tensor.
    fn tensor(&self, name: &str, value: Ref) -> Result<Option<Whole>, ParseError> {
        let Some(state) = self.state(value, CLASSES, "TensorStorageMetadata") else { return Ok(None) };
        let refuse = || ParseError::Metadata("a tensor is not described as one");
        let (pickle, field) = (self.pickle, |key| self.pickle.entry(state, key).ok_or_else(refuse));
        if name.len() > TENSOR_NAME_MAX {
            return Err(ParseError::Metadata("a name is too long"));
        }
        let shape = self.size(field("size")?).ok_or_else(refuse)?;
        // The properties' state is a tuple that begins with the type.
        let properties = self.state(field("properties")?, CLASSES, "TensorProperties");
        let dtype = properties.and_then(|state| pickle.sequence(state)?.first().copied());
        let dtype = match dtype.map(|dtype| pickle.value(dtype)) {
            Some(Value::Global { module: "torch", name }) => dtypes::by_name(name),
            _ => None,
        };
        let mut boxes = Vec::new();
        for &chunk in pickle.sequence(field("chunks")?).ok_or_else(refuse)? {
            let chunk = self.state(chunk, CLASSES, "ChunkStorageMetadata").ok_or_else(refuse)?;
            let read = |key| pickle.entry(chunk, key).and_then(|value| self.size(value));
            let (Some(offsets), Some(sizes)) = (read("offsets"), read("sizes")) else { return Err(refuse()) };
            if !fits(&shape, &offsets, &sizes) {
                return Err(ParseError::Metadata("a part does not lie in its tensor"));
            }
            boxes.push(Region { offsets, sizes });
        }
        boxes.sort_unstable();
        Ok(Some(Whole { name: name.into(), dtype, shape, boxes }))
    }

    /// A `MetadataIndex` and the `_StorageInfo` that it stands for: the file, and where in it the part lies. None for what
    /// is no tensor, or was transformed.
    fn item(
        &self,
        index: Ref,
        place: Ref,
        names: &HashMap<&str, usize>,
        tensors: &[Whole],
    ) -> Result<Option<(&'p str, Item)>, ParseError> {
        let refuse = || ParseError::Metadata("a part is not described as one");
        let pickle = self.pickle;
        let index = self.state(index, CLASSES, "MetadataIndex").ok_or_else(refuse)?;
        let name = pickle.entry(index, "fqn").and_then(|name| pickle.text(name)).ok_or_else(refuse)?;
        let Some(&tensor) = names.get(name) else { return Ok(None) };
        // Other writers' places are of other classes.
        let Some(place) = self.state(place, STORAGE, "_StorageInfo") else { return Ok(None) };
        let transformed = pickle.entry(place, "transform_descriptors").and_then(|list| pickle.sequence(list));
        if transformed.is_some_and(|list| !list.is_empty()) {
            return Ok(None);
        }
        let offsets = pickle.entry(index, "offset").and_then(|offset| self.size(offset));
        let file = pickle.entry(place, "relative_path").and_then(|path| pickle.text(path));
        let number = |key| pickle.entry(place, key).and_then(|value| pickle.number(value));
        let (Some(file), Some(start), Some(len)) = (file, number("offset"), number("length")) else {
            return Err(refuse());
        };
        let boxes = tensors.get(tensor).map(|whole| whole.boxes.as_slice()).unwrap_or_default();
        let part = match offsets {
            Some(offsets) => boxes.binary_search_by(|one| one.offsets.cmp(&offsets)).ok(),
            // A tensor in one piece may be indexed by its name alone.
            None => (boxes.len() == 1).then_some(0),
        };
        let end = start.checked_add(len).ok_or_else(refuse)?;
        Ok(Some((file, Item { tensor, part: part.ok_or_else(refuse)?, at: start..end })))
    }
}

/// Whether a box of `sizes` at `offsets` lies in a tensor of `shape`.
fn fits(shape: &[u64], offsets: &[u64], sizes: &[u64]) -> bool {
    let ends = offsets.iter().zip(sizes).map(|(offset, size)| offset.checked_add(*size));
    offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && shape.iter().zip(ends).all(|(dim, end)| end.is_some_and(|end| end <= *dim))
}
