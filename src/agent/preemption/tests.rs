//! Each cloud's notices, from a service that answers as theirs does.

use std::collections::BTreeMap;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::metadata::Metadata;
use super::{Notice, Provider};
use crate::error::ErrorKind;

/// Answer to a request that contains `must`.
struct Answer {
    must: &'static str,
    text: &'static str,
}

/// A service that knows `answers` by method and path; others are not found.
async fn service(answers: BTreeMap<&'static str, Answer>) -> Metadata {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                request.push(stream.read_u8().await.unwrap());
            }
            let request = String::from_utf8(request).unwrap();
            let line = request.lines().next().unwrap().trim_end_matches(" HTTP/1.1");
            let (status, text) = match answers.get(line) {
                Some(answer) if request.contains(answer.must) => ("200 OK", answer.text),
                Some(_) => ("401 Unauthorized", ""),
                None => ("404 Not Found", ""),
            };
            let answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}", text.len());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    Metadata(address)
}

async fn asked(
    provider: Provider,
    answers: &[(&'static str, &'static str, &'static str)],
) -> crate::Result<Option<Notice>> {
    let answers = answers.iter().map(|&(line, must, text)| (line, Answer { must, text })).collect();
    provider.ask(&service(answers).await).await
}

#[tokio::test]
async fn aws_says_what_and_when() {
    let token = ("PUT /latest/api/token", "x-aws-ec2-metadata-token-ttl-seconds: ", "secret");
    assert_eq!(asked(Provider::Aws, &[token]).await.unwrap(), None);
    let action = (
        "GET /latest/meta-data/spot/instance-action",
        "x-aws-ec2-metadata-token: secret",
        "{\"action\": \"terminate\", \"time\": \"2017-09-18T08:22:00Z\"}",
    );
    let notice = asked(Provider::Aws, &[token, action]).await.unwrap().unwrap();
    assert_eq!(notice.what, "aws: terminate at 2017-09-18T08:22:00Z");
    assert_eq!(notice.at.unwrap().to_string(), "2017-09-18T08:22:00Z");
    assert!(asked(Provider::Aws, &[]).await.is_err());
}

#[tokio::test]
async fn gcp_says_that() {
    let line = "GET /computeMetadata/v1/instance/preempted";
    let flavor = "metadata-flavor: Google";
    assert_eq!(asked(Provider::Gcp, &[(line, flavor, "FALSE")]).await.unwrap(), None);
    let notice = asked(Provider::Gcp, &[(line, flavor, "TRUE\n")]).await.unwrap().unwrap();
    assert_eq!(notice, Notice { what: "gcp: preempted".into(), at: None });
    assert_eq!(asked(Provider::Gcp, &[]).await.unwrap_err().kind(), ErrorKind::Unreachable);
}

#[tokio::test]
async fn azure_says_who_is_meant() {
    let events = "GET /metadata/scheduledevents?api-version=2020-07-01";
    let name = "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text";
    let header = "metadata: true";
    let preempt = "{\"DocumentIncarnation\":1,\"Events\":[{\"EventId\":\"A\",\"EventStatus\":\"Scheduled\",\
        \"EventType\":\"Preempt\",\"ResourceType\":\"VirtualMachine\",\"Resources\":[\"vm-1\"],\
        \"NotBefore\":\"Mon, 19 Sep 2016 18:29:47 GMT\"}]}";
    assert_eq!(asked(Provider::Azure, &[(events, header, "{\"Events\":[]}")]).await.unwrap(), None);
    assert_eq!(asked(Provider::Azure, &[(events, header, preempt), (name, header, "vm-2")]).await.unwrap(), None);
    let notice = asked(Provider::Azure, &[(events, header, preempt), (name, header, "vm-1")]).await.unwrap().unwrap();
    assert_eq!(notice.at.unwrap().to_string(), "2016-09-19T18:29:47Z");
    assert!(notice.what.starts_with("azure: Preempt"));
    let freeze = "{\"Events\":[{\"EventType\":\"Freeze\",\"Resources\":[\"vm-1\"]}]}";
    assert_eq!(asked(Provider::Azure, &[(events, header, freeze)]).await.unwrap(), None);
    assert!(asked(Provider::Azure, &[(events, header, "<html>")]).await.is_err());
}
