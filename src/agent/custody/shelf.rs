//! Where an agent keeps what it was given into custody: a folder for each checkpoint, complete from the moment at which it has its name.
//!
//! ```text
//! DIR/ULID.part/...            on its way in or out; removed at the next start
//! DIR/ULID/told.json           who gave it, what it is to be saved as, and why it was set aside if it was
//! DIR/ULID/modes               the modes that its files and folders had where they came from
//! DIR/ULID/files/ENTRY...      the checkpoint, readable by the agent's user alone
//! ```

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use ulid::Ulid;

use super::held::{Announced, Held, names, write_modes};
use super::parcel::receive;
use super::register::{Promised, Register};
use crate::agent::config::{Accepts, CustodyConfig};
use crate::agent::view::Aside;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::repository::Name;
use crate::span;
use crate::transfer::identity::Identity;
use crate::tree::{Durability, Target};

const FILES: &str = "files";
const PART: &str = ".part";
/// Bytes of the labels of one, at most.
const LABELS_LEN_MAX: usize = 64 << 10;

/// All that an agent keeps for others.
#[derive(Debug)]
pub(in crate::agent) struct Shelf {
    dir: PathBuf,
    capacity: u64,
    accept: Accepts,
    deadline: Duration,
    register: Mutex<Register>,
    /// Something came, or went.
    pub(super) changed: Notify,
}

/// A checkpoint on its way. When this is dropped, its room is free again.
#[derive(Debug)]
pub(in crate::agent) struct Coming {
    shelf: Arc<Shelf>,
    id: Ulid,
    from: Identity,
    what: Announced,
    /// Deadline of the transfer.
    until: Instant,
}

impl Shelf {
    /// The one that `told` says, whose folder is made if it is not there, with what is on it. What was not whole is removed.
    ///
    /// # Errors
    /// The file system's.
    pub(in crate::agent) fn open(told: CustodyConfig) -> Result<Self> {
        let CustodyConfig { dir, capacity, accept, deadline, .. } = told;
        let io = |error| Error::io("folder of [custody] cannot be used", &dir, error);
        // What others gave is theirs to read.
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(io)?;
        dir.parent().map_or(Ok(()), sync).map_err(io)?;
        let mut register = Register::default();
        for entry in fs::read_dir(&dir).map_err(io)? {
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.strip_suffix(PART).is_some_and(|id| id.parse::<Ulid>().is_ok()) {
                drop(Part { dir: dir.clone(), name });
                continue;
            }
            let Ok(id) = name.parse::<Ulid>() else { continue };
            match Held::read(&entry.path()) {
                Ok(held) => drop(register.held.insert(id, held)),
                // It is nobody's but a person's to judge.
                Err(error) => {
                    tracing::error!("what is in custody at {} is not known: {error:?}", entry.path().display());
                }
            }
        }
        Ok(Self { dir, capacity, accept, deadline, register: Mutex::new(register), changed: Notify::new() })
    }

    /// Promises room to `from`.
    ///
    /// # Errors
    /// Denied, if no entry of the settings accepts it; exhausted, if there is not enough room, or too many come at once; usage, for
    /// labels that are too long, and for a name that is not of a step, or too long to be kept under another one.
    pub(in crate::agent) fn promise(&self, from: &Identity, what: Announced) -> Result<Ulid> {
        let id = Ulid::generate();
        names(&what.name, from, id)?;
        let allowance = self.accept.allowance(from, &what.name).ok_or_else(|| not_accepted(from, &what.name))?;
        let labels: usize = what.labels.iter().map(|(label, value)| label.len() + value.len()).sum();
        if labels > LABELS_LEN_MAX {
            let error = Error::usage("labels of a checkpoint are too long").at(&what.name);
            let error = error.expected(format!("at most {LABELS_LEN_MAX} bytes")).got(labels);
            return Err(error.help("give it fewer labels, or shorter ones"));
        }
        let mut register = self.register();
        register.forget(self.deadline);
        register.admit(from, &what, allowance, self.capacity)?;
        let from = from.clone();
        register.promised.insert(id, Promised { from, what, since: Instant::now(), coming: false });
        Ok(id)
    }

    /// Checks that the settings in force let `from` hand over `name`.
    ///
    /// # Errors
    /// Denied, if it may not.
    pub(super) fn check_accepted(&self, from: &Identity, name: &Name) -> Result<()> {
        self.accept.allowance(from, name).map(drop).ok_or_else(|| not_accepted(from, name))
    }

    /// Begins the transfer that was promised to `from` as `id`.
    ///
    /// # Errors
    /// Not found, if there is no such promise, or it is on its way already.
    pub(in crate::agent) fn expect(self: &Arc<Self>, id: Ulid, from: &Identity) -> Result<Coming> {
        let mut register = self.register();
        register.forget(self.deadline);
        let promised = register.promised.get_mut(&id).filter(|promised| promised.from == *from && !promised.coming);
        let promised = promised.ok_or_else(|| unknown(id))?;
        promised.coming = true;
        let (what, until) = (promised.what.clone(), promised.since + self.deadline);
        Ok(Coming { shelf: Arc::clone(self), id, from: from.clone(), what, until })
    }

    fn place(&self, id: Ulid, mut held: Held, input: &mut impl Read) -> Result<Held> {
        let part = Part { dir: self.dir.clone(), name: format!("{id}{PART}") };
        DirBuilder::new()
            .mode(0o700)
            .create(part.path())
            .map_err(|error| Error::io("cannot keep what was given into custody", &part.path(), error))?;
        let io = |error| Error::io("cannot keep what was given into custody", &part.path(), error);
        let received = receive(input, &Target::open(&part.path().join(FILES), Durability::Power)?, held.what.bytes)?;
        held.entry = PathBuf::from(OsString::from_vec(received.entry));
        write_modes(&received.modes, &part.path())?;
        held.write(id, &part.path())?;
        // The settings may have changed since room was promised.
        self.check_accepted(&held.from, &held.what.name)?;
        let whole = self.dir.join(id.to_string());
        sync(&part.path()).and_then(|()| fs::rename(part.path(), &whole)).map_err(io)?;
        // What was not answered for is not kept.
        sync(&self.dir).inspect_err(|_| drop(fs::rename(&whole, part.path()))).map_err(io)?;
        Ok(held)
    }

    /// The archive `id`, and its folder.
    pub(in crate::agent) fn find(&self, id: Ulid) -> Option<(Held, PathBuf)> {
        let held = self.register().held.get(&id).cloned()?;
        let path = self.dir.join(id.to_string()).join(FILES).join(&held.entry);
        Some((held, path))
    }

    /// Has somebody taken away by hand what is kept as `id`? Not, if all of the shelf is out of reach. Blocking.
    pub(in crate::agent) fn has_lost(&self, id: Ulid) -> bool {
        self.dir.exists() && !self.dir.join(id.to_string()).exists()
    }

    /// All that is kept; of `from`, if that is told. The oldest first.
    pub(in crate::agent) fn list(&self, from: Option<&Identity>) -> Vec<(Ulid, Held)> {
        let register = self.register();
        let held = register.held.iter().filter(|(_, held)| from.is_none_or(|from| held.from == *from));
        held.map(|(id, held)| (*id, held.clone())).collect()
    }

    /// Lets go of what is kept as `id`: when this returns, it is not saved any more, whatever happens. Blocking.
    ///
    /// # Errors
    /// Not found, if nothing of `from` is kept as `id`; the file system's.
    pub(in crate::agent) fn release(&self, id: Ulid, from: Option<&Identity>) -> Result<()> {
        let mut register = self.register();
        let ours = register.held.get(&id).is_some_and(|held| from.is_none_or(|from| held.from == *from));
        if !ours {
            return Err(unknown(id));
        }
        let (whole, part) =
            (self.dir.join(id.to_string()), Part { dir: self.dir.clone(), name: format!("{id}{PART}") });
        let io = |error| Error::io("cannot let go of what was kept", &whole, error);
        match fs::rename(&whole, part.path()) {
            // Somebody took it away by hand.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed.map_err(io)?,
        }
        register.held.remove(&id);
        register.urgent.remove(&id);
        drop(register);
        self.changed.notify_one();
        sync(&self.dir).map_err(io)
    }

    /// Bytes of room that is taken.
    pub(in crate::agent) fn bytes(&self) -> u64 {
        self.register().held.values().map(|held| held.what.bytes).sum()
    }

    /// Checkpoints that were set aside.
    pub(in crate::agent) fn aside(&self) -> u64 {
        self.register().held.values().filter(|held| held.aside.is_some()).count() as u64
    }

    /// Ids to save, the oldest first, each with whether it is to be saved at once, which is reported once.
    pub(super) fn to_save(&self) -> Vec<(Ulid, bool)> {
        let mut register = self.register();
        let urgent = std::mem::take(&mut register.urgent);
        let held = register.held.iter().filter(|(_, held)| held.aside.is_none());
        held.map(|(id, _)| (*id, urgent.contains(id))).collect()
    }

    /// Sets aside what is kept as `id`: it is not saved until somebody asks for that, also after a restart. Blocking.
    ///
    /// # Errors
    /// Not found, if nothing is kept as `id`; the file system's, and then it is set aside until the next start.
    pub(super) fn set_aside(&self, id: Ulid, aside: Aside) -> Result<()> {
        self.mark(id, Some(aside))
    }

    /// Has what was set aside as `id` saved, at once. Blocking.
    ///
    /// # Errors
    /// As [`Shelf::set_aside`].
    pub(in crate::agent) fn retry(&self, id: Ulid) -> Result<Held> {
        let marked = self.mark(id, None);
        let mut register = self.register();
        let held = register.held.get(&id).cloned().ok_or_else(|| unknown(id))?;
        register.urgent.insert(id);
        drop(register);
        self.changed.notify_one();
        marked.map(|()| held)
    }

    fn mark(&self, id: Ulid, aside: Option<Aside>) -> Result<()> {
        // Held while it is written: nothing is written into a folder that is let go of.
        let mut register = self.register();
        let held = register.held.get_mut(&id).ok_or_else(|| unknown(id))?;
        held.aside = aside;
        let folder = self.dir.join(id.to_string());
        held.write(id, &folder)?;
        sync(&folder).map_err(|error| Error::io("cannot keep what was given into custody", &folder, error))
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Coming {
    /// Deadline of the transfer.
    pub(in crate::agent) fn until(&self) -> Instant {
        self.until
    }

    /// Takes it in from `input`. When this returns, it survives a power loss. Blocking.
    ///
    /// # Errors
    /// Unreachable, if it was not there in time; denied, if the settings accept it no longer; as [`receive`]. Then nothing is kept.
    pub(in crate::agent) fn take(self, input: &mut impl Read, now: Timestamp) -> Result<Held> {
        let (from, what) = (self.from.clone(), self.what.clone());
        let held = Held { from, since: now.to_string(), what, entry: PathBuf::new(), aside: None };
        let held = self.shelf.place(self.id, held, input).map_err(|error| self.late(error))?;
        let mut register = self.shelf.register();
        register.promised.remove(&self.id);
        register.held.insert(self.id, held.clone());
        drop(register);
        self.shelf.changed.notify_one();
        Ok(held)
    }

    /// `error`, unless it only tells that the time is over.
    fn late(&self, error: Error) -> Error {
        if error.kind() != crate::error::ErrorKind::Unreachable || Instant::now() < self.until {
            return error;
        }
        Error::unreachable("checkpoint did not arrive in time")
            .at(&self.what.name)
            .expected(format!("all of it {} after room was promised", span::show(self.shelf.deadline)))
            .help("raise deadline in [custody] of the keeper's settings")
            .source(error)
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.shelf.register().promised.remove(&self.id);
    }
}

/// A folder that is not whole; all of it goes when this does, unless it has another name by then.
struct Part {
    dir: PathBuf,
    name: String,
}

impl Part {
    fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Folders that nobody may write to go, too.
        let removed = Target::open(&self.dir, Durability::Process).and_then(|dir| dir.remove(self.name.as_bytes()));
        if let Err(error) = removed {
            tracing::warn!("what is not in custody any more is left until the next start: {error:?}");
        }
    }
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn not_accepted(from: &Identity, name: &Name) -> Error {
    Error::denied(format!("agent {} may not give this into custody here", from.path())).at(name).help(format!(
        "add the name to `names` of a [[custody.accept]] entry with from = \"{}\" in the keeper's settings",
        from.path()
    ))
}

fn unknown(id: Ulid) -> Error {
    Error::not_found("nothing is kept, or awaited, under this id").at(id).help("GET /v1/custody lists what is kept")
}
