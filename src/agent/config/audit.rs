//! Section `[audit]`: the audit log.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result};

/// The audit log of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditConfig {
    /// Its folder.
    pub dir: PathBuf,
    /// True if its head is published in the repository.
    pub publish: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AuditSection {
    dir: PathBuf,
    publish: Option<bool>,
}

impl AuditSection {
    /// Resolves relative paths from `folder`.
    ///
    /// # Errors
    /// Usage, if the head is to be published and there is no key to sign it.
    pub(super) fn settle(self, folder: &Path, has_identity: bool) -> Result<AuditConfig> {
        if self.publish == Some(true) && !has_identity {
            return Err(Error::usage("[audit] publish is set, but no identity: the head cannot be signed")
                .help("create one: towline identity issue SITE/AGENT --to DIR; then set `identity` to DIR"));
        }
        Ok(AuditConfig { dir: folder.join(self.dir), publish: self.publish.unwrap_or(has_identity) })
    }
}
