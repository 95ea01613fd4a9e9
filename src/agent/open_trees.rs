//! Cache of open trees.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{Error, Result};
use crate::name::Name;
use crate::repository::log::RefValue;
use crate::repository::{Repository, Saved};
use crate::size;

/// Number of trees that stay open.
const OPEN_MAX: usize = 4;

/// Bytes of memory that a chunk and an entry of an open tree take, about.
const CHUNK_WEIGHT: u64 = 96;
const ENTRY_WEIGHT: u64 = 256;

/// Recently read trees, the latest first: a client that reads one range after another opens a tree once.
#[derive(Debug, Default)]
pub(super) struct OpenTrees {
    recent: Mutex<VecDeque<Arc<Saved>>>,
    /// All trees that somebody still reads, and their weights.
    in_use: Mutex<Vec<(Weak<Saved>, u64)>>,
}

impl OpenTrees {
    /// Opens the current value of `name`.
    ///
    /// # Errors
    /// As [`Repository::saved`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn open(&self, repository: &Repository, name: &Name) -> Result<Arc<Saved>> {
        let state = repository.state().await?;
        if let Some(found) = state.refs.get(name).and_then(|value| self.find(name, value)) {
            // The policy may have changed since it was opened.
            repository.check_readable(name, &found.value.manifest).await?;
            return Ok(found);
        }
        let saved = repository.saved(name).await?.shared();
        self.use_memory(&saved, repository.budget().kept_max())?;
        let mut opened = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|other| other.name != saved.name);
        opened.push_front(Arc::clone(&saved));
        opened.truncate(OPEN_MAX);
        Ok(saved)
    }

    /// Counts a tree that is opened. Slow readers of many trees must not take the memory of all.
    ///
    /// # Errors
    /// Exhausted, if it and the trees that are in use take more than `most` bytes; one always may.
    fn use_memory(&self, saved: &Arc<Saved>, most: u64) -> Result<()> {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.retain(|(tree, _)| tree.strong_count() > 0);
        let used: u64 = in_use.iter().map(|(_, weight)| weight).sum();
        let weight = u64::from(saved.located_chunks()) * CHUNK_WEIGHT
            + saved.manifest.entries.iter().map(|entry| ENTRY_WEIGHT + entry.path.len() as u64).sum::<u64>();
        if used > 0 && used + weight > most {
            return Err(Error::exhausted("too many large trees are read at once")
                .at(&saved.name)
                .expected(format!("at most {} for all of them", size::show(most)))
                .got(format!("{} more", size::show(weight)))
                .help("try again when others have been read, or raise the agent's `memory`"));
        }
        in_use.push((Arc::downgrade(saved), weight));
        Ok(())
    }

    /// Keys of objects are unique across repositories, so the repository of a value does not matter.
    fn find(&self, name: &Name, value: &RefValue) -> Option<Arc<Saved>> {
        let mut opened = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let at = opened.iter().position(|saved| saved.name == *name && saved.value == *value)?;
        let found = opened.remove(at)?;
        opened.push_front(Arc::clone(&found));
        Some(found)
    }
}
