//! The stores that tests run over: memory, a directory, and each server that was started.
//!
//! `TOWLINE_TEST_CEPH` and `TOWLINE_TEST_MINISTACK` hold the paths of the env files that tests/servers/*.sh write.
//! A server without one is skipped, and said so; with `TOWLINE_TEST_REQUIRE_SERVERS=1` it is a failure.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use towline::storage::{Keys, Location, Store, StoreOptions, open};
use ulid::Ulid;

/// A store with nothing in it, and what it is called in messages.
pub(crate) struct TestStore {
    pub(crate) name: &'static str,
    pub(crate) store: Store,
    /// Lives as long as the store in it.
    _directory: Option<TempDir>,
}

/// An S3 server that was started for the tests.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) name: &'static str,
    pub(crate) endpoint: String,
    pub(crate) keys: Keys,
    pub(crate) region: String,
}

impl Server {
    /// How to open a store on it, making what is not there.
    pub(crate) fn options(&self) -> StoreOptions {
        StoreOptions {
            endpoint: Some(self.endpoint.clone()),
            region: Some(self.region.clone()),
            keys: Some(self.keys.clone()),
            create: true,
            ..StoreOptions::default()
        }
    }

    /// An empty store on it.
    pub(crate) async fn store(&self) -> Store {
        open(&fresh_location(), &self.options()).await.unwrap()
    }

    fn read(name: &'static str, file: &Path) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{name}: {}: {e}", file.display()));
        let value = |wanted: &str| {
            let found = text.lines().filter_map(|line| line.split_once('=')).find(|(key, _)| *key == wanted);
            found.unwrap_or_else(|| panic!("{name}: no {wanted} in {}", file.display())).1.to_owned()
        };
        Self {
            name,
            endpoint: value("S3_ENDPOINT"),
            keys: Keys {
                access_key_id: value("AWS_ACCESS_KEY_ID"),
                secret_access_key: value("AWS_SECRET_ACCESS_KEY"),
                session_token: None,
            },
            region: value("AWS_REGION"),
        }
    }
}

/// A place in the bucket of the tests that nobody else uses.
pub(crate) fn fresh_location() -> Location {
    Location::S3 { bucket: "towline-test".to_owned(), prefix: format!("t/{}", Ulid::generate()) }
}

/// A place in a bucket of its own, for tests that set the bucket's rules.
pub(crate) fn fresh_bucket() -> Location {
    Location::S3 { bucket: format!("towline-{}", Ulid::generate()).to_lowercase(), prefix: "p".to_owned() }
}

/// The servers that were started.
pub(crate) fn servers() -> Vec<Server> {
    [("ceph", "TOWLINE_TEST_CEPH"), ("ministack", "TOWLINE_TEST_MINISTACK")]
        .into_iter()
        .filter_map(|(name, variable)| {
            let file = std::env::var_os(variable);
            if file.is_none() {
                missing(&format!("{name}: {variable} is not set; tests/servers/servers.sh start"));
            }
            Some(Server::read(name, &PathBuf::from(file?)))
        })
        .collect()
}

/// Says that something is skipped, or fails where nothing may be.
pub(crate) fn missing(what: &str) {
    assert!(std::env::var("TOWLINE_TEST_REQUIRE_SERVERS").as_deref() != Ok("1"), "required: {what}");
    eprintln!("SKIPPED {what}");
}

/// An empty store of every kind.
pub(crate) async fn all_stores() -> Vec<TestStore> {
    let directory = tempfile::tempdir().unwrap();
    let location = Location::directory(directory.path()).unwrap();
    let local = open(&location, &StoreOptions::default()).await.unwrap();
    let mut stores = vec![
        TestStore { name: "memory", store: Store::memory(), _directory: None },
        TestStore { name: "directory", store: local, _directory: Some(directory) },
    ];
    for server in servers() {
        stores.push(TestStore { name: server.name, store: server.store().await, _directory: None });
    }
    stores
}
