//! The shared session of the ranks of an attempt, and its parts.

use std::time::Duration;

use futures::future::try_join_all;

use super::RankPart;
use crate::error::{Error, Result};
use crate::format::envelope::{Kind, seal};
use crate::id::SessionId;
use crate::repository::Repository;
use crate::repository::layout::{self, Family};
use crate::repository::log::{Action, Attempt, Joint, RefValue, State};
use crate::repository::objects::{self, Created};

/// Maximum tries of a create whose outcome is unknown.
const SILENT_TRIES: u32 = 8;
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// State of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptState {
    /// In progress: its ranks share this session.
    Open(SessionId, Joint),
    /// Complete: the name has the value that it saved.
    Complete(Box<RefValue>),
    /// Not started, or ended.
    Absent,
}

/// Existing parts of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Every rank's part, in the order of ranks.
    All(Vec<RankPart>),
    /// The part of this rank is missing; others may be, too.
    Missing(u32),
}

impl State {
    /// State of an attempt.
    #[must_use]
    pub fn attempt_state(&self, attempt: &Attempt) -> AttemptState {
        if let Some(value) = self.completed(attempt) {
            return AttemptState::Complete(Box::new(value.clone()));
        }
        self.joint(attempt).map_or(AttemptState::Absent, |(id, _, joint)| AttemptState::Open(id, joint.clone()))
    }

    /// Checks that the step was not saved by `attempt` and then replaced. Who removes a step may save it again with the same attempt.
    ///
    /// # Errors
    /// Conflict.
    fn check_not_replaced(&self, attempt: &Attempt) -> Result<()> {
        let replaced = self.refs.contains_key(&attempt.name)
            && self.removed_of(&attempt.name).any(|(_, kept)| kept.value.is_of(attempt));
        if replaced {
            return Err(Error::conflict("step was saved by this attempt, and replaced since")
                .at(&attempt.name)
                .got(format!("attempt {}", attempt.id))
                .help("save it with another --attempt"));
        }
        Ok(())
    }
}

impl Repository {
    /// Finds the shared session of an attempt, or opens it.
    ///
    /// # Errors
    /// Conflict, if the attempt has saved the step and something else has replaced it; as [`log::Log::commit`](crate::repository::log::Log::commit).
    ///
    /// # Cancel safety
    /// Safe: the next rank finds a session that was opened.
    pub async fn join(&self, attempt: &Attempt) -> Result<AttemptState> {
        let session = SessionId::random();
        let joined = self.log().commit(Some(session), |state| match state.attempt_state(attempt) {
            AttemptState::Absent => {
                state.check_not_replaced(attempt)?;
                Ok(vec![Action::OpenJoint(session, attempt.clone())])
            }
            _ => Ok(Vec::new()),
        });
        Ok(joined.await?.state.attempt_state(attempt))
    }

    /// Creates a part. Returns the stored part of that rank: this one, unless another process of the rank was first.
    ///
    /// # Errors
    /// Unreachable, if it stays unknown whether it was created.
    ///
    /// # Cancel safety
    /// Safe: the part was created or not; the next read shows which.
    pub async fn put_part(&self, session: SessionId, part: &RankPart) -> Result<RankPart> {
        let key = layout::owned(Family::Part, layout::part(session, part.rank));
        let object = seal(Kind::Part, &part.encode(), true);
        for _ in 0..SILENT_TRIES {
            match objects::create(&**self.store().objects(), &key, object.clone()).await? {
                Created::Yes => return Ok(part.clone()),
                Created::Exists | Created::Unknown => {}
            }
            if let Some(found) = self.part(session, part.rank).await? {
                return Ok(found);
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(Error::unreachable("store neither accepts nor refuses a part")
            .at(key)
            .help("run the command again: it reuses what was uploaded"))
    }

    /// Part of `rank`, if it exists.
    ///
    /// # Errors
    /// Damaged, if it is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn part(&self, session: SessionId, rank: u32) -> Result<Option<RankPart>> {
        let key = layout::owned(Family::Part, layout::part(session, rank));
        let body = objects::body(&**self.store().objects(), self.budget(), Kind::Part, &key).await?;
        let Some(body) = body else { return Ok(None) };
        RankPart::decode_as(&body, session, rank).map(Some).map_err(|error| error.at(key))
    }

    /// Reads the parts of all `ranks` by key, starting with the rank after `rank`, and stops at the first missing one. If ranks
    /// finish one after the other, each reads few parts, and all ranks together about `ranks * ln(ranks)`.
    ///
    /// # Errors
    /// Damaged, if a part is.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn parts(&self, session: SessionId, rank: u32, ranks: u32) -> Result<Parts> {
        let mut order = (rank..ranks).chain(0..rank).skip(1).chain([rank]);
        let (mut parts, mut width) = (Vec::new(), 1);
        loop {
            // Usually the first one is missing already.
            let looks = order
                .by_ref()
                .take(width)
                .map(|rank| async move { Ok::<_, Error>((rank, self.part(session, rank).await?)) });
            let found: Vec<(u32, Option<RankPart>)> = try_join_all(looks.collect::<Vec<_>>()).await?;
            if found.is_empty() {
                break;
            }
            for (rank, part) in found {
                match part {
                    Some(part) => parts.push(part),
                    None => return Ok(Parts::Missing(rank)),
                }
            }
            width = (2 * width).min(self.parallelism());
        }
        parts.sort_unstable_by_key(|part| part.rank);
        Ok(Parts::All(parts))
    }
}
