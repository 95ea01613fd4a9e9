//! Into units of work: pieces of files that one worker reads, cuts and hashes on its own.

use std::ops::Range;
use std::sync::Arc;

use super::CutChoice;
use super::contents::{Contents, SMALL};
use super::detect::Formats;
use crate::checkpoint::{Layout, Tensor};
use crate::chunker::{Cut, fixed, tensor};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{TensorEntry, TensorPart};
use crate::tree::{Opened, Walk, WalkEntry};

/// Files in one unit, at most.
const BATCH: usize = 512;

/// Work of one worker in one go.
#[derive(Debug, Default)]
pub(super) struct Unit {
    /// Its parts, each with a place of its own in the unit's buffer.
    pub(super) parts: Vec<FilePart>,
    /// Bytes of all parts.
    pub(super) len: usize,
}

/// A stretch of one file.
#[derive(Debug)]
pub(super) struct FilePart {
    /// Index of the file.
    pub(super) file: usize,
    /// The open file; a small one is opened by the worker.
    pub(super) open: Option<Arc<Opened>>,
    /// Range of the file.
    pub(super) range: Range<u64>,
    /// Cuts.
    pub(super) cuts: Cuts,
    /// The tensors of a long file.
    pub(super) layout: Option<Arc<Layout>>,
    /// Description of the file, once, with its first part.
    pub(super) about: Option<About>,
}

/// Cuts of a part.
#[derive(Debug)]
pub(super) enum Cuts {
    /// At these offsets in the file; the last is the part's end.
    Known(Vec<u64>),
    /// The part is a whole file: look at it.
    Look,
    /// By content; the part is a window of a longer stretch, whose first or last it may be.
    Window {
        /// Nothing of the stretch comes before.
        first: bool,
        /// Nothing of the stretch comes after.
        last: bool,
    },
}

/// Record of a file besides its chunks.
#[derive(Debug)]
pub(super) struct About {
    /// Cutting.
    pub(super) cut: Cut,
    /// Its tensors, if any.
    pub(super) tensors: Vec<TensorEntry>,
}

/// Makes units of the files `to_read`, in order, each of about `window` bytes; stops early if `send` says so.
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
            batch.add(FilePart { file, open: None, range: 0..size, cuts: Cuts::Look, layout: None, about: None });
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

/// The units of one long file; false if nobody takes them any more.
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
    let about = about(choice, layout.as_deref());
    let spans = layout.as_deref().map(Layout::spans).unwrap_or_default();
    let stretches = open.extents(size)?;
    let mut about = Some(about);
    let cut = about.as_ref().map_or(Cut::Content, |about| about.cut);
    for stretch in stretches {
        let parts: Box<dyn Iterator<Item = (Range<u64>, Cuts)>> = match cut {
            Cut::Content => Box::new(windows(stretch, window)),
            Cut::Fixed => Box::new(grouped(fixed::cuts(size), stretch, window)),
            Cut::Tensor => Box::new(grouped(tensor::cuts(&spans, size), stretch, window)),
        };
        for (range, cuts) in parts {
            let mut unit = Unit::default();
            let (open, layout) = (Some(Arc::clone(&open)), layout.clone());
            unit.add(FilePart { file, open, range, cuts, layout, about: about.take() });
            if !send(unit) {
                return Ok(false);
            }
        }
    }
    if let Some(about) = about {
        // Nothing but a hole: the file is described all the same.
        let mut unit = Unit::default();
        let (open, cuts) = (Some(open), Cuts::Known(Vec::new()));
        unit.add(FilePart { file, open, range: size..size, cuts, layout: None, about: Some(about) });
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
pub(super) fn about(choice: CutChoice, layout: Option<&Layout>) -> About {
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
    About { cut, tensors }
}

/// Groups chunk ends within `stretch` into parts of about `window` bytes.
fn grouped(
    cuts: impl Iterator<Item = u64>,
    stretch: Range<u64>,
    window: u64,
) -> impl Iterator<Item = (Range<u64>, Cuts)> {
    let inside = stretch.clone();
    let mut ends = cuts
        .skip_while(move |&end| end <= inside.start)
        .take_while(move |&end| end < inside.end)
        .chain(std::iter::once(stretch.end))
        .peekable();
    let mut start = stretch.start;
    std::iter::from_fn(move || {
        let mut group = vec![ends.next()?];
        while let Some(end) = ends.next_if(|&end| end - start <= window) {
            group.push(end);
        }
        let end = *group.last()?;
        let range = start..end;
        start = end;
        Some((range, Cuts::Known(group)))
    })
}

fn windows(stretch: Range<u64>, window: u64) -> impl Iterator<Item = (Range<u64>, Cuts)> {
    let mut at = stretch.start;
    std::iter::from_fn(move || {
        let range = at..(at + window).min(stretch.end);
        let (first, last) = (range.start == stretch.start, range.end == stretch.end);
        at = range.end;
        (!range.is_empty()).then_some((range, Cuts::Window { first, last }))
    })
}

/// Opens a file that was found, if it is still the one.
pub(super) fn open(walk: &Walk, found: &WalkEntry) -> Result<Opened> {
    walk.open(found).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::Conflict => changed(found).source(error),
        _ => error,
    })
}

/// Still as it was found? What was read before this answer was of one piece.
pub(super) fn check_unchanged(file: &Opened, found: &WalkEntry) -> Result<()> {
    let still = file
        .is_still(&found.stat)
        .map_err(|source| Error::other("look at a file again").at(super::shown(&found.path)).source(source))?;
    if still { Ok(()) } else { Err(changed(found)) }
}

fn changed(found: &WalkEntry) -> Error {
    Error::conflict("file changed while the tree was being saved")
        .at(super::shown(&found.path))
        .help("save again when its writer is done, or leave it out with --exclude")
}
