//! Comparison of every number in the tables of docs/protocol.md with the code.

use std::collections::BTreeMap;

use super::super::limits::{
    ANSWER_PING_AFTER, ANSWER_SILENCE_MAX, BASES_MAX, CHUNKS_MAX, CONTROL_LEN_MAX, EXTENSION_LEN_MAX, EXTENSIONS_MAX,
    FETCHING_AFTER, FETCHING_MAX, FRAME_HEAD_MAX, FRAME_LEN_MAX, GREETING_MAX, HEADER_LEN, IGNORABLE_FROM, LANES_MAX,
    NAME_LEN_MAX, PING_AFTER, PROGRESS_MIN, READ_AHEAD_MAX, READS_MAX, REQUESTS_MAX, RUNS_MAX, SILENCE_MAX, STALL_MAX,
    TEXT_LEN_MAX, VERSIONS, VERSIONS_MAX, WINDOW_MAX, WINDOW_MIN,
};
use super::super::{EndCode, ErrorCode, Frame, Hello, Kind, Message, Priority, Request, Runs, Wanted};
use super::bytes_of;
use crate::codec::{Codec, STEPS_MAX};
use crate::id::{ChunkId, ManifestId};

const DOCUMENT: &str = include_str!("../../../../docs/protocol.md");

/// Rows of the table under the heading `heading`: their first two cells.
fn table(heading: &str) -> BTreeMap<String, String> {
    let section = DOCUMENT.split("\n## ").find(|section| section.starts_with(heading)).expect("the section is there");
    let rows = section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| ---"));
    let cells = rows.map(|row| row.split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect::<Vec<_>>());
    cells.map(|cells| (cells[1].clone(), cells[2].clone())).collect()
}

fn assert_table(heading: &str, expected: &[(String, String)]) {
    let mut found = table(heading);
    for (name, value) in expected {
        assert_eq!(found.remove(name).as_ref(), Some(value), "{name} in \"{heading}\"");
    }
    // The rest is the header of the table.
    assert_eq!(found.len(), 1, "rows that nothing in the code stands for: {found:?}");
}

#[test]
fn every_limit_is_the_documents() {
    let seconds = |time: std::time::Duration| (time.as_secs(), " s");
    let limits: [(&str, (u64, &str)); 30] = [
        ("HEADER_LEN", (HEADER_LEN as u64, " bytes")),
        ("VERSIONS_MAX", (VERSIONS_MAX as u64, "")),
        ("IGNORABLE_FROM", (IGNORABLE_FROM.into(), "")),
        ("CONTROL_LEN_MAX", (CONTROL_LEN_MAX, " bytes")),
        ("FRAME_HEAD_MAX", (FRAME_HEAD_MAX, " bytes")),
        ("FRAME_LEN_MAX", (FRAME_LEN_MAX, " bytes")),
        ("CHUNK_LEN_MAX", (crate::limits::CHUNK_LEN_MAX, " bytes")),
        ("TEXT_LEN_MAX", (TEXT_LEN_MAX as u64, " bytes")),
        ("NAME_LEN_MAX", (NAME_LEN_MAX as u64, " bytes")),
        ("EXTENSIONS_MAX", (EXTENSIONS_MAX as u64, "")),
        ("EXTENSION_LEN_MAX", (EXTENSION_LEN_MAX as u64, " bytes")),
        ("RUNS_MAX", (RUNS_MAX as u64, "")),
        ("CHUNKS_MAX", (CHUNKS_MAX, "")),
        ("BASES_MAX", (BASES_MAX as u64, "")),
        ("REQUESTS_MAX", (REQUESTS_MAX.into(), "")),
        ("LANES_MAX", (LANES_MAX.into(), "")),
        ("WINDOW_MIN", (WINDOW_MIN, " bytes")),
        ("WINDOW_MAX", (WINDOW_MAX, " bytes")),
        ("AHEAD_MAX", (READ_AHEAD_MAX, " bytes")),
        ("READS_MAX", (READS_MAX as u64, "")),
        ("GREETING_MAX", seconds(GREETING_MAX)),
        ("PING_AFTER", seconds(PING_AFTER)),
        ("SILENCE_MAX", seconds(SILENCE_MAX)),
        ("ANSWER_PING_AFTER", seconds(ANSWER_PING_AFTER)),
        ("ANSWER_SILENCE_MAX", seconds(ANSWER_SILENCE_MAX)),
        ("STALL_MAX", seconds(STALL_MAX)),
        ("FETCHING_AFTER", seconds(FETCHING_AFTER)),
        ("FETCHING_MAX", seconds(FETCHING_MAX)),
        ("PROGRESS_MIN", (PROGRESS_MIN, " bytes")),
        ("version", (VERSIONS[0].into(), "")),
    ];
    let shown = limits.map(|(name, (value, unit))| (name.to_owned(), format!("{value}{unit}")));
    assert_table("Limits", &shown);
}

#[test]
fn every_number_of_a_kind_or_code_is_the_documents() {
    let kinds = Kind::ALL.map(|kind| ((kind as u8).to_string(), kind.word().to_owned()));
    assert_table("Messages", &kinds);
    let codes: Vec<_> = EndCode::ALL.iter().map(|code| ((*code as u8).to_string(), code.word().to_owned())).collect();
    assert_table("How a request ends", &codes);
    let codes: Vec<_> = ErrorCode::ALL.iter().map(|code| ((*code as u8).to_string(), code.word().to_owned())).collect();
    assert_table("How a connection ends", &codes);
    let priorities = Priority::ALL.map(|priority| ((priority as u8).to_string(), priority.word().to_owned()));
    assert_table("Priorities", &priorities);
    let codecs = (0..=Codec::Bundle(STEPS_MAX).byte())
        .map(|byte| (byte.to_string(), Codec::from_byte(byte).unwrap().word().to_owned()));
    assert_table("Codecs", &codecs.collect::<Vec<_>>());
}

/// Bytes of the block after `title` in the section of examples.
fn example(title: &str) -> Vec<u8> {
    let after = DOCUMENT.split(&format!("{title}:\n\n```text\n")).nth(1).expect("the example is there");
    let block = after.split("```").next().unwrap();
    let hex = block.lines().map(|line| line.split("  ").next().unwrap()).collect::<String>();
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

#[test]
fn every_example_is_what_is_sent() {
    let hello = Hello {
        versions: vec![1],
        software: "0.1.0".into(),
        site: "west".into(),
        agent: "node-7".into(),
        window: 8 << 20,
        requests: 64,
        extensions: Vec::new(),
    };
    let mut chunks = Runs::of(0..3);
    chunks.push(5..6);
    let wanted = Wanted { chunks, bases: vec![ChunkId::from_bytes([0xbb; 32])], ..Wanted::default() };
    let manifest = ManifestId::from_bytes([0xaa; 32]);
    let request = Request { request: 1, priority: Priority::Warm, manifest, wanted };
    let frame = Frame {
        request: 1,
        ordinal: 3,
        codec: Codec::Difference.byte(),
        plain_len: 300,
        base: Some(ChunkId::from_bytes([0xbb; 32])),
        stored: bytes::Bytes::from_static(b"ab"),
    };
    for (title, message) in [
        ("A hello", Message::Hello(hello)),
        ("A request", Message::Request(request)),
        ("A frame", Message::Frame(frame)),
        ("A credit", Message::Credit { granted: 1_000_000 }),
    ] {
        assert_eq!(example(title), bytes_of(&message), "{title}");
    }
}
