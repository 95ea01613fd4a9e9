//! Result of a save.

use serde::Serialize;

use super::Saving;
use super::explain::Explained;
use super::short_list::ShortList;
use super::store::Counts;
use crate::ops::names::Replaced;
use crate::ops::shown;
use crate::repository::log::RefValue;

/// Warning for a repository that is saved as plain files.
const REPOSITORY_WARNING: &str =
    "a repository: if it is being written to, a commit may be saved in part; `towline sync` copies one whole";

/// Result of a save.
#[derive(Clone, Debug, Serialize)]
pub struct SaveReport {
    /// Name.
    pub name: String,
    /// Id of the manifest.
    pub manifest: String,
    /// Bytes in all files, holes included.
    pub logical_bytes: u64,
    /// Plain bytes of newly stored chunks.
    pub new_bytes: u64,
    /// Bytes of the packs written.
    pub stored_bytes: u64,
    /// Distinct chunks of the tree.
    pub chunks: u64,
    /// Chunks that were not in the repository.
    pub new_chunks: u64,
    /// Files.
    pub files: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Files that were found but not saved: path and reason.
    pub skipped: Vec<String>,
    /// Files that were saved with a warning: path and reason.
    pub warnings: Vec<String>,
    /// The previous value of the name, if it was replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
    /// Storage of each tensor with reasons, if requested. Files that look unchanged are not read, so they are not listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub explained: Vec<Explained>,
}

impl Saving<'_> {
    /// Report of a save whose name has `value` now.
    pub(super) fn report(&self, value: &RefValue, counts: Counts, stored_bytes: u64, seconds: f64) -> SaveReport {
        let (mut skipped, mut warnings) = (ShortList::default(), counts.lacking);
        for skip in &self.walk.skipped {
            skipped.push(|| format!("{}: {}", shown(&skip.path), skip.reason));
        }
        skipped.and_more(self.walk.more_skipped);
        for path in &self.walk.repositories {
            warnings.push(|| format!("{}: {REPOSITORY_WARNING}", shown(path)));
        }
        SaveReport {
            name: self.name.to_string(),
            manifest: value.manifest.to_string(),
            logical_bytes: value.logical_bytes,
            new_bytes: counts.new_bytes,
            stored_bytes,
            chunks: value.chunks,
            new_chunks: counts.new_chunks,
            files: value.files,
            seconds,
            skipped: skipped.into_entries(),
            warnings: self
                .name
                .step_warning()
                .into_iter()
                .chain(self.formats.warning())
                .chain(counts.unpredicted)
                .chain(self.formats.pointer_warning(&self.walk))
                .chain(warnings.into_entries())
                .collect(),
            replaced: None,
            explained: counts.explained,
        }
    }
}
