//! Impact of damage: files and tensors that need a damaged object, including bases.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{Subject, Verifying, is_damage};
use crate::error::Result;
use crate::format::{Content, Manifest, Map, TensorEntry};
use crate::id::{MapKey, PackId};
use crate::ops::shown;
use crate::repository::log::RefValue;

/// Paths and tensors affected by each finding about a chunk or pack, by map.
pub(super) type Hits = BTreeMap<MapKey, BTreeMap<Subject, Vec<String>>>;

/// Maximum number of affected places for one finding and name.
const LISTED_MAX: usize = 100;
/// Maximum number of chunks to examine for them.
const LOOKS_MAX: usize = 1000;
/// Maximum number of tensors to compare with one chunk.
const EXAMINED_MAX: usize = 4096;
/// Maximum bytes of the affected places of all findings and maps: paths and names of tensors may be long.
const PLACES_BYTES_MAX: usize = 16 << 20;

/// Bytes that may still be used.
#[derive(Debug)]
pub(super) struct BytesLeft(usize);

impl BytesLeft {
    pub(super) fn new(bytes: usize) -> Self {
        Self(bytes)
    }

    /// Uses those of a text of `len` bytes; false if there are fewer, and from then on.
    pub(super) fn take(&mut self, len: usize) -> bool {
        let rest = self.0.checked_sub(size_of::<String>() + len);
        self.0 = rest.unwrap_or(0);
        rest.is_some()
    }
}

impl Verifying<'_> {
    /// Finds the names affected by the findings. Manifests and maps are read again, since damage is rare and names are many.
    pub(super) async fn hits(&self) -> Result<Hits> {
        let subjects: BTreeSet<Subject> = self.findings.subjects().collect();
        let about = |subject: &Subject| match *subject {
            Subject::Chunk(pack, _) | Subject::Pack(pack) => Some(pack),
            _ => None,
        };
        let packs: BTreeSet<PackId> = subjects.iter().filter_map(about).collect();
        let keys: BTreeSet<MapKey> = packs.iter().flat_map(|pack| self.users.of(pack)).collect();
        let values: BTreeMap<MapKey, &RefValue> = self.names.values().map(|value| (value.map_key, value)).collect();
        let (mut hits, mut left) = (Hits::new(), BytesLeft::new(PLACES_BYTES_MAX));
        for key in keys {
            let Some(value) = values.get(&key) else { continue };
            let map = match self.repository.map(key).await {
                Ok(map) => map,
                Err(error) if is_damage(&error) => continue,
                Err(error) => return Err(error),
            };
            let manifest = self.repository.manifest(value.manifest_key, value.manifest).await.unwrap_or_default();
            hits.insert(key, places(&manifest, needing(&map, &subjects), &mut left));
        }
        Ok(hits)
    }
}

/// For each chunk of the map, the `subjects` that it needs to be decoded; not more chunks for each than are examined. One pass, because
/// there may be many of both.
fn needing(map: &Map, subjects: &BTreeSet<Subject>) -> BTreeMap<u32, BTreeSet<Subject>> {
    let base = |number: u32| map.frames.get(number as usize)?.base();
    let (mut needing, mut told): (BTreeMap<u32, BTreeSet<Subject>>, BTreeMap<Subject, usize>) = Default::default();
    for number in 0..u32::try_from(map.frames.len()).unwrap_or(u32::MAX) {
        // A chunk, and all of its bases.
        for needed in std::iter::successors(Some(number), |&number| base(number)) {
            let Some(frame) = map.frames.get(needed as usize) else { continue };
            let Ok(pack) = map.pack(frame) else { continue };
            let about = [Subject::Pack(pack.id), Subject::Chunk(pack.id, frame.ordinal)];
            for subject in about.into_iter().filter(|subject| subjects.contains(subject)) {
                let told = told.entry(subject).or_default();
                *told += 1;
                if *told > LOOKS_MAX {
                    continue;
                }
                needing.entry(number).or_default().insert(subject);
            }
        }
    }
    needing
}

/// Paths of affected chunks in the tree, by finding. One pass over the tree, only for affected chunks: an untrusted tree may
/// repeat its chunks very often.
fn places(
    manifest: &Manifest,
    hit: BTreeMap<u32, BTreeSet<Subject>>,
    left: &mut BytesLeft,
) -> BTreeMap<Subject, Vec<String>> {
    let mut collector = HitCollector { hit, hits: BTreeMap::new(), left };
    let starts = starts(&manifest.chunks.lens);
    let start = |chunk: u32| starts.get(chunk as usize).copied().unwrap_or_default();
    for (entry, content) in manifest.files() {
        let (path, tensors) = (shown(&entry.path), Tensors::of(content));
        let mut at = 0;
        for piece in &content.pieces {
            at += piece.hole;
            let end = piece.first.saturating_add(piece.count);
            for chunk in collector.chunks(piece.first..end) {
                let from = at + start(chunk) - start(piece.first);
                collector.tell(chunk, &path, &tensors.within(from, from + start(chunk + 1) - start(chunk)));
            }
            at += start(end) - start(piece.first);
        }
    }
    collector.hits.into_iter().map(|(subject, hits)| (subject, hits.places)).collect()
}

/// Affected places, up to the maximum number.
struct HitCollector<'a> {
    /// Findings for each chunk that have not reached the maximum yet.
    hit: BTreeMap<u32, BTreeSet<Subject>>,
    hits: BTreeMap<Subject, HitPlaces>,
    left: &'a mut BytesLeft,
}

/// Places affected by one finding.
#[derive(Default)]
struct HitPlaces {
    places: Vec<String>,
    /// Number of chunks examined for them.
    looks: usize,
    /// True once no more are added.
    is_full: bool,
}

impl HitCollector<'_> {
    /// Affected chunks in `range`.
    fn chunks(&self, range: Range<u32>) -> Vec<u32> {
        self.hit.range(range).map(|(chunk, _)| *chunk).collect()
    }

    /// Records that `chunk` is in `tensors` of the file at `path`. Findings with the maximum number of places are dropped.
    fn tell(&mut self, chunk: u32, path: &str, tensors: &[&str]) {
        let Some(subjects) = self.hit.get_mut(&chunk) else { return };
        let found: Vec<String> = match tensors {
            [] => vec![path.to_owned()],
            tensors => tensors.iter().map(|tensor| format!("{path} {tensor}")).collect(),
        };
        subjects.retain(|subject| self.hits.entry(*subject).or_default().add(&found, self.left));
        if subjects.is_empty() {
            self.hit.remove(&chunk);
        }
    }
}

impl HitPlaces {
    /// Adds the places `found` of one chunk, while bytes are `left`; true if more can be added.
    fn add(&mut self, found: &[String], left: &mut BytesLeft) -> bool {
        if self.is_full {
            return false;
        }
        self.looks += 1;
        self.is_full = self.looks >= LOOKS_MAX;
        for place in found {
            if self.places.contains(place) {
                continue;
            }
            if self.places.len() == LISTED_MAX || !left.take(place.len()) {
                self.is_full = true;
                break;
            }
            self.places.push(place.clone());
        }
        if self.is_full {
            self.places.push("...".to_owned());
        }
        !self.is_full
    }
}

/// Starts of the chunks if all were concatenated, and the end of the last one.
fn starts(lens: &[u32]) -> Vec<u64> {
    let ends = lens.iter().scan(0, |at, &len| {
        *at += u64::from(len);
        Some(*at)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Tensors of a file, by place.
struct Tensors<'a> {
    /// Sorted by start; each with the greatest end of it and all before it.
    sorted: Vec<(&'a TensorEntry, u64)>,
}

impl<'a> Tensors<'a> {
    fn of(content: &'a Content) -> Self {
        let mut sorted: Vec<(&TensorEntry, u64)> = content.tensors.iter().map(|tensor| (tensor, 0)).collect();
        sorted.sort_by_key(|(tensor, _)| tensor.range.start);
        let mut greatest = 0;
        for (tensor, end) in &mut sorted {
            greatest = greatest.max(tensor.range.end);
            *end = greatest;
        }
        Self { sorted }
    }

    /// Names of tensors with bytes between two offsets, up to the maximum number.
    fn within(&self, start: u64, end: u64) -> Vec<&'a str> {
        let first = self.sorted.partition_point(|(_, greatest)| *greatest <= start);
        let last = self.sorted.partition_point(|(tensor, _)| tensor.range.start < end);
        // Examines only the tensors that begin nearest: an untrusted tree may have any number before them.
        let near = self.sorted.get(first..last).unwrap_or_default().iter().rev().take(EXAMINED_MAX);
        let overlapping = near.filter(|(tensor, _)| tensor.range.end > start);
        let mut names: Vec<&str> = overlapping.map(|(tensor, _)| tensor.name.as_str()).take(LISTED_MAX + 1).collect();
        names.reverse();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunker::Cut;
    use crate::clock::Timestamp;
    use crate::format::{ChunkList, EntryKind, Piece, TreeEntry};
    use crate::id::{ChunkId, Owned, SessionId};

    /// Findings about each chunk of a tree that repeats them without end.
    #[test]
    fn many_findings_about_a_tree_that_repeats_itself_are_told_in_one_pass() {
        let count = 2_000u32;
        let ids = (0..count).map(|n| ChunkId::of(&n.to_le_bytes())).collect();
        let chunks = ChunkList { ids, lens: vec![1 << 16; count as usize] };
        let pieces = vec![Piece { hole: 0, first: 0, count }; 100_000];
        let content = Content { size: u64::MAX, cut: Cut::Fixed, pieces, tensors: Vec::new() };
        let entry = TreeEntry { path: b"f".to_vec(), mode: 0, mtime: Timestamp(0), kind: EntryKind::File(content) };
        let manifest = Manifest { entries: vec![entry], chunks, ..Manifest::default() };
        let subject = || Subject::Pack(Owned::fresh(SessionId::random()));
        let hit = (0..count).map(|chunk| (chunk, [subject()].into())).collect();
        let mut left = BytesLeft::new(PLACES_BYTES_MAX);
        let all = places(&manifest, hit, &mut left);
        assert_eq!(all.len(), count as usize);
        assert!(all.values().all(|places| places == &["f", "..."]));
        let one = subject();
        let shared = (0..count).map(|chunk| (chunk, [one].into())).collect();
        assert_eq!(places(&manifest, shared, &mut left).into_values().collect::<Vec<_>>(), [["f", "..."]]);
    }

    #[test]
    fn places_of_all_findings_together_are_within_the_bytes() {
        let count = 100u32;
        let chunks = ChunkList { ids: vec![ChunkId::of(b"c"); count as usize], lens: vec![1; count as usize] };
        let file = |at: u32| {
            let content = Content {
                size: 1,
                cut: Cut::Fixed,
                pieces: vec![Piece { hole: 0, first: at, count: 1 }],
                tensors: Vec::new(),
            };
            let path = format!("{at:04}").into_bytes();
            TreeEntry { path, mode: 0, mtime: Timestamp(0), kind: EntryKind::File(content) }
        };
        let manifest = Manifest { entries: (0..count).map(file).collect(), chunks, ..Manifest::default() };
        let [early, late] = [(); 2].map(|()| Subject::Pack(Owned::fresh(SessionId::random())));
        let hit = (0..count).map(|chunk| (chunk, [if chunk < 60 { early } else { late }].into())).collect();
        let all = places(&manifest, hit, &mut BytesLeft::new(80 * (4 + size_of::<String>()) + 3));
        assert_eq!((all[&early].len(), all[&late].len()), (60, 21));
        assert_eq!(all[&late].last().unwrap(), "...");
    }
}
