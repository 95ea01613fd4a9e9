//! Memory of the paths of checkpoints that are being received: they are kept until the end, and a sender may take its time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::limits::MIB;
use crate::size;

/// Bytes of each checkpoint that are not counted: those of some thousand files.
const FREE: u64 = MIB;
/// Limits of what is counted, of one sender and of all: one checkpoint may be as large as checkpoints may be. A sender takes at most as
/// much as it leaves free, so that slow ones never take all.
const SENDER_MAX: u64 = 64 * MIB;
const ALL_MAX: u64 = 2 * SENDER_MAX;

/// Counted bytes by sender. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct PathMemory(Arc<Mutex<HashMap<Identity, u64>>>);

/// Bytes of one checkpoint, counted until this is dropped.
#[derive(Debug)]
pub(super) struct HeldPaths {
    memory: PathMemory,
    from: Identity,
    bytes: u64,
}

impl PathMemory {
    /// Memory, none yet, for a checkpoint of `from`.
    pub(super) fn of(&self, from: &Identity) -> HeldPaths {
        HeldPaths { memory: self.clone(), from: from.clone(), bytes: 0 }
    }

    fn counted(&self) -> MutexGuard<'_, HashMap<Identity, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldPaths {
    /// Takes `bytes` more.
    ///
    /// # Errors
    /// Exhausted, with nothing taken, above a limit.
    pub(super) fn add(&mut self, bytes: u64) -> Result<()> {
        let (before, after) = (counted(self.bytes), counted(self.bytes + bytes));
        if after > before {
            let more = after - before;
            let mut all = self.memory.counted();
            let (sum, own) = (all.values().sum::<u64>(), all.get(&self.from).copied().unwrap_or(0));
            let most = ((ALL_MAX - (sum - own)) / 2).min(SENDER_MAX);
            if own + more > most {
                return Err(Error::exhausted("paths of checkpoints that are being received take too much memory")
                    .expected(format!(
                        "at most {} of this sender, beside {} of others",
                        size::show(most),
                        size::show(sum - own)
                    ))
                    .help("send it again when others have been received"));
            }
            all.insert(self.from.clone(), own + more);
        }
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for HeldPaths {
    fn drop(&mut self) {
        let mut all = self.memory.counted();
        if let Some(own) = all.get_mut(&self.from) {
            *own -= counted(self.bytes);
            if *own == 0 {
                all.remove(&self.from);
            }
        }
    }
}

/// Counted part of the `bytes` of one checkpoint.
const fn counted(bytes: u64) -> u64 {
    bytes.saturating_sub(FREE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_share_what_there_is_and_little_is_always_there() {
        let memory = PathMemory::default();
        let sender = |name: &str| Identity::new("west", name).unwrap();
        let (mut first, mut second) = (memory.of(&sender("a")), memory.of(&sender("a")));
        first.add(SENDER_MAX + FREE).unwrap();
        first.add(1).unwrap_err();
        second.add(FREE).unwrap();
        second.add(1).unwrap_err();
        let left = ALL_MAX - SENDER_MAX;
        let mut other = memory.of(&sender("b"));
        other.add(left / 2 + FREE).unwrap();
        other.add(1).unwrap_err();
        // Half of what two others left.
        let mut late = memory.of(&sender("c"));
        late.add(left / 4 + FREE).unwrap();
        late.add(1).unwrap_err();
        drop(first);
        late.add(left / 4).unwrap();
        drop((second, other, late));
        assert!(memory.counted().is_empty());
    }
}
