//! Each message survives encoding, and each changed one is at most refused.

use bytes::Bytes;
use proptest::prelude::*;

use super::super::limits::{BASES_MAX, CHUNKS_MAX, CONTROL_LEN_MAX, FRAME_HEAD_MAX, HEADER_LEN, RUNS_MAX};
use super::super::{
    EndCode, Ended, ErrorCode, Find, Found, Frame, Hello, Kind, Message, Missing, Priority, Request, Runs, Survey,
    Wanted,
};
use super::{bytes_of, hello, server};
use crate::id::{ChunkId, ManifestId};

fn some_runs() -> impl Strategy<Value = Runs> {
    proptest::collection::vec((0u32..1000, 1u32..1000), 1..40).prop_map(|pairs| {
        let mut runs = Runs::default();
        let mut at = 0;
        for (gap, len) in pairs {
            runs.push(at + gap..at + gap + len);
            at += gap + len + 1;
        }
        runs
    })
}

fn some_id() -> impl Strategy<Value = [u8; 32]> {
    any::<[u8; 32]>()
}

fn some_text() -> impl Strategy<Value = String> {
    "[ -~]{0,60}"
}

fn some_hello() -> impl Strategy<Value = Hello> {
    let extensions = proptest::collection::vec((any::<u64>(), proptest::collection::vec(any::<u8>(), 0..40)), 0..4);
    let versions = proptest::collection::btree_set(any::<u8>(), 1..8);
    (versions, some_text(), 0u64..1 << 40, any::<u32>(), extensions).prop_map(
        |(versions, software, window, requests, extensions)| {
            let versions = versions.into_iter().collect();
            Hello { versions, software, window, requests, extensions, ..hello(&server(), 0) }
        },
    )
}

fn some_request() -> impl Strategy<Value = Request> {
    let bases = proptest::collection::vec(some_id().prop_map(ChunkId::from_bytes), 0..5);
    let parts = (any::<u64>(), 0usize..3, some_id(), some_runs(), bases, any::<[u32; 3]>());
    parts.prop_map(|(request, priority, manifest, chunks, bases, alone)| {
        let mut wanted = Wanted { chunks, bases, ..Wanted::default() };
        let mut alone = alone.map(|at| at % u32::try_from(wanted.len()).unwrap());
        alone.sort_unstable();
        // None in a third of all requests.
        wanted.alone = alone.into_iter().skip(priority * 2).collect();
        Request { request, priority: Priority::ALL[priority], manifest: ManifestId::from_bytes(manifest), wanted }
    })
}

fn some_frame() -> impl Strategy<Value = Frame> {
    let stored = proptest::collection::vec(any::<u8>(), 0..300);
    let base = proptest::option::of(some_id().prop_map(ChunkId::from_bytes));
    (any::<u64>(), any::<u32>(), any::<u8>(), 300u32..16 << 20, base, stored).prop_map(
        |(request, ordinal, codec, plain_len, base, stored)| Frame {
            request,
            ordinal,
            codec,
            plain_len,
            base,
            stored: stored.into(),
        },
    )
}

/// Any message that a side may send.
fn some_message() -> impl Strategy<Value = Message> {
    prop_oneof![
        some_hello().prop_map(Message::Hello),
        some_request().prop_map(Message::Request),
        (any::<u64>(), some_id(), any::<u32>()).prop_map(|(request, id, from)| Message::Find(Find {
            request,
            manifest: ManifestId::from_bytes(id),
            from
        })),
        (any::<u64>(), some_runs()).prop_map(|(request, held)| {
            let end = held.ranges().last().unwrap().end;
            Message::Found(Found { request, survey: Survey { chunks: end + 7, upto: end + 3, held } })
        }),
        some_frame().prop_map(Message::Frame),
        (any::<u64>(), some_runs()).prop_map(|(request, ordinals)| Message::Missing(Missing { request, ordinals })),
        (any::<u64>(), 0..EndCode::ALL.len(), some_text()).prop_map(|(request, at, text)| Message::Ended(Ended {
            request,
            code: EndCode::ALL[at],
            text
        })),
        any::<u64>().prop_map(|request| Message::Cancel { request }),
        any::<u64>().prop_map(|granted| Message::Credit { granted }),
        any::<u64>().prop_map(|nonce| Message::Ping { nonce }),
        any::<u64>().prop_map(|nonce| Message::Pong { nonce }),
        some_text().prop_map(|text| Message::Goodbye { text }),
        Just(Message::Fetching),
        (0..ErrorCode::ALL.len(), some_text()).prop_map(|(at, text)| Message::Error { code: ErrorCode::ALL[at], text }),
    ]
}

fn read(message: &[u8]) -> Result<Message, crate::format::wire::Malformed> {
    Message::read(Kind::from_byte(message[4]).unwrap(), &Bytes::copy_from_slice(&message[HEADER_LEN..]))
}

proptest! {
    #[test]
    fn every_message_survives_and_announces_its_length(message in some_message()) {
        let bytes = bytes_of(&message);
        prop_assert_eq!(u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize, bytes.len() - HEADER_LEN);
        prop_assert_eq!(bytes[4], message.kind() as u8);
        if let Message::Frame(frame) = &message {
            prop_assert_eq!(frame.charge(), bytes.len() as u64);
            prop_assert!(frame.charge() - frame.stored.len() as u64 <= FRAME_HEAD_MAX + HEADER_LEN as u64);
        }
        prop_assert_eq!(read(&bytes).unwrap(), message);
    }

    /// A frame's stored bytes may end anywhere; everything else has an explicit length.
    #[test]
    fn every_truncation_is_refused(message in some_message()) {
        let bytes = bytes_of(&message);
        let least = match &message {
            Message::Frame(frame) => bytes.len() - frame.stored.len(),
            _ => bytes.len(),
        };
        for cut in HEADER_LEN..least {
            prop_assert!(read(&bytes[..cut]).is_err(), "cut at {cut} of {}", bytes.len());
        }
    }

    #[test]
    fn bytes_left_over_are_refused(message in some_message(), more in proptest::collection::vec(any::<u8>(), 1..9)) {
        prop_assume!(!matches!(message, Message::Frame(_)));
        prop_assert!(read(&[bytes_of(&message), more].concat()).is_err());
    }

    /// Garbage is refused, or read as a message that is written the same way: each message has exactly one encoding.
    #[test]
    fn garbage_is_refused_or_a_message(kind in 1u8..15, body in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = Message::read(Kind::from_byte(kind).unwrap(), &Bytes::from(body.clone())) {
            prop_assert_eq!(&bytes_of(&message)[HEADER_LEN..], &body);
        }
    }

    #[test]
    fn every_bent_byte_is_refused_or_another_message(message in some_message(), at in any::<usize>(), bit in 0u8..8) {
        let mut bytes = bytes_of(&message);
        prop_assume!(bytes.len() > HEADER_LEN);
        let at = HEADER_LEN + at % (bytes.len() - HEADER_LEN);
        bytes[at] ^= 1 << bit;
        if let Ok(other) = read(&bytes) {
            prop_assert_ne!(&other, &message);
            prop_assert_eq!(bytes_of(&other), bytes);
        }
    }
}

#[test]
fn the_largest_request_fits_a_message() {
    // Runs whose gaps and lengths take the most bytes, just below the limits of a request.
    let far = u32::MAX - 2 * u32::try_from(RUNS_MAX).unwrap();
    let chunks: Runs = (0..u32::try_from(RUNS_MAX).unwrap()).map(|n| far + 2 * n).collect();
    assert_eq!(chunks.ranges().len(), RUNS_MAX);
    let bases = vec![ChunkId::of(b"base"); BASES_MAX];
    let wanted = Wanted { chunks, bases, ..Wanted::default() };
    let manifest = ManifestId::of(b"");
    let request = Request { request: u64::MAX, priority: Priority::Warm, manifest, wanted };
    let bytes = bytes_of(&Message::Request(request));
    assert!(bytes.len() as u64 <= CONTROL_LEN_MAX, "{}", bytes.len());
    assert!(read(&bytes).is_ok());
    // However spread, runs take at most five bytes each for gap and length.
    // and those of ordinals at most three.
    assert!((RUNS_MAX * (10 + 6) + BASES_MAX * 32 + 100) as u64 <= CONTROL_LEN_MAX);
}

#[test]
fn what_passes_a_limit_is_refused() {
    let manifest = ManifestId::of(b"");
    let request = |wanted| Message::Request(Request { request: 1, priority: Priority::Restore, manifest, wanted });
    let runs =
        |len: u64| Wanted { chunks: Runs::of(0..u32::try_from(len).unwrap()), bases: Vec::new(), ..Wanted::default() };
    let bases = |len| Wanted { chunks: Runs::default(), bases: vec![ChunkId::of(b""); len], ..Wanted::default() };
    assert!(read(&bytes_of(&request(runs(CHUNKS_MAX)))).is_ok());
    assert!(read(&bytes_of(&request(bases(BASES_MAX)))).is_ok());
    let alone = |alone| Wanted { alone, ..runs(5) };
    assert!(read(&bytes_of(&request(alone(Runs::of(4..5))))).is_ok());
    for (wanted, what) in [
        (alone(Runs::of(4..6)), "chunks without bases are none, or not of the request"),
        (runs(CHUNKS_MAX + 1), "too many chunks in one request"),
        (bases(BASES_MAX + 1), "too many bases in one request"),
        (Wanted::default(), "request names no chunk"),
    ] {
        assert_eq!(read(&bytes_of(&request(wanted))).unwrap_err().what, what);
    }
    let hello = |change: fn(&mut Hello)| {
        let mut hello = hello(&server(), 0);
        change(&mut hello);
        read(&bytes_of(&Message::Hello(hello))).unwrap_err().what
    };
    assert_eq!(hello(|hello| hello.versions = vec![2, 1]), "versions are not ascending");
    assert_eq!(hello(|hello| hello.versions = (0..9).collect()), "string is too long");
    assert_eq!(hello(|hello| hello.agent = "a".repeat(64)), "string is too long");
    assert_eq!(hello(|hello| hello.agent = "a\nb".into()), "text holds control characters");
    assert_eq!(hello(|hello| hello.window = u64::MAX), "window is too large");
    assert_eq!(hello(|hello| hello.extensions = vec![(1, vec![]); 17]), "too many extensions");
    assert_eq!(hello(|hello| hello.extensions = vec![(1, vec![0; 1025])]), "string is too long");
    let stored = Bytes::from_static(b"longer");
    let frame = Frame { request: 1, ordinal: 0, codec: 0, plain_len: 5, base: None, stored };
    let what = read(&bytes_of(&Message::Frame(frame))).unwrap_err().what;
    assert_eq!(what, "stored length exceeds the plain length");
}

#[test]
fn the_rest_of_what_was_wanted_can_be_asked_for_again() {
    let ids: Vec<ChunkId> = (0u8..4).map(|n| ChunkId::of(&[n])).collect();
    let mut chunks = Runs::of(5..8);
    chunks.push(100..110);
    let wanted = Wanted { chunks, bases: ids.clone(), ..Wanted::default() };
    assert_eq!(wanted.len(), 17);
    let left: Runs = [1, 3, 12, 13, 16].into_iter().collect();
    let rest = wanted.only(&left);
    assert_eq!(rest.chunks.iter().collect::<Vec<_>>(), [6, 100, 109]);
    assert_eq!(rest.bases, [ids[0], ids[3]]);
}
