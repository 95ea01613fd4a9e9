//! Analysis of the files before they are saved: their boundaries, 16-bit tensors that are roundings of 32-bit tensors of the same
//! save, and tensors that make bundles.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::bundles::{Bundles, Pieces};
use super::detect::Formats;
use super::hard_links::separate;
use super::source::{SMALL, check_unchanged, open};
use crate::checkpoint::{Dtype, Layout, Tensor};
use crate::codec::rounded;
use crate::error::{Error, Result};
use crate::ops::shown;
use crate::tree::{Opened, Walk};

/// Bytes of a 32-bit tensor that are sampled at its start and in its middle, before whole chunks are compared.
const SAMPLE: u64 = 64;
/// Minimum length of such a tensor in 16 bits; chunks of shorter ones are shared with other tensors.
const MASTER_LEN_MIN: u64 = 32 << 10;

/// Layouts of long files, and the relations between their tensors.
#[derive(Debug, Default)]
pub(super) struct Contents {
    layouts: BTreeMap<usize, Arc<Layout>>,
    /// 32-bit tensors that 16-bit ones seem to be roundings of, by file and start.
    masters: HashMap<(usize, u64), (usize, u64)>,
    /// Boundaries of files with such 32-bit tensors.
    cuts: HashMap<usize, Vec<u64>>,
    bundles: Bundles,
}

/// Relations between tensors to look for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Relations {
    /// 16-bit roundings of 32-bit tensors.
    pub(super) derived: bool,
    /// Weights with their optimizer's moments.
    pub(super) bundles: bool,
}

impl Contents {
    /// Parses the files `to_read`, and finds `relations`. If they hold 16-bit floats, parses all other files as well, to find the
    /// 32-bit tensors that these round. Blocking.
    ///
    /// # Errors
    /// A file cannot be read; cancelled, if `stop` is.
    pub(super) fn parse(
        walk: &Walk,
        formats: &Formats,
        (to_read, relations): (&[usize], Relations),
        stop: &CancellationToken,
    ) -> Result<Self> {
        let go_on = || if stop.is_cancelled() { Err(Error::cancelled("interrupted")) } else { Ok(()) };
        let mut contents = Self::default();
        for &file in to_read {
            go_on()?;
            contents.parse_file(walk, formats, file)?;
        }
        if relations.bundles {
            contents.bundles = Bundles::find(walk, formats, &contents.layouts)?;
        }
        let has = |layout: &Arc<Layout>, dtype: Dtype| layout.tensors.iter().any(|tensor| tensor.dtype == dtype);
        if !relations.derived || !contents.layouts.values().any(|layout| has(layout, Dtype::BF16)) {
            return Ok(contents);
        }
        let mut all = Self { layouts: contents.layouts.clone(), ..Self::default() };
        let (files, _) = separate(walk, super::files_of(walk).collect());
        for file in files.into_iter().filter(|file| !contents.layouts.contains_key(file)) {
            go_on()?;
            if let Err(error) = all.parse_file(walk, formats, file) {
                tracing::debug!("a file that need not be read is not looked at: {error:?}");
            }
        }
        contents.find_masters(walk, formats, &all.layouts)?;
        Ok(contents)
    }

    fn parse_file(&mut self, walk: &Walk, formats: &Formats, file: usize) -> Result<()> {
        let Some(found) = walk.found.get(file).filter(|found| found.stat.size > SMALL) else { return Ok(()) };
        let opened = open(walk, found)?;
        let read = &mut |at, out: &mut [u8]| opened.read_exact_at(out, at);
        if let Some(layout) = formats.layout(file, read, found.stat.size) {
            self.layouts.insert(file, Arc::new(layout));
        }
        Ok(())
    }

    /// Layout of the long file `file`; None if its format is unknown.
    pub(super) fn layout(&self, file: usize) -> Option<Arc<Layout>> {
        self.layouts.get(&file).cloned()
    }

    /// Pairs tensors of one shape whose samples agree; tensors with the same name take precedence.
    fn find_masters(&mut self, walk: &Walk, formats: &Formats, layouts: &BTreeMap<usize, Arc<Layout>>) -> Result<()> {
        let long = |tensor: &&Tensor| tensor.end - tensor.start >= MASTER_LEN_MIN;
        let with = |dtype: Dtype| {
            layouts.iter().map(move |(&file, layout)| {
                let dtype = dtype.clone();
                (file, layout.tensors.iter().filter(move |tensor| tensor.dtype == dtype).filter(long))
            })
        };
        let shapes: HashSet<&[u64]> =
            with(Dtype::BF16).flat_map(|(_, tensors)| tensors.map(|tensor| &*tensor.shape)).collect();
        let mut samples: HashMap<SampleKey<'_>, Masters<'_>> = HashMap::new();
        for (file, tensors) in with(Dtype::F32) {
            let mut tensors = tensors.filter(|tensor| shapes.contains(&*tensor.shape)).peekable();
            if tensors.peek().is_none() {
                continue;
            }
            let Some(found) = walk.found.get(file) else { continue };
            let opened = open(walk, found)?;
            let Some(cuts) =
                layouts.get(&file).map(|layout| formats.cuts(layout, &opened, found)).transpose()?.flatten()
            else {
                continue;
            };
            for tensor in tensors {
                if let Some(sample) = sample(&opened, tensor, SAMPLE) {
                    let masters = samples.entry((&tensor.shape, rounded(&sample))).or_default();
                    masters.first.get_or_insert((file, tensor.start));
                    masters.by_name.entry(&tensor.name).or_insert((file, tensor.start));
                }
            }
            self.cuts.insert(file, cuts);
        }
        for (file, tensors) in with(Dtype::BF16).filter(|(file, _)| self.layouts.contains_key(file)) {
            let Some(found) = walk.found.get(file) else { continue };
            let opened = open(walk, found)?;
            for tensor in tensors {
                let Some(sample) = sample(&opened, tensor, SAMPLE / 2) else { continue };
                let Some(masters) = samples.get(&(&*tensor.shape, sample)) else { continue };
                if let Some(master) = masters.by_name.get(tensor.name.as_str()).copied().or(masters.first) {
                    self.masters.insert((file, tensor.start), master);
                }
            }
        }
        Ok(())
    }

    /// File and byte range of the chunk that the 16-bit floats in `range` of `file` may be the rounding of.
    pub(super) fn master(&self, file: usize, range: &Range<u64>) -> Option<(usize, Range<u64>)> {
        let tensor = self.tensor(file, range.start)?;
        let &(master, start) = self.masters.get(&(file, tensor.start))?;
        let start = start + 2 * (range.start - tensor.start);
        let wanted = start..start + 2 * (range.end - range.start);
        is_chunk(&self.cuts, master, &wanted).then_some((master, wanted))
    }

    /// Tensor of a long file that starts last at or before `at`.
    fn tensor(&self, file: usize, at: u64) -> Option<&Tensor> {
        let tensors = &self.layouts.get(&file)?.tensors;
        tensors.get(tensors.partition_point(|tensor| tensor.start <= at).checked_sub(1)?)
    }

    /// Chunks that make a bundle with the one in `range` of `file`.
    pub(super) fn bundle(&self, file: usize, range: &Range<u64>) -> Option<Pieces> {
        self.bundles.pieces(file, self.tensor(file, range.start)?, range)
    }

    /// True if some tensors make bundles.
    pub(super) fn has_bundles(&self) -> bool {
        !self.bundles.is_empty()
    }
}

/// True if `range` of `file` is one chunk, by the boundaries of some files.
pub(super) fn is_chunk(cuts: &HashMap<usize, Vec<u64>>, file: usize, range: &Range<u64>) -> bool {
    let Some(cuts) = cuts.get(&file) else { return false };
    let Ok(end) = cuts.binary_search(&range.end) else { return false };
    let before = end.checked_sub(1).and_then(|before| cuts.get(before)).copied().unwrap_or(0);
    before == range.start
}

/// Tensors of one shape and sample, each by its file and start. There may be very many: a short file can list a tensor very often.
#[derive(Default)]
struct Masters<'a> {
    first: Option<(usize, u64)>,
    /// The first of each name.
    by_name: HashMap<&'a str, (usize, u64)>,
}

/// Shape of a tensor, and a sample of it in 16 bits.
type SampleKey<'a> = (&'a [u64], Vec<u8>);

/// Reads `len` bytes at the start of a tensor, and as many in its middle.
fn sample(file: &Opened, tensor: &Tensor, len: u64) -> Option<Vec<u8>> {
    let half = usize::try_from(len).ok()?;
    let mut bytes = vec![0; 2 * half];
    let (first, second) = bytes.split_at_mut(half);
    let middle = tensor.start + (tensor.end - tensor.start) / (2 * len) * len;
    file.read_exact_at(first, tensor.start).ok()?;
    file.read_exact_at(second, middle).ok()?;
    Some(bytes)
}

/// Reads a range that [`Contents`] returned.
///
/// # Errors
/// Conflict, if the file has changed; other, if it cannot be read.
pub(super) fn read_again(walk: &Walk, file: usize, range: Range<u64>) -> Result<Vec<u8>> {
    let found = walk.found.get(file).ok_or_else(|| Error::other("a chunk is of no file of the save"))?;
    let opened = open(walk, found)?;
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
    // A file that shrank reads short; the check below detects the change.
    let read = opened.read_exact_at(&mut bytes, range.start);
    check_unchanged(&opened, found)?;
    read.map_err(|source| Error::other("read a file to save").at(shown(&found.path)).source(source))?;
    Ok(bytes)
}
