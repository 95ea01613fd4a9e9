//! Names that cannot be copied, and how a sync of several goes on after one.

use serde::Serialize;

use super::Syncing;
use crate::error::{Error, ErrorKind};
use crate::name::Name;

/// Maximum length of the error of a failed name, in characters.
const ERROR_LEN: usize = 300;

/// A name that could not be copied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailedName {
    /// The name.
    pub name: Name,
    /// Kind of the error.
    pub kind: ErrorKind,
    /// The error.
    pub error: String,
}

impl Syncing<'_> {
    /// Prepares for the next name after `error` of one, before which `chunks` had moved; false if that is not about one name
    /// only. Whoever may save some names must not keep others from being copied.
    pub(super) async fn goes_on_after(&mut self, error: &Error, chunks: u64) -> bool {
        let is_of_all =
            matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Cancelled) || error.is_of_full_disk();
        if is_of_all || self.options.stop.is_cancelled() {
            return false;
        }
        if self.options.dry_run || self.writer.is_idle() {
            return true;
        }
        // Whole packs stay for trees that share their chunks; the chunks of the last one are discarded, and not known any more.
        self.writer.abandon().await.is_ok() && (self.report.new_chunks == chunks || self.forget().await.is_ok())
    }

    /// Reports that `name` could not be copied.
    pub(super) fn note_failed(&mut self, name: &Name, error: &Error) {
        tracing::debug!("{name} is not copied: {error:?}");
        self.report.failed.push(FailedName {
            name: name.clone(),
            kind: error.kind(),
            error: error.to_string().chars().take(ERROR_LEN).collect(),
        });
    }

    /// Ends the session that names which failed have left open.
    pub(super) async fn end(&mut self) {
        if let Err(left) = self.writer.close(|_| Ok(Vec::new())).await {
            tracing::debug!("the session is left to the collector: {left:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use object_store::ObjectStoreExt as _;
    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;
    use crate::ops::{SaveOptions, SyncOptions, sync};
    use crate::policy::Labels;
    use crate::repository::layout::{Family, owned};
    use crate::repository::{OpenOptions, Repository};
    use crate::storage::{self, Location, Store, StoreOptions};

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    async fn repository(store: Store, dir: &Path) -> Repository {
        let options = OpenOptions { cache: Some(dir.join("cache")), ..OpenOptions::default() };
        Repository::create(store, options).await.unwrap().0
    }

    /// Writes a file that no other tree has, saves `tree` as `to`, and returns the key of the pack with the file.
    async fn save(repository: &Repository, tree: &Path, file: &str, to: &str) -> object_store::path::Path {
        let mut bytes = vec![0; 10_000];
        blake3::Hasher::new().update(to.as_bytes()).finalize_xof().fill(&mut bytes);
        fs::create_dir_all(tree).unwrap();
        fs::write(tree.join(file), bytes).unwrap();
        repository.save(tree, &name(to), &SaveOptions::default()).await.unwrap();
        let saved = repository.saved(&name(to)).await.unwrap();
        let last = saved.map.frames.last().unwrap();
        owned(Family::Pack, saved.map.pack(last).unwrap().id)
    }

    /// B4: "A name that cannot be copied does not stop the others".
    #[tokio::test]
    async fn names_that_fail_after_chunks_of_them_moved_share_a_session() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (repository(Store::memory(), dir.path()).await, repository(Store::memory(), dir.path()).await);
        for number in 0..12 {
            let tree = dir.path().join(format!("tree-{number}"));
            // In a pack of its own, which is intact.
            save(&from, &tree, "a", &format!("parts/{number}")).await;
            let pack = save(&from, &tree, "b", &format!("all/{number}")).await;
            if number < 11 {
                from.store().objects().put(&pack, vec![0; 12_000].into()).await.unwrap();
            }
        }
        let before = to.state().await.unwrap().seq;
        let report = sync(&from, &to, &[name("all")], &SyncOptions::default()).await.unwrap();
        assert_eq!((report.names, report.failed.len()), (1, 11), "{report:?}");
        let state = to.state().await.unwrap();
        assert!(state.seq <= before + 2, "one entry begins the session, and one sets the name: {}", state.seq - before);

        // Where the last one fails, the session is ended, too.
        let failing: Vec<Name> = (0..11).map(|number| name(&format!("all/{number}"))).collect();
        let before = state.seq;
        let report = sync(&from, &to, &failing, &SyncOptions::default()).await.unwrap();
        assert_eq!(report.failed.len(), 11);
        let state = to.state().await.unwrap();
        assert!(state.seq <= before + 2 && state.sessions.is_empty(), "{}", state.seq - before);
    }

    /// Y1: "one that it cannot copy brings none".
    #[tokio::test]
    async fn a_name_that_fails_gets_no_labels_from_one_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (repository(Store::memory(), dir.path()).await, repository(Store::memory(), dir.path()).await);
        let [old, upper, lower] = ["old", "upper", "lower"].map(|tree| dir.path().join(tree));
        save(&to, &old, "file", "other").await;
        to.save(&old, &name("a/b"), &SaveOptions::default()).await.unwrap();
        save(&from, &upper, "file", "a").await;
        let pack = save(&from, &lower, "file", "a/b").await;
        from.store().objects().put(&pack, vec![0; 12_000].into()).await.unwrap();
        let labels = Labels::default().with("sensitivity", "public").unwrap();
        from.tighten(&name("a"), &labels).await.unwrap();

        let report = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
        let failed: Vec<_> = report.failed.iter().map(|failed| (failed.name.as_str(), failed.kind)).collect();
        assert_eq!(failed, [("a/b", ErrorKind::Damaged), ("a", ErrorKind::Conflict)], "{report:?}");
        assert_eq!(to.labels(&name("a/b")).await.unwrap().labels, Labels::default());

        // Once both can be copied, both have them.
        from.save(&upper, &name("a/b"), &SaveOptions::default()).await.unwrap();
        let report = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
        assert_eq!((report.names, report.failed), (2, Vec::new()));
        for both in ["a", "a/b"] {
            assert_eq!(to.labels(&name(both)).await.unwrap().labels, labels, "{both}");
        }
    }

    #[tokio::test]
    async fn a_pipe_in_the_place_of_a_pack_fails_one_name() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("repository");
        let options = StoreOptions { create: true, ..StoreOptions::default() };
        let store = storage::open(&Location::directory(&folder).unwrap(), &options).await.unwrap();
        let (from, to) = (repository(store, dir.path()).await, repository(Store::memory(), dir.path()).await);
        let pack = save(&from, &dir.path().join("first"), "file", "first").await;
        save(&from, &dir.path().join("second"), "file", "second").await;
        let pack = folder.join(pack.as_ref());
        fs::remove_file(&pack).unwrap();
        mkfifoat(CWD, &pack, Mode::RUSR | Mode::WUSR).unwrap();
        let report = sync(&from, &to, &[], &SyncOptions::default()).await.unwrap();
        let failed: Vec<_> = report.failed.iter().map(|failed| (&failed.name, failed.kind)).collect();
        assert_eq!((report.names, failed), (1, vec![(&name("first"), ErrorKind::Damaged)]), "{report:?}");
        assert!(report.failed[0].error.contains("not a plain file"), "{report:?}");
    }
}
