//! The probe: believes the real servers, and neither one that ignores conditions nor one that fails a race.

use std::fmt;
use std::ops::Range;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use towline::ErrorKind;
use towline::storage::{Capabilities, Effort, Keys, Store, StoreOptions, Verdict, open, probe};

use crate::ports::free_address;
use crate::stores::{all_stores, missing};

#[tokio::test(flavor = "multi_thread")]
async fn every_real_store_may_be_shared() {
    for test in all_stores().await {
        for effort in [Effort::Quick, Effort::Full] {
            let found = probe(&test.store, effort).await.unwrap();
            found.shared_writing().unwrap_or_else(|error| panic!("{}: {error}", test.name));
            assert_eq!(found.create, Verdict::Works, "{}", test.name);
            let (update, delete, unquoted) = match test.name {
                "memory" => (Verdict::Works, Verdict::Untried, false),
                "directory" => (Verdict::Refused, Verdict::Untried, false),
                "ceph" => (Verdict::Works, Verdict::Ignored, true),
                "ministack" => (Verdict::Works, Verdict::Works, false),
                other => panic!("{other}: what does it do?"),
            };
            let seen = (found.update, found.delete, found.unquoted_etags);
            assert_eq!(seen, (update, delete, unquoted), "{}", test.name);
        }
        let left = test.store.objects().list_with_delimiter(None).await.unwrap();
        assert!(left.objects.is_empty(), "{}: the probe left something", test.name);
        let mut under = test.store.objects().list(Some(&"probe".into()));
        assert!(futures::StreamExt::next(&mut under).await.is_none(), "{}: the probe left something", test.name);
    }
}

/// Passes creates one after the other, and lets several through at once: looks, then writes.
#[derive(Debug)]
struct LooksThenWrites(InMemory);

impl fmt::Display for LooksThenWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LooksThenWrites")
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ObjectStore for LooksThenWrites {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        if opts.mode != PutMode::Create {
            return self.0.put_opts(location, payload, opts).await;
        }
        if self.0.head(location).await.is_ok() {
            return Err(Error::AlreadyExists { path: location.to_string(), source: "it is there".into() });
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.0.put(location, payload).await
    }

    async fn put_multipart_opts(&self, to: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(to, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.0.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.0.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.0.rename_opts(from, to, options).await
    }
}

fn refused(found: Capabilities, reason: &str) {
    let error = found.shared_writing().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("create-if-absent"), "{error}");
    assert!(error.to_string().contains(reason), "{error}");
    assert!(error.help_text().unwrap().contains("or a directory"), "says the way out");
}

/// F11: "A store that ignores conditional creates, or honours them only when they do not race, is refused for shared
/// writing, with the reason and what to do instead."
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_fails_only_a_race_is_refused() {
    let store = Store::from_objects(Arc::new(LooksThenWrites(InMemory::new())));
    for effort in [Effort::Quick, Effort::Full] {
        let found = probe(&store, effort).await.unwrap();
        assert!(matches!(found.create, Verdict::Racy { .. }), "{:?}", found.create);
        refused(found, "races");
    }
}

/// `rclone serve s3` over a temporary folder; ends with it.
pub(crate) struct Rclone {
    child: Child,
    endpoint: String,
    _folder: tempfile::TempDir,
}

impl Rclone {
    pub(crate) fn start() -> Option<Self> {
        let venv = std::env::var("TOWLINE_VENV").unwrap_or_else(|_| format!("{}/.venv", env!("CARGO_MANIFEST_DIR")));
        let program = std::path::Path::new(&venv).join("bin/rclone");
        if !program.exists() {
            missing(&format!("rclone: {} is not there; tests/servers/setup.sh", program.display()));
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bucket")).unwrap();
        let free = free_address();
        let child = Command::new(program)
            .args(["serve", "s3", "--config", "/dev/null", "--auth-key", "towline,towlinesecret", "--addr", &free])
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { child, endpoint: format!("http://{free}"), _folder: folder })
    }

    pub(crate) async fn store(&self) -> Store {
        let keys =
            Keys { access_key_id: "towline".into(), secret_access_key: "towlinesecret".into(), session_token: None };
        let options =
            StoreOptions { endpoint: Some(self.endpoint.clone()), keys: Some(keys), ..StoreOptions::default() };
        let location = "s3://bucket/p".parse().unwrap();
        for _ in 0..100 {
            match open(&location, &options).await {
                Ok(store) => return store,
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => panic!("rclone: {error:?}"),
            }
        }
        panic!("rclone: not up");
    }
}

impl Drop for Rclone {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_ignores_conditions_is_refused() {
    let Some(rclone) = Rclone::start() else { return };
    let found = probe(&rclone.store().await, Effort::Quick).await.unwrap();
    assert_eq!(found.create, Verdict::Ignored);
    refused(found, "ignored without a word");
}
