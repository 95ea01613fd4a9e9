//! Records of stored checkpoints: in memory, and in files beside each checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use ulid::Ulid;

use super::archive::{Modes, decode_modes, encode_modes};
use crate::agent::view::{Handoff, SetAside};
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::name::Name;

const RECORD: &str = "handoff.json";
const MODES: &str = "modes";
const BEGUN: &str = "begun";

/// A checkpoint that another agent has announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Announced {
    /// The name to save it as.
    pub(in crate::agent) name: Name,
    /// The repository to save it in.
    pub(in crate::agent) repository: RepositoryId,
    /// Labels to save it with.
    pub(in crate::agent) labels: BTreeMap<String, String>,
    /// Space that it takes, in bytes.
    pub(in crate::agent) bytes: u64,
}

/// A checkpoint that is stored for another agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::agent) struct StoredCheckpoint {
    /// Agent that sent it.
    pub(in crate::agent) from: Identity,
    /// Time of its arrival, RFC 3339.
    pub(super) since: String,
    pub(in crate::agent) what: Announced,
    /// Its file name or folder name.
    pub(super) entry: PathBuf,
    /// The failure for which it was set aside, if it was.
    pub(super) aside: Option<SetAside>,
}

/// JSON form of [`StoredCheckpoint`].
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    #[serde(flatten)]
    handoff: Handoff,
    entry: PathBuf,
}

impl StoredCheckpoint {
    /// View for the API.
    pub(in crate::agent) fn view(&self, id: Ulid) -> Handoff {
        let Announced { name, repository, labels, bytes } = &self.what;
        Handoff {
            id: id.to_string(),
            from: self.from.to_string(),
            since: self.since.clone(),
            name: name.to_string(),
            repository: repository.to_string(),
            labels: labels.clone(),
            bytes: *bytes,
            aside: self.aside.clone(),
        }
    }

    /// Writes the record into the folder of the checkpoint, replacing an earlier one.
    pub(super) fn write(&self, id: Ulid, folder: &Path) -> Result<()> {
        let record = Record { handoff: self.view(id), entry: self.entry.clone() };
        let record =
            serde_json::to_vec(&record).map_err(|source| Error::other("handoff record is not JSON").source(source))?;
        replace(&folder.join(RECORD), &record)
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(RECORD);
        let record = fs::read(&path).map_err(|error| Error::io("cannot read a handoff record", &path, error))?;
        let malformed = || Error::damaged("handoff record is malformed").at(path.display());
        let Record { handoff, entry } = serde_json::from_slice(&record).map_err(|source| malformed().source(source))?;
        let repository = handoff.repository.parse().map_err(|source| malformed().source(source))?;
        if entry.components().count() != 1 || !matches!(entry.components().next(), Some(Component::Normal(_))) {
            return Err(malformed().expected("an entry of one plain name").got(entry.display()));
        }
        let what = Announced { name: handoff.name.parse()?, repository, labels: handoff.labels, bytes: handoff.bytes };
        Ok(Self { from: handoff.from.parse()?, since: handoff.since, what, entry, aside: handoff.aside })
    }
}

/// Writes the sender's modes into the folder of the checkpoint.
pub(super) fn write_modes(modes: &Modes, folder: &Path) -> Result<()> {
    replace(&folder.join(MODES), &encode_modes(modes))
}

/// The sender's modes; none for a checkpoint of an earlier version, which has them on its files. Blocking.
///
/// # Errors
/// Damaged, or the file system's.
pub(in crate::agent) fn read_modes(folder: &Path) -> Result<Modes> {
    let path = folder.join(MODES);
    match fs::read(&path) {
        Ok(bytes) => decode_modes(&bytes).map_err(|error| error.at(path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Modes::new()),
        Err(error) => Err(Error::io("cannot read the modes of a checkpoint", &path, error)),
    }
}

/// A save that has begun. Dropping it ends it; it stays in the folder of the checkpoint if the process ends before.
#[derive(Debug)]
pub(super) struct BegunSave {
    path: PathBuf,
    unended: u32,
}

impl BegunSave {
    /// Counts a save of the checkpoint in `folder`. Blocking.
    pub(super) fn begin(folder: &Path) -> Result<Self> {
        let path = folder.join(BEGUN);
        let unended = match fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().unwrap_or(0),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(Error::io("cannot read the saves of a checkpoint", &path, error)),
        };
        replace(&path, format!("{}\n", u32::saturating_add(unended, 1)).as_bytes())?;
        Ok(Self { path, unended })
    }

    /// Saves that began before it and did not end.
    pub(super) fn unended(&self) -> u32 {
        self.unended
    }
}

impl Drop for BegunSave {
    fn drop(&mut self) {
        // It is gone with its folder, once the checkpoint is saved.
        let _ = fs::remove_file(&self.path);
    }
}

/// Replaces a file atomically. The new one survives a power loss once its folder is synced.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    let write = || {
        let mut file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(|error| Error::io("cannot store a handed-off checkpoint", path, error))
}

/// Names to try, in order, for a checkpoint that `from` sent as `name`: that name, one of the agent's own, and a unique one.
/// No name is ever replaced.
///
/// # Errors
/// Usage, if `name` is no step of a run, or so long that the others are not valid.
pub(in crate::agent) fn names(name: &Name, from: &Identity, id: Ulid) -> Result<[Name; 3]> {
    let canonical = |(run, number): (Name, u64)| format!("{run}/step-{number}") == name.to_string();
    if !name.step().is_some_and(canonical) {
        return Err(Error::usage("only steps of a run can be handed off")
            .expected("RUN/step-N, N without leading zeros")
            .got(name)
            .help("save it instead"));
    }
    let own = format!("handoff/{}", from.path());
    Ok([name.clone(), format!("{own}/{name}").parse()?, format!("{own}/{id}/{name}").parse()?])
}
