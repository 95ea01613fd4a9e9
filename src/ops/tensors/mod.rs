//! Tensors of a saved tree: listing them, and reading just the chunks that hold what is asked for, into buffers of the
//! caller's ([`Repository::read_tensors`]) or into one file ([`Repository::restore_tensors`]).

mod delivery;
mod file;
mod globals;
mod reading;
mod selector;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub use self::delivery::{TensorSink, TensorsRead};
pub use self::file::{RestoreTensorsOptions, RestoreTensorsReport, TENSORS_FILE};
pub use self::reading::{TensorReading, WantedTensor};
pub use self::selector::TensorSelector;

use self::globals::{Global, globals};
use self::selector::Index;
use super::shown;
use crate::error::Result;
use crate::repository::{Name, Repository};

/// A tensor of a saved tree; one that lies in parts in several files is one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorListed {
    /// Its name.
    pub name: String,
    /// Its element type, as safetensors spells it.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: u64,
    /// In how many parts it lies; 1 if it is in one piece.
    pub parts: u64,
    /// The file that holds it, or the folder of the files that hold its parts; bytes that are not UTF-8 are replaced.
    pub path: String,
}

impl Repository {
    /// The tensors of the tree `name` that any of `selectors` selects, or all without one; in the order of files and of where
    /// they lie in them.
    ///
    /// # Errors
    /// Not found, if there is no such name, or a selector selects nothing.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn tensors(&self, name: &Name, selectors: &[TensorSelector]) -> Result<Vec<TensorListed>> {
        let saved = self.saved(name).await?;
        let globals = globals(&saved.manifest);
        let (mut index, mut listed) = (Index::default(), vec![selectors.is_empty(); globals.len()]);
        for selector in selectors {
            for at in index.matching(&globals, selector, name, None)? {
                if let Some(listed) = listed.get_mut(at) {
                    *listed = true;
                }
            }
        }
        Ok(globals.iter().zip(listed).filter(|(_, listed)| *listed).map(|(global, _)| describe(global)).collect())
    }
}

fn describe(global: &Global<'_>) -> TensorListed {
    TensorListed {
        name: global.name.to_owned(),
        dtype: global.dtype.word().to_owned(),
        shape: global.shape.to_vec(),
        bytes: global.bytes(),
        parts: global.parts.len() as u64,
        path: shown(global.path),
    }
}
