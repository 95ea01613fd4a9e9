//! The signed policy, as the agent keeps it where it serves files over HTTP.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::Duration;

use super::Running;
use super::routing::fails;
use crate::data::noise;
use crate::policy::PolicyFixture;

/// Y3: "A change of policy or labels stops what is not sent yet within two seconds: to other agents, to readers of files over HTTP".
#[test]
fn a_policy_that_changes_during_a_download_breaks_it_off() {
    const LEN: usize = 40 << 20;
    let mut lab = PolicyFixture::at("home");
    lab.user.write("large/file", &noise(5, LEN));
    lab.user.ok(&["save", "large", "open/large"]);
    let agent = Running::start(&lab.user, "");
    let begin = || {
        let mut stream = UnixStream::connect(&agent.socket).unwrap();
        write!(stream, "GET /v1/files/open%2Flarge/file HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        (stream, String::from_utf8_lossy(&status).into_owned())
    };
    let rest = |mut stream: UnixStream| {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        rest.len()
    };
    let (whole, status) = begin();
    assert!(status.ends_with("200") && rest(whole) >= LEN);

    let (stream, _) = begin();
    lab.rules = "[[rule]]\nverdict = 'deny'\nnames = 'open/**'\nwhy = 'closed now'\n".to_owned();
    lab.set(&["--lock-out"]);
    sleep(Duration::from_secs(1));
    // Sent before the change: one piece, another in the channel, and the buffers of the socket.
    let came = rest(stream);
    assert!(came < 4 << 20, "{came}");
    assert!(begin().1.ends_with("403"));
    agent.stop();
}

/// A warm of a name that the policy keeps from this site is refused, whether the command waits for it or not.
#[test]
fn a_warm_that_nobody_waits_for_is_refused_by_the_policy_as_well() {
    let mut lab = PolicyFixture::at("home");
    lab.user.write("data/file", b"for elsewhere");
    lab.user.ok(&["save", "data", "raw/set"]);
    let deny = "[[rule]]\nverdict = 'deny'\nnames = 'raw/**'\nwhy = 'not here'\n";
    lab.rules = format!("{deny}\n[[rule]]\nverdict = 'allow'\nwhy = 'the rest'\n");
    lab.set(&[]);
    let agent = Running::start(&lab.user, "");
    for more in [&[][..], &["--wait"]] {
        let error = fails(&lab.user, &agent, &[&["warm", "raw/set"], more].concat(), 7);
        assert_eq!(error["kind"], "denied", "{error}");
    }
    assert_eq!(agent.get("/v1/tasks"), serde_json::json!({ "tasks": [] }), "none was begun");
    agent.stop();
}
