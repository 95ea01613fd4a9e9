//! The command line's own audit log, where `TOWLINE_AUDIT` names a folder: an entry before a command touches a name, one at its end.

use super::verbs::Context;
use crate::audit::{Action, CommandLog, Recorded};
use crate::error::Result;
use crate::repository::Repository;

/// The log in `folder`, whose heads the agent of this node publishes, or this machine's certificate signs.
#[cfg(feature = "agent")]
fn log(folder: std::path::PathBuf) -> CommandLog {
    crate::agent::command_log(folder)
}

/// The log in `folder`: nobody signs its heads.
#[cfg(not(feature = "agent"))]
fn log(folder: std::path::PathBuf) -> CommandLog {
    CommandLog::new(folder, format!("uid {}", rustix::process::getuid().as_raw()))
}

impl Context {
    /// Records that `action` on `names` of `repository` goes on, if there is a log; `to` is where bytes go.
    ///
    /// # Errors
    /// If it cannot be recorded: then nothing may be done.
    ///
    /// # Cancel safety
    /// It may be recorded or not.
    pub(super) async fn record(
        &self,
        action: Action,
        names: &[String],
        repository: &Repository,
        to: Option<String>,
    ) -> Result<Recorded> {
        match self.settings.audit.clone() {
            Some(folder) => log(folder).record(repository, action, names, to).await,
            None => Ok(Recorded::default()),
        }
    }

    /// Records that the policy of `repository` is being replaced, if there is a log.
    ///
    /// # Errors
    /// If it cannot be recorded: then nothing may be done.
    ///
    /// # Cancel safety
    /// It may be recorded or not.
    #[cfg(feature = "agent")]
    pub(super) async fn record_policy(&self, repository: &Repository) -> Result<Recorded> {
        match self.settings.audit.clone() {
            Some(folder) => log(folder).record_policy(repository).await,
            None => Ok(Recorded::default()),
        }
    }
}
