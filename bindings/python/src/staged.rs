//! Tensors in memory of this node's agent, mapped into this process.

use pyo3::prelude::*;
use towline::Result;
use towline::agent::{Client, StageRequest, StagedMemory};
use towline::name::Name;
use towline::progress::Progress;
use towline::repository::Repository;
use towline::staging::{MappedMemory, StagedTensor, TensorTable};

/// A mapping of sealed memory. What this process writes there is its own.
#[pyclass(frozen, module = "towline._towline")]
#[derive(Debug)]
pub(crate) struct StagedTensors {
    table: TensorTable,
    memory: MappedMemory,
    reused: bool,
    /// File or folder whose tensors were asked for; the memory may have those of the whole tree.
    below: Option<String>,
    /// The agent keeps the memory while this lives.
    _staged: StagedMemory,
}

impl StagedTensors {
    /// True for a tensor of the file or folder `path`.
    fn is_wanted(&self, path: &str) -> bool {
        let Some(below) = &self.below else { return true };
        path.strip_prefix(below.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Bytes of the memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.table.memory_len()
    }
}

#[pymethods]
impl StagedTensors {
    /// True if the tensors were in memory before.
    #[getter]
    fn reused(&self) -> bool {
        self.reused
    }

    /// `(name, path, dtype, shape, address, length)` of each tensor.
    fn tensors(&self) -> Vec<(String, String, String, Vec<u64>, usize, u64)> {
        let place = |tensor: &StagedTensor| {
            // The table was checked against the memory.
            let start = usize::try_from(self.table.base() + tensor.start).unwrap_or(usize::MAX);
            let address = self.memory.get(start..).map_or(0, |bytes| bytes.as_ptr() as usize);
            let StagedTensor { name, path, dtype, shape, len, .. } = tensor.clone();
            (name, path, dtype, shape, address, len)
        };
        self.table.tensors().iter().filter(|tensor| self.is_wanted(&tensor.path)).map(place).collect()
    }
}

/// Tensors of `name` in memory of the agent; none if there is no agent that can have them there.
///
/// # Errors
/// Damaged, if stored bytes are; others, if the memory cannot be mapped.
///
/// # Cancel safety
/// Safe: the agent continues.
pub(crate) async fn stage(
    repository: &Repository,
    name: &Name,
    path: Option<String>,
    tensors: Vec<String>,
    progress: &Progress,
) -> Result<Option<StagedTensors>> {
    let below = path.map(|path| path.trim_matches('/').to_owned()).filter(|path| !path.is_empty());
    let request = StageRequest {
        name: name.to_string(),
        path: below.clone(),
        repository: Some(repository.id().to_string()),
        tensors,
        ..StageRequest::default()
    };
    let staged = Client::find_staged(&request, |task| {
        if progress.snapshot().phase != "restoring" && task.progress.total > 0 {
            progress.phase("restoring", task.progress.total);
        }
        let seen = progress.snapshot();
        progress.advance(task.progress.done.saturating_sub(seen.done));
        progress.moved(task.progress.moved.saturating_sub(seen.moved));
    });
    let Some((staged, memory)) = staged.await? else { return Ok(None) };
    let table = TensorTable::read(&memory)?;
    Ok(Some(StagedTensors { table, memory, reused: staged.report.reused, below, _staged: staged }))
}
