//! Report of a collect.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{Evidence, FENCE_AFTER, Unfinished};
use crate::id::SessionId;
use crate::repository::collect::{Judgement, SessionPacks, Unneeded};
use crate::repository::layout::{self, Family};
use crate::repository::log::State;

/// Forgotten values that a report describes one by one, at most.
const FORGOTTEN_STEPS_MAX: usize = 1000;

/// Result of a collect, or of a dry run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CollectReport {
    /// Packs condemned.
    pub condemned_packs: u64,
    /// Packs purged.
    pub purged_packs: u64,
    /// Objects deleted.
    pub deleted_objects: u64,
    /// Packs rewritten because they were mostly dead.
    pub repacked_packs: u64,
    /// Index segments merged or rebuilt.
    pub merged_segments: u64,
    /// Sessions ended because they were idle.
    pub fenced_sessions: u64,
    /// Bytes of the objects deleted.
    pub freed_bytes: u64,
    /// Values of removed and replaced names that are forgotten: they were kept for as long as they were to be.
    pub forgotten_values: u64,
    /// Values of removed and replaced names that can be restored.
    pub kept_values: u64,
    /// Stored bytes of chunks that stay only because of these.
    pub kept_bytes: u64,
    /// Stored bytes of the chunks in use, those included.
    pub live_bytes: u64,
    /// Stored bytes of unused chunks that stay, because their packs are mostly in use.
    pub unused_bytes: u64,
    /// Unneeded objects within their grace period.
    pub waiting_objects: u64,
    /// Bytes of these objects.
    pub waiting_bytes: u64,
    /// Packs that no name uses, kept because a save or sync in progress may need them.
    pub held_packs: u64,
    /// Bytes of these packs.
    pub held_bytes: u64,
    /// The open sessions that they belong to.
    pub held: Vec<HeldSession>,
    /// Unfinished files and uploads of a save or sync, younger than 24 hours.
    pub unfinished_objects: u64,
    /// Bytes of these files; those of uploads are unknown.
    pub unfinished_bytes: u64,
    /// Descriptions of the actions taken, or in a dry run planned.
    pub steps: Vec<String>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// An open session with packs that no name uses, of a save or sync that is running or was killed.
#[derive(Clone, Debug, Serialize)]
pub struct HeldSession {
    /// Id.
    pub session: String,
    /// Name that ranks save together in it, if it is shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Packs.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Time from which a collect ends it, RFC 3339, unless it continues or is resumed. None if the store has no times.
    pub ends: Option<String>,
}

impl CollectReport {
    pub(super) fn count(&mut self, judgement: &Judgement) {
        self.condemned_packs += (judgement.condemn.len() + judgement.repack.len()) as u64;
        self.purged_packs += judgement.purge.len() as u64;
        self.repacked_packs += judgement.repack.len() as u64;
        self.fenced_sessions += judgement.fence.len() as u64;
    }

    /// Counts the values of `state` that entries up to `last` kept, and describes the first ones.
    pub(super) fn log_forgotten(&mut self, state: &State, last: u64) {
        let count = state.kept_through(last).count();
        self.forgotten_values += count as u64;
        let first = state.kept_through(last).take(FORGOTTEN_STEPS_MAX);
        self.steps.extend(
            first.map(|((name, version), _)| {
                format!("forget {name} as of entry {version}: it was kept for long enough")
            }),
        );
        if let Some(more) = count.checked_sub(FORGOTTEN_STEPS_MAX).filter(|&more| more > 0) {
            self.steps.push(format!("forget {more} more values, which were kept for long enough"));
        }
    }

    pub(super) fn report_live(&mut self, evidence: &Evidence) {
        self.live_bytes = evidence.marks.live_bytes();
        self.unused_bytes = evidence.marks.unused_bytes();
        self.kept_bytes = evidence.marks.kept_bytes();
        self.kept_values = evidence.state.removed.len() as u64;
    }

    /// Adds packs that open sessions keep from being deleted, except sessions that are `ending`.
    pub(super) fn report_held(&mut self, held: Vec<SessionPacks>, evidence: &Evidence, ending: &BTreeSet<SessionId>) {
        for held in held.into_iter().filter(|held| !ending.contains(&held.session)) {
            let joint = evidence.state.sessions.get(&held.session).and_then(|session| session.joint.as_ref());
            self.held_packs += held.packs;
            self.held_bytes += held.bytes;
            self.held.push(HeldSession {
                session: held.session.to_string(),
                name: joint.map(|joint| joint.attempt.name.to_string()),
                packs: held.packs,
                bytes: held.bytes,
                ends: held.alive.map(|alive| alive.after(FENCE_AFTER).to_string()),
            });
        }
    }

    pub(super) fn report_unfinished(&mut self, unfinished: &Unfinished) {
        let Unfinished { uploads, stale_uploads, files, stale_files } = unfinished;
        self.deleted_objects += (stale_uploads.len() + stale_files.len()) as u64;
        self.freed_bytes += stale_files.iter().map(|file| file.len).sum::<u64>();
        // A published one is a second link of its object.
        let files = files.iter().filter(|file| !file.published);
        self.unfinished_objects = (uploads.len() + files.clone().count()) as u64;
        self.unfinished_bytes = files.map(|file| file.len).sum();
    }

    pub(super) fn report_unneeded(&mut self, unneeded: &Unneeded) {
        self.freed_bytes += unneeded.due.values().sum::<u64>();
        self.waiting_objects += unneeded.waiting.len() as u64;
        self.waiting_bytes += unneeded.waiting.values().sum::<u64>();
        let deleted = unneeded.due.keys().filter(|(family, _)| *family != Family::Pack);
        self.steps
            .extend(deleted.map(|&(family, id)| format!("delete {}: nothing names it", layout::owned(family, id))));
    }
}
