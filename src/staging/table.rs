//! Table of the tensors in staged memory, which begins with it: its length in 8 bytes (little-endian), JSON, and zeros up to the first
//! tensor. The memory is of one version of towline on one machine and never stored, so the layout is no format.

use serde::{Deserialize, Serialize};

use crate::checkpoint::Dtype;
use crate::error::{Error, Result};
use crate::limits::TENSOR_TABLE_LEN_MAX;

/// Alignment of each tensor, in bytes: a line of the CPU's cache, and enough for vector instructions and for copies to a GPU.
const ALIGNMENT: u64 = 64;
/// Bytes of the length of the table.
const PREFIX: usize = 8;

/// A tensor in staged memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagedTensor {
    /// Its name.
    pub name: String,
    /// File, or folder of the files with its parts.
    pub path: String,
    /// Element type, as safetensors names it.
    pub dtype: String,
    /// Elements along each dimension.
    pub shape: Vec<u64>,
    /// First byte, from the end of the table on.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// The tensors in staged memory, in order of their places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorTable {
    tensors: Vec<StagedTensor>,
    head: Vec<u8>,
    len: u64,
}

impl TensorTable {
    /// Places `tensors` one after the other; their `start` is set.
    ///
    /// # Errors
    /// Exhausted, if the table is longer than the limit, or the memory longer than addresses go.
    pub fn new(mut tensors: Vec<StagedTensor>) -> Result<Self> {
        let too_large =
            || Error::exhausted("tensors are too many or too large for shared memory").help("choose fewer tensors");
        let mut end = 0_u64;
        for tensor in &mut tensors {
            tensor.start = end;
            let next = end.checked_add(tensor.len).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
            end = next.ok_or_else(too_large)?;
        }
        let json =
            serde_json::to_vec(&tensors).map_err(|source| Error::other("cannot write a table").source(source))?;
        if json.len() as u64 > TENSOR_TABLE_LEN_MAX {
            return Err(too_large());
        }
        let mut head = (json.len() as u64).to_le_bytes().to_vec();
        head.extend(json);
        let len = base(head.len() as u64).checked_add(end).ok_or_else(too_large)?;
        Ok(Self { tensors, head, len })
    }

    /// Reads the table at the start of `memory`.
    ///
    /// # Errors
    /// Damaged, if it is none, or a tensor is not within the memory or not as long as its type and shape make it.
    pub fn read(memory: &[u8]) -> Result<Self> {
        let damaged = |what: &'static str| Error::damaged(what).at("staged memory");
        let prefix = memory.first_chunk::<PREFIX>().ok_or_else(|| damaged("memory has no table of tensors"))?;
        let json_len = u64::from_le_bytes(*prefix);
        let json_len = usize::try_from(json_len).ok().filter(|&len| len as u64 <= TENSOR_TABLE_LEN_MAX);
        let head = json_len.and_then(|len| memory.get(..PREFIX.checked_add(len)?));
        let head = head.ok_or_else(|| damaged("table of tensors is longer than the memory"))?;
        let json = head.get(PREFIX..).unwrap_or_default();
        let tensors: Vec<StagedTensor> =
            serde_json::from_slice(json).map_err(|source| damaged("table of tensors is no JSON").source(source))?;
        let len = memory.len() as u64;
        let table = Self { tensors, head: head.to_vec(), len };
        match table.tensors.iter().find(|tensor| !table.is_sound(tensor)) {
            None => Ok(table),
            Some(tensor) => Err(damaged("tensor does not fit its memory").got(&tensor.name)),
        }
    }

    /// True if `tensor` is within the memory and as long as its type and shape make it.
    fn is_sound(&self, tensor: &StagedTensor) -> bool {
        let end = self.base().checked_add(tensor.start).and_then(|start| start.checked_add(tensor.len));
        let dtype = Dtype::from_word(&tensor.dtype);
        let expected = if dtype.bits().is_some() { dtype.tensor_len(&tensor.shape) } else { Some(tensor.len) };
        end.is_some_and(|end| end <= self.len) && expected == Some(tensor.len)
    }

    /// The tensors.
    #[must_use]
    pub fn tensors(&self) -> &[StagedTensor] {
        &self.tensors
    }

    /// First bytes of the memory: the table itself.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// Byte of the memory from which `start` of each tensor counts.
    #[must_use]
    pub fn base(&self) -> u64 {
        base(self.head.len() as u64)
    }

    /// Bytes of the memory, the table included.
    #[must_use]
    pub fn memory_len(&self) -> u64 {
        self.len
    }
}

/// First byte after a table of `head` bytes that is aligned.
const fn base(head: u64) -> u64 {
    head.next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tensor(name: &str, dtype: &str, shape: &[u64], len: u64) -> StagedTensor {
        StagedTensor {
            name: name.to_owned(),
            path: "m".to_owned(),
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            start: 0,
            len,
        }
    }

    /// Memory that begins with the table.
    fn memory(table: &TensorTable) -> Vec<u8> {
        let mut memory = table.head().to_vec();
        memory.resize(usize::try_from(table.memory_len()).unwrap(), 0);
        memory
    }

    #[test]
    fn tables_are_read_as_they_were_written() {
        let tensors = vec![
            tensor("a\"", "BF16", &[3, 5], 30),
            tensor("b", "F32", &[], 4),
            tensor("c", "F32", &[0, 4], 0),
            tensor("d", "ODD7", &[2], 9),
        ];
        let table = TensorTable::new(tensors).unwrap();
        assert_eq!(table.tensors().iter().map(|one| one.start).collect::<Vec<_>>(), [0, 64, 128, 128]);
        assert!(table.base().is_multiple_of(ALIGNMENT) && table.memory_len() == table.base() + 192);
        assert_eq!(TensorTable::read(&memory(&table)).unwrap(), table);
        assert_eq!(TensorTable::read(&memory(&TensorTable::new(Vec::new()).unwrap())).unwrap().tensors(), []);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let table = TensorTable::new(vec![tensor("a", "F32", &[4], 16)]).unwrap();
        let good = memory(&table);
        TensorTable::read(&good[..good.len() - 48]).unwrap();
        TensorTable::read(&good[..good.len() - 49]).unwrap_err();
        TensorTable::read(&[]).unwrap_err();
        TensorTable::read(&u64::MAX.to_le_bytes()).unwrap_err();
        let wrong = TensorTable::new(vec![tensor("a", "F32", &[4], 12)]).unwrap();
        assert!(TensorTable::read(&memory(&wrong)).unwrap_err().to_string().contains("does not fit"));
        TensorTable::new(vec![tensor("a", "U8", &[], u64::MAX)]).unwrap_err();
    }

    proptest! {
        #[test]
        fn any_memory_is_a_table_or_a_clear_error(len in 0_u64..80, rest in "[\\[\\]{}\":,a-z0-9]{0,60}") {
            let memory = [&len.to_le_bytes(), rest.as_bytes()].concat();
            if let Err(error) = TensorTable::read(&memory) {
                prop_assert_eq!(error.kind(), crate::error::ErrorKind::Damaged);
            }
        }
    }
}
