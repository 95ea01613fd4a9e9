//! Watchdog: fails requests without progress. There is no limit on the total time.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, Stream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};
use tokio::time::{Instant, Sleep, timeout};

use super::location::Location;
use super::pages::ListingCheck;

/// Minimum bytes per second of a request whose progress is not visible, which extends its stall limit by its size. `object_store`
/// does not report the progress of a put. If the peer stops acknowledging packets, the kernel notices much earlier (reqwest sets
/// `TCP_USER_TIMEOUT` to 30 s).
const SLOWEST: u64 = 128 << 10;
/// Time before a request fails at which the log says that the store does not answer.
const NOTICE: Duration = Duration::from_secs(45);
/// Minimum time between two such lines: a store that hangs does not answer many requests at once.
const NOTICE_EVERY: Duration = Duration::from_mins(1);
/// Time of the last one.
static NOTICED: Mutex<Option<Instant>> = Mutex::new(None);

/// A store whose requests fail after `stall` without progress: no answer, or no next part of a body.
///
/// Time in which the caller does not poll for the next part does not count.
#[derive(Debug)]
pub struct Watchdog<T> {
    inner: T,
    limit: Limit,
}

/// Time limit of the requests to a store.
#[derive(Clone, Debug)]
struct Limit {
    stall: Duration,
    /// As [`NOTICE`].
    notice: Duration,
    /// Location of the store.
    store: Arc<str>,
}

impl<T: ObjectStore> Watchdog<T> {
    /// Watches `inner`, the store at `location`.
    pub fn new(inner: T, location: &Location, stall: Duration) -> Self {
        Self { inner, limit: Limit { stall, notice: NOTICE, store: location.to_string().into() } }
    }
}

impl<T: ObjectStore> fmt::Display for Watchdog<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watchdog({:?}, {})", self.limit.stall, self.inner)
    }
}

/// Error: no progress for the given time.
#[derive(Debug, thiserror::Error)]
#[error("no progress for {0:?}")]
struct Stalled(Duration);

fn stalled(limit: Duration) -> Error {
    Error::Generic { store: "watchdog", source: Box::new(Stalled(limit)) }
}

impl Limit {
    /// Result of a request, or an error once it is overdue.
    async fn within<T>(&self, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
        self.within_for(0, request).await
    }

    /// The same for a request of so many bytes, whose progress is not visible.
    async fn within_for<T>(&self, bytes: u64, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let limit = self.stall + Duration::from_secs(bytes / SLOWEST);
        let mut request = pin!(timeout(limit, request));
        let noticed = limit.checked_sub(self.notice).unwrap_or(limit);
        let answer = match timeout(noticed, &mut request).await {
            Ok(answer) => answer,
            Err(_) => {
                self.notice(noticed, limit);
                request.await
            }
        };
        answer.unwrap_or_else(|_| Err(stalled(limit)))
    }

    fn notice(&self, waited: Duration, limit: Duration) {
        let mut last = NOTICED.lock().unwrap_or_else(PoisonError::into_inner);
        if waited < limit && last.is_none_or(|last| last.elapsed() >= NOTICE_EVERY) {
            *last = Some(Instant::now());
            tracing::warn!(
                "{} has not answered for {waited:?}; a request fails after {limit:?}, and is retried",
                self.store
            );
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<T: ObjectStore> ObjectStore for Watchdog<T> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.limit.within_for(payload.content_length() as u64, self.inner.put_opts(location, payload, opts)).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.limit.within(self.inner.put_multipart_opts(location, opts)).await?;
        Ok(Box::new(WatchedUpload { inner, limit: self.limit.clone() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let result = self.limit.within(self.inner.get_opts(location, options)).await?;
        let payload = match result.payload {
            file @ GetResultPayload::File(..) => file,
            GetResultPayload::Stream(stream) => GetResultPayload::Stream(watched(stream, self.limit.stall)),
        };
        Ok(GetResult { payload, ..result })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        // The ranges are returned all at once, without visible progress: as for an upload, the size extends the limit.
        let bytes: u64 = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        self.limit.within_for(bytes, self.inner.get_ranges(location, ranges)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        watched(self.inner.delete_stream(locations), self.limit.stall)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        ending(watched(self.inner.list(prefix), self.limit.stall), &self.limit.store)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        ending(watched(self.inner.list_with_offset(prefix, offset), self.limit.stall), &self.limit.store)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.limit.within(self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.limit.within(self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.limit.within(self.inner.rename_opts(from, to, options)).await
    }
}

#[derive(Debug)]
struct WatchedUpload {
    inner: Box<dyn MultipartUpload>,
    limit: Limit,
}

#[async_trait]
impl MultipartUpload for WatchedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (limit, bytes) = (self.limit.clone(), data.content_length() as u64);
        let part = self.inner.put_part(data);
        Box::pin(async move { limit.within_for(bytes, part).await })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.limit.within(self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.limit.within(self.inner.abort()).await
    }
}

fn watched<T: Send + 'static>(inner: BoxStream<'static, Result<T>>, stall: Duration) -> BoxStream<'static, Result<T>> {
    WatchdogStream { inner: Some(inner), stall, alarm: None }.boxed()
}

/// The listing, which fails if it begins again: a store that answers each page with the same keys would be listed for ever.
fn ending(listing: BoxStream<'static, Result<ObjectMeta>>, store: &Arc<str>) -> BoxStream<'static, Result<ObjectMeta>> {
    let mut check = ListingCheck::new(Arc::clone(store));
    listing.map(move |found| found.and_then(|meta| check.check(meta))).boxed()
}

/// A stream that ends with an error once its next item is overdue. The timer runs only while an item is awaited: ready items need
/// no timer, and pauses of the caller do not count.
struct WatchdogStream<T> {
    inner: Option<BoxStream<'static, Result<T>>>,
    stall: Duration,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl<T> Stream for WatchdogStream<T> {
    type Item = Result<T>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let Some(inner) = this.inner.as_mut() else { return Poll::Ready(None) };
        if let Poll::Ready(item) = inner.as_mut().poll_next(cx) {
            this.alarm = None;
            return Poll::Ready(item);
        }
        let stall = this.stall;
        ready!(this.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall))).as_mut().poll(cx));
        this.inner = None;
        Poll::Ready(Some(Err(stalled(stall))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;

    const STALL: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn a_silent_stream_fails_and_a_slow_one_does_not() {
        let slow = stream::iter(0..4).then(|n| async move {
            tokio::time::sleep(STALL / 3).await;
            Ok(n)
        });
        let mut body = watched(slow.chain(stream::pending()).boxed(), STALL);
        for n in 0..4 {
            assert_eq!(body.next().await.unwrap().unwrap(), n, "together slower than the limit, each faster");
        }
        let error = body.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("no progress for 200ms"), "{error}");
        assert!(body.next().await.is_none());
    }

    #[tokio::test]
    async fn a_listing_without_end_fails_and_a_long_one_does_not() {
        let meta = |key: u32| ObjectMeta {
            location: Path::from(format!("log/{key}")),
            last_modified: std::time::SystemTime::UNIX_EPOCH.into(),
            size: 1,
            e_tag: None,
            version: None,
        };
        let store: Arc<str> = "s3://models".into();
        for before in [0, 1, 7, 1000] {
            for page in [1, 2, 1000] {
                let keys = (0..before).chain((before..before + page).cycle());
                let listed: Vec<_> =
                    ending(stream::iter(keys.map(meta).map(Ok)).boxed(), &store).take(9000).collect().await;
                let error = crate::Error::from(listed.into_iter().find_map(Result::err).expect("it ends"));
                assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
                assert!(error.to_string().starts_with("store lists objects without end at s3://models"), "{error}");
            }
        }
        let long = ending(stream::iter((0..9000).map(meta).map(Ok)).boxed(), &store);
        assert!(long.all(|found| std::future::ready(found.is_ok())).await);
    }

    #[tokio::test]
    async fn a_caller_that_pauses_is_not_blamed_on_the_store() {
        let mut body = watched(stream::iter([Ok(1), Ok(2)]).boxed(), STALL);
        body.next().await.unwrap().unwrap();
        tokio::time::sleep(STALL * 2).await;
        assert_eq!(body.next().await.unwrap().unwrap(), 2);
    }

    #[tokio::test]
    async fn a_request_without_an_answer_fails_as_unreachable() {
        let limit = Limit { stall: STALL, notice: NOTICE, store: "s3://models".into() };
        let error = limit.within::<()>(std::future::pending()).await.unwrap_err();
        assert_eq!(crate::Error::from(error).kind(), crate::ErrorKind::Unreachable);
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_is_told_before_the_request_fails() {
        #[derive(Clone, Default)]
        struct Lines(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Lines {
            fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().write(line)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let lines = Lines::default();
        let to = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone()).finish();
        let _log = tracing::subscriber::set_default(log);
        let ms = Duration::from_millis;
        let limit = Limit { stall: ms(30_000), notice: ms(28_000), store: "s3://models".into() };
        let slow = |millis| async move {
            tokio::time::sleep(ms(millis)).await;
            Ok(())
        };
        let told = || String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        limit.within(slow(20)).await.unwrap();
        // An upload has more time.
        limit.within_for(10 * SLOWEST, slow(2_400)).await.unwrap();
        assert_eq!(told(), "");
        let all = futures::future::join_all((0..5).map(|_| limit.within(slow(2_400)))).await;
        assert!(all.iter().all(Result::is_ok));
        assert_eq!(
            told().matches("s3://models has not answered for 2s; a request fails after 30s").count(),
            1,
            "{}",
            told()
        );
    }
}
