//! Stored checkpoints of other agents: one folder each, complete once it has its final name.
//!
//! ```text
//! DIR/ULID.part/...            being written or deleted; deleted after the next start
//! DIR/ULID/handoff.json        sender, name to save it as, and why it was set aside if it was
//! DIR/ULID/begun               saves that began and did not end, while there are some
//! DIR/ULID/modes               modes of its files and folders at the sender
//! DIR/ULID/files/ENTRY...      the checkpoint, readable by the agent's user alone
//! ```

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use ulid::Ulid;

use super::archive::receive;
use super::path_memory::PathMemory;
use super::register::{Deleting, Promise, Register};
use super::stored::{Announced, BegunSave, StoredCheckpoint, names, write_modes};
use crate::agent::audit::outcome;
use crate::agent::config::{Accepts, HandoffConfig};
use crate::agent::view::SetAside;
use crate::audit::Request;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::size;
use crate::span;
use crate::tree::{Durability, Target, check_own_folder};

const FILES: &str = "files";
const PART: &str = ".part";
/// Limit of the labels of a checkpoint, in bytes as JSON: lists of handoffs have them all.
const LABELS_LEN_MAX: usize = 4 << 10;

/// Checkpoints that an agent stores for others.
#[derive(Debug)]
pub(in crate::agent) struct HandoffStore {
    dir: PathBuf,
    capacity: u64,
    accept: Accepts,
    deadline: Duration,
    register: Arc<Mutex<Register>>,
    /// Notified when a checkpoint was added or removed.
    pub(super) changed: Notify,
    path_memory: PathMemory,
}

/// An upload in progress. Dropping it frees its space.
#[derive(Debug)]
pub(in crate::agent) struct Incoming {
    store: Arc<HandoffStore>,
    id: Ulid,
    from: Identity,
    what: Announced,
    /// Deadline of the upload.
    until: Instant,
    /// Its entry in the audit log.
    recorded: Option<Request>,
}

impl HandoffStore {
    /// Opens the store, creating its folder if it is missing. Incomplete checkpoints are deleted in the background.
    ///
    /// # Errors
    /// The file system's.
    pub(in crate::agent) fn open(config: HandoffConfig) -> Result<Self> {
        let HandoffConfig { dir, capacity, accept, deadline, .. } = config;
        let io = |error| Error::io("folder of [handoff] cannot be used", &dir, error);
        // Only this user may read the files of other agents.
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(io)?;
        check_own_folder(&dir)?;
        dir.parent().map_or(Ok(()), sync).map_err(io)?;
        let mut register = Register::default();
        for entry in fs::read_dir(&dir).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(id) = name.strip_suffix(PART).and_then(|id| id.parse::<Ulid>().ok()) {
                // An unfinished upload has no record.
                let stored = StoredCheckpoint::read(&entry.path()).ok().map(|stored| (stored.from, stored.what.bytes));
                let (from, bytes) = stored.map_or((None, 0), |(from, bytes)| (Some(from), bytes));
                register.deleting.insert(id, Deleting { from, bytes, failed: false });
                continue;
            }
            let Ok(id) = name.parse::<Ulid>() else { continue };
            match StoredCheckpoint::read(&entry.path()) {
                Ok(stored) => drop(register.stored.insert(id, stored)),
                // Left in place for the operator.
                Err(error) => {
                    tracing::error!("handoff at {} has no readable record: {error:?}", entry.path().display());
                }
            }
        }
        let register = Arc::new(Mutex::new(register));
        let (changed, path_memory) = Default::default();
        let store = Self { dir, capacity, accept, deadline, register, changed, path_memory };
        store.delete_in_background(&mut store.register());
        Ok(store)
    }

    /// Promises space to `from`.
    ///
    /// # Errors
    /// Denied, if no entry of the settings accepts it; exhausted, if space, the quota or the number of uploads is used up; usage, for
    /// labels that are too long, and for a name that is no step, or too long for its alternatives.
    pub(in crate::agent) fn promise(&self, from: &Identity, what: Announced) -> Result<Ulid> {
        let id = Ulid::generate();
        names(&what.name, from, id)?;
        let allowance = self.accept.allowance(from, &what.name).ok_or_else(|| not_accepted(from, &what.name))?;
        let labels = serde_json::to_vec(&what.labels).map_or(usize::MAX, |labels| labels.len());
        if labels > LABELS_LEN_MAX {
            let error = Error::usage("labels of a checkpoint are too long").at(&what.name);
            let error = error.expected(format!("at most {LABELS_LEN_MAX} bytes")).got(labels);
            return Err(error.help("use fewer or shorter labels"));
        }
        self.check_disk(&what)?;
        let mut register = self.register();
        register.forget(self.deadline);
        register.admit(from, &what, allowance, self.capacity)?;
        let from = from.clone();
        register.promised.insert(id, Promise { from, what, since: Instant::now(), incoming: false, recorded: None });
        Ok(id)
    }

    /// Sets the audit entry of promise `id`, which ends with the received bytes.
    pub(in crate::agent) fn record(&self, id: Ulid, request: Option<Request>) {
        if let Some(promised) = self.register().promised.get_mut(&id) {
            promised.recorded = request;
        }
    }

    /// Cancels promise `id`.
    pub(in crate::agent) fn withdraw(&self, id: Ulid) {
        self.register().promised.remove(&id);
    }

    /// Checks that the disk has space for `what`, whatever `capacity` says: a sender should not learn it from a failed upload.
    fn check_disk(&self, what: &Announced) -> Result<()> {
        // If the file system does not report its free space, the upload shows whether it is full.
        let Ok(disk) = rustix::fs::statvfs(&self.dir) else { return Ok(()) };
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if what.bytes <= free {
            return Ok(());
        }
        Err(Error::exhausted("disk full: no space for this handoff")
            .at(&what.name)
            .expected(format!("at most {} ({free} bytes)", size::show(free)))
            .got(format!("{} bytes", what.bytes))
            .help("free space on the disk of [handoff] dir at the receiver"))
    }

    /// Checks that the current settings permit `from` to hand off `name`.
    ///
    /// # Errors
    /// Denied, if it may not.
    pub(super) fn check_accepted(&self, from: &Identity, name: &Name) -> Result<()> {
        self.accept.allowance(from, name).map(drop).ok_or_else(|| not_accepted(from, name))
    }

    /// Begins the upload that was promised to `from` as `id`.
    ///
    /// # Errors
    /// Not found, if there is no such promise, or its upload has begun already.
    pub(in crate::agent) fn expect(self: &Arc<Self>, id: Ulid, from: &Identity) -> Result<Incoming> {
        let mut register = self.register();
        register.forget(self.deadline);
        let promised = register.promised.get_mut(&id).filter(|promised| promised.from == *from && !promised.incoming);
        let promised = promised.ok_or_else(|| unknown(id))?;
        promised.incoming = true;
        let (what, until) = (promised.what.clone(), promised.since + self.deadline);
        let recorded = promised.recorded.clone();
        Ok(Incoming { store: Arc::clone(self), id, from: from.clone(), what, until, recorded })
    }

    fn place(&self, id: Ulid, mut stored: StoredCheckpoint, input: &mut impl Read) -> Result<StoredCheckpoint> {
        let part = PartialFolder { dir: self.dir.clone(), name: format!("{id}{PART}") };
        DirBuilder::new()
            .mode(0o700)
            .create(part.path())
            .map_err(|error| Error::io("cannot store a handed-off checkpoint", &part.path(), error))?;
        let io = |error| Error::io("cannot store a handed-off checkpoint", &part.path(), error);
        let target = Target::open(&part.path().join(FILES), Durability::Power)?;
        let received = receive(input, &target, stored.what.bytes, self.path_memory.of(&stored.from))?;
        stored.entry = PathBuf::from(OsString::from_vec(received.entry));
        write_modes(&received.modes, &part.path())?;
        stored.write(id, &part.path())?;
        // The settings may have changed since the promise.
        self.check_accepted(&stored.from, &stored.what.name)?;
        let whole = self.dir.join(id.to_string());
        sync(&part.path()).and_then(|()| fs::rename(part.path(), &whole)).map_err(io)?;
        // Undone on error: a checkpoint is kept only once it was confirmed.
        sync(&self.dir).inspect_err(|_| drop(fs::rename(&whole, part.path()))).map_err(io)?;
        Ok(stored)
    }

    /// Checkpoint `id`, and its path.
    pub(in crate::agent) fn find(&self, id: Ulid) -> Option<(StoredCheckpoint, PathBuf)> {
        let stored = self.register().stored.get(&id).cloned()?;
        let path = self.dir.join(id.to_string()).join(FILES).join(&stored.entry);
        Some((stored, path))
    }

    /// True if somebody removed checkpoint `id` by hand; false if the whole store is unreachable. Blocking.
    pub(in crate::agent) fn has_lost(&self, id: Ulid) -> bool {
        self.dir.exists() && !self.dir.join(id.to_string()).exists()
    }

    /// All checkpoints, or those of `from`, the oldest first.
    pub(in crate::agent) fn list(&self, from: Option<&Identity>) -> Vec<(Ulid, StoredCheckpoint)> {
        let register = self.register();
        let stored = register.stored.iter().filter(|(_, stored)| from.is_none_or(|from| stored.from == *from));
        stored.map(|(id, stored)| (*id, stored.clone())).collect()
    }

    /// Removes checkpoint `id` and deletes its files in the background. After this it is never saved, whatever happens. Blocking.
    ///
    /// # Errors
    /// Not found, if `id` is not stored for `from`; the file system's.
    pub(in crate::agent) fn release(&self, id: Ulid, from: Option<&Identity>) -> Result<()> {
        let mut register = self.register();
        let ours = register.stored.get(&id).is_some_and(|stored| from.is_none_or(|from| stored.from == *from));
        if !ours {
            return Err(unknown(id));
        }
        let whole = self.dir.join(id.to_string());
        let io = |error| Error::io("cannot delete a handed-off checkpoint", &whole, error);
        let is_there = match fs::rename(&whole, self.dir.join(format!("{id}{PART}"))) {
            // It was removed by hand.
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            renamed => renamed.map(|()| true).map_err(io)?,
        };
        register.urgent.remove(&id);
        if let Some(stored) = register.stored.remove(&id)
            && is_there
        {
            let folder = Deleting { from: Some(stored.from), bytes: stored.what.bytes, failed: false };
            register.deleting.insert(id, folder);
            self.delete_in_background(&mut register);
        }
        drop(register);
        self.changed.notify_one();
        sync(&self.dir).map_err(io)
    }

    /// Starts the thread that deletes folders, unless it runs or there are none.
    fn delete_in_background(&self, register: &mut Register) {
        if register.deleter_runs || register.deleting.is_empty() {
            return;
        }
        let (dir, shared) = (self.dir.clone(), Arc::clone(&self.register));
        let thread = thread::Builder::new().name("handoff-delete".to_owned());
        match thread.spawn(move || delete_folders(&dir, &shared)) {
            Ok(_) => register.deleter_runs = true,
            Err(error) => {
                tracing::warn!("cannot start a thread that deletes handoffs, the next deletion tries again: {error}");
            }
        }
    }

    /// Space that is taken, in bytes.
    pub(in crate::agent) fn bytes(&self) -> u64 {
        self.register().stored.values().map(|stored| stored.what.bytes).sum()
    }

    /// Number of checkpoints that were set aside.
    pub(in crate::agent) fn aside(&self) -> u64 {
        self.register().stored.values().filter(|stored| stored.aside.is_some()).count() as u64
    }

    /// Ids to save, the oldest first, each with a flag: save at once. The flag is returned once.
    pub(super) fn to_save(&self) -> Vec<(Ulid, bool)> {
        let mut register = self.register();
        let urgent = std::mem::take(&mut register.urgent);
        let stored = register.stored.iter().filter(|(_, stored)| stored.aside.is_none());
        stored.map(|(id, _)| (*id, urgent.contains(id))).collect()
    }

    /// Sets aside checkpoint `id`: it is not saved until [`HandoffStore::retry`], also after a restart. Blocking.
    ///
    /// # Errors
    /// Not found, if `id` is not stored; the file system's, and then it is set aside until the next start.
    pub(super) fn set_aside(&self, id: Ulid, aside: SetAside) -> Result<()> {
        self.mark(id, Some(aside))
    }

    /// Saves checkpoint `id`, which was set aside, now. Blocking.
    ///
    /// # Errors
    /// As [`HandoffStore::set_aside`].
    pub(in crate::agent) fn retry(&self, id: Ulid) -> Result<StoredCheckpoint> {
        let marked = self.mark(id, None);
        let mut register = self.register();
        let stored = register.stored.get(&id).cloned().ok_or_else(|| unknown(id))?;
        register.urgent.insert(id);
        drop(register);
        self.changed.notify_one();
        marked.map(|()| stored)
    }

    /// Counts a save of checkpoint `id`. Blocking.
    ///
    /// # Errors
    /// Not found, if `id` is not stored; the file system's.
    pub(super) fn begin_save(&self, id: Ulid) -> Result<BegunSave> {
        // Locked while writing: nothing is written into a folder that is being deleted.
        let register = self.register();
        if !register.stored.contains_key(&id) {
            return Err(unknown(id));
        }
        BegunSave::begin(&self.dir.join(id.to_string()))
    }

    fn mark(&self, id: Ulid, aside: Option<SetAside>) -> Result<()> {
        // Locked while writing: nothing is written into a folder that is being deleted.
        let mut register = self.register();
        let stored = register.stored.get_mut(&id).ok_or_else(|| unknown(id))?;
        stored.aside = aside;
        let folder = self.dir.join(id.to_string());
        stored.write(id, &folder)?;
        sync(&folder).map_err(|error| Error::io("cannot store a handed-off checkpoint", &folder, error))
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        lock(&self.register)
    }
}

impl Incoming {
    /// Deadline of the upload.
    pub(in crate::agent) fn until(&self) -> Instant {
        self.until
    }

    /// Its entry in the audit log, if there is one.
    pub(in crate::agent) fn recorded(&self) -> Option<Request> {
        self.recorded.clone()
    }

    fn end(&self, outcome: impl Into<String>) {
        if let Some(recorded) = &self.recorded {
            recorded.end(outcome);
        }
    }

    /// Reads the archive from `input` and stores it. On return it survives a power loss. Blocking.
    ///
    /// # Errors
    /// Unreachable, after the deadline; denied, if the settings no longer accept it; as [`receive`]. On error nothing is stored.
    pub(in crate::agent) fn take(self, input: &mut impl Read, now: Timestamp) -> Result<StoredCheckpoint> {
        let (from, what) = (self.from.clone(), self.what.clone());
        let stored = StoredCheckpoint { from, since: now.to_string(), what, entry: PathBuf::new(), aside: None };
        let placed = self.store.place(self.id, stored, input).map_err(|error| self.late(error));
        let stored = placed.inspect_err(|error| self.end(outcome(error)))?;
        self.end("done");
        let mut register = self.store.register();
        register.promised.remove(&self.id);
        register.stored.insert(self.id, stored.clone());
        drop(register);
        self.store.changed.notify_one();
        Ok(stored)
    }

    /// `error`, or the deadline if that was its cause.
    fn late(&self, error: Error) -> Error {
        if error.kind() != crate::error::ErrorKind::Unreachable || Instant::now() < self.until {
            return error;
        }
        Error::unreachable("checkpoint did not arrive in time")
            .at(&self.what.name)
            .expected(format!("all of it {} after the promise", span::show(self.store.deadline)))
            .help("raise deadline in [handoff] of the receiver's settings")
            .source(error)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // The first outcome stands.
        self.end("it did not arrive");
        self.store.register().promised.remove(&self.id);
    }
}

/// An incomplete folder, deleted on drop unless it was renamed by then.
struct PartialFolder {
    dir: PathBuf,
    name: String,
}

impl PartialFolder {
    fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }
}

impl Drop for PartialFolder {
    fn drop(&mut self) {
        remove_folder(&self.dir, &self.name);
    }
}

/// Deletes the folders that `register` lists, until none is left. Blocking.
fn delete_folders(dir: &Path, register: &Mutex<Register>) {
    loop {
        let mut locked = lock(register);
        let Some(id) = locked.next_to_delete() else {
            locked.deleter_runs = false;
            return;
        };
        drop(locked);
        let removed = remove_folder(dir, &format!("{id}{PART}"));
        let mut locked = lock(register);
        if removed {
            locked.deleting.remove(&id);
        } else if let Some(folder) = locked.deleting.get_mut(&id) {
            folder.failed = true;
        }
    }
}

/// Deletes folder `name` in `dir`, writable or not. False, if that failed. Blocking.
fn remove_folder(dir: &Path, name: &str) -> bool {
    let removed = Target::open(dir, Durability::Process).and_then(|dir| dir.remove(name.as_bytes()));
    if let Err(error) = &removed {
        tracing::warn!("cannot delete a handoff, it is deleted at the next start: {error:?}");
    }
    removed.is_ok()
}

fn lock(register: &Mutex<Register>) -> MutexGuard<'_, Register> {
    register.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn not_accepted(from: &Identity, name: &Name) -> Error {
    Error::denied(format!("agent {} may not hand this off here", from.path())).at(name).help(format!(
        "add the name to `names` of a [[handoff.accept]] entry with from = \"{}\" in the receiver's settings",
        from.path()
    ))
}

fn unknown(id: Ulid) -> Error {
    Error::not_found("no handoff has this id").at(id).help("`towline handoff list` and GET /v1/handoffs list them")
}
