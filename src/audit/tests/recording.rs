//! Tests of the recorder: repeats, ends, and refusals if nothing can be recorded; and of the publisher.

use std::fs::{self, OpenOptions};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::super::entry::{Actor, Decision, EntryKind, Verdict};
use super::super::head::SignedHead;
use super::super::publish::{FallbackPublisher, Publisher, Signer, published};
use super::super::recorder::{Recorder, RecorderOptions};
use super::super::requests::{Repeats, Request, Requests};
use super::super::verify::verify;
use super::{NOW, ORIGIN, decision, entries, folder, open, texts};
use crate::clock::ManualClock;
use crate::error::ErrorKind;
use crate::identity::Identity;
use crate::repository::{OpenOptions as Options, Repository};
use crate::storage::{Location, StoreOptions, open as open_store};

const MINUTE: Duration = Duration::from_mins(1);

fn recorder(folder: &std::path::Path) -> Recorder {
    let options = RecorderOptions::new(folder.to_owned(), ORIGIN.to_owned());
    Recorder::open(options, Arc::new(ManualClock::at(NOW))).unwrap()
}

async fn repository(place: &std::path::Path) -> Repository {
    let location = Location::directory(place.join("repository")).unwrap();
    let store = open_store(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await.unwrap();
    let options = Options { cache: Some(place.join("cache")), ..Options::default() };
    Repository::create(store, options).await.unwrap().0
}

#[test]
fn repeats_within_a_minute_are_one_and_bytes_are_told_at_the_end() {
    let (mut requests, start) = (Requests::new(MINUTE), Instant::now());
    let asked = decision("a", Verdict::Allow);
    let first = Request::new(7);
    requests.begin(asked.clone(), Repeats::Merged, first.clone(), start);
    let again = requests.repeated(&asked, start + MINUTE / 2).unwrap();
    assert!(again.seq() == 7 && again.moved(10) && first.moved(5));
    assert!(requests.repeated(&decision("a", Verdict::Deny), start).is_none(), "another verdict is another entry");
    assert!(requests.ended(start + MINUTE / 2, false).is_empty());
    // Bytes are sent, so it continues, but a request after a minute gets an entry of its own.
    assert!(requests.ended(start + MINUTE, false).is_empty());
    assert!(requests.repeated(&asked, start + MINUTE).is_none());
    let ends = requests.ended(start + MINUTE * 2, false);
    let end = EntryKind::End { of: 7, bytes: 15, requests: 2, outcome: "done".to_owned() };
    assert_eq!(ends, [end]);
    assert!(!first.moved(1), "what moves later needs an entry again");
}

#[test]
fn of_too_many_requests_in_progress_the_least_used_one_of_who_has_most_ends() {
    let (mut requests, start) = (Requests::new(MINUTE), Instant::now());
    let of = |actor: &str, name: u64| {
        let actor = Actor::Agent(Identity::new("home", actor).unwrap());
        Decision { actor, ..decision(&format!("run/step-{name}"), Verdict::Allow) }
    };
    let begin = |requests: &mut Requests, asked: Decision, seq: u64| {
        let ends = requests.make_room(&asked);
        requests.begin(asked, Repeats::Merged, Request::new(seq), start + Duration::from_millis(seq));
        ends.into_iter().map(|end| if let EntryKind::End { of, .. } = end { of } else { 0 }).collect::<Vec<_>>()
    };
    // The oldest of all is of an agent that has few.
    assert_eq!(begin(&mut requests, of("few", 0), 0), [0; 0]);
    for seq in 1..4096 {
        assert_eq!(begin(&mut requests, of("many", seq), seq), [0; 0]);
    }
    // The first one is asked for again.
    assert!(requests.repeated(&of("many", 1), start + MINUTE / 2).is_some());
    assert_eq!(begin(&mut requests, of("few", 4096), 4096), [2]);
    assert_eq!(begin(&mut requests, of("many", 4097), 4097), [3]);
    assert!(requests.repeated(&of("few", 0), start).is_some() && requests.repeated(&of("many", 1), start).is_some());
}

#[test]
fn requests_apart_end_when_they_are_ended_or_forgotten() {
    let (mut requests, start) = (Requests::new(MINUTE), Instant::now());
    let (kept, dropped) = (Request::new(1), Request::new(2));
    requests.begin(decision("a", Verdict::Allow), Repeats::Separate, kept.clone(), start);
    requests.begin(decision("a", Verdict::Allow), Repeats::Separate, dropped.clone(), start);
    drop(dropped);
    let of = |ends: Vec<EntryKind>| -> Vec<(u64, String)> {
        let each = ends.into_iter().map(|end| match end {
            EntryKind::End { of, outcome, .. } => (of, outcome),
            other => panic!("{other:?}"),
        });
        each.collect()
    };
    assert_eq!(of(requests.ended(start, false)), [(2, "done".to_owned())]);
    kept.end("cancelled");
    kept.end("done");
    assert_eq!(of(requests.ended(start, false)), [(1, "cancelled".to_owned())]);
}

#[tokio::test]
async fn a_recorder_writes_before_it_answers_and_ends_what_goes_on() {
    let folder = folder();
    let recorder = recorder(folder.path());
    let request = recorder.record(decision("a", Verdict::Allow), Repeats::Merged).await.unwrap();
    assert_eq!((request.seq(), entries(folder.path()).len()), (2, 2));
    for _ in 0..10 {
        assert_eq!(recorder.record(decision("a", Verdict::Allow), Repeats::Merged).await.unwrap().seq(), 2);
    }
    assert!(request.moved(99));
    assert_eq!(recorder.record(decision("b", Verdict::Deny), Repeats::Merged).await.unwrap().seq(), 3);
    let head = recorder.close().await.unwrap();
    assert_eq!(
        recorder.record(decision("c", Verdict::Allow), Repeats::Separate).await.unwrap_err().kind(),
        ErrorKind::Unreachable
    );
    let entries = entries(folder.path());
    let end = EntryKind::End { of: 2, bytes: 99, requests: 11, outcome: "done".to_owned() };
    assert!(entries.len() == 5 && entries[3].what == end, "{entries:?}");
    assert_eq!(verify(texts(folder.path()).into_iter().map(Ok), &[head], 1).unwrap().published, Some(5));
    assert!(open(folder.path()).is_ok(), "the next process can have it");
}

/// L1 "a request whose entry cannot be written is refused"
#[tokio::test]
async fn who_cannot_be_recorded_is_refused() {
    let folder = folder();
    let mut journal = open(folder.path()).unwrap();
    journal.swap_file(OpenOptions::new().write(true).open("/dev/full").unwrap());
    let recorder = Recorder::of(journal, MINUTE, Arc::new(ManualClock::at(NOW))).unwrap();
    let error = recorder.record(decision("a", Verdict::Allow), Repeats::Merged).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(recorder.problem().unwrap().starts_with("disk full: cannot write the audit log"));
    assert!(recorder.record(decision("a", Verdict::Deny), Repeats::Merged).await.is_err());
}

#[tokio::test]
async fn heads_are_published_when_there_is_something_new() {
    let (folder, place) = (folder(), folder());
    let repository = repository(place.path()).await;
    let recorder = recorder(folder.path());
    let identity: Identity = ORIGIN.parse().unwrap();
    let sign: Signer = Arc::new(|bytes: &[u8]| Ok(blake3::hash(bytes).as_bytes().to_vec()));
    let mut publisher = Publisher::new(recorder.clone(), repository.clone(), identity.clone(), sign);
    recorder.record(decision("a", Verdict::Allow), Repeats::Separate).await.unwrap();
    let head = publisher.publish().await.unwrap().unwrap();
    // The end of a request that nobody holds was written with it.
    assert_eq!(head.seq, 3);
    assert_eq!(publisher.publish().await.unwrap(), None);
    recorder.record(decision("b", Verdict::Deny), Repeats::Merged).await.unwrap();
    let last = publisher.finish().await.unwrap().unwrap();

    let mut heads = Vec::new();
    published(&repository, &identity, None, |head| heads.push(head.unwrap())).await.unwrap();
    assert!(heads.iter().all(|signed| signed.signature == blake3::hash(&signed.head.encode()).as_bytes()));
    let heads: Vec<_> = heads.into_iter().map(|signed| signed.head).collect();
    assert_eq!(heads, [head, last.clone()]);
    let mut newest = Vec::new();
    published(&repository, &identity, Some(1), |head| newest.push(head.unwrap().head)).await.unwrap();
    assert_eq!(newest, std::slice::from_ref(&last));
    let findings = verify(texts(folder.path()).into_iter().map(Ok), &heads, 1).unwrap();
    assert_eq!((findings.faults.len(), findings.published), (0, Some(last.seq)));
    let other = Identity::new("west", "other").unwrap();
    published(&repository, &other, None, |head| panic!("{head:?}")).await.unwrap();
}

/// Another agent that can write to the repository.
#[derive(Default)]
struct Other(Mutex<Vec<SignedHead>>);

#[async_trait]
impl FallbackPublisher for Other {
    async fn publish(&self, head: &SignedHead) -> crate::Result<()> {
        self.0.lock().unwrap().push(head.clone());
        Ok(())
    }
}

#[tokio::test]
async fn a_head_that_the_repository_does_not_take_is_published_by_another() {
    let (folder, place) = (folder(), folder());
    let repository = repository(place.path()).await;
    // No object below audit/ can be created.
    fs::write(place.path().join("repository/audit"), "in its place").unwrap();
    let recorder = recorder(folder.path());
    recorder.record(decision("a", Verdict::Allow), Repeats::Merged).await.unwrap();
    let identity: Identity = ORIGIN.parse().unwrap();
    let sign: Signer = Arc::new(|_: &[u8]| Ok(vec![7]));
    let publisher = || Publisher::new(recorder.clone(), repository.clone(), identity.clone(), Arc::clone(&sign));
    assert!(publisher().publish().await.is_err());
    let other = Arc::new(Other::default());
    let elsewhere: Arc<dyn FallbackPublisher> = Arc::<Other>::clone(&other);
    let head = publisher().or_by(elsewhere).publish().await.unwrap().unwrap();
    assert_eq!(*other.0.lock().unwrap(), [SignedHead { head, signature: vec![7] }]);
}
