//! Names that a program which may write to the store makes up.

use object_store::ObjectStoreExt as _;
use towline::clock::Timestamp;
use towline::format::envelope::{Kind, seal};
use towline::format::{EntryKind, Manifest, Map, TreeEntry};
use towline::id::{ManifestId, Owned, SessionId};
use towline::repository::Repository;
use towline::repository::layout::{self, Family};
use towline::repository::log::{Action, RefValue, StepFacts};

use crate::data::name;

/// The empty tree, in one folder.
pub(crate) fn empty_tree() -> Manifest {
    let root = TreeEntry { path: Vec::new(), mode: 0o755, mtime: Timestamp(0), kind: EntryKind::Folder };
    Manifest { entries: vec![root], ..Manifest::default() }
}

/// Names the manifest with the body `body` and the map `map` as `to`; their objects are of `session`, which is never opened.
pub(crate) async fn plant(repository: &Repository, to: &str, body: &[u8], map: &Map, session: SessionId) -> RefValue {
    let (manifest_key, map_key) = (Owned::fresh(session), Owned::fresh(session));
    let objects = repository.store().objects();
    let manifest_object = seal(Kind::Manifest, body, true);
    objects.put(&layout::owned(Family::Manifest, manifest_key), manifest_object.into()).await.unwrap();
    objects.put(&layout::owned(Family::Map, map_key), map.seal().into()).await.unwrap();
    let value = RefValue {
        version: 0,
        manifest: ManifestId::of(body),
        manifest_key,
        map_key,
        saved: Timestamp(0),
        logical_bytes: 0,
        files: 0,
        chunks: 0,
        behind: 0,
        facts: StepFacts::default(),
        attempt: None,
    };
    let set = Action::SetRef { name: name(to), expected: None, value: value.clone() };
    repository.log().commit(None, |_| Ok(vec![set.clone()])).await.unwrap();
    value
}
