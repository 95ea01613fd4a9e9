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
    /// What the findings hit: manifests and maps are read again, since damage is rare and names are many.
    pub(super) async fn hits(&self) -> Result<Hits> {
        let about = |subject: Subject| match subject {
            Subject::Chunk(pack, _) | Subject::Pack(pack) => Some((pack, subject)),
            _ => None,
        };
        let subjects: BTreeSet<(PackId, Subject)> = self.findings.subjects().filter_map(about).collect();
        let packs: BTreeSet<PackId> = subjects.iter().map(|(pack, _)| *pack).collect();
        let keys: BTreeSet<MapKey> = packs.iter().filter_map(|pack| self.users.get(pack)).flatten().copied().collect();
        let mut hits = Hits::new();
        for key in keys {
            let Some(value) = self.names.values().find(|value| value.map_key == key) else { continue };
            let map = match self.repository.map(key).await {
                Ok(map) => map,
                Err(error) if is_damage(&error) => continue,
                Err(error) => return Err(error),
            };
            let manifest = self.repository.manifest_body(value.manifest_key, value.manifest).await;
            let manifest = manifest.and_then(|body| Manifest::decode(&body)).unwrap_or_default();
            let felt = subjects.iter().filter_map(|(_, subject)| {
                let chunks = needing(&map, *subject);
                (!chunks.is_empty()).then(|| (*subject, places(&manifest, &chunks)))
            });
            hits.insert(key, felt.collect());
        }
        Ok(hits)
    }
}

/// The map's chunks that cannot be decoded without what the finding is about.
fn needing(map: &Map, subject: Subject) -> BTreeSet<u32> {
    let hit = |number: u32| {
        let frame = map.frames.get(number as usize)?;
        let pack = map.pack(frame).ok()?.id;
        Some(match subject {
            Subject::Pack(damaged) => pack == damaged,
            Subject::Chunk(damaged, ordinal) => (pack, frame.ordinal) == (damaged, ordinal),
            _ => false,
        })
    };
    let base = |number: u32| map.frames.get(number as usize)?.base();
    let mut chunks = BTreeSet::new();
    for number in 0..u32::try_from(map.frames.len()).unwrap_or(u32::MAX) {
        // A chunk, its base, and that one's.
        let mut chain = std::iter::successors(Some(number), |&number| base(number));
        if chain.any(|number| hit(number).unwrap_or(false)) {
            chunks.insert(number);
        }
    }
    chunks
}

/// Where `chunks` lie in the tree.
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
