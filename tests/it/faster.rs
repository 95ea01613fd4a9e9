//! Compressing only where that makes a save end sooner: a slow store keeps it, a fast one drops it.

use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::Path as FilePath;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Extensions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::task::JoinSet;
use towline::codec::{Codec, Compression};
use towline::ops::{RestoreOptions, SaveOptions, SaveReport};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;

use crate::data::{name, noise, tree_digest};

/// A store that takes so many bytes a second of each of its writers. If none is told it takes packs in no time, and has them once
/// it settled: so it is faster than any encoder, on a machine however busy.
#[derive(Debug)]
struct Rated {
    inner: Arc<InMemory>,
    rate: Option<u32>,
    on_their_way: Mutex<JoinSet<Result<PutResult>>>,
}

impl Rated {
    async fn settle(&self) {
        let on_their_way = std::mem::take(&mut *self.on_their_way.lock().unwrap());
        on_their_way.join_all().await.into_iter().for_each(|put| drop(put.unwrap()));
    }
}

impl fmt::Display for Rated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rated({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Rated {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        if let Some(rate) = self.rate {
            let seconds = payload.content_length() as f64 / f64::from(rate);
            tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        } else if location.as_ref().starts_with("pack/") {
            let (inner, location) = (Arc::clone(&self.inner), location.clone());
            self.on_their_way.lock().unwrap().spawn(async move { inner.put(&location, payload).await });
            return Ok(PutResult { e_tag: None, version: None, extensions: Extensions::default() });
        }
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, to: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(to, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.inner.get_ranges(location, ranges).await
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

/// Text-like bytes that every codec that is tried can make smaller, none of them fast.
fn letters(seed: u64, len: usize) -> Vec<u8> {
    noise(seed, len).into_iter().map(|byte| b"etaoinshrdlucmfw"[usize::from(byte & byte >> 4 & 15)]).collect()
}

/// Saves files of 4 MiB to a store of such a rate, and restores them: what the save told, and how many chunks of a hundred are stored raw.
async fn saved(files: u64, rate: Option<u32>, compression: Compression) -> (SaveReport, usize) {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    (0..files).for_each(|file| fs::write(source.join(format!("{file}.txt")), letters(file, 4 << 20)).unwrap());
    let objects = Arc::new(Rated { inner: Arc::default(), rate, on_their_way: Mutex::default() });
    let store = Store::from_objects(Arc::clone(&objects) as Arc<dyn ObjectStore>);
    let options =
        OpenOptions { cache: Some(dir.path().join("cache")), memory: Some(64 << 20), ..OpenOptions::default() };
    let repository = Repository::create(store, options).await.unwrap().0;
    let options = SaveOptions { compression, explain: true, ..SaveOptions::default() };
    let report = repository.save(&source, &name("n"), &options).await.unwrap();
    objects.settle().await;
    restores(&repository, &source).await;
    let saved = repository.saved(&name("n")).await.unwrap();
    let raw = saved.map.frames.iter().filter(|frame| frame.codec == Codec::Raw).count();
    (report, raw * 100 / saved.map.frames.len())
}

async fn restores(repository: &Repository, source: &FilePath) {
    let dest = tempfile::tempdir().unwrap();
    repository.restore(&name("n"), None, dest.path(), &RestoreOptions::default()).await.unwrap();
    assert_eq!(tree_digest(dest.path()), tree_digest(source));
}

fn told(report: &SaveReport) -> usize {
    let told =
        |reason: &&String| reason.starts_with("raw: the repository accepts bytes faster than they are compressed");
    report.explained.iter().flat_map(|one| &one.reasons).filter(told).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_store_gets_few_bytes() {
    // Slower than encoders on a machine however busy.
    let (report, raw) = saved(2, Some(1_000_000), Compression::IfFaster).await;
    assert_eq!((raw, told(&report)), (0, 0));
    assert!(report.stored_bytes < report.logical_bytes * 3 / 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_store_gets_bytes_as_they_are() {
    let (report, raw) = saved(24, None, Compression::IfFaster).await;
    assert!(raw > 50, "{raw}");
    assert!(told(&report) >= 10, "{raw} {:?}", report.explained);
    // Only who asks for it: others pay for room.
    let (report, raw) = saved(24, None, Compression::Auto).await;
    assert_eq!((raw, told(&report)), (0, 0));
}
