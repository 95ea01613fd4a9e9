//! `towline.toml`: where it is looked for, and what it may say.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Environment;
use crate::error::{Error, ErrorKind, Result};
use crate::size;
use crate::tree::read_own_file;

/// The file's name, in the working directory or above it, or in the user's configuration folder.
pub(super) const FILE: &str = "towline.toml";
/// No honest settings file is longer.
const FILE_LEN_MAX: u64 = 64 << 10;

/// The keys of `towline.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cli) struct File {
    /// The repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::cli) repository: Option<String>,
    /// Memory budget in bytes.
    #[serde(default, deserialize_with = "memory", skip_serializing_if = "Option::is_none")]
    pub(in crate::cli) memory: Option<u64>,
    /// The S3 endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::cli) endpoint: Option<String>,
    /// Allow plain http beyond this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::cli) allow_http: Option<bool>,
}

/// A settings file that was read.
#[derive(Debug)]
pub(super) struct SettingsFile {
    /// Its path.
    pub(super) path: PathBuf,
    /// True for the file in the user's own configuration folder.
    pub(super) own: bool,
    pub(super) text: String,
    pub(super) file: File,
}

impl SettingsFile {
    /// The settings files that count, the nearest first: upwards from the working directory, then the user's own. The last is the
    /// first that says where data goes, so a file without a word about that hides no other.
    ///
    /// # Errors
    /// Denied, if others than the user and root may write one; usage, for a malformed file; the file system's.
    pub(super) fn nearest(around: Environment<'_>) -> Result<Vec<Self>> {
        let own = around.config_folder();
        let above = around.folder.ancestors().filter(|folder| own.as_deref() != Some(folder));
        let mut files = Vec::new();
        for (folder, is_own) in above.map(|folder| (folder, false)).chain(own.as_deref().map(|folder| (folder, true))) {
            let Some(found) = Self::read(folder.join(FILE), is_own)? else { continue };
            let decides = found.file.repository.is_some() || found.file.endpoint.is_some();
            files.push(found);
            if decides {
                break;
            }
        }
        Ok(files)
    }

    /// The file at `path`, if there is one.
    ///
    /// # Errors
    /// As [`SettingsFile::nearest`].
    pub(super) fn read(path: PathBuf, own: bool) -> Result<Option<Self>> {
        let text = match read_own_file(&path, FILE_LEN_MAX) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read?,
        };
        let file = File::parse(&text, &path)?;
        Ok(Some(Self { path, own, text, file }))
    }

    /// Its settings; a relative `repository` counts from the folder where the file is.
    pub(super) fn settings(&self) -> File {
        let mut file = self.file.clone();
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        if let Some(path) = file.repository.as_mut().filter(|address| !address.contains("://")) {
            *path = folder.join(&path).to_string_lossy().into_owned();
        }
        file
    }
}

impl File {
    fn parse(text: &str, path: &Path) -> Result<Self> {
        toml::from_str(text).map_err(|source| {
            Error::usage("settings file is malformed")
                .at(path.display())
                .help("its keys are repository, memory, endpoint and allow_http")
                .source(source)
        })
    }

    /// Each setting as it could stand in a file.
    pub(in crate::cli) fn lines(&self) -> Vec<String> {
        let text = |key: &str, value: &Option<String>| value.as_ref().map(|value| format!("{key} = {value:?}"));
        let settings = [
            text("repository", &self.repository),
            text("endpoint", &self.endpoint),
            self.memory.map(|bytes| format!("memory = {bytes}")),
            self.allow_http.map(|allow| format!("allow_http = {allow}")),
        ];
        settings.into_iter().flatten().collect()
    }
}

fn memory<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    size::deserialize(value).map(Some)
}
