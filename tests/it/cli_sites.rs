//! `towline sites` and `towline links`, as docs/placement.md shows them.

use std::fs;
use std::path::Path;

use towline::placement::HintRequest;

use crate::cli::User;
use crate::data::noise;
use crate::policy::PolicyFixture;

/// The block of docs/placement.md that begins with `fence`.
fn block(fence: &str) -> String {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/placement.md")).unwrap();
    let from = page.find(&format!("```{fence}\n")).unwrap() + fence.len() + 4;
    let len = page[from..].find("```").unwrap();
    page[from..from + len].to_owned()
}

#[test]
fn the_documents_example_is_read_and_shown_as_it_says() {
    let user = User::new();
    user.write("sites.toml", block("toml sites").as_bytes());
    user.write("prices.toml", block("toml prices").as_bytes());
    let shown = block("console");
    assert_eq!(user.ok(&["links"]), shown.strip_prefix("$ towline links\n").unwrap());
    let sites = user.json(&["sites"], 0);
    assert_eq!((&sites["prices"], &sites["policy"]), (&"2026-11-25".into(), &serde_json::Value::Null));
    assert_eq!(sites["sites"][0]["site"], "burst");
    assert_eq!(sites["sites"][0]["gpus"][0]["micro_usd_hour"], 2_500_000);
    assert!(!user.exists("../home/.local"), "nothing is made");
    user.write("model/weights", &noise(1, 100_000));
    user.ok(&["save", "model", "run-7/step-1"]);
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/placement.md")).unwrap();
    let asked = page.lines().find_map(|line| line.strip_prefix("$ towline hint ")).unwrap();
    let asked: Vec<&str> = ["hint"].into_iter().chain(asked.split(' ')).collect();
    for _ in 0..2 {
        let ran = user.run(&asked);
        let table = String::from_utf8(ran.out).unwrap();
        assert_eq!((ran.code, table.lines().count()), (Some(0), 3), "{}", ran.err);
        // The example's repository is another.
        assert!(ran.err.contains("a price is not known for: home, burst"), "{}", ran.err);
    }
    let error = user.fails(&["hint", "run-7/step-1", "--returns", "nowhere:1G:30m"], 3);
    assert!(
        error["message"].as_str().unwrap().starts_with("the sites file does not describe the site at nowhere"),
        "{error}"
    );
    let error = user.fails(&["hint", "run-7/step-1", "--commit", "--lease", "0"], 2);
    assert!(error["message"].as_str().unwrap().starts_with("lease would have run out already"), "{error}");
    let cheaper = user.ok(&["links", "--prices", "prices.toml"]);
    assert!(cheaper.contains("$0.05/GiB, $0.031 from 1024"), "{cheaper}");
    user.fails(&["sites", "--check"], 3);
    let error = user.fails(&["sites", "none.toml"], 3);
    assert!(error["place"].as_str().unwrap().contains("none.toml"), "{error}");
    user.write("sites.toml", b"[[site]]\nname = 'a'\n\n[[link]]\nfrom = 'a'\nto = 'b'\nprice = 'aws/internet'\n");
    let error = user.fails(&["links"], 2);
    assert_eq!(error["place"], "sites.toml, line 4", "{error}");
}

#[test]
fn a_file_that_contradicts_the_policy_is_refused() {
    let lab = PolicyFixture::at("home");
    let user = &lab.user;
    let site = |name: &str, more: &str| format!("[[site]]\nname = '{name}'\n{more}\n");
    user.write("sites.toml", format!("{}{}", site("home", "jurisdiction = ['EU', 'DE']"), site("moon", "")).as_bytes());
    let ran = user.run(&["sites", "--check"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let table = String::from_utf8(ran.out).unwrap();
    assert!(table.lines().any(|line| line.starts_with("home") && line.contains("DE EU")), "{table}");
    assert!(ran.err.contains("the policy does not describe moon: nothing with labels goes there"), "{}", ran.err);
    assert!(ran.err.contains("the sites file does not describe cloud, which the policy does"), "{}", ran.err);
    user.write("sites.toml", site("cloud", "jurisdiction = 'DE'").as_bytes());
    let error = user.fails(&["links"], 5);
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("sites file has another jurisdiction than the policy"), "{error}");
    assert!(error["place"].as_str().unwrap().contains("line 1 of the sites file"), "{error}");
}

#[test]
fn the_documents_request_for_a_hint_is_one() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/placement.md")).unwrap();
    let from = page.find("$ cat request.json\n").unwrap() + "$ cat request.json\n".len();
    let len = page[from..].find("$ curl ").unwrap();
    let request: HintRequest = serde_json::from_str(&page[from..from + len]).unwrap();
    request.check().unwrap();
    assert_eq!((request.inputs.len(), request.candidates.len(), request.outputs.len()), (1, 2, 1));
    assert!(
        page[from + len..].starts_with("$ curl -s --unix-socket agent.sock http://localhost/v1/hints?wait=2s -d @")
    );
}
