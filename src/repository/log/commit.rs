//! Writing the log: one conditional create, and finding out what became of it.

use std::sync::Arc;

use super::{Action, Log, LogEntry, RefValue, State};
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, seal};
use crate::id::{SessionId, WriteId};
use crate::limits::{ENTRY_LEN_MAX, SNAPSHOT_EVERY};
use crate::repository::layout::Numbered;
use crate::repository::objects::{self, Created};

/// Tries of one create whose outcome stays unknown: the store answers nothing, and nothing is there.
const SILENT_TRIES: u32 = 8;
/// Races lost in a row before a commit gives up: with a fair store far more than ever happens.
const RACES: u32 = 1000;

/// Result of a commit.
#[derive(Clone, Debug)]
pub struct Committed {
    /// The number of its entry; `None` if there was nothing to do.
    pub entry: Option<u64>,
    /// The state with it.
    pub state: Arc<State>,
}

/// Outcome of one create.
enum Fate {
    Committed(Arc<State>),
    Lost,
}

impl Log {
    /// Commits the actions that `decide` finds right for the newest state, deciding again whenever somebody else was
    /// faster. No actions: nothing is written.
    ///
    /// # Errors
    /// Errors of `decide`; conflict, if the state refuses the actions (a session fenced, a ref moved); unreachable, with the
    /// outcome unknown, if the store does not answer.
    ///
    /// # Cancel safety
    /// Not safe: a dropped commit may or may not have happened. The next fold tells.
    pub async fn commit(
        &self,
        session: Option<SessionId>,
        mut decide: impl FnMut(&State) -> Result<Vec<Action>> + Send,
    ) -> Result<Committed> {
        let write = WriteId::random();
        for _ in 0..RACES {
            let state = self.refresh().await?;
            let actions = decide(&state)?;
            if actions.is_empty() {
                return Ok(Committed { entry: None, state });
            }
            let entry = LogEntry { write, session, at: self.clock.now(), actions };
            state.check(&entry)?;
            let number = state.seq + 1;
            match self.create(number, &entry).await? {
                Fate::Lost => {}
                Fate::Committed(state) => {
                    self.snapshot_if_due(number, &state).await;
                    return Ok(Committed { entry: Some(number), state });
                }
            }
        }
        Err(Error::conflict("others commit faster than this writer can").help("try again when fewer write"))
    }

    /// Creates entry `number` and learns its fate from what is there, never from the answer: an answer can be lost, a
    /// request repeated by the client below, and a name that was truncated away can be taken again.
    async fn create(&self, number: u64, entry: &LogEntry) -> Result<Fate> {
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
                Some(_) if mine => return Ok(Fate::Committed(self.refresh().await?)),
                Some(_) => return Ok(Fate::Lost),
                None => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
            }
        }
        Err(Error::unreachable("store neither takes nor refuses a log entry")
            .at(key)
            .help("the commit has not happened yet, but may; run the command again"))
    }

    /// The boundary has passed entry `number`: the object there may be a stray. The state remembers the last write of
    /// each open session, the entry that set each ref, and to what.
    async fn fate_by_state(&self, number: u64, entry: &LogEntry) -> Result<Fate> {
        let state = self.refresh().await?;
        if let Some(open) = entry.session.and_then(|id| state.sessions.get(&id)) {
            if open.last_write == entry.write {
                return Ok(Fate::Committed(state));
            }
            // Had it happened, it would have touched the session. Had something touched it later, that would hide it.
            if open.touched < number {
                return Ok(Fate::Lost);
            }
        }
        let mut sets = entry.actions.iter().filter_map(|action| match action {
            Action::SetRef { name, value, .. } => Some((name, RefValue { version: number, ..value.clone() })),
            _ => None,
        });
        // Its number alone does not make an entry ours: whoever won that number may have set the same name.
        let first = sets.next();
        if first.is_some() && first.into_iter().chain(sets).all(|(name, value)| state.refs.get(name) == Some(&value)) {
            return Ok(Fate::Committed(state));
        }
        Err(Error::unreachable("a commit was overtaken by a truncation of the log; its outcome is unknown")
            .at(Numbered::Entry.key(number))
            .help("look whether it happened (`towline ls`), and run the command again if not"))
    }

    /// Best effort: a missing snapshot only makes folds longer.
    async fn snapshot_if_due(&self, number: u64, state: &State) {
        if number.is_multiple_of(SNAPSHOT_EVERY)
            && state.seq == number
            && let Err(error) = self.write_snapshot(state).await
        {
            tracing::warn!("snapshot {number} was not written: {error:?}");
        }
    }

    /// Writes the snapshot of `state`. Its content follows from the log, so who writes it does not matter.
    pub(super) async fn write_snapshot(&self, state: &State) -> Result<()> {
        let object = seal(Kind::Snapshot, &state.encode(), true);
        objects::put(&*self.objects, &Numbered::Snapshot.key(state.seq), object.into()).await
    }
}
