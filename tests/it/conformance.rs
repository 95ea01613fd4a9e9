//! Behaviour that Towline relies on in a store, tried over every kind of store there is.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{GetResultPayload, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Barrier;
use towline::clock::{Clock, SystemClock};
use towline::id::{Owned, SessionId};
use towline::metrics::Metric;
use towline::ops::CollectOptions;
use towline::repository::layout::{self, Family};
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Keys, Location, Store, StoreOptions, open};
use towline::{Error, ErrorKind};

use crate::stores::{all_stores, fresh_location, servers};

const MIB: usize = 1 << 20;

/// Bytes that differ at every offset that matters.
fn noise(len: usize, seed: u64) -> Bytes {
    let mut state = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 16).to_le_bytes()
    });
    words.flatten().take(len).collect::<Vec<u8>>().into()
}

fn some_keys() -> Keys {
    Keys { access_key_id: "id".into(), secret_access_key: "secret".into(), session_token: None }
}

async fn kind_of<T>(outcome: impl Future<Output = object_store::Result<T>>) -> Option<ErrorKind> {
    outcome.await.err().map(|error| Error::from(error).kind())
}

async fn keys(store: &Store, prefix: &str) -> Vec<String> {
    let listed = store.objects().list(Some(&prefix.into()));
    let mut keys: Vec<_> = listed.map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap();
    keys.sort();
    keys
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raced_create_has_one_winner_and_its_bytes_stay() {
    for test in all_stores().await {
        for round in 0..12 {
            let key = Path::from(format!("race/{round}"));
            let start = Arc::new(Barrier::new(16));
            let racers = (0..16).map(|racer| {
                let (objects, key, start) = (Arc::clone(test.store.objects()), key.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    let payload = PutPayload::from(noise(2000, racer));
                    (racer, objects.put_opts(&key, payload, PutMode::Create.into()).await)
                })
            });
            let outcomes = futures::future::try_join_all(racers).await.unwrap();
            let won: Vec<u64> = outcomes.iter().filter(|(_, o)| o.is_ok()).map(|(racer, _)| *racer).collect();
            // A server may fail a racer (Ceph answers 500 now and then): that is neither won nor lost.
            let stored = test.store.objects().get(&key).await.unwrap().bytes().await.unwrap();
            let owner = (0..16).find(|racer| stored == noise(2000, *racer));
            assert!(owner.is_some(), "{}: the bytes stored are nobody's", test.name);
            assert!(won.len() <= 1, "{}: {won:?} all won", test.name);
            assert!(won.is_empty() || won.first() == owner.as_ref(), "{}: {won:?} won, {owner:?} is there", test.name);
            let refused = outcomes.iter().filter_map(|(_, o)| o.as_ref().err());
            assert!(refused.clone().count() >= 15, "{}", test.name);
            let late = test.store.objects().put_opts(&key, "late".into(), PutMode::Create.into());
            assert_eq!(kind_of(late).await, Some(ErrorKind::Conflict), "{}", test.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_become_one_object() {
    for test in all_stores().await {
        let key = Path::from("pack/multi");
        let whole = noise(12 * MIB + 345, 7);
        let mut upload = test.store.objects().put_multipart(&key).await.unwrap();
        for start in (0..whole.len()).step_by(5 * MIB) {
            upload.put_part(whole.slice(start..whole.len().min(start + 5 * MIB)).into()).await.unwrap();
        }
        assert_eq!(kind_of(test.store.objects().head(&key)).await, Some(ErrorKind::NotFound), "{}", test.name);
        upload.complete().await.unwrap();
        let got = test.store.objects().get(&key).await.unwrap().bytes().await.unwrap();
        assert!(got == whole, "{}: multipart object differs", test.name);
        assert_eq!(test.store.counters().get(Metric::PutBytes), whole.len() as u64, "{}", test.name);

        let mut given_up = test.store.objects().put_multipart(&"pack/never".into()).await.unwrap();
        given_up.put_part(whole.slice(..5 * MIB).into()).await.unwrap();
        given_up.abort().await.unwrap();
        assert_eq!(keys(&test.store, "pack").await, ["pack/multi"], "{}", test.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_are_exact() {
    for test in all_stores().await {
        let key = Path::from("object");
        let whole = noise(MIB + 17, 3);
        test.store.objects().put(&key, whole.clone().into()).await.unwrap();
        let len = whole.len() as u64;
        let before = test.store.counters().get(Metric::GetBytes);
        for range in [0..1, 5..5 + 4096, len - 1..len, 0..len, 1_000_000..1_000_001] {
            let got = test.store.objects().get_range(&key, range.clone()).await.unwrap();
            let start = usize::try_from(range.start).unwrap();
            assert!(got == whole.slice(start..start + got.len()), "{}: {range:?}", test.name);
            assert_eq!(got.len() as u64, range.end - range.start, "{}: {range:?}", test.name);
        }
        let read = test.store.counters().get(Metric::GetBytes) - before;
        assert_eq!(read, 1 + 4096 + 1 + len + 1, "{}: more was fetched than asked for", test.name);
        let many = test.store.objects().get_ranges(&key, &[0..10, 500_000..500_010, 5..15]).await.unwrap();
        assert_eq!(many, [whole.slice(0..10), whole.slice(500_000..500_010), whole.slice(5..15)], "{}", test.name);
        assert_eq!(test.store.objects().head(&key).await.unwrap().size, len, "{}", test.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_goes_beyond_a_page_and_deleting_too() {
    for test in all_stores().await {
        let wanted: BTreeSet<String> = (0..1100).map(|n| format!("seg/{:02}/{n:04}", n % 3)).collect();
        let objects = test.store.objects();
        let paths: Vec<Path> = wanted.iter().map(|key| Path::from(key.as_str())).collect();
        stream::iter(&paths)
            .map(|path| async move { objects.put(path, "x".into()).await.map(drop) })
            .buffer_unordered(32)
            .try_collect::<Vec<()>>()
            .await
            .unwrap();
        objects.put(&"segment".into(), "not below the prefix".into()).await.unwrap();

        assert!(keys(&test.store, "seg").await.iter().eq(&wanted), "{}", test.name);
        let after: Vec<_> = objects.list_with_offset(Some(&"seg".into()), &"seg/02/0500".into()).collect().await;
        let beyond = wanted.iter().filter(|key| key.as_str() > "seg/02/0500").count();
        assert_eq!(after.len(), beyond, "{}", test.name);
        let folders = objects.list_with_delimiter(Some(&"seg".into())).await.unwrap();
        assert_eq!(folders.common_prefixes, ["seg/00".into(), "seg/01".into(), "seg/02".into()], "{}", test.name);

        let deleted = objects.delete_stream(stream::iter(paths).map(Ok).boxed());
        assert_eq!(deleted.try_collect::<Vec<_>>().await.unwrap().len(), 1100, "{}", test.name);
        assert!(keys(&test.store, "seg").await.is_empty(), "{}", test.name);
        assert_eq!(keys(&test.store, "").await, ["segment"], "{}", test.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_not_found() {
    for test in all_stores().await {
        let (objects, key) = (test.store.objects(), Path::from("no/such/object"));
        assert_eq!(kind_of(objects.get(&key)).await, Some(ErrorKind::NotFound), "{}", test.name);
        assert_eq!(kind_of(objects.head(&key)).await, Some(ErrorKind::NotFound), "{}", test.name);
        assert_eq!(kind_of(objects.get_range(&key, 0..1)).await, Some(ErrorKind::NotFound), "{}", test.name);
        // S3 calls deleting what is not there a success, a file system does not.
        assert!(matches!(kind_of(objects.delete(&key)).await, None | Some(ErrorKind::NotFound)), "{}", test.name);
        assert!(keys(&test.store, "no").await.is_empty(), "{}", test.name);
    }
}

#[tokio::test]
async fn only_a_local_file_is_handed_out_as_a_file() {
    for test in all_stores().await {
        test.store.objects().put(&"a".into(), "bytes".into()).await.unwrap();
        let got = test.store.objects().get(&"a".into()).await.unwrap();
        assert_eq!(matches!(got.payload, GetResultPayload::File(..)), test.name == "directory");
    }
}

#[tokio::test]
async fn a_bucket_is_made_only_when_asked() {
    for server in servers() {
        let location: Location =
            format!("s3://towline-{}/p", ulid::Ulid::generate().to_string().to_lowercase()).parse().unwrap();
        let careful = StoreOptions { create: false, ..server.options() };
        let error = open(&location, &careful).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{}: {error:?}", server.name);
        for _ in 0..2 {
            open(&location, &server.options()).await.unwrap();
        }
        let bucket = open(&location, &careful).await.unwrap().bucket().unwrap().clone();
        assert!(!bucket.create_if_missing().await.unwrap());
        bucket.client().delete_bucket().bucket(bucket.name()).send().await.unwrap();
    }
}

#[tokio::test]
async fn wrong_credentials_are_denied() {
    for server in servers() {
        for wrong_id in [false, true] {
            let mut options = server.options();
            let keys = options.keys.as_mut().unwrap();
            keys.secret_access_key = "wrong".to_owned();
            if wrong_id {
                keys.access_key_id = "NOBODY".to_owned();
            }
            let error = open(&fresh_location(), &options).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{}: {error:?}", server.name);
        }
        let origin = server.store().await.bucket().unwrap().credentials().origin().await.unwrap();
        assert_eq!(origin, "keys given by the caller");
    }
}

#[tokio::test]
async fn a_closed_port_is_unreachable_soon() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let options = StoreOptions {
        endpoint: Some(format!("http://127.0.0.1:{port}")),
        keys: Some(some_keys()),
        ..StoreOptions::default()
    };
    let begun = Instant::now();
    let error = open(&"s3://bucket/p".parse().unwrap(), &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(begun.elapsed() < Duration::from_mins(2), "{:?}", begun.elapsed());
}

/// Forwards connections to `target` until it is dropped.
async fn forward(target: String) -> (u16, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let task = tokio::spawn(async move {
        let mut open = tokio::task::JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            let target = target.clone();
            open.spawn(async move {
                let Ok(mut server) = TcpStream::connect(target).await else { return };
                drop(tokio::io::copy_bidirectional(&mut client, &mut server).await);
            });
        }
    });
    (port, task)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_goes_away_is_unreachable_soon() {
    for server in servers() {
        let (port, forwarder) = forward(server.endpoint.trim_start_matches("http://").to_owned()).await;
        let options = StoreOptions { endpoint: Some(format!("http://127.0.0.1:{port}")), ..server.options() };
        let store = open(&fresh_location(), &options).await.unwrap();
        store.objects().put(&"a".into(), "x".into()).await.unwrap();
        forwarder.abort();
        drop(forwarder.await);
        let begun = Instant::now();
        let (a, b) = (Path::from("a"), Path::from("b"));
        assert_eq!(kind_of(store.objects().get(&a)).await, Some(ErrorKind::Unreachable), "{}", server.name);
        let once = store.objects().put_opts(&b, "x".into(), PutMode::Create.into());
        let asked = Instant::now();
        assert_eq!(kind_of(once).await, Some(ErrorKind::Unreachable), "{}", server.name);
        // Others are repeated for up to 40 s (storage/s3.rs).
        assert!(asked.elapsed() < Duration::from_secs(30), "{}: a conditional create is not repeated", server.name);
        assert!(begun.elapsed() < Duration::from_mins(2), "{}: {:?}", server.name, begun.elapsed());
    }
}

/// A peer that accepts and never answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hangs_is_unreachable_after_the_stall_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let stall = Duration::from_millis(300);
    let options = StoreOptions { endpoint: Some(endpoint), keys: Some(some_keys()), stall, ..StoreOptions::default() };
    let begun = Instant::now();
    let error = open(&"s3://bucket/p".parse().unwrap(), &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(begun.elapsed() < Duration::from_mins(2), "{:?}", begun.elapsed());
    drop(listener);
}

#[tokio::test]
async fn unfinished_uploads_are_found_and_aborted() {
    for server in servers() {
        let store = server.store().await;
        let bucket = store.bucket().unwrap();
        let ours = layout::owned(Family::Pack, Owned::fresh(SessionId::random()));
        for key in [&ours, &"pack/of/others.bin".into()] {
            let mut upload = store.objects().put_multipart(key).await.unwrap();
            upload.put_part(noise(5 * MIB, 1).into()).await.unwrap();
        }
        let is_ours = layout::is_uploaded_in_parts;
        let found = bucket.unfinished_uploads(is_ours).await.unwrap();
        let keys: Vec<_> = found.iter().map(|upload| upload.key.clone()).collect();
        assert_eq!(keys, [bucket.full_key(ours.as_ref())], "{}", server.name);
        // The store's clock need not be this machine's.
        assert!(SystemClock.now().since(found[0].initiated) < Duration::from_hours(1), "{}", server.name);

        let repository = Repository::create(store.clone(), OpenOptions::default()).await.unwrap().0;
        let report = repository.collect(&CollectOptions::default()).await.unwrap();
        assert_eq!((report.unfinished_objects, report.unfinished_bytes), (1, 0), "{}: young", server.name);
        bucket.abort_uploads(&found).await.unwrap();
        bucket.abort_uploads(&found).await.unwrap();
        assert_eq!(bucket.unfinished_uploads(is_ours).await.unwrap().len(), 0, "{}", server.name);
        let others = bucket.unfinished_uploads(|_| true).await.unwrap();
        assert_eq!(others.len(), 1, "{}: the other program's is still there", server.name);
    }
}

#[tokio::test]
async fn the_rules_of_a_bucket_can_be_read() {
    for server in servers() {
        let store = server.store().await;
        let bucket = store.bucket().unwrap();
        assert_eq!(bucket.versioning().await.unwrap(), towline::storage::Versioning::Off, "{}", server.name);
        assert_eq!(bucket.lifecycle().await.unwrap(), [], "{}", server.name);
        assert_eq!(bucket.object_lock().await.unwrap(), None, "{}", server.name);
    }
}
