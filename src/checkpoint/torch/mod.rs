//! Torch files (`.pt`, `.pth`, `.bin`): a zip archive of one pickle, which describes the content, and a record for each storage.
//!
//! Facts: <https://github.com/pytorch/pytorch/blob/main/torch/serialization.py> (`_save`) and what torch 2.15 writes. Files older
//! than torch 1.6 are a sequence of pickles, not an archive: they count as plain bytes. Nothing is executed: [`super::pickle`]
//! reads the pickle, and only the functions that rebuild tensors are recognized, by name.
//!
//! Listed: each tensor that is row-major in its storage, under its path through dicts, lists and objects, separated by
//! dots (the tensor that is a whole file is called [`ROOT_NAME`]). So all tensors that share a storage are listed, and may
//! overlap. A storage, or a part of one, without a listed tensor is a range of elements without a name, for example that of a
//! transposed tensor, or of one with an unknown type.

mod contents;
pub(super) mod dtypes;
mod zip;

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use thiserror::Error;

use self::contents::{Contents, Stored, TensorRecord};
use self::zip::Archive;
use super::pickle::{self, PICKLE_LEN_MAX, Pickle};
use super::{Dtype, Elements, Layout, ReadAt, ReserveMemory, Tensor};
use crate::limits::{TENSOR_NAME_MAX, TENSORS_MAX};

/// Name of the tensor that is the whole of a file.
pub const ROOT_NAME: &str = "tensor";
/// Maximum nesting depth of dicts, lists and objects.
pub const DEPTH_MAX: u32 = 256;
/// Maximum bytes of all names.
pub const NAMES_LEN_MAX: usize = 16 << 20;

/// Reason why a file is not a torch file that this version reads.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ParseError {
    /// No archive, or not one that torch wrote.
    #[error("not a torch file")]
    NotTorch,
    /// The file could not be read.
    #[error("read the file")]
    Read(#[from] io::Error),
    /// The structures of the archive are invalid.
    #[error("{what}: the archive at byte {at}")]
    Zip {
        /// Fault.
        what: &'static str,
        /// Offset in the file.
        at: u64,
    },
    /// Numbers are big-endian.
    #[error("written by a big-endian machine")]
    BigEndian,
    /// The pickle is too long, or not one.
    #[error("the pickle cannot be read")]
    Pickle(#[from] pickle::ParseError),
    /// A storage has no record, or one that is too short, or is described in two ways.
    #[error("storage {key:?} {what}")]
    Storage {
        /// Key: its record's name.
        key: String,
        /// Fault.
        what: &'static str,
    },
    /// A tensor is outside of its storage.
    #[error("tensor {name:?} lies outside its storage")]
    OutOfRange {
        /// Name.
        name: String,
    },
    /// More than [`TENSORS_MAX`] tensors, or a name beyond [`TENSOR_NAME_MAX`], or names beyond [`NAMES_LEN_MAX`].
    #[error("more than {TENSORS_MAX} tensors, or names longer than {TENSOR_NAME_MAX} or {NAMES_LEN_MAX} bytes in all")]
    TooMany,
    /// No memory is left for what it has.
    #[error("it takes too much memory (--memory)")]
    Memory,
    /// More than [`DEPTH_MAX`] levels.
    #[error("more than {DEPTH_MAX} containers within each other")]
    TooDeep,
}

/// True if a file that begins with `first` can be an archive.
#[must_use]
pub fn may_be(first: &[u8]) -> bool {
    first.starts_with(b"PK\x03\x04")
}

/// Reads the tensors of a torch file of `len` bytes: its directory at the end, its pickle and the header of each record.
///
/// # Errors
/// No archive with one `data.pkl`; damaged or inconsistent; beyond the limits, or the memory that `reserve` has.
pub fn parse(read: ReadAt<'_>, len: u64, reserve: ReserveMemory<'_>) -> Result<Layout, ParseError> {
    let archive = Archive::open(read, len, reserve)?.ok_or(ParseError::NotTorch)?;
    let folder = archive.folder_with(b"data.pkl").ok_or(ParseError::NotTorch)?.to_vec();
    let record = |name: &str| [&folder, &b"/"[..], name.as_bytes()].concat();
    if let Some(order) = archive.locate(read, &record("byteorder"))? {
        check_order(&bytes_at(read, &order, 16)?)?;
    }
    let pickle = archive.locate(read, &record("data.pkl"))?.ok_or(ParseError::NotTorch)?;
    if !reserve(pickle.end - pickle.start) {
        return Err(ParseError::Memory);
    }
    let pickle = bytes_at(read, &pickle, PICKLE_LEN_MAX)?;
    let pickle = Pickle::parse(&pickle, reserve)?;
    let Contents { mut tensors, storages } = contents::read(&pickle, reserve)?;
    let mut places = Vec::with_capacity(storages.len());
    for storage in &storages {
        let refuse = |what| ParseError::Storage { key: storage.key.to_owned(), what };
        let name = record(&format!("data/{}", storage.key));
        let place = archive.locate(read, &name)?.ok_or_else(|| refuse("has no record"))?;
        if storage.len.is_some_and(|len| len > place.end - place.start) {
            return Err(refuse("is longer than its record"));
        }
        places.push(place);
    }
    refuse_overlaps(&storages, &places)?;
    // Two paths may have the same text: the first keeps the name.
    let mut names = HashSet::with_capacity(tensors.len());
    tensors.retain(|found| names.insert(found.name.clone()));
    drop(names);
    layout(tensors, &storages, &places)
}

fn check_order(order: &[u8]) -> Result<(), ParseError> {
    match order {
        b"little" => Ok(()),
        b"big" => Err(ParseError::BigEndian),
        _ => Err(ParseError::Zip { what: "the byte order is unknown", at: 0 }),
    }
}

fn bytes_at(read: ReadAt<'_>, place: &Range<u64>, most: u64) -> Result<Vec<u8>, ParseError> {
    let len = place.end - place.start;
    if len > most {
        return Err(ParseError::Zip { what: "a record is too long", at: place.start });
    }
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
    read(place.start, &mut bytes)?;
    Ok(bytes)
}

fn refuse_overlaps(storages: &[Stored<'_>], places: &[Range<u64>]) -> Result<(), ParseError> {
    let mut sorted: Vec<(&Range<u64>, &Stored<'_>)> = places.iter().zip(storages).collect();
    sorted.sort_unstable_by_key(|(place, _)| (place.start, place.end));
    match sorted.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => Err(ParseError::Storage { key: pair[1].1.key.to_owned(), what: "overlaps another" }),
        None => Ok(()),
    }
}

/// Places the tensors in their storages; the rest of a storage is elements without a name.
fn layout(found: Vec<TensorRecord>, storages: &[Stored<'_>], places: &[Range<u64>]) -> Result<Layout, ParseError> {
    let mut tensors = Vec::with_capacity(found.len());
    for found in found {
        let Some(place) = places.get(found.storage) else { continue };
        if let Some(tensor) = placed(found, place)? {
            tensors.push(tensor);
        }
    }
    tensors.sort_unstable_by_key(|tensor: &Tensor| tensor.start);
    let mut stretches: Vec<(&Range<u64>, &Stored<'_>)> = places.iter().zip(storages).collect();
    stretches.sort_unstable_by_key(|(place, _)| place.start);
    let (mut others, mut inside) = (Vec::new(), tensors.iter().peekable());
    for (place, storage) in stretches {
        let mut leave = |start, end| {
            let dtype = storage.elements.clone().unwrap_or_else(|| Dtype::Other("".into()));
            others.push(Elements { start, end, dtype, row: 0 });
        };
        let mut at = place.start;
        while let Some(tensor) = inside.next_if(|tensor| tensor.start < place.end) {
            if tensor.start < tensor.end {
                if tensor.start > at {
                    leave(at, tensor.start);
                }
                at = at.max(tensor.end);
            }
        }
        if at < place.end {
            leave(at, place.end);
        }
    }
    Ok(Layout::new(tensors, others))
}

/// Place of a tensor in the file; none if it is not row-major or of an unknown type.
fn placed(found: TensorRecord, place: &Range<u64>) -> Result<Option<Tensor>, ParseError> {
    let TensorRecord { name, dtype, shape, offset, row_major, .. } = found;
    let Some(dtype) = dtype.filter(|_| row_major) else { return Ok(None) };
    let start = dtype.whole_bytes().and_then(|bytes| offset.checked_mul(bytes.into()));
    let start = start.and_then(|start| start.checked_add(place.start));
    let range = dtype.tensor_len(&shape).zip(start).and_then(|(len, start)| Some(start..start.checked_add(len)?));
    match range {
        Some(range) if range.end <= place.end => {
            Ok(Some(Tensor { name, dtype, shape, start: range.start, end: range.end, part: None }))
        }
        // An empty tensor may have any offset.
        _ if shape.contains(&0) => {
            Ok(Some(Tensor { name, dtype, shape, start: place.start, end: place.start, part: None }))
        }
        _ => Err(ParseError::OutOfRange { name }),
    }
}

#[cfg(test)]
pub(super) mod tests;
