//! Units of work: pieces of files that one worker reads, splits and hashes independently.

use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;

use super::CutChoice;
use super::contents::Contents;
use super::detect::Formats;
use super::source::{SMALL, open};
use crate::checkpoint::{Layout, Tensor};
use crate::chunker::{Cut, fixed, tensor};
use crate::error::Result;
use crate::format::{TensorEntry, TensorPart};
use crate::tree::{Opened, Walk};

/// Files in one unit, at most.
const BATCH: usize = 512;

/// Unit of work for one worker.
#[derive(Debug, Default)]
pub(super) struct Unit {
    /// Parts, each with its own range of the unit's buffer.
    pub(super) parts: Vec<FilePart>,
    /// Bytes of all parts.
    pub(super) len: usize,
}

/// Range of one file.
#[derive(Debug)]
pub(super) struct FilePart {
    /// Index of the file.
    pub(super) file: usize,
    /// The open file; a small one is opened by the worker.
    pub(super) open: Option<Arc<Opened>>,
    /// Range of the file.
    pub(super) range: Range<u64>,
    /// Chunk boundaries.
    pub(super) cuts: Cuts,
    /// The tensors of a long file.
    pub(super) layout: Option<Arc<Layout>>,
    /// Description of the file, once, with its first part.
    pub(super) details: Option<FileDetails>,
}

/// Chunk boundaries of a part.
#[derive(Debug)]
pub(super) enum Cuts {
    /// At these offsets in the file; the last one is the part's end.
    Known(Vec<u64>),
    /// Unknown: the part is a whole file that must be parsed first.
    Look,
    /// Content-defined: the part is a window of a longer extent.
    Window {
        /// True for the first window of the extent.
        first: bool,
        /// True for the last window of the extent.
        last: bool,
    },
}

/// Properties of a file besides its chunks.
#[derive(Debug)]
pub(super) struct FileDetails {
    /// Cutting.
    pub(super) cut: Cut,
    /// Its tensors, if any.
    pub(super) tensors: Vec<TensorEntry>,
}

/// Divides the files `to_read`, in order, into units of about `window` bytes; stops if `send` returns false.
pub(super) fn make_units(
    walk: &Walk,
    to_read: &[usize],
    (formats, contents): (&Formats, &Contents),
    window: u64,
    mut send: impl FnMut(Unit) -> bool,
) -> Result<()> {
    let mut batch = Unit::default();
    for &file in to_read {
        let Some(found) = walk.found.get(file) else { continue };
        let size = found.stat.size;
        if size <= SMALL {
            batch.add(FilePart { file, open: None, range: 0..size, cuts: Cuts::Look, layout: None, details: None });
            if (batch.len as u64 >= window || batch.parts.len() >= BATCH) && !send(std::mem::take(&mut batch)) {
                return Ok(());
            }
            continue;
        }
        if !batch.parts.is_empty() && !send(std::mem::take(&mut batch)) {
            return Ok(());
        }
        if !long_file(walk, file, (formats.choice, contents), window, &mut send)? {
            return Ok(());
        }
    }
    if !batch.parts.is_empty() {
        send(batch);
    }
    Ok(())
}

/// A file with tensors is cut by content if its length is more than this many times what it holds, and `HOLLOW_MIN`.
const HOLLOW: u64 = 64;
const HOLLOW_MIN: u64 = 16 << 20;

/// True if a file of `size` bytes is almost nothing but holes.
fn is_hollow(file: &Opened, size: u64) -> Result<bool> {
    let mut left = (size / HOLLOW).saturating_sub(HOLLOW_MIN);
    for extent in file.each_extent(size) {
        let extent = extent?;
        left = left.saturating_sub(extent.end - extent.start);
        if left == 0 {
            return Ok(false);
        }
    }
    Ok(left > 0)
}

/// Divides one long file into units; false if the receiver is gone.
fn long_file(
    walk: &Walk,
    file: usize,
    (choice, contents): (CutChoice, &Contents),
    window: u64,
    send: &mut impl FnMut(Unit) -> bool,
) -> Result<bool> {
    let Some(found) = walk.found.get(file) else { return Ok(true) };
    let open = Arc::new(open(walk, found)?);
    let size = found.stat.size;
    let layout = contents.layout(file);
    let mut details = details(choice, layout.as_deref());
    let spans = layout.as_deref().map(Layout::spans).unwrap_or_default();
    if details.cut == Cut::Tensor && is_hollow(&open, size)? {
        // Cutting goes through holes, too, and this file is almost nothing else.
        details.cut = Cut::Content;
    }
    let cut = details.cut;
    let mut details = Some(details);
    let mut of_tensors = tensor::cuts(&spans, size).peekable();
    for extent in open.each_extent(size) {
        let extent = extent?;
        let from = extent.start;
        let parts: Box<dyn Iterator<Item = (Range<u64>, Cuts)>> = match cut {
            Cut::Content => Box::new(windows(extent, window)),
            Cut::Fixed => Box::new(grouped(fixed::cuts_after(size, from).peekable(), extent, window)),
            Cut::Tensor => Box::new(grouped(&mut of_tensors, extent, window)),
        };
        for (range, cuts) in parts {
            let mut unit = Unit::default();
            let (open, layout) = (Some(Arc::clone(&open)), layout.clone());
            unit.add(FilePart { file, open, range, cuts, layout, details: details.take() });
            if !send(unit) {
                return Ok(false);
            }
        }
    }
    if let Some(details) = details {
        // The file is only a hole, but its description is still needed.
        let mut unit = Unit::default();
        let (open, cuts) = (Some(open), Cuts::Known(Vec::new()));
        unit.add(FilePart { file, open, range: size..size, cuts, layout: None, details: Some(details) });
        return Ok(send(unit));
    }
    Ok(true)
}

impl Unit {
    fn add(&mut self, part: FilePart) {
        self.len += usize::try_from(part.range.end - part.range.start).unwrap_or(usize::MAX);
        self.parts.push(part);
    }
}

/// Description of a file, given its layout.
pub(super) fn details(choice: CutChoice, layout: Option<&Layout>) -> FileDetails {
    let entry = |tensor: &Tensor| TensorEntry {
        name: tensor.name.clone(),
        dtype: tensor.dtype.word().to_owned(),
        shape: tensor.shape.to_vec(),
        range: tensor.start..tensor.end,
        part: tensor
            .part
            .as_ref()
            .map(|part| TensorPart { shape: part.shape.to_vec(), offsets: part.offsets.to_vec() }),
    };
    let tensors = layout.map(|layout| layout.tensors.iter().map(entry).collect()).unwrap_or_default();
    let cut = match (choice, layout) {
        (CutChoice::Fixed, _) => Cut::Fixed,
        (CutChoice::Auto | CutChoice::Tensor, Some(_)) => Cut::Tensor,
        _ => Cut::Content,
    };
    FileDetails { cut, tensors }
}

/// Chunk ends, of which the next one can be looked at.
trait Ends {
    fn peek(&mut self) -> Option<u64>;
    fn pass(&mut self);
}

impl<I: Iterator<Item = u64>> Ends for Peekable<I> {
    fn peek(&mut self) -> Option<u64> {
        Self::peek(self).copied()
    }

    fn pass(&mut self) {
        self.next();
    }
}

impl<E: Ends> Ends for &mut E {
    fn peek(&mut self) -> Option<u64> {
        (**self).peek()
    }

    fn pass(&mut self) {
        (**self).pass();
    }
}

/// Groups chunk ends within `extent` into parts of about `window` bytes. The ends before it are passed over.
fn grouped(mut ends: impl Ends, extent: Range<u64>, window: u64) -> impl Iterator<Item = (Range<u64>, Cuts)> {
    let mut start = extent.start;
    std::iter::from_fn(move || {
        if start >= extent.end {
            return None;
        }
        while ends.peek().is_some_and(|end| end <= start) {
            ends.pass();
        }
        let mut group = Vec::new();
        loop {
            let inside = ends.peek().filter(|&end| end < extent.end);
            let end = inside.unwrap_or(extent.end);
            if !group.is_empty() && end - start > window {
                break;
            }
            group.push(end);
            if inside.is_none() {
                break;
            }
            ends.pass();
        }
        let end = *group.last()?;
        let range = start..end;
        start = end;
        Some((range, Cuts::Known(group)))
    })
}

fn windows(extent: Range<u64>, window: u64) -> impl Iterator<Item = (Range<u64>, Cuts)> {
    let mut at = extent.start;
    std::iter::from_fn(move || {
        let range = at..(at + window).min(extent.end);
        let (first, last) = (range.start == extent.start, range.end == extent.end);
        at = range.end;
        (!range.is_empty()).then_some((range, Cuts::Window { first, last }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(cuts: &[u64], extent: Range<u64>, window: u64) -> Vec<(Range<u64>, Vec<u64>)> {
        let ends = cuts.iter().copied().peekable();
        let known = |(range, cuts)| match cuts {
            Cuts::Known(ends) => (range, ends),
            _ => panic!("of another kind"),
        };
        grouped(ends, extent, window).map(known).collect()
    }

    #[test]
    fn ends_within_an_extent_are_grouped_by_the_window() {
        assert_eq!(parts(&[2, 4, 6, 8, 10], 0..10, 4), [(0..4, vec![2, 4]), (4..8, vec![6, 8]), (8..10, vec![10])]);
        assert_eq!(parts(&[2, 4, 6, 8, 10], 3..7, 100), [(3..7, vec![4, 6, 7])]);
        assert_eq!(parts(&[50, 100], 0..100, 4), [(0..50, vec![50]), (50..100, vec![100])], "longer than the window");
        assert_eq!(parts(&[], 5..9, 4), [(5..9, vec![9])]);
        assert_eq!(parts(&[3], 5..5, 4), []);
    }

    #[test]
    fn the_ends_of_tensors_go_on_from_extent_to_extent() {
        let mut ends = [2, 4, 6, 8, 10].into_iter().peekable();
        assert_eq!(grouped(&mut ends, 1..4, 100).count(), 1);
        assert_eq!(grouped(&mut ends, 7..9, 100).next().map(|(range, _)| range), Some(7..9));
        assert_eq!(ends.next(), Some(10));
    }
}
