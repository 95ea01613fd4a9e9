//! The safetensors header: eight bytes of length, then JSON with the place of each tensor.
//!
//! Facts: <https://github.com/huggingface/safetensors>, README, "Format" (whose `offsets` is spelt `data_offsets` in every file).
//! After an error the caller treats the file as plain bytes, so this parser is only as strict as chunking and restoring single
//! tensors need: gaps between tensors, bytes after the last one and unknown element types are accepted. Time and memory for a
//! hostile header are proportional to its length: other entries are skipped, and [`TENSORS_MAX`] and [`RANK_MAX`] limit the
//! result.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use thiserror::Error;

use super::{Dtype, Layout, Tensor};
use crate::limits::{RANK_MAX, SAFETENSORS_HEADER_MAX, TENSORS_MAX};

const LENGTH_LEN: usize = 8;
/// The one key that is no tensor: free-form text.
const METADATA: &str = "__metadata__";

/// Reason why a header is not that of a safetensors file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The first bytes are not those of a safetensors file of this length.
    #[error("not a safetensors file")]
    NotSafetensors,
    /// The caller passed less than the complete header.
    #[error("header is cut short: {got} of {expected} bytes")]
    Short {
        /// Bytes in the header, its length field included.
        expected: u64,
        /// Bytes passed.
        got: u64,
    },
    /// The header is not JSON of the right form.
    #[error("header is malformed")]
    Json(#[from] serde_json::Error),
    /// More tensors than [`TENSORS_MAX`].
    #[error("more than {TENSORS_MAX} tensors")]
    TooManyTensors,
    /// The same key twice.
    #[error("two entries are called {name:?}")]
    Duplicate {
        /// Their name.
        name: String,
    },
    /// A tensor's offsets are backwards or outside the file.
    #[error("tensor {name:?} lies at {start}..{end} of a buffer of {buffer_len} bytes")]
    OutOfRange {
        /// Name.
        name: String,
        /// First offset, as written: from the header's end.
        start: u64,
        /// Last offset, as written.
        end: u64,
        /// Bytes in the file after the header.
        buffer_len: u64,
    },
    /// A tensor's length does not match its type and shape.
    #[error("tensor {name:?} of {dtype} {shape:?} takes {got} bytes")]
    Mismatch {
        /// Name.
        name: String,
        /// Type.
        dtype: Dtype,
        /// Shape.
        shape: Box<[u64]>,
        /// Bytes between its offsets.
        got: u64,
    },
    /// Two tensors claim the same bytes.
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The one that starts within it.
        second: String,
    },
}

/// Length of the header for [`parse`], from the first 9 bytes (or more) of a file of `file_len` bytes; none if it cannot be a
/// safetensors file. The name of the file does not matter.
#[must_use]
pub fn header_len(first: &[u8], file_len: u64) -> Option<u64> {
    let (length, rest) = first.split_first_chunk::<LENGTH_LEN>()?;
    let json_len = u64::from_le_bytes(*length);
    // The shortest header is `{}`. The format asks for `{` as the very first byte of the JSON.
    if !(2..=SAFETENSORS_HEADER_MAX).contains(&json_len) || rest.first() != Some(&b'{') {
        return None;
    }
    let header_len = json_len + LENGTH_LEN as u64;
    (header_len <= file_len).then_some(header_len)
}

/// Reads `header`, the first bytes of a file of `file_len` bytes: as many as [`header_len`] said, or more.
///
/// # Errors
/// The header is malformed, or a tensor is outside of the file, has a wrong length, overlaps another, or has the same name.
pub fn parse(header: &[u8], file_len: u64) -> Result<Layout, ParseError> {
    let header_len = header_len(header, file_len).ok_or(ParseError::NotSafetensors)?;
    let json = usize::try_from(header_len).ok().and_then(|end| header.get(LENGTH_LEN..end));
    let json = json.ok_or(ParseError::Short { expected: header_len, got: header.len() as u64 })?;

    let (mut tensors, mut refusal) = (Vec::new(), None);
    let collect = Collect { header_len, file_len, tensors: &mut tensors, refusal: &mut refusal };
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let read = collect.deserialize(&mut deserializer).and_then(|()| deserializer.end());
    match (refusal, read) {
        (Some(refusal), _) => return Err(refusal),
        (None, read) => read?,
    }
    refuse_duplicates(&tensors)?;
    tensors.sort_unstable_by(|a, b| (a.start, a.end, &a.name).cmp(&(b.start, b.end, &b.name)));
    refuse_overlaps(&tensors)?;
    Ok(Layout::new(tensors, Vec::new()))
}

fn refuse_duplicates(tensors: &[Tensor]) -> Result<(), ParseError> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ParseError::Duplicate { name: pair[0].to_owned() }),
        None => Ok(()),
    }
}

/// Takes `tensors` sorted by start, then end.
fn refuse_overlaps(tensors: &[Tensor]) -> Result<(), ParseError> {
    match tensors.windows(2).find(|pair| pair[1].start < pair[0].end) {
        Some(pair) => Err(ParseError::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() }),
        None => Ok(()),
    }
}

/// A tensor as the header writes it; fields that are not listed are skipped, as the format's own reader does.
#[derive(Deserialize)]
struct HeaderEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// Reads the header's one object into `tensors`.
struct Collect<'a> {
    header_len: u64,
    file_len: u64,
    tensors: &'a mut Vec<Tensor>,
    /// Reason why parsing stopped, if it was no JSON error.
    refusal: &'a mut Option<ParseError>,
}

impl Collect<'_> {
    /// Checks one entry by itself.
    fn tensor(&self, name: String, entry: HeaderEntry<'_>) -> Result<Tensor, ParseError> {
        let ((start, end), buffer_len) = (entry.data_offsets, self.file_len - self.header_len);
        if start > end || end > buffer_len {
            return Err(ParseError::OutOfRange { name, start, end, buffer_len });
        }
        let (dtype, shape) = (Dtype::from_word(&entry.dtype), entry.shape.0);
        if dtype.bits().is_some() && dtype.tensor_len(&shape) != Some(end - start) {
            return Err(ParseError::Mismatch { name, dtype, shape, got: end - start });
        }
        let (start, end) = (self.header_len + start, self.header_len + end);
        Ok(Tensor { name, dtype, shape, start, end, part: None })
    }
}

impl<'de> DeserializeSeed<'de> for Collect<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Collect<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            let taken = if name == METADATA {
                map.next_value::<IgnoredAny>()?;
                let again = std::mem::replace(&mut metadata_seen, true);
                if again { Err(ParseError::Duplicate { name }) } else { Ok(()) }
            } else if self.tensors.len() == TENSORS_MAX {
                Err(ParseError::TooManyTensors)
            } else {
                let entry = map.next_value()?;
                self.tensor(name, entry).map(|tensor| self.tensors.push(tensor))
            };
            if let Err(refusal) = taken {
                *self.refusal = Some(refusal);
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

/// Dimensions, at most [`RANK_MAX`] of them.
struct Shape(Box<[u64]>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {RANK_MAX} dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
        let mut dims = Vec::new();
        while let Some(dim) = seq.next_element()? {
            if dims.len() == RANK_MAX {
                return Err(A::Error::invalid_length(RANK_MAX + 1, &self));
            }
            dims.push(dim);
        }
        Ok(Shape(dims.into()))
    }
}
