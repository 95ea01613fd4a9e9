//! Copies to memory of a GPU that torch allocated.

use std::sync::Arc;

use pyo3::prelude::*;
use towline::ops::{DecodeOn, DeviceRange, PINNED_MAX, TensorReading, TensorsRead};
use towline::progress::Progress;
use towline::repository::Repository;
use towline::staging::cuda::{CudaCopier, CudaDevice};
use towline::staging::{Piece, PinnedRing, SlotLens, upload};
use towline::{Error, Result};

use crate::errors::raised;
use crate::memory::MemoryRange;

/// Bytes of a piece of an upload.
const PIECE: usize = 4 << 20;

/// Environment variable with the value that Python gives.
const DECODE_ON: &str = "TOWLINE_DECODE_ON";

/// A GPU, torch's current stream there, and where chunks are decoded, as Python gives them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    ordinal: u32,
    /// `CUstream`.
    stream: usize,
    decode_on: DecodeOn,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Target {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let (ordinal, stream, decode_on): (u32, usize, String) = given.extract()?;
        let decode_on = decode_on.parse().map_err(|error: Error| raised(given.py(), &error.at(DECODE_ON)))?;
        Ok(Self { ordinal, stream, decode_on })
    }
}

impl Target {
    /// Copies that begin once what torch has queued is done: it may still use memory that torch's allocator has given out again.
    fn copier(self) -> Result<CudaCopier> {
        let copier = CudaCopier::new(&CudaDevice::open(self.ordinal)?)?;
        // SAFETY: the package passes the handle of a stream of torch, and keeps the stream until the call has ended.
        unsafe { copier.wait_for_stream(self.stream)? };
        Ok(copier)
    }
}

/// Name of the GPU `ordinal`.
///
/// # Errors
/// Unsupported, if there is no driver, it is too old, or it finds no GPU.
#[pyfunction]
pub(crate) fn cuda_name(py: Python<'_>, ordinal: u32) -> PyResult<String> {
    py.detach(|| CudaDevice::name_of(ordinal)).map_err(|error| raised(py, &error))
}

/// Copies ranges of host memory, each given by its address, the address of the GPU and its length.
#[pyfunction]
pub(crate) fn copy_to_cuda(py: Python<'_>, copies: Vec<(usize, u64, usize)>, target: Target) -> PyResult<()> {
    let piece = |(from, to, len)| {
        // SAFETY: the package keeps the tensor, and does not write to it, until this returns.
        let from = unsafe { MemoryRange::new(from, len).read() };
        Piece { from, to }
    };
    let pieces: Vec<Piece<'_>> = copies.into_iter().map(piece).collect();
    let bytes: usize = pieces.iter().map(|piece| piece.from.len()).sum();
    let pinned = (bytes.next_multiple_of(PIECE) as u64).min(PINNED_MAX);
    let work = || {
        let ring =
            PinnedRing::new(target.copier()?, SlotLens { wanted: PIECE, min: PIECE }, pinned, Box::new(|_, _| {}));
        // SAFETY: the package keeps the tensors until this returns, and nobody else has them yet.
        unsafe { upload(&ring, &pieces) }
    };
    // On a thread of its own: the caller's stays with the GPU that torch has made current there.
    let outcome = py.detach(|| std::thread::scope(|scope| scope.spawn(work).join()));
    let outcome = outcome.unwrap_or_else(|_| Err(Error::other("a copying thread panicked")));
    outcome.map_err(|error| raised(py, &error))
}

/// Reads `reading` to memory of a GPU; returns its cost.
///
/// # Errors
/// As [`Repository::read_tensors_to`].
///
/// # Cancel safety
/// Safe: on drop it waits until no copy runs.
pub(crate) async fn read_to(
    repository: &Repository,
    reading: &Arc<TensorReading>,
    targets: Vec<Vec<MemoryRange>>,
    target: Target,
    progress: &Progress,
) -> Result<TensorsRead> {
    let range = |range: &MemoryRange| DeviceRange { address: range.address() as u64, len: range.len() as u64 };
    let targets = targets.iter().map(|ranges| ranges.iter().map(range).collect()).collect();
    let copier = tokio::task::spawn_blocking(move || target.copier()).await;
    let copier = copier.map_err(|source| Error::other("cannot open the GPU").source(source))??;
    // SAFETY: the package keeps the tensors until this has ended, and nobody else has them yet.
    let read = unsafe { repository.read_tensors_to(reading, copier, target.decode_on, targets, progress) };
    read.await.map(|cost| cost.read)
}
