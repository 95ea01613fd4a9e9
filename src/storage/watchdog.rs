//! Watchdog: fails requests without progress. There is no limit on the total time.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
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
use super::notice::Notices;
use super::pages::ListingCheck;

/// Minimum bytes per second of a request whose progress is not visible, which extends its stall limit by its size. `object_store`
/// does not report the progress of a put. If the peer stops acknowledging packets, the kernel notices much earlier (reqwest sets
/// `TCP_USER_TIMEOUT` to 30 s).
const SLOWEST: u64 = 128 << 10;
/// Bytes of a body that are progress: fewer, again and again, would keep a request alive for ever.
const PROGRESS_MIN: u64 = 16 << 10;

/// A store whose requests fail after `stall` without progress: no answer, or too little of a body.
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
    notices: Notices,
}

impl<T: ObjectStore> Watchdog<T> {
    /// Watches `inner`, the store at `location`.
    pub fn new(inner: T, location: &Location, stall: Duration) -> Self {
        Self { inner, limit: Limit { stall, notices: Notices::new(location) } }
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
    /// Result of the request `what`, or an error once it is overdue.
    async fn within<T>(&self, what: RequestName<'_>, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
        self.within_for(0, what, request).await
    }

    /// The same for a request of so many bytes, whose progress is not visible.
    async fn within_for<T>(
        &self,
        bytes: u64,
        what: RequestName<'_>,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let extra = Duration::from_secs(bytes / SLOWEST);
        let limit = self.stall + extra;
        let answer = self.notices.during(|| what.to_string(), (extra, limit), timeout(limit, request)).await;
        answer.unwrap_or_else(|_| Err(stalled(limit)))
    }

    fn watched<T: Progress + Send + 'static>(
        &self,
        what: RequestName<'_>,
        inner: BoxStream<'static, Result<T>>,
    ) -> BoxStream<'static, Result<T>> {
        let (limit, what) = (self.clone(), what.to_string());
        WatchdogStream { inner: Some(inner), limit, what, alarm: None, waited: Duration::ZERO, arrived: 0 }.boxed()
    }
}

/// Name of a request in the log: what it does, and the key or prefix.
#[derive(Clone, Copy)]
struct RequestName<'a>(&'static str, Option<&'a Path>);

impl fmt::Display for RequestName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(key) => write!(f, "{} {key}", self.0),
            None => f.write_str(self.0),
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<T: ObjectStore> ObjectStore for Watchdog<T> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let bytes = payload.content_length() as u64;
        let what = RequestName("write", Some(location));
        self.limit.within_for(bytes, what, self.inner.put_opts(location, payload, opts)).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let inner = self
            .limit
            .within(RequestName("begin the upload of", Some(location)), self.inner.put_multipart_opts(location, opts))
            .await?;
        Ok(Box::new(WatchedUpload { inner, limit: self.limit.clone(), key: location.clone() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let result =
            self.limit.within(RequestName("read", Some(location)), self.inner.get_opts(location, options)).await?;
        let payload = match result.payload {
            file @ GetResultPayload::File(..) => file,
            GetResultPayload::Stream(stream) => {
                GetResultPayload::Stream(self.limit.watched(RequestName("read", Some(location)), stream))
            }
        };
        Ok(GetResult { payload, ..result })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        // The ranges are returned all at once, without visible progress: as for an upload, the size extends the limit.
        let bytes: u64 = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        self.limit.within_for(bytes, RequestName("read", Some(location)), self.inner.get_ranges(location, ranges)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.limit.watched(RequestName("delete objects", None), self.inner.delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        ending(self.limit.watched(RequestName("list", prefix), self.inner.list(prefix)), self.limit.notices.store())
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        let listing = self.limit.watched(RequestName("list", prefix), self.inner.list_with_offset(prefix, offset));
        ending(listing, self.limit.notices.store())
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.limit.within(RequestName("list", prefix), self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.limit.within(RequestName("copy", Some(from)), self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.limit.within(RequestName("rename", Some(from)), self.inner.rename_opts(from, to, options)).await
    }
}

#[derive(Debug)]
struct WatchedUpload {
    inner: Box<dyn MultipartUpload>,
    limit: Limit,
    key: Path,
}

#[async_trait]
impl MultipartUpload for WatchedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (limit, key, bytes) = (self.limit.clone(), self.key.clone(), data.content_length() as u64);
        let part = self.inner.put_part(data);
        Box::pin(async move { limit.within_for(bytes, RequestName("upload a part of", Some(&key)), part).await })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.limit.within(RequestName("complete the upload of", Some(&self.key)), self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.limit.within(RequestName("abort the upload of", Some(&self.key)), self.inner.abort()).await
    }
}

/// The listing, which fails if it begins again: a store that answers each page with the same keys would be listed for ever.
fn ending(listing: BoxStream<'static, Result<ObjectMeta>>, store: &Arc<str>) -> BoxStream<'static, Result<ObjectMeta>> {
    let mut check = ListingCheck::new(Arc::clone(store));
    listing.map(move |found| found.and_then(|meta| check.check(meta))).boxed()
}

/// Item of a stream that is watched.
trait Progress {
    /// Bytes that count as progress.
    fn progress(&self) -> u64;
}

impl Progress for Bytes {
    fn progress(&self) -> u64 {
        self.len() as u64
    }
}

impl Progress for ObjectMeta {
    fn progress(&self) -> u64 {
        PROGRESS_MIN
    }
}

/// Of an object that was deleted.
impl Progress for Path {
    fn progress(&self) -> u64 {
        PROGRESS_MIN
    }
}

/// A stream that ends with an error once its next items are overdue. The timer runs only while an item is awaited: ready items need
/// no timer, and pauses of the caller do not count.
struct WatchdogStream<T> {
    inner: Option<BoxStream<'static, Result<T>>>,
    limit: Limit,
    /// Name of the request, in the log.
    what: String,
    alarm: Option<Alarm>,
    /// Time waited for items since the last progress, without that for the next one.
    waited: Duration,
    /// Bytes since the last progress.
    arrived: u64,
}

/// Timer of an item that is awaited.
struct Alarm {
    sleep: Pin<Box<Sleep>>,
    since: Instant,
}

impl<T> WatchdogStream<T> {
    /// Counts an item of so many bytes.
    fn arrived(&mut self, bytes: u64) {
        let waited = self.alarm.take().map_or(Duration::ZERO, |alarm| alarm.since.elapsed());
        self.waited += waited;
        self.arrived += bytes;
        if self.arrived >= PROGRESS_MIN {
            (self.waited, self.arrived) = (Duration::ZERO, 0);
        }
    }
}

impl<T: Progress> Stream for WatchdogStream<T> {
    type Item = Result<T>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let Some(inner) = this.inner.as_mut() else { return Poll::Ready(None) };
        if let Poll::Ready(item) = inner.as_mut().poll_next(cx) {
            let bytes = item.as_ref().and_then(|item| item.as_ref().ok()).map_or(0, T::progress);
            this.arrived(bytes);
            return Poll::Ready(item);
        }
        let (stall, notices) = (this.limit.stall, &this.limit.notices);
        let left = stall.saturating_sub(this.waited);
        let alarm = this.alarm.get_or_insert_with(|| {
            let since = Instant::now();
            Alarm { sleep: Box::pin(tokio::time::sleep(notices.first().min(left))), since }
        });
        loop {
            ready!(alarm.sleep.as_mut().poll(cx));
            let waited = alarm.since.elapsed();
            if waited >= left {
                break;
            }
            notices.tell(&this.what, waited, stall);
            alarm.sleep.as_mut().reset(alarm.since + left);
        }
        this.inner = None;
        Poll::Ready(Some(Err(stalled(stall))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{TryStreamExt as _, stream};

    const STALL: Duration = Duration::from_millis(200);
    const ASKED: RequestName<'static> = RequestName("read", None);

    fn limit(stall: Duration) -> Limit {
        let models = Location::S3 { bucket: "models".into(), prefix: String::new() };
        Limit { stall, notices: Notices::new(&models) }
    }

    /// A part of a body that is progress.
    fn long(byte: u8) -> Bytes {
        vec![byte; usize::try_from(PROGRESS_MIN).unwrap()].into()
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<std::sync::Mutex<Vec<u8>>>);

    impl Lines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl std::io::Write for Lines {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(line)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// The log of this thread.
    fn logged() -> (Lines, tracing::subscriber::DefaultGuard) {
        let lines = Lines::default();
        let to = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone()).finish();
        (lines, tracing::subscriber::set_default(log))
    }

    #[tokio::test]
    async fn a_silent_stream_fails_and_a_slow_one_does_not() {
        let slow = stream::iter(0..4).then(|n| async move {
            tokio::time::sleep(STALL / 3).await;
            Ok(n)
        });
        let mut body = limit(STALL).watched(ASKED, slow.map_ok(long).chain(stream::pending()).boxed());
        for n in 0..4 {
            assert_eq!(body.next().await.unwrap().unwrap(), long(n), "together slower than the limit, each faster");
        }
        let error = body.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("no progress for 200ms"), "{error}");
        assert!(body.next().await.is_none());
    }

    /// A byte now and then is no progress.
    #[tokio::test]
    async fn a_stream_that_trickles_fails() {
        let drops = stream::repeat(Bytes::from_static(b"x")).then(|byte| async move {
            tokio::time::sleep(STALL / 5).await;
            Ok(byte)
        });
        let got: Vec<_> = limit(STALL).watched(ASKED, drops.boxed()).take(50).collect().await;
        assert!(got.len() < 10 && got.last().unwrap().is_err(), "{} items", got.len());
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
        let mut body = limit(STALL).watched(ASKED, stream::iter([Ok(long(1)), Ok(long(2))]).boxed());
        body.next().await.unwrap().unwrap();
        tokio::time::sleep(STALL * 2).await;
        assert_eq!(body.next().await.unwrap().unwrap(), long(2));
    }

    #[tokio::test]
    async fn a_request_without_an_answer_fails_as_unreachable() {
        let error = limit(STALL).within::<()>(ASKED, std::future::pending()).await.unwrap_err();
        assert_eq!(crate::Error::from(error).kind(), crate::ErrorKind::Unreachable);
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_is_told_before_the_request_fails() {
        let (lines, _log) = logged();
        let ms = Duration::from_millis;
        let limit = limit(ms(30_000));
        let limit = Limit { notices: limit.notices.after(ms(2_000)), ..limit };
        let slow = |millis| async move {
            tokio::time::sleep(ms(millis)).await;
            Ok(())
        };
        let key = Path::from("log/7");
        let what = RequestName("read", Some(&key));
        limit.within(what, slow(20)).await.unwrap();
        // An upload has more time.
        limit.within_for(10 * SLOWEST, what, slow(2_400)).await.unwrap();
        assert_eq!(lines.text(), "");
        let all = futures::future::join_all((0..5).map(|_| limit.within(what, slow(2_400)))).await;
        assert!(all.iter().all(Result::is_ok));
        let says = "s3://models has not answered for 2s, waiting for: read log/7; a try fails after 30s";
        assert_eq!(lines.text().matches(says).count(), 1, "{}", lines.text());
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_told() {
        let (lines, _log) = logged();
        let limit = limit(Duration::from_secs(30));
        let limit = Limit { notices: limit.notices.after(STALL), ..limit };
        let mut body = limit.watched(ASKED, stream::pending::<Result<Bytes>>().boxed());
        assert!(timeout(2 * STALL, body.next()).await.is_err(), "it is not overdue yet");
        assert_eq!(
            lines.text().matches("s3://models has not answered for 0s, waiting for: read;").count(),
            1,
            "{}",
            lines.text()
        );
    }
}
