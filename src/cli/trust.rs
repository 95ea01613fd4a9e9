//! `towline config`: which settings files the user trusts.

use std::path::PathBuf;

use serde::Serialize;

use super::args::ConfigVerb;
use super::config::{File, Recorded};
use super::output::printable;
use super::verbs::Context;
use crate::error::Result;

/// A record that was made or removed.
#[derive(Serialize)]
struct TrustReport {
    path: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sets: Option<File>,
}

impl Context {
    pub(super) fn config(&self, what: &ConfigVerb) -> Result<()> {
        let trusted = self.settings.trusted()?;
        match what {
            ConfigVerb::Trust { path } => {
                let Recorded { path, digest, file } = trusted.add(path)?;
                let report = TrustReport { path, digest: Some(digest), sets: Some(file.clone()) };
                self.output.report(&report, |report, _| {
                    let path = printable(&report.path.to_string_lossy());
                    let mut lines = vec![format!("trusted as it is now: {path}\n")];
                    lines.extend(file.lines().iter().map(|line| format!("  {}\n", printable(line))));
                    lines.concat()
                })?;
                if file.allow_http == Some(true) {
                    self.output.remark(
                        "commands refuse it until `allow_http` is removed: use --allow-http or TOWLINE_ALLOW_HTTP=1",
                    );
                }
                Ok(())
            }
            ConfigVerb::Untrust { path } => {
                let report = TrustReport { path: trusted.remove(path)?, digest: None, sets: None };
                self.output.report(&report, |report, _| {
                    format!("trusted no more: {}\n", printable(&report.path.to_string_lossy()))
                })
            }
        }
    }
}
