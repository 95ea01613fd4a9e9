//! Looking into files: what a checkpoint holds, so that it is cut at its tensors; parts of a distributed one need the
//! metadata that lies beside them.

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
use crate::tree::{Found, Walk};

/// Format detection for the files of a tree.
#[derive(Debug)]
pub(super) struct Looking {
    pub(super) choice: CutChoice,
    /// The metadata of distributed checkpoints, each with the file that it came from.
    described: Vec<(usize, Metadata)>,
    /// The index that describes a file, and the file's path in it.
    parts: HashMap<usize, (usize, String)>,
    /// The indexes of sharded checkpoints, each with the file that it came from.
    pub(super) indexes: Vec<(usize, Index)>,
}

impl Looking {
    /// Reads all metadata of distributed checkpoints, and all indexes of sharded ones, in the tree. Blocks.
    pub(super) fn new(walk: &Walk, choice: CutChoice) -> Self {
        let mut looking = Self { choice, described: Vec::new(), parts: HashMap::new(), indexes: Vec::new() };
        if !looking.at_tensors() || walk.is_file() {
            return looking;
        }
        for at in files_of(walk) {
            let Some(found) = walk.found.get(at) else { continue };
            match sharded::read(walk, found) {
                Ok(index) => looking.indexes.extend(index.map(|index| (at, index))),
                Err(error) => tracing::info!("an index is not looked at: {error:?}"),
            }
            // Without a collective, each rank writes its own: `__<rank>.metadata`.
            if !found.path.ends_with(METADATA_NAME.as_bytes()) || found.stat.size > PICKLE_LEN_MAX {
                continue;
            }
            match metadata(walk, found) {
                Ok(metadata) => looking.take(walk, at, metadata),
                Err(error) => tracing::info!("not used to find tensors: {error:?}"),
            }
        }
        looking
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

    /// Whether files are cut at tensors where they have some.
    fn at_tensors(&self) -> bool {
        matches!(self.choice, CutChoice::Auto | CutChoice::Tensor)
    }

    /// The file without which it cannot be said what the file `file` holds.
    pub(super) fn depends_on(&self, file: usize) -> Option<usize> {
        let (described, _) = self.parts.get(&file)?;
        self.described.get(*described).map(|(metadata, _)| *metadata)
    }

    /// Layout of the file `file`, of `len` bytes; none if its format is unknown: then it is just bytes.
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
                    tracing::info!("a file that looks like parts of tensors is saved as plain bytes: {why}");
                    return None;
                }
            }
        }
        understand(read, len).unwrap_or_else(|error| {
            tracing::info!("a file that cannot be understood is saved as plain bytes: {}", chain(&error));
            None
        })
    }
}

/// Error message with its causes.
fn chain(error: &dyn StdError) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn metadata(walk: &Walk, found: &Found) -> Result<Metadata> {
    let refuse = |what| Error::other(what).at(shown(&found.path));
    let file = open(walk, found)?;
    let mut bytes = vec![0; usize::try_from(found.stat.size).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, 0).map_err(|source| refuse("read the metadata of a checkpoint").source(source))?;
    check_unchanged(&file, found)?;
    dcp::parse(&bytes).map_err(|source| refuse("no metadata of a distributed checkpoint").source(source))
}
