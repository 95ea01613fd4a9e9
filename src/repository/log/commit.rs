//! Writing the log: one conditional create, and the check of its outcome.

use std::sync::Arc;

use super::fold::NUMBER_MAX;
use super::{Action, Log, LogEntry, RefValue, State};
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, seal};
use crate::id::{SessionId, WriteId};
use crate::limits::{ENTRY_LEN_MAX, SNAPSHOT_EVERY};
use crate::repository::layout::Numbered;
use crate::repository::objects::{self, Created};

/// Maximum tries of a create whose outcome is unknown: no answer of the store, and no object.
const SILENT_TRIES: u32 = 8;
/// Lost races in a row after which a commit gives up; far more than with any fair store.
const RACES: u32 = 1000;

/// Result of a commit.
#[derive(Clone, Debug)]
pub struct Committed {
    /// The number of its entry; `None` if there was nothing to do.
    pub entry: Option<u64>,
    /// State after the commit.
    pub state: Arc<State>,
}

/// Outcome of one create.
enum CreateOutcome {
    Committed(Arc<State>),
    Lost,
}

/// Error for a log whose last number is `last`: only a planted snapshot leads there.
pub(super) fn used_up(last: u64) -> Error {
    Error::damaged("log has a number that no log reaches: somebody planted a snapshot")
        .at(Numbered::Snapshot.key(last))
        .help("check who may write below snapshot/ and log/; `towline verify` names the objects to delete")
}

impl Log {
    /// Commits the actions that `decide` returns for the newest state; calls it again after a lost race. Without actions nothing
    /// is written.
    ///
    /// # Errors
    /// Errors of `decide`; conflict, if the state refuses the actions (a session fenced, a ref moved); unreachable, with the
    /// outcome unknown, if the store does not answer.
    ///
    /// # Cancel safety
    /// Not safe: a dropped commit may have happened. The next fold shows it.
    pub async fn commit(
        &self,
        session: Option<SessionId>,
        mut decide: impl FnMut(&State) -> Result<Vec<Action>> + Send,
    ) -> Result<Committed> {
        let write = WriteId::random();
        for race in 0..RACES {
            let state = if race == 0 { self.refresh_checked().await? } else { self.refresh().await? };
            let actions = decide(&state)?;
            if actions.is_empty() {
                return Ok(Committed { entry: None, state });
            }
            let entry = LogEntry { write, session, at: self.clock.now(), actions };
            state.check(&entry)?;
            let number = state.seq + 1;
            if number > NUMBER_MAX {
                return Err(used_up(state.seq));
            }
            match self.create(number, &entry).await? {
                CreateOutcome::Lost => {}
                CreateOutcome::Committed(state) => {
                    self.snapshot_if_due(number, &state).await;
                    return Ok(Committed { entry: Some(number), state });
                }
            }
        }
        Err(Error::busy("others commit faster than this writer can").help("try again when fewer write"))
    }

    /// Creates entry `number`. That the store refused it, or did not answer, proves nothing: an answer can be lost, the HTTP client may
    /// repeat a request, and a truncated number can be created again. So the outcome is determined from the stored object.
    async fn create(&self, number: u64, entry: &LogEntry) -> Result<CreateOutcome> {
        let key = Numbered::Entry.key(number);
        let body = entry.encode();
        if body.len() as u64 > ENTRY_LEN_MAX {
            return Err(Error::exhausted("log entry is too long").expected(ENTRY_LEN_MAX).got(body.len()));
        }
        let object = seal(Kind::Entry, &body, true);
        for _ in 0..SILENT_TRIES {
            let answer = objects::create(&*self.objects, &key, object.clone()).await?;
            let found = match answer {
                Created::Yes => Some(entry.write),
                Created::Exists | Created::Unknown => self.entry(number).await?.map(|found| found.write),
            };
            let mine = found == Some(entry.write);
            if self.advance_boundary().await?.floor >= number {
                return self.fate_by_state(number, entry).await;
            }
            match found {
                Some(_) if mine => return self.check_kept(number).await,
                Some(_) => return Ok(CreateOutcome::Lost),
                None => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
            }
        }
        Err(Error::unreachable("store neither accepts nor refuses a log entry")
            .at(key)
            .help("the commit has not happened yet, but may; run the command again"))
    }

    /// Outcome of a create that the store acknowledged, or whose entry was read: the log must reach it.
    async fn check_kept(&self, number: u64) -> Result<CreateOutcome> {
        let state = self.refresh().await?;
        if state.seq >= number {
            return Ok(CreateOutcome::Committed(state));
        }
        Err(Error::unreachable("store lost a log entry that it acknowledged")
            .at(Numbered::Entry.key(number))
            .expected("the entry, as the store answered that it has it")
            .got("none")
            .help("nothing was committed; `towline doctor` tests what the store does: use no store that loses what it acknowledges"))
    }

    /// Outcome by the state, if the boundary has passed entry `number` and the object there may be a stray. The state records the
    /// last write of each open session, and for each ref its value and the entry that set it.
    async fn fate_by_state(&self, number: u64, entry: &LogEntry) -> Result<CreateOutcome> {
        let state = self.refresh().await?;
        if let Some(open) = entry.session.and_then(|id| state.sessions.get(&id)) {
            if open.last_write == entry.write {
                return Ok(CreateOutcome::Committed(state));
            }
            // The entry would have touched the session, unless a later one did.
            if open.touched < number {
                return Ok(CreateOutcome::Lost);
            }
        }
        let mut sets = entry.actions.iter().filter_map(|action| match action {
            Action::SetRef { name, value, .. } => Some((name, RefValue { version: number, ..value.clone() })),
            _ => None,
        });
        // The number alone proves nothing: another writer may have set the same name by that entry.
        let first = sets.next();
        if first.is_some() && first.into_iter().chain(sets).all(|(name, value)| state.refs.get(name) == Some(&value)) {
            return Ok(CreateOutcome::Committed(state));
        }
        Err(Error::unreachable("a commit was overtaken by a truncation of the log; its outcome is unknown")
            .at(Numbered::Entry.key(number))
            .help("check with `towline ls` whether it happened, and run the command again if not"))
    }

    /// Writes a snapshot if one is due. Best effort: a missing snapshot only makes folds longer.
    async fn snapshot_if_due(&self, number: u64, state: &State) {
        if number.is_multiple_of(SNAPSHOT_EVERY)
            && state.seq == number
            && let Err(error) = self.write_snapshot(state).await
        {
            tracing::warn!("snapshot {number} was not written: {error:?}");
        }
    }

    /// Writes the snapshot of `state`. Every writer writes the same content, which follows from the log.
    pub(super) async fn write_snapshot(&self, state: &State) -> Result<()> {
        objects::put(&*self.objects, &Numbered::Snapshot.key(state.seq), state.seal().into()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::clock::SystemClock;
    use crate::error::ErrorKind;
    use crate::limits::MEMORY_MIN;
    use crate::repository::faults::{Fault, FaultyStore};

    fn assert_lost(error: &Error, number: u64) {
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
        assert_eq!(error.place(), Some(Numbered::Entry.key(number).as_ref()), "{error:?}");
        assert!(error.to_string().contains("store lost a log entry that it acknowledged"), "{error}");
    }

    #[tokio::test]
    async fn an_entry_that_the_store_acknowledges_and_loses_is_not_committed() {
        let objects = Arc::new(FaultyStore::default());
        let log = Log::new(Arc::clone(&objects) as _, Arc::new(SystemClock), Budget::new(MEMORY_MIN).unwrap());
        let open = async || log.commit(None, |_| Ok(vec![Action::Open(SessionId::random())])).await;
        open().await.unwrap();
        objects.set(Numbered::Entry.key(2), Fault::Lose);
        assert_lost(&open().await.unwrap_err(), 2);
        objects.heal();
        assert_eq!(open().await.unwrap().entry, Some(2));
    }
}
