//! Tests of what is held for whom.

use super::*;
use crate::placement::check_hint_id;

fn holds(warms: usize, held: usize) -> Holds {
    let holders = Holders { client: Client::at("/none"), agents: Vec::new(), repository: RepositoryId::random() };
    Holds::new(holders, HoldLimits { warms, held, stays: Duration::ZERO })
}

fn wanted(id: &str, missing: u64) -> Wanted {
    Wanted {
        id: id.to_owned(),
        site: "home".to_owned(),
        names: Arc::default(),
        asked: [0; 32],
        missing,
        at: Instant::now() + Duration::from_secs(1),
        estimate: (0.0, 0.0),
    }
}

/// A pass without calls, for needs of data that is there, by id and namespace.
fn pass(holds: &mut Holds, needs: &[(&str, &str)]) -> Vec<String> {
    let needs: Vec<_> = needs.iter().map(|(id, namespace)| (wanted(id, 0), (*namespace).to_owned())).collect();
    let now = Instant::now();
    holds.note(&needs, now);
    holds.release(now, BTreeSet::new);
    holds.begin(&needs, now);
    holds.by_id.values_mut().for_each(|hold| hold.state = HoldState::There(1));
    holds.by_id.keys().cloned().collect()
}

#[test]
fn the_same_data_at_a_site_is_held_once() {
    let names = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<BTreeSet<Name>>();
    let id = commitment_id("gates", "home", &names(&["a", "b"]));
    check_hint_id(&id).unwrap();
    assert_eq!(id, commitment_id("gates", "home", &names(&["b", "a", "a"])));
    assert_ne!(id, commitment_id("kueue", "home", &names(&["a", "b"])));
    for (site, other) in [("cloud", &["a", "b"][..]), ("home", &["a"]), ("home", &["a/b"])] {
        assert_ne!(id, commitment_id("gates", site, &names(other)));
    }
}

#[test]
fn a_namespace_has_half_of_the_slots() {
    let mut holds = holds(4, 256);
    let begin = |holds: &mut Holds, id: &str, namespace: &str| {
        let hold = Hold::new(wanted(id, 1), namespace.to_owned());
        holds.has_slot(namespace) && holds.by_id.insert(id.to_owned(), hold).is_none()
    };
    assert!(begin(&mut holds, "1", "a") && begin(&mut holds, "2", "a") && !begin(&mut holds, "3", "a"));
    assert!(begin(&mut holds, "4", "b") && begin(&mut holds, "5", "c") && !begin(&mut holds, "6", "d"));
    // Neither data that is there nor an agent that does not answer takes one.
    holds.by_id.get_mut("1").unwrap().state = HoldState::There(1);
    holds.by_id.get_mut("5").unwrap().state = HoldState::Failing(String::new());
    assert!(begin(&mut holds, "7", "a") && begin(&mut holds, "8", "d") && !begin(&mut holds, "9", "e"));
}

#[tokio::test]
async fn a_namespace_has_half_of_what_is_held_although_its_data_is_there() {
    let mut holds = holds(4, 4);
    let of_a = [("1", "a"), ("2", "a"), ("3", "a")];
    assert_eq!(pass(&mut holds, &of_a), ["1", "2"]);
    assert_eq!(holds.finding(&wanted("3", 0)), Finding::Queued(0));
    let of_both = [&of_a[..], &[("4", "b")]].concat();
    assert_eq!(pass(&mut holds, &of_both), ["1", "2", "4"]);
    assert_eq!(pass(&mut holds, &[&of_both[..], &[("5", "c"), ("6", "c")]].concat()), ["1", "2", "4", "5"]);
}

#[tokio::test]
async fn what_nobody_waits_for_gives_way() {
    let mut holds = holds(4, 4);
    pass(&mut holds, &[("1", "a"), ("2", "a"), ("4", "b"), ("5", "b")]);
    assert_eq!(pass(&mut holds, &[("4", "b"), ("5", "b")]), ["1", "2", "4", "5"], "it may be in use");
    // One of the namespace itself gives way, if its share is full, although others have idle holds.
    assert_eq!(pass(&mut holds, &[("5", "b"), ("6", "b")]), ["1", "2", "5", "6"]);
    assert_eq!(pass(&mut holds, &[("2", "a"), ("5", "b"), ("6", "b"), ("7", "c")]), ["2", "5", "6", "7"]);
    assert_eq!(pass(&mut holds, &[("2", "a"), ("5", "b"), ("6", "b"), ("7", "c"), ("8", "d")]).len(), 4);
}

#[tokio::test]
async fn a_hold_counts_to_a_namespace_that_waits_for_it() {
    let mut holds = holds(4, 4);
    pass(&mut holds, &[("1", "a"), ("1", "b")]);
    assert_eq!((holds.held_by("a"), holds.held_by("b")), (1, 0));
    pass(&mut holds, &[("1", "b")]);
    assert_eq!((holds.held_by("a"), holds.held_by("b")), (0, 1));
    // So the first namespace cannot make it give way while pods of the other start.
    assert_eq!(pass(&mut holds, &[("2", "a"), ("3", "a"), ("4", "a")]), ["1", "2", "3"]);
}

#[tokio::test]
async fn a_hold_stays_for_all_who_have_asked_for_it_in_whatever_words() {
    let mut holds = holds(4, 4);
    let spelt = |asked: u8| (Wanted { asked: [asked; 32], ..wanted("1", 0) }, "a".to_owned());
    let now = Instant::now();
    holds.begin(&[spelt(1)], now);
    holds.note(&[spelt(1), spelt(2)], now);
    let waits = |holds: &Holds| holds.by_id["1"].waits.clone();
    let uses = |waits: &Waits, asked: u8| waits.may_use(&BTreeSet::from([[asked; 32]]), Duration::ZERO);
    assert!(uses(&waits(&holds), 1) && uses(&waits(&holds), 2) && !uses(&waits(&holds), 3));
    // A call that was begun before changes nothing of it.
    let old = Hold::new(spelt(1).0, "a".to_owned());
    holds.busy.insert("1".to_owned());
    holds.calls.spawn(async move { ("1".to_owned(), Some(old)) });
    holds.settle(Instant::now() + CALL_MAX).await;
    assert!(uses(&waits(&holds), 2) && holds.busy.is_empty());
    // Of many spellings not all are kept, so it stays for those that are not.
    let many: Vec<_> = (3..=200).map(spelt).collect();
    holds.note(&many, Instant::now());
    let waits = waits(&holds);
    assert!(waits.asked.len() == ASKED_MAX && uses(&waits, 201));
}

#[test]
fn a_later_look_outvotes_what_a_holder_has_said() {
    let mut hold = Hold::new(wanted("", 0), "a".to_owned());
    hold.agent = Some((Client::at("/none"), true));
    assert!(!hold.takes_slot() && !hold.is_contradicted(&wanted("", 1)), "nothing is said yet");
    hold.state = HoldState::There(1);
    assert!(hold.is_contradicted(&wanted("", 1)) && !hold.is_contradicted(&wanted("", 0)));
    hold.doubt();
    assert!(hold.agent.as_ref().is_some_and(|(_, answered)| !answered) && hold.due <= Instant::now());
    // The holder has answered since.
    hold.confirmed = Instant::now() + Duration::from_secs(2);
    assert!(!hold.is_contradicted(&wanted("", 1)));
}
