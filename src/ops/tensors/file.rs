//! Restoring tensors into one safetensors file.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::delivery::TensorSink;
use super::reading::{TensorReading, WantedTensor};
use super::selector::TensorSelector;
use crate::checkpoint::header::{NewFile, NewTensor, lay_out};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::{Repository, SourceBytes};
use crate::tree::{Durability, Staged, Target};
use crate::work::blocking;

/// File name if the destination is a folder.
pub const TENSORS_FILE: &str = "tensors.safetensors";
/// Permission bits of the file.
const MODE: u32 = 0o644;

/// Options of a restore of tensors.
#[derive(Clone, Debug, Default)]
pub struct RestoreTensorsOptions {
    /// Replace an existing file.
    pub overwrite: bool,
    /// Only report what would be done: nothing is written.
    pub dry_run: bool,
    /// Progress counters.
    pub progress: Progress,
}

/// Result of a restore of tensors, or of a dry run.
#[derive(Clone, Debug, Serialize)]
pub struct RestoreTensorsReport {
    /// True for a dry run: the numbers are those of a later restore.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// The name.
    pub name: String,
    /// The file that was written.
    pub file: String,
    /// True if another file was replaced.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub replaced: bool,
    /// Tensors in it.
    pub tensors: u64,
    /// Bytes of the tensors.
    pub bytes: u64,
    /// Stored bytes that were fetched.
    pub fetched_bytes: u64,
    /// The same, by where they came from.
    pub sources: SourceBytes,
    /// Chunks that were read.
    pub chunks: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Repository {
    /// Writes the tensors that `selectors` select in the tree `name`, or below its path `below`, to one safetensors file:
    /// [`TENSORS_FILE`] in the folder `dest`, or `dest` itself if that ends in `.safetensors` and is no folder.
    ///
    /// # Errors
    /// As [`Repository::choose_tensors`] and [`Repository::read_tensors`]; usage, if two tensors of one name are selected;
    /// unsupported, if safetensors lacks the type of one; conflict, if the file is there.
    ///
    /// # Cancel safety
    /// Safe: the file is complete or absent.
    #[tracing::instrument(skip_all)]
    pub async fn restore_tensors(
        &self,
        name: &Name,
        below: Option<&[u8]>,
        selectors: &[TensorSelector],
        dest: &Path,
        options: &RestoreTensorsOptions,
    ) -> Result<RestoreTensorsReport> {
        let begun = Instant::now();
        options.progress.phase("opening", 0);
        let reading = Arc::new(self.choose_tensors(name, below, selectors).await?);
        let laid = laid_out(&reading)?;
        let path = path_of(dest);
        let report = RestoreTensorsReport {
            dry_run: options.dry_run,
            name: name.to_string(),
            file: path.display().to_string(),
            replaced: false,
            tensors: reading.tensors().len() as u64,
            bytes: reading.bytes(),
            fetched_bytes: 0,
            sources: SourceBytes::default(),
            chunks: reading.chunk_count(),
            seconds: 0.0,
        };
        if options.dry_run {
            let replaced = path.symlink_metadata().is_ok();
            if replaced && !options.overwrite {
                return Err(in_the_way(&path));
            }
            let fetched_bytes = self.plan_tensors(&reading)?;
            return Ok(RestoreTensorsReport {
                replaced,
                fetched_bytes,
                seconds: begun.elapsed().as_secs_f64(),
                ..report
            });
        }
        let (overwrite, NewFile { header, starts, len }) = (options.overwrite, laid);
        let begun_at = path.clone();
        let FileInProgress { staged, file, replaced } =
            blocking(move || begin(&begun_at, &header, len, overwrite)).await?;
        let sink = Arc::new(FileSink { file, starts, path: path.clone() });
        let read = self.read_tensors(&reading, sink, &options.progress).await?;
        let now = self.clock().now();
        blocking(move || staged.finish(MODE, now)).await?;
        let (fetched_bytes, sources, seconds) = (read.fetched_bytes, read.sources, begun.elapsed().as_secs_f64());
        Ok(RestoreTensorsReport { replaced, fetched_bytes, sources, seconds, ..report })
    }
}

/// Layout of the file of the reading's tensors.
fn laid_out(reading: &TensorReading) -> Result<NewFile> {
    let mut by_name: Vec<&WantedTensor> = reading.tensors().iter().collect();
    by_name.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some([one, other]) = by_name.array_windows().find(|[one, other]| one.name == other.name) {
        let refused = if one.path == other.path {
            Error::usage("a tensor is asked for as two different boxes").help("restore them into two files")
        } else {
            let help = format!("say of which file, as in '{}:{}'", one.path, one.name);
            Error::usage("two files hold a tensor of this name").got(format!("{}, {}", one.path, other.path)).help(help)
        };
        return Err(refused.at(&one.name));
    }
    let new = reading.tensors().iter().map(|tensor| NewTensor {
        name: &tensor.name,
        dtype: &tensor.dtype,
        shape: &tensor.shape,
        len: tensor.bytes,
    });
    lay_out(&new.collect::<Vec<_>>(), &BTreeMap::new())
}

/// Path of the file for `dest`.
fn path_of(dest: &Path) -> PathBuf {
    let is_file = dest.extension().is_some_and(|extension| extension == "safetensors") && !dest.is_dir();
    let is_file = is_file && !dest.as_os_str().as_bytes().ends_with(b"/");
    if is_file { dest.to_owned() } else { dest.join(TENSORS_FILE) }
}

fn in_the_way(path: &Path) -> Error {
    Error::conflict("the file is there already")
        .at(path.display())
        .help("--overwrite replaces it; or name another folder")
}

/// A file that is being written.
struct FileInProgress {
    staged: Staged,
    file: File,
    /// True if it replaces an existing file.
    replaced: bool,
}

/// Begins the file, with its header.
fn begin(path: &Path, header: &[u8], len: u64, overwrite: bool) -> Result<FileInProgress> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = path.file_name().map(OsStr::as_bytes).unwrap_or_default();
    let target = Target::open(folder, Durability::Process)?;
    target.sweep()?;
    let replaced = target.kind_of(file)?.is_some();
    if replaced && !overwrite {
        return Err(in_the_way(path));
    }
    let staged = target.stage(file, len)?;
    let failed = |source| Error::io("cannot write a file", path, source);
    staged.file().write_all_at(header, 0).map_err(failed)?;
    let file = staged.file().try_clone().map_err(failed)?;
    Ok(FileInProgress { staged, file, replaced })
}

/// Writes tensors to their places in a file.
struct FileSink {
    file: File,
    starts: Vec<u64>,
    path: PathBuf,
}

impl TensorSink for FileSink {
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let start = self.starts.get(tensor).ok_or_else(|| Error::other("a tensor has no place in its file"))?;
        let written = self.file.write_all_at(bytes, start + offset);
        written.map_err(|source| Error::io("cannot write a file", &self.path, source))
    }

    // The file is new, and has its final length from the start.
    fn is_zeroed(&self) -> bool {
        true
    }
}
