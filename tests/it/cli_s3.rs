//! Every command of the real binary on real S3 servers, as a shell would call it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::data::{noise, safetensors, tree_digest};
use crate::ports::ClosedPort;
use crate::stores::{Server, fresh_bucket, servers};

/// A user of one server: a home folder, credentials in the environment, a repository to be made.
struct User {
    home: TempDir,
    server: Server,
    repository: String,
}

impl User {
    fn new(server: Server) -> Self {
        Self { home: tempfile::tempdir().unwrap(), server, repository: fresh_bucket().to_string() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let keys = &self.server.keys;
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command
            .env_clear()
            .env("HOME", self.home.path())
            .env("AWS_ACCESS_KEY_ID", &keys.access_key_id)
            .env("AWS_SECRET_ACCESS_KEY", &keys.secret_access_key)
            .env("AWS_REGION", &self.server.region)
            .env("TOWLINE_REPO", &self.repository)
            .current_dir(self.home.path())
            .args(["--memory", "128M", "--json"])
            .args(args);
        command
    }

    fn output(&self, args: &[&str]) -> Output {
        self.command(args).args(["--endpoint", &self.server.endpoint]).output().unwrap()
    }

    /// What `args` print, which must succeed.
    fn bytes(&self, args: &[&str]) -> Vec<u8> {
        let output = self.output(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: towline {args:?}: {}: {said}", self.server.name, output.status);
        output.stdout
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_slice(&self.bytes(args)).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let listed = self.json(&["ls"]);
        let refs = listed["refs"].as_array().unwrap();
        refs.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Restores `name` from `repository` and compares it with `source`.
    fn comes_back(&self, repository: &str, name: &str, source: &Path) {
        let dest = tempfile::tempdir_in(self.home.path()).unwrap();
        let dest = dest.path().join("tree");
        let report = self.json(&["--repo", repository, "restore", name, text(&dest)]);
        assert_eq!(tree_digest(source), tree_digest(&dest), "{} {name} of {repository}", self.server.name);
        assert_eq!(report["files"], 3);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn sample(root: &Path) {
    fs::create_dir_all(root.join("sub/empty")).unwrap();
    fs::write(root.join("small"), b"0123456789").unwrap();
    fs::write(root.join("sub/noise"), noise(5, 3_000_000)).unwrap();
    fs::write(root.join("model.safetensors"), safetensors(6, &[("a", 300_000), ("b", 40)])).unwrap();
}

#[test]
fn saving_and_all_that_looks_at_what_was_saved() {
    for user in servers().into_iter().map(User::new) {
        let tree = user.path("tree");
        sample(&tree);
        assert_eq!(user.json(&["init"])["created"], true, "{}", user.server.name);
        assert_eq!(user.json(&["init"])["created"], false);

        let first = user.json(&["save", text(&tree), "run/1", "--label", "lr=0.1"]);
        assert_eq!((&first["files"], &first["name"]), (&3.into(), &"run/1".into()));
        fs::write(tree.join("small"), b"abcdefghij").unwrap();
        let second = user.json(&["save", text(&tree), "run/2", "--base", "run/1"]);
        assert_eq!(second["new_bytes"], 10, "{second}");

        assert_eq!(user.names(), ["run/1", "run/2"]);
        let shown = user.json(&["show", "run/1"]);
        assert_eq!(shown["labels"]["lr"], "0.1");
        let model = shown["entries"].as_array().unwrap().iter().find(|one| one["path"] == "model.safetensors").unwrap();
        assert_eq!(model["tensors"].as_array().unwrap().len(), 2);
        let changes = user.json(&["diff", "run/1", "run/2"]);
        assert!(changes["changes"].as_array().unwrap().iter().any(|one| one["path"] == "small"), "{changes}");
        assert_eq!(user.bytes(&["cat", "run/1:small", "--range", "2-4"]), b"234");
        assert_eq!(user.bytes(&["cat", "run/2:sub/noise", "--range", "-7"]), noise(5, 3_000_000)[2_999_993..]);

        user.json(&["cp", "run/2", "best"]);
        user.json(&["rm", "run/2"]);
        assert_eq!(user.names(), ["best", "run/1"]);
        user.comes_back(&user.repository, "best", &tree);
        let one = user.path("one");
        user.json(&["restore", "best:sub/noise", text(&one)]);
        assert_eq!(fs::read(one).unwrap(), noise(5, 3_000_000));
    }
}

#[test]
fn syncing_verifying_collecting_and_the_doctor() {
    for user in servers().into_iter().map(User::new) {
        let (tree, local) = (user.path("tree"), user.path("local"));
        let elsewhere = format!("{}/elsewhere", fresh_bucket());
        sample(&tree);
        for repository in [&*user.repository, &elsewhere, text(&local)] {
            user.json(&["init", repository]);
        }
        user.json(&["--repo", text(&local), "save", text(&tree), "run/1"]);
        let up = user.json(&["sync", text(&local), &user.repository]);
        assert_eq!(up["names"], 1, "{up}");
        user.comes_back(&user.repository, "run/1", &tree);
        let again = user.json(&["sync", text(&local), &user.repository, "run"]);
        assert_eq!(again["moved_bytes"], 0, "{again}");
        user.json(&["sync", &user.repository, &elsewhere, "run/1"]);
        user.comes_back(&elsewhere, "run/1", &tree);

        fs::write(tree.join("sub/noise"), noise(9, 2_000_000)).unwrap();
        user.json(&["save", text(&tree), "run/2"]);
        user.json(&["sync", &user.repository, text(&local)]);
        user.comes_back(text(&local), "run/2", &tree);

        user.json(&["rm", "--now", "run/1"]);
        user.json(&["collect", "--dry-run", "--grace", "0s"]);
        let collected = user.json(&["collect", "--grace", "0s"]);
        assert!(collected["deleted_objects"].as_u64().unwrap() > 0, "{collected}");
        for args in [&["verify"][..], &["verify", "run/2", "--data"], &["verify", "--data"]] {
            assert_eq!(user.json(args)["damaged"], serde_json::json!([]), "{args:?}");
        }
        user.comes_back(&user.repository, "run/2", &tree);

        let checks = user.json(&["doctor"])["checks"].as_array().unwrap().clone();
        let detail = |what: &str| checks.iter().find(|check| check["what"] == what).unwrap()["detail"].to_string();
        assert!(detail("credentials").contains("environment variables"), "{checks:?}");
        assert!(detail("endpoint").contains(&user.server.endpoint) && detail("region").contains(&user.server.region));
        assert!(detail("repository").contains(&user.repository));
    }
}

#[test]
fn exit_codes_tell_what_went_wrong() {
    for user in servers().into_iter().map(User::new) {
        let code = |args: &[&str]| user.output(args).status.code().unwrap();
        let file = user.path("file");
        fs::write(&file, b"mine").unwrap();
        assert_eq!(code(&["ls"]), 3, "{}: no bucket", user.server.name);
        assert_eq!(code(&["doctor"]), 3, "{}: no bucket", user.server.name);
        user.json(&["init"]);
        assert_eq!(code(&["--repo", &format!("{}/none", user.repository), "ls"]), 3, "no repository in the bucket");
        assert_eq!(code(&["restore", "none", text(&file)]), 3);
        user.json(&["save", text(&file), "run"]);
        fs::write(&file, b"changed").unwrap();
        assert_eq!(code(&["restore", "run", text(&file)]), 5);

        let refused =
            user.command(&["ls", "--endpoint", &user.server.endpoint]).env("AWS_SECRET_ACCESS_KEY", "wrong").output();
        assert_eq!(refused.unwrap().status.code(), Some(7), "{}", user.server.name);
        let refused = user
            .command(&["doctor", "--endpoint", &user.server.endpoint])
            .env("AWS_SECRET_ACCESS_KEY", "wrong")
            .output();
        let refused = refused.unwrap();
        assert_eq!(refused.status.code(), Some(1), "something is bad");
        assert!(String::from_utf8_lossy(&refused.stdout).contains("\"access\""), "and is told");
    }
}

#[test]
fn a_closed_port_is_unreachable() {
    for user in servers().into_iter().map(User::new) {
        let port = ClosedPort::new();
        let endpoint = format!("http://{}", port.address());
        for verb in ["ls", "init", "doctor"] {
            let output = user.command(&[verb, "--endpoint", &endpoint]).output().unwrap();
            assert_eq!(output.status.code(), Some(6), "{verb}: {}", String::from_utf8_lossy(&output.stderr));
            let error: Value = serde_json::from_slice(&output.stderr).unwrap();
            assert_eq!(error["error"]["kind"], "unreachable");
        }
    }
}
