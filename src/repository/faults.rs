//! A store in memory with one fault, for tests.

use std::fmt;
use std::sync::Mutex;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// Fault of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Puts are refused.
    Refuse,
    /// Puts are acknowledged and lost.
    Lose,
    /// Puts are done, but answered by an error, and reads do not find the object.
    Conceal,
    /// Reads are refused, as of an object whose key the store is not given.
    Withhold,
    /// The read after this many others does not find the object.
    Hide(u32),
    /// The read after this many others gets other bytes.
    Garble(u32),
}

/// A store in memory that fails for one object.
#[derive(Debug, Default)]
pub(crate) struct FaultyStore {
    inner: InMemory,
    lost: InMemory,
    fault: Mutex<Option<(Path, Fault)>>,
}

impl FaultyStore {
    /// Fails with `fault` for the object `key` from now on, and in no other way.
    pub(crate) fn set(&self, key: Path, fault: Fault) {
        *self.fault.lock().unwrap() = Some((key, fault));
    }

    /// Fails no more.
    pub(crate) fn heal(&self) {
        *self.fault.lock().unwrap() = None;
    }

    /// Fault for the object `key`.
    fn about(&self, key: &Path) -> Option<Fault> {
        self.fault.lock().unwrap().as_ref().filter(|(of, _)| of == key).map(|(_, fault)| *fault)
    }

    /// Fault of this read of `key`; counts the read.
    fn of_read(&self, key: &Path) -> Option<Fault> {
        let fault = self.about(key)?;
        match fault {
            Fault::Hide(0) | Fault::Garble(0) => self.heal(),
            Fault::Hide(more) => self.set(key.clone(), Fault::Hide(more - 1)),
            Fault::Garble(more) => self.set(key.clone(), Fault::Garble(more - 1)),
            Fault::Refuse | Fault::Lose | Fault::Conceal | Fault::Withhold => {}
        }
        Some(fault)
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyStore({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        match self.about(location) {
            Some(Fault::Refuse) => {
                Err(Error::PermissionDenied { path: location.to_string(), source: "a test refuses it".into() })
            }
            Some(Fault::Lose) => self.lost.put_opts(location, payload, PutOptions::default()).await,
            Some(Fault::Conceal) => {
                self.inner.put_opts(location, payload, opts).await?;
                Err(Error::Generic { store: "test", source: "a test loses the answer".into() })
            }
            _ => self.inner.put_opts(location, payload, opts).await,
        }
    }

    async fn put_multipart_opts(&self, to: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(to, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let got = self.inner.get_opts(location, options).await?;
        match self.of_read(location) {
            Some(Fault::Hide(0) | Fault::Conceal) => {
                Err(Error::NotFound { path: location.to_string(), source: "a test hides it".into() })
            }
            Some(Fault::Withhold) => {
                let refusal = crate::error::Error::damaged("store refuses to read an object");
                Err(Error::Generic { store: "test", source: refusal.into() })
            }
            Some(Fault::Garble(0)) => {
                let (meta, range) = (got.meta.clone(), got.range.clone());
                let (attributes, extensions) = (got.attributes.clone(), got.extensions.clone());
                let garbled: Vec<u8> = got.bytes().await?.iter().map(|byte| !byte).collect();
                let payload = GetResultPayload::Stream(stream::iter([Ok(garbled.into())]).boxed());
                Ok(GetResult { payload, meta, range, attributes, extensions })
            }
            _ => Ok(got),
        }
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
