//! Values of names and segments, as entries and states hold them.

use super::attempt::{Attempt, AttemptId, read_id, write_id};
use super::facts::StepFacts;
use super::fields::{read_manifest_id, read_owned, write_owned};
use crate::clock::Timestamp;
use crate::error::Result;
use crate::format::wire::{Read, Reader, Writer};
use crate::id::{ManifestId, ManifestKey, MapKey};

/// Value of a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RefValue {
    /// Entry that set it; writers write 0, and the fold sets it.
    pub version: u64,
    /// The saved tree.
    pub manifest: ManifestId,
    /// Key of the manifest.
    pub manifest_key: ManifestKey,
    /// Key of its map.
    pub map_key: MapKey,
    /// Time of the save, by the writer's clock.
    pub saved: Timestamp,
    /// Bytes in all files.
    pub logical_bytes: u64,
    /// Files.
    pub files: u64,
    /// Distinct chunks.
    pub chunks: u64,
    /// Number of saves since the key step that its differences refer to; 0 for a key step.
    pub behind: u32,
    /// Facts besides its bytes.
    pub facts: StepFacts,
    /// Attempt that saved it, if several ranks did.
    pub attempt: Option<AttemptId>,
}

/// Record of an index segment in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentInfo {
    /// Bytes of the object.
    pub len: u64,
    /// Packs it covers.
    pub packs: u64,
    /// Chunks it lists.
    pub chunks: u64,
    /// Entry up to which it lists no purged pack; writers write 0, and the fold sets it. For a session's own packs, the entry
    /// that opened the session.
    pub built: u64,
}

impl RefValue {
    /// True if `attempt` saved it.
    #[must_use]
    pub fn is_of(&self, attempt: &Attempt) -> bool {
        self.attempt.as_ref() == Some(&attempt.id)
            && (self.facts.ranks() == Some(attempt.ranks) || attempt.id.says_parts(attempt.ranks))
    }

    pub(in crate::repository) fn write(&self, out: &mut Writer) {
        out.bytes(self.manifest.as_bytes());
        write_owned(out, self.manifest_key);
        write_owned(out, self.map_key);
        out.signed(self.saved.0).varint(self.logical_bytes).varint(self.files).varint(self.chunks);
        out.varint(self.behind.into());
        self.facts.write(out);
        write_id(out, self.attempt.as_ref());
    }

    pub(in crate::repository) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            version: 0,
            manifest: read_manifest_id(reader)?,
            manifest_key: read_owned(reader)?,
            map_key: read_owned(reader)?,
            saved: Timestamp(reader.signed()?),
            logical_bytes: reader.varint()?,
            files: reader.varint()?,
            chunks: reader.varint()?,
            behind: reader.varint32()?,
            facts: StepFacts::read(reader)?,
            attempt: read_id(reader)?,
        })
    }
}

impl SegmentInfo {
    pub(super) fn write(&self, out: &mut Writer) {
        out.varint(self.len).varint(self.packs).varint(self.chunks);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Read<Self> {
        Ok(Self { len: reader.varint()?, packs: reader.varint()?, chunks: reader.varint()?, built: 0 })
    }
}
