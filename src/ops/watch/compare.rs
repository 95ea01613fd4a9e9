//! Check whether a checkpoint is in the repository already: after a restart of the watch, or when another agent handed it off.
//!
//! Sizes and modification times prove nothing: whoever saved the step could choose them. So files are read, except those that this
//! host's stat cache knows from a save of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio_util::sync::CancellationToken;

use crate::error::Result;
use crate::format::{ChunkList, Content, EntryKind};
use crate::name::Name;
use crate::ops::in_place::{Next, compare_file};
use crate::ops::recorded::Record;
use crate::ops::save::SaveOptions;
use crate::ops::save::source::{check_unchanged, open};
use crate::ops::stopping::unless_stopped;
use crate::progress::Progress;
use crate::repository::{Repository, Saved};
use crate::size;
use crate::tree::{Rules, Walk, WalkEntry, WalkKind, walk};
use crate::work::blocking;

/// Comparison of a checkpoint with its saved tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The same entries, with the same content.
    Same,
    /// The same with entries missing: it was being deleted.
    Less,
    /// Anything else.
    Other,
    /// The same entries or some of them, with the same sizes: the content is not known without reading it.
    Unread,
}

/// Evidence that a file has the saved content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evidence {
    /// The record of a save on this host.
    Recorded,
    /// Such a record, or else the content.
    RecordedOrRead,
    /// The content.
    Read,
}

/// A walk, and what it shows without reading files.
struct Surveyed {
    walk: Walk,
    /// Comparison if the files of `unknown` have the saved content.
    comparison: Comparison,
    /// Indexes of the files to read.
    unknown: Vec<usize>,
}

impl Repository {
    /// True if the checkpoint at `path` has the entries and the content of the tree `name`. It reads all files. Permissions and times
    /// do not count. Of `options` those that say what is saved are used, `progress` and `stop`.
    ///
    /// # Errors
    /// Not found, if there is no such name; conflict, if a file changes meanwhile; cancelled, if it was stopped; errors of the store
    /// and the file system.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn holds(&self, name: &Name, path: &Path, options: &SaveOptions) -> Result<bool> {
        Ok(self.compare(name, path.to_path_buf(), options, Evidence::Read).await? == Comparison::Same)
    }

    /// Compares the checkpoint at `path` with the tree `name`, by `evidence`.
    ///
    /// # Errors
    /// As [`holds`](Self::holds).
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn compare(
        &self,
        name: &Name,
        path: PathBuf,
        options: &SaveOptions,
        evidence: Evidence,
    ) -> Result<Comparison> {
        let stop = options.stop.child_token();
        // A dropped comparison stops the threads, too.
        let _stops = stop.clone().drop_guard();
        let compared = self.compare_until(name, path, (options, evidence), stop.clone());
        Box::pin(unless_stopped(&stop, compared)).await
    }

    async fn compare_until(
        &self,
        name: &Name,
        path: PathBuf,
        (options, evidence): (&SaveOptions, Evidence),
        stop: CancellationToken,
    ) -> Result<Comparison> {
        let saved = Arc::new(self.saved(name).await?);
        let rules = Rules {
            excludes: options.exclude.clone(),
            skip: self.store().directory().map(Path::to_path_buf).into_iter().collect(),
            no_follow: true,
            no_ignore_files: options.no_ignore_files,
            stop: stop.clone(),
            memory: Some(self.budget().clone()),
            caller: options.caller.clone(),
        };
        let (repository, wanted, shown) = (self.clone(), Arc::clone(&saved), path.display().to_string());
        let use_record = evidence != Evidence::Read && !options.reread;
        let surveyed = blocking(move || {
            let walk = walk(&path, &rules)?;
            let memory = repository.budget().tree_memory(rules.caller.as_deref());
            let root = walk.root().filter(|_| use_record);
            let record = root.and_then(|root| Record::load(&repository.stat_cache(root), memory));
            Ok(survey(walk, &wanted, record.as_ref()))
        });
        let Surveyed { walk, comparison, unknown } = surveyed.await?;
        if comparison == Comparison::Other || unknown.is_empty() {
            return Ok(comparison);
        }
        if evidence == Evidence::Recorded {
            return Ok(Comparison::Unread);
        }
        let bytes = unknown
            .iter()
            .filter_map(|&at| walk.found.get(at))
            .map(|found| found.stat.size)
            .fold(0, u64::saturating_add);
        let (files, amount) = (unknown.len(), size::show(bytes));
        tracing::info!(
            "{files} files ({amount}) in {shown} are read to compare them with {name}: their save is not recorded here"
        );
        options.progress.phase("comparing", bytes);
        let reading = Reading { saved, walk: Arc::new(walk), progress: options.progress.clone(), stop };
        Ok(if reading.all_equal(unknown).await? { comparison } else { Comparison::Other })
    }
}

/// Compares what `walk` found with a saved tree, without reading files. Blocks.
fn survey(walk: Walk, saved: &Saved, record: Option<&Record>) -> Surveyed {
    let manifest = &saved.manifest;
    let is_known = |found: &WalkEntry, content: &Content| {
        let Some(Record { stats, manifest: earlier, .. }) = record else { return false };
        match earlier.entry(&found.path).map(|entry| &entry.kind) {
            Some(EntryKind::File(known)) => {
                stats.unchanged(&found.path, &found.stat)
                    && has_same_chunks((known, &earlier.chunks), (content, &manifest.chunks))
            }
            _ => false,
        }
    };
    let (mut unknown, mut is_alike) = (Vec::new(), true);
    for (at, found) in walk.found.iter().enumerate() {
        is_alike = match (&found.kind, manifest.entry(&found.path).map(|entry| &entry.kind)) {
            (WalkKind::File, Some(EntryKind::File(content))) if found.stat.size == content.size => {
                unknown.extend((!is_known(found, content)).then_some(at));
                true
            }
            (WalkKind::Symlink { target }, Some(EntryKind::Symlink(saved))) => target == saved,
            (WalkKind::Folder, Some(EntryKind::Folder)) => true,
            _ => false,
        };
        if !is_alike {
            break;
        }
    }
    let comparison = match is_alike {
        true if walk.found.len() == manifest.entries.len() => Comparison::Same,
        true => Comparison::Less,
        false => Comparison::Other,
    };
    Surveyed { walk, comparison, unknown }
}

/// True if two files of two trees have the same chunks at the same places.
fn has_same_chunks((one, of_one): (&Content, &ChunkList), (other, of_other): (&Content, &ChunkList)) -> bool {
    let id = |chunks: &ChunkList, chunk: u32| chunks.ids.get(chunk as usize).copied();
    let first = one.placed(of_one).map(|(chunk, range)| (id(of_one, chunk), range));
    let second = other.placed(of_other).map(|(chunk, range)| (id(of_other, chunk), range));
    one.size == other.size && first.eq(second)
}

/// Files that are read.
#[derive(Clone)]
struct Reading {
    saved: Arc<Saved>,
    walk: Arc<Walk>,
    progress: Progress,
    stop: CancellationToken,
}

impl Reading {
    /// True if all of `files`, which are indexes, have the saved content. Ends at the first one that has not.
    async fn all_equal(&self, files: Vec<usize>) -> Result<bool> {
        let parallelism = std::thread::available_parallelism().map_or(2, usize::from);
        let comparisons = files.into_iter().map(|at| {
            let reading = self.clone();
            blocking(move || reading.is_equal(at))
        });
        let mut comparisons = stream::iter(comparisons).buffer_unordered(parallelism);
        while let Some(is_equal) = comparisons.try_next().await? {
            if !is_equal {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// True if a file has the saved content. Blocks.
    fn is_equal(&self, at: usize) -> Result<bool> {
        let Some(found) = self.walk.found.get(at) else { return Ok(false) };
        let Some(EntryKind::File(content)) = self.saved.manifest.entry(&found.path).map(|entry| &entry.kind) else {
            return Ok(false);
        };
        let file = open(&self.walk, found)?;
        check_unchanged(&file, found)?;
        let wanted = (content, &self.saved.manifest.chunks);
        let is_equal = compare_file(wanted, &file, found.stat.size, &self.stop, |_, range, is_there| {
            self.progress.advance(range.end - range.start);
            if is_there && !self.stop.is_cancelled() { Next::Continue } else { Next::End }
        })?;
        check_unchanged(&file, found)?;
        Ok(is_equal)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::repository::OpenOptions;
    use crate::storage::Store;
    use crate::tree::coarse_now;

    async fn repository(cache: &Path) -> Repository {
        let options = OpenOptions { cache: Some(cache.to_owned()), ..OpenOptions::default() };
        Repository::create(Store::memory(), options).await.unwrap().0
    }

    /// A checkpoint whose files a save records.
    fn checkpoint(dir: &Path) -> PathBuf {
        let path = dir.join("checkpoint-1");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("a"), [1; 1000]).unwrap();
        fs::write(path.join("b"), [2; 1000]).unwrap();
        let written = coarse_now();
        while coarse_now().0 <= written.0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        path
    }

    /// Writes other bytes of the same size, and keeps the modification time.
    fn falsify(file: &Path) {
        let modified = fs::metadata(file).unwrap().modified().unwrap();
        fs::write(file, [9; 1000]).unwrap();
        fs::File::options().append(true).open(file).unwrap().set_modified(modified).unwrap();
    }

    #[tokio::test]
    async fn what_this_host_saved_is_not_read_and_all_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, path) = (dir.path().join("cache"), checkpoint(dir.path()));
        let (repository, name) = (repository(&cache).await, "run/step-1".parse::<Name>().unwrap());
        let options = SaveOptions::default();
        repository.save(&path, &name, &options).await.unwrap();
        let compared = async |options: &SaveOptions, evidence| {
            repository.compare(&name, path.clone(), options, evidence).await.unwrap()
        };
        assert_eq!(compared(&options, Evidence::Recorded).await, Comparison::Same);
        let reread = SaveOptions { reread: true, ..SaveOptions::default() };
        assert_eq!(compared(&reread, Evidence::Recorded).await, Comparison::Unread);

        // Other labels, with the same content: the record still tells.
        let labels = [("stage".to_owned(), "eval".to_owned())].into();
        repository.save(&path, &name, &SaveOptions { labels, ..SaveOptions::default() }).await.unwrap();
        assert_eq!(compared(&options, Evidence::Recorded).await, Comparison::Same);

        fs::rename(&cache, dir.path().join("gone")).unwrap();
        assert_eq!(compared(&options, Evidence::Recorded).await, Comparison::Unread);
        assert_eq!(compared(&options, Evidence::RecordedOrRead).await, Comparison::Same);
        fs::rename(dir.path().join("gone"), &cache).unwrap();

        falsify(&path.join("b"));
        assert_eq!(compared(&options, Evidence::Recorded).await, Comparison::Unread);
        assert_eq!(compared(&options, Evidence::RecordedOrRead).await, Comparison::Other);
        fs::remove_file(path.join("b")).unwrap();
        assert_eq!(compared(&options, Evidence::Recorded).await, Comparison::Less);
    }

    #[tokio::test]
    async fn a_part_is_less_only_if_its_content_is_the_saved_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let (repository, name) = (repository(&dir.path().join("cache")).await, "run/step-1".parse::<Name>().unwrap());
        let options = SaveOptions::default();
        repository.save(&path, &name, &options).await.unwrap();
        assert!(repository.holds(&name, &path, &options).await.unwrap());
        fs::remove_file(path.join("b")).unwrap();
        let compared = async || repository.compare(&name, path.clone(), &options, Evidence::Read).await.unwrap();
        assert_eq!(compared().await, Comparison::Less);
        assert!(!repository.holds(&name, &path, &options).await.unwrap());
        falsify(&path.join("a"));
        assert_eq!(compared().await, Comparison::Other);
    }

    #[tokio::test]
    async fn a_stopped_comparison_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let (repository, name) = (repository(&dir.path().join("cache")).await, "run/step-1".parse::<Name>().unwrap());
        let options = SaveOptions::default();
        repository.save(&path, &name, &options).await.unwrap();
        options.stop.cancel();
        let error = repository.holds(&name, &path, &options).await.unwrap_err();
        assert_eq!(error.kind(), crate::error::ErrorKind::Cancelled, "{error:?}");
    }
}
