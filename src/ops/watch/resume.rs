//! Restore of the latest step before a folder is watched, so that the framework finds it and continues.
//!
//! Other users may be able to write to the folder. So the step is restored into a private subfolder, which no link can replace,
//! and then moved to its place.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    AtFlags, Mode, OFlags, RenameFlags, fstat, mkdirat, open, openat, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use tokio::time::{sleep, timeout};
use ulid::Ulid;

use super::candidate::{Class, Tracker, classify, is_set_aside, set_aside_name};
use super::events::WatchEvent;
use super::metrics::best_step;
use super::scan::{NUMBER_ALONE, Scanner};
use super::state::{FolderScan, ObservedCheckpoint};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Form;
use crate::name::Name;
use crate::ops::{RestoreOptions, RestoreReport};
use crate::repository::{Repository, Run, Saved};
use crate::selector::{Choice, Selector};
use crate::tree::{Readers, replace_file};
use crate::work::blocking;

/// Label with the name of a step's entry in the watched folder.
pub(super) const ENTRY_LABEL: &str = "watch.entry";
/// Limit of an entry's name in bytes: the names of files while it is restored are longer.
const ENTRY_LEN_MAX: usize = 200;
/// Limit of a tracker file in bytes.
const TRACKER_LEN_MAX: u64 = 4096;
/// Time limit of a look at the run of a folder that needs no restore.
const LOOK_MAX: Duration = Duration::from_secs(10);
/// Label with the tracker file that named it.
pub(super) const TRACKER_LABEL: &str = "watch.tracker";

impl Repository {
    /// Restores the latest step of `run` into `dir`, if that has no checkpoint, and the one that it names as the best; returns the
    /// latest entry's name. The entries appear when both are complete, one right after the other. Incomplete checkpoints in `dir`
    /// that do not change for `settle` stay, with another name where theirs is needed.
    pub(super) async fn resume(
        &self,
        dir: &Path,
        run: &Name,
        settle: Duration,
        tell: &mut (dyn FnMut(WatchEvent) + Send),
    ) -> Result<Option<String>> {
        let held = Held::look(dir, settle).await?;
        if let Some((step, entry)) = held.latest {
            tell(self.not_restored(run, step, &entry).await);
            return Ok(None);
        }
        let latest = Selector::Step { run: run.clone(), choice: Choice::Latest };
        let name = match self.resolve(&latest).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                tell(WatchEvent::NotRestored { reason: "the run has no step yet".to_owned(), later: None });
                return Ok(None);
            }
            name => name?,
        };
        let latest = self.stage(dir, &name, true).await?;
        let best = self.stage_best(dir, run, (&name, &latest)).await;
        // Their writers may have gone on meanwhile.
        let held = Held::new(scanned(dir).await?, Some(&held.incomplete));
        // The latest one first: a folder that holds any checkpoint is not restored to.
        let latest = match latest.publish(true, &held).await {
            Err(error) => {
                if let Some(Ok(best)) = best {
                    best.discard().await;
                }
                return Err(error);
            }
            latest => latest?,
        };
        let best = match best {
            Some(Ok(best)) => Some(best.publish(false, &held).await),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        };
        let entry = latest.entry.clone();
        // Whoever waits for the restore may begin at the first event.
        latest.tell(tell);
        held.tell_later(dir, (&name, &entry), tell);
        match best {
            Some(Ok(best)) => best.tell(tell),
            Some(Err(error)) => {
                let reason = format!("the best checkpoint by {entry} cannot be restored: {error}");
                tell(WatchEvent::NotRestored { reason, later: None });
            }
            None => {}
        }
        Ok(Some(entry))
    }

    /// Restores the step `name` into a private folder in `dir`. An error removes that, except where the store could not be
    /// reached, if `is_resumed` says that another try follows, which uses it.
    async fn stage(&self, dir: &Path, name: &Name, is_resumed: bool) -> Result<StagedStep> {
        let saved = self.saved(name).await?;
        let entry = entry_name(&saved)?;
        let tracker = match tracker(&saved, &entry) {
            Some(tracker) => {
                let path = dir.join(tracker.name());
                let text = text(tracker, &saved, &entry);
                let place = path.clone();
                blocking(move || check_replaceable(tracker, &place)).await?;
                Some((path, text))
            }
            None => None,
        };
        let (folder, called) = (dir.to_owned(), entry.clone());
        let staging = blocking(move || Staging::open(&folder, &called)).await?;
        let options = RestoreOptions {
            overwrite: true,
            delete: true,
            may_empty: true,
            refuse_links_out: true,
            ..RestoreOptions::default()
        };
        let report = self.restore(name, None, &staging.dest(), &options).await;
        match report {
            Ok(report) => Ok(StagedStep { staging, tracker, report }),
            Err(error) => {
                if !is_resumed || error.kind() != ErrorKind::Unreachable {
                    let _ = blocking(move || {
                        staging.discard();
                        Ok(())
                    })
                    .await;
                }
                Err(error.at(dir.join(&entry).display()))
            }
        }
    }

    /// As [`Self::stage`], for the step that the `latest` one names as the best: Hugging Face's Trainer forgets it if its folder is not
    /// there. None, if it names none, or itself.
    async fn stage_best(
        &self,
        dir: &Path,
        run: &Name,
        (latest, staged): (&Name, &StagedStep),
    ) -> Option<Result<StagedStep>> {
        let folder = staged.staging.dest();
        let step = blocking(move || Ok(best_step(&folder))).await.ok()??;
        if latest.step().is_some_and(|(_, number)| number == step) {
            return None;
        }
        let best = format!("{run}/step-{step}").parse().ok()?;
        Some(self.stage(dir, &best, false).await)
    }
}

/// A step in a private folder, ready to be moved to its place.
struct StagedStep {
    staging: Staging,
    /// Place and text of the tracker file, if its framework writes one.
    tracker: Option<(PathBuf, String)>,
    report: RestoreReport,
}

impl StagedStep {
    /// Moves it to its place, from which an incomplete checkpoint is moved away. The latest step gets its tracker file.
    async fn publish(self, is_latest: bool, held: &Held) -> Result<PublishedStep> {
        let Self { staging, tracker, report } = self;
        let entry = staging.entry.clone();
        let is_taken = held.incomplete.contains_key(&entry);
        let aside = blocking(move || match staging.publish(is_taken) {
            Ok(aside) => {
                if let Some((path, text)) = tracker.filter(|_| is_latest) {
                    replace_file(&path, &text, Readers::All)?;
                }
                Ok(aside)
            }
            Err(error) => {
                staging.discard();
                Err(error)
            }
        })
        .await?;
        Ok(PublishedStep { entry, report, aside })
    }

    /// Removes it.
    async fn discard(self) {
        let _ = blocking(move || {
            self.staging.discard();
            Ok(())
        })
        .await;
    }
}

/// A step in its place.
struct PublishedStep {
    entry: String,
    report: RestoreReport,
    /// New name of the incomplete checkpoint that was in the place.
    aside: Option<String>,
}

impl PublishedStep {
    fn tell(self, tell: &mut (dyn FnMut(WatchEvent) + Send)) {
        let Self { entry, report, aside } = self;
        tell(WatchEvent::Restored { entry: entry.clone(), report });
        if let Some(aside) = aside {
            let reason = format!("the one that was there is incomplete, and is called {aside} now");
            tell(WatchEvent::PassedOver { entry, reason });
        }
    }
}

/// Checkpoints in the watched folder before a restore.
#[derive(Default)]
struct Held {
    /// The latest one, and its step if its name has one.
    latest: Option<(Option<u64>, String)>,
    /// Incomplete ones that nobody writes to.
    incomplete: BTreeMap<String, ObservedCheckpoint>,
}

impl Held {
    /// Looks at `dir`; again after `settle`, if only incomplete ones are there.
    async fn look(dir: &Path, settle: Duration) -> Result<Self> {
        let first = Self::new(scanned(dir).await?, None);
        if first.latest.is_some() || first.incomplete.is_empty() {
            return Ok(first);
        }
        sleep(settle).await;
        Ok(Self::new(scanned(dir).await?, Some(&first.incomplete)))
    }

    /// Checkpoints in `scan`. Of the incomplete ones only those count as such that are in `before`, if given.
    fn new(scan: FolderScan, before: Option<&BTreeMap<String, ObservedCheckpoint>>) -> Self {
        let mut held = Self::default();
        for (entry, one) in scan.checkpoints {
            let is_same = before.is_none_or(|before| before.get(&entry).is_some_and(|before| before.seen == one.seen));
            if is_same && one.seen.is_incomplete() {
                held.incomplete.insert(entry, one);
            } else {
                held.latest = held.latest.max(Some((Some(one.step), entry)));
            }
        }
        let parted = scan.parted.iter().map(|step| step.first().to_owned());
        let others = scan.others.into_iter().filter(|(entry, reason)| !is_set_aside(entry) && reason != NUMBER_ALONE);
        for entry in others.map(|(entry, _)| entry).chain(parted) {
            held.latest = held.latest.max(Some((None, entry)));
        }
        held
    }

    /// Tells of the incomplete checkpoints in `dir` of later steps than the `restored` one, the step and its entry.
    fn tell_later(&self, dir: &Path, (step, restored): (&Name, &str), tell: &mut (dyn FnMut(WatchEvent) + Send)) {
        let Some((_, number)) = step.step() else { return };
        for (entry, _) in self.incomplete.iter().filter(|(_, one)| one.step > number) {
            let reason = format!(
                "it is incomplete, and of a later step than the restored {restored}: a training that looks for the highest step, \
                 as get_last_checkpoint of Trainer does, takes it (move {} away before the training starts)",
                dir.join(entry).display()
            );
            tell(WatchEvent::PassedOver { entry: entry.clone(), reason });
        }
    }
}

async fn scanned(dir: &Path) -> Result<FolderScan> {
    let mut scanner = Scanner::new(dir);
    Ok(blocking(move || scanner.scan()).await?.unwrap_or_default())
}

impl Repository {
    /// Event for a folder whose latest checkpoint is `entry`; of the step `step`, if it has a number.
    async fn not_restored(&self, run: &Name, step: Option<u64>, entry: &str) -> WatchEvent {
        let reason = format!("the folder holds checkpoints already: {entry}");
        // The watch begins also while the store is away.
        let Ok(Ok(state)) = timeout(LOOK_MAX, self.state()).await else {
            return WatchEvent::NotRestored { reason, later: None };
        };
        let latest = Run::find(&state.refs, run).ok().map(|run| run.latest());
        let later = latest.filter(|latest| step.is_some_and(|step| latest.number > step));
        WatchEvent::NotRestored { reason, later: later.map(|later| later.name.to_string()) }
    }
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Permission bits of group and others.
const OTHERS: u32 = 0o077;

/// A private folder in the watched one, in which a step is restored.
struct Staging {
    /// The watched folder.
    dir: OwnedFd,
    shown: PathBuf,
    /// The private folder, and its name.
    own: OwnedFd,
    name: OsString,
    entry: String,
}

impl Staging {
    /// Opens or creates it. One of an earlier, killed restore is reused.
    fn open(dir: &Path, entry: &str) -> Result<Self> {
        let fault = |errno: Errno| Error::io("cannot restore a checkpoint in the watched folder", dir, errno.into());
        std::fs::create_dir_all(dir).map_err(|error| Error::io("cannot make the watched folder", dir, error))?;
        let opened = open(dir, FOLDER.difference(OFlags::NOFOLLOW), Mode::empty()).map_err(fault)?;
        // The leading dot keeps frameworks from treating it as a checkpoint.
        let usual = OsString::from(format!(".{entry}.towline-tmp"));
        let unique = OsString::from(format!(".{entry}.{}.towline-tmp", Ulid::generate()));
        for name in [usual, unique] {
            match mkdirat(&opened, &name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(fault(errno)),
            }
            let own = match openat(&opened, &name, FOLDER, Mode::empty()) {
                Ok(own) => own,
                // Another kind of entry, possibly planted.
                Err(Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => continue,
                Err(errno) => return Err(fault(errno)),
            };
            let stat = fstat(&own).map_err(fault)?;
            if stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & OTHERS == 0 {
                return Ok(Self { dir: opened, shown: dir.to_owned(), own, name, entry: entry.to_owned() });
            }
        }
        Err(Error::conflict("others occupy the names of a restore in the watched folder").at(dir.display()))
    }

    /// Destination of the restore, through the open folder.
    fn dest(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.own.as_raw_fd())).join(&self.entry)
    }

    /// Moves the restored step to its place in the watched folder, and first the incomplete checkpoint that has taken it, if
    /// `is_taken`; returns the new name of that.
    fn publish(&self, is_taken: bool) -> Result<Option<String>> {
        let place = self.shown.join(&self.entry);
        let fault = |errno: Errno| Error::io("cannot put a restored checkpoint in its place", &place, errno.into());
        let aside = if is_taken { self.set_aside().map_err(fault)? } else { None };
        match move_new(&self.own, &self.dir, &self.entry) {
            Err(Errno::EXIST) => {
                return Err(Error::conflict("something else has the name of the checkpoint in the watched folder")
                    .at(place.display())
                    .help("move it away, and start the watch again"));
            }
            moved => moved.map_err(fault)?,
        }
        // Best effort: the next restore uses a leftover.
        let _ = unlinkat(&self.dir, &self.name, AtFlags::REMOVEDIR);
        Ok(aside)
    }

    /// Gives the entry in the place another name, which it returns; none if there is no entry.
    fn set_aside(&self) -> Result<Option<String>, Errno> {
        let usual = set_aside_name(&self.entry);
        let unique = format!("{usual}.{}", Ulid::generate());
        for aside in [usual, unique] {
            match rename_new((&self.dir, &self.entry), (&self.dir, &aside)) {
                Err(Errno::EXIST) => {}
                Err(Errno::NOENT) => return Ok(None),
                moved => return moved.map(|()| Some(aside)),
            }
        }
        Err(Errno::EXIST)
    }

    /// Removes the private folder, best effort: the next restore uses a leftover.
    fn discard(&self) {
        // Through the open folder: others could replace it.
        let own = PathBuf::from(format!("/proc/self/fd/{}", self.own.as_raw_fd()));
        for entry in std::fs::read_dir(own).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let _ = if is_folder { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        }
        let _ = unlinkat(&self.dir, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Moves `name` from one folder to another, where nothing but an empty folder may have the name.
fn move_new(from: &OwnedFd, to: &OwnedFd, name: &str) -> Result<(), Errno> {
    // Fails unless it is an empty folder.
    let _ = unlinkat(to, name, AtFlags::REMOVEDIR);
    rename_new((from, name), (to, name))
}

/// Moves an entry to a folder and a name that nothing has.
fn rename_new((from, name): (&OwnedFd, &str), (to, new): (&OwnedFd, &str)) -> Result<(), Errno> {
    match renameat_with(from, name, to, new, RenameFlags::NOREPLACE) {
        // Some file systems cannot (rename(2)).
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match statat(to, new, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => renameat(from, name, to, new),
            Ok(_) => Err(Errno::EXIST),
            Err(errno) => Err(errno),
        },
        moved => moved,
    }
}

/// Name of the step's folder: the original one, or one that matches its content.
fn entry_name(saved: &Saved) -> Result<String> {
    let manifest = &saved.manifest;
    // Earlier versions saved such entries, too.
    if let Some(label) = manifest.labels.get(ENTRY_LABEL).filter(|label| !is_set_aside(label)) {
        // A writer of the repository must not choose where files go.
        if !is_fit(label, manifest.form == Form::Folder) {
            return Err(Error::damaged("a label does not name a checkpoint")
                .at(&saved.name)
                .got(format!("{ENTRY_LABEL}={label:?}"))
                .help("towline restore brings it back under another name"));
        }
        return Ok(label.clone());
    }
    let step = saved.name.step().map(|(_, step)| step).unwrap_or_default();
    if manifest.form == Form::File {
        // The name is the writer's, too: only that of a checkpoint is used.
        let name = manifest.entries.first().and_then(|entry| String::from_utf8(entry.path.clone()).ok());
        let fits = |name: &String| is_fit(name, false);
        return Ok(name.filter(fits).unwrap_or_else(|| format!("step-{step}.ckpt")));
    }
    let transformers = manifest.entry(b"trainer_state.json").is_some();
    Ok(if transformers { format!("checkpoint-{step}") } else { format!("step-{step}") })
}

/// True if `name` is that of a checkpoint in a watched folder.
fn is_fit(name: &str, folder: bool) -> bool {
    !name.contains(['/', '\0']) && name.len() <= ENTRY_LEN_MAX && matches!(classify(name, folder), Class::Step(_))
}

/// Checks that nothing but a tracker, or a link, has the place of a tracker: its name is a label's, which a writer of the repository
/// sets.
///
/// # Errors
/// Conflict, for something else; else errors of the file system.
fn check_replaceable(tracker: Tracker, path: &Path) -> Result<()> {
    let fault = |error| Error::io("cannot read the tracker file", path, error);
    // Others may swap it meanwhile, also for a pipe.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::empty()) {
        Ok(opened) => File::from(opened),
        Err(Errno::NOENT | Errno::LOOP) => return Ok(()),
        Err(errno) => return Err(fault(errno.into())),
    };
    if file.metadata().map_err(fault)?.is_file() {
        let mut bytes = Vec::new();
        file.take(TRACKER_LEN_MAX + 1).read_to_end(&mut bytes).map_err(fault)?;
        let text = std::str::from_utf8(&bytes).ok().filter(|text| text.len() as u64 <= TRACKER_LEN_MAX);
        if text.is_some_and(|text| text.trim().is_empty() || tracker.step(text).is_some()) {
            return Ok(());
        }
    }
    Err(Error::conflict("something else has the name of the tracker file in the watched folder")
        .at(path.display())
        .help("move it away, and start the watch again"))
}

fn tracker(saved: &Saved, entry: &str) -> Option<Tracker> {
    let label = saved.manifest.labels.get(TRACKER_LABEL)?;
    Tracker::named(label).filter(|tracker| tracker.covers(entry))
}

fn text(tracker: Tracker, saved: &Saved, entry: &str) -> String {
    tracker.text(entry, saved.name.step().map(|(_, step)| step).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_tracker_or_a_link_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latest");
        check_replaceable(Tracker::Latest, &path).unwrap();
        for (there, fits) in [("global_step7\n", true), ("", true), ("my notes", false), ("\u{0}", false)] {
            std::fs::write(&path, there).unwrap();
            assert_eq!(check_replaceable(Tracker::Latest, &path).is_ok(), fits, "{there:?}");
        }
        std::fs::write(&path, [0xff; 8]).unwrap();
        check_replaceable(Tracker::Latest, &path).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        check_replaceable(Tracker::Latest, &path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let error = check_replaceable(Tracker::Latest, &path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error:?}");
    }
}
