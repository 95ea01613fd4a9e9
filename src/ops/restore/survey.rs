//! Looking at what is there before anything is written: what is right already, what is in the way, what can be used.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::items::Items;
use super::{RestoreOptions, destinations};
use crate::chunk::Chunk;
use crate::error::{Error, Result};
use crate::format::{Content, EntryKind};
use crate::ops::shown;
use crate::repository::Saved;
use crate::tree::{FoundKind, Target, extents};
use crate::work::blocking;

/// Items looked at by one worker in one go.
const BATCH: usize = 64;
/// Bytes compared with zeros at once.
const ZEROS: usize = 1 << 16;

/// What a survey found.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Items whose content is right already, by index.
    pub(super) kept: Vec<usize>,
    /// Files to write.
    pub(super) written: Vec<usize>,
    /// Links to make.
    pub(super) links: Vec<usize>,
    /// Paths of another kind that go first.
    pub(super) replaced: Vec<Vec<u8>>,
    /// Files and links that are there and differ.
    pub(super) replaced_files: u64,
    /// Chunks that lie in files that are there: path and offset.
    pub(super) local: BTreeMap<u32, (Vec<u8>, u64)>,
    /// Plain bytes of files that are right and of chunks that need not be fetched.
    pub(super) reused_bytes: u64,
}

/// What becomes of one item.
#[derive(Debug)]
enum Finding {
    Keep,
    Write,
    /// `clear`: it is of a kind that cannot simply be renamed over.
    Differs {
        got: String,
        clear: bool,
    },
}

/// One item's finding, and the chunks found in what is there.
type Looked = (usize, Finding, Vec<(u32, u64)>);

/// Looks at each item; without a target nothing is there.
///
/// # Errors
/// Conflict, if something in the way differs and must not be overwritten.
pub(super) async fn survey(
    saved: &Arc<Saved>,
    items: &Arc<Items>,
    target: Option<&Arc<Target>>,
    options: &RestoreOptions,
) -> Result<Survey> {
    options.progress.phase("looking", items.bytes(saved));
    let parallelism = std::thread::available_parallelism().map_or(2, usize::from);
    let batches = (0..items.list.len()).step_by(BATCH).map(|from| {
        let (saved, items, target) = (Arc::clone(saved), Arc::clone(items), target.map(Arc::clone));
        let to = (from + BATCH).min(items.list.len());
        let progress = options.progress.clone();
        blocking(move || (from..to).map(|at| look(&saved, &items, at, target.as_deref(), &progress)).collect())
    });
    let looked: Vec<Vec<Looked>> = stream::iter(batches).buffered(parallelism).try_collect().await?;
    let mut survey = Survey::default();
    for (at, finding, local) in looked.into_iter().flatten() {
        survey.take(saved, items, (at, finding, local), options.overwrite)?;
    }
    survey.count_local(saved, items)?;
    Ok(survey)
}

impl Survey {
    fn take(&mut self, saved: &Saved, items: &Items, looked: Looked, overwrite: bool) -> Result<()> {
        let (at, finding, local) = looked;
        let Some(item) = items.list.get(at) else { return Ok(()) };
        let entry = item.entry(saved)?;
        let clear = match finding {
            Finding::Keep => {
                if let EntryKind::File(content) = &entry.kind {
                    self.reused_bytes += content.size;
                }
                self.kept.push(at);
                self.remember(&item.path, local);
                return Ok(());
            }
            Finding::Differs { got, .. } if !overwrite => {
                return Err(Error::conflict("something is in the way and differs")
                    .at(items.folder.join(shown(&item.path)).display())
                    .expected(kind_word(&entry.kind))
                    .got(got)
                    .cure("--overwrite replaces it; or restore to another folder"));
            }
            Finding::Differs { clear, .. } => {
                self.replaced_files += 1;
                clear
            }
            Finding::Write => false,
        };
        match entry.kind {
            EntryKind::File(_) => self.written.push(at),
            EntryKind::Symlink(_) => self.links.push(at),
            EntryKind::Folder => {}
        }
        if clear {
            self.replaced.push(item.path.clone());
        }
        self.remember(&item.path, local);
        Ok(())
    }

    fn remember(&mut self, path: &[u8], local: Vec<(u32, u64)>) {
        for (chunk, offset) in local {
            self.local.entry(chunk).or_insert_with(|| (path.to_vec(), offset));
        }
    }

    fn count_local(&mut self, saved: &Saved, items: &Items) -> Result<()> {
        for (chunk, places) in destinations(saved, items, &self.written)? {
            if self.local.contains_key(&chunk) {
                let len = saved.manifest.chunks.lens.get(chunk as usize).copied().unwrap_or(0);
                self.reused_bytes += u64::from(len) * places.len() as u64;
            }
        }
        Ok(())
    }

    /// Chunks to fetch.
    pub(super) fn missing(&self, saved: &Saved, items: &Items) -> Result<Vec<u32>> {
        let all = destinations(saved, items, &self.written)?;
        Ok(all.into_keys().filter(|chunk| !self.local.contains_key(chunk)).collect())
    }

    /// Plain bytes to fetch.
    pub(super) fn wanted_bytes(&self, saved: &Saved, items: &Items) -> u64 {
        let missing = self.missing(saved, items).unwrap_or_default();
        missing
            .iter()
            .filter_map(|&chunk| saved.manifest.chunks.lens.get(chunk as usize))
            .map(|&len| u64::from(len))
            .sum()
    }
}

fn look(
    saved: &Saved,
    items: &Items,
    at: usize,
    target: Option<&Target>,
    progress: &crate::progress::Progress,
) -> Result<Looked> {
    let item = items.list.get(at).ok_or_else(|| Error::other("an item went missing"))?;
    let entry = item.entry(saved)?;
    let Some(target) = target else { return Ok((at, Finding::Write, Vec::new())) };
    let Some(present) = target.kind_of(&item.path)? else {
        return Ok((at, Finding::Write, Vec::new()));
    };
    let clear = matches!(entry.kind, EntryKind::Folder) || matches!(present.kind, Some(FoundKind::Folder));
    let differs = |got: &str| Ok((at, Finding::Differs { got: got.to_owned(), clear }, Vec::new()));
    match (&entry.kind, present.kind) {
        (EntryKind::Folder, Some(FoundKind::Folder)) => Ok((at, Finding::Keep, Vec::new())),
        (EntryKind::Symlink(wanted), Some(FoundKind::Symlink { target: got })) => {
            if *wanted == got {
                Ok((at, Finding::Keep, Vec::new()))
            } else {
                differs("a link that points elsewhere")
            }
        }
        (EntryKind::File(content), Some(FoundKind::File)) => {
            let file = target.read(&item.path)?;
            let (same, local) = compare(saved, content, &file, present.stat.size)?;
            progress.advance(content.size);
            let got = format!("a file of {} bytes with other content", present.stat.size);
            Ok((at, if same { Finding::Keep } else { Finding::Differs { got, clear } }, local))
        }
        (_, Some(FoundKind::Folder)) => differs("a folder"),
        (_, Some(FoundKind::Symlink { .. })) => differs("a link"),
        (_, Some(FoundKind::File)) => differs("a file"),
        (_, None) => differs("a device, pipe or socket"),
    }
}

/// Is the file what is wanted? And which of the wanted chunks does it hold where they belong?
fn compare(saved: &Saved, content: &Content, file: &File, size: u64) -> Result<(bool, Vec<(u32, u64)>)> {
    let mut found = Vec::new();
    let mut buffer = Vec::new();
    let (mut same, mut covered) = (size == content.size, 0);
    let data = extents(file, size)?;
    for (chunk, range) in content.placed(&saved.manifest.chunks) {
        if range.start > covered {
            same = same && is_zero(file, covered..range.start, &data);
        }
        covered = range.end;
        let id = saved.manifest.chunks.ids.get(chunk as usize);
        buffer.resize(usize::try_from(range.end - range.start).unwrap_or(usize::MAX), 0);
        let read = range.end <= size && file.read_exact_at(&mut buffer, range.start).is_ok();
        if read && id.is_some_and(|&id| Chunk::new(&buffer).id() == id) {
            found.push((chunk, range.start));
        } else {
            same = false;
        }
    }
    same = same && is_zero(file, covered..content.size, &data);
    Ok((same, found))
}

/// Nothing but zeros in `range`? What is not data is a hole, which reads as zeros.
fn is_zero(file: &File, range: std::ops::Range<u64>, data: &[std::ops::Range<u64>]) -> bool {
    let zeros = vec![0u8; ZEROS];
    let mut buffer = vec![0u8; ZEROS];
    data.iter().map(|d| d.start.max(range.start)..d.end.min(range.end)).filter(|part| part.start < part.end).all(
        |part| {
            (part.start..part.end).step_by(ZEROS).all(|at| {
                let len = usize::try_from(part.end - at).unwrap_or(ZEROS).min(ZEROS);
                let (Some(out), Some(zeros)) = (buffer.get_mut(..len), zeros.get(..len)) else { return false };
                file.read_exact_at(out, at).is_ok() && out == zeros
            })
        },
    )
}

fn kind_word(kind: &EntryKind) -> &'static str {
    match kind {
        EntryKind::File(_) => "the saved file",
        EntryKind::Folder => "a folder",
        EntryKind::Symlink(_) => "the saved link",
    }
}
