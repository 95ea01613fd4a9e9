//! Credentials as AWS tools find them: a profile with keys, and a profile with a process that gives passing ones.
//!
//! The chain reads the environment, so each case opens its store in a child: this test binary, run again.

use std::process::Command;

use object_store::ObjectStoreExt;
use towline::storage::{StoreOptions, open};

use crate::stores::{fresh_location, servers};

/// What a child does: opens a store with nothing but the environment, uses it, and tells where its keys came from.
#[tokio::test]
#[ignore = "run by the test below, in an environment of its own"]
async fn child() {
    let create = StoreOptions { create: true, ..StoreOptions::default() };
    let store = open(&fresh_location(), &create).await.unwrap();
    store.objects().put(&"a".into(), "x".into()).await.unwrap();
    let bucket = store.bucket().unwrap();
    println!("origin: {} in {}", bucket.credentials().origin().await.unwrap(), bucket.region());
}

#[test]
fn profiles_and_processes_are_found() {
    for server in servers() {
        let home = tempfile::tempdir().unwrap();
        let (id, secret) = (&server.keys.access_key_id, &server.keys.secret_access_key);
        let given = format!(
            r#"{{"Version":1,"AccessKeyId":"{id}","SecretAccessKey":"{secret}","Expiration":"2100-01-01T00:00:00Z"}}"#
        );
        let answer = home.path().join("answer.json");
        std::fs::write(&answer, given).unwrap();
        let place = format!("region = {}\nendpoint_url = {}\n", server.region, server.endpoint);
        let config = format!(
            "[profile keys]\naws_access_key_id = {id}\naws_secret_access_key = {secret}\n{place}\n\
             [profile process]\ncredential_process = cat {}\n{place}",
            answer.display()
        );
        std::fs::write(home.path().join("config"), config).unwrap();
        for (profile, origin) in
            [("keys", "profile \"keys\""), ("process", "a credential process, by profile \"process\"")]
        {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "--nocapture", "credentials::child"])
                .env_clear()
                .env("PATH", std::env::var_os("PATH").unwrap())
                .env("AWS_CONFIG_FILE", home.path().join("config"))
                .env("AWS_SHARED_CREDENTIALS_FILE", home.path().join("none"))
                .env("AWS_PROFILE", profile)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{}: {said}{}", server.name, String::from_utf8_lossy(&output.stderr));
            let wanted = format!("origin: {origin}");
            assert!(said.contains(&wanted) && said.contains(&server.region), "{}: {said}", server.name);
        }
    }
}
