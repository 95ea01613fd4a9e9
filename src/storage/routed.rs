//! Sends conditional puts to a client that never retries, and everything else to one that does. Asks again why a HEAD is refused.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};

use super::http::is_untold_refusal;

/// Two clients of one store, for requests that may and that may not be repeated blindly.
///
/// `object_store` repeats a conditional create after a 5xx or a lost connection
/// (<https://github.com/apache/arrow-rs-object-store/blob/main/src/client/retry.rs>): if the first try did create the object, the
/// second one reports `AlreadyExists`, so that a writer loses to itself. A conditional put is therefore sent only once, and its
/// caller reads the stored object to find out the outcome.
#[derive(Debug)]
pub struct Routed {
    patient: Arc<dyn ObjectStore>,
    once: Arc<dyn ObjectStore>,
}

impl Routed {
    /// `patient` retries, `once` does not; both reach the same objects.
    #[must_use]
    pub fn new(patient: Arc<dyn ObjectStore>, once: Arc<dyn ObjectStore>) -> Self {
        Self { patient, once }
    }
}

impl fmt::Display for Routed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Routed({})", self.patient)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for Routed {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let client = match opts.mode {
            PutMode::Overwrite => &self.patient,
            PutMode::Create | PutMode::Update(_) => &self.once,
        };
        client.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.patient.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        match self.patient.get_opts(location, options.clone()).await {
            // The answer to a HEAD has no body that would tell the reason.
            Err(error) if options.head && is_untold_refusal(&error) => {
                self.patient.get_opts(location, GetOptions { head: false, ..options }).await
            }
            answered => answered,
        }
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.patient.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.patient.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.patient.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.patient.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.patient.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let client = match options.mode {
            CopyMode::Overwrite => &self.patient,
            CopyMode::Create => &self.once,
        };
        client.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.once.rename_opts(from, to, options).await
    }
}
