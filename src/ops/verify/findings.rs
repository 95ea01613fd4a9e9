//! Findings, compared with the newest state, and reported with the names that they affect.

use std::collections::{BTreeMap, BTreeSet};

use object_store::path::Path;

use super::{Damage, Verifying};
use crate::budget::GrowingMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ManifestKey, MapKey, PackId, SegmentId};

/// Subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// The log, or the description of the repository.
    Log {
        /// True if nothing can be read because of it.
        all: bool,
    },
    /// An index segment: it affects new saves, not saved data.
    Segment(SegmentId),
    /// A manifest.
    Manifest(ManifestKey),
    /// A map.
    Map(MapKey),
    /// A whole pack.
    Pack(PackId),
    /// One chunk of a pack.
    Chunk(PackId, u32),
    /// A pack that is intact but not indexed.
    Unindexed(PackId),
}

/// One finding.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) subject: Subject,
    pub(super) what: String,
    pub(super) error: Error,
}

/// Maximum number of damaged chunks of one pack that are findings of their own; the others are one finding about the pack. A pack may
/// have a million chunks, and a failing disk damages many.
pub(super) const CHUNKS_MAX: usize = 32;
/// Maximum number of findings about whole objects; others are only counted. Once there are as many, none about a chunk is added.
const FINDINGS_MAX: usize = 2_000;
/// Bytes of memory of a subject, in the nodes of its tree.
const SUBJECT_WEIGHT: usize = 2 * size_of::<(Subject, bool)>();

/// All findings.
#[derive(Debug)]
pub(super) struct Findings {
    pub(super) all: Vec<Finding>,
    /// Damaged objects without a finding of their own, as there are too many; false, if a later version may have written them.
    pub(super) further: BTreeMap<Subject, bool>,
    /// Number of findings that are not about a chunk.
    objects: usize,
    /// Subjects of all findings, and of those that were dropped since.
    subjects: BTreeSet<Subject>,
    /// Number of findings about chunks of each pack; none, once there is one about the pack.
    chunks: BTreeMap<PackId, Option<usize>>,
    /// Memory of all but the findings.
    memory: GrowingMemory,
}

impl Findings {
    /// No findings; their subjects count in `memory`.
    pub(super) fn new(memory: GrowingMemory) -> Self {
        Self {
            all: Vec::new(),
            further: BTreeMap::new(),
            objects: 0,
            subjects: BTreeSet::new(),
            chunks: BTreeMap::new(),
            memory,
        }
    }

    /// Adds a finding, or only its subject, once there are many.
    ///
    /// # Errors
    /// Exhausted, if there is too little memory.
    pub(super) fn add(&mut self, subject: Subject, what: String, error: Error) -> Result<()> {
        self.memory.add(SUBJECT_WEIGHT as u64)?;
        if !matches!(subject, Subject::Chunk(..)) {
            if self.objects == FINDINGS_MAX {
                let certain = error.kind() != ErrorKind::Unsupported;
                *self.further.entry(subject).or_default() |= certain;
                return Ok(());
            }
            self.objects += 1;
        }
        self.subjects.insert(subject);
        self.all.push(Finding { subject, what, error });
        Ok(())
    }

    /// Adds a fault of the chunk `ordinal` of a pack, or of the pack, whose key is `key`.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(super) fn add_to_pack(&mut self, pack: PackId, key: &Path, ordinal: Option<u32>, error: Error) -> Result<()> {
        if !self.chunks.contains_key(&pack) {
            self.memory.add(SUBJECT_WEIGHT as u64)?;
        }
        let told = self.chunks.entry(pack).or_insert(Some(0));
        let Some(count) = told else { return Ok(()) };
        match ordinal {
            Some(ordinal) if *count < CHUNKS_MAX && self.all.len() < FINDINGS_MAX => {
                *count += 1;
                self.add(Subject::Chunk(pack, ordinal), format!("{key}, chunk {ordinal}"), error)
            }
            Some(_) => {
                *told = None;
                self.add(
                    Subject::Pack(pack),
                    key.to_string(),
                    Error::damaged("more chunks of it are damaged").source(error),
                )
            }
            None => {
                *told = None;
                self.add(Subject::Pack(pack), key.to_string(), error)
            }
        }
    }

    /// True if something was found about `subject`.
    pub(super) fn has(&self, subject: Subject) -> bool {
        self.subjects.contains(&subject) || self.further.contains_key(&subject)
    }

    /// Subjects of the findings.
    pub(super) fn subjects(&self) -> impl Iterator<Item = Subject> {
        self.all.iter().map(|finding| finding.subject)
    }

    /// Subjects of the findings, and those without one.
    pub(super) fn every_subject(&self) -> impl Iterator<Item = Subject> {
        self.subjects().chain(self.further.keys().copied())
    }

    /// Damaged packs, without those that a later version may have written.
    pub(super) fn damaged_packs(&self) -> BTreeSet<PackId> {
        let certain = self.all.iter().filter(|finding| finding.error.kind() != ErrorKind::Unsupported);
        let further = self.further.iter().filter(|(_, certain)| **certain);
        let pack = |subject: Subject| match subject {
            Subject::Pack(pack) | Subject::Chunk(pack, _) => Some(pack),
            _ => None,
        };
        let subjects = certain.map(|finding| finding.subject).chain(further.map(|(subject, _)| *subject));
        subjects.filter_map(pack).collect()
    }
}

impl Verifying<'_> {
    /// Drops findings that are explained by changes of other processes meanwhile; returns the rest.
    pub(super) async fn settle(&mut self) -> Result<Vec<Damage>> {
        if self.findings.all.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.repository.state().await?;
        self.names.retain(|name, value| now.refs.get(name).is_some_and(|still| still.map_key == value.map_key));
        let hits = self.hits().await?;
        let maps: BTreeSet<MapKey> = self.names.values().map(|value| value.map_key).collect();
        let manifests: BTreeSet<ManifestKey> = self.names.values().map(|value| value.manifest_key).collect();
        let users = &self.users;
        let used = |pack: &PackId| users.of(pack).any(|map| maps.contains(&map));
        // A purge whose record was dropped leaves no trace.
        let target = |pack: &PackId| now.is_target(pack) && now.forgotten == self.state.forgotten;
        let stays = |subject: Subject| match subject {
            Subject::Log { .. } => true,
            Subject::Segment(id) => now.segments.contains_key(&id),
            Subject::Manifest(key) => manifests.contains(&key),
            Subject::Map(key) => maps.contains(&key),
            Subject::Pack(pack) | Subject::Chunk(pack, _) => used(&pack) || target(&pack),
            Subject::Unindexed(pack) => used(&pack),
        };
        self.findings.all.retain(|finding| stays(finding.subject));
        self.findings.further.retain(|subject, _| stays(*subject));
        Ok(self.damage(&hits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::id::{Owned, SessionId};
    use crate::limits::MEMORY_MIN;

    fn findings() -> Findings {
        Findings::new(Budget::new(MEMORY_MIN).unwrap().keep_growing())
    }

    #[test]
    fn damage_of_very_many_objects_is_counted_in_bounded_memory() {
        let mut findings = findings();
        let session = SessionId::random();
        let packs: Vec<PackId> = (0..5_000).map(|_| Owned::fresh(session)).collect();
        for pack in &packs {
            findings.add(Subject::Pack(*pack), String::new(), Error::not_found("pack is gone")).unwrap();
        }
        assert_eq!((findings.all.len(), findings.further.len()), (FINDINGS_MAX, packs.len() - FINDINGS_MAX));
        assert!(packs.iter().all(|pack| findings.has(Subject::Pack(*pack))));
        assert_eq!((findings.every_subject().count(), findings.damaged_packs().len()), (packs.len(), packs.len()));
        let later = Owned::fresh(session);
        findings.add(Subject::Pack(later), String::new(), Error::unsupported("of a later version")).unwrap();
        assert!(findings.has(Subject::Pack(later)) && !findings.damaged_packs().contains(&later));
        let more = (0..1_000_000).map(|_| Subject::Map(Owned::fresh(session)));
        let error = more.map(|map| findings.add(map, String::new(), Error::damaged("map"))).find_map(Result::err);
        assert_eq!(error.unwrap().kind(), ErrorKind::Exhausted);
    }

    #[test]
    fn damage_of_very_many_chunks_is_that_of_their_packs() {
        let mut findings = findings();
        let key = Path::from("pack/a/b");
        let packs: Vec<PackId> = (0..100).map(|_| Owned::fresh(SessionId::random())).collect();
        for pack in &packs {
            for ordinal in 0..1_000 {
                let error = Error::damaged("chunk is not what its id says");
                findings.add_to_pack(*pack, &key, Some(ordinal), error).unwrap();
            }
        }
        let of = |pack: &PackId| {
            findings.subjects().filter(|subject| matches!(subject, Subject::Chunk(id, _) if id == pack)).count()
        };
        assert_eq!((of(&packs[0]), of(&packs[99])), (CHUNKS_MAX, 0));
        assert!(findings.subjects().count() <= FINDINGS_MAX + packs.len());
        let whole = findings.subjects().filter(|subject| matches!(subject, Subject::Pack(_))).count();
        assert_eq!((whole, findings.damaged_packs().len()), (100, 100));
    }
}
