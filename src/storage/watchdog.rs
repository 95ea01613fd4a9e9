//! Watchdog: fails requests without progress. There is no limit on the total time.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
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
use tokio::time::Sleep;

/// Minimum bytes per second of a request whose progress is not visible, which extends its stall limit by its size. `object_store`
/// does not report the progress of a put. If the peer stops acknowledging packets, the kernel notices much earlier (reqwest sets
/// `TCP_USER_TIMEOUT` to 30 s).
const SLOWEST: u64 = 128 << 10;

/// A store whose requests fail after `stall` without progress: no answer, or no next part of a body.
///
/// Time in which the caller does not poll for the next part does not count.
#[derive(Debug)]
pub struct Watchdog<T> {
    inner: T,
    stall: Duration,
}

impl<T: ObjectStore> Watchdog<T> {
    /// Watches `inner`.
    pub fn new(inner: T, stall: Duration) -> Self {
        Self { inner, stall }
    }
}

impl<T: ObjectStore> fmt::Display for Watchdog<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watchdog({:?}, {})", self.stall, self.inner)
    }
}

/// Error: no progress for the given time.
#[derive(Debug, thiserror::Error)]
#[error("no progress for {0:?}")]
struct Stalled(Duration);

fn stalled(limit: Duration) -> Error {
    Error::Generic { store: "watchdog", source: Box::new(Stalled(limit)) }
}

async fn within<T>(limit: Duration, request: impl Future<Output = Result<T>> + Send) -> Result<T> {
    tokio::time::timeout(limit, request).await.unwrap_or_else(|_| Err(stalled(limit)))
}

fn sized_limit(stall: Duration, bytes: usize) -> Duration {
    stall + Duration::from_secs(bytes as u64 / SLOWEST)
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<T: ObjectStore> ObjectStore for Watchdog<T> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let limit = sized_limit(self.stall, payload.content_length());
        within(limit, self.inner.put_opts(location, payload, opts)).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let inner = within(self.stall, self.inner.put_multipart_opts(location, opts)).await?;
        Ok(Box::new(WatchedUpload { inner, stall: self.stall }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let result = within(self.stall, self.inner.get_opts(location, options)).await?;
        let payload = match result.payload {
            file @ GetResultPayload::File(..) => file,
            GetResultPayload::Stream(stream) => GetResultPayload::Stream(watched(stream, self.stall)),
        };
        Ok(GetResult { payload, ..result })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        // The ranges are returned all at once, without visible progress: as for an upload, the size extends the limit.
        let bytes: u64 = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        let limit = sized_limit(self.stall, usize::try_from(bytes).unwrap_or(usize::MAX));
        within(limit, self.inner.get_ranges(location, ranges)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        watched(self.inner.delete_stream(locations), self.stall)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        watched(self.inner.list(prefix), self.stall)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        watched(self.inner.list_with_offset(prefix, offset), self.stall)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        within(self.stall, self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        within(self.stall, self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        within(self.stall, self.inner.rename_opts(from, to, options)).await
    }
}

#[derive(Debug)]
struct WatchedUpload {
    inner: Box<dyn MultipartUpload>,
    stall: Duration,
}

#[async_trait]
impl MultipartUpload for WatchedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let limit = sized_limit(self.stall, data.content_length());
        let part = self.inner.put_part(data);
        Box::pin(within(limit, part))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        within(self.stall, self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        within(self.stall, self.inner.abort()).await
    }
}

fn watched<T: Send + 'static>(inner: BoxStream<'static, Result<T>>, stall: Duration) -> BoxStream<'static, Result<T>> {
    WatchdogStream { inner: Some(inner), stall, alarm: None }.boxed()
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
    async fn a_caller_that_pauses_is_not_blamed_on_the_store() {
        let mut body = watched(stream::iter([Ok(1), Ok(2)]).boxed(), STALL);
        body.next().await.unwrap().unwrap();
        tokio::time::sleep(STALL * 2).await;
        assert_eq!(body.next().await.unwrap().unwrap(), 2);
    }

    #[tokio::test]
    async fn a_request_without_an_answer_fails_as_unreachable() {
        let error = within::<()>(STALL, std::future::pending()).await.unwrap_err();
        assert_eq!(crate::Error::from(error).kind(), crate::ErrorKind::Unreachable);
    }
}
