//! Parts of one tree taken over into another: neither read nor stored again.

use std::sync::Arc;

use super::{AmendReport, Changes};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::ops::SaveOptions;
use crate::repository::{Repository, Saved};

/// An entry of another tree, with its content.
#[derive(Clone, Debug)]
pub struct Graft {
    /// Name of the tree that has it.
    pub name: Name,
    /// Its tree.
    pub tree: Arc<Saved>,
    /// Its path there; empty for all of the tree.
    pub from: Vec<u8>,
    /// Its new path; empty for a folder that becomes a new tree.
    pub to: Vec<u8>,
}

impl Repository {
    /// Adds the entry at `path` of the tree `from`, with its content, to the tree `to` as `inner`, in one commit: with links,
    /// empty folders, permissions and times. An empty path is the tree itself. `to` gets the labels that bind `from` before.
    ///
    /// # Errors
    /// Not found, if there is no such entry; conflict, if something is in its way, or `from` is replaced meanwhile; denied, if a
    /// policy refuses it; else as [`Repository::amend`].
    ///
    /// # Cancel safety
    /// Safe, but `to` may have got the labels.
    pub async fn graft(&self, (from, path): (&Name, &[u8]), (to, inner): (&Name, &[u8])) -> Result<AmendReport> {
        let tree = self.saved(from).await?.shared();
        let manifest = tree.value.manifest;
        self.check_copy((from, &manifest), to).await?;
        self.inherit_labels(from, to).await?;
        if self.current(&*self.state().await?, from)?.manifest != manifest {
            return Err(Error::conflict("name was replaced while it was copied").at(from).help("run it again"));
        }
        let graft = Graft { name: from.clone(), tree, from: path.to_vec(), to: inner.to_vec() };
        let changes = Changes { graft: vec![graft], ..Changes::default() };
        self.amend(to, &changes, &SaveOptions::default()).await
    }
}
