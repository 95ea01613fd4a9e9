//! Bases beside labels and policies: no name relies on what is stored as a difference for another one, and a sync brings no
//! bases of other names.

use std::collections::HashSet;
use std::fs;

use object_store::ObjectStoreExt as _;
use towline::codec::Codec;
use towline::ops::{SaveOptions, SyncOptions, sync};
use towline::policy::Labels;
use towline::repository::layout::{self, Family};
use towline::repository::{NameScope, Repository, Saved};

use crate::data::name;
use crate::differences::{Fixture, stored_by};

const RELEASE: &str = "pub/release";

/// A run with labels, whose second step is stored as differences, and a release with the same tensors that is stored whole.
async fn labelled() -> (Fixture, Repository) {
    let fixture = Fixture::new();
    fixture.save(1).await;
    fixture.save(2).await;
    let from = fixture.open().await;
    fs::write(fixture.path(2).join("card.md"), "the second step").unwrap();
    // A saver with limited rights relies on nobody's bases.
    let label_scope = NameScope::only(|name| name.as_str().starts_with("pub/"));
    let options = SaveOptions { label_scope, ..SaveOptions::default() };
    from.save(&fixture.path(2), &name(RELEASE), &options).await.unwrap();
    let labels = Labels::default().with("derived-from", "elsewhere").unwrap();
    from.tighten(&name("run"), &labels).await.unwrap();
    assert!(stored_by(&fixture.saved(2).await, Codec::Difference) > 0);
    assert_whole(&from).await;
    (fixture, from)
}

/// An open repository with a run, and a release that is stored as differences to the run's first step.
async fn open_source() -> (Fixture, Repository) {
    let fixture = Fixture::new();
    fixture.save(1).await;
    fixture.save(2).await;
    let from = fixture.open().await;
    fs::write(fixture.path(2).join("card.md"), "the second step").unwrap();
    from.save(&fixture.path(2), &name(RELEASE), &SaveOptions::default()).await.unwrap();
    let saved = from.saved(&name(RELEASE)).await.unwrap();
    assert!(stored_by(&saved, Codec::Difference) > 0 && has_further(&saved));
    (fixture, from)
}

/// True if the map lists chunks that the tree does not.
fn has_further(saved: &Saved) -> bool {
    !saved.map.further.is_empty()
}

async fn assert_whole(repository: &Repository) -> Saved {
    let saved = repository.saved(&name(RELEASE)).await.unwrap();
    assert_eq!(stored_by(&saved, Codec::Difference), 0, "{:?}", saved.map.frames);
    saved
}

/// D2: "no name that a sync brings or a repair mends relies on what is stored as a difference for another name."
#[tokio::test(flavor = "multi_thread")]
async fn a_sync_gives_no_name_the_bases_of_another() {
    let (_fixture, from) = labelled().await;
    let (at_once, later) = (Fixture::new(), Fixture::new());
    sync(&from, &at_once.open().await, &[], &SyncOptions::default()).await.unwrap();
    sync(&from, &later.open().await, &[name("run")], &SyncOptions::default()).await.unwrap();
    sync(&from, &later.open().await, &[], &SyncOptions::default()).await.unwrap();
    for to in [&at_once, &later] {
        assert!(stored_by(&to.saved(2).await, Codec::Difference) > 0, "its own stay");
        assert_whole(&to.open().await).await;
        assert!(to.verify(false).await.damaged.is_empty());
        let again = sync(&from, &to.open().await, &[], &SyncOptions::default()).await.unwrap();
        assert_eq!(again.moved_bytes, 0, "{again:?}");
    }
}

/// D2: "Where only the destination has them, a sync brings chunks whose base is outside their tree without it".
#[tokio::test(flavor = "multi_thread")]
async fn a_sync_to_a_policy_leaves_the_bases_of_other_names() {
    let (_fixture, from) = open_source().await;
    let to = Fixture::new();
    to.open().await.set_policy(1, "version = 1".into()).await.unwrap();
    let options = SyncOptions { as_stored: true, ..SyncOptions::default() };
    sync(&from, &to.open().await, &[name(RELEASE)], &options).await.unwrap();
    let saved = assert_whole(&to.open().await).await;
    assert!(!has_further(&saved), "{:?}", saved.map.further);
    assert!(to.verify(false).await.damaged.is_empty());
    let open = Fixture::new();
    sync(&from, &open.open().await, &[name(RELEASE)], &SyncOptions::default()).await.unwrap();
    assert!(has_further(&open.open().await.saved(&name(RELEASE)).await.unwrap()), "nobody is restricted there");
}

/// D2: "a save takes no differences of other names that it finds".
#[tokio::test(flavor = "multi_thread")]
async fn a_save_under_a_policy_takes_no_differences_of_other_names() {
    let fixture = Fixture::new();
    fixture.save(1).await;
    fixture.save(2).await;
    let repository = fixture.open().await;
    repository.set_policy(1, "version = 1".into()).await.unwrap();
    repository.save(&fixture.path(2), &name(RELEASE), &SaveOptions::default()).await.unwrap();
    let saved = assert_whole(&repository).await;
    assert!(!has_further(&saved), "{:?}", saved.map.further);
    fixture.save(3).await;
    assert!(stored_by(&fixture.saved(3).await, Codec::Difference) > 0, "a run still has its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_gives_no_name_the_bases_of_another() {
    let (fixture, from) = labelled().await;
    let (step, release) = (fixture.saved(2).await, assert_whole(&from).await);
    let differences = step.map.frames.iter().zip(&step.manifest.chunks.ids);
    let differences = differences.filter(|(frame, _)| frame.codec == Codec::Difference);
    let differences: HashSet<_> = differences.map(|(_, id)| *id).collect();
    let hit = release.manifest.chunks.ids.iter().position(|id| differences.contains(id)).unwrap();
    let frame = release.map.frames[hit];
    let pack = layout::owned(Family::Pack, release.map.pack(&frame).unwrap().id);
    let mut bytes = fixture.objects.get(&pack).await.unwrap().bytes().await.unwrap().to_vec();
    bytes[usize::try_from(frame.offset + u64::from(frame.stored_len) / 2).unwrap()] ^= 4;
    fixture.objects.put(&pack, bytes.into()).await.unwrap();
    let report = fixture.verify(true).await;
    assert!(!report.damaged.is_empty());
    assert_whole(&fixture.open().await).await;
}
