//! Doctor: what a store really does, and what around it would hurt.

mod bucket;
mod directory;
mod machine;
mod rates;
mod rights;
mod store;

use serde::Serialize;

use self::rights::Rights;
use crate::error::{Error, ErrorKind, Result};
use crate::progress::Progress;
use crate::storage::{Location, RIGHTS_HELP, Store, StoreOptions, connect};
use crate::work::blocking;

/// Outcome of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// No problem.
    Ok,
    /// Works, but costs something; or it could not be looked at.
    Warn,
    /// Loses data, or keeps Towline from working.
    Bad,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Subject: `create if absent`, `versioning`, `open files`, ...
    pub what: String,
    /// Outcome.
    pub outcome: Outcome,
    /// Observation.
    pub detail: String,
    /// Help, where there is something to do.
    pub help: Option<String>,
}

/// Everything that was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// Checks in display order.
    pub checks: Vec<Check>,
}

impl Check {
    fn new(what: &str, outcome: Outcome, detail: impl Into<String>) -> Self {
        Self { what: what.to_owned(), outcome, detail: detail.into(), help: None }
    }

    fn ok(what: &str, detail: impl Into<String>) -> Self {
        Self::new(what, Outcome::Ok, detail)
    }

    fn warn(what: &str, detail: impl Into<String>) -> Self {
        Self::new(what, Outcome::Warn, detail)
    }

    fn bad(what: &str, detail: impl Into<String>) -> Self {
        Self::new(what, Outcome::Bad, detail)
    }

    fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// A check that failed by `error`.
    fn failed(what: &str, outcome: Outcome, error: &Error) -> Self {
        let check = Self::new(what, outcome, chain(error));
        match error.help_text() {
            Some(help) => check.help(help),
            None => check,
        }
    }

    /// A question that was not answered says nothing about what was asked.
    fn unanswered(what: &str, error: &Error) -> Self {
        Self::failed(what, Outcome::Warn, error)
    }
}

/// Looks at the store at `location`, at what surrounds it, and at this machine. It writes some 40 MiB of small objects
/// under `probe/`, and removes them; one empty object where the credentials may not delete.
///
/// Checks what it may; what is denied is reported as a check of its own. `tell` gets each check when it has ended, also those before an
/// error.
///
/// # Errors
/// Unreachable, if the store does not answer; not found, if the directory or bucket is not there.
///
/// # Cancel safety
/// Not safe: objects under `probe/` stay; nothing else is changed.
pub async fn doctor(
    location: &Location,
    options: &StoreOptions,
    progress: &Progress,
    tell: impl FnMut(Check),
) -> Result<()> {
    examine(&connect(location, options).await?, progress, tell).await
}

/// As [`doctor`], for a store that is open; all checks at the end.
///
/// # Errors
/// As [`doctor`].
///
/// # Cancel safety
/// As [`doctor`].
pub async fn diagnose(store: &Store, progress: &Progress) -> Result<Diagnosis> {
    let mut diagnosis = Diagnosis::default();
    examine(store, progress, |check| diagnosis.checks.push(check)).await?;
    Ok(diagnosis)
}

async fn examine(store: &Store, progress: &Progress, mut tell: impl FnMut(Check)) -> Result<()> {
    let mut usable = true;
    if let Some(bucket) = store.bucket() {
        let checks = bucket::address(bucket).await;
        usable = checks.iter().all(|check| check.outcome != Outcome::Bad);
        checks.into_iter().for_each(&mut tell);
        if usable {
            let access = access(bucket.check().await)?;
            usable = access.outcome != Outcome::Bad;
            tell(access);
        }
    }
    if usable {
        progress.phase("looking for a repository", 0);
        let absence = rights::absence(store).await?;
        let may_read = absence.outcome != Outcome::Bad;
        tell(absence);
        tell(store::repository(store).await?);
        progress.phase("trying rights", 0);
        let rights = rights::rights(store).await?;
        tell(rights.check(may_read));
        // Without the right to delete, a probe would leave its objects.
        if rights == Rights::Delete {
            progress.phase("trying what the store does", 0);
            store::abilities(store).await?.into_iter().for_each(&mut tell);
            rates::rates(store, progress).await.into_iter().for_each(&mut tell);
        }
        if let Some(bucket) = store.bucket() {
            bucket::rules(bucket).await.into_iter().for_each(&mut tell);
        }
        if let Some(directory) = store.directory() {
            let directory = directory.to_owned();
            let checks = blocking(move || Ok(directory::directory(&directory))).await?;
            checks.into_iter().for_each(&mut tell);
        }
    }
    blocking(|| Ok(machine::machine())).await?.into_iter().for_each(tell);
    Ok(())
}

/// The checks of the address say as whom somebody was refused.
fn access(answer: Result<()>) -> Result<Check> {
    match answer {
        Ok(()) => Ok(Check::ok("access", "the bucket can be listed")),
        Err(error) if error.kind() == ErrorKind::Denied => {
            let check = Check::failed("access", Outcome::Bad, &error);
            let lacks_rights = error.help_text() == Some(RIGHTS_HELP);
            let help = "use credentials that may list the bucket: docs/security.md has the policies";
            Ok(if lacks_rights { check.help(help) } else { check })
        }
        Err(error) => Err(error),
    }
}

/// An error and its causes, on one line.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        // Some errors repeat what caused them.
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// `bytes` as text for display.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    format!("{value:.1} {}", UNITS[unit])
}
