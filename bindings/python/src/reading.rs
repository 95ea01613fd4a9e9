//! Reads of tensors, or boxes of them, into memory of Python objects.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::prelude::*;
use towline::checkpoint::boxes::Slices;
use towline::name::Name;
use towline::ops::{TensorReading, TensorSelector, TensorSink, TensorsRead};
use towline::progress::Progress;
use towline::repository::{Fill, Repository, Saved};
use towline::{Error, Result};

use crate::cuda;
use crate::memory::MemoryRange;

/// A tensor to read, and its target memory.
#[derive(Debug)]
pub(crate) struct ReadRequest {
    name: String,
    /// File or folder that has the tensor.
    path: String,
    /// Box of the tensor to read; none for the whole tensor.
    window: Option<Window>,
    address: usize,
    len: usize,
}

/// Offsets and shape of a box.
type Window = (Vec<u64>, Vec<u64>);

impl<'a, 'py> FromPyObject<'a, 'py> for ReadRequest {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let (name, path, window, address, len) = given.extract()?;
        Ok(Self { name, path, window, address, len })
    }
}

/// Targets of each tensor of a reading.
struct Places(Vec<Vec<MemoryRange>>);

impl TensorSink for Places {
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let places = self.0.get(tensor).map(Vec::as_slice).unwrap_or_default();
        if places.iter().all(|place| place.place(offset, bytes)) {
            return Ok(());
        }
        Err(Error::other("more bytes than a tensor has room for").got(offset + bytes.len() as u64))
    }

    fn fills(&self) -> bool {
        true
    }

    fn fill(&self, tensor: usize, offset: u64, len: usize, fill: Fill<'_>) -> Result<bool> {
        match self.0.get(tensor).map(Vec::as_slice) {
            Some([place]) => place.fill(offset, len, fill),
            // Several targets need the bytes.
            _ => Ok(false),
        }
    }
}

/// Reads `wants` from the tree `name`. Every byte is verified, and each chunk is fetched once.
pub(crate) async fn read(
    repository: Repository,
    name: Name,
    requests: Vec<ReadRequest>,
    progress: Progress,
) -> Result<TensorsRead> {
    let saved = repository.saved(&name).await?.shared();
    read_in(&repository, &saved, requests, None, &progress).await
}

/// As [`read`], from a tree that is open; with `gpu`, the addresses are of its memory.
pub(crate) async fn read_in(
    repository: &Repository,
    saved: &Arc<Saved>,
    requests: Vec<ReadRequest>,
    gpu: Option<cuda::Target>,
    progress: &Progress,
) -> Result<TensorsRead> {
    let selectors: Vec<TensorSelector> = requests.iter().map(selector).collect();
    let reading = Arc::new(repository.choose_tensors_in(saved, None, &selectors)?);
    let places = places(&reading, &requests)?;
    if let Some(gpu) = gpu {
        return cuda::read_to(repository, &reading, places.0, gpu, progress).await;
    }
    repository.read_tensors(&reading, Arc::new(places), progress).await
}

fn selector(request: &ReadRequest) -> TensorSelector {
    let selector = TensorSelector::named(&request.name).at_path(&request.path);
    let Some((offsets, shape)) = &request.window else { return selector };
    let ranges = offsets.iter().zip(shape).map(|(&start, &len)| start..start.saturating_add(len));
    selector.slices(Slices::of(ranges))
}

type Key<'a> = (&'a str, &'a str, Vec<u64>, &'a [u64]);

/// Finds the targets of each tensor of `reading`.
fn places(reading: &TensorReading, requests: &[ReadRequest]) -> Result<Places> {
    let mut numbers: HashMap<Key<'_>, usize> = HashMap::new();
    let mut whole: HashMap<(&str, &str), usize> = HashMap::new();
    for (number, tensor) in reading.tensors().iter().enumerate() {
        numbers.insert((&tensor.name, &tensor.path, tensor.offsets.clone(), &tensor.shape), number);
        if tensor.shape == tensor.whole {
            whole.insert((&tensor.name, &tensor.path), number);
        }
    }
    let mut places = vec![Vec::new(); reading.tensors().len()];
    for request in requests {
        let number = match &request.window {
            Some((offsets, shape)) => {
                numbers.get(&(request.name.as_str(), request.path.as_str(), offsets.clone(), shape))
            }
            None => whole.get(&(request.name.as_str(), request.path.as_str())),
        };
        let lacking = || Error::not_found("no such tensor").at(&request.name);
        let &number = number.ok_or_else(lacking)?;
        let there = reading.tensors().get(number).map_or(0, |tensor| tensor.bytes);
        if there != request.len as u64 {
            return Err(Error::usage("a tensor does not fit its target memory")
                .at(&request.name)
                .expected(format!("{} bytes", request.len))
                .got(there));
        }
        places[number].push(MemoryRange::new(request.address, request.len));
    }
    Ok(Places(places))
}
