//! Checkpoints kept and promised, in memory, with their limits. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use ulid::Ulid;

use super::held::{Announced, Held};
use crate::agent::config::Allowance;
use crate::error::{Error, Result};
use crate::size;
use crate::transfer::identity::Identity;

/// A promise of room expires after this, or after the deadline if that is sooner, unless the transfer has begun.
const PROMISED_FOR: Duration = Duration::from_mins(1);
/// Limits of concurrent transfers: of all agents, and of one.
pub(super) const PROMISED_MAX: (usize, usize) = (64, 4);
/// Limit of checkpoints kept: their records are in memory.
const HELD_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Register {
    pub(super) promised: BTreeMap<Ulid, Promised>,
    pub(super) held: BTreeMap<Ulid, Held>,
    /// Ids to save at once, by `towline custody retry`.
    pub(super) urgent: BTreeSet<Ulid>,
}

#[derive(Debug)]
pub(super) struct Promised {
    pub(super) from: Identity,
    pub(super) what: Announced,
    pub(super) since: Instant,
    /// The transfer has begun.
    pub(super) coming: bool,
}

impl Register {
    /// Removes expired promises. A transfer that has begun ends itself at its deadline.
    pub(super) fn forget(&mut self, deadline: Duration) {
        let patience = PROMISED_FOR.min(deadline);
        self.promised.retain(|_, promised| promised.coming || promised.since.elapsed() < patience);
    }

    /// Checks the announced `what` of `from` against all limits: of transfers, of the `capacity`, of the quota `allowance`.
    ///
    /// # Errors
    /// Exhausted, if one is reached.
    pub(super) fn admit(&self, from: &Identity, what: &Announced, allowance: Allowance, capacity: u64) -> Result<()> {
        let own = self.promised.values().filter(|promised| promised.from == *from).count();
        if self.promised.len() >= PROMISED_MAX.0 || own >= PROMISED_MAX.1 || self.held.len() >= HELD_MAX {
            let most = format!(
                "at most {} on their way, {} of one agent, and {HELD_MAX} kept",
                PROMISED_MAX.0, PROMISED_MAX.1
            );
            return Err(Error::exhausted("too many checkpoints come at once")
                .at(&what.name)
                .expected(most)
                .help("try again"));
        }
        let left = capacity.saturating_sub(self.taken(|_| true).bytes);
        if what.bytes > left {
            return Err(Error::exhausted("there is no room to keep this")
                .at(&what.name)
                .expected(format!("at most {} ({left} bytes)", size::show(left)))
                .got(format!("{} bytes", what.bytes))
                .help(
                    "raise capacity in [custody] of that agent's settings, or wait until it has saved what it keeps",
                ));
        }
        self.admit_of(from, what, allowance)
    }

    fn admit_of(&self, from: &Identity, what: &Announced, allowance: Allowance) -> Result<()> {
        let own = self.taken(|whose| whose == from);
        let help = "wait until the keeper has saved what it keeps, have somebody there look at what was set aside \
                    (towline custody list), or raise max and max_parcels of the [[custody.accept]] entry in its settings";
        if own.parcels >= allowance.parcels {
            return Err(Error::exhausted(format!("quota of {} is used up", from.path()))
                .at(&what.name)
                .expected(format!("at most {} checkpoints kept", allowance.parcels))
                .got(format!("{} kept already", own.parcels))
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

    /// Bytes and number of what is kept of and promised to the givers that match `of`, set aside or not.
    fn taken(&self, of: impl Fn(&Identity) -> bool) -> Allowance {
        let held = self.held.values().map(|held| (&held.from, held.what.bytes));
        let all = held.chain(self.promised.values().map(|promised| (&promised.from, promised.what.bytes)));
        let mut taken = Allowance { bytes: 0, parcels: 0 };
        for (_, bytes) in all.filter(|(from, _)| of(from)) {
            taken.bytes = taken.bytes.saturating_add(bytes);
            taken.parcels += 1;
        }
        taken
    }
}
