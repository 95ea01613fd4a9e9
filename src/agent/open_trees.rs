//! Cache of open trees.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use crate::name::Name;
use crate::repository::log::RefValue;
use crate::repository::{Repository, Saved};

/// Number of trees that stay open.
const OPEN_MAX: usize = 4;

/// Recently read trees, the latest first: a client that reads one range after another opens a tree once.
#[derive(Debug, Default)]
pub(super) struct OpenTrees(Mutex<VecDeque<Arc<Saved>>>);

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
        let mut opened = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|other| other.name != saved.name);
        opened.push_front(Arc::clone(&saved));
        opened.truncate(OPEN_MAX);
        Ok(saved)
    }

    /// Keys of objects are unique across repositories, so the repository of a value does not matter.
    fn find(&self, name: &Name, value: &RefValue) -> Option<Arc<Saved>> {
        let mut opened = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = opened.iter().position(|saved| saved.name == *name && saved.value == *value)?;
        let found = opened.remove(at)?;
        opened.push_front(Arc::clone(&found));
        Some(found)
    }
}
