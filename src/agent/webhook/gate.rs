//! Scheduling gates: a pod is scheduled once its data is at its site, which a controller sees to
//! (<https://kubernetes.io/docs/concepts/scheduling-eviction/pod-scheduling-readiness/>).

use std::time::Duration;

use serde_json::{Value, json};

use super::Webhook;
use super::inject::{add, annotate};
use super::pod::Pod;
use crate::agent::advisor::HintCaller;
use crate::agent::api::hint_for_caller;
use crate::agent::kube::site_of_labels;
use crate::agent::pods::{GATE, GATED, PodAnnotations, ServiceAccount, WARM_AT};
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::placement::{Hint, HintCandidate, HintRequest, HintVerdict};

impl Webhook {
    /// Operations that give `pod` the gate: it waits until `names` are at its site. That is the one that it names, else that of its nodes, else
    /// the best by `hint`, else that of this agent.
    ///
    /// # Errors
    /// Usage, if nothing opens gates here, or for an unknown site; denied, if the data may not go there: it would wait for ever.
    pub(super) async fn gate(
        &self,
        (pod, account): (&Pod, &ServiceAccount),
        (wanted, names): (&PodAnnotations, &[Name]),
        hint: Option<&Hint>,
    ) -> Result<Vec<Value>> {
        if !self.config.gates {
            return Err(Error::usage("nothing in this cluster opens scheduling gates, so the pod would wait for ever")
                .at("towline.dev/gate")
                .help("set gates.enabled in the values of the chart"));
        }
        let site = self.site(pod, wanted, hint)?;
        // The policy of the chart sees by this that the webhook has answered.
        let mut operations = vec![annotate(WARM_AT, &site), annotate(GATED, "by-webhook")];
        if names.is_empty() {
            // There is nothing to wait for yet, such as a first step.
            return Ok(operations);
        }
        let about = HintRequest { candidates: vec![HintCandidate { site: site.clone() }], ..HintRequest::about(names) };
        let may = |name: &Name| self.rights.allow(account, name);
        // The verdict follows from the policy alone; what is missing is the controller's to find out.
        let caller = HintCaller::namespace(&account.namespace);
        match hint_for_caller(&self.agent, caller, &about, may, Duration::ZERO).await {
            Ok(hint) => check(&hint, &site)?,
            Err(error) if error.kind() == ErrorKind::Usage => return Err(error.at(WARM_AT)),
            Err(error) => return Err(error),
        }
        if pod.spec.scheduling_gates.is_none() {
            operations.push(add("/spec/schedulingGates", &json!([])));
        }
        if !pod.has_gate() {
            operations.push(add("/spec/schedulingGates/-", &json!({ "name": GATE })));
        }
        Ok(operations)
    }

    fn site(&self, pod: &Pod, wanted: &PodAnnotations, hint: Option<&Hint>) -> Result<String> {
        if let Some(site) = &wanted.warm_at {
            return Ok(site.clone());
        }
        let sites = self.agent.advisor(self.agent.origin(None)?)?.sites();
        let of_nodes = pod.spec.node_selector.as_ref().and_then(|labels| site_of_labels(&labels.0, &sites.sites));
        let best = || {
            let mut candidates = hint?.candidates.iter();
            candidates.find(|one| one.verdict == HintVerdict::Allow).map(|one| one.site.clone())
        };
        let own = self.agent.credentials()?.identity().site().to_owned();
        Ok(of_nodes.map(str::to_owned).or_else(best).unwrap_or(own))
    }
}

/// Checks that the data may go to the site of `hint`.
fn check(hint: &Hint, site: &str) -> Result<()> {
    let Some(candidate) = hint.candidates.first() else {
        return Err(Error::other("hint has no candidate").at(site.to_owned()));
    };
    match candidate.verdict {
        HintVerdict::Allow => Ok(()),
        HintVerdict::Deny => {
            let denial = candidate.deny.first().map(|denial| format!("{:.100}: {:.200}", denial.input, denial.rule));
            Err(Error::denied(format!("the data of this pod may not go to site {site}"))
                .got(denial.unwrap_or_default())
                .help("ask who signs the policy, or name another site: towline.dev/warm-at"))
        }
        HintVerdict::Unknown => {
            Err(Error::unreachable("no policy can be read that decides on the data of this pod").help("try again"))
        }
    }
}
