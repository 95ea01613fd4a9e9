//! Verify: a flipped bit anywhere is found and named with what it hits; repair and saving again heal.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::TryStreamExt as _;
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt as _};
use towline::ErrorKind;
use towline::ops::{CollectOptions, Damage, RestoreOptions, SaveOptions, SaveReport, VerifyOptions, VerifyReport};
use towline::repository::layout::{self, Family, Numbered};
use towline::repository::{OpenOptions, Repository};
use towline::storage::Store;

use crate::data::{name, noise};

/// A repository in memory, with what was saved to it.
struct Fixture {
    dir: tempfile::TempDir,
    objects: Arc<dyn ObjectStore>,
}

impl Fixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), objects: Arc::new(InMemory::new()) }
    }

    /// A handle that knows nothing yet.
    async fn open(&self) -> Repository {
        let options = OpenOptions {
            cache: Some(self.dir.path().join("cache")),
            memory: Some(64 << 20),
            ..OpenOptions::default()
        };
        Repository::create(Store::from_objects(Arc::clone(&self.objects)), options).await.unwrap().0
    }

    fn file(&self, file: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(file);
        fs::write(&path, bytes).unwrap();
        path
    }

    async fn save(&self, path: &Path, to: &str) -> SaveReport {
        self.open().await.save(path, &name(to), &SaveOptions::default()).await.unwrap()
    }

    async fn verify(&self, data: bool, repair: bool) -> VerifyReport {
        let options = VerifyOptions { data, repair, ..VerifyOptions::default() };
        self.open().await.verify(None, &options).await.unwrap()
    }

    async fn assert_sound(&self) {
        assert_eq!(self.verify(true, false).await.damaged, Vec::<Damage>::new());
    }

    async fn assert_restores(&self, saved: &str, expected: &[u8]) {
        let dest = self.dir.path().join("dest");
        let options = RestoreOptions { overwrite: true, ..RestoreOptions::default() };
        self.open().await.restore(&name(saved), None, &dest, &options).await.unwrap();
        assert!(fs::read(&dest).unwrap() == expected);
    }

    async fn keys(&self) -> Vec<Key> {
        let listed: Vec<_> = self.objects.list(None).try_collect().await.unwrap();
        listed.into_iter().map(|meta| meta.location).collect()
    }

    async fn bytes(&self, key: &Key) -> Vec<u8> {
        self.objects.get(key).await.unwrap().bytes().await.unwrap().to_vec()
    }

    async fn flip(&self, key: &Key, bit: usize) {
        let mut bytes = self.bytes(key).await;
        bytes[bit / 8] ^= 1 << (bit % 8);
        self.objects.put(key, bytes.into()).await.unwrap();
    }

    /// The same file under the names `a` and `b`; returns its bytes.
    async fn furnish(&self) -> Vec<u8> {
        let mut bytes = noise(1, 3_000_000);
        bytes.extend("text ".repeat(10_000).into_bytes());
        let shared = self.file("shared", &bytes);
        self.save(&shared, "a").await;
        self.save(&shared, "b").await;
        bytes
    }
}

fn hits(report: &VerifyReport) -> Vec<&str> {
    let mut names: Vec<&str> = report.damaged.iter().flat_map(|damage| &damage.names).map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn told<'a>(report: &'a VerifyReport, key: &Key) -> Option<&'a Damage> {
    report.damaged.iter().find(|damage| damage.what.starts_with(key.as_ref()))
}

/// Its entry would go on from the old log, and break the new one once that is as long.
#[tokio::test(flavor = "multi_thread")]
async fn a_writer_of_a_repository_that_was_made_anew_writes_nothing() {
    let fixture = Fixture::new();
    fixture.furnish().await;
    let old = fixture.open().await;
    old.state().await.unwrap();
    for key in fixture.keys().await {
        fixture.objects.delete(&key).await.unwrap();
    }
    let file = fixture.file("later", b"later");
    let save = async || old.save(&file, &name("later"), &SaveOptions::default()).await.unwrap_err();
    let gone = save().await;
    assert!(gone.to_string().contains("the repository is not there any more"), "{gone:?}");
    fixture.save(&file, "new").await;
    let keys = fixture.keys().await;
    let replaced = save().await;
    assert!(replaced.to_string().contains("another repository is there now"), "{replaced:?}");
    assert_eq!((gone.kind(), replaced.kind()), (ErrorKind::NotFound, ErrorKind::NotFound));
    assert_eq!(fixture.keys().await, keys);
    fixture.assert_restores("new", b"later").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_in_any_object_is_found_and_named() {
    let fixture = Fixture::new();
    fixture.furnish().await;
    let other = fixture.file("other", &noise(2, 200_000));
    fixture.save(&other, "c").await;
    let repository = fixture.open().await;
    for _ in 0..130 {
        repository.copy(&name("a"), &name("d")).await.unwrap();
        repository.remove(&name("d")).await.unwrap();
    }
    repository.log().truncate(64, None).await.unwrap();
    let state = repository.state().await.unwrap();
    assert_eq!(fixture.verify(true, false).await.damaged, Vec::<Damage>::new());
    let last_snapshot = state.seq / 64 * 64;
    let mut seen = std::collections::BTreeSet::new();
    for key in fixture.keys().await {
        let family = key.parts().next().unwrap().as_ref().to_owned();
        let number = Numbered::Entry.number(&key);
        if number.is_some_and(|number| number % 16 != 5 && number <= last_snapshot) {
            continue;
        }
        seen.insert(family.clone());
        let len = fixture.bytes(&key).await.len() * 8;
        let bits = (0..8).map(|i| if i == 0 { len - 1 } else { i * len / 8 + i });
        for bit in bits {
            fixture.flip(&key, bit).await;
            let options = VerifyOptions { data: true, ..VerifyOptions::default() };
            // Whoever has opened it before can still look; the others cannot even open a damaged description.
            let report = match family.as_str() {
                "repository" => repository.verify(None, &options).await.unwrap(),
                _ => fixture.verify(true, false).await,
            };
            let damage = told(&report, &key).unwrap_or_else(|| panic!("bit {bit} of {key}: {report:?}"));
            let expected = match family.as_str() {
                "log" if number > Some(last_snapshot) => {
                    assert!(["a", "b", "c"].iter().all(|hit| damage.names.iter().any(|name| name == hit)));
                    damage.names.iter().map(String::as_str).collect()
                }
                "log" | "index" => vec![],
                "repository" => vec!["a", "b", "c"],
                "manifest" | "map" => state
                    .refs
                    .iter()
                    .filter(|(_, value)| {
                        [layout::owned(Family::Manifest, value.manifest_key), layout::owned(Family::Map, value.map_key)]
                            .contains(&key)
                    })
                    .map(|(name, _)| name.as_str())
                    .collect(),
                _ => damage.names.iter().map(String::as_str).collect(),
            };
            assert_eq!(damage.names, expected, "bit {bit} of {key}: {damage:?}");
            if family == "pack" {
                assert!(!damage.names.is_empty(), "bit {bit} of {key}: {damage:?}");
            }
            fixture.flip(&key, bit).await;
        }
    }
    let kinds = ["boundary", "index", "log", "manifest", "map", "pack", "repository", "snapshot"];
    assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), kinds);
    fixture.assert_sound().await;
}

/// The pack that holds the first chunk of `a`, and where that chunk's frame starts.
async fn first_frame(fixture: &Fixture, saved: &str) -> (Key, usize, usize) {
    let saved = fixture.open().await.saved(&name(saved)).await.unwrap();
    let frame = saved.map.frames[0];
    let pack = saved.map.pack(&frame).unwrap();
    let len = usize::try_from(pack.len).unwrap();
    (layout::owned(Family::Pack, pack.id), usize::try_from(frame.offset).unwrap(), len)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_bit_of_a_pack_counts() {
    let fixture = Fixture::new();
    let small = fixture.file("small", &noise(5, 20));
    fixture.save(&small, "s").await;
    let (key, _, len) = first_frame(&fixture, "s").await;
    for bit in 0..len * 8 {
        fixture.flip(&key, bit).await;
        let report = fixture.verify(true, false).await;
        assert_eq!(told(&report, &key).map(|damage| damage.names.clone()), Some(vec!["s".to_owned()]), "bit {bit}");
        fixture.flip(&key, bit).await;
    }
    // Padding before a frame that starts at a page.
    let big = fixture.file("big", &noise(3, 300_000));
    fixture.save(&big, "p").await;
    let (key, offset, _) = first_frame(&fixture, "p").await;
    assert_eq!(offset, 4096);
    fixture.flip(&key, 2000 * 8).await;
    let report = fixture.verify(true, false).await;
    assert!(told(&report, &key).unwrap().error.contains("padding"), "{report:?}");
    assert_eq!(fixture.verify(false, false).await.damaged.len(), 0, "no structure is hit");
    fixture.verify(true, true).await;
    fixture.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_chunk_hits_its_names_and_saving_again_heals_them_all() {
    let fixture = Fixture::new();
    let bytes = fixture.furnish().await;
    let tail = bytes[2_000_000..].to_vec();
    let path = fixture.file("tail", &tail);
    fixture.save(&path, "tail").await;
    let (key, offset, _) = first_frame(&fixture, "a").await;
    fixture.flip(&key, (offset + 100) * 8).await;

    let report = fixture.verify(true, true).await;
    assert_eq!(hits(&report), ["a", "b"], "{report:?}");
    assert!(report.repaired.iter().any(|step| step.contains("condemned") && step.contains(key.as_ref())), "{report:?}");
    fixture.assert_restores("tail", &tail).await;
    let left = fixture.verify(false, false).await;
    assert_eq!(hits(&left), ["a", "b"], "the others were moved out of the pack: {left:?}");

    let shared = fixture.dir.path().join("shared");
    let again = fixture.save(&shared, "a").await;
    assert!((1..=2).contains(&again.new_chunks), "what could be rescued is used again: {again:?}");
    fixture.assert_restores("a", &bytes).await;
    assert_eq!(hits(&fixture.verify(true, true).await), ["b"]);
    fixture.assert_sound().await;
    fixture.assert_restores("b", &bytes).await;

    let collect = CollectOptions::at_once();
    fixture.open().await.collect(&collect).await.unwrap();
    assert!(!fixture.keys().await.contains(&key), "nothing needs the damaged pack any more");
    fixture.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_footer_costs_nothing() {
    let fixture = Fixture::new();
    let bytes = fixture.furnish().await;
    let (key, _, len) = first_frame(&fixture, "a").await;
    fixture.flip(&key, (len - 60) * 8).await;
    let report = fixture.verify(false, true).await;
    assert_eq!(hits(&report), ["a", "b"]);
    fixture.assert_sound().await;
    fixture.assert_restores("a", &bytes).await;
    assert_eq!(fixture.save(&fixture.dir.path().join("shared"), "again").await.new_chunks, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn segments_are_rebuilt() {
    let fixture = Fixture::new();
    fixture.furnish().await;
    for delete in [false, true] {
        let live = fixture.open().await.state().await.unwrap();
        let key = layout::owned(Family::Index, *live.segments.keys().next().unwrap());
        if delete {
            fixture.objects.delete(&key).await.unwrap();
        } else {
            fixture.flip(&key, 700).await;
        }
        let report = fixture.verify(false, true).await;
        assert!(told(&report, &key).is_some(), "{report:?}");
        assert!(!report.repaired.is_empty());
        fixture.assert_sound().await;
        assert_eq!(fixture.save(&fixture.dir.path().join("shared"), "again").await.new_chunks, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_or_cut_pack_is_missed_and_healed() {
    for cut in [false, true] {
        let fixture = Fixture::new();
        let bytes = fixture.furnish().await;
        let (key, ..) = first_frame(&fixture, "a").await;
        if cut {
            let whole = fixture.bytes(&key).await;
            fixture.objects.put(&key, whole[..1_000_000].to_vec().into()).await.unwrap();
        } else {
            fixture.objects.delete(&key).await.unwrap();
        }
        let report = fixture.verify(false, true).await;
        assert_eq!(hits(&report), ["a", "b"], "{report:?}");
        fixture.save(&fixture.dir.path().join("shared"), "a").await;
        fixture.verify(false, true).await;
        fixture.assert_sound().await;
        fixture.assert_restores("b", &bytes).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_can_be_made_again_and_a_manifest_cannot() {
    let fixture = Fixture::new();
    let bytes = fixture.furnish().await;
    let value = fixture.open().await.state().await.unwrap().refs[&name("a")].clone();
    fixture.objects.delete(&layout::owned(Family::Map, value.map_key)).await.unwrap();
    let report = fixture.verify(false, true).await;
    assert_eq!((hits(&report), report.repaired.len()), (vec!["a"], 1), "{report:?}");
    fixture.assert_sound().await;
    fixture.assert_restores("a", &bytes).await;

    fixture.flip(&layout::owned(Family::Manifest, value.manifest_key), 300).await;
    assert_eq!(hits(&fixture.verify(false, true).await), ["a"]);
    assert_eq!(hits(&fixture.verify(false, false).await), ["a"]);
    let only = fixture.open().await.verify(Some(&name("b")), &VerifyOptions::default()).await.unwrap();
    assert_eq!(only.damaged, Vec::<Damage>::new());
    fixture.save(&fixture.dir.path().join("shared"), "a").await;
    fixture.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_collectors_take_meanwhile_is_no_damage() {
    let fixture = Fixture::new();
    fixture.furnish().await;
    let churn = async {
        let repository = fixture.open().await;
        let collect = CollectOptions::at_once();
        for round in 0..20u64 {
            let path = fixture.file("churn", &noise(100 + round, 400_000));
            fixture.save(&path, "churn").await;
            repository.remove(&name("churn")).await.unwrap();
            repository.collect(&collect).await.unwrap();
        }
    };
    let look = async {
        loop {
            fixture.assert_sound().await;
        }
    };
    tokio::select! {
        () = churn => {}
        () = look => {}
    }
}
