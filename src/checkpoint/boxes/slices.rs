//! Boxes as text in numpy's syntax: `[0:128, :, -2:]`.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::TensorBox;
use crate::error::{Error, Result};
use crate::limits::RANK_MAX;

/// Slices along each dimension, before its length is known. Further dimensions are complete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slices(Vec<Slice>);

/// Along one dimension; numbers below zero count from its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slice {
    from: Option<i128>,
    to: Option<i128>,
}

impl Slices {
    /// Slices of these ranges along the first dimensions.
    pub fn of(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let slice = |range: Range<u64>| Slice { from: Some(range.start.into()), to: Some(range.end.into()) };
        Self(ranges.into_iter().map(slice).collect())
    }

    /// Box of these slices in a tensor of `shape`. Unlike in numpy, slices out of bounds are an error, because missing elements
    /// would not be noticed.
    ///
    /// # Errors
    /// Usage, if there are too few dimensions, or one is too short.
    pub fn within(&self, shape: &[u64]) -> Result<TensorBox> {
        let refuse = || {
            Error::usage("box does not lie in the tensor").expected(format!("a box of {shape:?}")).got(self).help(
                "leave out an end to reach to the tensor's own, as in [128:]; `towline tensors NAME` lists the shapes",
            )
        };
        if self.0.len() > shape.len() {
            return Err(refuse());
        }
        let mut found = TensorBox::whole(shape);
        for (dimension, (slice, &len)) in self.0.iter().zip(shape).enumerate() {
            let bound = |given: Option<i128>, missing: u64| {
                let counted = given.map(|at| if at < 0 { i128::from(len) + at } else { at });
                let at = counted.map_or(Ok(missing), u64::try_from).ok()?;
                (at <= len).then_some(at)
            };
            let (from, to) = bound(slice.from, 0).zip(bound(slice.to, len)).ok_or_else(refuse)?;
            found.set(dimension, from, to.checked_sub(from).ok_or_else(refuse)?);
        }
        Ok(found)
    }
}

impl FromStr for Slices {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |what: &'static str| Err(Error::usage(what).expected("a box such as [0:128, :, 3:5]").got(text));
        let Some(inner) = text.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
            return refuse("a box stands in brackets");
        };
        let mut slices = Vec::new();
        for one in inner.split(',').map(str::trim) {
            let bound = |text: &str| match text.trim() {
                "" => Some(None),
                number => number.parse().ok().map(Some),
            };
            let mut bounds = one.split(':');
            let slice = match (bounds.next(), bounds.next(), bounds.next()) {
                (Some(_), None, _) => return refuse("a box takes a range of each dimension: 3:4, not 3"),
                (_, _, Some(_)) => return refuse("a box takes every element of a range, without a step"),
                (from, to, None) => bound(from.unwrap_or_default()).zip(bound(to.unwrap_or_default())),
            };
            match slice {
                Some((from, to)) => slices.push(Slice { from, to }),
                None => return refuse("a box is made of whole numbers"),
            }
        }
        if slices.len() > RANK_MAX { refuse("a box has too many dimensions") } else { Ok(Self(slices)) }
    }
}

impl fmt::Display for Slices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |bound: Option<i128>| bound.map(|at| at.to_string()).unwrap_or_default();
        let slices: Vec<_> = self.0.iter().map(|slice| format!("{}:{}", shown(slice.from), shown(slice.to))).collect();
        write!(f, "[{}]", slices.join(", "))
    }
}

/// One of equal parts of a tensor, along its first dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    index: u64,
    of: u64,
}

impl Shard {
    /// The part `index` of `of`, counted from 0.
    ///
    /// # Errors
    /// Usage, if there is no such part.
    pub fn new(index: u64, of: u64) -> Result<Self> {
        if index < of {
            return Ok(Self { index, of });
        }
        Err(Error::usage("there is no such shard").expected("I/N with I from 0 to N-1").got(format!("{index}/{of}")))
    }

    /// Part of `whole`, split like torch.chunk and FSDP do: if the rows are not divisible, the last parts are shorter or
    /// empty (<https://docs.pytorch.org/docs/stable/generated/torch.chunk.html>). A scalar is in every part.
    #[must_use]
    pub fn within(&self, mut whole: TensorBox) -> TensorBox {
        if let (Some(&start), Some(&rows)) = (whole.offsets.first(), whole.shape.first()) {
            let share = rows.div_ceil(self.of);
            let from = share.saturating_mul(self.index).min(rows);
            whole.set(0, start + from, share.min(rows - from));
        }
        whole
    }
}

impl FromStr for Shard {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        let (index, of) =
            numbers.ok_or_else(|| Error::usage("a shard is I/N").expected("two numbers such as 0/8").got(text))?;
        Self::new(index, of)
    }
}
