//! Where an agent keeps what it was given into custody: a folder for each checkpoint, complete from the moment at which it has its name.
//!
//! ```text
//! DIR/ULID.part/...            on its way in or out; removed at the next start
//! DIR/ULID/told.json           who gave it, and what it is to be saved as
//! DIR/ULID/files/ENTRY...      the checkpoint
//! ```

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use ulid::Ulid;

use super::parcel::receive;
use crate::agent::view::Kept;
use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::repository::Name;
use crate::size;
use crate::transfer::identity::Identity;
use crate::tree::{Durability, Target};

const TOLD: &str = "told.json";
const FILES: &str = "files";
const PART: &str = ".part";
/// Room that is promised to a checkpoint that does not come is given to others after this.
const PROMISED_FOR: Duration = Duration::from_mins(1);
/// Checkpoints that may be on their way at the same time: of all agents, and of one.
const PROMISED_MAX: (usize, usize) = (64, 4);
/// Checkpoints that are kept, at most: what is said of each is in memory.
const HELD_MAX: usize = 1024;
/// Bytes of the labels of one, at most.
const LABELS_LEN_MAX: usize = 64 << 10;

/// What another agent wants to give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Announced {
    /// What it is to be saved as.
    pub(in crate::agent) name: Name,
    /// Where.
    pub(in crate::agent) repository: RepositoryId,
    /// Labels that it is to have.
    pub(in crate::agent) labels: BTreeMap<String, String>,
    /// Bytes of room that it takes.
    pub(in crate::agent) bytes: u64,
}

/// What is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Held {
    /// Whose it is.
    pub(in crate::agent) from: Identity,
    /// When it was there, RFC 3339.
    since: String,
    pub(in crate::agent) what: Announced,
    /// What it is called.
    entry: PathBuf,
}

/// The same, as it is written.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    #[serde(flatten)]
    kept: Kept,
    entry: PathBuf,
}

/// All that an agent keeps for others.
#[derive(Debug)]
pub(in crate::agent) struct Shelf {
    dir: PathBuf,
    capacity: u64,
    register: Mutex<Register>,
    /// Something came, or went.
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
struct Register {
    promised: BTreeMap<Ulid, Promised>,
    held: BTreeMap<Ulid, Held>,
}

#[derive(Debug)]
struct Promised {
    from: Identity,
    what: Announced,
    since: Instant,
    /// It is on its way.
    coming: bool,
}

impl Shelf {
    /// The one in `dir`, which is made if it is not there, with what is on it; for `capacity` bytes. What was not whole is removed.
    ///
    /// # Errors
    /// The file system's.
    pub(in crate::agent) fn open(dir: PathBuf, capacity: u64) -> Result<Self> {
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
        Ok(Self { dir, capacity, register: Mutex::new(register), changed: Notify::new() })
    }

    /// Promises room to `from`.
    ///
    /// # Errors
    /// Exhausted, if there is not enough, or too many come at once; usage, for labels that are too long, and for a name that is not of a
    /// step, or too long to be kept under another one.
    pub(in crate::agent) fn promise(&self, from: &Identity, what: Announced) -> Result<Ulid> {
        let id = Ulid::generate();
        names(&what.name, from, id)?;
        let mut register = self.register();
        register.promised.retain(|_, promised| promised.coming || promised.since.elapsed() < PROMISED_FOR);
        let own = register.promised.values().filter(|promised| promised.from == *from).count();
        if register.promised.len() >= PROMISED_MAX.0 || own >= PROMISED_MAX.1 || register.held.len() >= HELD_MAX {
            let most = format!(
                "at most {} on their way, {} of one agent, and {HELD_MAX} kept",
                PROMISED_MAX.0, PROMISED_MAX.1
            );
            return Err(Error::exhausted("too many checkpoints come at once")
                .at(&what.name)
                .expected(most)
                .cure("try again"));
        }
        let labels: usize = what.labels.iter().map(|(label, value)| label.len() + value.len()).sum();
        if labels > LABELS_LEN_MAX {
            let error = Error::usage("labels of a checkpoint are too long").at(&what.name);
            let error = error.expected(format!("at most {LABELS_LEN_MAX} bytes")).got(labels);
            return Err(error.cure("give it fewer labels, or shorter ones"));
        }
        let held = register.held.values().map(|held| held.what.bytes);
        let taken: u64 = held.chain(register.promised.values().map(|promised| promised.what.bytes)).sum();
        let left = self.capacity.saturating_sub(taken);
        if what.bytes > left {
            return Err(Error::exhausted("there is no room to keep this")
                .at(&what.name)
                .expected(format!("at most {} ({left} bytes)", size::show(left)))
                .got(format!("{} bytes", what.bytes))
                .cure(
                    "raise capacity in [custody] of that agent's settings, or wait until it has saved what it keeps",
                ));
        }
        let from = from.clone();
        register.promised.insert(id, Promised { from, what, since: Instant::now(), coming: false });
        Ok(id)
    }

    /// Takes in what `from` was promised room for as `id`, from `input`. When this returns, it survives a power loss. Blocking.
    ///
    /// # Errors
    /// Not found, if there is no such promise, or it is on its way already; as [`receive`]. Then nothing is kept.
    pub(in crate::agent) fn take(
        &self,
        id: Ulid,
        from: &Identity,
        input: &mut impl Read,
        now: Timestamp,
    ) -> Result<Held> {
        let held = {
            let mut register = self.register();
            let promised = register.promised.get_mut(&id).filter(|promised| promised.from == *from && !promised.coming);
            let promised = promised.ok_or_else(|| unknown(id))?;
            promised.coming = true;
            let what = promised.what.clone();
            Held { from: from.clone(), since: now.to_string(), what, entry: PathBuf::new() }
        };
        let placed = self.place(id, held, input);
        let mut register = self.register();
        register.promised.remove(&id);
        let held = placed?;
        register.held.insert(id, held.clone());
        self.changed.notify_one();
        Ok(held)
    }

    fn place(&self, id: Ulid, mut held: Held, input: &mut impl Read) -> Result<Held> {
        let part = Part { dir: self.dir.clone(), name: format!("{id}{PART}") };
        let io = |error| Error::io("cannot keep what was given into custody", &part.path(), error);
        let entry = receive(input, &Target::open(&part.path().join(FILES), Durability::Power)?, held.what.bytes)?;
        held.entry = PathBuf::from(OsString::from_vec(entry));
        held.write(id, &part.path())?;
        let whole = self.dir.join(id.to_string());
        sync(&part.path()).and_then(|()| fs::rename(part.path(), &whole)).map_err(io)?;
        // What was not answered for is not kept.
        sync(&self.dir).inspect_err(|_| drop(fs::rename(&whole, part.path()))).map_err(io)?;
        Ok(held)
    }

    /// What is kept as `id`, and where it is.
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
        drop(register);
        self.changed.notify_one();
        sync(&self.dir).map_err(io)
    }

    /// Bytes of room that is taken.
    pub(in crate::agent) fn bytes(&self) -> u64 {
        self.register().held.values().map(|held| held.what.bytes).sum()
    }

    fn register(&self) -> MutexGuard<'_, Register> {
        self.register.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// As the API tells it.
    pub(in crate::agent) fn told(&self, id: Ulid) -> Kept {
        let Announced { name, repository, labels, bytes } = &self.what;
        Kept {
            id: id.to_string(),
            from: self.from.to_string(),
            since: self.since.clone(),
            name: name.to_string(),
            repository: repository.to_string(),
            labels: labels.clone(),
            bytes: *bytes,
        }
    }

    fn write(&self, id: Ulid, folder: &Path) -> Result<()> {
        let told = Told { kept: self.told(id), entry: self.entry.clone() };
        let told =
            serde_json::to_vec(&told).map_err(|source| Error::other("what is kept is not JSON").source(source))?;
        let path = folder.join(TOLD);
        let written = fs::write(&path, told).and_then(|()| File::open(&path)?.sync_all());
        written.map_err(|error| Error::io("cannot keep what was given into custody", &path, error))
    }

    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(TOLD);
        let told = fs::read(&path).map_err(|error| Error::io("cannot read whose it is", &path, error))?;
        let malformed = || Error::damaged("file is malformed").at(path.display());
        let Told { kept, entry } = serde_json::from_slice(&told).map_err(|source| malformed().source(source))?;
        let repository = kept.repository.parse().map_err(|source| malformed().source(source))?;
        let what = Announced { name: kept.name.parse()?, repository, labels: kept.labels, bytes: kept.bytes };
        Ok(Self { from: kept.from.parse()?, since: kept.since, what, entry })
    }
}

/// The names to try, in order, for a checkpoint that `from` gave as `name`: that name, one of the agent's own, and a unique one.
/// No name is ever replaced.
///
/// # Errors
/// Usage, if `name` is not of a step of a run, or so long that the others are no names.
pub(in crate::agent) fn names(name: &Name, from: &Identity, id: Ulid) -> Result<[Name; 3]> {
    if name.step().is_none() {
        return Err(Error::usage("only steps of a run are taken into custody")
            .expected("RUN/step-N")
            .got(name)
            .cure("save it instead"));
    }
    let own = format!("custody/{}", from.path());
    Ok([name.clone(), format!("{own}/{name}").parse()?, format!("{own}/{id}/{name}").parse()?])
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

fn unknown(id: Ulid) -> Error {
    Error::not_found("nothing is kept, or awaited, under this id").at(id).cure("GET /v1/custody lists what is kept")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::parcel::Contents;
    use super::*;
    use crate::error::ErrorKind;

    fn agent(name: &str) -> Identity {
        Identity::new("home", name).unwrap()
    }

    fn announced(bytes: u64) -> Announced {
        let (name, labels) = ("run/step-5".parse().unwrap(), BTreeMap::from([("a".to_owned(), "b".to_owned())]));
        Announced { name, repository: RepositoryId::random(), labels, bytes }
    }

    /// A checkpoint in a folder that nobody may write to, as it is sent, and its room.
    fn parcel(room: &Path) -> (Vec<u8>, u64) {
        let path = room.join("checkpoint-5");
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("model.bin"), [7; 1000]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o555)).unwrap();
        let contents = Contents::find(&path).unwrap();
        let mut bytes = Vec::new();
        contents.send(&mut bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        (bytes, contents.room())
    }

    fn promise(shelf: &Shelf, name: &str, bytes: u64) -> Result<Ulid> {
        shelf.promise(&agent(name), announced(bytes))
    }

    fn take(shelf: &Shelf, id: Ulid, mut parcel: &[u8]) -> Result<Held> {
        shelf.take(id, &agent("a"), &mut parcel, Timestamp(1))
    }

    #[test]
    fn what_is_kept_is_there_after_a_restart_and_goes_when_it_is_let_go() {
        let room = tempfile::tempdir().unwrap();
        let (dir, (parcel, takes)) = (room.path().join("kept"), parcel(room.path()));
        let shelf = Shelf::open(dir.clone(), 2 * takes).unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        let id = promise(&shelf, "a", takes).unwrap();
        let other = shelf.take(id, &agent("b"), &mut parcel.as_slice(), Timestamp(1));
        assert_eq!(other.unwrap_err().kind(), ErrorKind::NotFound, "it is another's");
        let held = take(&shelf, id, &parcel).unwrap();
        assert_eq!(take(&shelf, id, &parcel).unwrap_err().kind(), ErrorKind::NotFound, "it came");
        // One that was on its way when the agent was killed is no checkpoint.
        let part = dir.join(format!("{}{PART}", Ulid::generate()));
        fs::create_dir_all(part.join("files/c")).unwrap();
        fs::set_permissions(part.join("files/c"), fs::Permissions::from_mode(0o555)).unwrap();
        fs::create_dir(dir.join(Ulid::generate().to_string())).unwrap();

        let shelf = Shelf::open(dir.clone(), 2 * takes).unwrap();
        assert!(!part.exists());
        let (again, place) = shelf.find(id).unwrap();
        assert_eq!((&again, shelf.bytes()), (&held, takes), "what nobody knows is left alone");
        assert_eq!(fs::read(place.join("model.bin")).unwrap(), [7; 1000]);
        assert_eq!((shelf.list(Some(&agent("b"))).len(), shelf.list(None).len()), (0, 1));
        assert!(shelf.release(id, Some(&agent("b"))).is_err(), "it is another's");
        shelf.release(id, Some(&agent("a"))).unwrap();
        assert!(shelf.find(id).is_none() && shelf.release(id, None).is_err());
        assert_eq!((shelf.bytes(), fs::read_dir(&dir).unwrap().count()), (0, 1));
        // What somebody took away by hand is let go of, too.
        let id = promise(&shelf, "a", takes).unwrap();
        take(&shelf, id, &parcel).unwrap();
        assert!(!shelf.has_lost(id));
        fs::rename(dir.join(id.to_string()), room.path().join("elsewhere")).unwrap();
        assert!(shelf.has_lost(id));
        shelf.release(id, None).unwrap();
        assert_eq!(shelf.bytes(), 0);
    }

    #[test]
    fn room_is_promised_once() {
        let room = tempfile::tempdir().unwrap();
        let (dir, (parcel, takes)) = (room.path().join("kept"), parcel(room.path()));
        let shelf = Shelf::open(dir.clone(), 2 * takes + 500).unwrap();
        let first = promise(&shelf, "a", takes).unwrap();
        let second = promise(&shelf, "a", takes + 500).unwrap();
        assert_eq!(promise(&shelf, "b", 1).unwrap_err().kind(), ErrorKind::Exhausted);
        // One that breaks off leaves nothing, and its room is free again.
        assert_eq!(take(&shelf, second, &parcel[..500]).unwrap_err().kind(), ErrorKind::Unreachable);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        take(&shelf, first, &parcel).unwrap();
        // More than was announced is not taken.
        let small = promise(&shelf, "a", takes - 1).unwrap();
        assert_eq!(take(&shelf, small, &parcel).unwrap_err().kind(), ErrorKind::Exhausted);
        assert_eq!(shelf.bytes(), takes);
        // Nobody takes all places.
        let promises = (0..9).filter(|_| promise(&shelf, "a", 1).is_ok()).count();
        assert_eq!(promises, PROMISED_MAX.1);
        assert!(promise(&shelf, "b", 1).is_ok());
        let mut long = announced(1);
        long.labels.insert("long".to_owned(), "x".repeat(LABELS_LEN_MAX));
        assert_eq!(shelf.promise(&agent("b"), long).unwrap_err().kind(), ErrorKind::Usage);
    }

    #[test]
    fn a_checkpoint_has_three_names_to_be_saved_as() {
        let (from, id) = (agent("a"), Ulid::generate());
        let all = names(&"run/step-7".parse().unwrap(), &from, id).unwrap();
        let expected = [
            "run/step-7".to_owned(),
            format!("custody/{}/run/step-7", from.path()),
            format!("custody/{}/{id}/run/step-7", from.path()),
        ];
        assert_eq!(all.map(|name| name.to_string()), expected);
        assert_eq!(names(&"models/production".parse().unwrap(), &from, id).unwrap_err().kind(), ErrorKind::Usage);
    }
}
