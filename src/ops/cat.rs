//! Cat: bytes of one saved file, in order, each chunk verified before its first byte goes out.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::{Range, RangeInclusive};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::format::{Content, EntryKind};
use crate::limits::MIB;
use crate::ops::shown;
use crate::progress::Progress;
use crate::repository::{Gaps, Name, Repository, Saved, Sink, fetch, plan};

/// Plain bytes gathered before they are written out.
const STEP: u64 = 16 * MIB;

impl Repository {
    /// Writes the bytes `range` (inclusive, as in HTTP; all without one) of the file at `path` in the tree `name`; returns
    /// how many. A range that ends after the file ends with it.
    ///
    /// # Errors
    /// Not found, for the name or path; usage, for a range outside the file; damaged.
    ///
    /// # Cancel safety
    /// Safe: what was written was right.
    pub async fn cat(
        &self,
        name: &Name,
        path: &[u8],
        range: Option<RangeInclusive<u64>>,
        out: &mut (dyn Write + Send),
    ) -> Result<u64> {
        let saved = self.saved(name).await?.shared();
        let content = file_at(&saved, path)?;
        let range = bounded(range, content.size, path)?;
        let total = range.end - range.start;
        let mut chunks: Vec<(u32, Range<u64>)> = content.placed(&saved.manifest.chunks).collect();
        chunks.retain(|(_, at)| at.start < range.end && at.end > range.start);
        let mut at = range.start;
        while at < range.end {
            let to = range.end.min(at + STEP);
            let here: Vec<_> = chunks.iter().filter(|(_, c)| c.start < to && c.end > at).cloned().collect();
            let bytes = self.gather(&saved, &here, at..to).await?;
            out.write_all(&bytes).map_err(|source| Error::other("write the bytes out").source(source))?;
            at = to;
        }
        Ok(total)
    }

    /// The bytes `range` of a file, given the chunks that overlap it; the rest is a hole.
    async fn gather(&self, saved: &Arc<Saved>, chunks: &[(u32, Range<u64>)], range: Range<u64>) -> Result<Vec<u8>> {
        let mut placed: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
        for (chunk, at) in chunks {
            placed.entry(*chunk).or_default().push(at.clone());
        }
        let wanted: Vec<u32> = placed.keys().copied().collect();
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let gathered = Arc::new(Mutex::new(vec![0; len]));
        let sink: Sink = {
            let gathered = Arc::clone(&gathered);
            Arc::new(move |chunk, bytes| {
                let mut gathered = gathered.lock().unwrap_or_else(PoisonError::into_inner);
                for at in placed.get(&chunk).into_iter().flatten() {
                    copy_overlap(bytes.bytes(), at, &mut gathered, &range);
                }
                Ok(())
            })
        };
        let reads = plan(|chunk| saved.locate(chunk), wanted, 8 * MIB, Gaps::Wide)?;
        fetch(self, saved, reads, sink, &Progress::default()).await?;
        let mut gathered = gathered.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut gathered))
    }
}

/// Copies what `bytes`, which lie at `at` in the file, have in common with the window `range` of it.
fn copy_overlap(bytes: &[u8], at: &Range<u64>, window: &mut [u8], range: &Range<u64>) {
    let (from, to) = (at.start.max(range.start), at.end.min(range.end));
    let index = |offset: u64, base: u64| usize::try_from(offset - base).unwrap_or(usize::MAX);
    if from >= to {
        return;
    }
    let source = bytes.get(index(from, at.start)..index(to, at.start));
    let target = window.get_mut(index(from, range.start)..index(to, range.start));
    if let (Some(source), Some(target)) = (source, target) {
        target.copy_from_slice(source);
    }
}

fn file_at<'a>(saved: &'a Saved, path: &[u8]) -> Result<&'a Content> {
    let place = || format!("{}:{}", saved.name, shown(path));
    match saved.manifest.entry(path).map(|entry| &entry.kind) {
        Some(EntryKind::File(content)) => Ok(content),
        Some(_) => Err(Error::usage("this is not a file").at(place())),
        None => Err(Error::not_found("there is no such file in the saved tree")
            .at(place())
            .cure(format!("`towline show {}` lists the paths", saved.name))),
    }
}

fn bounded(range: Option<RangeInclusive<u64>>, size: u64, path: &[u8]) -> Result<Range<u64>> {
    let Some(range) = range else { return Ok(0..size) };
    let (start, end) = (*range.start(), range.end().saturating_add(1).min(size));
    if start < end {
        return Ok(start..end);
    }
    Err(Error::usage("range lies outside the file")
        .at(shown(path))
        .expected(format!("within its {size} bytes"))
        .got(format!("{}-{}", range.start(), range.end())))
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
        let mut window = vec![0; 4];
        copy_overlap(b"abcdef", &(10..16), &mut window, &(14..18));
        copy_overlap(b"xyz", &(17..20), &mut window, &(14..18));
        assert_eq!(window, b"ef\0x");
    }
}
