//! What damage is felt as: the files and tensors of names that need what is damaged, bases included.

use std::collections::{BTreeMap, BTreeSet};

use super::{Subject, Verifying, is_damage};
use crate::error::Result;
use crate::format::{Content, EntryKind, Manifest, Map};
use crate::id::{MapKey, PackId};
use crate::ops::shown;

/// By map, what of its tree each finding about a chunk or pack hits: paths, with the tensor where there is one.
pub(super) type Hits = BTreeMap<MapKey, BTreeMap<Subject, Vec<String>>>;

/// Places told of one finding and name, at most.
const TOLD_MAX: usize = 100;

impl Verifying<'_> {
    /// Names that the findings hit: manifests and maps are read again, since damage is rare and names are many.
    pub(super) async fn hits(&self) -> Result<Hits> {
        let subjects: BTreeSet<Subject> = self.findings.subjects().collect();
        let about = |subject: &Subject| match *subject {
            Subject::Chunk(pack, _) | Subject::Pack(pack) => Some(pack),
            _ => None,
        };
        let packs: BTreeSet<PackId> = subjects.iter().filter_map(about).collect();
        let keys: BTreeSet<MapKey> = packs.iter().filter_map(|pack| self.users.get(pack)).flatten().copied().collect();
        let mut hits = Hits::new();
        for key in keys {
            let Some(value) = self.names.values().find(|value| value.map_key == key) else { continue };
            let map = match self.repository.map(key).await {
                Ok(map) => map,
                Err(error) if is_damage(&error) => continue,
                Err(error) => return Err(error),
            };
            let manifest = self.repository.manifest(value.manifest_key, value.manifest).await.unwrap_or_default();
            let felt = needing(&map, &subjects).into_iter();
            let felt = felt.map(|(subject, chunks)| (subject, places(&manifest, &chunks)));
            hits.insert(key, felt.collect());
        }
        Ok(hits)
    }
}

/// For each of `subjects`, the map's chunks that cannot be decoded without what it is about. One pass: both may be many.
fn needing(map: &Map, subjects: &BTreeSet<Subject>) -> BTreeMap<Subject, BTreeSet<u32>> {
    let base = |number: u32| map.frames.get(number as usize)?.base();
    let mut needing: BTreeMap<Subject, BTreeSet<u32>> = BTreeMap::new();
    for number in 0..u32::try_from(map.frames.len()).unwrap_or(u32::MAX) {
        // A chunk, its base, and that one's.
        for needed in std::iter::successors(Some(number), |&number| base(number)) {
            let Some(frame) = map.frames.get(needed as usize) else { continue };
            let Ok(pack) = map.pack(frame) else { continue };
            let about = [Subject::Pack(pack.id), Subject::Chunk(pack.id, frame.ordinal)];
            for subject in about.into_iter().filter(|subject| subjects.contains(subject)) {
                needing.entry(subject).or_default().insert(number);
            }
        }
    }
    needing
}

/// Paths of `chunks` in the tree.
fn places(manifest: &Manifest, chunks: &BTreeSet<u32>) -> Vec<String> {
    let mut places: Vec<String> = Vec::new();
    for entry in &manifest.entries {
        let EntryKind::File(content) = &entry.kind else { continue };
        let name = entry.path.as_slice();
        let hit = content.placed(&manifest.chunks).filter(|(chunk, _)| chunks.contains(chunk));
        for (_, range) in hit {
            let tensors = within(content, range.start, range.end);
            let path = shown(name);
            let told = tensors.map(|tensor| format!("{path} {tensor}")).collect::<Vec<_>>();
            let told = if told.is_empty() { vec![path] } else { told };
            places.extend(told.into_iter().filter(|place| !places.contains(place)).collect::<Vec<_>>());
            if places.len() > TOLD_MAX {
                places.truncate(TOLD_MAX);
                places.push("...".to_owned());
                return places;
            }
        }
    }
    places
}

/// The tensors of a file that have bytes between two offsets.
fn within(content: &Content, start: u64, end: u64) -> impl Iterator<Item = &str> {
    let overlaps = move |range: &std::ops::Range<u64>| range.start < end && start < range.end;
    content.tensors.iter().filter(move |tensor| overlaps(&tensor.range)).map(|tensor| tensor.name.as_str())
}
