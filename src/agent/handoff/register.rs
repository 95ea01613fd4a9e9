//! Stored and promised checkpoints, in memory, with their limits. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use ulid::Ulid;

use super::stored::{Announced, StoredCheckpoint};
use crate::agent::config::SenderQuota;
use crate::audit::Request;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::size;

/// A promise expires after this, or after the deadline if that is sooner, unless the upload has begun.
const PROMISED_FOR: Duration = Duration::from_mins(1);
/// Limits of concurrent uploads: of all agents, and of one.
pub(super) const PROMISED_MAX: (usize, usize) = (64, 4);
/// Limit of stored checkpoints: their records are in memory.
const STORED_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Register {
    pub(super) promised: BTreeMap<Ulid, Promise>,
    pub(super) stored: BTreeMap<Ulid, StoredCheckpoint>,
    /// Ids to save at once, by `towline handoff retry`.
    pub(super) urgent: BTreeSet<Ulid>,
    /// Folders to delete. They take space until they are gone.
    pub(super) deleting: BTreeMap<Ulid, Deleting>,
    /// Sender of the folder that was deleted last.
    deleted_of: Option<Identity>,
    /// A thread deletes folders.
    pub(super) deleter_runs: bool,
}

/// A folder to delete.
#[derive(Debug)]
pub(super) struct Deleting {
    /// Its sender; None for an upload that an earlier process did not finish.
    pub(super) from: Option<Identity>,
    pub(super) bytes: u64,
    /// It could not be deleted: left for the next start.
    pub(super) failed: bool,
}

#[derive(Debug)]
pub(super) struct Promise {
    pub(super) from: Identity,
    pub(super) what: Announced,
    pub(super) since: Instant,
    /// The upload has begun.
    pub(super) incoming: bool,
    /// Its entry in the audit log.
    pub(super) recorded: Option<Request>,
}

impl Register {
    /// Removes expired promises. An upload that has begun ends itself at its deadline.
    pub(super) fn forget(&mut self, deadline: Duration) {
        let patience = PROMISED_FOR.min(deadline);
        self.promised.retain(|_, promised| {
            let stays = promised.incoming || promised.since.elapsed() < patience;
            if let (false, Some(recorded)) = (stays, &promised.recorded) {
                recorded.end("it was not sent");
            }
            stays
        });
    }

    /// Checks the announced `what` of `from` against all limits: of uploads, the `capacity`, and the quota `allowance`.
    ///
    /// # Errors
    /// Exhausted, if one is reached.
    pub(super) fn admit(&self, from: &Identity, what: &Announced, allowance: SenderQuota, capacity: u64) -> Result<()> {
        let own = self.promised.values().filter(|promised| promised.from == *from).count();
        if self.promised.len() >= PROMISED_MAX.0
            || own >= PROMISED_MAX.1
            || self.stored.len() + self.deleting.len() >= STORED_MAX
        {
            let most = format!(
                "at most {} uploads, {} of one agent, and {STORED_MAX} checkpoints stored",
                PROMISED_MAX.0, PROMISED_MAX.1
            );
            return Err(Error::exhausted("too many handoffs at once").at(&what.name).expected(most).help("try again"));
        }
        let left = capacity.saturating_sub(self.taken(|_| true).bytes);
        if what.bytes > left {
            return Err(Error::exhausted("no space for this handoff")
                .at(&what.name)
                .expected(format!("at most {} ({left} bytes)", size::show(left)))
                .got(format!("{} bytes", what.bytes))
                .help(
                    "raise capacity in [handoff] of the receiver's settings, or wait until it has saved what it stores",
                ));
        }
        self.admit_of(from, what, allowance)
    }

    fn admit_of(&self, from: &Identity, what: &Announced, allowance: SenderQuota) -> Result<()> {
        let own = self.taken(|whose| whose == from);
        let help = "wait until the receiver has saved what it stores, look at what was set aside there (towline handoff \
                    list), or raise max and max_checkpoints of the [[handoff.accept]] entry in its settings";
        if own.checkpoints >= allowance.checkpoints {
            return Err(Error::exhausted(format!("quota of {} is used up", from.path()))
                .at(&what.name)
                .expected(format!("at most {} checkpoints stored", allowance.checkpoints))
                .got(format!("{} stored", own.checkpoints))
                .help(help));
        }
        let left = allowance.bytes.saturating_sub(own.bytes);
        if what.bytes > left {
            let most = allowance.bytes;
            return Err(Error::exhausted(format!("quota of {} is used up", from.path()))
                .at(&what.name)
                .expected(format!("at most {} ({left} bytes) more, of {most} bytes", size::show(left)))
                .got(format!("{} bytes", what.bytes))
                .help(help));
        }
        Ok(())
    }

    /// The folder to delete next: the oldest of the sender that follows the one whose folder was deleted last. One sender with many
    /// files delays another by one folder at most.
    pub(super) fn next_to_delete(&mut self) -> Option<Ulid> {
        let waiting = self.deleting.iter().filter(|(_, folder)| !folder.failed);
        let is_behind = |from: &Option<Identity>| *from <= self.deleted_of;
        let (id, from) =
            waiting.map(|(id, folder)| (*id, &folder.from)).min_by_key(|(_, from)| (is_behind(from), *from))?;
        self.deleted_of = from.clone();
        Some(id)
    }

    /// Bytes and number of checkpoints stored for and promised to the senders that match `of`, set aside, being deleted, or not.
    fn taken(&self, of: impl Fn(&Identity) -> bool) -> SenderQuota {
        let stored = self.stored.values().map(|stored| (&stored.from, stored.what.bytes));
        let deleting = self.deleting.values().filter_map(|folder| Some((folder.from.as_ref()?, folder.bytes)));
        let promised = self.promised.values().map(|promised| (&promised.from, promised.what.bytes));
        let all = stored.chain(deleting).chain(promised);
        let mut taken = SenderQuota { bytes: 0, checkpoints: 0 };
        for (_, bytes) in all.filter(|(from, _)| of(from)) {
            taken.bytes = taken.bytes.saturating_add(bytes);
            taken.checkpoints += 1;
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_deleted_sender_by_sender_and_take_space_until_then() {
        let sender = |name: &str| Identity::new("home", name).unwrap();
        let mut register = Register::default();
        let mut ids = Vec::new();
        for (number, from) in [Some("a"), Some("a"), Some("a"), Some("b"), None].into_iter().enumerate() {
            let id = Ulid::from_parts(number as u64, 0);
            register.deleting.insert(id, Deleting { from: from.map(sender), bytes: 10, failed: false });
            ids.push(id);
        }
        let taken = register.taken(|from| *from == sender("a"));
        assert_eq!((taken.bytes, taken.checkpoints), (30, 3));
        let order: Vec<_> = std::iter::from_fn(|| {
            let id = register.next_to_delete()?;
            register.deleting.remove(&id);
            Some(id)
        })
        .collect();
        assert_eq!(order, [ids[0], ids[3], ids[4], ids[1], ids[2]]);
        // One that cannot be deleted is not tried again and again.
        register.deleting.insert(ids[0], Deleting { from: None, bytes: 0, failed: true });
        assert_eq!(register.next_to_delete(), None);
    }
}
