//! Format detection: finds the tensors of checkpoint files, which define chunk boundaries. Files of a distributed checkpoint
//! need the metadata beside them.

use std::collections::{BTreeSet, HashMap};
use std::error::Error as StdError;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use super::source::{check_unchanged, open};
use super::{CutChoice, files_of, sharded};
use crate::budget::GrowingMemory;
use crate::checkpoint::dcp::{self, METADATA_NAME, Metadata};
use crate::checkpoint::pickle::PICKLE_LEN_MAX;
use crate::checkpoint::sharded::Index;
use crate::checkpoint::{Layout, ReadAt, ReserveMemory, parse_layout};
use crate::chunker::tensor;
use crate::error::{Error, Result};
use crate::ops::shown;
use crate::ops::watch::is_pointer_content;
use crate::tree::{Opened, Walk, WalkEntry};

/// Formats of the files of a tree.
#[derive(Debug)]
pub(super) struct Formats {
    pub(super) choice: CutChoice,
    /// Metadata of distributed checkpoints, each with its file.
    described: Vec<(usize, Metadata)>,
    /// Metadata that describes a file, and the file's path in it, by file.
    parts: HashMap<usize, (usize, String)>,
    /// Indexes of sharded checkpoints, each with its file.
    pub(super) indexes: Vec<(usize, Index)>,
    /// Memory for descriptions of tensors: a small file may describe very many.
    memory: Mutex<GrowingMemory>,
    /// Set once files are saved as plain bytes for lack of memory.
    lacked_memory: AtomicBool,
    /// Pointer files of `TowlineCheckpointIO` among those that were read.
    pointers: Mutex<BTreeSet<usize>>,
    /// Maximum length of a header: several are parsed at a time, and take some times their length.
    header_max: u64,
}

/// Lists of a file's tensors that there are at one time, at most: its layout, its entry in the manifest, and that while it is
/// encoded and read again.
const LISTS: u64 = 4;
/// Boundaries for which memory is counted at once, at least.
const CUTS_MIN: usize = 1 << 10;
/// Part of the memory for descriptions that the text of one header may take.
const HEADER_SHARE: u64 = 16;

impl Formats {
    /// Reads the metadata of distributed checkpoints and the indexes of sharded ones in the tree. Descriptions of tensors take
    /// memory of `memory`; files beyond that are plain bytes. Incomplete if `stop` is cancelled. Blocking.
    pub(super) fn new(walk: &Walk, choice: CutChoice, memory: GrowingMemory, stop: &CancellationToken) -> Self {
        let mut formats = Self {
            choice,
            described: Vec::new(),
            parts: HashMap::new(),
            indexes: Vec::new(),
            header_max: memory.max() / HEADER_SHARE,
            memory: Mutex::new(memory),
            lacked_memory: AtomicBool::new(false),
            pointers: Mutex::default(),
        };
        if !formats.at_tensors() || walk.is_file() {
            return formats;
        }
        for at in files_of(walk).take_while(|_| !stop.is_cancelled()) {
            let Some(found) = walk.found.get(at) else { continue };
            let read = |reserve: ReserveMemory<'_>| sharded::read(walk, found, formats.header_max, reserve).transpose();
            match formats.parse(read, |index| index.as_ref().map_or(0, Index::weight)) {
                Some(Ok(index)) => formats.indexes.push((at, index)),
                Some(Err(error)) => tracing::info!("ignoring an unreadable index: {error:?}"),
                None => {}
            }
            // Without a collective, each rank writes its own metadata: `__<rank>.metadata`.
            if !found.path.ends_with(METADATA_NAME.as_bytes())
                || found.stat.size > PICKLE_LEN_MAX.min(formats.header_max)
            {
                continue;
            }
            let read = |reserve: ReserveMemory<'_>| Some(metadata(walk, found, reserve));
            match formats.parse(read, |metadata| metadata.as_ref().map_or(0, Metadata::weight)) {
                Some(Ok(metadata)) => formats.take(walk, at, metadata),
                Some(Err(error)) => tracing::info!("ignoring unreadable metadata: {error:?}"),
                None => {}
            }
        }
        formats
    }

    fn take(&mut self, walk: &Walk, at: usize, metadata: Metadata) {
        let Some(found) = walk.found.get(at) else { return };
        let folder = found.path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        let folder = found.path.get(..folder).unwrap_or_default();
        for name in metadata.files() {
            let path = [folder, name.as_bytes()].concat();
            if let Ok(file) = walk.found.binary_search_by(|found| found.path.cmp(&path)) {
                self.parts.entry(file).or_insert_with(|| (self.described.len(), name.to_owned()));
            }
        }
        self.described.push((at, metadata));
    }

    /// Reserves `bytes` of that memory; false if too little is left.
    fn try_reserve(&self, bytes: u64) -> bool {
        if self.memory().try_add(bytes) {
            return true;
        }
        self.lacked_memory.store(true, Ordering::Relaxed);
        false
    }

    /// Counts tensors of a file that was not parsed, a list of which takes `bytes`, as those of [`Formats::layout`].
    ///
    /// # Errors
    /// Exhausted, if too little memory is left.
    pub(super) fn keep_tensors(&self, bytes: u64) -> Result<()> {
        self.memory().add(bytes.saturating_mul(LISTS))
    }

    /// As [`Formats::keep_tensors`]; false if too little memory is left, of which [`Formats::warning`] warns.
    pub(super) fn try_keep_tensors(&self, bytes: u64) -> bool {
        self.try_reserve(bytes.saturating_mul(LISTS))
    }

    /// Warning that files were saved without their tensors, if there are any.
    pub(super) fn warning(&self) -> Option<String> {
        self.lacked_memory.load(Ordering::Relaxed).then(|| {
            "files are saved as plain bytes, without a list of their tensors, which takes too much memory: save them again with more \
             --memory and --cut tensor"
                .to_owned()
        })
    }

    /// Records `file`, of these `bytes`, if it is a pointer file.
    pub(super) fn look_for_pointer(&self, file: usize, bytes: &[u8]) {
        if is_pointer_content(bytes) {
            self.pointers.lock().unwrap_or_else(PoisonError::into_inner).insert(file);
        }
    }

    /// Warning that pointer files were saved in the place of checkpoints, if there are any.
    pub(super) fn pointer_warning(&self, walk: &Walk) -> Option<String> {
        let pointers = self.pointers.lock().unwrap_or_else(PoisonError::into_inner);
        let first = walk.found.get(*pointers.first()?)?;
        let text = match pointers.len() {
            1 => "is a pointer file of TowlineCheckpointIO, saved without its".to_owned(),
            count => format!("and {} more are pointer files of TowlineCheckpointIO, saved without their", count - 1),
        };
        Some(format!(
            "{} {text} weights: those are saved already, in the repository that TowlineCheckpointIO saves to (to have them in \
             this tree, restore them from there, and save what was restored)",
            shown(&first.path)
        ))
    }

    /// Runs `parse` with a way to reserve memory, of which its result keeps its weight; None if that takes too much.
    fn parse<T>(
        &self,
        parse: impl FnOnce(ReserveMemory<'_>) -> Option<T>,
        weight: impl FnOnce(&T) -> u64,
    ) -> Option<T> {
        let mut reserved = 0;
        let mut reserve = |bytes| {
            let is_reserved = self.try_reserve(bytes);
            reserved += if is_reserved { bytes } else { 0 };
            is_reserved
        };
        let mut parsed = parse(&mut reserve);
        let mut kept = parsed.as_ref().map_or(0, weight);
        let more = kept.saturating_sub(reserved);
        if self.try_reserve(more) {
            reserved += more;
        } else {
            (parsed, kept) = (None, 0);
        }
        self.memory().subtract(reserved - kept);
        parsed
    }

    /// Boundaries of the chunks of the file `found`, which holds the tensors of `layout`; None if it has holes, which move them, or if
    /// they take too much memory: of a file system that reports no holes, a short file may seem to have any length.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(super) fn cuts(&self, layout: &Layout, file: &Opened, found: &WalkEntry) -> Result<Option<Vec<u64>>> {
        let size = found.stat.size;
        if file.each_extent(size).next().transpose()? != Some(0..size) {
            return Ok(None);
        }
        let (mut cuts, mut counted) = (Vec::new(), 0);
        for cut in tensor::cuts(&layout.spans(), size) {
            if cuts.len() == cuts.capacity() {
                let more = (cuts.capacity().max(CUTS_MIN) * size_of::<u64>()) as u64;
                if !self.memory().try_add(more) {
                    self.memory().subtract(counted);
                    return Ok(None);
                }
                counted += more;
                cuts.reserve_exact(cuts.capacity().max(CUTS_MIN));
            }
            cuts.push(cut);
        }
        Ok(Some(cuts))
    }

    fn memory(&self) -> MutexGuard<'_, GrowingMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if tensors define the chunk boundaries.
    fn at_tensors(&self) -> bool {
        matches!(self.choice, CutChoice::Auto | CutChoice::Tensor)
    }

    /// Metadata file that is needed to understand `file`.
    pub(super) fn depends_on(&self, file: usize) -> Option<usize> {
        let (described, _) = self.parts.get(&file)?;
        self.described.get(*described).map(|(metadata, _)| *metadata)
    }

    /// Layout of `file`, which has `len` bytes; None for an unknown format, which is saved as plain bytes.
    pub(super) fn layout(&self, file: usize, read: ReadAt<'_>, len: u64) -> Option<Layout> {
        let mut bounded = |at, out: &mut [u8]| {
            if out.len() as u64 > self.header_max {
                self.lacked_memory.store(true, Ordering::Relaxed);
                return Err(io::Error::other("header takes too much memory"));
            }
            read(at, out)
        };
        if !self.at_tensors() {
            return None;
        }
        let detect = |reserve: ReserveMemory<'_>| self.detect_layout(file, &mut bounded, len, reserve);
        self.parse(detect, |layout| layout.weight() * LISTS)
    }

    fn detect_layout(&self, file: usize, read: ReadAt<'_>, len: u64, reserve: ReserveMemory<'_>) -> Option<Layout> {
        let described = self.parts.get(&file).and_then(|(at, path)| Some((&self.described.get(*at)?.1, path)));
        if let Some((metadata, path)) = described {
            match metadata.layout(path, read, len, reserve) {
                Ok(layout) => return Some(layout),
                Err(error) => {
                    let why = chain(&error);
                    tracing::info!("a file of a distributed checkpoint is saved as plain bytes: {why}");
                    return None;
                }
            }
        }
        parse_layout(read, len, reserve).unwrap_or_else(|error| {
            tracing::info!("a file of unknown format is saved as plain bytes: {}", chain(&error));
            None
        })
    }
}

/// Error message with its causes.
fn chain(error: &dyn StdError) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn metadata(walk: &Walk, found: &WalkEntry, reserve: ReserveMemory<'_>) -> Result<Metadata> {
    let refuse = |what| Error::other(what).at(shown(&found.path));
    if !reserve(found.stat.size) {
        return Err(refuse("metadata takes too much memory (--memory)"));
    }
    let file = open(walk, found)?;
    let mut bytes = vec![0; usize::try_from(found.stat.size).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, 0)
        .map_err(|source| refuse("cannot read the metadata of a checkpoint").source(source))?;
    check_unchanged(&file, found)?;
    dcp::parse(&bytes, reserve).map_err(|source| refuse("not metadata of a distributed checkpoint").source(source))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::budget::Budget;
    use crate::checkpoint::in_memory;
    use crate::clock::Timestamp;
    use crate::limits::MEMORY_MIN;
    use crate::tree::MemoryFile;

    #[test]
    fn boundaries_are_kept_of_files_without_holes_and_as_far_as_there_is_memory() {
        let folder = tempfile::tempdir().unwrap();
        let files = [("whole", 0), ("hole", 1_u64 << 40)];
        for (name, start) in files {
            let file = std::fs::File::create(folder.path().join(name)).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; 4 << 20], start).unwrap();
        }
        let walk = crate::tree::walk(folder.path(), &crate::tree::Rules::default()).unwrap();
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let formats = Formats::new(&walk, CutChoice::Auto, budget.tree_memory(None), &CancellationToken::new());
        let layout = Layout::default();
        let cuts = |file: usize| formats.cuts(&layout, &open(&walk, &walk.found[file]).unwrap(), &walk.found[file]);
        assert_eq!(walk.found[1].path, b"hole");
        assert_eq!(cuts(1).unwrap(), None, "a hole of a terabyte");
        assert_eq!(cuts(2).unwrap().unwrap().last(), Some(&(4 << 20)));
        // A file system that reports no holes.
        let whole = MemoryFile::new("f", [Bytes::from_static(&[1])]);
        let (whole, mut found) = (Opened::Memory(whole.into()), walk.found[2].clone());
        found.stat.size = 1 << 50;
        let free = budget.tree_memory(None).max();
        assert_eq!(formats.cuts(&layout, &whole, &found).unwrap(), None);
        assert!(budget.tree_memory(None).try_add(free - (1 << 20)), "what they took is given back");
    }

    #[test]
    fn descriptions_of_tensors_take_the_room_that_they_have() {
        let tensor = |nth| format!(r#""{nth}":{{"dtype":"U8","shape":[1],"data_offsets":[{nth},{}]}}"#, nth + 1);
        let header = format!("{{{}}}", (0..10_000).map(tensor).collect::<Vec<_>>().join(","));
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7; 10_000]].concat();
        let files =
            ["1", "2", "3"].map(|name| MemoryFile::new(format!("{name}.safetensors"), [Bytes::from(file.clone())]));
        let walk = Walk::in_memory(files.into(), Timestamp(0)).unwrap();
        let layout = |formats: &Formats, at| formats.layout(at, &mut in_memory(&file), file.len() as u64);
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let new = || Formats::new(&walk, CutChoice::Auto, budget.tree_memory(None), &CancellationToken::new());
        let (first, second, mut other) = (new(), new(), budget.tree_memory(None));
        let one = layout(&first, 1).unwrap().weight() * LISTS;
        assert!(layout(&second, 2).is_some() && second.warning().is_none());
        // All saves share it.
        while other.try_add(64 << 10) {}
        assert!(layout(&first, 3).is_none() && layout(&second, 3).is_none() && second.warning().is_some());
        drop(other);
        assert!(layout(&first, 3).is_some());
        // Memory that a file took while it was parsed is given back, also after one that took too much.
        let most = budget.tree_memory(None).max();
        let little = 512 << 10;
        assert!(header.len() as u64 * 10 > 2 * little && budget.tree_memory(None).try_add(most - 3 * one - little));
        drop((first, second));
        assert!(budget.tree_memory(None).try_add(most));
        // Nor is a header read that is a large part of the memory.
        assert!(layout(&Formats { header_max: file.len() as u64, ..new() }, 1).is_some());
        let short = Formats { header_max: header.len() as u64, ..new() };
        assert!(layout(&short, 1).is_none() && short.warning().is_some());
    }
}
