//! Expire: steps + policy -> plan -> one commit that removes names.
//!
//! Nothing but names goes: what no other name needs is for the next collect to free.

mod plan;
#[cfg(test)]
mod tests;

pub use plan::{ExpirePlan, ExpirePolicy, PlannedStep, Reason};

use self::plan::plan;
use crate::error::Result;
use crate::repository::log::{Action, Refusal};
use crate::repository::{Name, Repository, Run};

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

    /// Carries out `plan` in one commit. Steps that came after it was made stay.
    ///
    /// # Errors
    /// Conflict, if a step of the plan, kept or not, has been saved again or removed since: then nothing is removed.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn expire(&self, plan: &ExpirePlan) -> Result<()> {
        let commit = self.log().commit(None, |state| {
            let steps = || plan.kept.iter().chain(&plan.removed);
            if let Some(moved) = steps().find(|step| state.version(&step.name) != Some(step.version)) {
                return Err(Refusal::RefMoved(moved.name.clone()).into());
            }
            let remove = |step: &PlannedStep| Action::RemoveRef { name: step.name.clone(), expected: step.version };
            Ok(plan.removed.iter().map(remove).collect())
        });
        commit.await.map(drop)
    }
}
