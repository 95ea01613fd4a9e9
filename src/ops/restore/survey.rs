//! Survey of the destination before anything is written: finds equal files, conflicts, and reusable chunks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio_util::sync::CancellationToken;

use super::items::Items;
use super::{FILLED_AT_ONCE, RestoreOptions, destinations};
use crate::chunk::Chunk;
use crate::error::{Error, Result};
use crate::format::{Content, EntryKind};
use crate::ops::in_place::{Next, compare_file};
use crate::ops::shown;
use crate::progress::Progress;
use crate::repository::Saved;
use crate::tree::{Opened, Target, WalkKind, extents};
use crate::work::blocking;

/// Items that a worker processes at once.
const BATCH: usize = 64;

/// Result of a survey.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Items with equal content already, by index.
    pub(super) kept: Vec<usize>,
    /// Files to write.
    pub(super) written: Vec<usize>,
    /// Links to make.
    pub(super) links: Vec<usize>,
    /// Entries of another kind to remove first: files, links and empty folders.
    pub(super) replaced: Vec<Vec<u8>>,
    /// Folders to remove first with their content.
    pub(super) cleared: Vec<Vec<u8>>,
    /// Existing files and links that differ.
    pub(super) replaced_files: u64,
    /// Chunks in existing files: path and offset.
    pub(super) local: BTreeMap<u32, (Vec<u8>, u64)>,
    /// Chunks, with their offsets, that an interrupted restore has left in the unfinished files of items.
    pub(super) unfinished: BTreeMap<usize, Vec<(u32, u64)>>,
    /// All chunks of `unfinished`.
    arrived: BTreeSet<u32>,
    /// Plain bytes of equal files and of chunks that need not be fetched.
    pub(super) reused_bytes: u64,
}

/// Decision on one item.
#[derive(Debug)]
enum Finding {
    Keep,
    Write,
    /// `clear`: the existing entry is of a kind that a rename cannot replace.
    Differs {
        got: String,
        clear: bool,
    },
    /// A folder with content, where something else belongs.
    FullFolder,
}

/// Findings about an item.
#[derive(Debug)]
struct SurveyedItem {
    /// Index.
    at: usize,
    finding: Finding,
    /// Chunks found in the existing file, with their offsets.
    local: Vec<(u32, u64)>,
    /// Chunks found in an unfinished file of an interrupted restore.
    unfinished: Vec<(u32, u64)>,
}

impl SurveyedItem {
    fn new(at: usize, finding: Finding) -> Self {
        Self { at, finding, local: Vec::new(), unfinished: Vec::new() }
    }
}

/// Examines each item; without a target, nothing exists.
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
    // A dropped restore stops the threads, too.
    let stop = CancellationToken::new();
    let _stops = stop.clone().drop_guard();
    let parallelism = std::thread::available_parallelism().map_or(2, usize::from);
    let batches = (0..items.list.len()).step_by(BATCH).map(|from| {
        let (saved, items, target) = (Arc::clone(saved), Arc::clone(items), target.map(Arc::clone));
        let to = (from + BATCH).min(items.list.len());
        let (progress, stop) = (options.progress.clone(), stop.clone());
        let survey = move |at| survey_item(&saved, &items, at, target.as_deref(), (&progress, &stop));
        blocking(move || (from..to).map(survey).collect())
    });
    let looked: Vec<Vec<SurveyedItem>> = stream::iter(batches).buffered(parallelism).try_collect().await?;
    let mut survey = Survey::default();
    for looked in looked.into_iter().flatten() {
        survey.take(saved, items, looked, options)?;
    }
    survey.count_local(saved, items)?;
    Ok(survey)
}

impl Survey {
    fn take(&mut self, saved: &Saved, items: &Items, looked: SurveyedItem, options: &RestoreOptions) -> Result<()> {
        let SurveyedItem { at, finding, local, unfinished } = looked;
        let Some(item) = items.list.get(at) else { return Ok(()) };
        let entry = item.entry(saved)?;
        let full = matches!(finding, Finding::FullFolder);
        let clear = match finding {
            Finding::Keep => {
                if let EntryKind::File(content) = &entry.kind {
                    self.reused_bytes += content.size;
                }
                self.kept.push(at);
                self.remember(&item.path, local);
                return Ok(());
            }
            Finding::Differs { got, .. } if !options.overwrite => {
                return Err(Error::conflict("something is in the way and differs")
                    .at(items.folder.join(shown(&item.path)).display())
                    .expected(kind_word(&entry.kind))
                    .got(got)
                    .help("--overwrite replaces it; or restore to another folder"));
            }
            Finding::FullFolder if !(options.overwrite && options.delete) => {
                return Err(Error::conflict("a folder with content is in the way")
                    .at(items.folder.join(shown(&item.path)).display())
                    .expected(kind_word(&entry.kind))
                    .help(
                        "move it away, or restore to another folder; --overwrite --delete removes it with its content",
                    ));
            }
            Finding::Differs { clear, .. } => {
                self.replaced_files += 1;
                clear
            }
            Finding::FullFolder => {
                self.replaced_files += 1;
                true
            }
            Finding::Write => false,
        };
        match entry.kind {
            EntryKind::File(_) => self.written.push(at),
            EntryKind::Symlink(_) => self.links.push(at),
            EntryKind::Folder => {}
        }
        if clear {
            let list = if full { &mut self.cleared } else { &mut self.replaced };
            list.push(item.path.clone());
        }
        self.remember(&item.path, local);
        // Each is open until it is finished.
        if !unfinished.is_empty() && self.unfinished.len() < FILLED_AT_ONCE {
            self.arrived.extend(unfinished.iter().map(|&(chunk, _)| chunk));
            self.unfinished.insert(at, unfinished);
        }
        Ok(())
    }

    fn remember(&mut self, path: &[u8], local: Vec<(u32, u64)>) {
        for (chunk, offset) in local {
            self.local.entry(chunk).or_insert_with(|| (path.to_vec(), offset));
        }
    }

    fn count_local(&mut self, saved: &Saved, items: &Items) -> Result<()> {
        for (chunk, places) in destinations(saved, items, &self.written)? {
            if self.is_here(chunk) {
                let len = saved.manifest.chunks.lens.get(chunk as usize).copied().unwrap_or(0);
                self.reused_bytes += u64::from(len) * places.len() as u64;
            }
        }
        Ok(())
    }

    /// True if `chunk` need not be fetched.
    fn is_here(&self, chunk: u32) -> bool {
        self.local.contains_key(&chunk) || self.arrived.contains(&chunk)
    }

    /// Chunks to fetch.
    pub(super) fn missing(&self, saved: &Saved, items: &Items) -> Result<Vec<u32>> {
        let all = destinations(saved, items, &self.written)?;
        Ok(all.into_keys().filter(|&chunk| !self.is_here(chunk)).collect())
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

fn survey_item(
    saved: &Saved,
    items: &Items,
    at: usize,
    target: Option<&Target>,
    (progress, stop): (&Progress, &CancellationToken),
) -> Result<SurveyedItem> {
    let item = items.list.get(at).ok_or_else(|| Error::other("an item went missing"))?;
    let entry = item.entry(saved)?;
    let Some(target) = target else { return Ok(SurveyedItem::new(at, Finding::Write)) };
    target.go_on()?;
    let unfinished = || match &entry.kind {
        EntryKind::File(content) => unfinished(saved, content, target, &item.path),
        _ => Ok(Vec::new()),
    };
    let Some(present) = target.kind_of(&item.path)? else {
        return Ok(SurveyedItem { unfinished: unfinished()?, ..SurveyedItem::new(at, Finding::Write) });
    };
    let is_folder = matches!(present.kind, Some(WalkKind::Folder));
    if is_folder && !matches!(entry.kind, EntryKind::Folder) && !target.is_empty_folder(&item.path)? {
        return Ok(SurveyedItem::new(at, Finding::FullFolder));
    }
    let clear = matches!(entry.kind, EntryKind::Folder) || is_folder;
    let differs = |got: &str| Ok(SurveyedItem::new(at, Finding::Differs { got: got.to_owned(), clear }));
    match (&entry.kind, present.kind) {
        (EntryKind::Folder, Some(WalkKind::Folder)) => Ok(SurveyedItem::new(at, Finding::Keep)),
        (EntryKind::Symlink(wanted), Some(WalkKind::Symlink { target: got })) => {
            if *wanted == got {
                Ok(SurveyedItem::new(at, Finding::Keep))
            } else {
                differs("a link that points elsewhere")
            }
        }
        (EntryKind::File(content), Some(WalkKind::File)) => {
            let file = target.read(&item.path)?;
            let (same, local) = compare(saved, content, file, present.stat.size, stop)?;
            progress.advance(content.size);
            if same {
                // Setting the mode and time of a file with several names would reach outside the destination: it is written anew.
                let dressed = present.stat.mode == items.mode(entry) && present.stat.mtime == entry.mtime;
                let finding = if present.stat.nlink == 1 || dressed { Finding::Keep } else { Finding::Write };
                return Ok(SurveyedItem { local, ..SurveyedItem::new(at, finding) });
            }
            let got = format!("a file of {} bytes with other content", present.stat.size);
            Ok(SurveyedItem {
                local,
                unfinished: unfinished()?,
                ..SurveyedItem::new(at, Finding::Differs { got, clear })
            })
        }
        (_, Some(WalkKind::Folder)) => differs("a folder"),
        (_, Some(WalkKind::Symlink { .. })) => differs("a link"),
        (_, Some(WalkKind::File)) => differs("a file"),
        (_, None) => differs("a device, pipe or socket"),
    }
}

/// Chunks in an unfinished file at `path`. None for a file with holes, or of one chunk: it is started anew.
fn unfinished(saved: &Saved, content: &Content, target: &Target, path: &[u8]) -> Result<Vec<(u32, u64)>> {
    let chunks = &saved.manifest.chunks;
    let placed: Vec<_> = content.placed(chunks).collect();
    let starts = placed.iter().map(|(_, range)| range.start).chain([content.size]);
    let ends = [0].into_iter().chain(placed.iter().map(|(_, range)| range.end));
    if placed.len() < 2 || !starts.eq(ends) {
        return Ok(Vec::new());
    }
    let Some(file) = target.unfinished(path)? else { return Ok(Vec::new()) };
    // Missing chunks are holes, and are not read.
    let data = extents(&file, content.size)?;
    let mut buffer = Vec::new();
    let mut is_here = |chunk: u32, range: &Range<u64>| {
        let Some(&id) = chunks.ids.get(chunk as usize) else { return false };
        let next = data.partition_point(|data| data.end <= range.start);
        if data.get(next).is_none_or(|data| data.start > range.start) || target.go_on().is_err() {
            return false;
        }
        buffer.resize(usize::try_from(range.end - range.start).unwrap_or(usize::MAX), 0);
        file.read_exact_at(&mut buffer, range.start).is_ok() && Chunk::new(&buffer).id() == id
    };
    let here = placed.iter().filter(|(chunk, range)| is_here(*chunk, range));
    Ok(here.map(|(chunk, range)| (*chunk, range.start)).collect())
}

/// Compares a file with the wanted one: returns whether it is equal, and which wanted chunks are in place.
fn compare(
    saved: &Saved,
    content: &Content,
    file: File,
    size: u64,
    stop: &CancellationToken,
) -> Result<(bool, Vec<(u32, u64)>)> {
    let mut found = Vec::new();
    let wanted = (content, &saved.manifest.chunks);
    let same = compare_file(wanted, &Opened::File(file), size, stop, |chunk, range, is_there| {
        found.extend(is_there.then_some((chunk, range.start)));
        if stop.is_cancelled() { Next::End } else { Next::Continue }
    })?;
    Ok((same, found))
}

fn kind_word(kind: &EntryKind) -> &'static str {
    match kind {
        EntryKind::File(_) => "the saved file",
        EntryKind::Folder => "a folder",
        EntryKind::Symlink(_) => "the saved link",
    }
}
