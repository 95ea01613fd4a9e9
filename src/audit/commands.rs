//! The log of commands: of the command line, and of programs that use the library. Several processes share one, so it is opened for
//! each entry: one before a name is touched, one at the end.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::task::JoinSet;

use super::entry::{Action, Actor, Decision, EntryKind, Verdict};
use super::head::Head;
use super::journal::Journal;
use super::publish::PUBLISH_EVERY;
use crate::clock::{Clock as _, SystemClock};
use crate::error::Result;
use crate::name::Name;
use crate::policy::{Basis, Ruling};
use crate::repository::{Access, Destination, Repository};
use crate::work::blocking;

/// Time that another process's entry is waited for.
const WAIT: Duration = Duration::from_secs(5);
/// The rule where no policy decides: whoever has the credentials of the store may.
const RULE: &str = "credentials of the store";

/// Publishes heads of the log: this module has no key.
#[async_trait]
pub trait HeadPublisher: fmt::Debug + Send + Sync {
    /// Has `head` signed and put into `repository`, or that of who signs it.
    ///
    /// # Errors
    /// If it is not published: then it is tried again with a later one.
    ///
    /// # Cancel safety
    /// Safe: it may be there or not.
    async fn publish(&self, repository: &Repository, head: &Head) -> Result<()>;
}

/// A log of commands in a folder.
#[derive(Clone, Debug)]
pub struct CommandLog {
    folder: PathBuf,
    user: String,
    publisher: Option<Arc<dyn HeadPublisher>>,
}

/// Entries of a command that has begun; none without a log. While it lasts, their head is published within a minute.
#[derive(Debug, Default)]
pub struct Recorded(Option<Begun>);

#[derive(Debug)]
struct Begun {
    log: CommandLog,
    repository: Repository,
    entries: Vec<u64>,
    /// Publishes the head if the command takes long.
    _publishing: JoinSet<()>,
}

impl CommandLog {
    /// The log in `folder` of commands of `user`.
    #[must_use]
    pub fn new(folder: PathBuf, user: String) -> Self {
        Self { folder, user, publisher: None }
    }

    /// The same, whose heads `publisher` publishes.
    #[must_use]
    pub fn published_by(self, publisher: Arc<dyn HeadPublisher>) -> Self {
        Self { publisher: Some(publisher), ..self }
    }

    /// Records that `action` on `names` of `repository` goes on, and what the policy says of it; `to` is where bytes go. Within a
    /// runtime.
    ///
    /// # Errors
    /// If it cannot be recorded: then nothing may be done.
    ///
    /// # Cancel safety
    /// It may be recorded or not.
    pub async fn record(
        &self,
        repository: &Repository,
        action: Action,
        names: &[String],
        to: Option<String>,
    ) -> Result<Recorded> {
        if names.is_empty() {
            return Ok(Recorded::default());
        }
        // A save is judged later, with the labels that come with it; the others bring no content here.
        let judged = !matches!(action, Action::Save | Action::Label | Action::Declassify);
        let rulings = if judged { rulings(repository, names).await? } else { vec![None; names.len()] };
        let decisions = names.iter().zip(rulings).map(|(name, ruling)| {
            let (verdict, rule) = match ruling {
                Some(ruling) if ruling.allows() => (Verdict::Allow, ruling.basis.to_string()),
                Some(ruling) => (Verdict::Deny, ruling.basis.to_string()),
                None => (Verdict::Allow, RULE.to_owned()),
            };
            Decision { to: to.clone(), verdict, rule, ..self.decision(repository, action, Some(name.clone())) }
        });
        self.begin(repository, decisions.map(EntryKind::Decision).collect()).await
    }

    /// Records that the policy of `repository` is being replaced. Within a runtime.
    ///
    /// # Errors
    /// If it cannot be recorded: then nothing may be done.
    ///
    /// # Cancel safety
    /// It may be recorded or not.
    pub async fn record_policy(&self, repository: &Repository) -> Result<Recorded> {
        let decision = self.decision(repository, Action::Policy, None);
        self.begin(repository, vec![EntryKind::Decision(decision)]).await
    }

    fn decision(&self, repository: &Repository, action: Action, name: Option<String>) -> Decision {
        Decision {
            actor: Actor::User(self.user.clone()),
            action,
            name,
            manifest: None,
            repository: Some(repository.id().to_string()),
            to: None,
            asked: None,
            verdict: Verdict::Allow,
            rule: RULE.to_owned(),
        }
    }

    /// Writes the `entries` of a command that begins.
    async fn begin(&self, repository: &Repository, entries: Vec<EntryKind>) -> Result<Recorded> {
        let (count, log) = (entries.len() as u64, self.clone());
        let (first, head) = blocking(move || log.append(&entries)).await?;
        let mut publishing = JoinSet::new();
        publishing.spawn(publish_in_time(self.clone(), repository.clone(), head));
        let (log, repository) = (self.clone(), repository.clone());
        let entries = (first..first + count).collect();
        Ok(Recorded(Some(Begun { log, repository, entries, _publishing: publishing })))
    }

    /// Publishes `head`. A failure is logged, and tried again with the next one.
    async fn publish(&self, repository: &Repository, head: &Head) -> bool {
        let Some(publisher) = &self.publisher else { return true };
        let published = publisher.publish(repository, head).await;
        if let Err(error) = &published {
            tracing::warn!("head of the audit log is not published: {error}");
        }
        published.is_ok()
    }

    /// Adds entries; gives the number of the first, and the head after them. They would survive a power loss. Blocking.
    fn append(&self, entries: &[EntryKind]) -> Result<(u64, Head)> {
        let mut journal = Journal::open(&self.folder, &self.origin(), SystemClock.now(), WAIT)?;
        let first = journal.append(SystemClock.now(), entries)?;
        journal.sync()?;
        Ok((first, journal.head(SystemClock.now())))
    }

    fn origin(&self) -> String {
        format!("cli:{}", self.user)
    }
}

impl Recorded {
    /// Records what came of it: `bytes` for the first name, since nothing tells them apart; then publishes the head. It is done,
    /// whether that can be recorded.
    ///
    /// # Cancel safety
    /// It may be recorded or not.
    pub async fn end<T>(self, result: Result<T>, bytes: impl FnOnce(&T) -> u64) -> Result<T> {
        let (bytes, outcome) = match &result {
            Ok(done) => (bytes(done), "done".to_owned()),
            Err(error) => (0, format!("{}: {error}", error.kind().word())),
        };
        let ended = blocking(move || Ok(self.end_with(bytes, &outcome))).await;
        if let Ok(Some(ended)) = ended {
            ended.publish().await;
        }
        result
    }

    /// Records the end, with this outcome; gives the head to publish, if there is one. Blocking.
    #[must_use]
    pub fn end_with(self, bytes: u64, outcome: &str) -> Option<EndedCommand> {
        let Begun { log, repository, entries, .. } = self.0?;
        let mut bytes = bytes;
        let end =
            |of| EntryKind::End { of, bytes: std::mem::take(&mut bytes), requests: 1, outcome: outcome.to_owned() };
        let ends: Vec<EntryKind> = entries.into_iter().map(end).collect();
        match log.append(&ends) {
            Ok((_, head)) => Some(EndedCommand { log, repository, head }),
            Err(error) => {
                tracing::error!("end of the command is not in the audit log: {error}");
                None
            }
        }
    }
}

/// Head after the end of a command.
#[derive(Clone, Debug)]
pub struct EndedCommand {
    log: CommandLog,
    repository: Repository,
    head: Head,
}

impl EndedCommand {
    /// Publishes the head; a failure is logged.
    ///
    /// # Cancel safety
    /// Safe: it may be there or not.
    pub async fn publish(&self) {
        self.log.publish(&self.repository, &self.head).await;
    }
}

/// Publishes `head` once a minute has gone, until it is published.
async fn publish_in_time(log: CommandLog, repository: Repository, head: Head) {
    loop {
        tokio::time::sleep(PUBLISH_EVERY).await;
        if log.publish(&repository, &head).await {
            return;
        }
    }
}

/// Rulings of the policy on reading each of `names` here; none where no rule matches.
async fn rulings(repository: &Repository, names: &[String]) -> Result<Vec<Option<Ruling>>> {
    let state = repository.log().latest_or_refresh().await?;
    let mut rulings = Vec::with_capacity(names.len());
    for name in names {
        rulings.push(match name.parse::<Name>() {
            Ok(name) if state.policy.is_some() || !state.labels.is_empty() => {
                let labels = repository.labels_in(&state, &name, state.refs.get(&name).map(|value| &value.manifest));
                let (repository_id, to) = (repository.id(), Destination::Here);
                let access = Access { repository: repository_id, name: &name, labels: &labels, to };
                Some(repository.ruling_on(&state, &access).await?).filter(|ruling| ruling.basis != Basis::NoRule)
            }
            _ => None,
        });
    }
    Ok(rulings)
}
