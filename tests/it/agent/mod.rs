//! The agent as a process, and how tests talk to it.

mod api;
mod audit;
mod cluster;
mod commitments;
mod denied;
mod gates;
mod handoff;
mod hints;
mod killed;
mod kube;
mod kueue;
mod life;
mod look;
mod memory;
mod page;
mod policy;
mod recorded;
mod routing;
mod sidecar;
mod slurm;
mod staged;
mod strangers;
mod together;
mod token_rights;
mod tokens;
mod trust;
mod usage;
mod warm;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::cli::{User, has_members};
use crate::data::noise;

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_mins(2);

/// An agent that runs.
struct Running {
    child: Child,
    socket: PathBuf,
    /// Where it listens on loopback.
    http: Option<String>,
    /// Where other agents reach it.
    listen: Option<String>,
}

/// An answer over HTTP.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Running {
    /// With a cache, and what `more` says, for the repository of `user`.
    fn start(user: &User, more: &str) -> Self {
        configure(user, more);
        Self::from_file(user, "agent.toml")
    }

    /// With the settings in a file of the working folder.
    fn from_file(user: &User, config: &str) -> Self {
        Self::from_command(&mut user.command(&["agent", "--json", "--config", config]))
    }

    /// By a command that has `--json`.
    fn from_command(command: &mut Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut error = String::new();
            child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
            panic!("the agent did not start: {error}");
        }
        let line: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(line["event"], "listening");
        let told = |name: &str| line[name].as_str().map(str::to_owned);
        Self { child, socket: told("socket").unwrap().into(), http: told("http"), listen: told("listen") }
    }

    fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        exchange(UnixStream::connect(&self.socket).unwrap(), method, path, headers, body)
    }

    /// As before, of an agent that may be killed meanwhile: none if it does not answer to the end.
    fn try_ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Option<Answer> {
        attempt(UnixStream::connect(&self.socket).ok()?, method, path, headers, body)
    }

    fn get(&self, path: &str) -> Value {
        self.ask("GET", path, "", "").json(200)
    }

    fn post(&self, path: &str, body: &Value, status: u16) -> Value {
        self.ask("POST", path, "", &body.to_string()).json(status)
    }

    /// Begins work and waits for its end.
    fn done(&self, path: &str, body: &Value) -> Value {
        let begun = self.post(path, body, 202);
        let events = self.events(&begun);
        let (name, last) = events.last().unwrap();
        assert_eq!((name.as_str(), last["state"].as_str()), ("end", Some("done")), "{last}");
        last.clone()
    }

    /// All events of a transfer, to its end.
    fn events(&self, begun: &Value) -> Vec<(String, Value)> {
        let path = format!("/v1/tasks/{}/events", begun["id"].as_str().unwrap());
        let answer = self.ask("GET", &path, "", "");
        assert_eq!(answer.headers["content-type"], "text/event-stream");
        let text = String::from_utf8(answer.body).unwrap();
        let event = |text: &str| {
            let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
            Some((field("event: ")?.to_owned(), serde_json::from_str(field("data: ")?).unwrap()))
        };
        text.split("\n\n").filter_map(event).collect()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end: the exit code, and what it said last.
    fn ended(mut self) -> (Option<i32>, String) {
        let until = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "the agent does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut error = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        (self.child.wait().unwrap().code(), error)
    }

    /// Asks it to end, as a supervisor does.
    fn stop(self) {
        self.signal(Signal::TERM);
        assert_eq!(self.ended(), (Some(0), String::new()));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Answer {
    fn json(&self, status: u16) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, status, "{text}");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Its content, whatever its status.
    fn json_of_any(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The kind of error that it tells.
    fn refuses(&self, status: u16) -> String {
        let error = &self.json(status)["error"];
        has_members(error, "kind message place help causes");
        error["kind"].as_str().unwrap().to_owned()
    }
}

/// One request, and the answer to it.
fn exchange(stream: impl Read + Write, method: &str, path: &str, headers: &str, body: &str) -> Answer {
    attempt(stream, method, path, headers, body).expect("the answer is cut off")
}

/// One request, and the answer to it, unless that is cut off.
fn attempt(mut stream: impl Read + Write, method: &str, path: &str, headers: &str, body: &str) -> Option<Answer> {
    let host = if headers.contains("Host: ") { "" } else { "Host: localhost\r\n" };
    let len = body.len();
    let request =
        format!("{method} {path} HTTP/1.1\r\n{host}{headers}Connection: close\r\nContent-Length: {len}\r\n\r\n{body}");
    // A request that is refused for its length need not be read to its end.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let head = answer.windows(4).position(|four| four == b"\r\n\r\n")?;
    let (top, body) = (String::from_utf8(answer[..head].to_vec()).unwrap(), answer.split_off(head + 4));
    let mut lines = top.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.into()))
        .collect();
    let chunked = headers.get("transfer-encoding").is_some_and(|how| how == "chunked");
    let body = if chunked { unchunked(&body)? } else { body };
    let whole = headers.get("content-length").is_none_or(|len| len.parse() == Ok(body.len()));
    (whole || method == "HEAD").then_some(Answer { status, headers, body })
}

/// None if it is cut off (<https://www.rfc-editor.org/rfc/rfc9112#section-7.1>).
fn unchunked(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let end = body.windows(2).position(|two| two == b"\r\n")?;
        let len = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        if len == 0 {
            return Some(whole);
        }
        whole.extend(body.get(end + 2..end + 2 + len)?);
        body = body.get(end + 2 + len + 2..)?;
    }
}

/// Writes the settings of an agent for the repository of `user`.
fn configure(user: &User, more: &str) {
    let text = format!(
        "repository = '../repo'\nsocket = 'run/agent.sock'\nmemory = '256M'\n{more}\n\
         [cache]\ndir = 'cache'\ncapacity = '256M'\nfree_floor = '0'\n"
    );
    user.write("agent.toml", text.as_bytes());
}

/// What a command prints that uses the agent.
fn told(user: &User, agent: &Running, args: &[&str]) -> String {
    let output = user.command(args).env("TOWLINE_AGENT", &agent.socket).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// As before, as JSON.
fn told_json(user: &User, agent: &Running, args: &[&str]) -> Value {
    serde_json::from_str(&told(user, agent, &[args, &["--json"]].concat())).unwrap()
}

fn with_tree() -> User {
    let user = User::with_repository();
    user.write("tree/a.txt", b"hello, world");
    user.write("tree/sub/b.bin", &noise(1, 20 << 20));
    user
}
