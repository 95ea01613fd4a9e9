//! Undelete: the values that names had before they were removed or replaced, and the commit that restores one.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::names::{Replaced, exists};
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::id::PackId;
use crate::name::Name;
use crate::repository::collect::{KEEP_REMOVED, kept_since, store_time};
use crate::repository::log::{Action, KeptKey, KeptValue, RefValue, State, StepFacts};
use crate::repository::{Repository, absent_name};

/// Limit of retries if the value is repacked while it is read.
const ATTEMPTS: usize = 5;

/// Values of one name: the present one, and those that `undelete` can restore.
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

/// An earlier value of the name.
#[derive(Clone, Debug, Serialize)]
pub struct RemovedValue {
    /// The value.
    #[serde(flatten)]
    pub value: NameValue,
    /// Its removal or replacement.
    pub taken: RemovalEvent,
    /// Time until which it can be restored, RFC 3339, if collects keep removed values for the default time; none, if the store has no
    /// times.
    pub until: Option<String>,
}

/// Removal or replacement of a value.
#[derive(Clone, Debug, Serialize)]
pub struct RemovalEvent {
    /// The log entry.
    pub entry: u64,
    /// Its time by its writer's clock, RFC 3339.
    pub at: String,
    /// Action of the entry; none, if the log no longer has it.
    pub by: Option<RemovalCause>,
}

/// Cause of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RemovalCause {
    /// The name was removed.
    Removed,
    /// The name was given another value.
    Replaced,
}

/// Options of undelete.
#[derive(Clone, Debug, Default)]
pub struct UndeleteOptions {
    /// Version to restore; by default the one that the name had last.
    pub version: Option<u64>,
    /// Name to restore it under; by default its own.
    pub to: Option<Name>,
    /// Replace the current value of the name, which is kept in turn.
    pub replace: bool,
}

/// Result of [`Repository::undelete_below`].
#[derive(Clone, Debug, Serialize)]
pub struct UndeletedNames {
    /// Names that were restored.
    pub names: Vec<UndeleteReport>,
    /// Names below it that were removed before those, and stay removed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Name>,
}

/// Result of undelete.
#[derive(Clone, Debug, Serialize)]
pub struct UndeleteReport {
    /// The name that has the value now.
    pub name: Name,
    /// The name that had it.
    pub from: Name,
    /// The value as it is now.
    #[serde(flatten)]
    pub value: NameValue,
    /// Version that it had before it was removed.
    pub was: u64,
    /// Value that it replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Replaced>,
}

impl Repository {
    /// Current value of `name`, and its earlier values that can be restored.
    ///
    /// # Errors
    /// Not found, if it has no value and none is kept.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn history(&self, name: &Name) -> Result<NameHistory> {
        let state = self.state().await?;
        let present = state.refs.get(name).map(NameValue::of);
        let mut kept = Vec::new();
        for (_, removed) in state.removed_of(name).rev() {
            let since = kept_since(self, removed.at).await?;
            let by = self.removal_cause(&state, name, removed.at).await?;
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
    async fn removal_cause(&self, state: &State, name: &Name, at: u64) -> Result<Option<RemovalCause>> {
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

    /// Restores a kept value of a name in one commit: the one that it had last, unless the options name another.
    /// As for every commit that makes a tree reachable, all packs that it needs must exist and be intact.
    ///
    /// # Errors
    /// Not found, if nothing is kept of the name, or only values before its last one and the options name none of them, or a
    /// pack that it needs is gone; damaged, if one is known to be damaged;
    /// conflict, if the name is there and must not be replaced, or somebody else was faster.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn undelete(&self, name: &Name, options: &UndeleteOptions) -> Result<UndeleteReport> {
        let state = self.state().await?;
        if options.version.is_none()
            && !state.refs.contains_key(name)
            && let Some((_, kept)) = state.removed_of(name).next_back()
        {
            self.check_last(&state, &BTreeSet::from([name]), kept.at).await?;
        }
        self.undelete_kept(name, options).await
    }

    /// Checks that the values of `names`, which are not there, that entry `at` removed or replaced are those that they had last.
    /// Searches for later removals only in the last entries of the log.
    async fn check_last(&self, state: &State, names: &BTreeSet<&Name>, at: u64) -> Result<()> {
        let removes = |action: &Action| matches!(action, Action::RemoveRef { name, .. } if names.contains(name));
        let found = self.log().latest(state.seq, removes).await?;
        let (entry, writer) = match found {
            Some((entry, _)) if entry == at => return Ok(()),
            Some((entry, writer)) => (entry, Some(writer)),
            None => (at, None),
        };
        let actions = self.log().past_entry(entry).await?.map(|entry| entry.actions).unwrap_or_default();
        let of_lost = |action: &Action| match (action, found) {
            // The one that replaced the kept value is gone, too.
            (Action::RemoveRef { name, .. }, Some(_)) | (Action::SetRef { name, .. }, None) => names.get(name).copied(),
            _ => None,
        };
        let Some(name) = actions.iter().find_map(of_lost) else { return Ok(()) };
        let keeps = |action: &Action| matches!(action, Action::Keep { name: kept, .. } if kept == name);
        let why = match found {
            None => "saved, and later removed for good",
            Some(_) if actions.iter().any(keeps) => {
                "removed; it has been restored under another name since, or forgotten"
            }
            Some(_) => "removed for good: `expire` and `rm --now` keep nothing, and what is kept has a quota",
        };
        let when = self.time_of(entry, writer).await;
        Err(Error::not_found(format!("last value of `{name}` is not kept, only an earlier one"))
            .got(format!("by log entry {entry}{when} the last one was {why}"))
            .help(format!(
                "`towline history {name}` lists earlier ones; `towline undelete {name} --version V` restores one"
            )))
    }

    async fn undelete_kept(&self, name: &Name, options: &UndeleteOptions) -> Result<UndeleteReport> {
        for _ in 0..ATTEMPTS {
            let state = self.state().await?;
            let Some((key, removed)) = wanted(&state, name, options.version) else {
                let kept: Vec<String> = state.removed_of(name).map(|(version, _)| version.to_string()).collect();
                if let Some(version) = options.version.filter(|_| !kept.is_empty()) {
                    return Err(Error::not_found("version is not kept")
                        .at(format!("{name} version {version}"))
                        .expected(format!("one of {}", kept.join(", ")))
                        .help(format!("`towline history {name}` lists them")));
                }
                return Err(self.nothing_kept(&state, name).await);
            };
            let saved = match self.saved_as(name, &removed.value).await {
                Ok(saved) => saved,
                // Repacked between the two readings, or forgotten: the state tells.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let now = self.state().await?;
                    if now.removed.get(&key) == Some(&removed) {
                        let what = format!("the kept value of {name} cannot be restored: its manifest or map is gone");
                        return Err(Error::not_found(what).source(error));
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            let to = options.to.as_ref().unwrap_or(name);
            if to != name {
                self.check_copy((name, &removed.value.manifest), to).await?;
            }
            let packs = saved.map.packs.iter().map(|pack| pack.id).collect();
            let taking = Taking { key: &key, removed: &removed, packs, known: state.seq, options };
            if let Some(report) = self.restore_kept(&taking).await? {
                return Ok(report);
            }
        }
        Err(Error::busy("the kept value is repacked faster than it can be restored").at(name).help("try again"))
    }

    /// Restores `name` and the names below it that were removed last, all by the same entry of the log, one after the other. Names that
    /// were removed before stay removed, as do kept values of names that are there, because they were replaced.
    ///
    /// # Errors
    /// As [`Repository::undelete`]: those before the failing name are restored.
    ///
    /// # Cancel safety
    /// Not safe: some may be restored.
    pub async fn undelete_below(&self, name: &Name) -> Result<UndeletedNames> {
        let state = self.state().await?;
        let removed = removed_below(&state, name);
        let Some(last) = removed.values().max() else { return Err(self.nothing_kept(&state, name).await) };
        let (chosen, earlier): (Vec<_>, Vec<_>) = removed.iter().partition(|(_, at)| *at == last);
        self.check_last(&state, &chosen.iter().map(|(name, _)| *name).collect(), *last).await?;
        let mut names = Vec::with_capacity(chosen.len());
        for (name, _) in chosen {
            names.push(self.undelete_kept(name, &UndeleteOptions::default()).await?);
        }
        Ok(UndeletedNames { names, earlier: earlier.into_iter().map(|(name, _)| name.clone()).collect() })
    }

    /// Commits it; None if it must be read again.
    async fn restore_kept(&self, taking: &Taking<'_>) -> Result<Option<UndeleteReport>> {
        let (name, to) = (&taking.key.0, taking.to());
        let mut outcome = Outcome::Again;
        let mut replaced = None;
        let commit = self.log().commit(None, |state| {
            let (decided, mut actions) = taking.decide(state)?;
            outcome = decided;
            if matches!(outcome, Outcome::Done) && to != name {
                let tree = &taking.removed.value.manifest;
                actions.extend(self.inherited_labels(state, (name, tree), to)?);
            }
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

    /// Error for a kept value whose packs are damaged or purged.
    async fn lost(&self, state: &State, name: &Name, packs: &[PackId]) -> Error {
        let what = format!("the kept value of {name} cannot be restored");
        let Some(pack) = packs.first() else { return Error::conflict(what).help("run the command again") };
        let others = packs.len() - 1;
        let others = if others == 0 { String::new() } else { format!(", and {others} more packs like it") };
        if let Some(condemned) = state.condemned.get(pack) {
            let when = self.time_of(condemned.at, Some(condemned.when)).await;
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
        let when = self.time_of(at, None).await;
        Error::not_found(what)
            .got(format!("pack {pack}, which holds chunks of it, was {gone} by log entry {at}{when}{others}"))
            .help("save the same content again, if it is still somewhere")
    }

    /// Error for a name without kept values.
    async fn nothing_kept(&self, state: &State, name: &Name) -> Error {
        let (there, help) = if state.refs.contains_key(name) {
            ("; the name is there", "nothing needs to be done for the value that it has now")
        } else {
            ("", "save the same content again, if it is still somewhere")
        };
        let nothing = |why: String| {
            Error::not_found(format!("no value of `{name}` is kept that could be restored{there}{why}")).help(help)
        };
        let forgets = |action: &Action| matches!(action, Action::Forget { name: forgotten, .. } if forgotten == name);
        let removes = |action: &Action| matches!(action, Action::RemoveRef { name: gone, .. } if gone == name);
        // Only a reason is lacking if this cannot be read.
        let told = self.log().latest(state.seq, |action| forgets(action) || removes(action)).await.ok().flatten();
        let Some((entry, at)) = told else {
            // The log has no removal of it.
            let below = removed_below(state, name).len();
            let again = state.removed.keys().map(|(kept, _)| kept).find(|kept| kept.is_under(name));
            let help = match again {
                _ if below > 0 => {
                    format!(
                        "`towline undelete {name} --recursive` restores the names below it that were removed last, of {below}"
                    )
                }
                Some(again) => {
                    format!("`towline undelete {again} --as NEW` restores what {again} was before it was saved again")
                }
                None if state.refs.contains_key(name) => format!("`towline show {name}` shows what it is"),
                None => return self.unknown(state, name),
            };
            return nothing(String::new()).help(help);
        };
        let when = self.time_of(entry, Some(at)).await;
        let actions = self.log().past_entry(entry).await.ok().flatten().map(|taken| taken.actions).unwrap_or_default();
        let was = if !actions.iter().any(forgets) {
            "it was removed for good"
        } else if actions.iter().any(|action| matches!(action, Action::SetRef { .. })) {
            "the kept values were restored, or replaced by later ones,"
        } else {
            "what was kept was forgotten"
        };
        nothing(format!(": {was} by log entry {entry}{when}"))
    }

    /// Error for a name that is not there, and that neither has kept values nor names below it that have.
    fn unknown(&self, state: &State, name: &Name) -> Error {
        if state.refs.keys().any(|other| other.is_under(name)) {
            return Error::not_found(format!("`{name}` is not a name itself, and no removed name below it is kept"))
                .help(format!("`towline ls {name}` lists what is below it"));
        }
        let known: BTreeSet<&Name> = state.refs.keys().chain(state.removed.keys().map(|(name, _)| name)).collect();
        absent_name(|| known.iter().copied(), name, self.store().location())
    }

    /// ` at TIME`, the store's of a log entry, or its writer's.
    async fn time_of(&self, entry: u64, writer: Option<Timestamp>) -> String {
        let told = store_time(self, entry).await.ok().flatten().or(writer);
        told.map_or_else(String::new, |at| format!(" at {at}"))
    }
}

/// `name` and the names below it that were removed, have kept values and are not there.
fn removed_below(state: &State, name: &Name) -> BTreeMap<Name, u64> {
    let is_meant = |removed: &Name| removed.is_under(name) && !state.refs.contains_key(removed);
    // Of several values of a name, the last one counts.
    let removed = state.removed.iter().filter(|((name, _), _)| is_meant(name));
    removed.map(|((name, _), kept)| (name.clone(), kept.at)).collect()
}

/// Version to restore: the given one, or the latest that is kept.
fn wanted(state: &State, name: &Name, version: Option<u64>) -> Option<(KeptKey, KeptValue)> {
    let found = match version {
        Some(version) => state.removed_of(name).find(|(kept, _)| *kept == version),
        None => state.removed_of(name).next_back(),
    };
    found.map(|(version, removed)| ((name.clone(), version), removed.clone()))
}

/// A value to restore, with its packs.
struct Taking<'a> {
    key: &'a KeptKey,
    removed: &'a KeptValue,
    /// Packs that its map names.
    packs: BTreeSet<PackId>,
    /// Log entry as of which they were read.
    known: u64,
    options: &'a UndeleteOptions,
}

/// Outcome of a decision.
#[derive(Debug)]
enum Outcome {
    /// Its actions restore the value.
    Done,
    /// The value has another map now.
    Again,
    /// These packs are damaged or purged.
    Lost(Vec<PackId>),
}

impl Taking<'_> {
    fn to(&self) -> &Name {
        self.options.to.as_ref().unwrap_or(&self.key.0)
    }

    /// Actions on `state`; none, if the value cannot be restored there.
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
        actions.extend(state.keep_for_undelete(to, self.key));
        // Under another name it is not what the attempt saved.
        let attempt = now.value.attempt.clone().filter(|_| to == name);
        let value = RefValue { version: 0, attempt, ..now.value.clone() };
        actions.push(Action::SetRef { name: to.clone(), expected: state.version(to), value });
        actions.push(self.removed.forget(self.key));
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
