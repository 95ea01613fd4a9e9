//! Properties of every parser of stored bytes, for any bytes: no panic, and what is read is written again the same.
//!
//! Used by the fuzz targets, and by `tests/it/fuzz_smoke.rs`, where only stable Rust is at hand.

pub mod memory;

use std::collections::BTreeSet;

use bytes::Bytes;
use towline::audit::{SegmentText, SignedHead, verify};
use towline::checkpoint::pickle::{Pickle, Ref, Value};
use towline::checkpoint::{Layout, dcp, in_memory, sharded, torch};
use towline::chunker::tensor;
use towline::codec::{self, BundleBase, Codec, Compression, Element, Width};
use towline::format::envelope::{Kind, MAGIC, VERSION, open, open_within, seal};
use towline::format::wire::{Reader, Writer};
use towline::format::{
    InventoryHead, KeySet, Manifest, Map, PackFooter, SegmentView, SignedBytes, UsageReport, decode_base, encode_base,
};
use towline::id::{ChunkId, ManifestId};
use towline::repository::RankPart;
use towline::repository::collect::tombstones;
use towline::repository::log::{LogEntry, State};
use towline::transfer::identity::Signature;
use towline::transfer::protocol::{Kind as MessageKind, Message};

/// Bytes that a structure may take in memory, where that is told to its parser.
const ROOM: u64 = 1 << 20;
/// Bytes that any parser may take, whatever its input: messages of errors, tables.
const BASE: usize = 64 << 10;

/// Result of `parse` for `input` bytes: it takes at most `factor` times as many, and `declared` more.
fn bounded<T>((input, factor): (usize, usize), declared: u64, parse: impl FnOnce() -> T) -> T {
    let (value, peak) = memory::peak_of(parse);
    let most = input * factor + usize::try_from(declared).unwrap() + BASE;
    assert!(peak <= most, "{peak} bytes of memory for {input} bytes of input and {declared} declared: at most {most}");
    value
}

/// One parser: its name is that of its fuzz target.
pub type Parser = (&'static str, fn(&[u8]));

/// All of them.
pub const PARSERS: [Parser; 20] = [
    ("envelope", envelope),
    ("manifest", manifest),
    ("map", map),
    ("part", part),
    ("tombstone", tombstone),
    ("pack_footer", pack_footer),
    ("segment", segment),
    ("entry", entry),
    ("state", state),
    ("codec", codec_decode),
    ("wire", wire),
    ("pickle", pickle),
    ("torch", torch_file),
    ("dcp", dcp_metadata),
    ("sharded", sharded_index),
    ("message", message),
    ("audit_head", audit_head),
    ("audit_log", audit_log),
    ("inventory", inventory),
    ("usage", usage),
];

const KINDS: [Kind; 13] = [
    Kind::Repository,
    Kind::Entry,
    Kind::Snapshot,
    Kind::Boundary,
    Kind::Segment,
    Kind::Manifest,
    Kind::Map,
    Kind::Part,
    Kind::Tombstone,
    Kind::AuditHead,
    Kind::Inventory,
    Kind::KeySet,
    Kind::Usage,
];

/// The bytes as a whole object; and as what a digest is right for, since no fuzzer guesses one.
pub fn envelope(bytes: &[u8]) {
    let whole = Bytes::copy_from_slice(bytes);
    let mut signed = bytes.to_vec();
    signed.extend_from_slice(blake3::hash(bytes).as_bytes());
    let signed = Bytes::from(signed);
    for kind in KINDS {
        for object in [&whole, &signed] {
            // A body that is not compressed is a part of its object.
            let opened = bounded((object.len(), 1), ROOM, || open_within(kind, object, ROOM));
            if let Ok(body) = opened {
                for compress in [false, true] {
                    assert_eq!(open(kind, &seal(kind, &body, compress)).unwrap(), body);
                }
            }
        }
    }
}

/// A manifest that is read is read again the same from what it is written as.
pub fn manifest(body: &[u8]) {
    let Ok(read) = bounded((body.len(), 0), ROOM, || Manifest::decode_within(body, ROOM)) else { return };
    let (id, written) = read.encode();
    assert_eq!(id, ManifestId::of(&written));
    assert_eq!(Manifest::decode(&written).unwrap(), read);
    for (entry, content) in read.files() {
        assert_eq!(read.entry(&entry.path), Some(entry));
        // A file that is small enough to be gone through.
        if content.pieces.iter().map(|piece| u64::from(piece.count)).sum::<u64>() < 10_000 {
            assert!(content.placed(&read.chunks).all(|(_, range)| range.end <= content.size));
        }
    }
}

/// A map of each version has one spelling.
pub fn map(body: &[u8]) {
    for version in [1, 2] {
        let read = bounded((body.len(), 0), ROOM, || Map::decode_within(version, body, ROOM));
        let Ok(read) = read else { continue };
        assert_eq!((read.version(), read.encode().as_slice()), (version, body));
        for frame in &read.frames {
            let pack = read.pack(frame).unwrap();
            assert!(frame.offset + u64::from(frame.stored_len) <= pack.len);
        }
    }
}

/// A message of the peer protocol, its kind first, has one spelling.
pub fn message(bytes: &[u8]) {
    let Some((kind, body)) = bytes.split_first() else { return };
    let Some(kind) = MessageKind::from_byte(*kind) else { return };
    let body = Bytes::copy_from_slice(body);
    let Ok(read) = bounded((body.len(), 8), 0, || Message::read(kind, &body)) else { return };
    let (head, after) = read.write();
    assert_eq!([&head[5..], &after].concat(), body);
}

/// A head of an audit log has one spelling, and so has the signature in it; the bytes are tried as either.
pub fn audit_head(body: &[u8]) {
    if let Ok(read) = bounded((body.len(), 2), 0, || SignedHead::decode(body)) {
        assert_eq!(read.encode(), body);
        let _ = Signature::decode(&read.signature);
    }
    if let Ok(read) = bounded((body.len(), 2), 0, || Signature::decode(body)) {
        assert_eq!(read.encode().unwrap(), body);
    }
}

/// A head of an inventory and a set of one have one spelling; the bytes are tried as either, and as a signed head.
pub fn inventory(body: &[u8]) {
    if let Ok(read) = bounded((body.len(), 1), 0, || SignedBytes::decode(body)) {
        assert_eq!(SignedBytes::decode(&read.encode()).unwrap(), read);
    }
    if let Ok(read) = bounded((body.len(), 0), ROOM, || InventoryHead::decode(body, ROOM)) {
        assert_eq!(read.encode(), body);
        let empty = KeySet::default();
        let _ = bounded((body.len(), 64), 0, || empty.patched(&read.held.patch));
    }
    let digest = *blake3::hash(body).as_bytes();
    if let Ok(read) = bounded((body.len(), 0), ROOM, || decode_base(body, &digest, ROOM)) {
        assert_eq!(encode_base(&read), body);
        let mut found = 0;
        read.find_all(&[0, 1 << 40, u64::MAX / 2, u64::MAX], |_| found += 1);
        assert!(found <= read.len().min(4));
    }
}

/// A report of usage has one spelling; the bytes are tried as one, and as a signed one.
pub fn usage(body: &[u8]) {
    if let Ok(read) = bounded((body.len(), 1), 0, || SignedBytes::decode(body)) {
        assert_eq!(SignedBytes::decode(&read.encode()).unwrap(), read);
    }
    if let Ok(read) = bounded((body.len(), 2), ROOM, || UsageReport::decode(body, ROOM)) {
        assert_eq!(read.encode(), body);
    }
}

/// Any bytes are a segment of an audit log, sound up to somewhere.
pub fn audit_log(bytes: &[u8]) {
    let segment = || SegmentText { name: String::new(), first: 1, bytes: bytes.to_vec() };
    let findings = verify([Ok(segment())], &[], 1).unwrap();
    // A line has at least its hash.
    assert!(findings.last <= bytes.len() as u64 / 75);
}

/// A rank's part has one spelling.
pub fn part(body: &[u8]) {
    let Ok(read) = bounded((body.len(), 8), 0, || RankPart::decode(body)) else { return };
    assert_eq!(read.encode(), body);
}

/// A list of unneeded objects has one spelling.
pub fn tombstone(body: &[u8]) {
    let Ok(read) = bounded((body.len(), 0), ROOM, || tombstones::decode_within(body, ROOM)) else { return };
    assert_eq!(tombstones::encode(&read), body);
}

/// The bytes as the end of a pack; and as a footer whose length and digest are right.
pub fn pack_footer(bytes: &[u8]) {
    let mut tail = bytes.to_vec();
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    tail.extend_from_slice(&len.to_le_bytes());
    tail.extend_from_slice(&[0; 4]);
    tail.extend_from_slice(blake3::hash(&tail).as_bytes());
    tail.extend_from_slice(&MAGIC);
    tail.extend_from_slice(&[b'k', VERSION, 0, 0]);
    for tail in [bytes, &tail] {
        let pack_len = tail.len() as u64 + (1 << 20);
        let _ = PackFooter::len_from_trailer(tail);
        let read = bounded((tail.len(), 4), 0, || PackFooter::decode(tail, pack_len));
        let Ok(footer) = read else { continue };
        let mut end = 16;
        for entry in &footer.entries {
            assert!(entry.offset >= end);
            end = entry.offset + u64::from(entry.stored_len);
        }
        assert!(end <= 1 << 20);
    }
}

/// The bytes as a segment, and as a segment's body: finding gives only what was asked for.
pub fn segment(bytes: &[u8]) {
    let sealed = seal(Kind::Segment, bytes, false);
    for object in [bytes, &sealed] {
        let read = bounded((0, 0), 0, || SegmentView::parse(object));
        let Ok(view) = read else { continue };
        let ids = object.windows(32).step_by(7).filter_map(|id| <[u8; 32]>::try_from(id).ok().map(ChunkId::from_bytes));
        let listed = view.rows(object).take(100).map(|row| {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&row.prefix.to_be_bytes());
            ChunkId::from_bytes(id)
        });
        for id in ids.take(1000).chain(listed) {
            assert!(view.find(object, &id).all(|row| row.prefix == id.prefix()));
        }
        assert_eq!(view.rows(object).count(), view.chunks());
        assert!(view.packs(object).count() <= view.pack_count() as usize);
    }
}

/// A log entry has one spelling.
pub fn entry(body: &[u8]) {
    let Ok(read) = bounded((body.len(), 0), ROOM, || LogEntry::decode_within(body, ROOM)) else { return };
    assert_eq!(read.encode(), body);
    let mut state = State::default();
    let refused = state.check(&read).is_err();
    assert_eq!(state.apply(&read).is_err(), refused);
    assert_eq!(State::decode(state.snapshot_version(), &state.encode()).unwrap(), state);
}

/// A state that is read is read again the same from what it is written as.
pub fn state(body: &[u8]) {
    for version in [1, 2] {
        let decode = || State::decode_within(version, body, ROOM);
        let Ok(read) = bounded((body.len(), 0), ROOM, decode) else { continue };
        assert_eq!(State::decode(read.snapshot_version(), &read.encode()).unwrap(), read);
    }
}

/// The bytes as a stored frame, and as plain bytes to be stored, alone and with another chunk as base.
pub fn codec_decode(bytes: &[u8]) {
    let bytes = Bytes::copy_from_slice(bytes);
    let (head, frame) = bytes.split_at(bytes.len().min(4));
    let len = head.iter().fold(0, |len, &byte| len << 8 | u32::from(byte)) % (20 << 20);
    let base: Vec<u8> = head.iter().cycle().take(if head.is_empty() { 0 } else { 2 * len as usize }).copied().collect();
    for codec in (0..=Codec::Bundle(1).byte()).filter_map(|byte| Codec::from_byte(byte).ok()) {
        let bases = [None, Some(&base[..base.len() / 2]), Some(&base)];
        for base in bases.into_iter().take(if codec.has_base() { 3 } else { 1 }) {
            let frame = bytes.slice_ref(frame);
            let decoded = bounded((frame.len(), 8), 4 * u64::from(len), || codec::decode(codec, &frame, base, len));
            if let Ok(plain) = decoded {
                assert_eq!(plain.len(), len as usize);
            }
        }
    }
    let widths = [Width::W1, Width::W2, Width::W4, Width::W8].into_iter();
    let numbers = widths.flat_map(|width| [Element::Float(width), Element::Integer(width)]).map(Some);
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let mut near: Vec<u8> = bytes.to_vec();
    near.iter_mut().step_by(5).for_each(|byte| *byte = byte.wrapping_add(1));
    for number in numbers.chain([None]) {
        let stored = codec::encode(&bytes, Compression::Auto, number);
        assert!(stored.bytes.len() <= bytes.len());
        assert_eq!(codec::decode(stored.codec, &stored.bytes, None, len).unwrap(), bytes);
        let against = number.and_then(|number| codec::encode_difference(&bytes, ChunkId::of(&near), &near, number));
        if let Some(stored) = against {
            assert!(stored.bytes.len() <= bytes.len());
            assert_eq!(codec::decode(stored.codec, &stored.bytes, Some(&near), len).unwrap(), bytes);
        }
    }
    for (count, base) in [(2, None), (2, Some(&near)), (3, Some(&near))] {
        let len = bytes.len() / (4 * count) * (4 * count);
        let (plain, base) = (bytes.slice(..len), base.map(|base| &base[..len]));
        if let Some(stored) = codec::encode_bundle(
            &plain,
            count,
            base.map(|plain| BundleBase { id: ChunkId::of(plain), steps: 0, plain }),
        ) {
            assert!(stored.bytes.len() <= len);
            let decoded = codec::decode(stored.codec, &stored.bytes, base, u32::try_from(len).unwrap_or(u32::MAX));
            assert_eq!(decoded.unwrap(), plain);
        }
    }
}

/// Every kind of field, in an order that the bytes themselves choose; integers have one spelling.
pub fn wire(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    while let Ok(what) = reader.u8() {
        let before = reader.remaining();
        let start = bytes.len() - before;
        let mut writer = Writer::new();
        let read = match what % 8 {
            0 => reader.varint().map(|value| writer.varint(value).len()),
            1 => reader.signed().map(|value| writer.signed(value).len()),
            2 => reader.varint32().map(|value| writer.varint(value.into()).len()),
            3 => reader.string(1 << 16).map(|value| writer.string(value).len()),
            4 => reader.text(1 << 16).map(|value| writer.string(value.as_bytes()).len()),
            5 => reader.u64().map(|value| writer.u64(value).len()),
            6 => reader.flag().map(|value| writer.u8(value.into()).len()),
            _ => reader.count(2).map(|count| writer.count(count).len()),
        };
        if read.is_ok() {
            let taken = before - reader.remaining();
            assert_eq!(writer.into_bytes(), bytes[start..start + taken]);
        }
    }
    assert!(reader.finish().is_ok());
}

/// A pickle: every value that can be reached can be looked at, and none is seen more often than there are values.
pub fn pickle(bytes: &[u8]) {
    let Ok(read) = bounded((bytes.len(), 256), 0, || Pickle::parse(bytes, &mut |_| true)) else { return };
    let mut seen = vec![false; read.nodes()];
    let mut left = vec![read.root()];
    while let Some(value) = left.pop() {
        let Some(node) = value.node() else { continue };
        if std::mem::replace(&mut seen[node as usize], true) {
            continue;
        }
        match read.value(value) {
            Value::Sequence(members) | Value::Dict(members) => {
                left.extend(members.iter().filter(|one| **one != Ref::INERT));
            }
            Value::Object(object) => left.extend([object.class, object.args, object.state, object.items]),
            Value::Persistent(of) => left.push(of),
            Value::Text(_) | Value::Global { .. } | Value::Int(_) | Value::Inert => {}
        }
    }
}

/// The bytes as a torch file: a layout only if it lies in the file and cutting by it covers the file.
pub fn torch_file(bytes: &[u8]) {
    let len = bytes.len() as u64;
    let mut left = ROOM;
    let mut reserve = |bytes: u64| {
        let fits = bytes <= left;
        left = left.saturating_sub(bytes);
        fits
    };
    // Lists grow by doubling.
    let parsed = bounded((bytes.len(), 256), 3 * ROOM, || torch::parse(&mut in_memory(bytes), len, &mut reserve));
    if let Ok(layout) = parsed {
        sound(&layout, len);
    }
}

/// The bytes as the index of a sharded checkpoint: each tensor is in one file.
pub fn sharded_index(bytes: &[u8]) {
    let Ok(index) = bounded((bytes.len(), 256), 0, || sharded::parse(bytes)) else { return };
    let tensors: Vec<&String> = index.files.values().flatten().collect();
    assert_eq!(tensors.len(), tensors.iter().collect::<BTreeSet<_>>().len());
}

/// The bytes as the metadata of a distributed checkpoint whose parts are files of zeros.
pub fn dcp_metadata(bytes: &[u8]) {
    let Ok(read) = bounded((bytes.len(), 256), 0, || dcp::parse(bytes, &mut |_| true)) else { return };
    for file in read.files() {
        if let Ok(layout) = read.layout(file, &mut in_memory(&[0; 4096]), 4096, &mut |_| true) {
            sound(&layout, 4096);
        }
    }
}

fn sound(layout: &Layout, len: u64) {
    assert!(layout.tensors.iter().all(|tensor| tensor.start <= tensor.end && tensor.end <= len));
    let spans = layout.spans();
    let mut end = 0;
    for span in &spans {
        assert!(end <= span.start && span.start < span.end && span.end <= len);
        end = span.end;
    }
    let mut at = 0;
    for cut in tensor::cuts(&spans, len) {
        assert!(at < cut && cut - at <= tensor::PIECE_LEN_MAX);
        at = cut;
    }
    assert_eq!(at, len);
}
