//! Taking back: what names stood for before they were removed or replaced, and the one commit that brings it back.

use std::collections::BTreeSet;

use serde::Serialize;

use super::names::{Replaced, exists};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::id::PackId;
use crate::name::Name;
use crate::repository::Repository;
use crate::repository::collect::{KEEP_REMOVED, kept_since, store_time};
use crate::repository::log::{Action, RefValue, Removed, RemovedKey, State, StepFacts};

/// Readings of a value that keeps being repacked before giving up.
const ATTEMPTS: usize = 5;

/// Values of one name: the present one, and those that can be taken back.
#[derive(Clone, Debug, Serialize)]
pub struct NameHistory {
    /// The name.
    pub name: Name,
    /// Its value now, if it is there.
    pub present: Option<NameValue>,
    /// Values that it had and that are kept, the latest first.
    pub kept: Vec<RemovedValue>,
}

/// One value.
#[derive(Clone, Debug, Serialize)]
pub struct NameValue {
    /// Its version: the log entry that set it.
    pub version: u64,
    /// Its manifest's id.
    pub manifest: String,
    /// Bytes in all files.
    pub bytes: u64,
    /// Files.
    pub files: u64,
    /// When it was saved, RFC 3339.
    pub saved: String,
    /// Facts of the step.
    #[serde(flatten)]
    pub facts: StepFacts,
}

/// A value that the name has no more.
#[derive(Clone, Debug, Serialize)]
pub struct RemovedValue {
    /// The value.
    #[serde(flatten)]
    pub value: NameValue,
    /// Event that took it.
    pub taken: RemovalEvent,
    /// Until when it can be taken back at least, RFC 3339, if collects keep what is removed for as long as they do unless told
    /// otherwise; none, if the store does not tell times.
    pub until: Option<String>,
}

/// Event that took a value from a name.
#[derive(Clone, Debug, Serialize)]
pub struct RemovalEvent {
    /// The log entry.
    pub entry: u64,
    /// Its time by its writer's clock, RFC 3339.
    pub at: String,
    /// Action of the entry; none, if the log does not tell any more.
    pub by: Option<RemovalCause>,
}

/// How a name lost a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RemovalCause {
    /// The name was removed.
    Removed,
    /// The name got another value.
    Replaced,
}

/// Options of taking back.
#[derive(Clone, Debug, Default)]
pub struct UndeleteOptions {
    /// The version to take back, rather than the latest that is kept.
    pub version: Option<u64>,
    /// Another name to give it.
    pub to: Option<Name>,
    /// Replace what the name stands for now; that is kept in turn.
    pub replace: bool,
}

/// Result of taking back.
#[derive(Clone, Debug, Serialize)]
pub struct UndeleteReport {
    /// The name that has the value now.
    pub name: Name,
    /// The name that had it.
    pub from: Name,
    /// The value as it is now.
    #[serde(flatten)]
    pub value: NameValue,
    /// Version that it had before it was taken.
    pub was: u64,
    /// Value that it replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
}

impl Repository {
    /// Tells what `name` stands for, and what it stood for that can be taken back.
    ///
    /// # Errors
    /// Not found, if it stands for nothing and nothing is kept of it.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn history(&self, name: &Name) -> Result<NameHistory> {
        let state = self.state().await?;
        let present = state.refs.get(name).map(NameValue::of);
        let mut kept = Vec::new();
        for (_, removed) in state.removed_of(name).rev() {
            let since = kept_since(self, removed.at).await?;
            let by = self.taken_by(&state, name, removed.at).await?;
            kept.push(RemovedValue {
                value: NameValue::of(&removed.value),
                taken: RemovalEvent { entry: removed.at, at: removed.when.to_string(), by },
                until: since.map(|since| since.after(KEEP_REMOVED).to_string()),
            });
        }
        if present.is_none() && kept.is_empty() {
            return Err(self.nothing_kept(&state, name).await);
        }
        Ok(NameHistory { name: name.clone(), present, kept })
    }

    /// Effect of entry `at` on `name`.
    async fn taken_by(&self, state: &State, name: &Name, at: u64) -> Result<Option<RemovalCause>> {
        if state.version(name) == Some(at) || state.removed_of(name).any(|(version, _)| version == at) {
            return Ok(Some(RemovalCause::Replaced));
        }
        // The value after it may be gone without a trace in the state.
        let entry = self.log().past_entry(at).await?;
        let by = |action: &Action| match action {
            Action::SetRef { name: set, .. } if set == name => Some(RemovalCause::Replaced),
            Action::RemoveRef { name: gone, .. } if gone == name => Some(RemovalCause::Removed),
            _ => None,
        };
        Ok(entry.and_then(|entry| entry.actions.iter().find_map(by)))
    }

    /// Gives a name back what it stood for, in one commit: the latest value that is kept of it, unless the options say otherwise.
    /// It passes the check of every commit that makes a tree reachable: all packs that it needs are there and sound.
    ///
    /// # Errors
    /// Not found, if nothing is kept of the name, or a pack that it needs is gone; damaged, if one is known to be damaged;
    /// conflict, if the name is there and must not be replaced, or somebody else was faster.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn undelete(&self, name: &Name, options: &UndeleteOptions) -> Result<UndeleteReport> {
        for _ in 0..ATTEMPTS {
            let state = self.state().await?;
            let Some((key, removed)) = wanted(&state, name, options.version) else {
                return Err(self.nothing_kept(&state, name).await);
            };
            let saved = match self.saved_as(name, &removed.value).await {
                Ok(saved) => saved,
                // Repacked between the two readings, or forgotten: the state tells.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let now = self.state().await?;
                    if now.removed.get(&key) == Some(&removed) {
                        let what = format!("what was kept of {name} cannot be taken back: its manifest or map is gone");
                        return Err(Error::not_found(what).source(error));
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let Some(to) = &options.to {
                self.hand_on(name, Some(&removed.value.manifest), to).await?;
            }
            let packs = saved.map.packs.iter().map(|pack| pack.id).collect();
            let taking = Taking { key: &key, removed: &removed, packs, known: state.seq, options };
            if let Some(report) = self.take_back(&taking).await? {
                return Ok(report);
            }
        }
        Err(Error::conflict("what is kept moves faster than it can be taken back").at(name).help("try again"))
    }

    /// Commits it; none if it has to be read again.
    async fn take_back(&self, taking: &Taking<'_>) -> Result<Option<UndeleteReport>> {
        let (name, to) = (&taking.key.0, taking.to());
        let mut outcome = Outcome::Again;
        let mut replaced = None;
        let commit = self.log().commit(None, |state| {
            let (decided, actions) = taking.decide(state)?;
            outcome = decided;
            replaced = state.refs.get(to).map(|old| Replaced::of(old, &taking.removed.value));
            Ok(actions)
        });
        let committed = commit.await?;
        let (Some(version), Outcome::Done) = (committed.entry, &outcome) else {
            return match outcome {
                Outcome::Lost(packs) => Err(self.lost(&committed.state, name, &packs).await),
                _ => Ok(None),
            };
        };
        let value = NameValue { version, ..NameValue::of(&taking.removed.value) };
        Ok(Some(UndeleteReport { name: to.clone(), from: name.clone(), value, was: taking.key.1, replaced }))
    }

    /// The error about a kept value that needs packs which cannot be relied on.
    async fn lost(&self, state: &State, name: &Name, packs: &[PackId]) -> Error {
        let what = format!("what was kept of {name} cannot be taken back");
        let Some(pack) = packs.first() else { return Error::conflict(what).help("run the command again") };
        let others = packs.len() - 1;
        let others = if others == 0 { String::new() } else { format!(", and {others} more packs like it") };
        if let Some(condemned) = state.condemned.get(pack) {
            let when = self.told(condemned.at, Some(condemned.when)).await;
            return Error::damaged(what)
                .got(format!(
                    "pack {pack}, which holds chunks of it, was condemned as damaged by log entry {}{when}{others}",
                    condemned.at
                ))
                .help("saving the same content again stores those chunks anew");
        }
        let (at, gone) = match state.purged.get(pack) {
            Some(purged) if purged.deleted => (purged.at, "purged and deleted"),
            Some(purged) => (purged.at, "purged"),
            None => return Error::conflict(what).help("run the command again"),
        };
        let when = self.told(at, None).await;
        Error::not_found(what)
            .got(format!("pack {pack}, which holds chunks of it, was {gone} by log entry {at}{when}{others}"))
            .help("save the same content again, if it is still somewhere")
    }

    /// The error about a name of which nothing is kept.
    async fn nothing_kept(&self, state: &State, name: &Name) -> Error {
        let there = if state.refs.contains_key(name) { "; the name is there" } else { "" };
        let nothing = |why: String| {
            Error::not_found(format!("nothing is kept of `{name}` that could be taken back{there}{why}"))
                .help("save the same content again, if it is still somewhere")
        };
        let forgets = |action: &Action| matches!(action, Action::Forget { name: forgotten, .. } if forgotten == name);
        let removes = |action: &Action| matches!(action, Action::RemoveRef { name: gone, .. } if gone == name);
        // Only a reason is lacking if this cannot be read.
        let told = self.log().latest(state.seq, |action| forgets(action) || removes(action)).await.ok().flatten();
        let Some((entry, at)) = told else {
            // The log has no removal of it.
            return nothing(String::new()).help("`towline ls` lists the names");
        };
        let when = self.told(entry, Some(at)).await;
        let actions = self.log().past_entry(entry).await.ok().flatten().map(|taken| taken.actions).unwrap_or_default();
        let was = if !actions.iter().any(forgets) {
            "it was removed for good"
        } else if actions.iter().any(|action| matches!(action, Action::SetRef { .. })) {
            "what was kept was taken back, or replaced by later values,"
        } else {
            "what was kept was forgotten"
        };
        nothing(format!(": {was} by log entry {entry}{when}"))
    }

    /// ` at TIME`, the store's of a log entry, or its writer's.
    async fn told(&self, entry: u64, writer: Option<Timestamp>) -> String {
        let told = store_time(self, entry).await.ok().flatten().or(writer);
        told.map_or_else(String::new, |at| format!(" at {at}"))
    }
}

/// The version to take back: that one, or the latest that is kept.
fn wanted(state: &State, name: &Name, version: Option<u64>) -> Option<(RemovedKey, Removed)> {
    let found = match version {
        Some(version) => state.removed_of(name).find(|(kept, _)| *kept == version),
        None => state.removed_of(name).next_back(),
    };
    found.map(|(version, removed)| ((name.clone(), version), removed.clone()))
}

/// A value to take back, and what is known of it.
struct Taking<'a> {
    key: &'a RemovedKey,
    removed: &'a Removed,
    /// Packs that its map names.
    packs: BTreeSet<PackId>,
    /// The entry after which they were known.
    known: u64,
    options: &'a UndeleteOptions,
}

/// Outcome of a decision.
#[derive(Debug)]
enum Outcome {
    /// Its actions take the value back.
    Done,
    /// The value has another map now.
    Again,
    /// These packs cannot be relied on.
    Lost(Vec<PackId>),
}

impl Taking<'_> {
    fn to(&self) -> &Name {
        self.options.to.as_ref().unwrap_or(&self.key.0)
    }

    /// Actions on `state`; none, if the value cannot be taken back there.
    fn decide(&self, state: &State) -> Result<(Outcome, Vec<Action>)> {
        let (name, to) = (&self.key.0, self.to());
        if state.refs.contains_key(to) && !self.options.replace {
            return Err(exists(to)
                .help(format!("`towline undelete {name} --as NEW` gives it another name; --replace replaces")));
        }
        let Some(now) = state.removed.get(self.key).filter(|now| now.at == self.removed.at) else {
            return Err(Error::conflict("somebody else took it back, or it was forgotten meanwhile").at(name));
        };
        if now.value.map_key != self.removed.value.map_key || self.known < state.forgotten {
            return Ok((Outcome::Again, Vec::new()));
        }
        let mut actions = match state.check_packs(&self.packs, self.known) {
            Ok(pardons) => pardons,
            Err(lost) => return Ok((Outcome::Lost(lost), Vec::new())),
        };
        let forget = self.removed.forget(self.key);
        actions.extend(state.keep_replaced(to, now.value.manifest).into_iter().filter(|action| *action != forget));
        // Under another name it is not what the attempt saved.
        let attempt = now.value.attempt.clone().filter(|_| to == name);
        let value = RefValue { version: 0, attempt, ..now.value.clone() };
        actions.push(Action::SetRef { name: to.clone(), expected: state.version(to), value });
        actions.push(forget);
        Ok((Outcome::Done, actions))
    }
}

impl NameValue {
    fn of(value: &RefValue) -> Self {
        Self {
            version: value.version,
            manifest: value.manifest.to_string(),
            bytes: value.logical_bytes,
            files: value.files,
            saved: value.saved.to_string(),
            facts: value.facts.clone(),
        }
    }
}
