//! Which repository, and how: flags, then the environment, then `towline.toml`, then the embedded default.

mod file;
#[cfg(test)]
mod tests;
mod trust;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub(super) use self::file::File;
use self::file::SettingsFile;
pub(super) use self::trust::{Recorded, Trusted};
use crate::budget::Budget;
use crate::error::{Error, ErrorKind, Result};
use crate::storage::{Location, StoreOptions};

/// Environment variables that the S3 client reads; both override the file
/// (<https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html>).
const ENDPOINT_VARIABLES: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];

/// Environment and working folder of the process.
#[derive(Clone, Copy)]
pub(super) struct Environment<'a> {
    /// The working directory.
    pub(super) folder: &'a Path,
    /// Looks up an environment variable.
    pub(super) variable: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Environment<'_> {
    /// A variable that is set to something; empty counts as not set.
    fn text(&self, name: &str) -> Result<Option<String>> {
        match (self.variable)(name).filter(|value| !value.is_empty()).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(_)) => Err(Error::usage("environment variable is not UTF-8").at(name)),
        }
    }

    /// A variable that is `1` or `true`, or not set to something; `0` and `false` are no.
    fn flag(&self, name: &str) -> Result<bool> {
        match self.text(name)?.as_deref() {
            None | Some("0" | "false") => Ok(false),
            Some("1" | "true") => Ok(true),
            Some(other) => {
                Err(Error::usage("environment variable is neither yes nor no").at(name).expected("1 or 0").got(other))
            }
        }
    }

    /// The folder of the user's own configuration.
    fn config_folder(&self) -> Option<PathBuf> {
        self.xdg("XDG_CONFIG_HOME", ".config").map(|folder| folder.join("towline"))
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

/// Global flags of the command line.
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
    /// Repositories that the arguments of the command name, in place of `repository`.
    pub(super) places: Vec<String>,
}

impl Flags {
    /// The repositories that flags, variables and arguments name; none, if a settings file or the default decides.
    fn named<'a>(&'a self, repository: Option<&'a String>) -> Option<Named> {
        let places: Vec<&String> =
            if self.places.is_empty() { repository.into_iter().collect() } else { self.places.iter().collect() };
        if places.is_empty() {
            return None;
        }
        let are_directories = places.iter().all(|place| matches!(place.parse(), Ok(Location::Directory(_))));
        Some(if are_directories { Named::Directories } else { Named::Stores })
    }
}

/// Repositories that flags, variables and arguments name, rather than a settings file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    /// All are directories: no endpoint is used.
    Directories,
    /// Some are not.
    Stores,
}

/// The repository that a command works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Named by the user: it must exist.
    Named(Location),
    /// The default: this directory, created on first use.
    Embedded(Location),
}

/// The settings of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    repository: Option<String>,
    embedded: Option<PathBuf>,
    authority: Option<PathBuf>,
    trusted: Option<Trusted>,
    named: Option<Named>,
    /// Folder of the command line's own audit log, if it has one.
    pub(super) audit: Option<PathBuf>,
    /// Memory budget in bytes, if one was asked for.
    pub(super) memory: Option<u64>,
    endpoint: Option<String>,
    allow_http: bool,
}

impl Settings {
    /// Puts flags, environment and settings file together.
    ///
    /// # Errors
    /// Usage, for a malformed file or variable, and for a file that would decide where data goes and is not trusted, unless flags,
    /// variables and arguments decide that; denied, for a file that others may write; as the file system says, for a file that
    /// cannot be read.
    pub(super) fn resolve(flags: Flags, around: Environment<'_>) -> Result<Self> {
        let mut settings = Self::without_file(flags, around)?;
        let found = match SettingsFile::nearest(around) {
            // A stranger's file must not keep a user from working who names the repository.
            Err(error) if error.kind() == ErrorKind::Denied && settings.named.is_some() => {
                tracing::warn!("settings file is not used: {error}");
                Vec::new()
            }
            found => found?,
        };
        for file in &found {
            settings.take(file, around)?;
        }
        Ok(settings)
    }

    /// Settings from flags and environment alone.
    ///
    /// # Errors
    /// Usage, for a malformed variable.
    pub(super) fn without_file(flags: Flags, around: Environment<'_>) -> Result<Self> {
        let repository = match flags.repository.clone() {
            Some(repository) => Some(repository),
            None => around.text("TOWLINE_REPO")?,
        };
        let named = flags.named(repository.as_ref());
        let config = around.config_folder();
        Ok(Self {
            repository,
            embedded: around.xdg("XDG_DATA_HOME", ".local/share").map(|data| data.join("towline/repository")),
            authority: config.as_ref().map(|config| config.join("authority")),
            trusted: config.as_deref().map(Trusted::below),
            named,
            audit: around.text("TOWLINE_AUDIT")?.map(PathBuf::from),
            memory: flags.memory,
            endpoint: flags.endpoint,
            allow_http: flags.allow_http || around.flag("TOWLINE_ALLOW_HTTP")?,
        })
    }

    /// Takes from a settings file what is not set yet.
    fn take(&mut self, found: &SettingsFile, around: Environment<'_>) -> Result<()> {
        let mut endpoint_set = self.endpoint.is_some();
        for name in ENDPOINT_VARIABLES {
            endpoint_set |= around.text(name)?.is_some();
        }
        let needs_endpoint = self.named != Some(Named::Directories);
        let effective = |file: File| File {
            repository: file.repository.filter(|_| self.repository.is_none() && self.named.is_none()),
            endpoint: file.endpoint.filter(|_| needs_endpoint && !endpoint_set),
            memory: file.memory.filter(|_| self.memory.is_none()),
            allow_http: file.allow_http.filter(|allow| needs_endpoint && *allow && !self.allow_http),
        };
        if !found.own {
            self.check_trust(found, &effective(found.file.clone()))?;
        }
        let mut file = effective(found.settings());
        if file.memory.is_some_and(|memory| memory > Budget::default_bytes()) && !found.own && !self.trusts(found)? {
            tracing::warn!(
                "memory in {} is not used: it is more than the default, and the file is not trusted; --memory sets it, or {}",
                found.path.display(),
                trust::command(&found.path)
            );
            file.memory = None;
        }
        self.repository = self.repository.take().or(file.repository);
        self.endpoint = self.endpoint.take().or(file.endpoint);
        self.memory = self.memory.or(file.memory);
        self.allow_http |= file.allow_http.is_some();
        Ok(())
    }

    /// Refuses a file that was found in or above the working directory, if what it would decide is not the user's will.
    fn check_trust(&self, found: &SettingsFile, effective: &File) -> Result<()> {
        if effective.allow_http.is_some() {
            return Err(Error::usage("settings file of a folder may not set `allow_http`")
                .at(found.path.display())
                .help("remove it there; use --allow-http, TOWLINE_ALLOW_HTTP=1 or ~/.config/towline/towline.toml"));
        }
        let decides = effective.repository.is_some() || effective.endpoint.is_some();
        if !decides || self.trusts(found)? {
            return Ok(());
        }
        let command = trust::command(&found.path);
        Err(Error::usage("settings file is not trusted, or has changed since")
            .at(found.path.display())
            .got(effective.lines().join(", "))
            .help(format!("if that is what you want: {command}; else give --repo and --endpoint, or set TOWLINE_REPO")))
    }

    /// Whether the user recorded what the file holds.
    fn trusts(&self, found: &SettingsFile) -> Result<bool> {
        match &self.trusted {
            Some(trusted) => trusted.holds(found),
            None => Ok(false),
        }
    }

    /// The repository to work on.
    ///
    /// # Errors
    /// Usage, for a malformed address, or where nothing names a repository and there is no home folder.
    pub(super) fn repository(&self) -> Result<Route> {
        if let Some(named) = &self.repository {
            return Ok(Route::Named(named.parse()?));
        }
        let embedded = self.embedded.as_deref().ok_or_else(|| {
            Error::usage("no repository was named, and there is no home folder for the default one")
                .help("give --repo URL, or set TOWLINE_REPO")
        })?;
        Ok(Route::Embedded(Location::directory(embedded)?))
    }

    /// Default folder of the certificate authority.
    ///
    /// # Errors
    /// Usage, where there is no home folder.
    #[cfg(feature = "agent")]
    pub(super) fn authority(&self) -> Result<&Path> {
        self.authority
            .as_deref()
            .ok_or_else(|| Error::usage("there is no home folder for the authority").help("give --authority DIR"))
    }

    /// The settings files that the user trusts.
    ///
    /// # Errors
    /// Usage, where there is no home folder.
    pub(super) fn trusted(&self) -> Result<&Trusted> {
        let lacking = || Error::usage("there is no home folder for the record").help("set HOME or XDG_CONFIG_HOME");
        self.trusted.as_ref().ok_or_else(lacking)
    }

    /// Options to open stores; `create` makes a missing directory or bucket.
    pub(super) fn store(&self, create: bool) -> StoreOptions {
        StoreOptions { endpoint: self.endpoint.clone(), allow_http: self.allow_http, create, ..StoreOptions::default() }
    }
}
