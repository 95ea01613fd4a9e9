//! The index: which packs may hold a chunk. Segments are immutable, so each is fetched once and mapped.

mod audit;
mod map;
mod merge;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::DirEntry;
use std::ops::Deref;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};

use self::map::Mapped;
use super::Repository;
use super::layout::{self, Family};
use super::log::{SegmentInfo, State};
use super::objects::{self, Downloaded};
use crate::budget::{Budget, Retained};
use crate::clock::{Clock as _, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{Kind, open};
use crate::format::{PackRef, SegmentView, segment_len_max};
use crate::id::{ChunkId, PackId, SegmentId};
use crate::storage::open_object;
use crate::tree::is_own_file;

pub use audit::{BadSegment, SegmentAudit};
pub(crate) use merge::merge_if_many;

/// Segments fetched at once.
const FETCHES: usize = 8;

/// End of the names of unfinished files.
const UNFINISHED: &str = ".part";
/// Time without a write after which an unfinished file is one of a process that has ended.
const UNFINISHED_FOR: Duration = Duration::from_hours(24);

/// Maximum memory of one pack in a map, whose nodes may be half empty.
const PACK_SHARE: u64 = 2 * size_of::<(PackId, PackRef)>() as u64;

/// One live segment.
#[derive(Debug)]
pub struct Segment {
    view: SegmentView,
    bytes: Mapped,
}

/// Segments that this process has loaded.
pub(super) type Loaded = Mutex<BTreeMap<SegmentId, Arc<Segment>>>;

/// The live segments of one state.
#[derive(Clone, Debug, Default)]
pub struct Index {
    segments: Vec<(SegmentId, Arc<Segment>)>,
}

/// Every pack that is indexed, by its id.
#[derive(Debug)]
pub struct IndexedPacks {
    packs: BTreeMap<PackId, PackRef>,
    _kept: Retained,
}

impl Deref for IndexedPacks {
    type Target = BTreeMap<PackId, PackRef>;

    fn deref(&self) -> &Self::Target {
        &self.packs
    }
}

impl Segment {
    /// Packs that it covers.
    pub fn packs(&self) -> impl Iterator<Item = PackRef> {
        self.view.packs(&self.bytes)
    }

    /// Packs, in the order of the numbers in its entries; none for an impossible one.
    pub fn numbered_packs(&self) -> impl Iterator<Item = Option<PackRef>> {
        (0..self.view.pack_count()).map(|number| self.view.pack(&self.bytes, number))
    }

    /// Every entry, sorted by prefix.
    pub fn rows(&self) -> impl Iterator<Item = crate::format::Row> {
        self.view.rows(&self.bytes)
    }
}

impl Index {
    /// Packs that may have `id`, with the number of the chunk there; the footer of the pack decides.
    pub fn candidates(&self, id: ChunkId) -> impl Iterator<Item = (PackRef, u32)> {
        self.segments.iter().flat_map(move |(_, segment)| {
            let hits = segment.view.find(&segment.bytes, &id);
            hits.filter_map(|hit| Some((segment.view.pack(&segment.bytes, hit.pack)?, hit.ordinal)))
        })
    }

    /// All segments.
    #[must_use]
    pub fn segments(&self) -> &[(SegmentId, Arc<Segment>)] {
        &self.segments
    }

    /// Every pack that is indexed, each once.
    ///
    /// # Errors
    /// Exhausted, if they need more memory than `budget` has.
    pub fn packs(&self, budget: &Budget) -> Result<IndexedPacks> {
        let rows: u64 = self.segments.iter().map(|(_, segment)| u64::from(segment.view.pack_count())).sum();
        let kept = budget.keep(rows.saturating_mul(PACK_SHARE))?;
        let packs = self.segments.iter().flat_map(|(_, segment)| segment.packs()).map(|pack| (pack.id, pack)).collect();
        Ok(IndexedPacks { packs, _kept: kept })
    }
}

impl Repository {
    /// The index of `state`. Loaded segments are not fetched again. Others are removed from the local cache.
    ///
    /// # Errors
    /// Not found, if a segment was replaced since (retry with a newer state); damaged, if one is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn index(&self, state: &State) -> Result<Index> {
        let is_changed = state.segments.is_empty() || !self.has_loaded(state);
        let wanted =
            state.segments.iter().map(|(&id, info)| async move { Ok::<_, Error>((id, self.segment(id, info).await?)) });
        let wanted = stream::iter(wanted.collect::<Vec<_>>()).buffered(FETCHES);
        let segments: Vec<_> = wanted.try_collect().await?;
        let mut loaded = self.shared.segments.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|id, _| state.segments.contains_key(id));
        drop(loaded);
        if is_changed {
            self.remove_stale(state);
        }
        Ok(Index { segments })
    }

    /// The current state with its index; starts over if a segment is replaced in between.
    ///
    /// # Errors
    /// As [`Repository::index`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn indexed_state(&self) -> Result<(Arc<State>, Index)> {
        let mut state = self.state().await?;
        loop {
            match self.index(&state).await {
                Ok(index) => return Ok((state, index)),
                Err(error) => {
                    let newer = self.state().await?;
                    if newer.segments == state.segments {
                        return Err(if error.kind() == ErrorKind::NotFound { missing_segment(error) } else { error });
                    }
                    state = newer;
                }
            }
        }
    }

    async fn segment(&self, id: SegmentId, info: &SegmentInfo) -> Result<Arc<Segment>> {
        if let Some(found) = self.loaded(id) {
            return Ok(found);
        }
        let key = layout::owned(Family::Index, id);
        check_counts(&key, info)?;
        let bytes = match self.mapped_in_place(&key, info)? {
            Some(mapped) => mapped,
            None => self.fetched(id, info).await?,
        };
        let view = SegmentView::parse(&bytes)
            .map_err(|error| error.at(&key).help("towline verify --repair rebuilds the index"))?;
        let segment = Arc::new(Segment { view, bytes });
        let mut loaded = self.shared.segments.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.insert(id, Arc::clone(&segment));
        Ok(segment)
    }

    /// Maps a segment of a repository in a directory where it lies, if only this user may write the file: a mapped file that
    /// another user truncates would end this process by a signal (mmap(2), SIGBUS). A copy of it in the local cache is mapped
    /// instead.
    fn mapped_in_place(&self, key: &object_store::path::Path, info: &SegmentInfo) -> Result<Option<Mapped>> {
        let Some(root) = self.store().directory() else { return Ok(None) };
        let path = root.join(key.as_ref());
        let file = open_object(root, key)?;
        let found = file.metadata().map_err(|source| Error::io("cannot open an index segment", &path, source))?;
        check_len(key, info, found.len())?;
        if is_own_file(&found) { Mapped::of(&file, &path).map(Some) } else { Ok(None) }
    }

    /// True if this process has loaded the segments of `state`, and no others.
    fn has_loaded(&self, state: &State) -> bool {
        self.shared.segments.lock().unwrap_or_else(PoisonError::into_inner).keys().eq(state.segments.keys())
    }

    /// Folder of the local cache with the segments that were fetched.
    fn index_cache(&self) -> PathBuf {
        self.cache().join("index")
    }

    /// Removes the files of the local cache whose segments `state` does not list, and those that killed downloads left. Another
    /// process that has mapped one keeps it; one that knows a newer state may fetch one again.
    fn remove_stale(&self, state: &State) {
        let Ok(files) = std::fs::read_dir(self.index_cache()) else { return };
        let live: BTreeSet<String> = state.segments.keys().map(cached_name).collect();
        for file in files.flatten() {
            let name = file.file_name();
            let is_stale = match name.to_str() {
                // Names of unfinished files begin with a dot.
                Some(name) if name.starts_with('.') => name.ends_with(UNFINISHED) && is_left(&file),
                Some(name) => !live.contains(name),
                None => false,
            };
            if is_stale && let Err(error) = std::fs::remove_file(file.path()) {
                tracing::debug!("an old index segment stays at {}: {error}", file.path().display());
            }
        }
    }

    fn loaded(&self, id: SegmentId) -> Option<Arc<Segment>> {
        self.shared.segments.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// Maps a segment from the local cache, after downloading it there if needed, because it may be larger than the memory
    /// budget. If the cache cannot be written, the segment is kept in memory.
    async fn fetched(&self, id: SegmentId, info: &SegmentInfo) -> Result<Mapped> {
        let path = self.index_cache().join(cached_name(&id));
        let key = layout::owned(Family::Index, id);
        if let Ok(mapped) = Mapped::open(&path) {
            match check_len(&key, info, mapped.len() as u64).and_then(|()| SegmentView::parse(&mapped).map(drop)) {
                Ok(()) => return Ok(mapped),
                // A power loss may leave any bytes in the cache.
                Err(error) => {
                    tracing::warn!("the local cache is damaged at {}, fetched again: {error}", path.display());
                }
            }
        }
        objects::checked_len(Kind::Segment, &key, info.len)?;
        match self.cached(&key, info, &path).await? {
            Ok(mapped) => Ok(mapped),
            Err(error) => {
                self.warn_uncached(&path, &error);
                let kept = self.budget().keep(info.len)?;
                let object = objects::get_required(&**self.store().objects(), Kind::Segment, &key).await?;
                checked(&key, &object)?;
                Ok(Mapped::Held(object, kept))
            }
        }
    }

    /// Downloads the segment at `key` into the local cache. The inner error is that of a cache that cannot be written.
    async fn cached(
        &self,
        key: &object_store::path::Path,
        info: &SegmentInfo,
        path: &Path,
    ) -> Result<std::io::Result<Mapped>> {
        let staged = match Staged::beside(path) {
            Ok(staged) => staged,
            Err(error) => return Ok(Err(error)),
        };
        let objects = &**self.store().objects();
        match objects::retry(|| objects::download(objects, key, info.len, &staged.path)).await? {
            Downloaded::Whole => {}
            Downloaded::NotWritable(error) => return Ok(Err(error)),
        }
        checked(key, &Bytes::from_owner(Mapped::open(&staged.path)?))?;
        // Mapped before others see it, who may remove it.
        let mapped = Mapped::open(&staged.path)?;
        Ok(staged.publish(path).map(|()| mapped))
    }

    /// Warns once that the local cache cannot be written, but not about a read-only folder, which is taken as intended.
    fn warn_uncached(&self, path: &Path, error: &std::io::Error) {
        use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        if matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem) {
            tracing::debug!("index segment is not cached at {}: {error}", path.display());
        } else if !self.shared.uncached.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "the local cache cannot be written: {error}: {}: the index is held in memory instead (free some space there, \
                 or set XDG_CACHE_HOME to a folder on another disk)",
                path.parent().unwrap_or(path).display()
            );
        }
    }
}

/// True if no process can be writing `file` any more.
fn is_left(file: &DirEntry) -> bool {
    let modified = file.metadata().and_then(|found| found.modified());
    modified.is_ok_and(|modified| SystemClock.now().since(modified.into()) > UNFINISHED_FOR)
}

/// Name of a segment's file in the local cache.
fn cached_name(id: &SegmentId) -> String {
    format!("{}-{}", id.session, id.object)
}

/// Refuses a segment that is longer than the numbers of packs and chunks in the log allow, before it takes that much disk.
fn check_counts(key: &object_store::path::Path, info: &SegmentInfo) -> Result<()> {
    let most = segment_len_max(info.packs, info.chunks);
    if info.len <= most {
        return Ok(());
    }
    Err(Error::damaged("index segment is longer than its packs and chunks need")
        .at(key)
        .expected(format!("at most {most} bytes"))
        .got(info.len)
        .help("towline verify --repair rebuilds the index"))
}

/// Refuses an object that is no segment. A compressed one is refused before it is decompressed.
fn checked(key: &object_store::path::Path, object: &Bytes) -> Result<()> {
    SegmentView::parse(object)
        .and_then(|_| open(Kind::Segment, object))
        .map(drop)
        .map_err(|error| error.at(key).help("towline verify --repair rebuilds the index"))
}

/// A segment that the newest state lists is not there: damage, and no race with a merge.
fn missing_segment(error: Error) -> Error {
    Error::damaged("an index segment is missing").help("`towline verify --repair` rebuilds the index").source(error)
}

/// Refuses a segment that is not as long as the log says.
fn check_len(key: &object_store::path::Path, info: &SegmentInfo, found: u64) -> Result<()> {
    if found == info.len {
        return Ok(());
    }
    Err(Error::damaged("index segment has another length than the log says")
        .at(key)
        .expected(info.len)
        .got(found)
        .help("towline verify --repair rebuilds the index"))
}

/// A temporary file that is renamed to its final path, so that a crash leaves all of it or nothing.
struct Staged {
    path: PathBuf,
}

impl Staged {
    /// Creates an empty file in the folder of `path`.
    fn beside(path: &Path) -> std::io::Result<Self> {
        let folder = path.parent().map_or_else(PathBuf::new, Path::to_path_buf);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let staged = folder.join(format!(".{}{UNFINISHED}", crate::id::ObjectId::random()));
        std::fs::File::options().write(true).create_new(true).mode(0o600).open(&staged)?;
        Ok(Self { path: staged })
    }

    fn publish(&self, path: &Path) -> std::io::Result<()> {
        std::fs::rename(&self.path, path)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After a rename, there is nothing to remove.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::id::{Owned, SessionId};
    use crate::repository::OpenOptions;
    use crate::storage::Store;

    async fn repository(dir: &Path) -> Repository {
        let options = OpenOptions { cache: Some(dir.join("cache")), ..OpenOptions::default() };
        Repository::create(Store::memory(), options).await.unwrap().0
    }

    #[tokio::test]
    async fn a_segment_that_is_longer_than_its_counts_allow_is_not_fetched() {
        let dir = tempfile::tempdir().unwrap();
        let repository = repository(dir.path()).await;
        for (len, kind) in [(1 << 32, ErrorKind::Damaged), (segment_len_max(1, 1), ErrorKind::NotFound)] {
            let mut state = State::default();
            let info = SegmentInfo { len, packs: 1, chunks: 1, built: 0 };
            state.segments.insert(Owned::fresh(SessionId::random()), info);
            assert_eq!(repository.index(&state).await.unwrap_err().kind(), kind, "{len}");
        }
    }

    #[tokio::test]
    async fn what_a_killed_download_left_is_removed_from_the_cache() {
        let dir = tempfile::tempdir().unwrap();
        let repository = repository(dir.path()).await;
        let cache = repository.index_cache();
        let left = Staged::beside(&cache.join("segment")).unwrap();
        let running = Staged::beside(&cache.join("segment")).unwrap();
        let file = std::fs::File::options().write(true).open(&left.path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        repository.index(&State::default()).await.unwrap();
        assert_eq!((left.path.exists(), running.path.exists()), (false, true));
    }
}
