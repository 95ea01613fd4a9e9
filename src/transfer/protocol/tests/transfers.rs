//! Whole transfers: every requested chunk arrives exactly once or is reported missing, within bounds, whatever the
//! network does.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::limits::{ANSWER_SILENCE_MAX, FETCHING_MAX, READ_AHEAD_MAX, SILENCE_MAX, STALL_MAX, WINDOW_MIN};
use super::super::{Closed, EndCode, ErrorCode, Message, Priority, RequestOutcome, Runs, Wanted};
use super::network::{LinkProperties, Rng};
use super::seconds;
use super::world::{Store, World, line};
use crate::id::{ChunkId, ManifestId};
use crate::limits::{KIB, MIB};

const RESTORE: Priority = Priority::Restore;

/// Checks that every held chunk arrived once, and every other one is reported missing.
fn assert_all_once(world: &World) {
    assert!(world.seen.chunks.values().all(|&times| times == 1), "a chunk came twice");
    let came: BTreeSet<ChunkId> = world.seen.chunks.keys().copied().collect();
    let grant = &world.store.grant;
    let asked: BTreeSet<ChunkId> =
        grant.chunks.ids.iter().chain(grant.bases.iter().map(|(id, _)| id)).copied().collect();
    let held: BTreeSet<ChunkId> = asked.intersection(&world.store.held).copied().collect();
    assert_eq!(came, held);
    assert_eq!(world.seen.missing, &asked - &held);
}

#[test]
fn every_chunk_arrives_once_and_what_is_not_held_is_told() {
    for seed in 0..4 {
        for lanes in [0, 1, 5] {
            let mut world = World::calm(Store::of_sizes(300, 200 * KIB, &[0, 7, 8, 299]), lanes, seed);
            let request = world.ask(RESTORE, world.store.every());
            assert_eq!(world.until_ended(request), (RequestOutcome::Complete, Runs::default()));
            assert_all_once(&world);
        }
    }
}

#[test]
fn after_resets_only_what_is_left_is_asked_for_again() {
    for seed in 0..8 {
        let lanes = u32::try_from(seed % 4).unwrap();
        let mut world = World::calm(Store::of_sizes(400, 200 * KIB, &[3]), lanes, seed);
        let (mut rng, mut wanted, mut tries) = (Rng::new(seed), world.store.every(), 0);
        loop {
            let request = world.ask(RESTORE, wanted.clone());
            if tries < 6 {
                world.run_for(Duration::from_millis(rng.below(400)));
                world.reconnect();
                tries += 1;
            }
            match world.until_ended(request) {
                (RequestOutcome::Complete, left) => {
                    assert!(left.is_empty());
                    break;
                }
                (RequestOutcome::Lost, left) => wanted = wanted.only(&left),
                (how, _) => panic!("{how:?}"),
            }
            // Requests are numbered anew on the new connection.
            world.seen.ended.clear();
        }
        assert_all_once(&world);
    }
}

#[test]
fn memory_stays_in_bounds_with_a_slow_reader_who_is_not_called_stalled() {
    for seed in 0..4 {
        let mut world = World::new(Store::of_sizes(400, 120 * KIB, &[]), line(), 2, WINDOW_MIN, seed);
        // The whole takes 80 s; nothing is read for over a minute while one frame is processed.
        world.reader = Some(300_000);
        let request = world.ask(RESTORE, world.store.every());
        assert_eq!(world.until_ended(request), (RequestOutcome::Complete, Runs::default()));
        assert_all_once(&world);
        assert!(world.seen.peak.0 > WINDOW_MIN / 2 && world.seen.peak.0 <= WINDOW_MIN, "{:?}", world.seen.peak);
        assert!(world.seen.peak.1 > MIB && world.seen.peak.1 <= READ_AHEAD_MAX);
    }
    // A provider with less memory to read ahead.
    let mut world = World::new(Store::of_sizes(400, 120 * KIB, &[]), line(), 2, WINDOW_MIN, 5);
    world.provider.read_ahead(MIB);
    let request = world.ask(RESTORE, world.store.every());
    assert_eq!(world.until_ended(request), (RequestOutcome::Complete, Runs::default()));
    assert!(world.seen.peak.1 <= MIB, "{:?}", world.seen.peak);
    let mut world = World::new(Store::of_sizes(60, 2 * MIB, &[]), line(), 2, WINDOW_MIN, 9);
    world.reader = Some(30_000);
    let request = world.ask(RESTORE, Wanted { bases: Vec::new(), ..world.store.every() });
    assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
    assert!(world.now > seconds(600));
}

#[test]
fn a_chunk_that_can_never_fit_the_window_is_missing_and_holds_nobody_up() {
    let window = WINDOW_MIN;
    let fits = u32::try_from(window - window / 4 - 69).unwrap();
    let mut world = World::new(Store::new(&[1000, fits + 1, fits, 0, 1000], &[]), line(), 0, window, 1);
    let request = world.ask(RESTORE, world.store.every());
    assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
    assert_eq!(world.seen.missing, [world.store.grant.chunks.ids[1]].into());
    assert_eq!(world.seen.chunks.len(), 4);
}

#[test]
fn a_slow_line_is_not_a_stall() {
    // One frame takes two minutes.
    let slow = LinkProperties { rate: 25_000, ..line() };
    let mut world = World::new(Store::new(&[3_000_000, 10], &[]), slow, 0, WINDOW_MIN, 1);
    let request = world.ask(RESTORE, world.store.every());
    assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
    assert!(world.now > seconds(100));
}

#[test]
fn a_provider_that_stands_still_is_given_up_and_what_is_left_is_told() {
    let mut world = World::calm(Store::of_sizes(1000, 100 * KIB, &[]), 1, 3);
    let request = world.ask(RESTORE, world.store.every());
    world.run(|world| world.seen.chunks.len() >= 20);
    world.read_time = None;
    // Reads in progress still arrive.
    let (how, left) = world.until_ended(request);
    let stopped = world.now;
    assert_eq!((how, left.len()), (RequestOutcome::Lost, 1100 - world.seen.chunks.len() as u64));
    world.run(|world| world.seen.provider_closed.is_some());
    let closed = Closed::ByPeer { code: ErrorCode::Stalled, text: "open requests made no progress".into() };
    assert_eq!(world.seen.provider_closed, Some(closed));
    let last = world.seen.ended[0].3;
    assert!(stopped < last + seconds(1));
    assert!(matches!(&world.seen.closed, Some(Closed::GaveUp { code: ErrorCode::Stalled, .. })));
}

#[test]
fn a_provider_that_brings_what_it_was_asked_for_is_waited_for() {
    let mut world = World::calm(Store::of_sizes(3, 100 * KIB, &[]), 1, 3);
    // Minutes for each chunk, over a slow line.
    (world.read_time, world.brings) = (Some(seconds(200)), 1000);
    let request = world.ask(RESTORE, world.store.every());
    assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
    assert!(world.now > STALL_MAX * 2, "{:?}", world.now);
}

#[test]
fn who_says_for_ever_that_it_brings_something_is_given_up() {
    let mut world = World::calm(Store::of_sizes(100, 100 * KIB, &[]), 1, 3);
    (world.read_time, world.brings) = (None, 1000);
    let begun = world.now;
    let request = world.ask(RESTORE, world.store.every());
    assert_eq!(world.until_ended(request).0, RequestOutcome::Lost);
    let waited = world.now.saturating_sub(begun);
    assert!(FETCHING_MAX < waited && waited < FETCHING_MAX + STALL_MAX * 2, "{waited:?}");
    assert!(matches!(&world.seen.closed, Some(Closed::GaveUp { code: ErrorCode::Stalled, .. })));
}

#[test]
fn a_line_that_swallows_everything_is_given_up_by_both() {
    let mut world = World::calm(Store::of_sizes(100, 100 * KIB, &[]), 1, 3);
    let request = world.ask(RESTORE, world.store.every());
    world.run(|world| world.seen.chunks.len() >= 20);
    let at = world.now;
    (world.up.black, world.down.black) = (true, true);
    assert_eq!(world.until_ended(request).0, RequestOutcome::Lost);
    world.run(|world| world.seen.provider_closed.is_some());
    assert!(world.now <= at + SILENCE_MAX + seconds(1));
    for closed in [&world.seen.closed, &world.seen.provider_closed] {
        assert!(matches!(closed, Some(Closed::GaveUp { code: ErrorCode::Silent, .. })), "{closed:?}");
    }
}

/// A provider that owes nothing may be silent for longer than one that does.
#[test]
fn a_dead_provider_is_given_up_soon_while_it_owes_an_answer() {
    for (asked, silence) in [(true, ANSWER_SILENCE_MAX), (false, SILENCE_MAX)] {
        let mut world = World::calm(Store::of_sizes(100, 100 * KIB, &[]), 1, 3);
        world.run(|world| world.seen.opened);
        if asked {
            world.ask(RESTORE, world.store.every());
            world.run(|world| world.seen.chunks.len() >= 20);
        }
        let at = world.now;
        (world.up.black, world.down.black) = (true, true);
        world.run(|world| world.seen.closed.is_some());
        let (earliest, latest) = (at + silence.saturating_sub(seconds(1)), at + silence + seconds(1));
        assert!((earliest..latest).contains(&world.now), "{asked}: {:?}", world.now.saturating_sub(at));
    }
}

#[test]
fn a_reader_who_takes_nothing_is_given_up_though_it_talks() {
    let mut world = World::calm(Store::of_sizes(100, 100 * KIB, &[]), 0, 3);
    world.ask(RESTORE, world.store.every());
    world.run(|world| world.seen.chunks.len() >= 5);
    // All messages of this requester are lost; another one speaks in its name, and ignores the silence.
    (world.up.black, world.down.black) = (true, true);
    let at = world.now;
    while world.seen.provider_closed.is_none() {
        let ping = super::bytes_of(&Message::Ping { nonce: 1 });
        world.provider.handle(0, &ping, world.now);
        world.run_for(seconds(1));
        assert!(world.now < at + STALL_MAX + seconds(5));
    }
    assert!(matches!(&world.seen.provider_closed, Some(Closed::GaveUp { code: ErrorCode::Stalled, .. })));
}

#[test]
fn silence_without_requests_is_fine_as_long_as_pings_are_answered() {
    let mut world = World::calm(Store::of_sizes(10, KIB, &[]), 2, 1);
    world.run(|world| world.seen.opened);
    world.run_for(seconds(600));
    assert_eq!(world.seen.closed, None);
    let rtt = world.requester.rtt().unwrap();
    assert!((Duration::from_millis(40)..Duration::from_millis(75)).contains(&rtt), "{rtt:?}");
    assert!(world.down.delivered < 4000, "pings are few: {}", world.down.delivered);
}

#[test]
fn cancelling_stops_the_flow_and_gives_the_credit_back() {
    for lanes in [0, 3] {
        let mut world = World::calm(Store::of_sizes(2000, 100 * KIB, &[]), lanes, 5);
        let request = world.ask(RESTORE, world.store.every());
        world.run(|world| world.seen.chunks.len() >= 100);
        world.requester.cancel(request);
        world.requester.cancel(request);
        let (came, delivered) = (world.seen.chunks.len(), world.down.delivered);
        let (how, left) = world.until_ended(request);
        assert_eq!(how, RequestOutcome::Refused(EndCode::Cancelled, String::new()));
        assert!(!left.is_empty());
        assert_eq!(world.seen.chunks.len(), came, "what is cancelled is not handed out");
        assert!(world.down.delivered - delivered < 8 * MIB, "{}", world.down.delivered - delivered);
        world.run_for(seconds(1));
        assert_eq!(world.requester.in_memory(), 0);
        let rest = world.store.every().only(&left);
        world.seen.chunks.clear();
        let request = world.ask(RESTORE, rest);
        assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
    }
}

#[test]
fn what_is_urgent_goes_first() {
    for lanes in [0, 2] {
        let mut world = World::calm(Store::of_sizes(2000, 100 * KIB, &[]), lanes, 5);
        let half =
            |range: std::ops::Range<u32>| Wanted { chunks: Runs::of(range), bases: Vec::new(), ..Wanted::default() };
        let copies = world.ask(Priority::Replicate, half(0..1500));
        world.run(|world| world.seen.chunks.len() >= 50);
        let warm = world.ask(Priority::Warm, half(1500..1700));
        let restore = world.ask(RESTORE, half(1700..1900));
        let before = world.seen.chunks.len();
        world.until_ended(restore);
        let meanwhile = world.seen.chunks.len() - before - 200;
        // At most the frames read ahead, and the few that fill the gaps while it is authorised.
        assert!(meanwhile < 400, "{meanwhile} others came first");
        world.until_ended(copies);
        let order: Vec<u64> = world.seen.ended.iter().map(|(request, ..)| *request).collect();
        assert_eq!(order, [restore, warm, copies]);
    }
}

#[test]
fn who_may_not_read_learns_nothing() {
    // The same questions, about an existing manifest that the asker may not read, and about one that nobody ever saved.
    let answer = |manifest: fn(&Store) -> ManifestId| {
        let mut world = World::calm(Store::of_sizes(50, KIB, &[]), 0, 1);
        world.run(|world| world.seen.opened);
        let (manifest, now) = (manifest(&world.store), world.now);
        world.requester.request(RESTORE, manifest, world.store.every(), now).unwrap();
        world.requester.find(manifest, 0, now).unwrap();
        world.run(|world| world.seen.ended.len() == 2);
        assert_eq!(world.seen.ended[0].1, RequestOutcome::Refused(EndCode::NotHere, String::new()));
        assert_eq!(world.seen.ended[0].2.len(), 55);
        assert_eq!(world.seen.ended[1].1, RequestOutcome::Refused(EndCode::NotHere, String::new()));
        (world.said, world.now)
    };
    assert_eq!(answer(|store| store.secret), answer(|_| ManifestId::of(b"no such")));

    // Chunks of the secret manifest, through the readable one: as if nobody held them.
    let answer = |ids: fn(&Store) -> Vec<ChunkId>| {
        let mut world = World::calm(Store::of_sizes(50, KIB, &[]), 0, 1);
        let wanted = Wanted { chunks: Runs::of(0..1), bases: ids(&world.store), ..Wanted::default() };
        let request = world.ask(RESTORE, wanted);
        assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
        assert_eq!(world.seen.missing.len(), 9);
        (world.said, world.now)
    };
    assert_eq!(answer(|store| store.secrets.clone()), answer(|_| (100u8..109).map(|n| ChunkId::of(&[n])).collect()));
}

#[test]
fn surveys_tell_what_is_held_in_several_answers() {
    let mut world = World::calm(Store::of_sizes(35, KIB, &[0, 11, 34]), 1, 1);
    world.run(|world| world.seen.opened);
    let (mut from, mut held) = (0, Runs::default());
    while from < 35 {
        world.requester.find(world.store.open, from, world.now).unwrap();
        let asked = world.seen.surveys.len();
        world.run(|world| world.seen.surveys.len() > asked);
        let survey = world.seen.surveys.last().unwrap();
        assert_eq!(survey.chunks, 35);
        from = survey.upto;
        survey.held.ranges().iter().for_each(|range| held.push(range.clone()));
    }
    assert_eq!(held.ranges(), [1..11, 12..34]);
    assert_eq!(world.seen.surveys.len(), 4);
}

#[test]
fn who_leaves_ends_what_it_began_and_begins_nothing_new() {
    let mut world = World::calm(Store::of_sizes(300, 100 * KIB, &[]), 1, 3);
    let request = world.ask(RESTORE, world.store.every());
    world.run(|world| world.seen.chunks.len() >= 20);
    world.provider.goodbye("draining", world.now);
    // In transit while the goodbye comes.
    let late = world.ask(RESTORE, Wanted { chunks: Runs::of(0..5), bases: Vec::new(), ..Wanted::default() });
    assert_eq!(world.until_ended(late).0, RequestOutcome::Refused(EndCode::Leaving, "shutting down".into()));
    assert_eq!(world.requester.free_requests(), 0);
    assert!(world.requester.find(world.store.open, 0, world.now).is_err());
    assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
    world.run(|world| world.seen.provider_closed.is_some());
    assert_eq!((&world.seen.closed, &world.seen.provider_closed), (&Some(Closed::Done), &Some(Closed::Done)));
    assert_all_once(&world);

    let mut world = World::calm(Store::of_sizes(300, 100 * KIB, &[]), 1, 3);
    let request = world.ask(RESTORE, world.store.every());
    world.run(|world| world.seen.chunks.len() >= 20);
    world.requester.goodbye("all that was needed was asked for");
    assert_eq!(world.until_ended(request).0, RequestOutcome::Complete);
    world.run(|world| world.seen.closed.is_some() && world.seen.provider_closed.is_some());
    assert_eq!((&world.seen.closed, &world.seen.provider_closed), (&Some(Closed::Done), &Some(Closed::Done)));
}

#[test]
fn many_requests_at_once_share_the_credit() {
    let mut world = World::new(Store::of_sizes(640, 100 * KIB, &[]), line(), 4, WINDOW_MIN, 5);
    let bases = world.store.every().bases;
    world.ask(RESTORE, Wanted { chunks: Runs::of(0..10), bases, ..Wanted::default() });
    for n in 1..64 {
        world.ask(RESTORE, Wanted { chunks: Runs::of(n * 10..n * 10 + 10), bases: Vec::new(), ..Wanted::default() });
    }
    assert_eq!(world.requester.free_requests(), 0);
    world.run(|world| world.seen.ended.len() == 64);
    assert!(world.seen.ended.iter().all(|(_, how, ..)| *how == RequestOutcome::Complete));
    assert_all_once(&world);
}
