//! Labels and the signed policy, by the command line: what binds a name, who may sign, what a machine may read and where to.

use std::fs;
use std::io::Read as _;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::User;
use crate::data::noise;

/// A user of the machine `site/a`, with an authority, a policy key, and a policy of two sites: `home`, where the repository lies, and
/// `cloud`.
pub(crate) struct PolicyFixture {
    pub(crate) user: User,
    /// Rules at the end of the policy.
    pub(crate) rules: String,
    version: u64,
}

const RULES: &str = "\
[[rule]]
verdict = 'deny'
names = 'raw/**'
to = 'cloud'
why = 'raw data stays at home'

[[rule]]
verdict = 'allow'
sensitivity-at-most = 'restricted'
why = 'ours'
";

impl PolicyFixture {
    pub(crate) fn at(site: &str) -> Self {
        let user = User::with_repository();
        user.ok(&["identity", "init", "--name", "lab"]);
        user.ok(&["identity", "issue-policy", "--to", "policy-key"]);
        let mut lab = Self { user, rules: RULES.to_owned(), version: 0 };
        lab.move_to(site);
        lab.set(&[]);
        lab
    }

    /// Gives the machine the certificate of an agent of `site`.
    fn move_to(&self, site: &str) {
        let folder = self.user.work().join("../home/.config/towline/identity");
        let _ = fs::remove_dir_all(&folder);
        self.user.ok(&["identity", "issue", &format!("{site}/a"), "--to", folder.to_str().unwrap()]);
    }

    fn repository_id(&self) -> String {
        self.user.json(&["init"], 0)["id"].as_str().unwrap().to_owned()
    }

    /// Writes the next version of the policy to `policy.toml`, unsigned.
    fn write(&mut self) {
        self.version += 1;
        let (version, id) = (self.version, self.repository_id());
        let place = self.user.repository().canonicalize().unwrap();
        let text = format!(
            "version = {version}\nrepository = '{id}'\n\n\
             [[site]]\nname = 'home'\njurisdiction = ['DE', 'EU']\nrepositories = '{}'\n\n\
             [[site]]\nname = 'cloud'\njurisdiction = 'US'\n\n{}",
            place.display(),
            self.rules
        );
        self.user.write("policy.toml", text.as_bytes());
    }

    pub(crate) fn set(&mut self, more: &[&str]) {
        self.write();
        self.user.ok(&["policy", "sign", "policy.toml", "--key", "policy-key"]);
        self.user.ok(&[&["policy", "set", "policy.toml"], more].concat());
    }

    fn save(&self, name: &str, labels: &[&str]) {
        self.user.write("data/file", name.as_bytes());
        let labels: Vec<&str> = labels.iter().flat_map(|label| ["--label", label]).collect();
        self.user.ok(&[&["save", "data", name], labels.as_slice()].concat());
    }

    fn labels(&self, name: &str) -> Value {
        self.user.json(&["label", name], 0)["labels"].clone()
    }

    fn restores(&self, name: &str) -> Option<i32> {
        let _ = fs::remove_dir_all(self.user.work().join("out"));
        self.user.run(&["restore", name, "out"]).code
    }
}

/// Y1: "A label belongs to a name and to every name below it; a label given with a step belongs to the run."
#[test]
fn labels_are_inherited_and_only_tightened() {
    let lab = PolicyFixture::at("home");
    lab.save("run/step-1", &["residency=DE,FR,EU", "sensitivity=internal", "license=mit"]);
    let run = json!({"residency": ["DE", "EU", "FR"], "sensitivity": "internal"});
    assert_eq!(lab.labels("run/step-1"), run);
    assert_eq!(lab.labels("run/step-2"), run, "the next step has the run's");
    assert_eq!(lab.labels("run@latest"), run);
    lab.user.fails(&["label", "run@latest", "sensitivity=secret"], 2);
    let shown = lab.user.json(&["show", "run/step-1"], 0);
    assert_eq!(shown["labels"], json!({"license": "mit"}), "other labels are the tree's");

    lab.user.ok(&["label", "run", "sensitivity=restricted", "residency=EU,US"]);
    let strict = json!({"residency": ["EU"], "sensitivity": "restricted"});
    lab.user.ok(&["label", "run/step-1", "sensitivity=public"]);
    assert!(lab.user.run(&["label", "run", "residency=EU,US"]).err.contains("run had these labels before"));
    assert_eq!(lab.labels("run/step-1"), strict, "nothing is loosened");
    assert_eq!(lab.labels("run-2/step-1"), json!({}));

    lab.user.ok(&["cp", "run/step-1", "models/base"]);
    let copied = lab.labels("models/base");
    assert_eq!((&copied["residency"], &copied["sensitivity"]), (&json!(["EU"]), &json!("restricted")));
    lab.user.ok(&["label", "run", "tenant=clinic"]);
    assert_eq!(lab.labels("models/base")["tenant"], json!(["clinic"]), "a copy has what its origin gets later");
    let error = lab.user.fails(&["label", "run", "residency=FR"], 5);
    assert!(error["message"].as_str().unwrap().starts_with("no place would be left for the content"), "{error}");
    lab.user.fails(&["save", "data", "run/step-3", "--label", "residency=FR"], 5);
    lab.user.fails(&["label", "run", "sensitivity=high"], 2);
    lab.user.fails(&["label", "run", "colour=red"], 2);
    // Repeated labels are joined, in any order.
    lab.save("twice/a", &["sensitivity=restricted", "sensitivity=public", "residency=DE,EU", "residency=EU"]);
    assert_eq!(lab.labels("twice/a"), json!({"residency": ["EU"], "sensitivity": "restricted"}));
    lab.user.fails(&["save", "data", "twice/b", "--label", "license=mit", "--label", "license=gpl"], 2);
    // A tree has the strictest labels of all its names.
    lab.save("open/a", &[]);
    lab.user.ok(&["cp", "open/a", "closed/a"]);
    lab.user.ok(&["label", "closed", "sensitivity=restricted"]);
    assert_eq!(lab.labels("open/a"), json!({"sensitivity": "restricted"}));
}

/// Y2: "Restricted content goes only to sites that the policy describes".
#[test]
fn a_machine_reads_what_the_policy_lets_go_to_its_site() {
    let lab = PolicyFixture::at("home");
    lab.save("raw/set", &["sensitivity=restricted"]);
    lab.save("eu/set", &["residency=EU"]);
    lab.save("secret/set", &[]);
    lab.save("free/set", &[]);
    let remark = lab.user.run(&["label", "secret", "sensitivity=secret"]).err;
    assert!(remark.starts_with("with these labels secret/set cannot be read here any more: "), "{remark}");
    let can = |names: [&str; 4]| names.map(|name| lab.restores(name));
    let all = ["raw/set", "eu/set", "secret/set", "free/set"];
    assert_eq!(can(all), [Some(0), Some(0), Some(7), Some(0)], "at home");
    lab.move_to("cloud");
    assert_eq!(can(all), [Some(7), Some(7), Some(7), Some(0)], "in the cloud");
    let denied = lab.user.fails(&["cat", "raw/set:file"], 7);
    assert!(denied["message"].as_str().unwrap().contains("raw data stays at home"), "{denied}");
    let denied = lab.user.fails(&["restore", "eu/set", "out"], 7);
    assert!(denied["message"].as_str().unwrap().contains("residency"), "{denied}");
    lab.move_to("moon");
    assert_eq!(can(all), [Some(7), Some(7), Some(7), Some(0)], "at a site that the policy does not describe");
    fs::remove_dir_all(lab.user.work().join("../home/.config/towline/identity")).unwrap();
    assert_eq!(can(all), [Some(7), Some(7), Some(7), Some(0)], "without a certificate");
    for more in [&["show", "raw/set"][..], &["tensors", "raw/set"], &["diff", "raw/set", "free/set"]] {
        lab.user.fails(more, 7);
    }
}

/// Y3: "a command that reads, saves, copies or syncs each check the policy".
#[test]
fn what_has_labels_is_saved_and_synced_only_to_repositories_at_sites_that_may_have_it() {
    let lab = PolicyFixture::at("home");
    lab.save("raw/set", &["sensitivity=restricted"]);
    lab.save("free/set", &[]);
    let other = lab.user.work().join("other");
    let other_repo = other.to_str().unwrap();
    lab.user.ok(&["init", other_repo]);
    let from = lab.user.repository();
    let sync = |to: &str, args: &[&str]| lab.user.run(&[&["sync", from.to_str().unwrap(), to], args].concat());
    let ran = sync(other_repo, &["raw/set"]);
    assert!(ran.code == Some(7) && ran.err.contains("unknown site"), "{:?} {}", ran.code, ran.err);
    assert_eq!(fs::read_dir(other.join("pack")).map_or(0, Iterator::count), 0, "nothing was moved");
    assert_eq!(sync(other_repo, &["free/set"]).code, Some(0));
    for (name, code) in [("raw/set", 7), ("raw", 7), ("free/set", 0)] {
        assert_eq!((sync("new", &[name, "--init"]).code, lab.user.exists("new")), (Some(code), code == 0), "{name}");
    }
    // A save with labels that the repository's site may not have, or without a policy, stores nothing.
    lab.user.write("data/file", b"for another place");
    lab.user.fails(&["save", "data", "us/set", "--label", "residency=US"], 7);
    lab.user.fails(&["show", "us/set"], 3);
    let error = lab.user.fails(&["--repo", other_repo, "save", "data", "free/2", "--label", "residency=DE"], 5);
    assert!(error["message"].as_str().unwrap().starts_with("the repository has no policy"), "{error}");
    lab.user.fails(&["--repo", other_repo, "show", "free/2"], 3);
    for mistyped in ["residancy=DE", "Sensitivity=secret", "tenants=a"] {
        let error = lab.user.fails(&["save", "data", "free/2", "--label", mistyped], 2);
        assert!(error["message"].as_str().unwrap().starts_with("label is mistyped"), "{error}");
    }
    let error = lab.user.fails(&["--repo", other_repo, "label", "free", "sensitivity=internal"], 5);
    assert!(error["help"].as_str().unwrap().contains("towline policy set"), "{error}");
}

/// Y3: "a command that reads, saves, copies or syncs each check the policy".
#[test]
fn a_denied_name_is_not_copied_to_one_that_is_allowed() {
    let lab = PolicyFixture::at("home");
    lab.save("raw/set", &["sensitivity=restricted"]);
    lab.move_to("cloud");
    for copy in [&["cp", "raw/set", "free/set"][..], &["cp", "--stand-alone", "raw/set", "free/set"]] {
        lab.user.fails(copy, 7);
        lab.user.fails(&["show", "free/set"], 3);
    }
}

/// Y1: "removing or replacing a name takes no label from its tree".
#[test]
fn an_origin_alone_is_handed_on_too() {
    let lab = PolicyFixture::at("home");
    lab.save("made", &["derived-from=source"]);
    lab.user.ok(&["rm", "made"]);
    lab.user.ok(&["undelete", "made", "--as", "again"]);
    lab.user.ok(&["cp", "again", "copy"]);
    lab.user.ok(&["label", "source", "residency=DE"]);
    for name in ["again", "copy"] {
        assert_eq!(lab.labels(name)["residency"], json!(["DE"]), "{name}");
    }
}

#[test]
fn a_sync_to_a_site_that_may_have_it_hands_the_labels_on() {
    let mut lab = PolicyFixture::at("home");
    let other = lab.user.work().join("other");
    lab.user.ok(&["init", other.to_str().unwrap()]);
    let place = other.canonicalize().unwrap();
    lab.rules =
        format!("[[site]]\nname = 'home-2'\njurisdiction = 'DE'\nrepositories = '{}'\n\n{RULES}", place.display());
    lab.set(&[]);
    lab.save("run/step-1", &["residency=DE"]);
    let (here, there) = (lab.user.repository(), other.to_str().unwrap());
    let sync = ["sync", here.to_str().unwrap(), there, "run/step-1"];
    let refused = lab.user.fails(&sync, 5);
    assert!(refused["message"].as_str().unwrap().contains("no policy, so nobody could read"), "{refused}");

    let id = lab.user.json(&["init", there], 0)["id"].as_str().unwrap().to_owned();
    let text = fs::read_to_string(lab.user.work().join("policy.toml")).unwrap();
    let unsigned: Vec<&str> = text.lines().filter(|line| !line.starts_with("# signature")).collect();
    lab.user.write("other.toml", unsigned.join("\n").replace(&lab.repository_id(), &id).as_bytes());
    lab.user.ok(&["policy", "sign", "other.toml", "--key", "policy-key"]);
    lab.user.ok(&["--repo", there, "policy", "set", "other.toml"]);
    lab.user.ok(&sync);
    let labels = lab.user.json(&["--repo", there, "label", "run/step-1"], 0);
    assert_eq!(labels["labels"], json!({"residency": ["DE"]}));
    lab.user.ok(&["--repo", there, "restore", "run/step-1", "out"]);
}

/// Y3: "a command that reads, saves, copies or syncs each check the policy", whether there are labels or not.
#[test]
fn a_rule_about_a_name_binds_it_without_labels() {
    let mut lab = PolicyFixture::at("home");
    lab.save("raw/set", &[]);
    lab.save("free/set", &[]);
    let other = lab.user.work().join("other");
    lab.user.ok(&["init", other.to_str().unwrap()]);
    let place = other.canonicalize().unwrap();
    let rules = RULES.replace("to = 'cloud'\n", "to = ['cloud', 'cloud-2']\n");
    lab.rules = format!("{rules}\n[[site]]\nname = 'cloud-2'\nrepositories = '{}'\n", place.display());
    lab.set(&[]);
    let sync = |name: &str| {
        lab.user.run(&["sync", lab.user.repository().to_str().unwrap(), other.to_str().unwrap(), name]).code
    };
    assert_eq!((sync("raw/set"), sync("free/set")), (Some(7), Some(0)));
    lab.move_to("cloud");
    assert_eq!((lab.restores("raw/set"), lab.restores("free/set")), (Some(7), Some(0)));
}

/// Y3: a copy, a sync and an undelete under another name put nothing where a save may not.
#[test]
fn a_rule_about_a_name_binds_what_is_copied_to_it() {
    let mut lab = PolicyFixture::at("home");
    let other = lab.user.work().join("other");
    lab.user.ok(&["init", other.to_str().unwrap()]);
    lab.save("free/set", &[]);
    lab.user.ok(&["--repo", other.to_str().unwrap(), "save", "data", "closed/from-there"]);
    lab.rules = format!("[[rule]]\nverdict = 'deny'\nnames = 'closed/**'\nwhy = 'closed'\n\n{RULES}");
    lab.set(&[]);
    lab.user.fails(&["save", "data", "closed/a"], 7);
    lab.user.fails(&["cp", "free/set", "closed/b"], 7);
    lab.user.fails(&["cp", "--stand-alone", "free/set", "closed/c"], 7);
    lab.user.fails(&["sync", other.to_str().unwrap(), lab.user.repository().to_str().unwrap(), "closed"], 7);
    lab.user.ok(&["rm", "free/set"]);
    lab.user.fails(&["undelete", "free/set", "--as", "closed/d"], 7);
    lab.user.ok(&["undelete", "free/set", "--as", "free/again"]);
    assert!(!lab.user.ok(&["ls"]).contains("closed"));
}

/// Y1, of what a save says itself that its content was made from.
#[test]
fn what_a_save_is_derived_from_binds_that_save() {
    let lab = PolicyFixture::at("home");
    lab.user.ok(&["label", "us/raw", "residency=US"]);
    lab.user.write("data/file", b"for another place");
    for label in ["residency=US", "derived-from=us/raw", "derived-from=us/raw/one"] {
        let denied = lab.user.fails(&["save", "data", "out/new", "--label", label], 7);
        assert!(denied["message"].as_str().unwrap().contains("residency"), "{label}: {denied}");
    }
    lab.user.fails(&["show", "out/new"], 3);
}

/// Y3: "in a process that reads ranges of an open name (`cat`, fsspec, tensors)".
#[test]
fn a_policy_that_changes_during_a_read_ends_it() {
    const LEN: usize = 40 << 20;
    let mut lab = PolicyFixture::at("home");
    lab.user.write("large/file", &noise(5, LEN));
    lab.user.ok(&["save", "large", "open/large"]);
    let mut reader =
        lab.user.command(&["cat", "open/large:file"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = reader.stdout.take().unwrap();
    output.read_exact(&mut [0; 1000]).unwrap();
    lab.rules = "[[rule]]\nverdict = 'deny'\nnames = 'open/**'\nwhy = 'closed now'\n".to_owned();
    lab.set(&["--lock-out"]);
    sleep(Duration::from_secs(1));
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    let ended = reader.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(7), "{}", String::from_utf8_lossy(&ended.stderr));
    assert!(rest.len() < LEN / 2, "{}", rest.len());
}

/// Y1: "It stays when the name is removed."
#[test]
fn what_is_taken_back_under_another_name_keeps_its_labels() {
    let lab = PolicyFixture::at("home");
    lab.save("bound/set", &["residency=DE", "sensitivity=restricted"]);
    lab.user.ok(&["rm", "bound/set"]);
    lab.user.ok(&["undelete", "bound/set", "--as", "open/set"]);
    let labels = lab.labels("open/set");
    assert_eq!((&labels["residency"], &labels["sensitivity"]), (&json!(["DE"]), &json!("restricted")), "{labels}");
    lab.move_to("cloud");
    assert_eq!(lab.restores("open/set"), Some(7));
}

/// Y4: "with a certificate for signing policies alone: an agent's certificate signs no policy".
#[test]
fn only_the_policy_key_signs_and_only_newer_policies_are_set() {
    let mut lab = PolicyFixture::at("home");
    lab.write();
    lab.user.fails(&["policy", "set", "policy.toml"], 7);
    let agent = lab.user.work().join("../home/.config/towline/identity");
    lab.user.fails(&["policy", "sign", "policy.toml", "--key", agent.to_str().unwrap()], 3);
    lab.user.ok(&["policy", "sign", "policy.toml", "--key", "policy-key"]);
    // A comment like a signature is the author's; what follows it is signed, too.
    let text = String::from_utf8(lab.user.read("policy.toml")).unwrap();
    let commented = text.replacen("[[rule]]", "# signature: none of ours\n[[rule]]", 1);
    lab.user.write("commented.toml", commented.as_bytes());
    let signed = lab.user.json(&["policy", "sign", "commented.toml", "--key", "policy-key"], 0);
    assert_eq!(signed["rules"], 2);
    // Any change of the text, or of the signature, is found.
    let signed = lab.user.read("policy.toml");
    for (from, to) in [("ours", "mine"), ("version = 2", "version = 3"), ("# signature: 01", "# signature: 02")] {
        let text = String::from_utf8(signed.clone()).unwrap();
        assert!(text.contains(from), "{from}");
        lab.user.write("bent.toml", text.replacen(from, to, 1).as_bytes());
        let ran = lab.user.run(&["policy", "set", "bent.toml"]);
        assert!(matches!(ran.code, Some(4 | 7)), "{from}: {ran:?}");
    }
    lab.user.write("longer.toml", &[signed.as_slice(), b"[[rule]]\nverdict = 'allow'\nwhy = 'all'\n"].concat());
    lab.user.fails(&["policy", "set", "longer.toml"], 4);
    lab.user.ok(&["policy", "set", "policy.toml"]);
    // It may be set again; another one of the same version may not.
    lab.user.ok(&["policy", "set", "policy.toml"]);
    lab.user.fails(&["policy", "set", "commented.toml"], 5);
    let shown = lab.user.json(&["policy", "show"], 0);
    assert_eq!((&shown["version"], &shown["rules"]), (&json!(2), &json!(2)));

    // Another authority's key counts for nothing.
    lab.user.ok(&["identity", "init", "--authority", "strangers"]);
    lab.user.ok(&["identity", "issue-policy", "--authority", "strangers", "--to", "strange-key"]);
    lab.write();
    lab.user.ok(&["policy", "sign", "policy.toml", "--key", "strange-key"]);
    lab.user.fails(&["policy", "set", "policy.toml"], 7);
    // One that would lock its author out is refused, unless that is asked for.
    lab.rules = "[[rule]]\nverdict = 'allow'\nto = 'cloud'\nwhy = 'theirs'\n".to_owned();
    lab.version = 2;
    lab.write();
    lab.user.ok(&["policy", "sign", "policy.toml", "--key", "policy-key"]);
    lab.user.fails(&["policy", "set", "policy.toml"], 5);
    lab.user.ok(&["policy", "set", "policy.toml", "--lock-out"]);
    lab.rules = RULES.to_owned();
    lab.set(&[]);
}

/// Y4: "refuses an older one, or none, in the repository from then on".
#[test]
fn an_older_policy_or_a_bent_one_in_the_repository_binds_all_the_same() {
    let mut lab = PolicyFixture::at("home");
    lab.save("raw/set", &["sensitivity=restricted"]);
    lab.save("free/set", &[]);
    lab.set(&[]);
    assert_eq!((lab.restores("raw/set"), lab.restores("free/set")), (Some(0), Some(0)));
    // The text in the store is not what the log names.
    let object = lab.user.repository().join(format!("policy/{:020}", 2));
    let good = fs::read(&object).unwrap();
    fs::write(&object, [good.as_slice(), b"\n"].concat()).unwrap();
    lab.user.fails(&["restore", "raw/set", "out-2"], 7);
    // Whoever may write to the store must not switch off rules about names without labels, either.
    lab.user.fails(&["restore", "free/set", "out-2"], 7);
    fs::write(&object, good).unwrap();
    // Somebody puts the log of before in place: the version that was seen is remembered.
    let seen = lab.user.work().join("../home/.local/state/towline/policy");
    let remembered = seen.join(lab.repository_id());
    assert!(fs::read_to_string(&remembered).unwrap().starts_with("2 "));
    fs::write(&remembered, "3\n").unwrap();
    let denied = lab.user.fails(&["restore", "raw/set", "out-3"], 7);
    assert!(denied["message"].as_str().unwrap().contains("older than one that was seen"), "{denied}");
    assert!(!lab.user.exists("out-2") && !lab.user.exists("out-3"));
}

#[test]
fn rules_are_explained_before_and_after_they_are_set() {
    let lab = PolicyFixture::at("home");
    lab.save("raw/set", &["sensitivity=restricted"]);
    let explained = lab.user.json(&["policy", "explain", "raw/set", "--to", "cloud"], 0);
    assert_eq!((&explained["verdict"], &explained["basis"]["by"]), (&json!("deny"), &json!("rule")));
    assert_eq!(explained["basis"]["why"], "raw data stays at home");
    let text = lab.user.ok(&["policy", "explain", "raw/set", "--to", "home"]);
    assert!(text.starts_with("raw/set may go to home: rule at line"), "{text}");
    lab.user.write("open.toml", b"version = 9\nrepository = 'x'\n");
    let bad = lab.user.fails(&["policy", "check", "open.toml"], 2);
    assert!(bad["message"].as_str().unwrap().contains("open.toml"), "{bad}");
    assert_eq!(lab.user.json(&["policy", "check", "policy.toml"], 0)["version"], 1);
}

/// The cases that docs/policy.md shows beside its policy.
#[test]
fn cases_beside_a_policy_are_decided_and_those_that_fail_are_named() {
    let user = User::new();
    let document = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/policy.md")).unwrap();
    let blocks: Vec<&str> = document.split("\n```").filter_map(|part| part.strip_prefix("toml\n")).collect();
    let block = |start: &str| *blocks.iter().find(|block| block.starts_with(start)).unwrap();
    user.write("rules/policy.toml", block("version =").as_bytes());
    user.write("rules/cases.toml", block("policy =").as_bytes());
    let report = user.json(&["policy", "test", "rules/cases.toml"], 0);
    assert_eq!((&report["passed"], &report["failed"]), (&json!(9), &json!(0)), "{report}");
    assert_eq!(report["untested"].as_array().map(Vec::len), Some(0), "{report}");

    let bent = block("policy =").replace("[\"10.1.0.7\", \"10.2.0.9\"]", "[\"10.1.0.7\", \"192.0.2.9\"]");
    user.write("rules/bent.toml", bent.replace("rule = \"residency\"", "rule = \"no-rule\"").as_bytes());
    let ran = user.run(&["policy", "test", "rules/bent.toml"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let out = String::from_utf8(ran.out).unwrap();
    for told in [
        "patients/step-9 to cloud/trainer-1: expected allow by \"over the private line\"",
        "got deny by no rule allows it",
        "any to cloud: expected deny by \"no-rule\"",
        "got deny by residency",
        "7 passed, 2 failed",
        "no case is decided by the rule at line",
    ] {
        assert!(out.contains(told), "{told}: {out}");
    }
    let report = user.json(&["policy", "test", "rules/bent.toml", "--policy", "rules/policy.toml"], 1);
    let failed: Vec<bool> = report["cases"].as_array().unwrap().iter().map(|case| case["passed"] == false).collect();
    assert_eq!(failed.iter().filter(|failed| **failed).count(), 2, "{report}");

    for (bad, told) in [
        ("", "there are no cases"),
        ("[[test]]\nname = 'a'\n", "expects nothing"),
        ("[[test]]\nname = 'a'\nallow = 'x'\nroute = ['10.0.0.1', '10.0.0.2']\n", "no site that they lead from"),
        ("\n[[test]]\nlabels = { colour = 'red' }\nallow = 'x'\n", "line 2"),
        ("\n[[test]]\nallow = 'x'\nsites = 'x'\n", "malformed"),
        ("[[test]]\nallow = 'X Y'\n", "malformed"),
    ] {
        user.write("bad.toml", bad.as_bytes());
        let error = user.fails(&["policy", "test", "bad.toml", "--policy", "rules/policy.toml"], 2);
        assert!(error["message"].as_str().unwrap().contains(told), "{told}: {error}");
    }
}

/// Y1: "removing or replacing a name takes no label from its tree".
#[test]
fn the_twin_of_a_name_that_goes_keeps_its_labels() {
    let lab = PolicyFixture::at("home");
    for how in ["rm", "replace", "expire"] {
        let (one, two) = (format!("q/{how}/step-1"), format!("z/{how}"));
        lab.save(&one, &[]);
        lab.user.ok(&["cp", &one, &two]);
        lab.user.ok(&["label", &one, "sensitivity=restricted", "residency=DE"]);
        let before = lab.labels(&two);
        assert_eq!(before["sensitivity"], "restricted");
        match how {
            "rm" => drop(lab.user.ok(&["rm", &one])),
            "replace" => {
                lab.user.write("data/file", b"other content");
                drop(lab.user.ok(&["save", "data", &one]));
            }
            _ => {
                lab.save(&format!("q/{how}/step-2"), &[]);
                lab.user.ok(&["expire", &format!("q/{how}"), "--keep-last", "1"]);
            }
        }
        assert_eq!(lab.labels(&two), before, "{how}");
    }
}

/// Y5: "counts only for that very tree under that name: what is saved there later has the old labels".
#[test]
fn what_is_declassified_leaves_and_what_replaces_it_stays() {
    let mut lab = PolicyFixture::at("home");
    lab.rules = RULES.replace("restricted", "secret");
    lab.set(&[]);
    lab.save("clinic/raw", &["sensitivity=secret"]);
    lab.user.write("data/file", b"without names");
    lab.user.ok(&["save", "data", "clinic/clean"]);
    lab.user.ok(&["label", "clinic", "residency=DE", "sensitivity=secret"]);
    lab.move_to("cloud");
    assert_eq!(lab.restores("clinic/clean"), Some(7));
    lab.move_to("home");
    let declassify = |reason: &str| {
        let rest = ["--residency", "any", "--reason", reason, "--key", "policy-key"];
        lab.user.run(&[&["declassify", "clinic/clean", "--sensitivity", "internal"], rest.as_slice()].concat())
    };
    assert_eq!(declassify("").code, Some(2));
    lab.user.ok(&["cp", "clinic/clean", "clinic/again"]);
    let ran = declassify("names removed");
    assert_eq!(ran.code, Some(5), "another name of the tree stays classified: {}", ran.err);
    lab.user.ok(&["rm", "clinic/again"]);
    let ran = declassify("names removed");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(lab.labels("clinic/clean"), json!({"sensitivity": "internal"}));
    lab.move_to("cloud");
    assert_eq!((lab.restores("clinic/clean"), lab.restores("clinic/raw")), (Some(0), Some(7)));
    lab.move_to("home");
    // Labels that are given later bind: it has to be declassified again.
    lab.user.ok(&["label", "clinic", "tenant=clinic"]);
    assert_eq!(lab.labels("clinic/clean")["sensitivity"], "secret");
    lab.move_to("cloud");
    assert_eq!(lab.restores("clinic/clean"), Some(7));
    lab.move_to("home");
    assert_eq!(declassify("names removed").code, Some(0));
    lab.user.write("data/file", b"with names again");
    lab.user.ok(&["save", "data", "clinic/clean"]);
    let strict = json!({"residency": ["DE"], "sensitivity": "secret", "tenant": ["clinic"]});
    assert_eq!(lab.labels("clinic/clean"), strict);
}

/// Y9: "Without it, `verify --data` and `--repair` are refused, and `collect` leaves those packs as they are".
#[test]
fn maintenance_reads_nothing_that_the_policy_denies_here() {
    let lab = PolicyFixture::at("home");
    lab.user.write("data/large", &noise(1, 3_000_000));
    lab.save("raw/scans", &[]);
    fs::remove_file(lab.user.work().join("data/large")).unwrap();
    lab.save("raw/scans", &[]);
    lab.save("open/notes", &[]);
    let collect = ["collect", "--grace", "0", "--keep-removed", "0"];
    lab.move_to("cloud");
    lab.user.ok(&["verify"]);
    lab.user.ok(&["verify", "open/notes", "--data"]);
    for denied in [&["verify", "--data"][..], &["verify", "--repair"], &["verify", "raw/scans", "--data"]] {
        let error = lab.user.fails(denied, 7);
        assert!(error["place"].as_str().unwrap().contains("raw/scans"), "{error}");
    }
    for more in [&["--dry-run"][..], &[]] {
        let report = lab.user.json(&[&collect, more].concat(), 0);
        assert_eq!(report["repacked_packs"], 0, "{report}");
        let steps = report["steps"].to_string();
        assert!(steps.contains("leave 1 mostly unused packs: policy denies this name here"), "{steps}");
    }
    lab.move_to("home");
    assert_eq!(lab.user.json(&collect, 0)["repacked_packs"], 1);
    lab.user.ok(&["verify", "--data"]);
}

/// L1: what changes labels and policies is in the log, with its outcome.
#[test]
fn changes_of_labels_and_of_the_policy_are_recorded() {
    let mut lab = PolicyFixture::at("home");
    lab.save("clinic/clean", &["sensitivity=restricted"]);
    lab.write();
    lab.user.ok(&["policy", "sign", "policy.toml", "--key", "policy-key"]);
    let other = lab.user.read("policy.toml");
    let other = String::from_utf8(other).unwrap().replacen("[[rule]]", "# the same version\n[[rule]]", 1);
    lab.user.write("other.toml", other.as_bytes());
    lab.user.ok(&["policy", "sign", "other.toml", "--key", "policy-key"]);
    let lower = ["declassify", "clinic/clean", "--sensitivity", "internal", "--reason", "names removed"];
    for (args, ends) in [
        (&["label", "clinic", "tenant=clinic"][..], true),
        (&[&lower[..], &["--key", "policy-key"]].concat(), true),
        (&["policy", "set", "policy.toml"], true),
        (&["policy", "set", "other.toml"], false),
        (&["policy", "show"], true),
    ] {
        let output = lab.user.command(args).env("TOWLINE_AUDIT", "log").output().unwrap();
        assert_eq!(output.status.success(), ends, "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let shown = lab.user.ok(&["audit", "show", "--dir", "log", "--json"]);
    let shown: Vec<Value> = shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str| shown.iter().filter(|entry| entry["kind"] == kind).collect::<Vec<_>>();
    let decisions: Vec<_> =
        of("decision").iter().map(|entry| (entry["action"].clone(), entry["name"].clone())).collect();
    let expected = [("label", json!("clinic")), ("declassify", json!("clinic/clean")), ("policy", json!(null))];
    let expected: Vec<_> = expected.into_iter().map(|(action, name)| (json!(action), name)).collect();
    assert_eq!(decisions[..3], expected);
    assert!(of("end")[..3].iter().all(|end| end["outcome"] == "done"), "{shown:?}");
}
