//! State of all checkpoints in a watched folder, and the next action. Pure: observations in, events and the next save out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::candidate::{BaseName, version};
use super::events::WatchEvent;
use super::parted::PartedStep;
use super::settle::{By, CheckpointState, FileMark, Observation, ObservationHistory, Pace, is_less};
use crate::clock::Timestamp;

/// The longest wait before a failed save is tried again.
const RETRY_MAX: Duration = Duration::from_mins(1);

/// One observation of the folder.
#[derive(Clone, Debug, Default)]
pub(super) struct FolderScan {
    /// The checkpoints, by name.
    pub(super) checkpoints: BTreeMap<String, ObservedCheckpoint>,
    /// Devices and inodes of what has a temporary name.
    pub(super) temporaries: HashSet<(u64, u64)>,
    /// Entries that look like checkpoints but cannot be saved as steps, with reasons.
    pub(super) others: BTreeMap<String, String>,
    /// Steps in several entries, none of which is saved.
    pub(super) parted: Vec<PartedStep>,
}

/// One checkpoint in it.
#[derive(Clone, Debug)]
pub(super) struct ObservedCheckpoint {
    pub(super) step: u64,
    pub(super) folder: bool,
    pub(super) seen: Observation,
}

/// Checkpoint to save next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NextSave {
    pub(super) entry: String,
    pub(super) step: u64,
    pub(super) by: By,
    /// True if it was saved before, and has changed since.
    pub(super) again: bool,
    /// The latest modification of any file in it.
    pub(super) newest: Timestamp,
}

/// One checkpoint.
#[derive(Debug)]
struct Checkpoint {
    step: u64,
    folder: bool,
    series: ObservationHistory,
    /// Files at the time of its save, or when it was found in the repository.
    saved: Option<Vec<FileMark>>,
    /// Earliest time of the next try, and the wait after that.
    retry: Option<(Duration, Duration)>,
    /// Consecutive saves during which it changed.
    disturbed: u32,
    /// Problem that was reported last.
    reported: Option<&'static str>,
}

/// The state of a watch.
#[derive(Debug)]
pub(super) struct WatchState {
    pace: Pace,
    dir: String,
    checkpoints: BTreeMap<String, Checkpoint>,
    temporaries: HashSet<(u64, u64)>,
    parted: Vec<PartedStep>,
    /// Entries whose omission was reported.
    reported: BTreeSet<String>,
    gone: bool,
    /// An entry that was just restored: its first observation counts as saved.
    restored: Option<String>,
}

impl WatchState {
    /// Creates the state before the first observation.
    pub(super) fn new(dir: String, pace: Pace, restored: Option<String>) -> Self {
        let (checkpoints, temporaries, parted, reported) = Default::default();
        Self { pace, dir, checkpoints, temporaries, parted, reported, gone: false, restored }
    }

    /// True if the last observation had no checkpoint.
    pub(super) fn is_empty(&self) -> bool {
        self.checkpoints.is_empty() && self.parted.is_empty()
    }

    /// The steps in several entries that the last observation had.
    pub(super) fn parted(&self) -> &[PartedStep] {
        &self.parted
    }

    /// Adds an observation; none if the folder does not exist.
    pub(super) fn update(&mut self, now: Duration, scan: Option<FolderScan>) -> Vec<WatchEvent> {
        let Some(scan) = scan else { return self.lost() };
        let mut events = Vec::new();
        if std::mem::take(&mut self.gone) {
            events.push(WatchEvent::DirBack { dir: self.dir.clone() });
        }
        let parts: HashSet<&String> = scan.parted.iter().flat_map(|step| &step.entries).collect();
        let gone: Vec<String> =
            self.checkpoints.keys().filter(|name| !scan.checkpoints.contains_key(*name)).cloned().collect();
        for entry in gone {
            let unsaved = self.checkpoints.remove(&entry).is_some_and(|one| one.saved.is_none());
            if unsaved && !scan.others.contains_key(&entry) && !parts.contains(&entry) {
                events.push(WatchEvent::Gone { entry });
            }
        }
        self.reported.retain(|entry| {
            scan.others.contains_key(entry) || scan.checkpoints.contains_key(entry) || parts.contains(entry)
        });
        for (entry, observed) in scan.checkpoints {
            self.observe(now, entry, observed);
        }
        for (entry, reason) in scan.others {
            self.report_once(entry, reason, &mut events);
        }
        for step in &scan.parted {
            self.report_once(step.first().to_owned(), step.reason(), &mut events);
        }
        (self.temporaries, self.parted) = (scan.temporaries, scan.parted);
        self.judge(now, &mut events);
        events
    }

    fn lost(&mut self) -> Vec<WatchEvent> {
        self.checkpoints.clear();
        self.temporaries.clear();
        self.parted.clear();
        if std::mem::replace(&mut self.gone, true) {
            return Vec::new();
        }
        vec![WatchEvent::DirGone { dir: self.dir.clone() }]
    }

    fn observe(&mut self, now: Duration, entry: String, observed: ObservedCheckpoint) {
        let ObservedCheckpoint { step, folder, seen } = observed;
        if let Some(known) = self.checkpoints.get_mut(&entry) {
            if known.series.identity() != seen.identity {
                // Another file or folder has replaced it.
                known.series = ObservationHistory::begin(now, seen.clone(), self.temporaries.contains(&seen.identity));
                known.reported = None;
            }
            return known.series.observe(now, seen);
        }
        let restored = self.restored.take_if(|restored| *restored == entry).is_some();
        let saved = restored.then(|| seen.files.clone());
        let renamed = self.temporaries.contains(&seen.identity);
        let series = ObservationHistory::begin(now, seen, renamed);
        self.checkpoints
            .insert(entry, Checkpoint { step, folder, series, saved, retry: None, disturbed: 0, reported: None });
    }

    /// Reports each reason why an entry is not saved, once.
    fn judge(&mut self, now: Duration, events: &mut Vec<WatchEvent>) {
        let mut passed = Vec::new();
        for (entry, one) in &mut self.checkpoints {
            let reason = match one.not_saved_reason(now, self.pace) {
                Some(NotSavedReason::Unmarked(lacks)) => {
                    (one.reported.replace(lacks) != Some(lacks)).then(|| format!("its writer left off before {lacks}"))
                }
                Some(NotSavedReason::Shrunk) => (one.reported.replace("") != Some(""))
                    .then(|| "files went away from it: it is taken to be on its way out".to_owned()),
                None => None,
            };
            passed.extend(reason.map(|reason| (entry.clone(), reason)));
        }
        events.extend(passed.into_iter().map(|(entry, reason)| WatchEvent::PassedOver { entry, reason }));
        let holders = self.holders(now);
        let eclipsed: Vec<(String, String, u64)> = self
            .checkpoints
            .iter()
            .filter_map(|(entry, one)| {
                let first = *holders.get(&one.step)?;
                (first != entry).then(|| (entry.clone(), first.clone(), one.step))
            })
            .collect();
        for (entry, first, step) in eclipsed {
            let saved_order =
                self.checkpoints.get(&first).filter(|one| one.saved.is_some()).map(|one| one.order(&first));
            if let (Some(order), Some(one)) = (saved_order, self.checkpoints.get_mut(&entry))
                && one.order(&entry) > order
            {
                one.pass_over();
            }
            self.report_once(entry, format!("{first} is step {step} already"), events);
        }
    }

    fn report_once(&mut self, entry: String, reason: String, events: &mut Vec<WatchEvent>) {
        if self.reported.insert(entry.clone()) {
            events.push(WatchEvent::PassedOver { entry, reason });
        }
    }

    /// Checkpoint to save of each step, of several with the same one: one that can be saved before others, a folder before files,
    /// else the first by name, in its latest version.
    fn holders(&self, now: Duration) -> HashMap<u64, &String> {
        let mut holders: HashMap<u64, ((bool, Order<'_>), &String)> = HashMap::new();
        for (entry, one) in &self.checkpoints {
            let rank = (one.not_saved_reason(now, self.pace).is_some(), one.order(entry));
            let held = holders.entry(one.step).or_insert((rank, entry));
            if rank < held.0 {
                *held = (rank, entry);
            }
        }
        holders.into_iter().map(|(step, (_, entry))| (step, entry)).collect()
    }

    /// The finished checkpoint with the lowest step that is to be saved now.
    pub(super) fn next(&self, now: Duration) -> Option<NextSave> {
        let is_due = |due: &NextSave| {
            let retry = self.checkpoints.get(&due.entry).and_then(|one| one.retry);
            retry.is_none_or(|(at, _)| at <= now)
        };
        self.finished(now).into_iter().find(is_due)
    }

    /// The finished checkpoints that are not saved, the lowest step first.
    pub(super) fn finished(&self, now: Duration) -> Vec<NextSave> {
        let holders = self.holders(now);
        let finished = self.checkpoints.iter().filter_map(|(entry, one)| {
            let CheckpointState::Finished(by) = one.series.state_at(now, self.pace) else { return None };
            (one.lacking() && holders.get(&one.step) == Some(&entry)).then(|| NextSave {
                entry: entry.clone(),
                step: one.step,
                by,
                again: one.saved.is_some(),
                newest: one.series.newest(),
            })
        });
        let mut finished: Vec<NextSave> = finished.collect();
        finished.sort_by_key(|due| due.step);
        finished
    }

    /// Files of `entry` when it was last seen.
    pub(super) fn seen(&self, entry: &str) -> Vec<FileMark> {
        self.checkpoints.get(entry).map(|one| one.series.files().to_vec()).unwrap_or_default()
    }

    /// Records that `entry`, as `seen`, is in the repository.
    pub(super) fn saved(&mut self, entry: &str, seen: Vec<FileMark>) {
        let Some(one) = self.checkpoints.get_mut(entry) else { return };
        one.saved = Some(seen);
        (one.retry, one.disturbed) = (None, 0);
        let (step, order) = (one.step, one.order(entry));
        for (other, beside) in &mut self.checkpoints {
            if beside.step == step && beside.order(other) > order {
                beside.pass_over();
            }
        }
    }

    /// Records that `entry` changed while it was read, and has to settle again. Returns the time for that if it is not the first
    /// time.
    pub(super) fn disturbed(&mut self, entry: &str, now: Duration) -> Option<Duration> {
        let one = self.checkpoints.get_mut(entry)?;
        one.series.disturb(now);
        one.disturbed = one.disturbed.saturating_add(1);
        (one.disturbed > 1).then_some(self.pace.quiet)
    }

    /// Makes failed saves due at once, because time is short.
    pub(super) fn hurry(&mut self, now: Duration) {
        for one in self.checkpoints.values_mut() {
            one.retry = one.retry.map(|_| (now, self.pace.marked));
        }
    }

    /// Records a failed save of `entry`; returns the wait before the next try.
    pub(super) fn failed(&mut self, entry: &str, now: Duration) -> Duration {
        let first = self.pace.marked;
        let Some(one) = self.checkpoints.get_mut(entry) else { return first };
        let wait = one.retry.map_or(first, |(_, wait)| wait.saturating_mul(2).min(RETRY_MAX));
        one.retry = Some((now + wait, wait));
        wait
    }

    /// Checkpoints, with their steps, that may or may not be in the repository.
    pub(super) fn unproven(&self, now: Duration) -> Vec<(String, u64)> {
        let pending = self.pending(now).into_iter();
        pending
            .filter_map(|(entry, _)| {
                let one = self.checkpoints.get(&entry)?;
                one.saved.is_none().then_some((entry, one.step))
            })
            .collect()
    }

    /// Checkpoints that are not saved yet, with reasons.
    pub(super) fn pending(&self, now: Duration) -> Vec<(String, &'static str)> {
        let holders = self.holders(now);
        let waiting = self.checkpoints.iter().filter(|(entry, one)| {
            one.lacking() && one.not_saved_reason(now, self.pace).is_none() && holders.get(&one.step) == Some(entry)
        });
        let why = |one: &Checkpoint| match one.retry {
            Some(_) => "it could not be saved",
            None if one.series.state_at(now, self.pace) == CheckpointState::Writing => "it was still being written",
            None => "there was no time left",
        };
        waiting.map(|(entry, one)| (entry.clone(), why(one))).collect()
    }
}

/// Order of the checkpoints of one step.
type Order<'a> = (bool, BaseName<'a>, Reverse<u64>);

/// Reason why a checkpoint is not saved in its current state.
enum NotSavedReason {
    Unmarked(&'static str),
    Shrunk,
}

impl Checkpoint {
    /// Folders before files, else by name, the latest version first. Its name is `entry`.
    fn order<'a>(&self, entry: &'a str) -> Order<'a> {
        let (base, version) = version(entry);
        (!self.folder, base, Reverse(version))
    }

    /// Keeps it from taking the place of the saved step once that one's entry is gone, unless it is written again.
    fn pass_over(&mut self) {
        self.saved.get_or_insert_with(|| self.series.files().to_vec());
    }

    /// True if the repository lacks the current state. A checkpoint that is being deleted is not saved again.
    fn lacking(&self) -> bool {
        self.saved.as_deref().is_none_or(|saved| saved != self.series.files() && !is_less(self.series.files(), saved))
    }

    fn not_saved_reason(&self, now: Duration, pace: Pace) -> Option<NotSavedReason> {
        match self.series.state_at(now, pace) {
            CheckpointState::Unmarked(lacks) if self.lacking() => Some(NotSavedReason::Unmarked(lacks)),
            CheckpointState::Shrunk if self.lacking() => Some(NotSavedReason::Shrunk),
            _ => None,
        }
    }
}
