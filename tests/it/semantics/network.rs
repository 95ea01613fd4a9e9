//! Secrets that must not cross a network, and stores that stop answering.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use towline::error::{ErrorKind, Result};
use towline::ops::{RestoreOptions, SaveOptions};
use towline::repository::Repository;
use towline::storage::Store;

use super::{Fixture, ran};
use crate::data::{name, noise};
use crate::faulty::{Faults, Faulty};

/// P5: "plain http to another machine is refused unless `--allow-http` [...] allows it", wherever the endpoint was
/// named.
#[test]
fn plain_http_over_a_network_is_refused() {
    let fixture = Fixture::new();
    // Reserved for documentation (RFC 5737): nobody is there.
    let far = "http://192.0.2.1";
    for args in [&["ls", "--repo", "s3://bucket/x", "--endpoint", far][..], &["ls", "--repo", "s3://bucket/x"]] {
        let mut command = fixture.command(args);
        command.env("AWS_ENDPOINT_URL_S3", far).env("AWS_ACCESS_KEY_ID", "k").env("AWS_SECRET_ACCESS_KEY", "s");
        let refused = ran(&mut command);
        assert_eq!(refused.code, Some(7), "{}", refused.err);
        assert!(refused.err.contains("--allow-http"), "{}", refused.err);
    }
}

/// Fails unless `request` ends soon, as a store that does not answer ends it.
async fn ends_unreachable<T>(request: impl Future<Output = Result<T>>) {
    let Err(error) = tokio::time::timeout(Duration::from_mins(1), request).await.expect("it hangs") else {
        panic!("a store that never answers was good enough");
    };
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert_eq!(error.kind().exit_code(), 6);
}

/// F9: "A request that makes no progress for a minute (for the body of an answer, 16 KiB) fails and is retried; [...] A command gives up
/// with exit 6 after a few tries and can be run again." (Here a twentieth of a second is the minute.)
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_stalls_hangs_nobody() {
    let fixture = Fixture::new();
    let stalls = Faults { stalls: 1000, ..Faults::default() };
    let faulty = Arc::new(Faulty::new(Arc::new(InMemory::new()), stalls, 7));
    faulty.calm(true);
    let store = Store::from_objects_watched(Arc::<Faulty>::clone(&faulty), Duration::from_millis(50));
    let repository = Repository::create(store, fixture.options()).await.unwrap().0;
    fs::write(fixture.path("f"), noise(1, 8_000_000)).unwrap();
    fs::write(fixture.path("g"), noise(2, 20_000_000)).unwrap();
    repository.save(&fixture.path("f"), &name("f"), &SaveOptions::default()).await.unwrap();

    faulty.calm(false);
    let out = fixture.path("out");
    ends_unreachable(repository.save(&fixture.path("g"), &name("g"), &SaveOptions::default())).await;
    ends_unreachable(repository.restore(&name("f"), None, &out, &RestoreOptions::default())).await;
    assert!(!out.exists());

    faulty.calm(true);
    repository.save(&fixture.path("g"), &name("g"), &SaveOptions::default()).await.unwrap();
    repository.restore(&name("g"), None, &out, &RestoreOptions::default()).await.unwrap();
    assert!(fs::read(&out).unwrap() == noise(2, 20_000_000));
}

/// F9, as before, for stores that stop answering in the middle. (An upload is given time by its size, too: so these are
/// short.)
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_stalls_now_and_then_hangs_nobody() {
    let fixture = Fixture::new();
    fs::write(fixture.path("f"), noise(1, 100_000)).unwrap();
    let (mut failed, mut restored) = (0, 0);
    for seed in 0..6 {
        let stalls = Faults { stalls: 250, ..Faults::default() };
        let faulty = Arc::new(Faulty::new(Arc::new(InMemory::new()), stalls, seed));
        faulty.calm(true);
        let store = Store::from_objects_watched(Arc::<Faulty>::clone(&faulty), Duration::from_millis(10));
        let repository = Repository::create(store, fixture.options()).await.unwrap().0;
        faulty.calm(false);
        for round in 0..3 {
            let (saved, options) = (name("f"), SaveOptions { reread: true, ..SaveOptions::default() });
            let path = fixture.path("f");
            let save = repository.save(&path, &saved, &options);
            failed += u32::from(ended(save).await.is_none());
            let (out, options) = (fixture.path(&format!("out-{seed}-{round}")), RestoreOptions::default());
            // What was never saved cannot be restored.
            if repository.state().await.is_ok_and(|state| state.refs.contains_key(&saved))
                && ended(repository.restore(&saved, None, &out, &options)).await.is_some()
            {
                assert!(fs::read(&out).unwrap() == noise(1, 100_000));
                restored += 1;
            }
        }
        assert!(faulty.injected() > 0);
    }
    assert!(restored > 3, "{restored} restores of 18 came through, {failed} saves failed");
}

/// What `request` gives, soon; nothing if the store was to blame.
async fn ended<T>(request: impl Future<Output = Result<T>>) -> Option<T> {
    match tokio::time::timeout(Duration::from_mins(1), request).await.expect("it hangs") {
        Ok(given) => Some(given),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
            None
        }
    }
}
