//! Restore: manifest -> plan -> fetch -> decode + verify -> place.
//!
//! First a survey of the destination finds conflicts before anything is written, and data that need not be fetched. Then files
//! are filled under temporary names, and renamed when they are complete.

mod items;
mod links;
mod place;
mod running;
mod surplus;
mod survey;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use self::items::{Item, Items};
use self::links::check_links;
use self::place::{Placing, resume};
use self::running::Running;
pub use self::surplus::RemovedFiles;
use self::surplus::Surplus;
use self::survey::{Survey, survey};
use super::stopping::unless_stopped;
use crate::chunk::Chunk;
use crate::error::{Error, ErrorKind, Result};
use crate::format::EntryKind;
use crate::name::Name;
use crate::progress::Progress;
use crate::repository::{Gaps, PackRead, Repository, Saved, Sink, SourceBytes, fetch, longest_read, plan};
use crate::tree::{Durability, Target};
use crate::work::blocking;

/// Maximum retries of a restore with a newer map after packs were deleted.
pub(super) const ATTEMPTS: usize = 5;
/// Maximum number of files of several chunks that are filled at once; each needs a descriptor.
const FILLED_AT_ONCE: usize = 512;
/// Files that are filled in turn, so that workers rarely wait for each other to write to the same one.
const FILES_BY_TURNS: usize = 16;

/// Options of a restore.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct RestoreOptions {
    /// Replace entries that are in the way and differ.
    pub overwrite: bool,
    /// Remove entries that the tree lacks.
    pub delete: bool,
    /// With `delete`, allow a tree without files to empty a folder.
    pub may_empty: bool,
    /// Only report what would be done: nothing is written, created or removed.
    pub dry_run: bool,
    /// Restore only files and folders of a folder whose path is, or matches, one of these: in a pattern `*` stays within a
    /// segment, `**` does not. All, if there are none.
    pub only: Vec<String>,
    /// Keep setuid and setgid bits.
    pub keep_setuid: bool,
    /// Refuse a tree with a symbolic link that leads out of it, for a program that follows links there.
    pub refuse_links_out: bool,
    /// Progress counters.
    pub progress: Progress,
    /// Cancelled to stop the restore: it ends once nothing in the destination is changed any more, and the next one uses what has
    /// come.
    pub stop: CancellationToken,
}

/// Result of a restore or dry run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RestoreReport {
    /// True for a dry run: the numbers are those of a later restore.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// The name.
    pub name: String,
    /// Bytes in all requested files, holes included.
    pub bytes: u64,
    /// Stored bytes that were fetched.
    pub fetched_bytes: u64,
    /// The same, by where they came from.
    pub sources: SourceBytes,
    /// Plain bytes that were already in the destination.
    pub reused_bytes: u64,
    /// Files.
    pub files: u64,
    /// Files and links in the destination that differed and were replaced.
    #[serde(skip_serializing_if = "is_zero")]
    pub replaced_files: u64,
    /// Files removed by `delete`, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removed: Option<RemovedFiles>,
    /// Duration in seconds.
    pub seconds: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(super) fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Repository {
    /// Restores the tree `name`, or the entry at `subpath` in it, to `dest`. The content of a folder is restored into `dest`; a
    /// single file to the path `dest`, or into it if `dest` is a folder or ends in `/`.
    ///
    /// # Errors
    /// Not found, for the name, the subpath, or a pattern that matches nothing; usage, for patterns together with `delete`;
    /// unsupported, for a file with the name of an unfinished one; denied, for links that are refused; conflict, before anything
    /// is written, if `dest` lies in a repository, if a file in the way differs, or if a tree without any file would empty a
    /// folder; damaged, with pack and chunk, if stored bytes are damaged: no wrong byte is placed; cancelled, if it was stopped.
    ///
    /// # Cancel safety
    /// Safe: each file is complete or absent. Partial files stay as hidden files beside them (`.towline-*.part`), which the next
    /// restore to `dest` uses or removes. When it returns, nothing in `dest` is changed any more, also after an error or a stop.
    /// After a drop, threads may still complete the one file or removal that each of them has begun: to wait for them, stop it
    /// instead.
    #[tracing::instrument(skip_all, fields(%name))]
    pub async fn restore(
        &self,
        name: &Name,
        subpath: Option<&[u8]>,
        dest: &Path,
        options: &RestoreOptions,
    ) -> Result<RestoreReport> {
        let running = Running::new(&options.stop);
        let restored = Box::pin(self.restore_until(name, subpath, dest, options, &running));
        let restored = unless_stopped(&options.stop, restored).await;
        running.ended().await;
        restored.map_err(|error| {
            if error.kind() != ErrorKind::Cancelled || !options.stop.is_cancelled() {
                return error;
            }
            Error::cancelled(format!("the restore of {name} was interrupted"))
                .help("run the same again to resume: it uses what has come")
        })
    }

    /// As [`restore`](Self::restore), as a part of `running`.
    async fn restore_until(
        &self,
        name: &Name,
        subpath: Option<&[u8]>,
        dest: &Path,
        options: &RestoreOptions,
        running: &Running,
    ) -> Result<RestoreReport> {
        let begun = std::time::Instant::now();
        if options.delete && !options.only.is_empty() {
            return Err(Error::usage("only some paths are to be restored, and everything else deleted")
                .got(options.only.join(", "))
                .help("leave out one of the two"));
        }
        options.progress.phase("opening", 0);
        let saved = self.saved(name).await?.shared();
        if options.refuse_links_out {
            check_links(&saved)?;
        }
        let mut items = Items::choose_apart(&saved, subpath, &options.only, dest).await?;
        items.keep_setuid = options.keep_setuid;
        let items = Arc::new(items);
        let dry_run = options.dry_run;
        let target = running.target(items.folder.clone(), dry_run).await?;
        let surveyed = survey(&saved, &items, target.as_ref(), options).await?;
        let surplus = match &target {
            Some(target) if options.delete && items.is_folder => Some(Arc::new(self.surplus(&items, target).await?)),
            _ => None,
        };
        self.check_kept(&items, &surveyed)?;
        if let Some(surplus) = surplus.as_ref().filter(|_| !options.may_empty) {
            surplus.check(&items, items.is_folders_only(&saved))?;
        }
        let mut report = RestoreReport {
            dry_run,
            name: name.to_string(),
            bytes: items.bytes(&saved),
            files: items.files(&saved),
            reused_bytes: surveyed.reused_bytes,
            replaced_files: surveyed.replaced_files,
            ..RestoreReport::default()
        };
        match target.filter(|_| !dry_run) {
            Some(target) => {
                let plan = PlannedRestore { saved, items, target, surveyed, surplus: surplus.clone() };
                report.sources = self.place(plan, &options.progress).await?;
                report.fetched_bytes = report.sources.total();
            }
            None => {
                let missing = surveyed.missing(&saved, &items)?;
                let longest = longest_read(self, self.budget());
                let reads = plan(|chunk| saved.locate(chunk), missing, longest, Gaps::Wide)?;
                report.fetched_bytes = reads.iter().map(PackRead::stored_len).sum();
            }
        }
        let removed = || surplus.map(Arc::unwrap_or_clone).map(Surplus::into_removed).unwrap_or_default();
        report.removed = options.delete.then(removed);
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Refuses to remove a folder that the repository itself lies in.
    fn check_kept(&self, items: &Items, surveyed: &Survey) -> Result<()> {
        let Some(home) = self.store().directory().and_then(|home| home.canonicalize().ok()) else { return Ok(()) };
        for path in &surveyed.cleared {
            let place = items.folder.join(Path::new(OsStr::from_bytes(path)));
            let is_folder = place.symlink_metadata().is_ok_and(|found| found.is_dir());
            if is_folder && place.canonicalize().is_ok_and(|place| home.starts_with(place)) {
                return Err(Error::conflict("the repository itself lies where a file is to be restored")
                    .at(place.display())
                    .help("restore to another folder"));
            }
        }
        Ok(())
    }

    /// Entries of the folder `dest` that the tree `name` lacks: those that a restore to it with `delete` removes.
    ///
    /// # Errors
    /// Not found, for the name; usage, for a malformed ignore file in `dest`; exhausted, for more entries than the budget holds.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn surplus_of(&self, name: &Name, dest: &Path) -> Result<RemovedFiles> {
        let saved = self.saved(name).await?.shared();
        let items = Arc::new(Items::choose(&saved, None, &[], dest)?);
        let folder = items.folder.clone();
        match blocking(move || Target::there(&folder, Durability::Process)).await? {
            Some(target) if items.is_folder => Ok(self.surplus(&items, &Arc::new(target)).await?.into_removed()),
            _ => Ok(RemovedFiles::default()),
        }
    }

    /// Entries of the target that are not among the items, except a repository there.
    async fn surplus(&self, items: &Arc<Items>, target: &Arc<Target>) -> Result<Surplus> {
        let keep: Vec<_> = self.store().directory().map(Path::to_path_buf).into_iter().collect();
        let (items, target, budget) = (Arc::clone(items), Arc::clone(target), self.budget().clone());
        blocking(move || Surplus::find(&items, &target, &keep, &budget)).await
    }

    /// Executes the plan; returns the stored bytes that were fetched.
    async fn place(&self, plan: PlannedRestore, progress: &Progress) -> Result<SourceBytes> {
        let PlannedRestore { saved, items, target, surveyed, surplus } = plan;
        let surveyed = Arc::new(surveyed);
        let mut resumed = {
            let (saved, items, target, surveyed) =
                (Arc::clone(&saved), Arc::clone(&items), Arc::clone(&target), Arc::clone(&surveyed));
            blocking(move || resume(&saved, &items, &target, &surveyed)).await?
        };
        // Removes other unfinished files.
        prepare(&saved, &items, &target, &surveyed).await?;
        progress.phase("restoring", surveyed.wanted_bytes(&saved, &items));
        let mut fetched = SourceBytes::default();
        for group in groups(&saved, &items, &surveyed) {
            let placing = Placing::new(&saved, &items, &target, &group, (&surveyed, &mut resumed))?;
            fetched += self.fill(placing, &surveyed, progress).await?;
        }
        blocking(move || {
            surplus.map_or(Ok(()), |surplus| surplus.remove(&target))?;
            finish(&saved, &items, &target, &surveyed)
        })
        .await?;
        Ok(fetched)
    }

    /// Fills one group of files; returns the stored bytes that were fetched.
    async fn fill(&self, placing: Placing, surveyed: &Arc<Survey>, progress: &Progress) -> Result<SourceBytes> {
        let placing = Arc::new(placing);
        let filled = self.fill_in(&placing, surveyed, progress).await;
        // Keeps unfinished files only if the next run can continue: not after a full disk or damaged data.
        let continues = |error: &Error| matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Cancelled);
        if filled.as_ref().is_err_and(|error| !continues(error)) {
            placing.discard();
        }
        filled
    }

    async fn fill_in(
        &self,
        placing: &Arc<Placing>,
        surveyed: &Arc<Survey>,
        progress: &Progress,
    ) -> Result<SourceBytes> {
        let (here, found) = (Arc::clone(placing), Arc::clone(surveyed));
        blocking(move || here.place_resumed(&found).and_then(|()| here.place_local(&found))).await?;
        let longest = longest_read(self, self.budget());
        let saved = placing.saved();
        let mut current = Arc::clone(saved);
        let mut fetched = SourceBytes::default();
        for _ in 0..ATTEMPTS {
            let reads = plan(|chunk| current.locate(chunk), placing.missing(), longest, Gaps::Wide)?;
            let reads = interleaved(reads, FILES_BY_TURNS, |read| placing.file_of(read));
            let sink: Arc<dyn Sink> = {
                let placing = Arc::clone(placing);
                Arc::new(move |chunk: u32, bytes: Chunk<'_>| placing.place(chunk, bytes.bytes()))
            };
            match fetch(self, &current, reads, sink, progress).await {
                Ok(read) => {
                    fetched += read;
                    placing.check_complete()?;
                    return Ok(fetched);
                }
                Err(error) if error.kind() == ErrorKind::NotFound => current = self.newer(&current, error).await?,
                Err(error) => return Err(error),
            }
        }
        Err(Error::busy("packs are repacked faster than they can be read").at(&saved.name).help("try again"))
    }

    /// Handles a deleted pack: the name may have a new map of the same tree.
    pub(super) async fn newer(&self, old: &Arc<Saved>, error: Error) -> Result<Arc<Saved>> {
        let state = self.state().await?;
        match state.refs.get(&old.name) {
            Some(value) if value.map_key == old.value.map_key => Err(Error::damaged("a pack is missing")
                .at(error.place().unwrap_or("an unknown key"))
                .help("`towline verify --repair` tells what it hits; save the same content, under any name, and run it again: it heals it")
                .source(error)),
            Some(value) if value.manifest == old.value.manifest => Ok(self.saved(&old.name).await?.shared()),
            Some(_) => Err(Error::conflict("name was replaced and its old content collected during this restore")
                .at(&old.name)
                .help("run the restore again")),
            None => {
                Err(Error::not_found("name was removed and its content collected during this restore").at(&old.name))
            }
        }
    }
}

/// A restore that is ready to be executed.
struct PlannedRestore {
    saved: Arc<Saved>,
    items: Arc<Items>,
    target: Arc<Target>,
    surveyed: Survey,
    surplus: Option<Arc<Surplus>>,
}

/// Creates folders and links, and removes entries that may be replaced.
async fn prepare(saved: &Arc<Saved>, items: &Arc<Items>, target: &Arc<Target>, surveyed: &Survey) -> Result<()> {
    let (saved, items, target) = (Arc::clone(saved), Arc::clone(items), Arc::clone(target));
    let (replaced, cleared) = (surveyed.replaced.clone(), surveyed.cleared.clone());
    let links = surveyed.links.clone();
    blocking(move || {
        target.sweep()?;
        replaced.iter().try_for_each(|path| target.remove_alone(path))?;
        // Folders in the way of a file stay until that is complete.
        let mut files = HashSet::new();
        for item in &items.list {
            if matches!(item.entry(&saved)?.kind, EntryKind::File(_)) {
                files.insert(&item.path);
            }
        }
        cleared.iter().filter(|path| !files.contains(path)).try_for_each(|path| target.remove(path))?;
        for item in &items.list {
            if matches!(item.entry(&saved)?.kind, EntryKind::Folder) {
                target.make_folder(&item.path)?;
            }
        }
        for at in links {
            let Some(item) = items.list.get(at) else { continue };
            let entry = item.entry(&saved)?;
            if let EntryKind::Symlink(points_to) = &entry.kind {
                target.symlink(&item.path, points_to, entry.mtime)?;
            }
        }
        Ok(())
    })
    .await
}

/// Sets modes and times.
fn finish(saved: &Saved, items: &Items, target: &Target, surveyed: &Survey) -> Result<()> {
    for &at in &surveyed.kept {
        let Some(item) = items.list.get(at) else { continue };
        let entry = item.entry(saved)?;
        if matches!(entry.kind, EntryKind::File(_)) {
            target.set_file(&item.path, items.mode(entry), entry.mtime)?;
        }
    }
    for item in items.list.iter().rev() {
        let entry = item.entry(saved)?;
        if matches!(entry.kind, EntryKind::Folder) {
            // The modes of a saved tree must not widen those of an existing folder.
            let own = target.found_mode().filter(|_| item.path.is_empty());
            target.set_folder(&item.path, own.unwrap_or_else(|| items.mode(entry)), entry.mtime)?;
        }
    }
    target.flush()
}

/// Files to fill, in groups that limit the number of open files.
fn groups(saved: &Saved, items: &Items, surveyed: &Survey) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut open = FILLED_AT_ONCE;
    for &at in &surveyed.written {
        let long = items.list.get(at).is_some_and(|item| item.chunks(saved) > 1);
        if open >= FILLED_AT_ONCE {
            groups.push(Vec::new());
            open = 0;
        }
        open += usize::from(long);
        if let Some(group) = groups.last_mut() {
            group.push(at);
        }
    }
    groups
}

/// Reorders reads so that neighbours fill different files, `lanes` of them in turn, because a kernel allows one writer per file
/// at a time. Within a file the order stays.
fn interleaved(reads: Vec<PackRead>, lanes: usize, file_of: impl Fn(&PackRead) -> usize) -> Vec<PackRead> {
    let total = reads.len();
    let mut by_file: Vec<VecDeque<PackRead>> = Vec::new();
    let mut queues: HashMap<usize, usize> = HashMap::new();
    for read in reads {
        let queue = *queues.entry(file_of(&read)).or_insert(by_file.len());
        match by_file.get_mut(queue) {
            Some(queue) => queue.push_back(read),
            None => by_file.push(VecDeque::from([read])),
        }
    }
    let mut waiting = by_file.into_iter();
    let mut queues: VecDeque<VecDeque<PackRead>> = waiting.by_ref().take(lanes).collect();
    let mut ordered = Vec::with_capacity(total);
    while let Some(mut queue) = queues.pop_front() {
        ordered.extend(queue.pop_front());
        if queue.is_empty() {
            queues.extend(waiting.next());
        } else {
            queues.push_back(queue);
        }
    }
    ordered
}

/// Targets of each chunk: items by index, with the offset in the file.
type Destinations = BTreeMap<u32, Vec<(usize, u64)>>;

/// The chunks that the files of `group` are made of.
fn destinations(saved: &Saved, items: &Items, group: &[usize]) -> Result<Destinations> {
    let mut destinations = Destinations::new();
    for &at in group {
        let Some(item) = items.list.get(at) else { continue };
        if let EntryKind::File(content) = &item.entry(saved)?.kind {
            for (chunk, range) in content.placed(&saved.manifest.chunks) {
                destinations.entry(chunk).or_default().push((at, range.start));
            }
        }
    }
    Ok(destinations)
}

impl Item {
    fn chunks(&self, saved: &Saved) -> u64 {
        match self.entry(saved).map(|entry| &entry.kind) {
            Ok(EntryKind::File(content)) => content.pieces.iter().map(|piece| u64::from(piece.count)).sum(),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Owned, SessionId};

    fn reads(files: &[u32]) -> Vec<PackRead> {
        let pack = Owned::fresh(SessionId::random());
        let at = |(start, &file): (u64, &u32)| PackRead::of(pack, start..start + 1, [file]);
        (0..).zip(files).map(at).collect()
    }

    fn interleave(files: &[u32], lanes: usize) -> Vec<(u32, u64)> {
        let ordered = interleaved(reads(files), lanes, |read| read.chunks[0].chunk as usize);
        ordered.into_iter().map(|read| (read.chunks[0].chunk, read.parts[0].range.start)).collect()
    }

    #[test]
    fn neighbouring_reads_fill_different_files() {
        assert_eq!(interleave(&[1, 1, 1, 2, 2, 3], 2), [(1, 0), (2, 3), (1, 1), (2, 4), (1, 2), (3, 5)]);
        assert_eq!(interleave(&[1, 1, 2, 3], 9), [(1, 0), (2, 2), (3, 3), (1, 1)]);
    }

    #[test]
    fn one_file_and_many_small_ones_keep_their_order() {
        assert_eq!(interleave(&[7, 7, 7], 3), [(7, 0), (7, 1), (7, 2)]);
        assert_eq!(interleave(&[1, 2, 3, 4], 2), [(1, 0), (2, 1), (3, 2), (4, 3)]);
        assert_eq!(interleave(&[], 2), []);
    }
}
