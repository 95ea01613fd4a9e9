//! Writer: writes chunks to packs, packs to a segment, and publishes a tree under a name. All writes use it.
//!
//! Packs are uploaded while the next one is filled. Index segments are committed as packs arrive, so that an interrupted save
//! resumes by normal dedup. The last commit sets the name, and indexes the remaining packs.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStoreExt as _;
use tokio::task::{JoinError, JoinSet};
use tracing::Instrument as _;

use super::filling::Filling;
use super::layout::{self, Family};
use super::log::{Action, Keeping, RefValue, SegmentInfo, State, StepFacts, labelled_name, log_forgotten};
use super::mapping::{PlacedTree, map_of};
use super::name_scope::NameScope;
use super::stored_chunks::{ChunkPlace, StoredChunks};
use super::unindexed::{Unindexed, Uploaded};
use super::upload_throughput::{UploadThroughput, Uploads};
use super::{Repository, objects};
use crate::clock::Timestamp;
use crate::codec::Encoded;
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, seal};
use crate::format::{Map, PackRef, Row, segment_bytes};
use crate::id::{ChunkId, ManifestId, ManifestKey, MapKey, Owned, PackId, SegmentId, SessionId};
use crate::limits::{MIB, PACK_CHUNKS_MAX, PACK_LEN_TARGET};
use crate::name::Name;
use crate::policy::Labels;
use crate::progress::Progress;

/// Time that a stopped writer waits for uploads in progress.
const STOPPING: Duration = Duration::from_secs(3);

/// One writer's session.
#[derive(Debug)]
pub struct Writer {
    repository: Repository,
    session: Option<SessionId>,
    /// True if the session is shared: this writer must not close it.
    lent: bool,
    filling: Option<Filling>,
    uploads: JoinSet<Result<Uploaded>>,
    throughput: Arc<Uploads>,
    unindexed: Unindexed,
    /// Segment over all unindexed packs whose commit is in progress, or failed with an unclear outcome.
    committing: Option<SegmentId>,
    packs: HashMap<PackId, PackRef>,
    stored_bytes: u64,
    pack_target: u64,
    uploads_max: usize,
    progress: Progress,
}

/// Tree to publish.
#[derive(Debug)]
pub struct Publication<'a> {
    /// Name to set.
    pub name: &'a Name,
    /// Version that the name must have; none if it must not exist.
    pub expected: Option<u64>,
    /// Treatment of the old value of the name, if it was another tree.
    pub keep: Keeping,
    /// Id and body of the manifest.
    pub manifest: (ManifestId, Vec<u8>),
    /// Chunks, in its order.
    pub chunks: &'a [ChunkId],
    /// Place of each of them.
    pub places: &'a [ChunkPlace],
    /// Chunks that this writer did not store, with their places.
    pub known: &'a StoredChunks,
    /// Bytes in all files.
    pub logical_bytes: u64,
    /// Files.
    pub files: u64,
    /// Time of the save.
    pub saved: Timestamp,
    /// Number of saves since the key step that its differences refer to; 0 for a key step.
    pub behind: u32,
    /// Facts for the log.
    pub facts: StepFacts,
    /// Labels that are given to the name, or to the run that it is a step of, in the same commit.
    pub labels: Labels,
    /// Names that it may make stricter, and whose kept values are its own.
    pub label_scope: NameScope,
    /// Names and trees that content is from: the name gets the labels that bind them when it is set.
    pub from: Vec<(&'a Name, ManifestId)>,
}

/// Outcome of a publication.
#[derive(Debug)]
pub enum Published {
    /// The name is set.
    Done(Box<RefValue>),
    /// These packs were purged meanwhile: their chunks must be found elsewhere or stored again.
    Lost(Vec<PackId>),
    /// The name does not have the expected version. The session stays open and the writer keeps its packs, so that it can publish
    /// again.
    Moved,
}

impl Writer {
    /// Creates a writer. Its session opens with the first pack.
    #[must_use]
    pub fn new(repository: &Repository, progress: &Progress) -> Self {
        let uploads_max: u64 = if repository.store().is_local() { 2 } else { 4 };
        // A pack holds up to twice its length in read buffers. Packs may use half of the budget, reads the other half.
        let share = repository.budget().total() / (4 * (uploads_max + 1));
        Self {
            repository: repository.clone(),
            session: None,
            lent: false,
            filling: None,
            uploads: JoinSet::new(),
            throughput: Arc::default(),
            unindexed: Unindexed::default(),
            committing: None,
            packs: HashMap::new(),
            stored_bytes: 0,
            pack_target: share.clamp(2 * MIB, PACK_LEN_TARGET),
            uploads_max: usize::try_from(uploads_max).unwrap_or(1),
            progress: progress.clone(),
        }
    }

    /// Creates a writer in an open, shared session, which it does not close.
    #[must_use]
    pub fn within(repository: &Repository, progress: &Progress, session: SessionId) -> Self {
        Self { session: Some(session), lent: true, ..Self::new(repository, progress) }
    }

    /// Bytes of all packs so far.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Upload rate so far, by the repository's clock.
    #[must_use]
    pub fn throughput(&self) -> UploadThroughput {
        self.throughput.throughput()
    }

    /// True if nothing was written, and nothing is pending.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.session.is_none() && self.filling.is_none()
    }

    /// The session; opens one if needed.
    ///
    /// # Errors
    /// As a commit.
    ///
    /// # Cancel safety
    /// Not safe: the session may have been opened; a later collect ends it.
    pub async fn session(&mut self) -> Result<SessionId> {
        if let Some(session) = self.session {
            return Ok(session);
        }
        let session = SessionId::random();
        self.repository.log().commit(Some(session), |_| Ok(vec![Action::Open(session)])).await?;
        self.session = Some(session);
        Ok(session)
    }

    /// Adds a chunk. With `share`, `stored` is kept without a copy, because most of its underlying buffer is kept anyway.
    ///
    /// # Errors
    /// Includes errors of uploads of earlier packs.
    ///
    /// # Cancel safety
    /// Not safe: drop the writer.
    pub async fn push(&mut self, id: ChunkId, stored: Encoded, plain_len: u32, share: bool) -> Result<ChunkPlace> {
        if self.filling.as_ref().is_some_and(|filling| !filling.has_room(stored.bytes.len())) {
            self.seal().await?;
        }
        if self.filling.is_none() {
            let session = self.session().await?;
            self.filling = Some(Filling::new(Owned::fresh(session)));
        }
        let Some(filling) = &mut self.filling else { return Err(Error::other("no pack is open")) };
        let place = filling.push(id, stored, plain_len, share);
        if filling.len() >= self.pack_target || filling.chunks() >= PACK_CHUNKS_MAX / 2 {
            self.seal().await?;
        }
        Ok(place)
    }

    /// Starts the upload of the current pack.
    async fn seal(&mut self) -> Result<()> {
        // If this future is dropped while it waits, the pack stays in `filling`: see `stop`.
        while self.filling.is_some() && self.uploads.len() >= self.uploads_max {
            self.arrived().await?;
        }
        let Some(filling) = self.filling.take() else { return Ok(()) };
        let (pack, ids, payload) = filling.finish();
        self.packs.insert(pack.id, pack);
        let (repository, progress) = (self.repository.clone(), self.progress.clone());
        let throughput = Arc::clone(&self.throughput);
        let upload = async move {
            let key = layout::owned(Family::Pack, pack.id);
            throughput.begin(repository.clock().now());
            let put = objects::put(&**repository.store().objects(), &key, payload).await;
            throughput.end(repository.clock().now(), if put.is_ok() { pack.len } else { 0 });
            put?;
            progress.moved(pack.len);
            Ok((pack, ids))
        };
        self.uploads.spawn(upload.instrument(tracing::debug_span!("pack", id = %pack.id, bytes = pack.len)));
        while let Some(upload) = self.uploads.try_join_next() {
            self.take_in(upload)?;
        }
        if self.unindexed.is_due() {
            self.index_uploaded().await?;
        }
        Ok(())
    }

    async fn arrived(&mut self) -> Result<()> {
        match self.uploads.join_next().await {
            Some(upload) => self.take_in(upload),
            None => Ok(()),
        }
    }

    fn take_in(&mut self, upload: Result<Result<Uploaded>, JoinError>) -> Result<()> {
        let uploaded = upload.map_err(|error| Error::other("an upload stopped").source(error))??;
        self.stored_bytes += uploaded.0.len;
        self.unindexed.push(uploaded);
        Ok(())
    }

    /// Uploads the last pack, and waits for all uploads.
    pub(crate) async fn settle(&mut self) -> Result<()> {
        self.seal().await?;
        while !self.uploads.is_empty() {
            self.arrived().await?;
        }
        Ok(())
    }

    /// Writes a segment over the packs that are not indexed yet, for the commit that follows.
    async fn write_segment(&mut self) -> Result<Option<Action>> {
        let Some(session) = self.session.filter(|_| !self.unindexed.packs().is_empty()) else { return Ok(None) };
        let mut rows = Vec::new();
        for (pack, (_, ids)) in (0u32..).zip(self.unindexed.packs()) {
            rows.extend((0u32..).zip(ids).map(|(ordinal, id)| Row { prefix: id.prefix(), pack, ordinal }));
        }
        let packs: Vec<PackRef> = self.unindexed.packs().iter().map(|(pack, _)| *pack).collect();
        let (id, info) = put_segment(&self.repository, session, &packs, rows).await?;
        self.committing = Some(id);
        Ok(Some(Action::AddSegment(id, info)))
    }

    async fn index_uploaded(&mut self) -> Result<()> {
        if let Some(add) = self.write_segment().await? {
            self.repository.log().commit(self.session, |_| Ok(vec![add.clone()])).await?;
            self.indexed();
        }
        Ok(())
    }

    /// Notes that the segment was committed.
    fn indexed(&mut self) {
        self.committing = None;
        self.unindexed.committed();
    }

    /// Finds out whether a commit of a segment that was dropped or failed has happened: a pack must be listed in only one segment. No
    /// further pack must have arrived since.
    async fn recall(&mut self) -> Result<()> {
        if let Some(id) = self.committing.take()
            && self.repository.state().await?.segments.contains_key(&id)
        {
            self.unindexed.committed();
        }
        Ok(())
    }

    /// Publishes a tree under a name and ends the session. The writer can be used again: the next pack opens a new session.
    ///
    /// # Errors
    /// Conflict, if the session was fenced.
    ///
    /// # Cancel safety
    /// Not safe: the commit may have happened; read the name to find out.
    pub async fn publish(&mut self, publication: Publication<'_>) -> Result<Published> {
        self.settle().await?;
        let session = self.session().await?;
        let add = self.write_segment().await?;
        let (manifest, chunks, places) = (publication.manifest.0, publication.chunks, publication.places);
        let tree = PlacedTree { manifest, chunks, places };
        let map = self.map(tree, publication.known)?;
        let (manifest_id, body) = publication.manifest;
        let (manifest_key, map_key) = put_tree(&self.repository, session, &body, &map).await?;
        let value = RefValue {
            version: 0,
            manifest: manifest_id,
            manifest_key,
            map_key,
            saved: publication.saved,
            logical_bytes: publication.logical_bytes,
            files: publication.files,
            chunks: publication.places.len() as u64,
            behind: publication.behind,
            facts: publication.facts,
            attempt: None,
        };
        // Packs of earlier sessions of this writer count as foreign, too: they are no roots any more.
        let foreign: BTreeSet<PackId> =
            map.packs.iter().map(|pack| pack.id).filter(|id| id.session != session).collect();
        let known = publication.known.state().seq;
        let (mut lost, mut moved, mut kept) = (Vec::new(), false, Vec::new());
        let commit = self.repository.log().commit(Some(session), |state| {
            lost.clear();
            moved = state.version(publication.name) != publication.expected;
            if moved {
                return Ok(Vec::new());
            }
            let mut actions: Vec<Action> = add.clone().into_iter().collect();
            match state.check_packs(&foreign, known) {
                Ok(pardons) => actions.extend(pardons),
                Err(gone) => {
                    lost = gone;
                    return Ok(Vec::new());
                }
            }
            let own = |name: &Name| publication.label_scope.includes(name);
            kept = publication.keep.actions(state, (publication.name, manifest), own)?;
            actions.extend(kept.iter().cloned());
            actions.extend(state.label(&labelled_name(publication.name), &publication.labels)?);
            for (from, tree) in &publication.from {
                actions.extend(self.repository.inherited_labels(state, (*from, tree), publication.name)?);
            }
            let (name, expected) = (publication.name.clone(), publication.expected);
            actions.push(Action::SetRef { name, expected, value: value.clone() });
            actions.push(Action::Close(session));
            self.repository.check_label_scope(state, (Some(session), &actions), &publication.label_scope)?;
            Ok(actions)
        });
        let committed = commit.await?;
        let Some(version) = committed.entry else {
            self.committing = None;
            if moved {
                return Ok(Published::Moved);
            }
            self.index_uploaded().await?;
            return Ok(Published::Lost(lost));
        };
        log_forgotten(&kept);
        self.session = None;
        self.indexed();
        super::index::merge_if_many(&self.repository, &committed.state).await;
        Ok(Published::Done(Box::new(RefValue { version, ..value })))
    }

    /// Gives up after an error: discards the current pack, indexes the uploaded ones, so that the next try finds them, and ends
    /// the session.
    ///
    /// # Errors
    /// As a commit; errors of uploads are ignored.
    ///
    /// # Cancel safety
    /// Not safe: the session may stay open.
    pub async fn give_up(&mut self) -> Result<()> {
        self.recall().await?;
        self.drain().await;
        self.close(|_| Ok(Vec::new())).await
    }

    /// As [`Writer::give_up`], but the session stays open for the next tree.
    ///
    /// # Errors
    /// As a commit; errors of uploads are ignored.
    ///
    /// # Cancel safety
    /// Not safe: drop the writer.
    pub(crate) async fn abandon(&mut self) -> Result<()> {
        self.recall().await?;
        self.drain().await;
        self.index_uploaded().await
    }

    /// As [`Writer::give_up`], but indexes nothing, and deletes the packs that no segment lists.
    ///
    /// # Errors
    /// As a commit; errors of uploads are ignored.
    ///
    /// # Cancel safety
    /// Not safe: the session may stay open.
    pub(crate) async fn discard(&mut self) -> Result<()> {
        self.drain().await;
        let uploaded = std::mem::take(&mut self.unindexed);
        let failed = self.committing.take();
        self.close(|_| Ok(Vec::new())).await?;
        // The session has ended: if a commit that failed has not happened, it cannot any more.
        if failed.is_some() {
            let (_, index) = self.repository.indexed_state().await?;
            let mut listed = index.segments().iter().flat_map(|(_, segment)| segment.packs());
            if listed.any(|listed| uploaded.packs().iter().any(|(pack, _)| pack.id == listed.id)) {
                return Ok(());
            }
        }
        // Best effort: a collect deletes those that are left, after the grace.
        for (pack, _) in uploaded.packs() {
            let key = layout::owned(Family::Pack, pack.id);
            if let Err(error) = self.repository.store().objects().delete(&key).await {
                tracing::debug!("{key} is left: {error}");
            }
        }
        Ok(())
    }

    /// Returns `done`; after an error as [`Writer::discard`], where what cannot be discarded is left to the collector.
    pub(crate) async fn discard_on_error<T>(&mut self, done: Result<T>) -> Result<T> {
        if done.is_err()
            && let Err(left) = self.discard().await
        {
            tracing::debug!("the session is left to the collector: {left:?}");
        }
        done
    }

    /// Discards the current pack, and waits for all uploads.
    async fn drain(&mut self) {
        self.filling = None;
        while !self.uploads.is_empty() {
            if let Err(error) = self.arrived().await {
                tracing::debug!("a pack was not uploaded: {error:?}");
            }
        }
    }

    /// Ends early on request: uploads the current pack, waits at most three seconds for uploads in progress, indexes the packs
    /// that arrived, and ends the session. Returns the stored bytes that the next try finds.
    ///
    /// # Errors
    /// As a commit; errors of uploads are ignored.
    ///
    /// # Cancel safety
    /// Not safe: the session may stay open.
    pub async fn stop(&mut self) -> Result<u64> {
        self.recall().await?;
        let sent = tokio::time::timeout(STOPPING, async {
            if let Err(error) = self.seal().await {
                tracing::debug!("a pack was not sent: {error:?}");
            }
            while !self.uploads.is_empty() {
                if let Err(error) = self.arrived().await {
                    tracing::debug!("a pack was not uploaded: {error:?}");
                }
            }
        });
        if sent.await.is_err() {
            tracing::debug!("{} packs are still on their way: they are left behind", self.uploads.len());
        }
        // Dropping the set aborts its tasks without waiting for them.
        (self.filling, self.uploads) = (None, JoinSet::new());
        self.close(|_| Ok(Vec::new())).await?;
        Ok(self.unindexed.indexed())
    }

    /// Indexes the uploaded packs, and ends the session without setting a name; a shared session stays open.
    ///
    /// # Errors
    /// As a commit.
    ///
    /// # Cancel safety
    /// Not safe: the session may stay open.
    pub async fn close(&mut self, mut last: impl FnMut(&State) -> Result<Vec<Action>> + Send) -> Result<()> {
        self.settle().await?;
        let (Some(session), lent) = (self.session, self.lent) else { return Ok(()) };
        let add = self.write_segment().await?;
        let commit = self.repository.log().commit(Some(session), |state| {
            let mut actions: Vec<Action> = add.clone().into_iter().collect();
            actions.extend(last(state)?);
            actions.extend((!lent).then_some(Action::Close(session)));
            Ok(actions)
        });
        commit.await?;
        self.session = self.session.filter(|_| lent);
        self.indexed();
        Ok(())
    }

    /// Stores a tree without a name: indexes the uploaded packs, and returns the keys of manifest and map, and the map.
    ///
    /// # Errors
    /// Conflict, if the session has ended.
    ///
    /// # Cancel safety
    /// Not safe: drop the writer.
    pub async fn deposit(
        &mut self,
        tree: PlacedTree<'_>,
        body: &[u8],
        known: &StoredChunks,
    ) -> Result<((ManifestKey, MapKey), Map)> {
        self.settle().await?;
        let session = self.session().await?;
        self.index_uploaded().await?;
        let map = self.map(tree, known)?;
        Ok((put_tree(&self.repository, session, body, &map).await?, map))
    }

    fn map(&self, tree: PlacedTree<'_>, known: &StoredChunks) -> Result<Map> {
        let pack = |id: PackId| self.packs.get(&id).copied().or_else(|| known.pack(id));
        map_of(tree, pack, |place| known.base(place))
    }

    /// The pack `id`, if this writer wrote it.
    #[must_use]
    pub fn pack(&self, id: PackId) -> Option<PackRef> {
        self.packs.get(&id).copied()
    }
}

/// Writes a manifest and its map under `session`.
pub(super) async fn put_tree(
    repository: &Repository,
    session: SessionId,
    body: &[u8],
    map: &Map,
) -> Result<(ManifestKey, MapKey)> {
    let (manifest_key, map_key) = (Owned::fresh(session), Owned::fresh(session));
    let objects = &**repository.store().objects();
    let manifest_at = layout::owned(Family::Manifest, manifest_key);
    let map_at = layout::owned(Family::Map, map_key);
    futures::try_join!(
        objects::put(objects, &manifest_at, seal(Kind::Manifest, body, true).into()),
        objects::put(objects, &map_at, map.seal().into()),
    )?;
    Ok((manifest_key, map_key))
}

/// Writes a segment object under `session`.
pub(super) async fn put_segment(
    repository: &Repository,
    session: SessionId,
    packs: &[PackRef],
    rows: Vec<Row>,
) -> Result<(SegmentId, SegmentInfo)> {
    let chunks = rows.len() as u64;
    let object = seal(Kind::Segment, &segment_bytes(packs, rows), false);
    let id = Owned::fresh(session);
    let info = SegmentInfo { len: object.len() as u64, packs: packs.len() as u64, chunks, built: 0 };
    objects::put(&**repository.store().objects(), &layout::owned(Family::Index, id), object.into()).await?;
    Ok((id, info))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::codec::Codec;
    use crate::error::ErrorKind;
    use crate::repository::OpenOptions;
    use crate::repository::faults::{Fault, FaultyStore};
    use crate::repository::layout::Numbered;
    use crate::storage::Store;

    /// A writer whose last commit, of a segment over one pack, was done, but the store never said so.
    async fn unsure_writer() -> (Repository, Writer) {
        let objects = Arc::new(FaultyStore::default());
        let store = Store::from_objects(Arc::clone(&objects) as _);
        let (repository, _) = Repository::create(store, OpenOptions::default()).await.unwrap();
        let mut writer = Writer::new(&repository, &Progress::default());
        let stored = Encoded { codec: Codec::Raw, bytes: Bytes::from_static(b"chunk"), base: None };
        writer.push(ChunkId::of(b"chunk"), stored, 5, false).await.unwrap();
        writer.settle().await.unwrap();
        let next = repository.state().await.unwrap().seq + 1;
        objects.set(Numbered::Entry.key(next), Fault::Conceal);
        let error = writer.index_uploaded().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
        objects.heal();
        (repository, writer)
    }

    #[tokio::test]
    async fn a_pack_that_was_indexed_unheard_is_not_indexed_again() {
        let (repository, mut writer) = unsure_writer().await;
        writer.give_up().await.unwrap();
        assert_eq!(repository.state().await.unwrap().segments.len(), 1);
    }

    #[tokio::test]
    async fn a_pack_that_was_indexed_unheard_is_not_deleted() {
        let (repository, mut writer) = unsure_writer().await;
        writer.discard().await.unwrap();
        assert_eq!(repository.state().await.unwrap().segments.len(), 1);
        let pack = *writer.packs.keys().next().unwrap();
        repository.store().objects().head(&layout::owned(Family::Pack, pack)).await.unwrap();
    }
}
