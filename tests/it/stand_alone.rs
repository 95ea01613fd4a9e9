//! Trees that need no chunks of other names: copies that stand alone, and saves of those who may not read the others.

use towline::codec::Codec;
use towline::error::ErrorKind;
use towline::ops::{CollectOptions, RestoreOptions, SaveOptions, VerifyOptions};
use towline::repository::{NameScope, Saved};

use crate::data::{name, tree_digest};
use crate::differences::{Fixture, stored_by};

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_stands_alone_needs_no_other_names_chunks() {
    let fixture = Fixture::new();
    let repository = fixture.open().await;
    for number in [1, 2] {
        let step = name(&format!("run/step-{number}"));
        repository.save(&fixture.write(number), &step, &SaveOptions::default()).await.unwrap();
    }
    let (step, copy, alone) = (name("run/step-2"), name("copy"), name("alone"));
    repository.copy(&step, &copy).await.unwrap();
    let outside = |saved: &Saved| saved.map.further.len();
    assert!(outside(&repository.saved(&copy).await.unwrap()) > 0, "a step is stored as differences");
    let progress = towline::progress::Progress::default();
    let replaced = repository.copy_stand_alone(&step, &alone, false, &progress).await.unwrap();
    assert_eq!(replaced, None);
    let saved = repository.saved(&alone).await.unwrap();
    assert_eq!(outside(&saved), 0, "all that its chunks need is its own");
    assert_eq!(saved.value.manifest, repository.saved(&step).await.unwrap().value.manifest, "it is the same tree");
    let refused = repository.copy_stand_alone(&step, &alone, true, &progress).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict);
    assert!(repository.copy_stand_alone(&step, &alone, false, &progress).await.unwrap().is_some());

    repository.remove_all(&[name("run"), copy], true).await.unwrap();
    repository.collect(&CollectOptions::at_once()).await.unwrap();
    let dest = fixture.dir.path().join("restored");
    fixture.open().await.restore(&alone, None, &dest, &RestoreOptions::default()).await.unwrap();
    assert_eq!(tree_digest(&dest), tree_digest(&fixture.path(2)));
    let options = VerifyOptions { data: true, ..VerifyOptions::default() };
    assert!(fixture.open().await.verify(None, &options).await.unwrap().damaged.is_empty());
}

/// A saver with limited rights learns no chunk of other names by saving content that they hold.
#[tokio::test]
async fn a_limited_saver_gets_no_bases_of_other_names() {
    let world = Fixture::new();
    world.save(1).await;
    world.save(2).await;
    assert!(stored_by(&world.saved(2).await, Codec::Difference) > 0);
    let scope = || NameScope::only(|name| name.as_str().starts_with("other/"));
    let options = SaveOptions { label_scope: scope(), ..SaveOptions::default() };
    let repository = world.open().await;
    repository.save(&world.path(2), &name("other/step-2"), &options).await.unwrap();
    let other = repository.saved(&name("other/step-2")).await.unwrap();
    assert_eq!(stored_by(&other, Codec::Difference), 0, "its bases are chunks of run/step-1");
    // Steps of its own run are still bases, and are not stored again.
    repository.save(&world.write(3), &name("other/step-3"), &options).await.unwrap();
    let next = repository.saved(&name("other/step-3")).await.unwrap();
    assert!(stored_by(&next, Codec::Difference) > 0);
    let again = repository.save(&world.path(3), &name("other/step-3"), &options).await.unwrap();
    assert_eq!(again.stored_bytes, 0);
}
