//! Counters of requests and bytes of a store.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};

use super::location::Location;
use crate::metrics::{Metric, StoreCounters};

/// A store that counts its requests and bytes. Requests are counted when they are sent, including failed ones; bytes when they
/// have arrived (gets) or were acknowledged (puts).
///
/// A get of a local object still returns a file, so that reads from disk need no copy; its bytes are counted at once.
#[derive(Debug)]
pub struct Metered<T> {
    inner: T,
    location: Location,
    counters: Arc<StoreCounters>,
}

impl<T: ObjectStore> Metered<T> {
    /// Wraps `inner`, which is at `location`, and counts in `counters`.
    pub fn new(inner: T, location: Location, counters: Arc<StoreCounters>) -> Self {
        Self { inner, location, counters }
    }

    fn request(&self, metric: Metric) {
        self.counters.add(metric, 1);
    }
}

/// Location, for errors.
impl<T: ObjectStore> fmt::Display for Metered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.location.fmt(f)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<T: ObjectStore> ObjectStore for Metered<T> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.request(Metric::PutRequests);
        let bytes = payload.content_length() as u64;
        let result = self.inner.put_opts(location, payload, opts).await?;
        self.counters.add(Metric::PutBytes, bytes);
        Ok(result)
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.request(Metric::PutRequests);
        let inner = self.inner.put_multipart_opts(location, opts).await?;
        Ok(Box::new(MeteredUpload { inner, counters: Arc::clone(&self.counters) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.request(Metric::GetRequests);
        let head = options.head;
        let result = self.inner.get_opts(location, options).await?;
        let payload = match result.payload {
            file @ GetResultPayload::File(..) => {
                if !head {
                    self.counters.add(Metric::GetBytes, result.range.end - result.range.start);
                }
                file
            }
            GetResultPayload::Stream(stream) => GetResultPayload::Stream(counted(stream, &self.counters)),
        };
        Ok(GetResult { payload, ..result })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.request(Metric::GetRequests);
        let found = self.inner.get_ranges(location, ranges).await?;
        self.counters.add(Metric::GetBytes, found.iter().map(|bytes| bytes.len() as u64).sum());
        Ok(found)
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let counters = Arc::clone(&self.counters);
        let deleted = self.inner.delete_stream(locations);
        deleted.inspect(move |_| counters.add(Metric::DeleteRequests, 1)).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.request(Metric::ListRequests);
        self.inner.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.request(Metric::ListRequests);
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.request(Metric::ListRequests);
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.request(Metric::PutRequests);
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.request(Metric::PutRequests);
        self.inner.rename_opts(from, to, options).await
    }
}

fn counted(
    stream: BoxStream<'static, Result<Bytes>>,
    counters: &Arc<StoreCounters>,
) -> BoxStream<'static, Result<Bytes>> {
    let counters = Arc::clone(counters);
    stream
        .inspect(move |item| {
            if let Ok(bytes) = item {
                counters.add(Metric::GetBytes, bytes.len() as u64);
            }
        })
        .boxed()
}

#[derive(Debug)]
struct MeteredUpload {
    inner: Box<dyn MultipartUpload>,
    counters: Arc<StoreCounters>,
}

#[async_trait]
impl MultipartUpload for MeteredUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.counters.add(Metric::PutRequests, 1);
        let bytes = data.content_length() as u64;
        let part = self.inner.put_part(data);
        let counters = Arc::clone(&self.counters);
        Box::pin(async move {
            part.await?;
            counters.add(Metric::PutBytes, bytes);
            Ok(())
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.counters.add(Metric::PutRequests, 1);
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.counters.add(Metric::DeleteRequests, 1);
        self.inner.abort().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;

    #[tokio::test]
    async fn bytes_are_counted_as_they_flow() {
        let counters = Arc::new(StoreCounters::default());
        let store = Metered::new(InMemory::new(), Location::Memory, Arc::clone(&counters));
        let key = Path::from("a");
        store.put(&key, vec![7; 1000].into()).await.unwrap();
        assert_eq!(counters.get(Metric::PutBytes), 1000);

        let unread = store.get(&key).await.unwrap();
        assert_eq!((counters.get(Metric::GetRequests), counters.get(Metric::GetBytes)), (1, 0));
        drop(unread);
        store.get_range(&key, 10..30).await.unwrap();
        assert_eq!(counters.get(Metric::GetBytes), 20);
        store.delete(&key).await.unwrap();
        assert_eq!(counters.get(Metric::DeleteRequests), 1);
    }

    #[tokio::test]
    async fn a_local_file_stays_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let local = object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap();
        let counters = Arc::new(StoreCounters::default());
        let store = Metered::new(local, Location::Memory, Arc::clone(&counters));
        let key = Path::from("a");
        store.put(&key, vec![7; 1000].into()).await.unwrap();
        let got = store.get(&key).await.unwrap();
        assert!(matches!(got.payload, GetResultPayload::File(..)));
        store.head(&key).await.unwrap();
        assert_eq!(counters.get(Metric::GetBytes), 1000);
    }
}
