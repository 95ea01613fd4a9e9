//! Placement of verified chunks into temporary files, which are renamed when they are complete.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::items::Items;
use super::survey::Survey;
use super::{Destinations, destinations};
use crate::chunk::Chunk;
use crate::error::{Error, Result};
use crate::format::{EntryKind, TreeEntry};
use crate::repository::{PackRead, Saved};
use crate::tree::{Staged, Target};

/// Files that an interrupted restore left unfinished, by item, locked for this one.
pub(super) type Resumed = HashMap<usize, Staged>;

/// Takes over the unfinished files that `surveyed` found.
pub(super) fn resume(saved: &Saved, items: &Items, target: &Target, surveyed: &Survey) -> Result<Resumed> {
    let mut resumed = Resumed::new();
    for &at in surveyed.unfinished.keys() {
        let Some(item) = items.list.get(at) else { continue };
        let EntryKind::File(content) = &item.entry(saved)?.kind else { continue };
        resumed.extend(target.resume(&item.path, content.size)?.map(|staged| (at, staged)));
    }
    Ok(resumed)
}

/// Removes the folder in the place of a file that is complete.
fn make_way(surveyed: &Survey, target: &Target, path: &[u8]) -> Result<()> {
    if surveyed.cleared.iter().any(|cleared| cleared == path) { target.remove(path) } else { Ok(()) }
}

/// One group of files being filled.
pub(super) struct Placing {
    saved: Arc<Saved>,
    items: Arc<Items>,
    destinations: Destinations,
    /// Chunks placed so far.
    placed: HashMap<u32, AtomicBool>,
    /// Files of more than one chunk.
    long: HashMap<usize, MultiChunkFile>,
    surveyed: Arc<Survey>,
    /// Dropped last: while it is there, unfinished files may be written.
    target: Arc<Target>,
}

/// A file of more than one chunk.
#[derive(Debug, Default)]
struct MultiChunkFile {
    staged: Mutex<Option<Arc<Staged>>>,
    missing: AtomicU32,
}

impl Placing {
    /// Prepares to fill the files of `group`; those without any chunk are placed at once.
    /// Unfinished files of them in `resumed` are continued.
    pub(super) fn new(
        saved: &Arc<Saved>,
        items: &Arc<Items>,
        target: &Arc<Target>,
        group: &[usize],
        (surveyed, resumed): (&Arc<Survey>, &mut Resumed),
    ) -> Result<Self> {
        let destinations = destinations(saved, items, group)?;
        let placed = destinations.keys().map(|&chunk| (chunk, AtomicBool::new(false))).collect();
        let mut long: HashMap<usize, MultiChunkFile> = HashMap::new();
        let (saved, items, target) = (Arc::clone(saved), Arc::clone(items), Arc::clone(target));
        for &at in group {
            let Some(item) = items.list.get(at) else { continue };
            let entry = item.entry(&saved)?;
            let EntryKind::File(content) = &entry.kind else { continue };
            let chunks = item.chunks(&saved);
            if chunks == 0 {
                make_way(surveyed, &target, &item.path)?;
            }
            match chunks {
                0 if content.size == 0 => target.write_small(&item.path, &[], items.mode(entry), entry.mtime)?,
                0 => target.stage(&item.path, content.size)?.finish(items.mode(entry), entry.mtime)?,
                1 if Self::is_plain(&saved, entry) => {}
                chunks => {
                    let missing = AtomicU32::new(u32::try_from(chunks).unwrap_or(u32::MAX));
                    let staged = Mutex::new(resumed.remove(&at).map(Arc::new));
                    long.insert(at, MultiChunkFile { staged, missing });
                }
            }
        }
        Ok(Self { saved, items, destinations, placed, long, surveyed: Arc::clone(surveyed), target })
    }

    /// The tree.
    pub(super) fn saved(&self) -> &Arc<Saved> {
        &self.saved
    }

    /// True for a file of exactly one chunk without holes.
    fn is_plain(saved: &Saved, entry: &TreeEntry) -> bool {
        let EntryKind::File(content) = &entry.kind else { return false };
        content.placed(&saved.manifest.chunks).all(|(_, range)| range == (0..content.size))
    }

    /// Chunks that are not placed yet.
    pub(super) fn missing(&self) -> Vec<u32> {
        let missing = self.placed.iter().filter(|(_, placed)| !placed.load(Ordering::Acquire));
        missing.map(|(&chunk, _)| chunk).collect()
    }

    /// File of the first requested chunk of a read.
    pub(super) fn file_of(&self, read: &PackRead) -> usize {
        let first = read.chunks.iter().find(|brought| brought.wanted);
        let first = first.and_then(|brought| self.destinations.get(&brought.chunk)?.first());
        first.map_or(0, |&(at, _)| at)
    }

    /// Counts the chunks that an interrupted restore left in unfinished files. Those that changed since the survey are fetched.
    pub(super) fn place_resumed(&self, surveyed: &Survey) -> Result<()> {
        for (at, long) in &self.long {
            let Some(found) = surveyed.unfinished.get(at) else { continue };
            let staged = long.staged.lock().unwrap_or_else(PoisonError::into_inner).clone();
            // Only a file without other users can be finished.
            let Some(file) = staged.and_then(|staged| staged.file().try_clone().ok()) else { continue };
            for &(chunk, offset) in found {
                if let Some(bytes) = self.verified(&file, chunk, offset) {
                    self.place_but(chunk, &bytes, Some((*at, offset)))?;
                }
            }
        }
        Ok(())
    }

    /// Reads and verifies the chunk at `offset` of `file`; none if it differs.
    fn verified(&self, file: &File, chunk: u32, offset: u64) -> Option<Vec<u8>> {
        let chunks = &self.saved.manifest.chunks;
        let (&id, &len) = (chunks.ids.get(chunk as usize)?, chunks.lens.get(chunk as usize)?);
        let mut buffer = vec![0; len as usize];
        file.read_exact_at(&mut buffer, offset).ok()?;
        Chunk::verify(id, &buffer).is_ok().then_some(buffer)
    }

    /// Removes unfinished files on drop, instead of keeping them for the next restore.
    pub(super) fn discard(&self) {
        for long in self.long.values() {
            if let Some(staged) = &*long.staged.lock().unwrap_or_else(PoisonError::into_inner) {
                staged.discard();
            }
        }
    }

    /// Places chunks from existing files. Those that changed since the survey are fetched instead.
    pub(super) fn place_local(&self, surveyed: &Survey) -> Result<()> {
        for &chunk in self.destinations.keys() {
            let Some((path, offset)) = surveyed.local.get(&chunk) else { continue };
            let Ok(file) = self.target.read(path) else { continue };
            if let Some(bytes) = self.verified(&file, chunk, *offset) {
                self.place(chunk, &bytes)?;
            }
        }
        Ok(())
    }

    /// Writes a chunk to all its places, once even if it is passed twice.
    pub(super) fn place(&self, chunk: u32, bytes: &[u8]) -> Result<()> {
        self.place_but(chunk, bytes, None)
    }

    /// As [`place`](Self::place), except at `there`, an item and an offset, which has the chunk already.
    fn place_but(&self, chunk: u32, bytes: &[u8], there: Option<(usize, u64)>) -> Result<()> {
        let Some(placed) = self.placed.get(&chunk) else { return Ok(()) };
        if placed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let destinations = self.destinations.get(&chunk).map(Vec::as_slice).unwrap_or_default();
        destinations.iter().try_for_each(|&(at, offset)| {
            if there == Some((at, offset)) { self.arrived(at) } else { self.write(at, offset, bytes) }
        })
    }

    fn write(&self, at: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let item = self.items.list.get(at).ok_or_else(|| Error::other("an item went missing"))?;
        let entry = item.entry(&self.saved)?;
        let EntryKind::File(content) = &entry.kind else { return Ok(()) };
        let Some(long) = self.long.get(&at) else {
            make_way(&self.surveyed, &self.target, &item.path)?;
            return self.target.write_small(&item.path, bytes, self.items.mode(entry), entry.mtime);
        };
        let staged = {
            let mut staged = long.staged.lock().unwrap_or_else(PoisonError::into_inner);
            match &*staged {
                Some(staged) => Arc::clone(staged),
                None => Arc::clone(staged.insert(Arc::new(self.target.stage_resumable(&item.path, content.size)?))),
            }
        };
        self.target.go_on()?;
        let written = staged.file().write_all_at(bytes, offset);
        written.map_err(|source| {
            Error::io("cannot write a file", &self.items.folder.join(super::super::shown(&item.path)), source)
        })?;
        drop(staged);
        self.arrived(at)
    }

    /// Counts a placed chunk of a file; the last one finishes the file.
    fn arrived(&self, at: usize) -> Result<()> {
        let (Some(item), Some(long)) = (self.items.list.get(at), self.long.get(&at)) else { return Ok(()) };
        let entry = item.entry(&self.saved)?;
        self.target.go_on()?;
        if long.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            let staged = long.staged.lock().unwrap_or_else(PoisonError::into_inner).take();
            let alone =
                staged.and_then(Arc::into_inner).ok_or_else(|| Error::other("a file is written after its end"))?;
            make_way(&self.surveyed, &self.target, &item.path)?;
            alone.finish(self.items.mode(entry), entry.mtime)?;
        }
        Ok(())
    }

    /// Checks that every chunk was placed.
    pub(super) fn check_complete(&self) -> Result<()> {
        match self.missing().len() {
            0 => Ok(()),
            missing => Err(Error::other("chunks were not delivered").expected(0).got(missing)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::error::ErrorKind;
    use crate::ops::SaveOptions;
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::Store;
    use crate::tree::Durability;

    #[tokio::test]
    async fn after_a_stop_no_chunk_is_written_and_no_file_finished() {
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions { cache: Some(dir.path().join("cache")), ..OpenOptions::default() };
        let (repository, _) = Repository::create(Store::memory(), options).await.unwrap();
        let (source, dest) = (dir.path().join("source"), dir.path().join("dest"));
        fs::create_dir(&source).unwrap();
        let mut long = vec![0; 3 << 20];
        blake3::Hasher::new().finalize_xof().fill(&mut long);
        for (name, bytes) in [("a", b"first".as_slice()), ("b", &long[..]), ("c", b"last".as_slice())] {
            fs::write(source.join(name), bytes).unwrap();
        }
        let name = "tree".parse().unwrap();
        repository.save(&source, &name, &SaveOptions::default()).await.unwrap();
        let saved = repository.saved(&name).await.unwrap().shared();
        let items = Arc::new(Items::choose(&saved, None, &[], &dest).unwrap());
        let (stop, work) = (CancellationToken::new(), TaskTracker::new());
        let target = Target::open(&dest, Durability::Process).unwrap().until(stop.clone(), work.token());
        let (files, surveyed): (Vec<_>, _) = ((0..items.list.len()).collect(), Arc::new(Survey::default()));
        let others = (&surveyed, &mut Resumed::new());
        let placing = Placing::new(&saved, &items, &Arc::new(target), &files, others).unwrap();
        let of = |name: &[u8]| {
            let chunks =
                placing.destinations.iter().flat_map(|(&chunk, places)| places.iter().map(move |at| (chunk, at)));
            let here = chunks.filter(|(_, (at, _))| placing.items.list[*at].path == name);
            here.map(|(chunk, (_, offset))| (chunk, usize::try_from(*offset).unwrap())).collect::<Vec<_>>()
        };
        let mut pieces = of(b"b");
        pieces.sort_by_key(|(_, offset)| *offset);
        let ends: Vec<_> = pieces.iter().skip(1).map(|(_, offset)| *offset).chain([long.len()]).collect();
        let (&(chunk, offset), before) = pieces.split_last().unwrap();
        assert!(!before.is_empty());
        placing.place(of(b"a")[0].0, b"first").unwrap();
        for ((chunk, offset), end) in before.iter().zip(ends) {
            placing.place(*chunk, &long[*offset..end]).unwrap();
        }
        stop.cancel();
        assert_eq!(placing.place(of(b"c")[0].0, b"last").unwrap_err().kind(), ErrorKind::Cancelled);
        assert_eq!(placing.place(chunk, &long[offset..]).unwrap_err().kind(), ErrorKind::Cancelled);
        drop(placing);
        assert!(work.is_empty());
        let there = fs::read_dir(&dest).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let (hidden, placed): (Vec<_>, Vec<_>) = there.partition(|name| name.starts_with('.'));
        assert_eq!(
            (hidden.len(), placed),
            (1, vec!["a".to_owned()]),
            "the unfinished file is kept for the next restore"
        );
    }
}
