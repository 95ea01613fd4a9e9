//! Tests of the protocol: changed messages, both sides against malicious peers, and whole transfers over a network in virtual
//! time.

mod malicious_peers;
mod messages;
mod network;
mod numbers;
mod transfers;
mod world;

use std::time::Duration;

use super::limits::{HEADER_LEN, REQUESTS_MAX, VERSIONS};
use super::{Hello, Kind, Message};
use crate::format::wire::Reader;
use crate::identity::Identity;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn asker() -> Identity {
    Identity::new("west", "asker").unwrap()
}

fn server() -> Identity {
    Identity::new("east", "server").unwrap()
}

/// First message of `who`.
fn hello(who: &Identity, window: u64) -> Hello {
    Hello {
        versions: VERSIONS.to_vec(),
        software: "0.1.0".into(),
        site: who.site().into(),
        agent: who.agent().into(),
        window,
        requests: REQUESTS_MAX,
        extensions: Vec::new(),
    }
}

/// All bytes of a message.
fn bytes_of(message: &Message) -> Vec<u8> {
    let (head, body) = message.write();
    [head, body].concat()
}

/// Messages of a transcript, each with its encoded bytes.
fn split(mut bytes: &[u8]) -> Vec<Message> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let mut reader = Reader::new(bytes);
        let (len, kind) = (reader.u32().unwrap() as usize, reader.u8().unwrap());
        let body = bytes[HEADER_LEN..HEADER_LEN + len].to_vec();
        found.push(Message::read(Kind::from_byte(kind).unwrap(), &body.into()).unwrap());
        bytes = &bytes[HEADER_LEN + len..];
    }
    found
}
