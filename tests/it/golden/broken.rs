//! The golden repository broken in every way that the format can tell: each is found, and called what it is.
//! This is F8 of docs/semantics.md.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use towline::error::ErrorKind::{self, Damaged, NotFound, Unsupported};
use towline::format::envelope::{Kind, open, seal};
use towline::format::wire::Writer;
use towline::format::{Manifest, Map, PackRef, TRAILER_LEN};
use towline::id::{Owned, SessionId, WriteId};
use towline::ops::RestoreOptions;
use towline::repository::Repository;
use towline::repository::layout::{self, Family};
use towline::repository::log::{Action, LogEntry, RefValue};

use super::make::{directory, options};
use super::{copy, tail};
use crate::data::name;

/// The golden repository with the keys of what `tree-2` uses.
struct Golden {
    objects: BTreeMap<String, Bytes>,
    value: RefValue,
    pack: PackRef,
    /// The number of the next entry.
    next: u64,
}

/// Objects that are replaced (or removed, where there are no bytes).
type Changes = Vec<(String, Option<Bytes>)>;

async fn golden() -> Golden {
    let dir = tempfile::tempdir().unwrap();
    copy(&dir.path().join("repository"));
    let repository = super::repository(dir.path()).await;
    let saved = repository.saved(&name("tree-2")).await.unwrap();
    let pack = *saved.map.packs.iter().max_by_key(|pack| pack.len).unwrap();
    let next = repository.state().await.unwrap().seq + 1;
    Golden { objects: super::objects(), value: saved.value, pack, next }
}

impl Golden {
    fn get(&self, key: &str) -> Bytes {
        self.objects[key].clone()
    }

    fn body(&self, kind: Kind, key: &str) -> Vec<u8> {
        open(kind, &self.get(key)).unwrap().to_vec()
    }

    fn pack_key(&self) -> String {
        layout::owned(Family::Pack, self.pack.id).to_string()
    }

    fn map_key(&self) -> String {
        layout::owned(Family::Map, self.value.map_key).to_string()
    }

    fn manifest_key(&self) -> String {
        layout::owned(Family::Manifest, self.value.manifest_key).to_string()
    }

    /// The keys under `prefix`, the last first.
    fn under(&self, prefix: &str) -> Vec<String> {
        self.objects.keys().rev().filter(|key| key.starts_with(prefix)).cloned().collect()
    }

    fn entry(&self, body: &[u8]) -> Changes {
        vec![(format!("log/{:020}", self.next), Some(seal(Kind::Entry, body, true)))]
    }
}

/// Opens the changed repository and does everything that a reader does.
async fn read_all(changes: &Changes, golden: &Golden) -> towline::Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("repository");
    copy(&root);
    for (key, bytes) in changes {
        match bytes {
            Some(bytes) => fs::write(root.join(key), bytes).unwrap(),
            None => fs::remove_file(root.join(key)).unwrap(),
        }
    }
    let repository = Repository::open(directory(&root).await, options(dir.path())).await?;
    read(&repository, dir.path(), golden).await
}

async fn read(repository: &Repository, dir: &Path, golden: &Golden) -> towline::Result<()> {
    repository.indexed_state().await?;
    repository.footer_uncached(&golden.pack).await?;
    repository.restore(&name("tree-2"), None, &dir.join("dest"), &RestoreOptions::default()).await?;
    Ok(())
}

async fn check(golden: &Golden, cases: Vec<(&str, Changes, ErrorKind)>) {
    for (what, changes, expected) in cases {
        let error = read_all(&changes, golden).await.expect_err(what);
        assert_eq!(error.kind(), expected, "{what}: {error:?}");
    }
}

fn one(key: &str, bytes: impl Into<Bytes>) -> Changes {
    vec![(key.to_owned(), Some(bytes.into()))]
}

fn gone(key: &str) -> Changes {
    vec![(key.to_owned(), None)]
}

/// `bytes` with the byte at `at` (from the end if negative) changed by `change`.
fn bent(bytes: &[u8], at: isize, change: impl Fn(u8) -> u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let at = if at < 0 { bytes.len() - at.unsigned_abs() } else { at.unsigned_abs() };
    bytes[at] = change(bytes[at]);
    bytes
}

/// The same with the envelope's digest made to fit.
fn resealed(object: &[u8], at: isize, value: u8) -> Vec<u8> {
    let mut bytes = bent(object, at, |_| value);
    let end = bytes.len() - 32;
    let digest = blake3::hash(&bytes[..end]);
    bytes[end..].copy_from_slice(digest.as_bytes());
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn envelopes_of_another_kind_version_or_content() {
    let golden = golden().await;
    let keys = ["repository".to_owned(), golden.map_key(), golden.manifest_key(), golden.under("log/")[0].clone()];
    for key in &keys {
        let object = golden.get(key);
        let cases = vec![
            ("version 3", one(key, resealed(&object, 5, 3)), Unsupported),
            ("encrypted", one(key, resealed(&object, 6, 1)), Unsupported),
            ("compressed otherwise", one(key, resealed(&object, 7, 2)), Unsupported),
            ("another kind", one(key, resealed(&object, 4, b'x')), Damaged),
            ("another magic", one(key, resealed(&object, 0, b'x')), Damaged),
            ("another length", one(key, resealed(&object, 8, object[8] ^ 1)), Damaged),
            ("impossibly long", one(key, resealed(&object, 15, 1)), Damaged),
            ("flipped bit of the body", one(key, bent(&object, 20, |byte| byte ^ 1)), Damaged),
            ("flipped bit of the digest", one(key, bent(&object, -1, |byte| byte ^ 128)), Damaged),
            ("cut short", one(key, object.slice(..object.len() - 1)), Damaged),
            ("empty", one(key, Bytes::new()), Damaged),
        ];
        check(&golden, cases).await;
    }
    let mut body = golden.body(Kind::Repository, "repository");
    body.pop();
    let mut featured = Writer::new();
    featured.bytes(&body).count(1).string(b"telepathy");
    let featured = seal(Kind::Repository, &featured.into_bytes(), false);
    let cases = vec![("feature", one("repository", featured), Unsupported), ("none", gone("repository"), NotFound)];
    check(&golden, cases).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn packs_and_segments() {
    let golden = golden().await;
    let (key, pack) = (golden.pack_key(), golden.get(&golden.pack_key()));
    let tail_len = tail(&pack).len();
    let frame = 16;
    let trailer = |at: isize| at - isize::try_from(TRAILER_LEN).unwrap();
    let footer = |offset_from_end: usize, value: u8| {
        let mut bytes = bent(&pack, -isize::try_from(offset_from_end).unwrap(), |_| value);
        let (start, end) = (bytes.len() - tail_len, bytes.len() - 40);
        let digest = blake3::hash(&bytes[start..end]);
        bytes[end..end + 32].copy_from_slice(digest.as_bytes());
        bytes
    };
    // After the ids, offsets and lengths (48 bytes a chunk) come the codecs, then the parameters' lengths.
    let first_codec = tail_len - 4 - 48 * golden.pack.chunks as usize;
    let first_parameter = first_codec - golden.pack.chunks as usize;
    let cases = vec![
        ("truncated trailer", one(&key, pack.slice(..pack.len() - 10)), Damaged),
        ("flipped footer", one(&key, bent(&pack, trailer(-5), |byte| byte ^ 4)), Damaged),
        ("flipped digest", one(&key, bent(&pack, -20, |byte| byte ^ 4)), Damaged),
        ("flipped last byte", one(&key, bent(&pack, -1, |byte| byte ^ 4)), Unsupported),
        ("flipped frame", one(&key, bent(&pack, frame, |byte| byte ^ 4)), Damaged),
        ("version 2", one(&key, bent(&pack, -3, |_| 2)), Unsupported),
        ("encrypted", one(&key, bent(&pack, -2, |_| 1)), Unsupported),
        ("unknown codec", one(&key, footer(first_codec, 99)), Unsupported),
        ("shorter footer", one(&key, bent(&pack, trailer(0), |byte| byte ^ 1)), Damaged),
        ("parameters", one(&key, footer(first_parameter, 9)), Damaged),
        ("gone", gone(&key), NotFound),
    ];
    check(&golden, cases).await;
    let key = golden.under("index/")[0].clone();
    let segment = golden.get(&key);
    let cases = vec![
        ("version 2", one(&key, resealed(&segment, 5, 2)), Unsupported),
        ("compressed", one(&key, resealed(&segment, 7, 1)), Unsupported),
        ("truncated", one(&key, segment.slice(..segment.len() - 1)), Damaged),
        ("more entries", one(&key, resealed(&segment, 16, 99)), Damaged),
        ("another kind", one(&key, bent(&segment, 4, |_| b'M')), Damaged),
        ("gone", gone(&key), Damaged),
    ];
    check(&golden, cases).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn manifests_and_maps() {
    let golden = golden().await;
    let (map_key, manifest_key) = (golden.map_key(), golden.manifest_key());
    let map = Map::decode(1, &golden.body(Kind::Map, &map_key)).unwrap();
    let manifest = Manifest::decode(&golden.body(Kind::Manifest, &manifest_key)).unwrap();
    let changed = |change: &dyn Fn(&mut Map)| {
        let mut map = map.clone();
        change(&mut map);
        one(&map_key, map.seal())
    };
    let raw = |at: isize, value: u8| one(&map_key, seal(Kind::Map, &bent(&map.encode(), at, |_| value), true));
    let mut further = Writer::new();
    further.bytes(map.manifest.as_bytes()).count(0).count(0).count(1).bytes(&[0; 39]);
    let mut renamed = manifest.clone();
    renamed.labels.insert("a".into(), "b".into());
    let cases = vec![
        ("outside its pack", changed(&|map| map.frames[0].offset = map.packs[0].len), Damaged),
        ("outside all packs", changed(&|map| map.frames[0].pack = 77), Damaged),
        ("beyond its pack's chunks", changed(&|map| map.frames[0].ordinal = 7777), Damaged),
        ("of another chunk", changed(&|map| map.frames.swap(0, 1)), Damaged),
        ("too short", changed(&|map| map.frames.truncate(1)), Damaged),
        ("of another manifest", changed(&|map| map.manifest = towline::id::ManifestId::of(b"x")), Damaged),
        ("unknown codec", raw(-2, 99), Unsupported),
        ("difference without a base", raw(-2, 3), Damaged),
        ("base of what needs none", raw(-1, 1), Damaged),
        ("further chunk of no length", one(&map_key, seal(Kind::Map, &further.into_bytes(), false)), Damaged),
        ("map gone", gone(&map_key), Damaged),
        ("another manifest", one(&manifest_key, seal(Kind::Manifest, &renamed.encode().1, true)), Damaged),
        ("manifest gone", gone(&manifest_key), Damaged),
    ];
    check(&golden, cases).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_snapshots_and_boundaries() {
    let golden = golden().await;
    let entry = |actions: Vec<Action>| {
        let (write, at) = (WriteId::random(), towline::clock::Timestamp(0));
        golden.entry(&LogEntry { write, session: None, at, actions }.encode())
    };
    let mut unknown = Writer::new();
    unknown.bytes(&[7; 16]).u8(0).signed(0).count(1).u8(200).string(b"anything");
    let mut left_over = Writer::new();
    left_over.bytes(&[7; 16]).u8(0).signed(0).count(1).u8(1).string(&[7; 17]);
    let stale = Action::RemoveRef { name: name("tree"), expected: 1_000_000 };
    let strange = Action::Pardon { pack: Owned::fresh(SessionId::random()), at: 3 };
    let entries = golden.under("log/");
    let snapshots = golden.under("snapshot/");
    let [late, early] = snapshots.as_slice() else { panic!("{snapshots:?}") };
    let boundary = golden.under("boundary/")[0].clone();
    let mut longer = golden.body(Kind::Boundary, &boundary);
    longer.push(0);
    let cases = vec![
        ("unknown action", golden.entry(&unknown.into_bytes()), Unsupported),
        ("payload left over", golden.entry(&left_over.into_bytes()), Damaged),
        ("a ref that moved", entry(vec![stale]), Damaged),
        ("a pack that was not condemned", entry(vec![strange]), Damaged),
        ("an entry in another's place", one(&entries[0], golden.get(entries.last().unwrap())), Damaged),
        ("a snapshot in another's place", [one(early, golden.get(late)), gone(late)].concat(), Damaged),
        ("boundary left over", one(&boundary, seal(Kind::Boundary, &longer, false)), Damaged),
        ("no snapshot", [gone(late), gone(early)].concat(), Damaged),
    ];
    check(&golden, cases).await;
    // A newer snapshot that is damaged, or another's, costs only time.
    let damaged = bent(&golden.get(late), -1, |byte| byte ^ 1);
    read_all(&one(late, damaged), &golden).await.unwrap();
    read_all(&one(late, golden.get(early)), &golden).await.unwrap();
    let damaged = bent(&golden.get(early), -1, |byte| byte ^ 1);
    let both = [one(early, damaged), gone(late)].concat();
    assert_eq!(read_all(&both, &golden).await.unwrap_err().kind(), Damaged);
}
