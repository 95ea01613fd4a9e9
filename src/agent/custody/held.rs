//! Records of the checkpoints that are kept for other agents: in memory, and in files beside the checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use ulid::Ulid;

use super::parcel::{Modes, decode_modes, encode_modes};
use crate::agent::view::{Aside, Kept};
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::repository::Name;
use crate::transfer::identity::Identity;

const TOLD: &str = "told.json";
const MODES: &str = "modes";

/// A checkpoint that another agent has announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Announced {
    /// The name to save it as.
    pub(in crate::agent) name: Name,
    /// The repository to save it in.
    pub(in crate::agent) repository: RepositoryId,
    /// Labels that it is to have.
    pub(in crate::agent) labels: BTreeMap<String, String>,
    /// Its size in bytes.
    pub(in crate::agent) bytes: u64,
}

/// A checkpoint that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::agent) struct Held {
    /// The agent that handed it over.
    pub(in crate::agent) from: Identity,
    /// Time of its arrival, RFC 3339.
    pub(super) since: String,
    pub(in crate::agent) what: Announced,
    /// Its file name or folder name.
    pub(super) entry: PathBuf,
    /// The failure for which it was set aside, if it was.
    pub(super) aside: Option<Aside>,
}

/// The JSON form of [`Held`].
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    #[serde(flatten)]
    kept: Kept,
    entry: PathBuf,
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
            aside: self.aside.clone(),
        }
    }

    /// Writes it into the folder of the checkpoint, in the place of what was there.
    pub(super) fn write(&self, id: Ulid, folder: &Path) -> Result<()> {
        let told = Told { kept: self.told(id), entry: self.entry.clone() };
        let told =
            serde_json::to_vec(&told).map_err(|source| Error::other("what is kept is not JSON").source(source))?;
        replace(&folder.join(TOLD), &told)
    }

    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(TOLD);
        let told = fs::read(&path).map_err(|error| Error::io("cannot read whose it is", &path, error))?;
        let malformed = || Error::damaged("file is malformed").at(path.display());
        let Told { kept, entry } = serde_json::from_slice(&told).map_err(|source| malformed().source(source))?;
        let repository = kept.repository.parse().map_err(|source| malformed().source(source))?;
        let what = Announced { name: kept.name.parse()?, repository, labels: kept.labels, bytes: kept.bytes };
        Ok(Self { from: kept.from.parse()?, since: kept.since, what, entry, aside: kept.aside })
    }
}

/// Writes the giver's modes into the folder of the checkpoint.
pub(super) fn write_modes(modes: &Modes, folder: &Path) -> Result<()> {
    replace(&folder.join(MODES), &encode_modes(modes))
}

/// The giver's modes; none for a checkpoint of an earlier version, which has them on its files. Blocking.
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

/// Writes a file that survives a power loss once its folder is synced; it is there as it was, or as it is now.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    let write = || {
        let mut file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(|error| Error::io("cannot keep what was given into custody", path, error))
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
            .help("save it instead"));
    }
    let own = format!("custody/{}", from.path());
    Ok([name.clone(), format!("{own}/{name}").parse()?, format!("{own}/{id}/{name}").parse()?])
}
