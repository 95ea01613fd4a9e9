//! Expire: steps + policy -> plan -> one commit that removes names.
//!
//! Only names are removed: the next collect deletes the data that no other name needs.

mod plan;
#[cfg(test)]
mod tests;

pub use plan::{ExpirePlan, ExpirePolicy, PlannedStep, Reason};

use self::plan::plan;
use crate::error::Result;
use crate::name::Name;
use crate::repository::log::{Action, Refusal};
use crate::repository::{Repository, Run};

impl Repository {
    /// Plan of `policy` for the run as it is now: steps to keep, with reasons, and steps to remove.
    ///
    /// # Errors
    /// Usage, if the policy is empty; not found, if there is no such run, or none of its steps has a metric to keep by.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn plan_expire(&self, run: &Name, policy: &ExpirePolicy) -> Result<ExpirePlan> {
        policy.check()?;
        let state = self.state().await?;
        plan(&Run::find(&state.refs, run)?, policy)
    }

    /// Carries out `plan` in one commit. Steps that came after it was made stay. Of those that go nothing is kept.
    ///
    /// # Errors
    /// Conflict, if a step of the plan, kept or not, has been saved again or removed since: then nothing is removed.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn expire(&self, plan: &ExpirePlan) -> Result<()> {
        self.execute_expire(plan, false).await
    }

    /// As [`Repository::expire`], but the removed steps can be restored for a while, like removed names.
    ///
    /// # Errors
    /// As [`Repository::expire`].
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn expire_keeping(&self, plan: &ExpirePlan) -> Result<()> {
        self.execute_expire(plan, true).await
    }

    async fn execute_expire(&self, plan: &ExpirePlan, keep: bool) -> Result<()> {
        match self.try_expire(plan, keep).await {
            Err(error) if self.has_made_room(&error).await => self.try_expire(plan, keep).await,
            expired => expired,
        }
    }

    async fn try_expire(&self, plan: &ExpirePlan, keep: bool) -> Result<()> {
        let commit = self.log().commit(None, |state| {
            let steps = || plan.kept.iter().chain(&plan.removed);
            if let Some(moved) = steps().find(|step| state.version(&step.name) != Some(step.version)) {
                return Err(Refusal::RefMoved(moved.name.clone()).into());
            }
            let remove = |step: &PlannedStep| Action::RemoveRef { name: step.name.clone(), expected: step.version };
            let mut actions = if keep { state.keep(plan.removed.iter().map(|step| &step.name)) } else { Vec::new() };
            actions.extend(plan.removed.iter().map(remove));
            Ok(actions)
        });
        commit.await.map(drop)
    }
}
