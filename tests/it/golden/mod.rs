//! The golden repository, tests/golden/v1: what docs/format.md says, in bytes that no later version may fail to read.

mod broken;
mod bundles;
mod inventory;
mod lengths;
mod listing;
mod make;
mod second;
mod stranger;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::Value;
use towline::format::envelope::{Kind, open, version};
use towline::format::{
    Manifest, Map, PackFooter, PackLayout, Row, SegmentView, TRAILER_LEN, pack_header, segment_bytes,
};
use towline::ops::RestoreOptions;
use towline::repository::log::{LogEntry, State};
use towline::repository::{RankPart, Repository};

pub(crate) use self::inventory::inventories;
use self::listing::listing;
use self::make::{directory, make, options};
pub(crate) use self::usage::reports_of_usage;
use crate::data::name;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1")
}

fn expected() -> Value {
    expected_in(&golden())
}

/// Expected contents of the repository in `folder`.
fn expected_in(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("expected.json")).unwrap()).unwrap()
}

/// Every object, by its key.
pub(crate) fn objects() -> BTreeMap<String, Bytes> {
    objects_in(&golden())
}

/// Every object of the second golden repository.
pub(crate) fn second_objects() -> BTreeMap<String, Bytes> {
    objects_in(&second::golden())
}

/// Every object of the golden repository of the second version of maps.
pub(crate) fn objects_with_lengths() -> BTreeMap<String, Bytes> {
    objects_in(&lengths::golden())
}

/// Every object of the golden repository of bundles.
pub(crate) fn objects_with_bundles() -> BTreeMap<String, Bytes> {
    objects_in(&bundles::golden())
}

/// Every object of the repository in `folder`.
fn objects_in(folder: &Path) -> BTreeMap<String, Bytes> {
    let root = folder.join("repository");
    let (mut all, mut left) = (BTreeMap::new(), vec![root.clone()]);
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            let key = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            all.insert(key, fs::read(&path).unwrap().into());
        }
    }
    all
}

/// A copy that may be written to: changed by the test, and by opening it.
fn copy(to: &Path) {
    copy_of(&golden(), to);
}

fn copy_of(folder: &Path, to: &Path) {
    for (key, bytes) in objects_in(folder) {
        let path = to.join(key);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

async fn repository(root: &Path) -> Repository {
    Repository::open(directory(&root.join("repository")).await, options(root)).await.unwrap()
}

async fn restored(repository: &Repository, from: &str, form: &str, to: &Path) -> BTreeMap<String, Value> {
    repository.restore(&name(from), None, to, &RestoreOptions::default()).await.unwrap();
    if form == "folder" {
        return listing(to);
    }
    listing(&fs::read_dir(to).unwrap().next().unwrap().unwrap().path())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_name_of_the_golden_repository_restores() {
    let dir = tempfile::tempdir().unwrap();
    copy(&dir.path().join("repository"));
    let repository = repository(dir.path()).await;
    let expected = expected();
    assert_eq!(repository.id().to_string(), expected["repository"]);
    let names: Vec<String> = repository.list(None).await.unwrap().into_iter().map(|listed| listed.name).collect();
    assert_eq!(names, expected["names"].as_object().unwrap().keys().cloned().collect::<Vec<_>>());
    for (nth, name_text) in names.iter().enumerate() {
        let wanted = &expected["names"][name_text];
        let saved = repository.saved(&name(name_text)).await.unwrap();
        assert_eq!(saved.value.manifest.to_string(), wanted["manifest"], "{name_text}");
        assert_eq!(serde_json::to_value(&saved.manifest.labels).unwrap(), wanted["labels"], "{name_text}");
        assert_eq!(serde_json::to_value(&saved.value.facts).unwrap(), wanted["facts"], "{name_text}");
        let form = wanted["form"].as_str().unwrap();
        let dest = dir.path().join(nth.to_string());
        fs::create_dir(&dest).unwrap();
        let found = restored(&repository, name_text, form, &dest).await;
        assert_eq!(serde_json::to_value(&found).unwrap(), wanted["entries"], "{name_text}");
    }
}

/// What decodes is encoded to the very same bytes: there is one way to write everything.
#[test]
fn golden_bodies_are_encoded_as_they_are_stored() {
    let mut seen = BTreeMap::<String, usize>::new();
    for (key, object) in objects() {
        let family = key.split('/').next().unwrap().to_owned();
        let body = |kind| open(kind, &object).unwrap();
        let (stored, again) = match family.as_str() {
            "log" => (body(Kind::Entry), LogEntry::decode(&body(Kind::Entry)).unwrap().encode()),
            "snapshot" => {
                (body(Kind::Snapshot), State::decode(version(&object), &body(Kind::Snapshot)).unwrap().encode())
            }
            "manifest" => (body(Kind::Manifest), Manifest::decode(&body(Kind::Manifest)).unwrap().encode().1),
            "map" => (body(Kind::Map), Map::decode(version(&object), &body(Kind::Map)).unwrap().encode()),
            "part" => (body(Kind::Part), RankPart::decode(&body(Kind::Part)).unwrap().encode()),
            "index" => {
                let view = SegmentView::parse(&object).unwrap();
                let rows: Vec<Row> = view.rows(&object).collect();
                (body(Kind::Segment), segment_bytes(&view.packs(&object).collect::<Vec<_>>(), rows))
            }
            "pack" => (tail(&object), repacked(&object)),
            _ => continue,
        };
        assert!(stored == again, "{key}");
        *seen.entry(family).or_default() += 1;
    }
    let families: Vec<&str> = seen.keys().map(String::as_str).collect();
    assert_eq!(families, ["index", "log", "manifest", "map", "pack", "part", "snapshot"], "{seen:?}");
}

/// Every way to store a chunk is in it.
#[test]
fn golden_packs_have_every_codec() {
    let packs = objects().into_iter().filter(|(key, _)| key.starts_with("pack/"));
    let footers = packs.map(|(_, pack)| PackFooter::decode(&tail(&pack), pack.len() as u64).unwrap());
    let codecs: BTreeSet<&str> = footers.flat_map(|footer| footer.entries).map(|entry| entry.codec.word()).collect();
    assert_eq!(codecs, ["derived", "difference", "planes", "raw", "zstd"].into());
}

/// The footer and trailer of a pack.
pub(crate) fn tail(pack: &Bytes) -> Bytes {
    let trailer = pack.len() - usize::try_from(TRAILER_LEN).unwrap();
    let footer = usize::try_from(PackFooter::len_from_trailer(&pack[trailer..]).unwrap()).unwrap();
    pack.slice(trailer - footer..)
}

/// The same, laid out again; frames lie where the layout wants them, and between them are zeros.
fn repacked(pack: &Bytes) -> Vec<u8> {
    let footer = PackFooter::decode(&tail(pack), pack.len() as u64).unwrap();
    assert_eq!(pack[..16], pack_header());
    let mut layout = PackLayout::new();
    for entry in &footer.entries {
        let end = usize::try_from(layout.len()).unwrap();
        let padding = layout.push(entry.id, (entry.codec, entry.base), entry.stored_len, entry.plain_len);
        let frame = end + usize::try_from(padding).unwrap();
        assert_eq!(entry.offset, frame as u64);
        assert!(pack[end..frame].iter().all(|&byte| byte == 0));
    }
    layout.finish().1
}

/// Both snapshots and the entries between them tell one story, and every action has a part in it.
#[test]
fn golden_log_folds_to_its_snapshots() {
    let objects = objects();
    let snapshot = |(key, object): (&String, &Bytes)| {
        key.starts_with("snapshot/")
            .then(|| State::decode(version(object), &open(Kind::Snapshot, object).unwrap()).unwrap())
    };
    let snapshots: Vec<State> = objects.iter().filter_map(snapshot).collect();
    let [first, last] = snapshots.as_slice() else { panic!("{} snapshots", snapshots.len()) };
    let (mut state, mut tags) = (first.clone(), BTreeSet::new());
    while let Some(object) = objects.get(&format!("log/{:020}", state.seq + 1)) {
        let entry = LogEntry::decode(&open(Kind::Entry, object).unwrap()).unwrap();
        tags.extend(
            entry.actions.iter().map(|action| format!("{action:?}").split(['(', ' ']).next().unwrap().to_owned()),
        );
        state.apply(&entry).unwrap();
        assert!(state.seq != last.seq || state == *last, "the later snapshot is what the entries make");
    }
    assert!(state.seq > last.seq, "entries follow the later snapshot");
    assert_eq!(tags.len(), 14, "{tags:?}");
}

/// Makes the golden repository in `folder` again, elsewhere, and returns its listing; or writes it anew, if that is asked for.
async fn remade(version: &str, folder: &Path, make: impl AsyncFnOnce(&Path, &Path) -> Value) -> Option<Value> {
    let dir = tempfile::tempdir().unwrap();
    if !rewrites(version) {
        return Some(make(&dir.path().join("repository"), dir.path()).await);
    }
    let target = folder.join("repository");
    if target.exists() {
        fs::remove_dir_all(&target).unwrap();
    }
    let made = make(&target, dir.path()).await;
    fs::write(folder.join("expected.json"), serde_json::to_string_pretty(&made).unwrap() + "\n").unwrap();
    None
}

/// True if the files of this version are to be written anew.
fn rewrites(version: &str) -> bool {
    std::env::var("TOWLINE_GOLDEN_WRITE").is_ok_and(|wanted| wanted == version)
}

/// Today's writer makes the same manifests of the same inputs; with `TOWLINE_GOLDEN_WRITE=1` it replaces the files.
#[tokio::test(flavor = "multi_thread")]
async fn golden_inputs_still_give_the_golden_manifests() {
    if let Some(made) = remade("1", &golden(), make).await {
        assert_eq!(made["names"], expected()["names"]);
    }
}
