//! Tensors of a saved tree: lists them, and reads only the chunks needed for requested boxes, into buffers of the caller
//! ([`Repository::read_tensors`]), to a file ([`Repository::restore_tensors`]), into memory that the processes of a node share
//! ([`Repository::stage_tensors`]), or to a GPU ([`Repository::read_tensors_to_new`]).

mod delivery;
mod device;
mod file;
mod globals;
mod reading;
mod selector;
mod stage;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub use self::delivery::{TensorSink, TensorsRead};
pub use self::device::{DecodeOn, DeviceRange, DeviceRead, DeviceTensors, PINNED_MAX};
pub use self::file::{RestoreTensorsOptions, RestoreTensorsReport, TENSORS_FILE};
pub use self::reading::{TensorReading, WantedTensor};
pub use self::selector::TensorSelector;

use self::globals::{Global, globals};
use self::reading::listed_len;
use self::selector::Index;
use super::shown;
use crate::error::{Error, Result};
use crate::limits::MIB;
use crate::name::Name;
use crate::repository::Repository;

/// A tensor of a saved tree; all parts in several files are one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorListed {
    /// Name.
    pub name: String,
    /// Element type, as safetensors spells it.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// Bytes.
    pub bytes: u64,
    /// Number of parts; 1 for a tensor in one file.
    pub parts: u64,
    /// File, or the folder of the files with its parts; bytes that are not UTF-8 are replaced.
    pub path: String,
}

impl Repository {
    /// Tensors of the tree `name` that any of `selectors` selects (without selectors: all), in the order of files and of their
    /// places.
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
        let chosen: Vec<&Global<'_>> =
            globals.iter().zip(listed).filter(|(_, listed)| *listed).map(|(global, _)| global).collect();
        let bytes = chosen.iter().fold(0_usize, |sum, global| sum.saturating_add(listed_len(global)));
        if bytes as u64 > self.budget().kept_max() {
            return Err(Error::exhausted("list of the tensors takes too much memory")
                .at(name)
                .expected(format!("at most {} MiB, half of the memory budget", self.budget().kept_max() / MIB))
                .got(format!("{} tensors", chosen.len()))
                .help("choose fewer tensors at a time, or raise --memory"));
        }
        Ok(chosen.into_iter().map(describe).collect())
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
