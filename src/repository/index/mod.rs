//! The index: which packs may hold a chunk. Segments are immutable, so each is fetched once and mapped.

mod audit;
mod map;
mod merge;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};

use self::map::Mapped;
use super::Repository;
use super::layout::{self, Family};
use super::log::{SegmentInfo, State};
use super::objects;
use crate::budget::{Budget, Retained};
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, open};
use crate::format::{PackRef, SegmentView};
use crate::id::{ChunkId, PackId, SegmentId};
use crate::storage::open_object;

pub use audit::{BadSegment, SegmentAudit};
pub(crate) use merge::merge_if_many;

/// Segments fetched at once.
const FETCHES: usize = 8;

/// Bytes that one pack takes in a map, whose nodes may be half empty.
const PACK_SHARE: u64 = 2 * size_of::<(PackId, PackRef)>() as u64;

/// One live segment.
#[derive(Debug)]
pub struct Segment {
    view: SegmentView,
    bytes: Mapped,
}

/// Segments that this process has at hand.
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
    /// The packs it covers.
    pub fn packs(&self) -> impl Iterator<Item = PackRef> {
        self.view.packs(&self.bytes)
    }

    /// Its packs in the order in which its entries number them; none for an impossible one.
    pub fn numbered_packs(&self) -> impl Iterator<Item = Option<PackRef>> {
        (0..self.view.pack_count()).map(|number| self.view.pack(&self.bytes, number))
    }

    /// Every entry, sorted by prefix.
    pub fn rows(&self) -> impl Iterator<Item = crate::format::Row> {
        self.view.rows(&self.bytes)
    }
}

impl Index {
    /// Packs that may hold `id`, and as which of their chunks: the pack's footer has the last word.
    pub fn candidates(&self, id: ChunkId) -> impl Iterator<Item = (PackRef, u32)> {
        self.segments.iter().flat_map(move |(_, segment)| {
            let hits = segment.view.find(&segment.bytes, &id);
            hits.filter_map(|hit| Some((segment.view.pack(&segment.bytes, hit.pack)?, hit.ordinal)))
        })
    }

    /// The segments themselves.
    #[must_use]
    pub fn segments(&self) -> &[(SegmentId, Arc<Segment>)] {
        &self.segments
    }

    /// Every pack that is indexed, each once.
    ///
    /// # Errors
    /// Exhausted, if they take more than `budget` has for what is kept.
    pub fn packs(&self, budget: &Budget) -> Result<IndexedPacks> {
        let rows: u64 = self.segments.iter().map(|(_, segment)| u64::from(segment.view.pack_count())).sum();
        let kept = budget.keep(rows.saturating_mul(PACK_SHARE))?;
        let packs = self.segments.iter().flat_map(|(_, segment)| segment.packs()).map(|pack| (pack.id, pack)).collect();
        Ok(IndexedPacks { packs, _kept: kept })
    }
}

impl Repository {
    /// The index of `state`. Segments already at hand are not fetched again.
    ///
    /// # Errors
    /// Not found, if a segment was replaced since (take a newer state); damaged, if one is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn index(&self, state: &State) -> Result<Index> {
        let wanted =
            state.segments.iter().map(|(&id, info)| async move { Ok::<_, Error>((id, self.segment(id, info).await?)) });
        let wanted = stream::iter(wanted.collect::<Vec<_>>()).buffered(FETCHES);
        let segments: Vec<_> = wanted.try_collect().await?;
        let mut loaded = self.shared.segments.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|id, _| state.segments.contains_key(id));
        Ok(Index { segments })
    }

    /// The state as of now with its index: starts over when a segment is replaced in between.
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
                        return Err(error);
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
        let bytes = match self.store().directory() {
            Some(root) => {
                let path = root.join(key.as_ref());
                let file = open_object(root, &key)?;
                let found = file.metadata().map_err(|source| Error::io("open index segment", &path, source))?;
                check_len(&key, info, found.len())?;
                Mapped::of(&file, &path)?
            }
            None => self.fetched(id, info).await?,
        };
        let view = SegmentView::parse(&bytes)
            .map_err(|error| error.at(&key).help("towline verify --repair rebuilds the index"))?;
        let segment = Arc::new(Segment { view, bytes });
        let mut loaded = self.shared.segments.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.insert(id, Arc::clone(&segment));
        Ok(segment)
    }

    fn loaded(&self, id: SegmentId) -> Option<Arc<Segment>> {
        self.shared.segments.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// From the local cache, else from the store into it: a segment may be larger than the memory budget. Without a place to
    /// write, it is held in memory.
    async fn fetched(&self, id: SegmentId, info: &SegmentInfo) -> Result<Mapped> {
        let path = self.cache().join("index").join(format!("{}-{}", id.session, id.object));
        if let Ok(mapped) = Mapped::open(&path) {
            return Ok(mapped);
        }
        let key = layout::owned(Family::Index, id);
        objects::checked_len(Kind::Segment, &key, info.len)?;
        let help = |error: Error| error.at(&key).help("towline verify --repair rebuilds the index");
        let staged = match Staged::beside(&path) {
            Ok(staged) => staged,
            Err(error) => {
                tracing::debug!("index segment is not cached: {error:?}");
                let object = objects::get_required(&**self.store().objects(), Kind::Segment, &key).await?;
                SegmentView::parse(&object).and_then(|_| open(Kind::Segment, &object)).map_err(help)?;
                return Ok(Mapped::Held(object));
            }
        };
        objects::retry(|| objects::download(&**self.store().objects(), &key, info.len, &staged.path)).await?;
        let object = Bytes::from_owner(Mapped::open(&staged.path)?);
        // A compressed one is refused before it is decompressed.
        SegmentView::parse(&object).and_then(|_| open(Kind::Segment, &object)).map_err(help)?;
        staged.publish(&path)?;
        Mapped::open(&path)
    }
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

/// A file that becomes another in one step, so that a crash leaves none or all of that one.
struct Staged {
    path: PathBuf,
}

impl Staged {
    /// An empty one in the folder of `path`.
    fn beside(path: &Path) -> Result<Self> {
        let folder = path.parent().map_or_else(PathBuf::new, Path::to_path_buf);
        let failed = |source| Error::io("write to the local cache", path, source);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
        let staged = folder.join(format!(".{}.part", crate::id::ObjectId::random()));
        std::fs::File::options().write(true).create_new(true).mode(0o600).open(&staged).map_err(failed)?;
        Ok(Self { path: staged })
    }

    fn publish(&self, path: &Path) -> Result<()> {
        std::fs::rename(&self.path, path).map_err(|source| Error::io("write to the local cache", path, source))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Published, it is not there any more.
        let _ = std::fs::remove_file(&self.path);
    }
}
