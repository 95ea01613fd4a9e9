//! Doctor: clean where Towline runs well, and plain about what would hurt.

use std::collections::BTreeMap;

use aws_sdk_s3::types::{
    BucketLifecycleConfiguration, BucketVersioningStatus, DefaultRetention, ExpirationStatus, LifecycleExpiration,
    LifecycleRule, LifecycleRuleFilter, ObjectLockConfiguration, ObjectLockEnabled, ObjectLockRetentionMode,
    ObjectLockRule, Tag, VersioningConfiguration,
};
use futures::TryStreamExt as _;
use towline::ErrorKind;
use towline::ops::{Check, Diagnosis, Outcome, diagnose, doctor};
use towline::progress::Progress;
use towline::repository::{OpenOptions, Repository};
use towline::storage::{Bucket, Keys, StoreOptions, connect, open};

use crate::ports::ClosedPort;
use crate::probe::Rclone;
use crate::stores::{all_stores, fresh_bucket, fresh_location, servers};

/// What the machine that runs the tests is to blame for, not the store.
const OF_THE_MACHINE: [&str; 5] = ["open files", "UDP buffers", "memory", "file system", "free space"];

fn troubles(diagnosis: &Diagnosis) -> Vec<&Check> {
    let of_store = diagnosis.checks.iter().filter(|check| !OF_THE_MACHINE.contains(&&*check.what));
    of_store.filter(|check| check.outcome != Outcome::Ok).collect()
}

fn by_name(diagnosis: &Diagnosis) -> BTreeMap<&str, &Check> {
    diagnosis.checks.iter().map(|check| (&*check.what, check)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_real_store_is_clean() {
    for test in all_stores().await {
        let before = diagnose(&test.store, &Progress::default()).await.unwrap();
        let lacking = troubles(&before);
        assert_eq!(lacking.iter().map(|check| &*check.what).collect::<Vec<_>>(), ["repository"], "{}", test.name);
        assert!(lacking[0].help.as_ref().unwrap().contains("towline init"), "{lacking:?}");
        let left: Vec<_> = test.store.objects().list(None).try_collect().await.unwrap();
        assert_eq!(left, [], "{}: everything was removed", test.name);

        Repository::create(test.store.clone(), OpenOptions::default()).await.unwrap();
        let progress = Progress::default();
        let found = diagnose(&test.store, &progress).await.unwrap();
        assert_eq!(troubles(&found), Vec::<&Check>::new(), "{}", test.name);
        assert_eq!(progress.snapshot().moved, 64 << 20, "{}", test.name);

        let checks = by_name(&found);
        for what in ["shared writing", "create if absent", "upload", "download", "latency", "clock", "memory"] {
            assert!(checks.contains_key(what), "{}: {what} in {checks:?}", test.name);
        }
        for what in ["credentials", "region", "endpoint", "versioning", "lifecycle", "object lock"] {
            assert_eq!(checks.contains_key(what), test.store.bucket().is_some(), "{}: {what}", test.name);
        }
        if let Some(directory) = test.store.directory() {
            assert!(!directory.join("probe").exists(), "no empty folders stay");
            assert!(checks["hard links"].outcome == Outcome::Ok && checks["fsync"].outcome == Outcome::Ok);
        }
        if test.name == "ceph" {
            assert!(checks["update if unchanged"].detail.contains("without their quotes"));
            assert!(checks["delete if unchanged"].detail.contains("does not need it"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_ignores_conditions_is_bad() {
    let Some(rclone) = Rclone::start() else { return };
    let found = diagnose(&rclone.store().await, &Progress::default()).await.unwrap();
    let checks = by_name(&found);
    for what in ["shared writing", "create if absent"] {
        assert_eq!(checks[what].outcome, Outcome::Bad, "{:?}", checks[what]);
    }
    assert!(checks["shared writing"].help.as_ref().unwrap().contains("or a directory"));
}

async fn keep_versions(bucket: &Bucket) {
    let enabled = VersioningConfiguration::builder().status(BucketVersioningStatus::Enabled).build();
    let request = bucket.client().put_bucket_versioning().bucket(bucket.name());
    request.versioning_configuration(enabled).send().await.unwrap();
}

async fn expire(bucket: &Bucket, filter: LifecycleRuleFilter) {
    let rule = LifecycleRule::builder()
        .id("spring-cleaning")
        .status(ExpirationStatus::Enabled)
        .filter(filter)
        .expiration(LifecycleExpiration::builder().days(30).build());
    let rules = BucketLifecycleConfiguration::builder().rules(rule.build().unwrap()).build().unwrap();
    let request = bucket.client().put_bucket_lifecycle_configuration().bucket(bucket.name());
    request.lifecycle_configuration(rules).send().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_are_a_warning_and_an_expiry_of_packs_is_bad() {
    for server in servers() {
        let store = open(&fresh_bucket(), &server.options()).await.unwrap();
        let bucket = store.bucket().unwrap();
        keep_versions(bucket).await;
        let tag = Tag::builder().key("old").value("yes").build().unwrap();
        let elsewhere = LifecycleRuleFilter::builder().prefix("elsewhere/").build();
        for harmless in [elsewhere, LifecycleRuleFilter::builder().tag(tag).build()] {
            expire(bucket, harmless).await;
            let found = diagnose(&store, &Progress::default()).await.unwrap();
            let checks = by_name(&found);
            assert_eq!(checks["versioning"].outcome, Outcome::Warn, "{}: {:?}", server.name, checks["versioning"]);
            assert!(checks["versioning"].help.is_some());
            assert_eq!(checks["lifecycle"].outcome, Outcome::Ok, "{}: {:?}", server.name, checks["lifecycle"]);
        }

        expire(bucket, LifecycleRuleFilter::builder().prefix("p/pack/").build()).await;
        let found = diagnose(&store, &Progress::default()).await.unwrap();
        let lifecycle = by_name(&found)["lifecycle"];
        assert_eq!(lifecycle.outcome, Outcome::Bad, "{}: {lifecycle:?}", server.name);
        assert!(lifecycle.detail.contains("spring-cleaning") && lifecycle.help.is_some(), "{lifecycle:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_locks_what_it_is_given_is_bad() {
    for server in servers() {
        let location = fresh_bucket();
        let options = StoreOptions { create: false, ..server.options() };
        let store = connect(&location, &options).await.unwrap();
        let bucket = store.bucket().unwrap();
        let create = bucket.client().create_bucket().bucket(bucket.name()).object_lock_enabled_for_bucket(true);
        create.send().await.unwrap();
        let found = diagnose(&store, &Progress::default()).await.unwrap();
        assert_eq!(by_name(&found)["object lock"].outcome, Outcome::Warn, "{}: {found:?}", server.name);

        let retention = DefaultRetention::builder().mode(ObjectLockRetentionMode::Governance).days(1).build();
        let rule = ObjectLockRule::builder().default_retention(retention).build();
        let lock = ObjectLockConfiguration::builder().object_lock_enabled(ObjectLockEnabled::Enabled).rule(rule);
        let request = bucket.client().put_object_lock_configuration().bucket(bucket.name());
        request.object_lock_configuration(lock.build()).send().await.unwrap();
        let found = diagnose(&store, &Progress::default()).await.unwrap();
        let lock = by_name(&found)["object lock"];
        assert_eq!(lock.outcome, Outcome::Bad, "{}: {lock:?}", server.name);
        assert!(lock.detail.contains("GOVERNANCE for 1 day:"), "{lock:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_refused_is_told_as_whom_and_the_rest_is_an_error() {
    let progress = Progress::default();
    for server in servers() {
        let wrong = Keys { secret_access_key: "wrong".into(), ..server.keys.clone() };
        let options = StoreOptions { keys: Some(wrong), create: false, ..server.options() };
        let mut refused = Diagnosis::default();
        doctor(&fresh_location(), &options, &progress, |check| refused.checks.push(check)).await.unwrap();
        let checks = by_name(&refused);
        assert_eq!(checks["access"].outcome, Outcome::Bad, "{}: {refused:?}", server.name);
        assert!(checks["credentials"].detail.ends_with("from keys given by the caller"), "{refused:?}");
        assert!(checks["access"].detail.contains("SignatureDoesNotMatch"), "{}: {refused:?}", server.name);
        let help = checks["access"].help.as_deref();
        assert!(help.is_some_and(|help| help.contains("AWS_SECRET_ACCESS_KEY")), "{}: {refused:?}", server.name);
        assert!(!checks.contains_key("create if absent") && checks.contains_key("open files"));

        let options = StoreOptions { create: false, ..server.options() };
        let missing = doctor(&fresh_bucket(), &options, &progress, drop).await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound, "{}", server.name);
    }
    let port = ClosedPort::new();
    let keys = Keys { access_key_id: "a".into(), secret_access_key: "b".into(), session_token: None };
    let closed = StoreOptions {
        endpoint: Some(format!("http://{}", port.address())),
        keys: Some(keys),
        ..StoreOptions::default()
    };
    let mut found = Diagnosis::default();
    let told = doctor(&fresh_location(), &closed, &progress, |check| found.checks.push(check)).await;
    let error = told.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    assert!(by_name(&found).contains_key("credentials"), "checks before an error are told: {found:?}");
}

#[test]
fn outcomes_are_lower_case_in_json() {
    let check = Check { what: "w".into(), outcome: Outcome::Warn, detail: "d".into(), help: None };
    let json = serde_json::to_value(Diagnosis { checks: vec![check] }).unwrap();
    let expected = serde_json::json!({ "checks": [{ "what": "w", "outcome": "warn", "detail": "d", "help": null }] });
    assert_eq!(json, expected);
}
