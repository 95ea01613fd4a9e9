//! Each side against a peer that lies, floods, sends garbage or speaks a newer version.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;

use super::super::limits::{GREETING_MAX, PROGRESS_MIN, REQUESTS_MAX, STALL_MAX, WINDOW_MIN};
use super::super::{
    Closed, Demand, EndCode, Ended, ErrorCode, Event, Find, Found, Frame, Grant, Hello, Message, Missing, Priority,
    Provider, Request, RequestOutcome, Requester, Runs, Survey, Violation, Wanted,
};
use super::world::Store;
use super::{asker, bytes_of, hello, seconds, server, split};
use crate::format::ChunkList;
use crate::id::{ChunkId, ManifestId};

const NOW: Duration = Duration::from_secs(7);

/// Requester that has greeted and requested chunks 0 to 9 and one survey.
fn requester() -> Requester {
    let mut requester = greeted();
    let wanted = Wanted { chunks: Runs::of(0..10), bases: Vec::new(), ..Wanted::default() };
    assert_eq!(requester.request(Priority::Restore, ManifestId::of(b""), wanted, NOW).unwrap(), 1);
    assert_eq!(requester.find(ManifestId::of(b""), 5, NOW).unwrap(), 2);
    requester
}

fn greeted() -> Requester {
    let mut requester = Requester::new(hello(&asker(), WINDOW_MIN), server(), NOW).unwrap();
    requester.handle(0, &bytes_of(&Message::Hello(hello(&server(), 0))), NOW);
    assert!(matches!(requester.poll(), Some(Event::Opened)));
    requester
}

/// A provider that was greeted.
fn provider() -> Provider {
    let mut provider = Provider::new(hello(&server(), 0), asker(), 0, NOW);
    provider.handle(0, &bytes_of(&Message::Hello(hello(&asker(), WINDOW_MIN))), NOW);
    provider
}

/// Reason for the end of the connection, once all events are taken.
fn why(requester: &mut Requester) -> Option<Closed> {
    let mut why = None;
    while let Some(event) = requester.poll() {
        if let Event::Closed(closed) = event {
            why = Some(closed);
        }
    }
    assert!(requester.poll().is_none());
    why
}

fn why_provider(provider: &mut Provider) -> Option<Closed> {
    let mut why = None;
    while let Some(demand) = provider.poll() {
        if let Demand::Closed(closed) = demand {
            why = Some(closed);
        }
    }
    why
}

/// Last message to the other side.
fn last_words(mut transmit: impl FnMut() -> Option<super::super::Transmit>) -> Message {
    let mut said = Vec::new();
    while let Some(bytes) = transmit() {
        said.extend_from_slice(&bytes.head);
        said.extend_from_slice(&bytes.body);
    }
    split(&said).pop().unwrap()
}

fn frame(ordinal: u32) -> Frame {
    let stored = Bytes::from_static(b"stored");
    Frame { request: 1, ordinal, codec: 0, plain_len: 6, base: None, stored }
}

fn missing(request: u64, ordinals: std::ops::Range<u32>) -> Message {
    Message::Missing(Missing { request, ordinals: Runs::of(ordinals) })
}

fn found(upto: u32, held: std::ops::Range<u32>) -> Message {
    Message::Found(Found { request: 2, survey: Survey { chunks: 20, upto, held: Runs::of(held) } })
}

#[test]
fn a_requester_believes_no_answer_to_what_it_did_not_ask() {
    let ended = |request| Message::Ended(Ended { request, code: EndCode::Failed, text: String::new() });
    let lies: [(&str, Vec<Message>); 16] = [
        ("answer to a chunk that was not requested", vec![Message::Frame(frame(10))]),
        ("answer to an unknown request", vec![Message::Frame(Frame { request: 3, ..frame(1) })]),
        ("answer to an unknown request", vec![Message::Frame(Frame { request: 2, ..frame(1) })]),
        ("chunk was answered twice", vec![Message::Frame(frame(3)), Message::Frame(frame(3))]),
        ("chunk was answered twice", vec![missing(1, 3..4), Message::Frame(frame(3))]),
        ("answer to a chunk that was not requested", vec![missing(1, 3..11)]),
        ("answer to an unknown request", vec![missing(1, 0..10), missing(1, 0..1)]),
        ("frame lacks its base, or has one without need", vec![Message::Frame(Frame { codec: 3, ..frame(1) })]),
        (
            "frame lacks its base, or has one without need",
            vec![Message::Frame(Frame { base: Some(ChunkId::of(b"")), ..frame(1) })],
        ),
        ("end of an unknown request", vec![ended(9)]),
        ("end of an unknown request", vec![ended(1), ended(1)]),
        ("answer to another question", vec![found(5, 0..0)]),
        ("answer to another question", vec![found(10, 4..6)]),
        ("answer to an unknown question", vec![Message::Found(Found { request: 1, survey: Survey::default() })]),
        ("second hello", vec![Message::Hello(hello(&server(), 0))]),
        ("message is for a provider", vec![Message::Credit { granted: 1 }]),
    ];
    for (what, lie) in lies {
        let mut requester = requester();
        for message in &lie {
            requester.handle(0, &bytes_of(message), NOW);
        }
        assert_eq!(why(&mut requester), Some(Closed::Violated(Violation::Unexpected(what))), "{lie:?}");
        let message = Message::Error { code: ErrorCode::Protocol, text: what.into() };
        assert_eq!(last_words(|| requester.transmit(NOW)), message);
        // Later bytes are ignored.
        requester.handle(0, b"garbage", NOW);
        assert!(requester.is_over() && requester.timeout().is_none());
    }
}

#[test]
fn a_requester_takes_no_more_than_it_granted_even_of_a_frame_that_was_only_announced() {
    let mut requester = requester();
    let most = u32::try_from(WINDOW_MIN).unwrap() - 5;
    let mut announced = (most + 1).to_le_bytes().to_vec();
    announced.push(5);
    requester.handle(3, &announced, NOW);
    let limit = WINDOW_MIN - 5;
    let expected = Violation::TooLong { kind: "FRAME", len: limit + 1, limit };
    assert_eq!(why(&mut requester), Some(Closed::Violated(expected)));

    // Two lanes share the credit.
    let mut requester = self::requester();
    announced[..4].copy_from_slice(&(most - 100).to_le_bytes());
    requester.handle(1, &announced, NOW);
    assert!(!requester.is_over());
    assert_eq!(requester.in_memory(), u64::from(most - 100) + 5);
    announced[..4].copy_from_slice(&101u32.to_le_bytes());
    requester.handle(2, &announced, NOW);
    assert!(matches!(why(&mut requester), Some(Closed::Violated(Violation::TooLong { limit: 95, .. }))));
}

/// Header of a frame of `len` bytes of body, and the beginning of the body: `head` without stored bytes.
fn beginning(head: &Frame, len: u32) -> Vec<u8> {
    let head = bytes_of(&Message::Frame(Frame { stored: Bytes::new(), ..head.clone() }));
    [&len.to_le_bytes()[..], &head[4..]].concat()
}

#[test]
fn a_frame_that_no_requested_chunk_can_have_is_refused_before_it_gets_memory() {
    let ask = |lens: Vec<u32>| {
        let mut requester = greeted();
        let wanted = Wanted { chunks: Runs::of(0..3), bases: vec![ChunkId::of(b"base")], lens, ..Wanted::default() };
        requester.request(Priority::Restore, ManifestId::of(b""), wanted, NOW).map(|_| requester)
    };
    assert_eq!(ask(vec![10, 3_000_000, 20]).unwrap_err().kind(), crate::ErrorKind::Usage);
    let of = |ordinal, plain_len| Frame { plain_len, ..frame(ordinal) };
    let long = |len, limit| Violation::TooLong { kind: "FRAME", len, limit };
    let unexpected = |what| Some(Violation::Unexpected(what));
    let lies = [
        (of(0, 3_000_000), 3_000_000, Some(Violation::Length { expected: 10, got: 3_000_000 })),
        (of(3, 29), 100, Some(Violation::Length { expected: 30, got: 29 })),
        (of(0, 10), 3_000_000, Some(long(2_999_995, 10))),
        (of(1, 3_000_000), 3_000_008, None),
        (of(4, 10), 3_000_000, unexpected("answer to a chunk that was not requested")),
        (Frame { request: 7, ..of(0, 10) }, 3_000_000, unexpected("answer to an unknown request")),
    ];
    for (head, len, expected) in lies {
        let mut requester = ask(vec![10, 3_000_000, 20, 30]).unwrap();
        // As much of the body as is looked at before the rest is allocated.
        let mut bytes = beginning(&head, len);
        bytes.resize(5 + 64, 0);
        requester.handle(1, &bytes, NOW);
        assert_eq!(why(&mut requester), expected.map(Closed::Violated));
    }
    // Without lengths, no more than the frame says itself.
    let mut requester = requester();
    requester.handle(1, &[beginning(&of(0, 100), 1000), vec![0; 64]].concat(), NOW);
    assert_eq!(why(&mut requester), Some(Closed::Violated(long(995, 100))));
}

#[test]
fn a_codec_of_the_future_makes_a_chunk_missing_and_nothing_worse() {
    let mut requester = requester();
    requester.handle(0, &bytes_of(&Message::Frame(Frame { codec: 200, ..frame(4) })), NOW);
    let event = requester.poll();
    assert!(
        matches!(&event, Some(Event::Missing { request: 1, ordinals }) if *ordinals == Runs::of(4..5)),
        "{event:?}"
    );
    assert_eq!(requester.in_memory(), 0);
    assert!(!requester.is_over());
}

#[test]
fn a_provider_that_trickles_is_given_up() {
    // Just too little in each period to count as progress, and just enough. The header's five bytes count.
    for (bytes, given_up) in [(PROGRESS_MIN - 6, true), (PROGRESS_MIN - 5, false)] {
        let mut requester = requester();
        let long = Frame { plain_len: 3_000_000, stored: Bytes::from(vec![0; 3_000_000]), ..frame(1) };
        let message = bytes_of(&Message::Frame(long));
        let (header, body) = message.split_at(5);
        requester.handle(0, header, NOW);
        let piece = &body[..usize::try_from(bytes).unwrap()];
        let mut now = NOW + (STALL_MAX.saturating_sub(Duration::from_millis(1)));
        requester.handle(0, piece, now);
        now += Duration::from_millis(1);
        requester.expire(now);
        assert_eq!(requester.is_over(), given_up, "{bytes}");
    }
}

#[test]
fn a_provider_keeps_to_the_limits_it_told() {
    let request = |request| {
        let wanted = Wanted { chunks: Runs::of(0..1), bases: Vec::new(), ..Wanted::default() };
        Message::Request(Request { request, priority: Priority::Warm, manifest: ManifestId::of(b""), wanted })
    };
    let find = |request| Message::Find(Find { request, manifest: ManifestId::of(b""), from: 0 });
    let lies: [(Violation, Vec<Message>); 7] = [
        (Violation::Unexpected("request number does not increase"), vec![request(2), find(2)]),
        (Violation::Unexpected("request number does not increase"), vec![request(2), request(1)]),
        (Violation::Unexpected("cancel of an unknown request"), vec![Message::Cancel { request: 1 }]),
        (Violation::Limit("too many open requests"), (1..=u64::from(REQUESTS_MAX) + 1).map(find).collect()),
        (Violation::Unexpected("credit decreases"), [9, 8].map(|granted| Message::Credit { granted }).to_vec()),
        (Violation::Unexpected("message is for a requester"), vec![missing(1, 0..1)]),
        (Violation::TooLong { kind: "FRAME", len: 11, limit: 0 }, vec![Message::Frame(frame(0))]),
    ];
    for (expected, lie) in lies {
        let mut provider = provider();
        for message in &lie {
            provider.handle(0, &bytes_of(message), NOW);
        }
        assert_eq!(why_provider(&mut provider), Some(Closed::Violated(expected.clone())), "{lie:?}");
        assert!(
            matches!(last_words(|| provider.transmit(0, NOW)), Message::Error { code, .. } if code == expected.code())
        );
    }
    let mut provider = Provider::new(hello(&server(), 0), asker(), 0, NOW);
    provider.handle(0, &bytes_of(&Message::Hello(hello(&asker(), WINDOW_MIN - 1))), NOW);
    let closed = why_provider(&mut provider);
    assert_eq!(closed, Some(Closed::Violated(Violation::Limit("window is too small"))));
}

#[test]
fn who_asks_and_never_reads_cannot_pile_up_answers() {
    let mut provider = provider();
    for request in 1..=u64::from(REQUESTS_MAX) {
        provider.handle(0, &bytes_of(&Message::Find(Find { request, manifest: ManifestId::of(b""), from: 0 })), NOW);
        provider.surveyed(request, None, NOW);
    }
    // All are answered, but no answer has been sent.
    for _ in 0..100_000 {
        provider.handle(0, &bytes_of(&Message::Ping { nonce: 1 }), NOW);
    }
    assert!(!provider.is_over());
    let request = u64::from(REQUESTS_MAX) + 1;
    provider.handle(0, &bytes_of(&Message::Find(Find { request, manifest: ManifestId::of(b""), from: 0 })), NOW);
    let closed = why_provider(&mut provider);
    assert_eq!(closed, Some(Closed::Violated(Violation::Limit("too many open requests"))));
}

#[test]
fn what_is_cancelled_counts_until_work_for_it_is_over() {
    let store = Store::new(&[1000; 5], &[]);
    let mut provider = provider();
    let most = u64::from(REQUESTS_MAX);
    let ask = |provider: &mut Provider, request: u64| {
        let wanted = Wanted { chunks: Runs::of(0..5), bases: Vec::new(), ..Wanted::default() };
        let asked = Request { request, priority: Priority::Restore, manifest: store.open, wanted };
        provider.handle(0, &bytes_of(&Message::Request(asked)), NOW);
    };
    for request in 1..=most {
        ask(&mut provider, request);
        assert!(matches!(provider.poll(), Some(Demand::Authorise { .. })));
        provider.handle(0, &bytes_of(&Message::Cancel { request }), NOW);
        assert_eq!(provider.poll(), Some(Demand::Abort { request }));
    }
    let ended = |provider: &mut Provider| {
        let mut said = Vec::new();
        while let Some(bytes) = provider.transmit(0, NOW) {
            said.extend_from_slice(&bytes.head);
        }
        split(&said).into_iter().filter(|message| matches!(message, Message::Ended(_))).count()
    };
    assert_eq!(ended(&mut provider), 0, "work goes on for each of them");
    // One of them is over: its end is sent, and one more may come.
    provider.over(7, NOW);
    assert_eq!(ended(&mut provider), 1);
    ask(&mut provider, most + 1);
    assert!(matches!(provider.poll(), Some(Demand::Authorise { .. })));
    // An answer that came before the abort counts as well.
    provider.granted(8, Some(Arc::clone(&store.grant)), NOW);
    assert_eq!(ended(&mut provider), 1);
    ask(&mut provider, most + 2);
    assert!(matches!(provider.poll(), Some(Demand::Authorise { .. })));
    ask(&mut provider, most + 3);
    assert_eq!(why_provider(&mut provider), Some(Closed::Violated(Violation::Limit("too many open requests"))));
}

#[test]
fn what_is_cancelled_before_work_begins_needs_none() {
    let mut provider = provider();
    for request in 1..=10_000 {
        let find = Find { request, manifest: ManifestId::of(b"x"), from: 0 };
        provider.handle(0, &bytes_of(&Message::Find(find)), NOW);
        provider.handle(0, &bytes_of(&Message::Cancel { request }), NOW);
        assert_eq!(provider.poll(), None);
        assert!(matches!(last_words(|| provider.transmit(0, NOW)), Message::Ended(_)));
    }
}

#[test]
fn without_credit_nothing_is_read_and_nothing_sent() {
    let store = Store::new(&[1000; 5], &[]);
    let mut provider = provider();
    let wanted = Wanted { chunks: Runs::of(0..5), bases: Vec::new(), ..Wanted::default() };
    let request = Request { request: 1, priority: Priority::Restore, manifest: store.open, wanted };
    provider.handle(0, &bytes_of(&Message::Request(request)), NOW);
    assert!(matches!(provider.poll(), Some(Demand::Authorise { .. })));
    provider.granted(1, Some(Arc::clone(&store.grant)), NOW);
    assert_eq!(provider.poll(), None);
    // Enough for one, but not for two: the maximum of a chunk is reserved before it is read.
    provider.handle(0, &bytes_of(&Message::Credit { granted: 2000 }), NOW);
    assert!(matches!(provider.poll(), Some(Demand::Read { ordinal: 0, .. })));
    assert_eq!(provider.poll(), None);
    provider.lost("gone");
    assert_eq!(provider.poll(), Some(Demand::Closed(Closed::Lost("gone".into()))));
}

#[test]
fn chunks_without_bases_are_asked_only_of_who_knows_that_and_read_as_such() {
    let manifest = ManifestId::of(b"");
    let wanted = Wanted { chunks: Runs::of(0..5), alone: Runs::of(1..3), ..Wanted::default() };
    // This greeting has no extension, as that of an older program.
    let error = greeted().request(Priority::Restore, manifest, wanted.clone(), NOW).unwrap_err();
    assert_eq!(error.kind(), crate::error::ErrorKind::Unsupported);
    let knows = Hello { extensions: vec![(Hello::ALONE, Vec::new())], ..hello(&server(), 0) };
    let mut requester = Requester::new(hello(&asker(), WINDOW_MIN), server(), NOW).unwrap();
    requester.handle(0, &bytes_of(&Message::Hello(knows)), NOW);
    assert_eq!(requester.request(Priority::Restore, manifest, wanted.clone(), NOW).unwrap(), 1);
    // Asked again for some, each keeps what it was.
    let again = wanted.only(&[0, 2, 4].into_iter().collect());
    assert_eq!((again.chunks.len(), again.alone), (3, Runs::of(1..2)));

    let store = Store::of_sizes(5, 1000, &[]);
    let mut provider = provider();
    let request = Request { request: 1, priority: Priority::Restore, manifest: store.open, wanted };
    provider.handle(0, &bytes_of(&Message::Request(request)), NOW);
    provider.handle(0, &bytes_of(&Message::Credit { granted: 1 << 20 }), NOW);
    let _ = provider.poll();
    provider.granted(1, Some(Arc::clone(&store.grant)), NOW);
    let asked = std::iter::from_fn(|| match provider.poll() {
        Some(Demand::Read { chunk, .. }) => Some(chunk.alone),
        _ => None,
    });
    assert_eq!(asked.collect::<Vec<_>>(), [false, true, true, false, false]);
}

#[test]
fn unknown_kinds_are_passed_over_or_refused_by_their_number() {
    let message = |kind: u8, len: u32| [&len.to_le_bytes()[..], &[kind], &vec![7; len as usize]].concat();
    for kind in [129, 200, 255] {
        let mut requester = requester();
        requester.handle(0, &message(kind, 1000), NOW);
        requester.handle(0, &bytes_of(&Message::Frame(frame(1))), NOW);
        assert!(matches!(requester.poll(), Some(Event::Arrived(_))), "{kind}");
    }
    for kind in [0, 15, 127] {
        let mut requester = requester();
        requester.handle(0, &message(kind, 0), NOW);
        assert_eq!(why(&mut requester), Some(Closed::Violated(Violation::Unknown(kind))));
    }
    let mut requester = requester();
    requester.handle(0, &message(129, 128 * 1024 + 1), NOW);
    assert!(matches!(why(&mut requester), Some(Closed::Violated(Violation::TooLong { kind: "message", .. }))));
}

#[test]
fn streams_are_few_and_only_answers_go_beside_the_first() {
    let mut requester = requester();
    requester.handle(17, b"x", NOW);
    assert_eq!(why(&mut requester), Some(Closed::Violated(Violation::Limit("too many streams"))));
    let mut requester = self::requester();
    requester.handle(1, &bytes_of(&Message::Ping { nonce: 1 }), NOW);
    let expected = Violation::Unexpected("message on the wrong stream");
    assert_eq!(why(&mut requester), Some(Closed::Violated(expected)));
}

#[test]
fn versions_are_settled_by_the_highest_that_both_speak() {
    let meet = |theirs: &[u8]| {
        let mut requester = Requester::new(hello(&asker(), WINDOW_MIN), server(), NOW).unwrap();
        let theirs = Hello { versions: theirs.to_vec(), ..hello(&server(), 0) };
        requester.handle(0, &bytes_of(&Message::Hello(theirs)), NOW);
        requester
    };
    assert_eq!(meet(&[1]).version(), 1);
    assert_eq!(meet(&[0, 1, 2, 9]).version(), 1);
    let mut none = meet(&[2, 3]);
    let violation = Violation::Version { ours: vec![1], theirs: vec![2, 3] };
    assert_eq!(why(&mut none), Some(Closed::Violated(violation.clone())));
    let message = last_words(|| none.transmit(NOW));
    let text = "no version of the protocol is shared: expected one of [1], got [2, 3]".to_owned();
    assert_eq!(message, Message::Error { code: ErrorCode::Version, text });
    let error = crate::Error::from(Closed::Violated(violation));
    assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
}

#[test]
fn a_hello_must_be_the_first_say_what_the_certificate_says_and_come_in_time() {
    let mut requester = Requester::new(hello(&asker(), WINDOW_MIN), server(), NOW).unwrap();
    requester.handle(0, &bytes_of(&Message::Hello(hello(&asker(), 0))), NOW);
    let closed = why(&mut requester).unwrap();
    assert_eq!(crate::Error::from(closed).kind(), crate::ErrorKind::Denied);

    let mut requester = Requester::new(hello(&asker(), WINDOW_MIN), server(), NOW).unwrap();
    requester.handle(0, b"HTTP/1.1 400 Bad Request\r\n", NOW);
    let expected = Violation::Unexpected("the first message is not a hello");
    assert_eq!(why(&mut requester), Some(Closed::Violated(expected)));

    let mut provider = Provider::new(hello(&server(), 0), asker(), 0, NOW);
    let late = NOW + GREETING_MAX;
    assert_eq!(provider.timeout(), Some(late));
    // Part of a hello, byte by byte, gains no time.
    provider.handle(0, &bytes_of(&Message::Hello(hello(&asker(), 0)))[..9], NOW + seconds(9));
    provider.expire(late);
    let text = "no hello".to_owned();
    assert_eq!(why_provider(&mut provider), Some(Closed::GaveUp { code: ErrorCode::Silent, text }));
}

#[test]
fn requests_that_break_a_limit_are_refused_before_they_are_sent() {
    let mut requester = greeted();
    let mut ask = |chunks: Runs| {
        let wanted = Wanted { chunks, bases: Vec::new(), ..Wanted::default() };
        requester.request(Priority::Warm, ManifestId::of(b""), wanted, NOW).unwrap_err().kind()
    };
    assert_eq!(ask(Runs::of(0..65_537)), crate::ErrorKind::Usage);
    assert_eq!(ask((0..4097).map(|n| n * 2).collect()), crate::ErrorKind::Usage);
    assert_eq!(ask(Runs::default()), crate::ErrorKind::Usage);
    for _ in 0..REQUESTS_MAX {
        requester.find(ManifestId::of(b""), 0, NOW).unwrap();
    }
    assert_eq!(requester.find(ManifestId::of(b""), 0, NOW).unwrap_err().kind(), crate::ErrorKind::Unreachable);
    assert!(Requester::new(hello(&asker(), WINDOW_MIN - 1), server(), NOW).is_err());
}

#[test]
fn a_frame_that_was_not_true_ends_the_connection_and_every_request() {
    let mut requester = requester();
    requester.corrupt("chunk does not match its id");
    let mut ended = Vec::new();
    while let Some(event) = requester.poll() {
        if let Event::Ended { request, how, left } = event {
            ended.push((request, how, left.len()));
        }
    }
    assert_eq!(ended, [(1, RequestOutcome::Lost, 10), (2, RequestOutcome::Lost, 0)]);
    assert!(matches!(last_words(|| requester.transmit(NOW)), Message::Error { code: ErrorCode::Corrupt, .. }));
}

proptest! {
    /// For any input, cut anywhere: no panic, and no more memory than was granted.
    #[test]
    fn garbage_on_any_lane_is_survived(pieces in proptest::collection::vec(
        (0u32..18, proptest::collection::vec(any::<u8>(), 0..60)), 1..20)) {
        let (mut requester, mut provider) = (requester(), provider());
        for (lane, piece) in &pieces {
            requester.handle(*lane, piece, NOW);
            provider.handle(*lane, piece, NOW);
            prop_assert!(requester.in_memory() <= WINDOW_MIN);
        }
        let _ = (why(&mut requester), why_provider(&mut provider));
    }

    /// A valid transcript with some bytes changed, in pieces of any length.
    #[test]
    fn bent_transcripts_are_survived(bends in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4),
                                     piece in 1usize..50) {
        let messages = [
            Message::Frame(frame(0)), missing(1, 1..4), Message::Pong { nonce: 1 }, found(10, 5..7),
            Message::Frame(frame(9)), Message::Goodbye { text: "bye".into() },
            Message::Ended(Ended { request: 1, code: EndCode::Failed, text: "disk".into() }),
        ];
        let mut bytes: Vec<u8> = messages.iter().flat_map(bytes_of).collect();
        let len = bytes.len();
        bends.iter().for_each(|(at, with)| bytes[at % len] ^= with);
        let mut requester = requester();
        bytes.chunks(piece).for_each(|piece| requester.handle(0, piece, NOW));
        let (mut ended, mut arrived) = (0, 0);
        while let Some(event) = requester.poll() {
            match event {
                Event::Ended { .. } => ended += 1,
                Event::Arrived(_) => arrived += 1,
                _ => {}
            }
        }
        prop_assert!(ended <= 2 && arrived <= 10);
        if bends.iter().all(|(_, with)| *with == 0) {
            prop_assert_eq!((ended, arrived, requester.is_over()), (2, 2, true));
        }
    }
}

#[test]
fn what_comes_of_a_grant_that_lies_about_lengths_is_missing() {
    let store = Store::new(&[1000], &[]);
    let chunks = Arc::new(ChunkList { lens: vec![10], ..(*store.grant.chunks).clone() });
    let mut provider = provider();
    let wanted = Wanted { chunks: Runs::of(0..1), bases: Vec::new(), ..Wanted::default() };
    let request = Request { request: 1, priority: Priority::Restore, manifest: store.open, wanted };
    provider.handle(0, &bytes_of(&Message::Request(request)), NOW);
    provider.handle(0, &bytes_of(&Message::Credit { granted: 2000 }), NOW);
    let _ = provider.poll();
    provider.granted(1, Some(Arc::new(Grant { chunks, bases: Vec::new() })), NOW);
    let Some(Demand::Read { request, ordinal, chunk, .. }) = provider.poll() else { panic!("no read") };
    let encoded = crate::codec::Encoded { codec: crate::codec::Codec::Raw, bytes: store.stored(&chunk.id), base: None };
    provider.supply(request, ordinal, Some(super::super::OutgoingFrame { encoded, plain_len: 1000 }), NOW);
    assert_eq!(last_words(|| provider.transmit(0, NOW)), missing(1, 0..1));
    assert_eq!(provider.in_memory(), 0);
}

#[test]
fn what_is_refused_or_cancelled_takes_no_memory() {
    let mut provider = provider();
    let wanted = || Wanted {
        chunks: (0..4096).map(|place| 2 * place).collect(),
        bases: vec![ChunkId::of(b"base"); 1024],
        ..Wanted::default()
    };
    for number in [1, 2] {
        let request = Request {
            request: number,
            priority: Priority::Restore,
            manifest: ManifestId::of(b"any"),
            wanted: wanted(),
        };
        provider.handle(0, &bytes_of(&Message::Request(request)), NOW);
        assert!(matches!(provider.poll(), Some(Demand::Authorise { .. })));
    }
    let both = provider.requested();
    assert!(both >= 2 * (4096 + 1024) * size_of::<ChunkId>() as u64 && !provider.has_open_requests());
    // The answer waits for a peer that does not read.
    provider.granted(1, None, NOW);
    assert_eq!(provider.requested(), both / 2);
    provider.handle(0, &bytes_of(&Message::Cancel { request: 2 }), NOW);
    assert_eq!(provider.requested(), 0);
}

#[test]
fn an_open_request_keeps_no_list_of_its_tree() {
    let mut provider = provider();
    let wanted = Wanted { chunks: Runs::of(0..1), ..Wanted::default() };
    let request = Request { request: 1, priority: Priority::Restore, manifest: ManifestId::of(b"any"), wanted };
    provider.handle(0, &bytes_of(&Message::Request(request)), NOW);
    assert!(matches!(provider.poll(), Some(Demand::Authorise { .. })));
    let chunks = ChunkList { ids: vec![ChunkId::of(b"chunk"); 1000], lens: vec![1; 1000] };
    let grant = Arc::new(Grant { chunks: Arc::new(chunks), bases: Vec::new() });
    provider.granted(1, Some(Arc::clone(&grant)), NOW);
    assert!(provider.has_open_requests());
    assert_eq!((Arc::strong_count(&grant), Arc::strong_count(&grant.chunks)), (1, 1));
}
