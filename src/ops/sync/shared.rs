//! Trees that several names share: each is read once in a sync, and its further names are published without reading it again. An
//! untrusted source may give very many names to one large tree.

use std::collections::HashMap;

use super::{Coming, Step, Syncing, stored_bytes};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ManifestId, ManifestKey, MapKey};
use crate::name::Name;
use crate::repository::Saved;
use crate::repository::log::{Action, RefValue, Refusal, log_forgotten};

/// A tree by its objects, and the digest that a name expects: another name may expect a wrong one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TreeKeys {
    id: ManifestId,
    manifest: ManifestKey,
    map: MapKey,
}

/// A tree of the source that this sync has moved, or in a dry run would have.
#[derive(Clone, Debug)]
pub(super) struct MovedTree {
    /// A name with it in the destination.
    pub(super) name: Name,
    /// Stored bytes of its own chunks.
    pub(super) stored: u64,
    /// Bytes in all files, and files.
    size: (u64, u64),
}

/// Trees that this sync has dealt with.
#[derive(Debug, Default)]
pub(super) struct SharedTrees {
    /// By their objects in the source.
    pub(super) moved: HashMap<TreeKeys, MovedTree>,
    /// Trees that could not be copied, by their objects in the source: the first name, and the kind of the error.
    pub(super) failed: HashMap<TreeKeys, (Name, ErrorKind)>,
    /// Trees of the destination whose chunks are known: stored bytes of their own chunks, if all are in live packs.
    pub(super) there: HashMap<TreeKeys, Option<u64>>,
}

impl MovedTree {
    pub(super) fn of(saved: &Saved) -> Self {
        let size = (saved.manifest.logical_bytes(), saved.manifest.files().count() as u64);
        Self { name: saved.name.clone(), stored: stored_bytes(saved), size }
    }

    /// Checks that `value`, of `name`, says of the tree what its manifest does: listings and plans rely on that.
    pub(super) fn check(&self, name: &Name, value: &RefValue) -> Result<()> {
        let told = (value.logical_bytes, value.files);
        if told == self.size {
            return Ok(());
        }
        let words = |(bytes, files): (u64, u64)| format!("{bytes} bytes in {files} files");
        Err(Error::damaged("name says another size than its tree has")
            .at(name)
            .expected(words(self.size))
            .got(words(told))
            .help("save it again, or remove the name from the source"))
    }
}

impl TreeKeys {
    pub(super) fn of(value: &RefValue) -> Self {
        Self { id: value.manifest, manifest: value.manifest_key, map: value.map_key }
    }
}

impl SharedTrees {
    /// Remembers that the tree `value` of `name` cannot be copied, if `error` is one of the tree itself. Returns the error.
    pub(super) fn fail(&mut self, name: &Name, value: &RefValue, error: Error) -> Error {
        if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::Exhausted | ErrorKind::Unsupported) {
            self.failed.entry(TreeKeys::of(value)).or_insert_with(|| (name.clone(), error.kind()));
        }
        error
    }

    /// Error for a further name of a tree that could not be copied, which is not read again.
    pub(super) fn failed_before(&self, name: &Name, value: &RefValue) -> Option<Error> {
        let (first, kind) = self.failed.get(&TreeKeys::of(value))?;
        Some(Error::new(*kind, format!("tree of {name} is that of {first}, which could not be copied")))
    }
}

impl Syncing<'_> {
    /// Gives `name` the tree that this sync moved for another name, if it has; or only counts it.
    pub(super) async fn further(&mut self, name: &Name, value: &RefValue, coming: &Coming) -> Result<Option<Step>> {
        let keys = TreeKeys::of(value);
        let Some(tree) = self.shared.moved.get(&keys).cloned() else { return Ok(None) };
        self.from.check_readable(name, &value.manifest).await?;
        tree.check(name, value)?;
        self.label(name, coming).await?;
        if self.options.dry_run {
            self.plan(name, value, 0);
        } else if self.publish_further(name, value, &tree.name).await? {
            self.note_replaced(name, value);
        } else {
            self.shared.moved.remove(&keys);
            return Ok(None);
        }
        self.report.skipped_bytes += tree.stored;
        Ok(Some(self.done(value)))
    }

    /// Sets `name` to `value`, with the manifest and map that `first` has in the destination; `false` if it has another tree by now.
    async fn publish_further(&self, name: &Name, value: &RefValue, first: &Name) -> Result<bool> {
        let expected = self.began.version(name);
        let (keeping, mut is_there, mut kept) = (self.keeping(), true, Vec::new());
        // As in a copy of a name: the chunks stay as long as `first` has the tree, and the commit follows that very state.
        let commit = self.to.log().commit(None, |state| {
            let there = state.refs.get(first).filter(|there| there.manifest == value.manifest);
            is_there = there.is_some();
            let Some(there) = there else { return Ok(Vec::new()) };
            if state.version(name) != expected {
                return Err(Refusal::RefMoved(name.clone()).into());
            }
            kept = keeping.actions(state, (name, value.manifest), |_| true)?;
            let (manifest_key, map_key, chunks) = (there.manifest_key, there.map_key, there.chunks);
            let value = RefValue { version: 0, manifest_key, map_key, chunks, attempt: None, ..value.clone() };
            let set = Action::SetRef { name: name.clone(), expected, value };
            Ok(kept.iter().cloned().chain([set]).collect())
        });
        commit.await?;
        log_forgotten(&kept);
        Ok(is_there)
    }
}
