//! Polls of a watched folder: reads only names and metadata, and tracker files.
//!
//! Polling is needed because trainings write to shared file systems, where notifications do not report writes of other machines.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::candidate::{
    Class, Marker, MarkerSearch, Tracker, classify, has_checkpoint_ending, is_number, is_temporary,
    is_within_checkpoint,
};
use super::metrics::open;
use super::parted::PartedStep;
use super::pointer::{POINTER_LEN_MAX, is_pointer};
use super::settle::{FileMark, Observation};
use super::state::{FolderScan, ObservedCheckpoint};
use super::truncated::{FileEnds, HEADERS_MAX};
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::limits::MIB;

/// Polls between two checks of the files of a saved folder, unless the folder itself changed.
const LOOKS_BETWEEN: u32 = 10;
/// Entries that look like checkpoints and are looked at, at most: others may write to the folder, too.
pub(super) const CHECKPOINTS_MAX: usize = 10_000;
/// Entries with temporary names that are recognized after they were renamed, at most.
const TEMPORARIES_MAX: usize = 65_536;
/// Files and folders of all checkpoints that one poll looks at.
const FILES_MAX: usize = 4_000_000;
/// Files of a checkpoint whose ends are read, at most.
const ENDS_MAX: usize = 10_000;
/// Maximum bytes of a tracker.
const TRACKER_LEN_MAX: u64 = 4096;

/// Reason for which a folder named by a number alone is no checkpoint: it may be that of a rank, or belong to another checkpoint.
pub(super) const NUMBER_ALONE: &str =
    "its name is only a number, and entries beside it are checkpoints by other names, or parts of one";

/// Poller of one folder.
#[derive(Debug)]
pub(super) struct Scanner {
    dir: PathBuf,
    known: HashMap<String, Previous>,
    /// Ends of files that this poll has looked at.
    ends: FileEnds,
    /// Files and folders that it may still look at.
    files_left: usize,
}

/// Earlier observation of a checkpoint.
#[derive(Debug)]
struct Previous {
    /// Digest of the metadata of the file or folder itself.
    top: u64,
    seen: Observation,
    /// End that one of its files lacks by its format.
    lacking: Option<&'static str>,
    /// True for a pointer to a checkpoint that is saved already.
    is_pointer: bool,
    /// Polls since the last check of its files; none if every poll checks them.
    resting: Option<u32>,
}

/// Entry that looks like a checkpoint.
struct Candidate {
    class: Class,
    name: String,
    meta: Metadata,
}

/// The candidates to look at, at most [`CHECKPOINTS_MAX`] at the end.
#[derive(Default)]
struct Candidates {
    found: Vec<Candidate>,
    left_out: usize,
}

impl Candidates {
    fn add(&mut self, candidate: Candidate) {
        self.found.push(candidate);
        if self.found.len() >= 2 * CHECKPOINTS_MAX {
            self.truncate();
        }
    }

    /// Keeps the first ones in this order: this user's before others', folders before files, later steps before earlier ones.
    fn truncate(&mut self) {
        let own = rustix::process::geteuid().as_raw();
        let step = |class: Class| if let Class::Step(step) = class { Some(step) } else { None };
        self.found.sort_by_cached_key(|one| {
            Reverse((one.meta.uid() == own, one.meta.is_dir(), step(one.class), one.name.clone()))
        });
        self.left_out += self.found.len().saturating_sub(CHECKPOINTS_MAX);
        self.found.truncate(CHECKPOINTS_MAX);
    }

    /// The chosen ones in that order, and the number of the others.
    fn chosen(mut self) -> (Vec<Candidate>, usize) {
        self.truncate();
        (self.found, self.left_out)
    }
}

/// Content of a tracker: the last complete step, and its time.
type Tracked = Vec<(Tracker, u64, Timestamp)>;

impl Scanner {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf(), known: HashMap::new(), ends: FileEnds::default(), files_left: FILES_MAX }
    }

    /// Records that `entry` is saved: its files are checked less often until it changes.
    pub(super) fn rest(&mut self, entry: &str) {
        if let Some(known) = self.known.get_mut(entry) {
            known.resting = Some(0);
        }
    }

    /// Current content; none if the folder does not exist.
    ///
    /// # Errors
    /// Errors of the file system, if the folder cannot be read. Entries that disappear meanwhile count as missing.
    pub(super) fn scan(&mut self) -> Result<Option<FolderScan>> {
        let fault = |error| Error::io("cannot read the folder that is watched", &self.dir, error);
        let listed = match fs::read_dir(&self.dir) {
            Ok(listed) => listed,
            Err(error) if is_gone(&error) => return Ok(None),
            Err(error) => return Err(fault(error)),
        };
        let (mut scan, mut candidates, mut trackers) = (FolderScan::default(), Candidates::default(), Vec::new());
        let mut within = HashSet::new();
        for entry in listed {
            let entry = entry.map_err(fault)?;
            let Some((name, kind)) = entry.file_name().into_string().ok().zip(entry.file_type().ok()) else { continue };
            if is_within_checkpoint(&name) {
                within.extend(entry.metadata().map(|meta| meta.uid()));
            }
            let mut class = classify(&name, kind.is_dir());
            if class == Class::Other && kind.is_symlink() {
                // Links are not followed: this one may be to a folder.
                class = classify(&name, true);
            }
            if class == Class::Other && Tracker::named(&name).is_none() {
                continue;
            }
            let Ok(meta) = entry.metadata() else { continue };
            match class {
                _ if Tracker::named(&name).is_some() => trackers.push((name, meta)),
                Class::Temporary if scan.temporaries.len() < TEMPORARIES_MAX => {
                    scan.temporaries.insert((meta.dev(), meta.ino()));
                }
                Class::Step(_) | Class::Unnumbered | Class::Copy | Class::Beside => {
                    candidates.add(Candidate { class, name, meta });
                }
                Class::Temporary | Class::Other => {}
            }
        }
        (self.ends, self.files_left) = (FileEnds::default(), FILES_MAX);
        let tracked = self.trackers(&trackers);
        let (candidates, left_out) = candidates.chosen();
        let candidates = without_numbers(candidates, within, &mut scan);
        let parted = parted(&candidates);
        let parts: HashSet<&String> = parted.iter().flat_map(|step| &step.entries).collect();
        for candidate in candidates.into_iter().filter(|candidate| !parts.contains(&candidate.name)) {
            self.take(&mut scan, &tracked, candidate);
        }
        let whole: HashMap<u64, &String> = scan.checkpoints.iter().map(|(name, one)| (one.step, name)).collect();
        for step in parted {
            match whole.get(&step.step) {
                Some(whole) => {
                    let reason = format!("{whole} is step {} already", step.step);
                    scan.others.insert(step.first().to_owned(), reason);
                }
                None => scan.parted.push(step),
            }
        }
        if left_out > 0 {
            let reason = format!("it has {left_out} checkpoints more than the {CHECKPOINTS_MAX} that are looked at");
            scan.others.insert(".".to_owned(), reason);
        }
        self.known.retain(|name, _| scan.checkpoints.contains_key(name) || scan.others.contains_key(name));
        Ok(Some(scan))
    }

    fn take(&mut self, scan: &mut FolderScan, tracked: &Tracked, candidate: Candidate) {
        let Candidate { class, name, meta } = candidate;
        match class {
            Class::Step(_) if meta.is_symlink() => drop(scan.others.insert(name, "it is a link".to_owned())),
            Class::Step(step) => {
                let mut seen = match self.observe(&name, &meta) {
                    Ok(seen) => seen,
                    Err(error) if is_gone(&error) => return,
                    Err(error) => {
                        let reason = if is_put_off(&error) {
                            error.to_string()
                        } else {
                            format!("it cannot be inspected: {error}")
                        };
                        return drop(scan.others.insert(name, reason));
                    }
                };
                if self.known.get(&name).is_some_and(|known| known.is_pointer) {
                    let reason = "it is a pointer to a checkpoint that is saved already".to_owned();
                    return drop(scan.others.insert(name, reason));
                }
                let mut covered = tracked.iter().filter(|(tracker, last, _)| tracker.covers(&name) && *last >= step);
                if let (Marker::None, true, Some((_, _, at))) = (seen.marker, meta.is_dir(), covered.next_back()) {
                    seen.marker = Marker::Present(*at);
                }
                scan.checkpoints.insert(name, ObservedCheckpoint { step, folder: meta.is_dir(), seen });
            }
            Class::Copy => drop(scan.others.insert(name, "its name has more than a step".to_owned())),
            // An empty file holds no checkpoint: a full disk leaves such ones.
            Class::Unnumbered if meta.is_file() && meta.len() > 0 => {
                scan.others.insert(name, "its name does not say which step it is".to_owned());
            }
            Class::Beside if meta.is_file() && meta.len() > 0 => {
                let reason =
                    "it is no checkpoint by its name, but a part of one: only a folder is saved with all in it";
                scan.others.insert(name, reason.to_owned());
            }
            Class::Unnumbered | Class::Beside | Class::Temporary | Class::Other => {}
        }
    }

    fn trackers(&self, entries: &[(String, Metadata)]) -> Tracked {
        let read = |(name, meta): &(String, Metadata)| {
            let tracker = Tracker::named(name).filter(|_| meta.is_file())?;
            let mut text = String::new();
            let file =
                open(&self.dir.join(name)).ok().filter(|file| file.metadata().is_ok_and(|meta| meta.is_file()))?;
            file.take(TRACKER_LEN_MAX).read_to_string(&mut text).ok()?;
            Some((tracker, tracker.step(&text)?, modified(meta)))
        };
        entries.iter().filter_map(read).collect()
    }

    /// Content of `name`.
    fn observe(&mut self, name: &str, meta: &Metadata) -> io::Result<Observation> {
        let top = digest(&stat_of(meta));
        if let Some(Previous { top: before, seen, resting: Some(looks), .. }) = self.known.get_mut(name)
            && *before == top
            && *looks < LOOKS_BETWEEN
        {
            *looks += 1;
            return Ok(seen.clone());
        }
        let (mut seen, paths) = observe(&self.dir.join(name), meta, &mut self.files_left)?;
        let before = self.known.remove(name);
        // Files are read only when they have changed.
        let (lacking, is_pointer) = match &before {
            Some(before) if before.seen.files == seen.files => (before.lacking, before.is_pointer),
            _ => (self.lacking_end(&paths)?, is_pointer_file(&self.dir.join(name), meta)?),
        };
        if let (Marker::None, Some(lacking)) = (seen.marker, lacking) {
            seen.marker = Marker::Missing(lacking);
        }
        let before = before.filter(|known| known.seen == seen);
        let resting = before.and_then(|known| known.resting).map(|_| 0);
        self.known.insert(name.to_owned(), Previous { top, seen: seen.clone(), lacking, is_pointer, resting });
        Ok(seen)
    }

    /// End that one of the files lacks by its format.
    ///
    /// # Errors
    /// If this poll has read enough: a later one does.
    fn lacking_end(&mut self, paths: &[PathBuf]) -> io::Result<Option<&'static str>> {
        if !self.ends.has_room() {
            let reason =
                format!("it is not inspected yet: this poll has read its {} MiB of headers", HEADERS_MAX / MIB);
            return Err(io::Error::new(io::ErrorKind::WouldBlock, reason));
        }
        Ok(paths.iter().find_map(|path| self.ends.lacking(path)))
    }
}

/// `candidates` without those named by a number alone whose owner is one of `within`, or has others beside them: these are told.
fn without_numbers(candidates: Vec<Candidate>, mut within: HashSet<u32>, scan: &mut FolderScan) -> Vec<Candidate> {
    let others = candidates.iter().filter(|one| matches!(one.class, Class::Step(_)) && !is_number(&one.name));
    within.extend(others.map(|one| one.meta.uid()));
    let is_left_out = |one: &Candidate| is_number(&one.name) && within.contains(&one.meta.uid());
    let (numbers, rest) = candidates.into_iter().partition::<Vec<_>, _>(is_left_out);
    scan.others.extend(numbers.into_iter().map(|one| (one.name, NUMBER_ALONE.to_owned())));
    rest
}

/// Steps in several of the candidates of one owner: others may put files in the folder. Links and empty files are left out.
fn parted(candidates: &[Candidate]) -> Vec<PartedStep> {
    let mut steps: BTreeMap<u32, Vec<(&str, u64)>> = BTreeMap::new();
    for candidate in candidates.iter().filter(|candidate| !candidate.meta.is_symlink()) {
        let is_empty = candidate.meta.is_file() && candidate.meta.len() == 0;
        if let (Class::Step(step), false) = (&candidate.class, is_empty) {
            steps.entry(candidate.meta.uid()).or_default().push((&candidate.name, *step));
        }
    }
    steps.into_values().flat_map(|steps| PartedStep::among(steps.into_iter())).collect()
}

/// As [`is_pointer`]; no larger file and no folder is read.
fn is_pointer_file(path: &Path, meta: &Metadata) -> io::Result<bool> {
    Ok(meta.is_file() && meta.len() <= POINTER_LEN_MAX && is_pointer(path)?)
}

/// All files of the checkpoint at `path`, of which `left` may be looked at; and the paths of those with the ending of a checkpoint
/// file.
fn observe(path: &Path, meta: &Metadata, left: &mut usize) -> io::Result<(Observation, Vec<PathBuf>)> {
    let mut seen = Observation {
        identity: (meta.dev(), meta.ino()),
        files: Vec::new(),
        bytes: 0,
        temporary: 0,
        newest: Timestamp(i64::MIN),
        marker: Marker::None,
    };
    if !meta.is_dir() {
        add(&mut seen, Path::new(""), meta);
        return Ok((seen, vec![path.to_owned()]));
    }
    let mut search = MarkerSearch::default();
    let (mut folders, mut paths) = (vec![PathBuf::new()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(path.join(&folder))? {
            let entry = entry?;
            *left =
                left.checked_sub(1).ok_or_else(|| io::Error::other("the folder that is watched has too many files"))?;
            let within = folder.join(entry.file_name());
            let meta = match entry.metadata() {
                Ok(meta) => meta,
                Err(error) if is_gone(&error) => continue,
                Err(error) => return Err(error),
            };
            if meta.is_dir() {
                folders.push(within);
                continue;
            }
            let name = entry.file_name();
            let name = name.to_string_lossy();
            // Hidden files such as `.metadata` are not temporary.
            if is_temporary(name.trim_start_matches('.')) {
                seen.temporary = seen.temporary.wrapping_add(digest(&(within.as_os_str().as_bytes(), stat_of(&meta))));
                continue;
            }
            if meta.is_file() && has_checkpoint_ending(&name) && paths.len() < ENDS_MAX {
                paths.push(path.join(&within));
            }
            if folder.as_os_str().is_empty() {
                search.add(&name, modified(&meta));
            }
            add(&mut seen, &within, &meta);
        }
    }
    seen.files.sort_unstable();
    seen.marker = search.marker();
    Ok((seen, paths))
}

fn add(seen: &mut Observation, path: &Path, meta: &Metadata) {
    seen.files.push(FileMark { path: digest(&path.as_os_str().as_bytes()), stat: digest(&stat_of(meta)) });
    seen.bytes += meta.len();
    seen.newest = seen.newest.max(modified(meta));
}

/// Digest of metadata that changes when a file is written or replaced. The ctime is left out, because a rename changes it, too.
fn stat_of(meta: &Metadata) -> [u64; 5] {
    let [seconds, nanos] = [meta.mtime(), meta.mtime_nsec()].map(i64::cast_unsigned);
    [meta.dev(), meta.ino(), meta.len(), seconds, nanos]
}

fn modified(meta: &Metadata) -> Timestamp {
    Timestamp(meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec()))
}

/// Digest that differs for different values within this process; never stored.
fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// True if a later poll looks at the files.
fn is_put_off(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::super::truncated::ZIP_BEGIN;
    use super::*;

    /// Others may write to the folder, but not make parts of its checkpoints.
    #[test]
    fn empty_files_and_those_of_others_make_no_parts() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["step_40_rank0.pt", "step_40_rank1.pt"].map(|name| dir.path().join(name));
        fs::write(&first, "weights").unwrap();
        let is_whole =
            || Scanner::new(dir.path()).scan().unwrap().unwrap().checkpoints.contains_key("step_40_rank0.pt");
        File::create(&second).unwrap();
        assert!(is_whole(), "the other is empty");
        fs::write(&second, "weights").unwrap();
        assert!(!is_whole());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&second, Some(65534), None).unwrap();
            assert!(is_whole(), "the other is somebody else's");
        }
    }

    /// Others may write to the folder, but not take the place of its checkpoints.
    #[test]
    fn of_very_many_entries_folders_and_the_latest_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("checkpoint-5")).unwrap();
        fs::write(dir.path().join("checkpoint-5/weights.bin"), "weights").unwrap();
        for step in 0..CHECKPOINTS_MAX + 2 {
            File::create(dir.path().join(format!("m-{step}.pt"))).unwrap();
        }
        for other in 0..10 {
            File::create(dir.path().join(format!("notes-{other}.txt"))).unwrap();
        }
        let scan = Scanner::new(dir.path()).scan().unwrap().unwrap();
        assert_eq!(scan.checkpoints.len(), CHECKPOINTS_MAX);
        let is_there = |name: &str| scan.checkpoints.contains_key(name);
        assert!(is_there("checkpoint-5") && is_there(&format!("m-{}.pt", CHECKPOINTS_MAX + 1)) && !is_there("m-0.pt"));
        let others: Vec<_> = scan.others.iter().collect();
        assert!(
            matches!(&others[..], [(entry, reason)] if *entry == "." && reason.contains("3 checkpoints more")),
            "{others:?}"
        );
        fs::remove_file(dir.path().join("m-7.pt")).unwrap();
        let scan = Scanner::new(dir.path()).scan().unwrap().unwrap();
        assert!(scan.others["."].contains("2 checkpoints more"));
    }

    #[test]
    fn a_pipe_in_the_place_of_a_tracker_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latest");
        fs::write(&path, "global_step7").unwrap();
        let looker = Scanner::new(dir.path());
        let entries = [("latest".to_owned(), path.symlink_metadata().unwrap())];
        assert_eq!(looker.trackers(&entries).len(), 1);
        // Between the look at the folder and the reading.
        fs::remove_file(&path).unwrap();
        mkfifoat(CWD, &path, Mode::from_raw_mode(0o600)).unwrap();
        assert!(looker.trackers(&entries).is_empty());
    }

    /// As `bindings/python/python/towline/_pointer_files.py` writes them: they must not take the place of the weights.
    #[test]
    fn pointer_files_are_passed_over_until_they_are_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("epoch=1-step=40.ckpt");
        let pointer = [ZIP_BEGIN, b"archive/data.pkl", b"archive/towline.json{}", b"PK\x05\x06", &[0; 18]].concat();
        fs::write(&path, &pointer).unwrap();
        fs::write(dir.path().join("step=41.ckpt"), pointer.repeat(1000)).unwrap();
        let mut scanner = Scanner::new(dir.path());
        for _ in 0..2 {
            let scan = scanner.scan().unwrap().unwrap();
            assert!(scan.others["epoch=1-step=40.ckpt"].contains("a pointer"), "{:?}", scan.others);
            assert_eq!(scan.checkpoints.keys().collect::<Vec<_>>(), ["step=41.ckpt"]);
        }
        fs::write(&path, "weights").unwrap();
        assert_eq!(scanner.scan().unwrap().unwrap().checkpoints.len(), 2);
    }

    #[test]
    fn checkpoints_beyond_the_headers_of_one_poll_are_not_inspected_yet() {
        let dir = tempfile::tempdir().unwrap();
        let count = HEADERS_MAX / (16 * MIB);
        let header_len = 16 * MIB - 8;
        for step in 0..count + 2 {
            let path = dir.path().join(format!("step-{step}.safetensors"));
            fs::write(&path, [&header_len.to_le_bytes()[..], b"{"].concat()).unwrap();
            File::options().write(true).open(&path).unwrap().set_len(16 * MIB).unwrap();
        }
        let mut scanner = Scanner::new(dir.path());
        let scan = scanner.scan().unwrap().unwrap();
        assert_eq!(scan.checkpoints.len() as u64, count);
        let reason = "it is not inspected yet: this poll has read its 64 MiB of headers";
        assert!(scan.others.len() == 2 && scan.others.values().all(|told| told == reason), "{:?}", scan.others);
        let scan = scanner.scan().unwrap().unwrap();
        assert!(scan.others.is_empty() && scan.checkpoints.len() as u64 == count + 2, "{:?}", scan.others);
    }

    #[test]
    fn an_empty_file_without_a_number_is_no_checkpoint_until_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.bin");
        fs::write(&path, "").unwrap();
        let mut scanner = Scanner::new(dir.path());
        assert!(scanner.scan().unwrap().unwrap().others.is_empty());
        fs::write(&path, "weights").unwrap();
        assert!(scanner.scan().unwrap().unwrap().others["model.bin"].contains("does not say which step"));
    }

    #[test]
    fn files_of_single_ranks_are_no_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("checkpoint-30")).unwrap();
        let names =
            ["step_20_rank0.pt", "step_20_rank1.pt", "step_30_rank0.pt", "step_30_rank1.pt", "step_40_rank0.pt"];
        for name in names.into_iter().chain(["rng_state_0.pth", "optimizer_40.pt"]) {
            fs::write(dir.path().join(name), "weights").unwrap();
        }
        let scan = Scanner::new(dir.path()).scan().unwrap().unwrap();
        assert_eq!(scan.checkpoints.keys().collect::<Vec<_>>(), ["checkpoint-30", "step_40_rank0.pt"]);
        let parted: Vec<_> = scan.parted.iter().map(|parted| (parted.step, parted.entries.len())).collect();
        assert_eq!(parted, [(20, 2)]);
        let others: Vec<&str> = scan.others.keys().map(String::as_str).collect();
        assert_eq!(others, ["optimizer_40.pt", "rng_state_0.pth", "step_30_rank0.pt"]);
        assert_eq!(scan.others["step_30_rank0.pt"], "checkpoint-30 is step 30 already");
    }

    /// As Orbax writes them.
    #[test]
    fn folders_named_by_numbers_alone_are_steps() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["8/9", "010/d", ".11", "12.orbax-checkpoint-tmp-123", "runs-13", "14-15"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        fs::write(dir.path().join("16"), "no folder").unwrap();
        fs::write(dir.path().join("8/9/weights"), "weights").unwrap();
        let scanned = || Scanner::new(dir.path()).scan().unwrap().unwrap();
        let steps = |scan: &FolderScan| scan.checkpoints.values().map(|one| one.step).collect::<Vec<_>>();
        let scan = scanned();
        assert_eq!((steps(&scan), scan.others.len(), scan.temporaries.len()), (vec![10, 8], 0, 2));
        // Ranks beside checkpoints, or parts of one.
        for (entry, expected) in [("model_5.pt", vec![5]), ("_CHECKPOINT_METADATA", vec![])] {
            fs::write(dir.path().join(entry), "content").unwrap();
            let scan = scanned();
            assert_eq!((steps(&scan), scan.others["8"].as_str(), scan.others.len()), (expected, NUMBER_ALONE, 2));
            fs::remove_file(dir.path().join(entry)).unwrap();
        }
        assert_eq!(steps(&scanned()), [10, 8]);
    }

    #[test]
    fn a_link_to_a_checkpoint_folder_is_told() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("elsewhere")).unwrap();
        for name in ["checkpoint-5", "step-6.pt", "runs", "latest"] {
            symlink(dir.path().join("elsewhere"), dir.path().join(name)).unwrap();
        }
        let scan = Scanner::new(dir.path()).scan().unwrap().unwrap();
        assert!(scan.checkpoints.is_empty());
        let others: Vec<_> = scan.others.iter().map(|(entry, reason)| (entry.as_str(), reason.as_str())).collect();
        assert_eq!(others, [("checkpoint-5", "it is a link"), ("step-6.pt", "it is a link")]);
    }
}
