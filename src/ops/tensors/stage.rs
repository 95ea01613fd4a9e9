//! Reading tensors into memory that the processes of a node share.

use std::sync::Arc;

use super::delivery::{TensorSink, TensorsRead};
use super::reading::TensorReading;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::repository::{Fill, Repository};
use crate::staging::{SealedMemory, StageClock, StageTimes, StagedTensor, TensorTable, UnsealedMemory};

impl TensorReading {
    /// Places of its tensors in shared memory.
    ///
    /// # Errors
    /// Exhausted, if they are too many or too large.
    pub fn table(&self) -> Result<TensorTable> {
        let staged = self.tensors().iter().map(|tensor| StagedTensor {
            name: tensor.name.clone(),
            path: tensor.path.clone(),
            dtype: tensor.dtype.word().to_owned(),
            shape: tensor.shape.clone(),
            start: 0,
            len: tensor.bytes,
        });
        TensorTable::new(staged.collect())
    }
}

impl Repository {
    /// Reads all boxes of `reading` into new memory, as `table` places them. Nobody can change the memory afterwards, so what was
    /// verified once stays verified.
    ///
    /// # Errors
    /// As [`Repository::read_tensors`]; exhausted, if the system has no memory.
    ///
    /// # Cancel safety
    /// Safe: the memory is freed.
    pub async fn stage_tensors(
        &self,
        reading: &Arc<TensorReading>,
        table: &TensorTable,
        progress: &Progress,
    ) -> Result<(SealedMemory, TensorsRead, StageTimes)> {
        let clock = Arc::new(StageClock::start(reading.bytes_in_chunks()));
        let read_before = progress.snapshot().reading;
        let memory = Arc::new(UnsealedMemory::new(table.memory_len())?);
        memory.write(0, table.head())?;
        let starts = table.tensors().iter().map(|tensor| table.base() + tensor.start).collect();
        let sink = Arc::new(MemorySink { memory: Arc::clone(&memory), starts, clock: Arc::clone(&clock) });
        let read = self.read_tensors(reading, sink, progress).await?;
        Ok((memory.seal()?, read, clock.times(progress.snapshot().reading.saturating_sub(read_before))))
    }
}

/// Writes tensors to their places in shared memory.
struct MemorySink {
    memory: Arc<UnsealedMemory>,
    starts: Vec<u64>,
    clock: Arc<StageClock>,
}

impl MemorySink {
    fn byte(&self, tensor: usize, offset: u64) -> Result<u64> {
        let start = self.starts.get(tensor).ok_or_else(|| Error::other("a tensor has no place in its memory"))?;
        Ok(start.saturating_add(offset))
    }
}

impl TensorSink for MemorySink {
    fn place(&self, tensor: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write(self.byte(tensor, offset)?, bytes)?;
        self.clock.arrived(tensor, bytes.len());
        Ok(())
    }

    fn fills(&self) -> bool {
        true
    }

    fn fill(&self, tensor: usize, offset: u64, len: usize, fill: Fill<'_>) -> Result<bool> {
        self.memory.fill(self.byte(tensor, offset)?, len, |slot| self.clock.decoding(|| fill(slot)))?;
        self.clock.arrived(tensor, len);
        Ok(true)
    }

    fn is_zeroed(&self) -> bool {
        true
    }
}
