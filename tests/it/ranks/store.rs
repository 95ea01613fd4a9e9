//! A store with a clock of its own, which can hold one kind of request up, or all from some request on.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result,
};
use tokio::sync::Notify;

/// The store.
#[derive(Debug)]
pub(super) struct Clocked {
    inner: Arc<dyn ObjectStore>,
    clock: Arc<Mutex<Times>>,
    /// The first write below this prefix waits for `go` once it has said so by `held`.
    hold: Option<&'static str>,
    holding: AtomicBool,
    /// Requests that are still answered; who sends another hears nothing, and `held` says so.
    answers: AtomicI64,
    pub(super) held: Notify,
    pub(super) go: Notify,
}

/// What time it is, and when each object was written: all since the beginning.
#[derive(Debug, Default)]
struct Times {
    now: Duration,
    written: HashMap<Path, Duration>,
}

impl Times {
    fn bend(&self, meta: ObjectMeta) -> ObjectMeta {
        let since = self.written.get(&meta.location).copied().unwrap_or_default();
        ObjectMeta { last_modified: meta.last_modified + since, ..meta }
    }
}

impl Clocked {
    pub(super) fn new(inner: Arc<dyn ObjectStore>, hold: Option<&'static str>) -> Arc<Self> {
        let (clock, held, go) = Default::default();
        let (holding, answers) = (AtomicBool::new(true), AtomicI64::new(i64::MAX));
        Arc::new(Self { inner, clock, hold, holding, answers, held, go })
    }

    /// Answers `requests` more, and no other.
    pub(super) fn answer(&self, requests: i64) {
        self.answers.store(requests, Ordering::SeqCst);
    }

    async fn arrive(&self) {
        if self.answers.fetch_sub(1, Ordering::SeqCst) <= 0 {
            self.held.notify_one();
            std::future::pending::<()>().await;
        }
    }

    pub(super) fn pass(&self, time: Duration) {
        self.clock.lock().unwrap().now += time;
    }
}

impl fmt::Display for Clocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clocked({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Clocked {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.arrive().await;
        let matches = self.hold.is_some_and(|prefix| location.as_ref().starts_with(prefix));
        if matches && self.holding.swap(false, Ordering::SeqCst) {
            self.held.notify_one();
            self.go.notified().await;
        }
        let put = self.inner.put_opts(location, payload, opts).await?;
        let mut clock = self.clock.lock().unwrap();
        let now = clock.now;
        clock.written.insert(location.clone(), now);
        Ok(put)
    }

    async fn put_multipart_opts(&self, to: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(to, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.arrive().await;
        let got = self.inner.get_opts(location, options).await?;
        Ok(GetResult { meta: self.clock.lock().unwrap().bend(got.meta.clone()), ..got })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let clock = Arc::clone(&self.clock);
        self.inner.list(prefix).map_ok(move |meta| clock.lock().unwrap().bend(meta)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
