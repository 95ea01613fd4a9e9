//! Election of the one controller that acts, by a Lease of Kubernetes, as client-go does it
//! (<https://pkg.go.dev/k8s.io/client-go/tools/leaderelection>): clocks of machines are never compared.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::core::ObjectMeta;
use tokio::time::{Instant, sleep, timeout};

use super::api_server::{Role, in_time, trouble};
use crate::agent::state::AgentState;

/// Tries to take or renew a lease, in the time that it lasts.
const TRIES: u32 = 7;
/// Part of the lease's time after which a holder that could not renew it stops.
const RENEW_WITHIN: f64 = 2.0 / 3.0;

/// Part of this process in the election.
pub(super) struct Election {
    /// The agent, whose problems are those with the API server.
    agent: Arc<AgentState>,
    api: Api<Lease>,
    role: Role,
    /// This process.
    own: String,
    duration: Duration,
    /// The lease of another holder, as it was last seen to change.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Election {
    pub(super) fn new(
        agent: Arc<AgentState>,
        (api, role): (Api<Lease>, Role),
        (own, duration): (String, Duration),
    ) -> Self {
        Self { agent, api, role, own, duration, seen: None }
    }

    /// Waits until this process holds the lease.
    ///
    /// # Cancel safety
    /// Safe: a lease that was just taken runs out.
    pub(super) async fn win(&mut self) {
        loop {
            match self.round().await {
                Ok(true) => return self.agent.background.clear(self.role.election),
                Ok(false) => self.agent.background.clear(self.role.election),
                Err(error) => trouble(&self.agent, self.role.election, &format!("cannot take part: {error}")),
            }
            sleep(self.duration / TRIES).await;
        }
    }

    /// Renews the lease; returns once it is lost, or could not be renewed for so long that another may take it.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn hold(&mut self) {
        let mut renewed = Instant::now();
        let limit = self.duration.mul_f64(RENEW_WITHIN);
        loop {
            sleep(self.duration / TRIES).await;
            let Some(left) = limit.checked_sub(renewed.elapsed()) else { return };
            let begun = Instant::now();
            match timeout(left, self.round()).await {
                Ok(Ok(true)) => renewed = begun,
                Ok(Err(error)) => tracing::debug!("lease is not renewed: {error}"),
                Ok(Ok(false)) | Err(_) => return,
            }
        }
    }

    /// Gives the lease back, so that another controller need not wait.
    pub(super) async fn release(&self) {
        let released = async {
            let mut lease = in_time(self.api.get(self.role.lease)).await?;
            if holder(&lease) == Some(&self.own) {
                let spec = lease.spec.get_or_insert_default();
                (spec.holder_identity, spec.lease_duration_seconds) = (Some(String::new()), Some(1));
                in_time(self.api.replace(self.role.lease, &PostParams::default(), &lease)).await?;
            }
            Ok::<_, kube::Error>(())
        };
        if let Err(error) = released.await {
            tracing::debug!("lease is not given back: {error}");
        }
    }

    /// Takes or renews the lease if that is possible; true if this process holds it then.
    async fn round(&mut self) -> Result<bool, kube::Error> {
        let Some(mut lease) = in_time(self.api.get_opt(self.role.lease)).await? else {
            let metadata = ObjectMeta { name: Some(self.role.lease.to_owned()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            return taken(in_time(self.api.create(&PostParams::default(), &lease)).await);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        if !self.may_take(&spec) {
            return Ok(false);
        }
        lease.spec = Some(self.spec(Some(&spec)));
        // The version of the object makes two that take it at once conflict.
        taken(in_time(self.api.replace(self.role.lease, &PostParams::default(), &lease)).await)
    }

    /// True if the lease is this process's, is nobody's, or did not change for the time that its holder promised.
    fn may_take(&mut self, spec: &LeaseSpec) -> bool {
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder == self.own || holder.is_empty() {
            return true;
        }
        match &self.seen {
            Some((seen, since)) if seen == spec => {
                let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
                since.elapsed() >= seconds.map_or(self.duration, Duration::from_secs)
            }
            _ => {
                self.seen = Some((spec.clone(), Instant::now()));
                false
            }
        }
    }

    /// The lease as this process holds it, after the one `before`.
    fn spec(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let kept = before.filter(|before| before.holder_identity.as_deref() == Some(&self.own));
        let transitions = before.and_then(|before| before.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.own.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs().max(1)).ok(),
            acquire_time: kept.map_or_else(|| Some(now.clone()), |kept| kept.acquire_time.clone()),
            renew_time: Some(now),
            lease_transitions: Some(if kept.is_some() || before.is_none() { transitions } else { transitions + 1 }),
            ..LeaseSpec::default()
        }
    }
}

fn holder(lease: &Lease) -> Option<&String> {
    lease.spec.as_ref()?.holder_identity.as_ref()
}

/// True if the lease was written; false if another was faster.
fn taken(written: Result<Lease, kube::Error>) -> Result<bool, kube::Error> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => Ok(false),
        Err(error) => Err(error),
    }
}
