//! Cat: writes bytes of a saved file, in order; each chunk is verified before its first byte is written.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::{Range, RangeInclusive};
use std::sync::{Arc, Mutex, PoisonError};

use crate::chunk::Chunk;
use crate::error::{Error, Result};
use crate::format::{Content, EntryKind};
use crate::limits::MIB;
use crate::name::Name;
use crate::ops::shown;
use crate::progress::Progress;
use crate::repository::{Gaps, Repository, Saved, Sink, fetch, longest_read, plan};

/// Plain bytes buffered before a write.
const STEP: u64 = 16 * MIB;

/// Consumer of verified bytes: number of the range, offset in it, and the bytes.
pub type RangeSink = Arc<dyn Fn(usize, u64, &[u8]) -> Result<()> + Send + Sync>;

impl Repository {
    /// Writes the bytes `range` (inclusive, as in HTTP; default: all) of the file `path` in the tree `name`; returns their
    /// number. A range is cut at the end of the file.
    ///
    /// # Errors
    /// Not found, for the name or path; usage, for a range outside the file; damaged.
    ///
    /// # Cancel safety
    /// Safe: all bytes written so far are verified.
    pub async fn cat(
        &self,
        name: &Name,
        path: &[u8],
        range: Option<RangeInclusive<u64>>,
        out: &mut (dyn Write + Send),
    ) -> Result<u64> {
        let saved = self.saved(name).await?.shared();
        let range = bounded(range, file_at(&saved, path)?.size, path)?;
        let total = range.end - range.start;
        let mut at = range.start;
        while at < range.end {
            let to = range.end.min(at + STEP);
            let bytes = self.gather(&saved, path, at..to).await?;
            out.write_all(&bytes).map_err(Error::standard_output)?;
            at = to;
        }
        Ok(total)
    }

    /// Reads ranges of files of one tree, each chunk only once, and passes their bytes to `sink` in any order and from any
    /// thread. Holes, which are zeros, are not passed.
    ///
    /// # Errors
    /// Not found, for a path, or if a pack was deleted because the tree was replaced or repacked since it was opened; denied, if the
    /// policy does not let the tree come here any more; usage, for a range beyond its file; damaged; errors of `sink`.
    ///
    /// # Cancel safety
    /// Safe: `sink` only got verified bytes; it may get more for a moment.
    pub async fn read_ranges(
        &self,
        saved: &Arc<Saved>,
        ranges: &[(Vec<u8>, Range<u64>)],
        sink: RangeSink,
    ) -> Result<()> {
        self.check_still_readable(saved).await?;
        let mut files: BTreeMap<&[u8], Vec<(u32, Range<u64>)>> = BTreeMap::new();
        let mut placed: BTreeMap<u32, Vec<Placed>> = BTreeMap::new();
        for (number, (path, window)) in ranges.iter().enumerate() {
            let content = file_at(saved, path)?;
            if window.end > content.size {
                return Err(outside(path, content.size, window.start, window.end.saturating_sub(1)));
            }
            let chunks = files.entry(path).or_insert_with(|| content.placed(&saved.manifest.chunks).collect());
            let first = chunks.partition_point(|(_, at)| at.end <= window.start);
            for (chunk, at) in chunks.iter().skip(first).take_while(|(_, at)| at.start < window.end) {
                let (at, window) = (at.clone(), window.clone());
                placed.entry(*chunk).or_default().push(Placed { number, at, window });
            }
        }
        let wanted: Vec<u32> = placed.keys().copied().collect();
        let reads = plan(|chunk| saved.locate(chunk), wanted, longest_read(self, self.budget()), Gaps::Wide)?;
        let sink: Arc<dyn Sink> = Arc::new(move |chunk: u32, bytes: Chunk<'_>| {
            let places = placed.get(&chunk).into_iter().flatten();
            places
                .filter_map(|place| place.part(bytes.bytes()))
                .try_for_each(|(number, at, part)| sink(number, at, part))
        });
        fetch(self, saved, reads, sink, &Progress::default()).await.map(drop)
    }

    /// The bytes `range` of a file.
    async fn gather(&self, saved: &Arc<Saved>, path: &[u8], range: Range<u64>) -> Result<Vec<u8>> {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let gathered = Arc::new(Mutex::new(vec![0; len]));
        let sink: RangeSink = {
            let gathered = Arc::clone(&gathered);
            Arc::new(move |_, at, bytes| {
                let mut gathered = gathered.lock().unwrap_or_else(PoisonError::into_inner);
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                if let Some(place) = gathered.get_mut(at..at.saturating_add(bytes.len())) {
                    place.copy_from_slice(bytes);
                }
                Ok(())
            })
        };
        self.read_ranges(saved, &[(path.to_vec(), range)], sink).await?;
        let mut gathered = gathered.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut gathered))
    }
}

/// Place of a chunk in a file of which a window is requested.
struct Placed {
    number: usize,
    at: Range<u64>,
    window: Range<u64>,
}

impl Placed {
    /// Overlap of the chunk `bytes` with the window: number of the window, offset in it, and the bytes.
    fn part<'b>(&self, bytes: &'b [u8]) -> Option<(usize, u64, &'b [u8])> {
        let (from, to) = (self.at.start.max(self.window.start), self.at.end.min(self.window.end));
        let index = |offset: u64| usize::try_from(offset.checked_sub(self.at.start)?).ok();
        let part = bytes.get(index(from)?..index(to)?).filter(|part| !part.is_empty())?;
        Some((self.number, from - self.window.start, part))
    }
}

fn file_at<'a>(saved: &'a Saved, path: &[u8]) -> Result<&'a Content> {
    let place = || format!("{}:{}", saved.name, shown(path));
    match saved.manifest.entry(path).map(|entry| &entry.kind) {
        Some(EntryKind::File(content)) => Ok(content),
        Some(_) => Err(Error::usage("this is not a file").at(place())),
        None => Err(Error::not_found("there is no such file in the saved tree")
            .at(place())
            .help(format!("`towline show {} --files` lists the paths", saved.name))),
    }
}

fn bounded(range: Option<RangeInclusive<u64>>, size: u64, path: &[u8]) -> Result<Range<u64>> {
    let Some(range) = range else { return Ok(0..size) };
    let (start, end) = (*range.start(), range.end().saturating_add(1).min(size));
    if start < end {
        return Ok(start..end);
    }
    Err(outside(path, size, *range.start(), *range.end()))
}

fn outside(path: &[u8], size: u64, first: u64, last: u64) -> Error {
    Error::usage("range lies outside the file")
        .at(shown(path))
        .expected(format!("within its {size} bytes"))
        .got(if last == u64::MAX { format!("{first}-") } else { format!("{first}-{last}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_inclusive_and_end_with_the_file() {
        assert_eq!(bounded(Some(2..=4), 10, b"f").unwrap(), 2..5);
        assert_eq!(bounded(Some(8..=u64::MAX), 10, b"f").unwrap(), 8..10);
        assert!(bounded(Some(10..=11), 10, b"f").is_err());
        assert_eq!(bounded(None, 0, b"f").unwrap(), 0..0);
    }

    #[test]
    fn chunks_land_where_they_overlap_the_window() {
        let part = |at, window| Placed { number: 7, at, window }.part(b"abcdef");
        assert_eq!(part(10..16, 14..18), Some((7, 0, b"ef".as_slice())));
        assert_eq!(part(16..22, 14..18), Some((7, 2, b"ab".as_slice())));
        assert_eq!(part(10..16, 12..14), Some((7, 0, b"cd".as_slice())));
        assert_eq!(part(10..16, 16..18), None);
    }
}
