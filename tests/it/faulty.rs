//! A store that fails on purpose, driven by a seed: the same seed and the same calls in the same order fail alike.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};

/// How often each fault happens, in requests of a thousand.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// An error instead of an answer; nothing was done.
    pub(crate) errors: u32,
    /// What changes the store is done, and answered by an error.
    pub(crate) lost_acks: u32,
    /// A body breaks off half way with an error.
    pub(crate) resets: u32,
    /// A body ends half way as if it were whole.
    pub(crate) truncated: u32,
    /// A body comes in small parts with pauses.
    pub(crate) drips: u32,
    /// A request is never answered, or a body never goes on.
    pub(crate) stalls: u32,
    /// A body has one bit wrong.
    pub(crate) flipped: u32,
    /// A listing lacks what was written last.
    pub(crate) stale_listings: u32,
}

impl Faults {
    /// Everything that a bad day brings, often; no bit is flipped and nothing stalls.
    pub(crate) fn bad_day() -> Self {
        Self { errors: 60, lost_acks: 60, resets: 40, truncated: 20, drips: 20, stale_listings: 100, ..Self::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    Error,
    LostAck,
    Reset,
    Truncated,
    Drip,
    Stall,
    Flipped,
}

/// Objects written this recently may be missing from a stale listing.
const RECENT: usize = 8;

/// The faulty store.
#[derive(Clone, Debug)]
pub(crate) struct Faulty {
    inner: Arc<dyn ObjectStore>,
    faults: Faults,
    rng: Arc<Rng>,
    recent: Arc<Mutex<VecDeque<Path>>>,
    unlisted: Arc<Mutex<Vec<Path>>>,
    full: Arc<Mutex<Option<std::io::ErrorKind>>>,
}

#[derive(Debug)]
struct Rng {
    state: AtomicU64,
    calm: AtomicBool,
    injected: AtomicU64,
}

impl Rng {
    /// A number below `bound`, by `SplitMix64` (<https://prng.di.unimi.it/splitmix64.c>).
    fn below(&self, bound: u64) -> u64 {
        let mut z = self.state.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::SeqCst);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }

    fn pick(&self, table: &[(u32, Fault)]) -> Fault {
        let mut roll = self.below(1000);
        if self.calm.load(Ordering::SeqCst) {
            return Fault::None;
        }
        for &(weight, fault) in table {
            let Some(rest) = roll.checked_sub(u64::from(weight)) else {
                self.injected.fetch_add(1, Ordering::SeqCst);
                return fault;
            };
            roll = rest;
        }
        Fault::None
    }
}

impl Faulty {
    /// `inner`, failing as `faults` and `seed` say.
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, faults: Faults, seed: u64) -> Self {
        let rng = Rng { state: seed.into(), calm: AtomicBool::new(false), injected: AtomicU64::new(0) };
        Self {
            inner,
            faults,
            rng: Arc::new(rng),
            recent: Arc::default(),
            unlisted: Arc::default(),
            full: Arc::default(),
        }
    }

    /// Fails puts of packs as a full disk does, or a used-up quota, from now on; none does not.
    pub(crate) fn fill(&self, full: Option<std::io::ErrorKind>) {
        *self.full.lock().unwrap() = full;
    }

    /// From now on (`true`) nothing fails.
    pub(crate) fn calm(&self, calm: bool) {
        self.rng.calm.store(calm, Ordering::SeqCst);
    }

    /// Leaves `key` out of every listing from now on.
    pub(crate) fn unlist(&self, key: Path) {
        self.unlisted.lock().unwrap().push(key);
    }

    /// How many faults there were.
    pub(crate) fn injected(&self) -> u64 {
        self.rng.injected.load(Ordering::SeqCst)
    }

    fn pick_for_read(&self) -> Fault {
        let Faults { errors, resets, truncated, drips, stalls, flipped, .. } = self.faults;
        self.rng.pick(&[
            (errors, Fault::Error),
            (resets, Fault::Reset),
            (truncated, Fault::Truncated),
            (drips, Fault::Drip),
            (stalls, Fault::Stall),
            (flipped, Fault::Flipped),
        ])
    }

    /// Carries out something that changes the store, or not.
    async fn change<T>(&self, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let Faults { errors, lost_acks, stalls, .. } = self.faults;
        match self.rng.pick(&[(errors, Fault::Error), (lost_acks, Fault::LostAck), (stalls, Fault::Stall)]) {
            Fault::Error => Err(failure("503 Slow Down")),
            Fault::Stall => std::future::pending().await,
            Fault::LostAck => {
                request.await?;
                Err(failure("connection reset before the answer"))
            }
            _ => request.await,
        }
    }

    fn wrote(&self, key: &Path) {
        let mut recent = self.recent.lock().unwrap();
        recent.push_back(key.clone());
        if recent.len() > RECENT {
            recent.pop_front();
        }
    }

    /// What the listing that starts now leaves out.
    fn unseen(&self) -> Vec<Path> {
        let stale = self.rng.pick(&[(self.faults.stale_listings, Fault::Truncated)]);
        let mut unseen = self.unlisted.lock().unwrap().clone();
        if stale != Fault::None {
            unseen.extend(self.recent.lock().unwrap().iter().cloned());
        }
        unseen
    }

    fn listing(&self, inner: BoxStream<'static, Result<ObjectMeta>>) -> BoxStream<'static, Result<ObjectMeta>> {
        let Faults { errors, stalls, .. } = self.faults;
        let unseen = self.unseen();
        let seen = inner.try_filter(move |meta| std::future::ready(!unseen.contains(&meta.location)));
        match self.rng.pick(&[(errors, Fault::Error), (stalls, Fault::Stall)]) {
            Fault::Error => seen.take(1).chain(stream::iter([Err(failure("503 Slow Down"))])).boxed(),
            Fault::Stall => seen.take(1).chain(stream::pending()).boxed(),
            _ => seen.boxed(),
        }
    }

    fn body(&self, bytes: Bytes, fault: Fault) -> BoxStream<'static, Result<Bytes>> {
        let half = bytes.slice(..bytes.len() / 2);
        match fault {
            Fault::Reset => stream::iter([Ok(half), Err(failure("connection reset in the body"))]).boxed(),
            Fault::Truncated => stream::iter([Ok(half)]).boxed(),
            Fault::Stall => stream::iter([Ok(half)]).chain(stream::pending()).boxed(),
            Fault::Flipped if !bytes.is_empty() => {
                let mut wrong = bytes.to_vec();
                let at = usize::try_from(self.rng.below(wrong.len() as u64)).unwrap();
                wrong[at] ^= 1 << self.rng.below(8);
                stream::iter([Ok(wrong.into())]).boxed()
            }
            Fault::Drip => {
                let part = bytes.len().div_ceil(8).max(1);
                let parts: Vec<Bytes> =
                    (0..bytes.len()).step_by(part).map(|at| bytes.slice(at..bytes.len().min(at + part))).collect();
                let slowly = stream::iter(parts).then(|part| async move {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    Ok(part)
                });
                slowly.boxed()
            }
            _ => stream::iter([Ok(bytes)]).boxed(),
        }
    }
}

fn failure(what: &'static str) -> Error {
    Error::Generic { store: "faulty", source: what.into() }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({})", self.inner)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let full = self.full.lock().unwrap().filter(|_| location.as_ref().starts_with("pack/"));
        if let Some(full) = full {
            return Err(Error::Generic { store: "faulty", source: Box::new(std::io::Error::from(full)) });
        }
        self.wrote(location);
        self.change(self.inner.put_opts(location, payload, opts)).await
    }

    async fn put_multipart_opts(&self, to: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.wrote(to);
        let inner = self.change(self.inner.put_multipart_opts(to, opts)).await?;
        Ok(Box::new(FaultyUpload { inner, store: self.clone() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let fault = self.pick_for_read();
        if fault == Fault::Error {
            return Err(failure("500 Internal Error"));
        }
        let head = options.head;
        let got = self.inner.get_opts(location, options).await?;
        if head {
            return Ok(got);
        }
        let (meta, range, attributes) = (got.meta.clone(), got.range.clone(), got.attributes.clone());
        let payload = GetResultPayload::Stream(self.body(got.bytes().await?, fault));
        Ok(GetResult { payload, meta, range, attributes, extensions: object_store::Extensions::new() })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let mut parts = Vec::with_capacity(ranges.len());
        for range in ranges {
            let options = GetOptions { range: Some(range.clone().into()), ..GetOptions::default() };
            parts.push(self.get_opts(location, options).await?.bytes().await?);
        }
        Ok(parts)
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let deleted = locations.then(move |location| {
            let store = store.clone();
            async move {
                let one = stream::iter([location]).boxed();
                let mut outcome = store.inner.delete_stream(one);
                store.change(async { outcome.next().await.unwrap_or_else(|| Err(failure("no outcome"))) }).await
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listing(self.inner.list(prefix))
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listing(self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        if self.rng.pick(&[(self.faults.errors, Fault::Error)]) == Fault::Error {
            return Err(failure("503 Slow Down"));
        }
        let unseen = self.unseen();
        let mut listed = self.inner.list_with_delimiter(prefix).await?;
        listed.objects.retain(|meta| !unseen.contains(&meta.location));
        Ok(listed)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.wrote(to);
        self.change(self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.wrote(to);
        self.change(self.inner.rename_opts(from, to, options)).await
    }
}

#[derive(Debug)]
struct FaultyUpload {
    inner: Box<dyn MultipartUpload>,
    store: Faulty,
}

#[async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let part = self.inner.put_part(data);
        let store = self.store.clone();
        Box::pin(async move { store.change(part).await })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.store.change(self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

mod tests {
    use super::*;
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;
    use towline::ErrorKind;
    use towline::storage::Store;

    const ALWAYS: u32 = 1000;

    async fn holding(faults: Faults) -> (Faulty, Path) {
        let faulty = Faulty::new(Arc::new(InMemory::new()), faults, 1);
        let key = Path::from("a");
        faulty.calm(true);
        faulty.put(&key, vec![7; 64].into()).await.unwrap();
        faulty.calm(false);
        (faulty, key)
    }

    #[tokio::test]
    async fn each_fault_is_what_it_says() {
        let (reset, key) = holding(Faults { resets: ALWAYS, ..Faults::default() }).await;
        assert!(reset.get(&key).await.unwrap().bytes().await.is_err());
        let (short, key) = holding(Faults { truncated: ALWAYS, ..Faults::default() }).await;
        assert_eq!(short.get(&key).await.unwrap().bytes().await.unwrap().len(), 32);
        let (drip, key) = holding(Faults { drips: ALWAYS, ..Faults::default() }).await;
        assert_eq!(drip.get(&key).await.unwrap().bytes().await.unwrap(), vec![7; 64]);
        let (flip, key) = holding(Faults { flipped: ALWAYS, ..Faults::default() }).await;
        let wrong = flip.get(&key).await.unwrap().bytes().await.unwrap();
        assert_eq!(wrong.iter().map(|b| (b ^ 7).count_ones()).sum::<u32>(), 1);
        let (down, key) = holding(Faults { errors: ALWAYS, ..Faults::default() }).await;
        assert!(down.put(&key, "new".into()).await.is_err() && down.get(&key).await.is_err());
        let (blind, _) = holding(Faults { stale_listings: ALWAYS, ..Faults::default() }).await;
        assert_eq!(blind.list(None).count().await, 0);
        assert_eq!(blind.injected(), 1);
    }

    #[tokio::test]
    async fn a_lost_acknowledgement_was_carried_out() {
        let (lost, key) = holding(Faults { lost_acks: ALWAYS, ..Faults::default() }).await;
        assert!(lost.put(&key, "new".into()).await.is_err());
        assert_eq!(lost.get(&key).await.unwrap().bytes().await.unwrap(), "new");
        assert!(lost.delete(&key).await.is_err());
        assert!(lost.get(&key).await.is_err());
        let mut upload = lost.put_multipart(&key).await;
        assert!(upload.is_err());
        lost.calm(true);
        upload = lost.put_multipart(&key).await;
        let mut upload = upload.unwrap();
        lost.calm(false);
        assert!(upload.put_part("part".into()).await.is_err());
        assert!(upload.complete().await.is_err());
        assert_eq!(lost.get(&key).await.unwrap().bytes().await.unwrap(), "part");
    }

    /// The watchdog turns what would hang into an error, wherever it hangs.
    #[tokio::test]
    async fn a_stall_becomes_an_error() {
        let (hung, key) = holding(Faults { stalls: ALWAYS, ..Faults::default() }).await;
        let store = Store::from_objects_watched(Arc::new(hung), Duration::from_millis(50));
        let kinds = [
            store.objects().get(&key).await.unwrap().bytes().await.map(drop),
            store.objects().put(&key, "x".into()).await.map(drop),
            store.objects().delete(&key).await,
            store.objects().list(None).try_collect::<Vec<_>>().await.map(drop),
        ];
        for outcome in kinds {
            assert_eq!(towline::Error::from(outcome.unwrap_err()).kind(), ErrorKind::Unreachable);
        }
    }

    #[tokio::test]
    async fn the_same_seed_fails_alike() {
        let outcomes = |seed| async move {
            let faulty = Faulty::new(Arc::new(InMemory::new()), Faults::bad_day(), seed);
            let mut seen = Vec::new();
            for n in 0..200 {
                seen.push(faulty.put(&Path::from(format!("k{n}")), "x".into()).await.is_ok());
            }
            seen
        };
        assert_eq!(outcomes(5).await, outcomes(5).await);
        assert_ne!(outcomes(5).await, outcomes(6).await);
    }
}
