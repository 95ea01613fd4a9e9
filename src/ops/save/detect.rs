//! Format detection: the tensors of checkpoint files, so that they are cut there. Files of a distributed checkpoint need the metadata
//! beside them.

use std::collections::HashMap;
use std::error::Error as StdError;

use super::units::{check_unchanged, open};
use super::{CutChoice, files_of, sharded};
use crate::checkpoint::dcp::{self, METADATA_NAME, Metadata};
use crate::checkpoint::pickle::PICKLE_LEN_MAX;
use crate::checkpoint::sharded::Index;
use crate::checkpoint::{Layout, ReadAt, understand};
use crate::error::{Error, Result};
use crate::ops::shown;
use crate::tree::{Walk, WalkEntry};

/// Formats of the files of a tree.
#[derive(Debug)]
pub(super) struct Formats {
    pub(super) choice: CutChoice,
    /// Metadata of distributed checkpoints, each with its file.
    described: Vec<(usize, Metadata)>,
    /// By file: the metadata that describes it, and its path there.
    parts: HashMap<usize, (usize, String)>,
    /// Indexes of sharded checkpoints, each with its file.
    pub(super) indexes: Vec<(usize, Index)>,
}

impl Formats {
    /// Reads the metadata of distributed checkpoints and the indexes of sharded ones in the tree. Blocking.
    pub(super) fn new(walk: &Walk, choice: CutChoice) -> Self {
        let mut formats = Self { choice, described: Vec::new(), parts: HashMap::new(), indexes: Vec::new() };
        if !formats.at_tensors() || walk.is_file() {
            return formats;
        }
        for at in files_of(walk) {
            let Some(found) = walk.found.get(at) else { continue };
            match sharded::read(walk, found) {
                Ok(index) => formats.indexes.extend(index.map(|index| (at, index))),
                Err(error) => tracing::info!("ignoring an unreadable index: {error:?}"),
            }
            // Without a collective, each rank writes its own: `__<rank>.metadata`.
            if !found.path.ends_with(METADATA_NAME.as_bytes()) || found.stat.size > PICKLE_LEN_MAX {
                continue;
            }
            match metadata(walk, found) {
                Ok(metadata) => formats.take(walk, at, metadata),
                Err(error) => tracing::info!("ignoring unreadable metadata: {error:?}"),
            }
        }
        formats
    }

    fn take(&mut self, walk: &Walk, at: usize, metadata: Metadata) {
        let Some(found) = walk.found.get(at) else { return };
        let folder = found.path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        let folder = found.path.get(..folder).unwrap_or_default();
        for name in metadata.files() {
            let path = [folder, name.as_bytes()].concat();
            if let Ok(file) = walk.found.binary_search_by(|found| found.path.cmp(&path)) {
                self.parts.entry(file).or_insert_with(|| (self.described.len(), name.to_owned()));
            }
        }
        self.described.push((at, metadata));
    }

    /// True if files with tensors are cut at them.
    fn at_tensors(&self) -> bool {
        matches!(self.choice, CutChoice::Auto | CutChoice::Tensor)
    }

    /// Metadata file that is needed to understand `file`.
    pub(super) fn depends_on(&self, file: usize) -> Option<usize> {
        let (described, _) = self.parts.get(&file)?;
        self.described.get(*described).map(|(metadata, _)| *metadata)
    }

    /// Layout of `file`, of `len` bytes; None if its format is unknown: it is plain bytes then.
    pub(super) fn layout(&self, file: usize, read: ReadAt<'_>, len: u64) -> Option<Layout> {
        if !self.at_tensors() {
            return None;
        }
        let described = self.parts.get(&file).and_then(|(at, path)| Some((&self.described.get(*at)?.1, path)));
        if let Some((metadata, path)) = described {
            match metadata.layout(path, read, len) {
                Ok(layout) => return Some(layout),
                Err(error) => {
                    let why = chain(&error);
                    tracing::info!("a file of a distributed checkpoint is saved as plain bytes: {why}");
                    return None;
                }
            }
        }
        understand(read, len).unwrap_or_else(|error| {
            tracing::info!("a file of unknown format is saved as plain bytes: {}", chain(&error));
            None
        })
    }
}

/// Error message with its causes.
fn chain(error: &dyn StdError) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn metadata(walk: &Walk, found: &WalkEntry) -> Result<Metadata> {
    let refuse = |what| Error::other(what).at(shown(&found.path));
    let file = open(walk, found)?;
    let mut bytes = vec![0; usize::try_from(found.stat.size).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, 0)
        .map_err(|source| refuse("cannot read the metadata of a checkpoint").source(source))?;
    check_unchanged(&file, found)?;
    dcp::parse(&bytes).map_err(|source| refuse("not metadata of a distributed checkpoint").source(source))
}
