//! Lookups of log entries that are folded already, to show to people. No decision depends on them.

use super::{Action, Log, LogEntry};
use crate::clock::Timestamp;
use crate::error::Result;

/// Maximum number of entries that are searched.
const LOOK_BACK: u64 = 256;

impl Log {
    /// Entry `number`, if the log still has it.
    ///
    /// # Errors
    /// Damaged, if the entry is; unreachable, if the store is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn past_entry(&self, number: u64) -> Result<Option<LogEntry>> {
        // An object below the boundary may be a stray.
        if self.advance_boundary().await?.floor >= number { Ok(None) } else { self.entry(number).await }
    }

    /// Latest entry up to `last` with an action that is `wanted`: its number and its writer's time. Searches only the
    /// last entries.
    ///
    /// # Errors
    /// As [`Log::past_entry`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn latest(&self, last: u64, wanted: impl Fn(&Action) -> bool) -> Result<Option<(u64, Timestamp)>> {
        let floor = self.advance_boundary().await?.floor.max(last.saturating_sub(LOOK_BACK));
        for number in (floor + 1..=last).rev() {
            let Some(entry) = self.entry(number).await? else { continue };
            if entry.actions.iter().any(&wanted) {
                return Ok(Some((number, entry.at)));
            }
        }
        Ok(None)
    }
}
