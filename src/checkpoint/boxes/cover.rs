//! Cover of a box: assigns its elements to the parts that have them.

use std::borrow::Cow;

use thiserror::Error;

use super::TensorBox;

/// Maximum pieces of a box, beside two for each part: 256 parts that overlap in a bad order make some hundreds.
const PIECES_MAX: usize = 1 << 12;
/// Maximum comparisons of pieces with parts.
const COMPARED_MAX: usize = 1 << 24;

/// Reason why parts do not cover a box.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Uncovered {
    /// No part has these elements.
    #[error("no part holds {0}")]
    Hole(TensorBox),
    /// The parts overlap in a too complicated way.
    #[error("its parts overlap in more ways than are followed")]
    TooManyPieces,
}

/// Splits `wanted` into boxes, each with the number of the part to read it from. Every element is in exactly one box, even if
/// parts overlap. A part that has all elements is used alone.
///
/// # Errors
/// Missing elements, or parts that overlap in a too complicated way.
pub fn cover(wanted: &TensorBox, parts: &[TensorBox]) -> Result<Vec<(usize, TensorBox)>, Uncovered> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    if let Some(at) = parts.iter().position(|part| part.contains(wanted)) {
        return Ok(vec![(at, wanted.clone())]);
    }
    let mut near: Vec<usize> = (0..parts.len()).collect();
    near.retain(|&at| parts.get(at).is_some_and(|part| part.intersection(wanted).is_some()));
    // In this order, parts that form a grid never leave more than a few pieces.
    near.sort_by_key(|&at| parts.get(at).map(|part| &part.offsets));
    let (mut taken, mut compared) = (Vec::new(), 0);
    let mut missing = vec![Cow::Borrowed(wanted)];
    for at in near {
        let Some(part) = parts.get(at) else { continue };
        compared += missing.len();
        let mut still = Vec::with_capacity(missing.len());
        for piece in missing {
            match piece.intersection(part) {
                Some(common) => {
                    still.extend(piece.without(&common).into_iter().map(Cow::Owned));
                    taken.push((at, common));
                }
                None => still.push(piece),
            }
        }
        missing = still;
        let many = missing.len() > PIECES_MAX || taken.len() > 2 * parts.len() + PIECES_MAX;
        if many || compared > COMPARED_MAX {
            return Err(Uncovered::TooManyPieces);
        }
    }
    match missing.into_iter().next() {
        Some(hole) => Err(Uncovered::Hole(hole.into_owned())),
        None => Ok(taken),
    }
}
