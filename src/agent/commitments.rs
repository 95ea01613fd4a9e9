//! Commitments: the chunks of all inputs of a committed hint are pinned until its lease ends, and fetched.
//!
//! ```text
//! record (a file) -> pin, which commits it -> warm         restart: record with a pin -> warm again, record without one -> removed
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::open_trees::OpenTree;
use super::state::AgentState;
use super::tasks::{AGAIN_AFTER, Outcome, Task, warm_commitment};
use super::view::{self, TaskState};
use crate::budget::Budget;
use crate::cache::{Cache, Pin, PinChunk, PinLimit, PinRequest, Pinned};
use crate::clock::{Clock, Timestamp};
use crate::error::{Error, ErrorKind, Result};
use crate::id::ManifestId;
use crate::name::Name;
use crate::tree::OwnFolder;
use crate::work::blocking;

/// Folder of the records, in the cache's.
const FOLDER: &str = "commitments";
/// Ending of their names.
const ENDING: &str = ".json";
/// Maximum bytes of a record.
const RECORD_LEN_MAX: u64 = 1 << 20;

/// Bytes of memory for each chunk while a pin is made or changed.
const CHUNK_WEIGHT: u64 = 192;

/// Hint, and owner of what it holds. Two callers may be given the same hint.
type Key = (String, String);

/// All commitments of an agent.
#[derive(Debug)]
pub(super) struct Commitments {
    folder: OwnFolder,
    cache: Arc<Cache>,
    budget: Budget,
    clock: Arc<dyn Clock>,
    known: Mutex<BTreeMap<Key, Known>>,
    /// Held while commitments are made or forgotten: a request and its repetition make one, and none is forgotten while it is made.
    committing: Mutex<()>,
    /// Held while the missing chunks of a pin are counted: a large pin takes a thread for a while.
    counting: Semaphore,
}

#[derive(Clone, Debug)]
struct Known {
    record: Record,
    task: Option<Arc<Task>>,
}

/// File of a commitment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    hint: String,
    owner: String,
    /// Id of the repository.
    repository: String,
    inputs: Vec<CommittedInput>,
    /// Stored bytes of the distinct chunks.
    bytes: u64,
    /// The job, if the request told its GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<CommittedJob>,
}

/// Job whose GPUs would wait for the bytes of a commitment. Times are nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CommittedJob {
    gpus: u64,
    /// Time of the commit.
    committed_ns: i64,
    /// Time from which everything was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ready_ns: Option<i64>,
    /// True once the job has its GPUs: what did not idle is counted.
    #[serde(default)]
    started: bool,
}

/// GPU seconds that did not idle, as the bytes of a commitment came before its job had GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GpusNotIdle {
    /// Id of the repository of its first input, and the name of that.
    pub(super) repository: String,
    pub(super) name: Name,
    pub(super) gpu_seconds: u64,
}

/// Tree that a commitment holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CommittedInput {
    name: String,
    manifest: String,
}

/// Request to commit a hint.
#[derive(Debug)]
pub(super) struct CommitRequest {
    pub(super) hint: String,
    pub(super) owner: String,
    pub(super) repository: String,
    /// GPUs of the job; 0: not told.
    pub(super) gpus: u64,
    /// Trees of its inputs.
    pub(super) trees: Vec<CommitTree>,
    pub(super) expires: Option<Timestamp>,
    pub(super) limit: Option<PinLimit>,
}

/// Tree to commit, and its chunks with what they take in the cache.
#[derive(Debug)]
pub(super) struct CommitTree {
    pub(super) saved: OpenTree,
    pub(super) chunks: Vec<PinChunk>,
}

/// Commitment of which the warm must be started.
#[derive(Debug)]
pub(super) struct Pending {
    key: Key,
    repository: String,
    pub(super) inputs: Vec<CommittedInput>,
    /// True if it was committed by this call.
    is_new: bool,
}

impl CommittedInput {
    /// Its name.
    ///
    /// # Errors
    /// Usage, if the record has been changed.
    pub(super) fn name(&self) -> Result<Name> {
        self.name.parse()
    }

    /// True if it is the tree with this manifest.
    pub(super) fn is_tree(&self, manifest: ManifestId) -> bool {
        self.manifest == manifest.to_string()
    }
}

impl Commitments {
    /// Reads the records in the folder of `cache`; those without a pin were never committed, or have ended. Blocking.
    ///
    /// # Errors
    /// Denied, if others may have planted the folder; errors of the file system. A record that cannot be read is removed, and its pin
    /// stays.
    pub(super) fn open(cache: Arc<Cache>, budget: Budget, clock: Arc<dyn Clock>) -> Result<Self> {
        let folder = OwnFolder::open(&cache.dir().join(FOLDER))?;
        let mut known = BTreeMap::new();
        let files = folder.files().map_err(|source| Error::io("cannot read the commitments", folder.path(), source))?;
        for (file, _) in files {
            if OwnFolder::is_staged(&file) {
                remove(&folder, &file);
                continue;
            }
            if !is_record(&file) {
                continue;
            }
            match read(&folder, &file) {
                Ok(record) if pin_of(&cache, &record.hint, &record.owner).is_some() => {
                    known.insert((record.hint.clone(), record.owner.clone()), Known { record, task: None });
                }
                Ok(_) => remove(&folder, &file),
                Err(error) => {
                    tracing::warn!("a commitment cannot be read and is removed: {error:?}");
                    remove(&folder, &file);
                }
            }
        }
        Ok(Self {
            folder,
            cache,
            budget,
            clock,
            known: Mutex::new(known),
            committing: Mutex::default(),
            counting: Semaphore::new(1),
        })
    }

    /// Commitments of before the restart.
    fn pending(&self) -> Vec<Pending> {
        let known = self.known();
        known.iter().filter(|(_, known)| known.task.is_none()).map(|(key, known)| known.pending(key)).collect()
    }

    /// Pins the chunks of a hint's inputs. One that is committed already is renewed. Returns what is to be fetched, if anything is.
    /// Blocking.
    ///
    /// # Errors
    /// Exhausted, with the bytes that are lacking, if the pin does not fit, or above the limit of the owner, or of memory; conflict, if
    /// the hint is committed with other inputs; errors of the file system. Nothing is pinned then.
    pub(super) fn commit(&self, request: &CommitRequest) -> Result<Option<Pending>> {
        let _one = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        self.sweep();
        let chunks_all: usize = request.trees.iter().map(|tree| tree.chunks.len()).sum();
        let _kept = self.budget.keep(chunks_all as u64 * CHUNK_WEIGHT)?;
        let key = (request.hint.clone(), request.owner.clone());
        let record = request.record(self.clock.now());
        if let Some((before, pin)) = self.current(&key) {
            if before.record.inputs != record.inputs || before.record.repository != record.repository {
                let expected = before.record.inputs.iter().map(|input| input.name.as_str()).collect::<Vec<_>>();
                return Err(Error::conflict("hint is committed with other inputs")
                    .at(&request.hint)
                    .expected(expected.join(", "))
                    .help("end it first, or ask for a new hint"));
            }
            self.cache.renew(pin.id, request.expires)?;
            let ended = before.task.as_ref().is_none_or(|task| task.view().state != TaskState::Running);
            let lacks = || Ok::<_, Error>(self.cache.count_missing(pin.id)?.is_some_and(|(chunks, _)| chunks > 0));
            return Ok((ended && lacks()?).then(|| before.pending(&key)));
        }
        self.write(&key, &record)?;
        let pin = PinRequest {
            owner: request.owner.clone(),
            reason: reason(&request.hint),
            expires: request.expires,
            chunks: request.trees.iter().flat_map(|tree| tree.chunks.iter().copied()).collect(),
        };
        let refused = match self.cache.pin_within(pin, request.limit.as_ref()) {
            Ok(Pinned::Kept(_)) => None,
            Ok(Pinned::Lacking { bytes, .. }) => Some(
                Error::exhausted("hint cannot be committed: its bytes do not fit beside what is pinned")
                    .at(&request.hint)
                    .expected(format!("{bytes} more bytes"))
                    .help("end other pins (towline pins, towline unpin), or choose another site"),
            ),
            Err(error) => Some(error),
        };
        if let Some(error) = refused {
            remove(&self.folder, &file_of(&key));
            return Err(error);
        }
        let known = Known { record, task: None };
        let pending = Pending { is_new: true, ..known.pending(&key) };
        self.known().insert(key, known);
        Ok(Some(pending))
    }

    /// Records the task that fetches the chunks of `pending`, and at its end the time. Within a runtime.
    pub(super) fn fetch_started(self: &Arc<Self>, pending: &Pending, task: Arc<Task>) {
        let has_job = match self.known().get_mut(&pending.key) {
            Some(known) => {
                known.task = Some(Arc::clone(&task));
                known.record.job.is_some()
            }
            None => false,
        };
        if has_job {
            let (own, key) = (Arc::clone(self), pending.key.clone());
            tokio::spawn(async move {
                if let Outcome::Done(_) = task.ended().await {
                    let recorded = blocking(move || own.record_ready(&key)).await;
                    recorded.unwrap_or_else(|error| tracing::warn!("the end of a fetch is not recorded: {error:?}"));
                }
            });
        }
    }

    /// Records the time from which everything of the commitment of `key` is there, the first time that it is. Blocking.
    fn record_ready(&self, key: &Key) -> Result<()> {
        let _one = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((known, pin)) = self.current(key) else { return Ok(()) };
        let Some(job) = known.record.job.filter(|job| job.ready_ns.is_none()) else { return Ok(()) };
        // A fetch may end without what no source has.
        if self.cache.count_missing(pin.id)?.is_none_or(|(chunks, _)| chunks > 0) {
            return Ok(());
        }
        self.change(
            key,
            Record { job: Some(CommittedJob { ready_ns: Some(self.clock.now().0), ..job }), ..known.record },
        )
    }

    /// Records that the job of a commitment has its GPUs. Returns the GPU seconds that did not idle before, the first time; none if the
    /// commit told no GPUs. Blocking.
    ///
    /// # Errors
    /// Not found, as for [`Commitments::look`]; errors of the file system.
    pub(super) fn job_started(&self, hint: &str, owner: &str) -> Result<Option<GpusNotIdle>> {
        let _one = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (hint.to_owned(), owner.to_owned());
        let (known, _) = self.current(&key).ok_or_else(|| absent(hint))?;
        let Some(job) = known.record.job.filter(|job| !job.started) else { return Ok(None) };
        let Some(first) = known.record.inputs.first() else { return Ok(None) };
        let (repository, name) = (known.record.repository.clone(), first.name()?);
        // Before it is counted: a crash may lose it, and nothing counts twice.
        self.change(&key, Record { job: Some(CommittedJob { started: true, ..job }), ..known.record })?;
        Ok(Some(GpusNotIdle { repository, name, gpu_seconds: job.gpu_seconds(self.clock.now()) }))
    }

    /// Replaces the record of a commitment.
    fn change(&self, key: &Key, record: Record) -> Result<()> {
        self.write(key, &record)?;
        if let Some(known) = self.known().get_mut(key) {
            known.record = record;
        }
        Ok(())
    }

    /// Writes the file of a record.
    fn write(&self, key: &Key, record: &Record) -> Result<()> {
        let text = serde_json::to_string(record).map_err(|source| Error::other("record is not JSON").source(source))?;
        self.folder.replace(&file_of(key), &text)
    }

    /// The commitment of `hint` by `owner`, as it is now. One is counted at a time.
    ///
    /// # Errors
    /// Not found, if it was not committed here or has ended; errors of reading its pin.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn look(self: &Arc<Self>, hint: &str, owner: &str) -> Result<view::Commitment> {
        let _one = self.counting.acquire().await;
        let (own, hint, owner) = (Arc::clone(self), hint.to_owned(), owner.to_owned());
        blocking(move || own.show(&hint, &owner)).await
    }

    /// Commitments whose owners `wanted` accepts, as they are now. One that ends meanwhile is left out.
    ///
    /// # Errors
    /// Errors of reading the pins.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn list(self: &Arc<Self>, wanted: impl Fn(&str) -> bool) -> Result<Vec<view::Commitment>> {
        let keys: Vec<Key> = self.known().keys().filter(|(_, owner)| wanted(owner)).cloned().collect();
        let mut listed = Vec::with_capacity(keys.len());
        for (hint, owner) in keys {
            // One at a time, so that others need not wait for all.
            match self.look(&hint, &owner).await {
                Ok(shown) => listed.push(shown),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(listed)
    }

    fn show(&self, hint: &str, owner: &str) -> Result<view::Commitment> {
        let key = (hint.to_owned(), owner.to_owned());
        let (known, pin) = self.current(&key).ok_or_else(|| absent(hint))?;
        let (_, missing_bytes) = self.cache.count_missing(pin.id)?.ok_or_else(|| absent(hint))?;
        Ok(view::Commitment {
            hint_id: hint.to_owned(),
            owner: owner.to_owned(),
            inputs: known.record.inputs.into_iter().map(|input| input.name).collect(),
            bytes: known.record.bytes,
            missing_bytes,
            ready: missing_bytes == 0,
            pin: pin.id.to_string(),
            expires: pin.expires.map(|at| at.to_string()),
            gpus: known.record.job.map_or(0, |job| job.gpus),
            task: known.task.map(|task| task.view().id),
        })
    }

    /// Repository and names of the inputs of a commitment. Blocking.
    ///
    /// # Errors
    /// Not found, as for [`Commitments::look`].
    pub(super) fn inputs(&self, hint: &str, owner: &str) -> Result<(String, Vec<String>)> {
        let (known, _) = self.current(&(hint.to_owned(), owner.to_owned())).ok_or_else(|| absent(hint))?;
        let Record { repository, inputs, .. } = known.record;
        Ok((repository, inputs.into_iter().map(|input| input.name).collect()))
    }

    /// Sets the end of the lease of a commitment. Blocking.
    ///
    /// # Errors
    /// Not found, as for [`Commitments::look`]; exhausted, if its pin takes more memory than there is.
    pub(super) fn renew(&self, hint: &str, owner: &str, expires: Option<Timestamp>) -> Result<()> {
        let (_, pin) = self.current(&(hint.to_owned(), owner.to_owned())).ok_or_else(|| absent(hint))?;
        let _kept = self.budget.keep(pin.chunks * CHUNK_WEIGHT)?;
        self.cache.renew(pin.id, expires)?.map(drop).ok_or_else(|| absent(hint))
    }

    /// Undoes a commit whose fetch cannot begin. Blocking.
    pub(super) fn undo(&self, pending: &Pending) {
        let (hint, owner) = &pending.key;
        if pending.is_new
            && let Err(error) = self.release(hint, owner)
        {
            tracing::warn!("a commitment that cannot begin stays until its lease ends: {error:?}");
        }
    }

    /// Ends a commitment: its chunks may be evicted. What is being fetched for it is fetched on. Blocking.
    ///
    /// # Errors
    /// Not found, as for [`Commitments::look`].
    pub(super) fn release(&self, hint: &str, owner: &str) -> Result<()> {
        let _one = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (hint.to_owned(), owner.to_owned());
        let (_, pin) = self.current(&key).ok_or_else(|| absent(hint))?;
        self.cache.unpin(pin.id)?;
        self.forget(&key);
        Ok(())
    }

    /// The commitment of `key` with its pin; none if its pin has ended.
    fn current(&self, key: &Key) -> Option<(Known, Pin)> {
        let known = self.known().get(key).cloned()?;
        Some((known, pin_of(&self.cache, &key.0, &key.1)?))
    }

    /// Forgets the commitments whose pins have ended: so they are never more than the pins that an owner may have.
    fn sweep(&self) {
        let pins = self.cache.pins();
        let held: BTreeSet<(&str, &str)> = pins.iter().map(|pin| (pin.reason.as_str(), pin.owner.as_str())).collect();
        let ended: Vec<Key> = {
            let known = self.known();
            let keys = known.keys().filter(|(hint, owner)| !held.contains(&(reason(hint).as_str(), owner.as_str())));
            keys.cloned().collect()
        };
        ended.iter().for_each(|key| self.forget(key));
    }

    fn forget(&self, key: &Key) {
        remove(&self.folder, &file_of(key));
        self.known().remove(key);
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Key, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn pending(&self, key: &Key) -> Pending {
        let Record { repository, inputs, .. } = self.record.clone();
        Pending { key: key.clone(), repository, inputs, is_new: false }
    }
}

impl CommitRequest {
    fn record(&self, now: Timestamp) -> Record {
        let input = |CommitTree { saved, .. }: &CommitTree| CommittedInput {
            name: saved.name.to_string(),
            manifest: saved.value.manifest.to_string(),
        };
        let chunks: BTreeMap<_, _> =
            self.trees.iter().flat_map(|tree| &tree.chunks).map(|chunk| (chunk.id, chunk.stored_len)).collect();
        Record {
            hint: self.hint.clone(),
            owner: self.owner.clone(),
            repository: self.repository.clone(),
            inputs: self.trees.iter().map(input).collect(),
            bytes: chunks.values().map(|&len| u64::from(len)).sum(),
            job: (self.gpus > 0).then_some(CommittedJob {
                gpus: self.gpus,
                committed_ns: now.0,
                ready_ns: None,
                started: false,
            }),
        }
    }
}

impl CommittedJob {
    /// GPU seconds that did not idle, if the job has GPUs since `at`: those of the fetch before.
    fn gpu_seconds(self, at: Timestamp) -> u64 {
        let end = self.ready_ns.map_or(at, |ready| at.min(Timestamp(ready)));
        let fetch = end.since(Timestamp(self.committed_ns));
        u64::try_from(fetch.as_millis() * u128::from(self.gpus) / 1000).unwrap_or(u64::MAX)
    }
}

/// Fetches what is missing of the commitments of before a restart, one after the other.
///
/// # Cancel safety
/// Safe: the next start fetches the rest.
pub(super) async fn resume(state: Arc<AgentState>) {
    let Ok(commitments) = state.commitments() else { return };
    for pending in commitments.pending() {
        let (hint, _) = &pending.key;
        // Its repository may be no longer in the settings; the pin stays until its lease ends.
        let Ok(repository) = state.repository(Some(&pending.repository)) else { continue };
        let task = loop {
            match warm_commitment(&state, repository, (hint, pending.inputs.clone()), None) {
                Ok(task) => break task,
                // Too many tasks run.
                Err(_) => sleep(AGAIN_AFTER).await,
            }
        };
        commitments.fetch_started(&pending, Arc::clone(&task));
        task.ended().await;
    }
}

/// Reason of the pin of a hint, as `towline pins` shows it.
fn reason(hint: &str) -> String {
    format!("hint {hint}")
}

fn pin_of(cache: &Cache, hint: &str, owner: &str) -> Option<Pin> {
    let reason = reason(hint);
    cache.pins().into_iter().find(|pin| pin.owner == owner && pin.reason == reason)
}

fn absent(hint: &str) -> Error {
    Error::not_found("hint is not committed here")
        .at(hint)
        .help("it was released, its lease is over, or it is of another owner or agent: `towline hint NAME --commit` makes another")
}

/// Name of the file of a record.
fn file_of((hint, owner): &Key) -> String {
    let owner = blake3::hash(owner.as_bytes()).to_hex();
    format!("{hint}-{}{ENDING}", &owner[..16])
}

/// True for a name that [`file_of`] makes. Others' files are left alone, whoever moved them here.
fn is_record(file: &str) -> bool {
    let owner = file.strip_suffix(ENDING).and_then(|name| name.rsplit_once('-')).map(|(_, owner)| owner);
    owner.is_some_and(|owner| owner.len() == 16 && owner.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn read(folder: &OwnFolder, file: &str) -> Result<Record> {
    let text = folder.read(file, RECORD_LEN_MAX)?;
    let malformed =
        |source| Error::damaged("commitment is malformed").at(folder.path().join(file).display()).source(source);
    serde_json::from_str(&text).map_err(malformed)
}

fn remove(folder: &OwnFolder, file: &str) {
    if let Err(error) = folder.remove(file) {
        tracing::warn!("a commitment cannot be removed: {error:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_others_are_no_records() {
        assert!(is_record(&file_of(&("hint-1".into(), "me".into()))));
        for other in ["config.json", "generation-config.json", "a-0123456789abcdeg.json", "0123456789abcdef.json"] {
            assert!(!is_record(other), "{other}");
        }
    }

    #[test]
    fn only_the_fetch_before_the_start_counts() {
        let second = 1_000_000_000;
        let job = |ready: Option<i64>| CommittedJob {
            gpus: 8,
            committed_ns: 100 * second,
            ready_ns: ready.map(|at| at * second),
            started: false,
        };
        let at = |seconds: i64| Timestamp(seconds * second);
        // The fetch took 60 seconds; the job started later, or in the midst of it.
        assert_eq!(job(Some(160)).gpu_seconds(at(500)), 480);
        assert_eq!(job(Some(160)).gpu_seconds(at(110)), 80);
        assert_eq!(job(None).gpu_seconds(at(110)), 80);
        // A clock that was set back.
        assert_eq!(job(None).gpu_seconds(at(50)), 0);
    }
}
