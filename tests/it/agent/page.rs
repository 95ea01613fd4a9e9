//! The page without a browser: what its server answers, and to whom. S13 of docs/security.md. The tests in
//! `tests/python/test_page.py` have the browser.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{Running, exchange, told_json, with_tree};

/// S13: "Its files hold nothing of the agent, so any process of the machine may read them; what they show needs the token of a call."
#[test]
fn files_of_the_page_need_no_token_and_everything_else_does() {
    let user = with_tree();
    let agent = Running::start(&user, "http = '127.0.0.1:0'");
    let ask = |path: &str, headers: &str| {
        exchange(TcpStream::connect(agent.http.as_ref().unwrap()).unwrap(), "GET", path, headers, "")
    };
    for path in ["/", "/page/main.js", "/page/page.css", "/page/icon.svg"] {
        let answer = ask(path, "");
        assert_eq!(answer.status, 200, "{path}");
        assert!(answer.headers["content-security-policy"].starts_with("default-src 'none'"), "{path}");
        let tag = format!("If-None-Match: {}\r\n", answer.headers["etag"]);
        assert_eq!(ask(path, &tag).status, 304);
        assert_eq!(ask(path, "Host: rebound.example\r\n").status, 403);
    }
    for path in ["/v1/runs", "/v1/sites", "/v1/usage", "/v1/audit", "/v1/hints", "/page/", "/page/none.js"] {
        assert_eq!(ask(path, "").status, 401, "{path}");
    }
    agent.stop();
}

/// S13: "A socket that is forwarded to a port (`ssh -L PORT:SOCKET`) answers pages of no other origin or host."
#[test]
fn a_forwarded_socket_answers_no_other_page() {
    let user = with_tree();
    let agent = Running::start(&user, "");
    let ask =
        |headers: &str| exchange(UnixStream::connect(&agent.socket).unwrap(), "GET", "/v1/pins", headers, "").status;
    assert_eq!(ask("Host: localhost:7170\r\nSec-Fetch-Site: same-origin\r\n"), 200);
    // A rebound name has no mark but its host.
    for headers in [
        "Host: rebound.example:7170\r\n",
        "Host: localhost\r\nHost: rebound.example\r\n",
        "Host: localhost:7170\r\nSec-Fetch-Site: cross-site\r\n",
        "Host: localhost:7170\r\nOrigin: http://localhost:9\r\n",
    ] {
        assert_eq!(ask(headers), 403, "{headers}");
    }
    agent.stop();
}

/// S13: "`towline page` forwards what reads, and no request that changes something."
#[test]
fn the_page_over_the_socket_reads_and_changes_nothing() {
    let user = with_tree();
    user.ok(&["save", "tree", "run/step-1"]);
    let agent = Running::start(&user, "");
    let mut page = user.command(&["page", "--json"]).env("TOWLINE_AGENT", &agent.socket).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(page.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let listening: Value = serde_json::from_str(&line).unwrap();
    let (address, token) = listening["url"].as_str().unwrap().split_once("/#token=").unwrap();
    let ask = |method: &str, path: &str, body: &str| {
        let headers = format!("Authorization: Bearer {token}\r\n");
        let stream = TcpStream::connect(address.trim_start_matches("http://")).unwrap();
        exchange(stream, method, path, &headers, body)
    };
    let runs = ask("GET", "/v1/runs?prefix=run", "").json(200);
    assert_eq!(runs["runs"], told_json(&user, &agent, &["runs", "run"])["runs"], "as the command says");
    let tree = ask("GET", "/v1/trees/run@latest", "").json(200);
    let shown = told_json(&user, &agent, &["show", "run/step-1"]);
    for field in ["manifest", "bytes", "stored_bytes", "base_bytes", "chunks"] {
        assert_eq!(tree[field], shown[field], "{field}");
    }
    let codecs = tree["codecs"].as_array().unwrap();
    let sum = |field: &str| codecs.iter().map(|codec| codec[field].as_u64().unwrap()).sum::<u64>();
    assert_eq!(
        (sum("stored_bytes"), sum("chunks")),
        (tree["stored_bytes"].as_u64().unwrap(), tree["chunks"].as_u64().unwrap())
    );
    for (method, path) in
        [("POST", "/v1/warm"), ("DELETE", "/v1/pins/any"), ("POST", "/v1/cache/evict"), ("PUT", "/v1/x")]
    {
        assert_eq!(ask(method, path, "{}").status, 403, "{method} {path}");
    }
    assert_eq!(ask("GET", "/v1/audit", "").refuses(404), "not-found");
    kill_process(Pid::from_child(&page), Signal::TERM).unwrap();
    assert_eq!(page.wait().unwrap().code(), Some(0));
    agent.stop();
}
