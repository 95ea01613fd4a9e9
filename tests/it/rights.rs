//! S3 policies of docs/security.md, on Ceph RGW, with a user for each role. S2, S3, S4.

use std::fs;
use std::path::Path;

use futures::{StreamExt as _, TryStreamExt as _};
use object_store::ObjectStoreExt as _;
use serde_json::Value;
use tempfile::TempDir;
use towline::ErrorKind;
use towline::ops::{CollectOptions, Outcome, RestoreOptions, SaveOptions, diagnose};
use towline::progress::Progress;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Keys, Location, Store, StoreOptions, open};

use crate::data::{name, noise, tree_digest};
use crate::stores::{Server, fresh_bucket, servers};

const ROLES: [&str; 3] = ["reader", "saver", "collector"];

/// A repository with one step, in a bucket whose policy is that of docs/security.md.
struct Fixture {
    server: Server,
    location: Location,
    owner: Store,
    dir: TempDir,
}

impl Fixture {
    /// `bend` may change a statement of the policy.
    async fn new(server: Server, bend: impl Fn(&mut Value)) -> Self {
        let location = fresh_bucket();
        let owner = open(&location, &server.options()).await.unwrap();
        let bucket = owner.bucket().unwrap();
        let mut statements: Vec<Value> = ROLES.iter().flat_map(|role| policy(role, bucket.name(), "p")).collect();
        statements.iter_mut().for_each(bend);
        let policy = serde_json::json!({"Version": "2012-10-17", "Statement": statements}).to_string();
        bucket.client().put_bucket_policy().bucket(bucket.name()).policy(policy).send().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("step")).unwrap();
        fs::write(dir.path().join("step/model"), noise(1, 3 << 20)).unwrap();
        let world = Self { server, location, owner, dir };
        let (repository, _) = Repository::create(world.owner.clone(), OpenOptions::default()).await.unwrap();
        repository.save(&world.folder(), &name("run/step-1"), &SaveOptions::default()).await.unwrap();
        world
    }

    fn folder(&self) -> std::path::PathBuf {
        self.dir.path().join("step")
    }

    async fn store(&self, role: &str) -> Store {
        let Keys { secret_access_key, .. } = self.server.keys.clone();
        let keys = Keys { access_key_id: role.to_owned(), secret_access_key, session_token: None };
        open(&self.location, &StoreOptions { keys: Some(keys), create: false, ..self.server.options() }).await.unwrap()
    }

    async fn repository(&self, role: &str) -> Repository {
        let cache = Some(self.dir.path().join(format!("cache-{role}")));
        let options = OpenOptions { cache, ..OpenOptions::default() };
        Repository::open(self.store(role).await, options).await.unwrap()
    }

    async fn restores(&self, repository: &Repository, what: &str, to: &str) {
        let to = self.dir.path().join(to);
        repository.restore(&name(what), None, &to, &RestoreOptions::default()).await.unwrap();
        assert_eq!(tree_digest(&to), tree_digest(&self.folder()));
    }

    async fn objects(&self) -> Vec<String> {
        let objects = self.owner.objects().list(None).map_ok(|meta| meta.location.to_string());
        let mut objects: Vec<String> = objects.try_collect().await.unwrap();
        objects.sort();
        objects
    }
}

/// The statements of the policy for `role` in docs/security.md, for the user of that name.
fn policy(role: &str, bucket: &str, prefix: &str) -> Vec<Value> {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/security.md");
    let document = fs::read_to_string(document).unwrap();
    let text = document.split(&format!("```json {role}\n")).nth(1).unwrap().split("```").next().unwrap();
    let text = text.replace("BUCKET", bucket).replace("PREFIX", prefix);
    let policy: Value = serde_json::from_str(&text).unwrap();
    let mut statements = policy["Statement"].as_array().unwrap().clone();
    for statement in &mut statements {
        statement["Principal"] = serde_json::json!({"AWS": [format!("arn:aws:iam:::user/{role}")]});
    }
    statements
}

fn ceph() -> Option<Server> {
    servers().into_iter().find(|server| server.name == "ceph")
}

/// The outcome and the words of doctor's check `what`.
async fn check(store: &Store, what: &str) -> (Outcome, String) {
    let found = diagnose(store, &Progress::default()).await.unwrap();
    let check = found.checks.into_iter().find(|check| check.what == what).unwrap();
    (check.outcome, check.detail)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_restores_and_changes_nothing() {
    let Some(server) = ceph() else { return };
    let world = Fixture::new(server, |_| {}).await;
    let reader = world.repository("reader").await;
    world.restores(&reader, "run/step-1", "out").await;
    let before = world.objects().await;
    let refused = reader.save(&world.folder(), &name("run/step-2"), &SaveOptions::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused:?}");
    let refused = reader.remove(&name("run/step-1")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused:?}");
    assert_eq!(world.objects().await, before);
    let (outcome, told) = check(&world.store("reader").await, "rights").await;
    assert!(outcome == Outcome::Ok && told.contains("enough to restore"), "{told}");
    assert_eq!(world.objects().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saver_saves_and_cannot_delete() {
    let Some(server) = ceph() else { return };
    let world = Fixture::new(server, |_| {}).await;
    let saver = world.repository("saver").await;
    fs::write(world.folder().join("more"), noise(2, 2 << 20)).unwrap();
    saver.save(&world.folder(), &name("run/step-2"), &SaveOptions::default()).await.unwrap();
    saver.remove(&name("run/step-1")).await.unwrap();
    let before = world.objects().await;
    let options = CollectOptions::at_once();
    let refused = saver.collect(&options).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused:?}");
    let after = world.objects().await;
    assert!(before.iter().all(|object| after.contains(object)), "{before:?} {after:?}");
    let deleted = saver.store().objects().delete_stream(futures::stream::iter([Ok("repository".into())]).boxed());
    assert!(deleted.try_collect::<Vec<_>>().await.is_err());
    let (outcome, told) = check(&world.store("saver").await, "rights").await;
    assert!(outcome == Outcome::Ok && told.contains("not to collect"), "{told}");
    world.restores(&saver, "run/step-2", "out").await;
}

/// S8 "depends on the `Deny` statement of S3: whoever may write below `tombstone/` can plant lists older than the grace when a
/// name is removed."
#[tokio::test(flavor = "multi_thread")]
async fn a_saver_plants_no_lists_of_unneeded_objects() {
    let Some(server) = ceph() else { return };
    let world = Fixture::new(server, |_| {}).await;
    let saver = world.store("saver").await;
    for key in ["tombstone/a/b", "tombstone/rights", "boundary/00000000000000000001"] {
        let planted = saver.objects().put(&key.into(), Vec::new().into()).await;
        let error = towline::Error::from(planted.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Denied, "{key}: {error:?}");
    }
    drop(world);

    let Some(server) = ceph() else { return };
    let without_denial = |statement: &mut Value| {
        if statement["Effect"] == "Deny" {
            statement["Resource"] = serde_json::json!("arn:aws:s3:::bucket-of-nobody/*");
        }
    };
    let world = Fixture::new(server, without_denial).await;
    let (outcome, told) = check(&world.store("saver").await, "rights").await;
    assert!(outcome == Outcome::Warn && told.contains("tombstone/"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_frees_what_nothing_names() {
    let Some(server) = ceph() else { return };
    let world = Fixture::new(server, |_| {}).await;
    world.repository("saver").await.remove(&name("run/step-1")).await.unwrap();
    let collector = world.repository("collector").await;
    let options = CollectOptions::at_once();
    collector.collect(&options).await.unwrap();
    collector.collect(&options).await.unwrap();
    let left = world.objects().await;
    assert!(!left.iter().any(|object| object.starts_with("pack/")), "{left:?}");
    let found = diagnose(&world.store("collector").await, &Progress::default()).await.unwrap();
    let troubles: Vec<_> = found.checks.iter().filter(|check| check.outcome == Outcome::Bad).collect();
    assert!(troubles.is_empty(), "{troubles:?}");
    let rules = found
        .checks
        .iter()
        .filter(|check| ["rights", "versioning", "lifecycle", "object lock"].contains(&&*check.what));
    assert!(
        rules.clone().count() == 4 && rules.clone().all(|check| check.outcome == Outcome::Ok),
        "{:?}",
        found.checks
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_says_that_a_list_by_prefix_is_not_enough() {
    let Some(server) = ceph() else { return };
    let by_prefix = |statement: &mut Value| {
        if statement["Action"] == "s3:ListBucket" {
            statement["Condition"] = serde_json::json!({"StringLike": {"s3:prefix": ["p/*"]}});
        }
    };
    let world = Fixture::new(server, by_prefix).await;
    let (outcome, told) = check(&world.store("reader").await, "absent objects").await;
    assert!(outcome == Outcome::Bad && told.contains("403"), "{told}");
}
