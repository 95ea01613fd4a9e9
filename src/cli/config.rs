//! Which repository, and how: flags, then the environment, then `towline.toml`, then the embedded default.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, ErrorKind, Result};
use crate::size;
use crate::storage::{Location, StoreOptions};

/// The file's name, in the working directory or above it, or in the user's configuration folder.
const FILE: &str = "towline.toml";
/// No honest settings file is longer.
const FILE_LEN_MAX: u64 = 64 << 10;
/// What the S3 client itself reads; both go before the file
/// (<https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html>).
const ENDPOINT_VARIABLES: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];

/// What the process was started in.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    /// The working directory.
    pub(super) folder: &'a Path,
    /// Looks up an environment variable.
    pub(super) variable: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Surroundings<'_> {
    /// A variable that is set to something; empty counts as not set.
    fn text(&self, name: &str) -> Result<Option<String>> {
        match (self.variable)(name).filter(|value| !value.is_empty()).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(_)) => Err(Error::usage("environment variable is not UTF-8").at(name)),
        }
    }

    /// A folder of the XDG base directory specification: the variable if it is absolute, else below the home folder
    /// (<https://specifications.freedesktop.org/basedir/latest/>).
    fn xdg(&self, name: &str, below_home: &str) -> Option<PathBuf> {
        let absolute = |value: OsString| Some(PathBuf::from(value)).filter(|path| path.is_absolute());
        (self.variable)(name)
            .and_then(absolute)
            .or_else(|| Some((self.variable)("HOME").and_then(absolute)?.join(below_home)))
    }
}

/// What the command line said.
#[derive(Clone, Debug, Default)]
pub(super) struct Flags {
    /// `--repo`.
    pub(super) repository: Option<String>,
    /// `--endpoint`.
    pub(super) endpoint: Option<String>,
    /// `--allow-http`.
    pub(super) allow_http: bool,
    /// `--memory`, in bytes.
    pub(super) memory: Option<u64>,
}

/// The repository that a command works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chosen {
    /// Somebody named it: it must be there.
    Named(Location),
    /// Nobody did: this directory, made on first use.
    Embedded(Location),
}

/// The settings of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    repository: Option<String>,
    embedded: Option<PathBuf>,
    authority: Option<PathBuf>,
    /// Memory budget in bytes, if one was asked for.
    pub(super) memory: Option<u64>,
    endpoint: Option<String>,
    allow_http: bool,
}

impl Settings {
    /// Puts flags, environment and settings file together.
    ///
    /// # Errors
    /// Usage, for a malformed file or variable; as the file system says, for a file that cannot be read.
    pub(super) fn resolve(flags: Flags, around: Surroundings<'_>) -> Result<Self> {
        let file = File::find(around)?.unwrap_or_default();
        let mut endpoint_set = false;
        for name in ENDPOINT_VARIABLES {
            endpoint_set |= around.text(name)?.is_some();
        }
        let repository = match flags.repository {
            Some(repository) => Some(repository),
            None => around.text("TOWLINE_REPO")?.or(file.repository),
        };
        Ok(Self {
            repository,
            embedded: around.xdg("XDG_DATA_HOME", ".local/share").map(|data| data.join("towline/repository")),
            authority: around.xdg("XDG_CONFIG_HOME", ".config").map(|config| config.join("towline/authority")),
            memory: flags.memory.or(file.memory),
            endpoint: flags.endpoint.or(file.endpoint.filter(|_| !endpoint_set)),
            allow_http: flags.allow_http || file.allow_http,
        })
    }

    /// The repository to work on.
    ///
    /// # Errors
    /// Usage, for a malformed address, or where nothing names a repository and there is no home folder.
    pub(super) fn repository(&self) -> Result<Chosen> {
        if let Some(named) = &self.repository {
            return Ok(Chosen::Named(named.parse()?));
        }
        let embedded = self.embedded.as_deref().ok_or_else(|| {
            Error::usage("no repository was named, and there is no home folder for the default one")
                .cure("give --repo URL, or set TOWLINE_REPO")
        })?;
        Ok(Chosen::Embedded(Location::directory(embedded)?))
    }

    /// Where the authority lives that signs certificates, unless another place is named.
    ///
    /// # Errors
    /// Usage, where there is no home folder.
    pub(super) fn authority(&self) -> Result<&Path> {
        self.authority
            .as_deref()
            .ok_or_else(|| Error::usage("there is no home folder for the authority").cure("give --authority DIR"))
    }

    /// How stores are opened; `create`: make the directory or bucket if it is lacking.
    pub(super) fn store(&self, create: bool) -> StoreOptions {
        StoreOptions { endpoint: self.endpoint.clone(), allow_http: self.allow_http, create, ..StoreOptions::default() }
    }
}

/// What `towline.toml` may say.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    repository: Option<String>,
    #[serde(default, deserialize_with = "memory")]
    memory: Option<u64>,
    endpoint: Option<String>,
    #[serde(default)]
    allow_http: bool,
}

impl File {
    /// The nearest settings file: upwards from the working directory, then the user's own.
    fn find(around: Surroundings<'_>) -> Result<Option<Self>> {
        let own = around.xdg("XDG_CONFIG_HOME", ".config").map(|folder| folder.join("towline"));
        for folder in around.folder.ancestors().chain(own.as_deref()) {
            if let Some(text) = read(&folder.join(FILE))? {
                return Self::parse(&text, folder).map(Some);
            }
        }
        Ok(None)
    }

    /// Reads the file's `text`; a relative `repository` counts from `folder`, where the file is.
    fn parse(text: &str, folder: &Path) -> Result<Self> {
        let mut file: Self = toml::from_str(text).map_err(|source| {
            Error::usage("settings file is malformed")
                .at(folder.join(FILE).display())
                .cure("its keys are repository, memory, endpoint and allow_http")
                .source(source)
        })?;
        if let Some(path) = file.repository.as_mut().filter(|address| !address.contains("://")) {
            *path = folder.join(&path).to_string_lossy().into_owned();
        }
        Ok(file)
    }
}

/// The text of the file at `path`, if there is one.
fn read(path: &Path) -> Result<Option<String>> {
    let mut text = String::new();
    let opened = std::fs::File::open(path).and_then(|file| file.take(FILE_LEN_MAX + 1).read_to_string(&mut text));
    match opened {
        Ok(len) if len as u64 > FILE_LEN_MAX => Err(Error::usage("settings file is too long")
            .at(path.display())
            .expected(format!("at most {}", size::show(FILE_LEN_MAX)))),
        Ok(_) => Ok(Some(text)),
        Err(error) => match Error::io("settings file cannot be read", path, error) {
            error if error.kind() == ErrorKind::NotFound => Ok(None),
            error => Err(error),
        },
    }
}

fn memory<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    size::deserialize(value).map(Some)
}
