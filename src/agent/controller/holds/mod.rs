//! Holds: data that agents of a site fetch and hold for pods, by commitments. Needs for the same names at a site share one.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::finding::{Finding, Progress};
use super::needs::{Asked, Need};
use crate::agent::client::Client;
use crate::agent::routing::AgentSelector;
use crate::agent::view::{Commitment, Task, TaskState};
use crate::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result};
use crate::id::RepositoryId;
use crate::identity::Identity;
use crate::name::Name;
use crate::placement::Candidate;
use crate::span;

/// Interval at which a warm is asked for its progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);
/// Pauses between the tries of what fails.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(30));
/// Calls under way.
const CALLS_MAX: usize = 32;
/// Time for a call to an agent: a commit reads the maps of all trees.
const CALL_MAX: Duration = Duration::from_mins(1);
/// Lease of what is held for workloads: time for their pods to start.
const LEASE: Duration = Duration::from_mins(30);
/// Interval at which a lease is renewed.
const RENEW_EVERY: Duration = Duration::from_mins(10);
/// Interval at which what is there and waited for by nobody is compared with the workloads that run.
const COMPARE_EVERY: Duration = Duration::from_secs(30);
/// Spellings of the names of a hold that are remembered.
const ASKED_MAX: usize = 64;
/// Progress from which on its own pace tells how long the rest takes.
const PACE_AFTER: Duration = Duration::from_secs(5);

/// Names that a site lacks.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// Id of their commitment.
    id: String,
    site: String,
    names: Arc<BTreeSet<Name>>,
    /// Names as the pods have them.
    asked: Asked,
    /// Bytes that the site lacks, by inventories; 0: they are held all the same, so that they stay.
    missing: u64,
    /// Time of the look.
    at: Instant,
    /// Seconds until they are there, by the hint: median and 90th percentile.
    estimate: (f64, f64),
}

/// Agents that fetch and hold.
#[derive(Clone)]
pub(in crate::agent) struct Holders {
    /// This agent, which passes requests on.
    pub(super) client: Client,
    /// Agents that are asked; at a site without any, one of its agents is.
    pub(super) agents: Vec<Identity>,
    pub(super) repository: RepositoryId,
}

/// Limits of what a controller holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct HoldLimits {
    /// Warms at a time.
    pub(super) warms: usize,
    /// Holds at a time, in whatever state.
    pub(super) held: usize,
    /// Time for which what is there counts as in use after pods have waited for it.
    pub(super) stays: Duration,
}

/// Commitments, and how far each is.
pub(super) struct Holds {
    holders: Holders,
    limits: HoldLimits,
    by_id: BTreeMap<String, Hold>,
    /// Ids that a call is under way for.
    busy: BTreeSet<String>,
    calls: JoinSet<(String, Option<Hold>)>,
    compared: Instant,
}

/// A commitment, or one that is being made.
#[derive(Clone, Debug)]
struct Hold {
    wanted: Wanted,
    waits: Waits,
    /// Agent that was asked, and whether it has answered.
    agent: Option<(Client, bool)>,
    begun: Instant,
    /// Missing bytes at the beginning.
    missing: u64,
    state: HoldState,
    due: Instant,
    renewed: Instant,
    /// Beginning of the last call that the holder has answered.
    confirmed: Instant,
    failing: Option<Instant>,
    pauses: Backoff,
}

/// Workloads that wait for a hold, or have waited.
#[derive(Clone, Debug)]
struct Waits {
    /// Namespace that it counts to: the one whose workload began it, as long as this waits.
    namespace: String,
    /// Time of the last pass in which one waited.
    last: Instant,
    /// Names as they have asked for them, of [`ASKED_MAX`] spellings.
    asked: BTreeSet<Asked>,
}

#[derive(Clone, Debug)]
enum HoldState {
    Begun,
    Warming(Progress),
    There(u64),
    Failing(String),
}

impl Wanted {
    /// Names of a need that a look at `at` has found; `owner` is the controller.
    pub(super) fn new((owner, at): (&str, Instant), need: &Need, names: Vec<Name>, candidate: &Candidate) -> Self {
        let names: BTreeSet<Name> = names.into_iter().collect();
        Self {
            id: commitment_id(owner, &need.site, &names),
            at,
            site: need.site.clone(),
            names: Arc::new(names),
            asked: need.asked(),
            missing: candidate.bytes.missing + candidate.bytes.in_flight,
            estimate: (candidate.eta_s.p50, candidate.eta_s.p90),
        }
    }

    fn path(&self) -> String {
        format!("/v1/hints/{}", self.id)
    }
}

impl Holds {
    pub(super) fn new(holders: Holders, limits: HoldLimits) -> Self {
        let (by_id, busy, calls) = (BTreeMap::new(), BTreeSet::new(), JoinSet::new());
        Self { holders, limits, by_id, busy, calls, compared: Instant::now() }
    }

    /// Begins what is `wanted`, in this order, as far as there are slots and room, and releases the rest: what is there stays while
    /// workloads that run are `in_use` of it, unless others need its room.
    ///
    /// # Cancel safety
    /// Safe: leases run out.
    pub(super) async fn pass(&mut self, wanted: &[(Wanted, String)], in_use: impl Fn() -> BTreeSet<Asked>) {
        let now = Instant::now();
        self.settle(now).await;
        self.note(wanted, now);
        self.release(now, in_use);
        self.begin(wanted, now);
        self.call();
    }

    /// Notes who waits for what is held in the pass of `now`.
    fn note(&mut self, wanted: &[(Wanted, String)], now: Instant) {
        let waiting: BTreeSet<(&str, &str)> =
            wanted.iter().map(|(wanted, namespace)| (wanted.id.as_str(), namespace.as_str())).collect();
        for (Wanted { id, asked, .. }, namespace) in wanted {
            let Some(Hold { waits, .. }) = self.by_id.get_mut(id) else { continue };
            waits.last = now;
            if waits.asked.len() < ASKED_MAX {
                waits.asked.insert(*asked);
            }
            let is_left = !waiting.contains(&(id, &waits.namespace));
            if is_left && self.held_by(namespace) < self.share() {
                self.by_id.entry(id.clone()).and_modify(|hold| hold.waits.namespace.clone_from(namespace));
            }
        }
    }

    /// Begins what is wanted and not held, and doubts what looks contradict.
    fn begin(&mut self, wanted: &[(Wanted, String)], now: Instant) {
        for (wanted, namespace) in wanted {
            let id = &wanted.id;
            if self.busy.contains(id) {
                continue;
            }
            if let Some(hold) = self.by_id.get_mut(id) {
                if hold.is_contradicted(wanted) {
                    hold.doubt();
                }
            } else if (wanted.missing == 0 || self.has_slot(namespace)) && self.makes_room(namespace, now) {
                self.by_id.insert(id.clone(), Hold::new(wanted.clone(), namespace.clone()));
            }
        }
    }

    /// Makes the calls that are due.
    fn call(&mut self) {
        let now = Instant::now();
        let due = self.by_id.iter().filter(|(id, hold)| hold.due <= now && !self.busy.contains(*id));
        let due: Vec<(String, Hold)> = due.map(|(id, hold)| (id.clone(), hold.clone())).collect();
        for (id, hold) in due {
            // Releases of what was held at agents that do not answer delay nothing.
            let calls = self.busy.iter().filter(|id| self.by_id.contains_key(*id)).count();
            // Agents that do not answer leave half of the slots to others.
            if hold.failing.is_some() && 2 * self.retried() >= self.limits.warms.max(2) || calls >= CALLS_MAX {
                continue;
            }
            let holders = self.holders.clone();
            self.busy.insert(id.clone());
            self.calls.spawn(async move { (id, Some(hold.next(&holders).await)) });
        }
    }

    /// Takes what agents have answered, until `moment` or until no call is under way.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn settle(&mut self, moment: Instant) {
        while let Ok(Some(done)) = timeout_at(moment, self.calls.join_next()).await {
            let (id, hold) = done.unwrap_or_else(|error| resume_unwind(error.into_panic()));
            self.busy.remove(&id);
            if let (Some(hold), Some(known)) = (hold, self.by_id.get_mut(&id)) {
                // Passes have noted meanwhile who waits.
                *known = Hold { waits: known.waits.clone(), ..hold };
            }
        }
    }

    /// Finding about what is wanted.
    pub(super) fn finding(&self, wanted: &Wanted) -> Finding {
        let Some(hold) = self.by_id.get(&wanted.id) else { return Finding::Queued(wanted.missing) };
        if hold.is_contradicted(wanted) {
            return Finding::Queued(wanted.missing);
        }
        match &hold.state {
            HoldState::Begun => Finding::Queued(wanted.missing),
            HoldState::Warming(progress) => Finding::Warming(*progress),
            HoldState::There(bytes) => Finding::There(*bytes),
            HoldState::Failing(text) => {
                Finding::Failing(hold.failing.map_or(Duration::ZERO, |since| since.elapsed()), text.clone())
            }
        }
    }

    /// Time of the next call, or of the next answer.
    pub(super) fn due(&self) -> Option<Instant> {
        if !self.busy.is_empty() {
            return Some(Instant::now());
        }
        self.by_id.values().map(|hold| hold.due).min()
    }

    /// True if a warm may begin for a workload of `namespace`: one namespace has half of the slots at most.
    fn has_slot(&self, namespace: &str) -> bool {
        let taken: Vec<&Hold> = self.by_id.values().filter(|hold| hold.takes_slot()).collect();
        let own = taken.iter().filter(|hold| hold.waits.namespace == namespace).count();
        taken.len() < self.limits.warms && own < self.limits.warms.div_ceil(2)
    }

    /// Makes room for another hold of `namespace`; false if there is none. What nobody waits for gives way: that of the namespace with
    /// the most holds, and of these the one that was waited for the longest ago.
    fn makes_room(&mut self, namespace: &str, now: Instant) -> bool {
        let has_share = self.held_by(namespace) < self.share();
        if has_share && self.by_id.len() < self.limits.held {
            return true;
        }
        let idle = self.idle(now).filter(|(_, hold)| has_share || hold.waits.namespace == namespace);
        let gives_way =
            idle.max_by_key(|(_, Hold { waits, .. })| (self.held_by(&waits.namespace), Reverse(waits.last)));
        let Some(id) = gives_way.map(|(id, _)| id.clone()) else { return false };
        self.end(id);
        true
    }

    /// Holds of one namespace, at most.
    fn share(&self) -> usize {
        self.limits.held.div_ceil(2)
    }

    /// Holds that count to a namespace.
    fn held_by(&self, namespace: &str) -> usize {
        self.by_id.values().filter(|hold| hold.waits.namespace == namespace).count()
    }

    /// Holds that nobody waits for in the pass of `now`, and that no call is under way for.
    fn idle(&self, now: Instant) -> impl Iterator<Item = (&String, &Hold)> {
        self.by_id.iter().filter(move |(id, hold)| hold.waits.last < now && !self.busy.contains(*id))
    }

    /// Calls under way that try again what has failed.
    fn retried(&self) -> usize {
        let failing = |id: &&String| self.by_id.get(*id).is_some_and(|hold| hold.failing.is_some());
        self.busy.iter().filter(failing).count()
    }

    /// Releases what nothing wants any more.
    fn release(&mut self, now: Instant, in_use: impl Fn() -> BTreeSet<Asked>) {
        let idle: Vec<String> = self.idle(now).map(|(id, _)| id.clone()).collect();
        if idle.is_empty() {
            return;
        }
        let compares = self.compared.elapsed() >= COMPARE_EVERY;
        let used = if compares { in_use() } else { BTreeSet::new() };
        for id in idle {
            let Some(hold) = self.by_id.get(&id) else { continue };
            let is_there = matches!(hold.state, HoldState::There(_));
            let stays = || !compares || hold.waits.may_use(&used, self.limits.stays);
            if !(is_there && hold.renewed.elapsed() < LEASE && stays()) {
                self.end(id);
            }
        }
        if compares {
            self.compared = Instant::now();
        }
    }

    /// Releases a hold.
    fn end(&mut self, id: String) {
        if let Some(hold) = self.by_id.remove(&id) {
            // Until it is released, the same names are not committed again.
            self.busy.insert(id.clone());
            self.calls.spawn(async move {
                hold.release().await;
                (id, None)
            });
        }
    }
}

impl Waits {
    /// True if workloads that have waited may still need the data: by the names of those that are `used`, or within the time `stays`.
    fn may_use(&self, used: &BTreeSet<Asked>, stays: Duration) -> bool {
        let since = self.last.elapsed();
        // There may be further spellings.
        let is_full = self.asked.len() >= ASKED_MAX;
        since < stays || is_full && since < LEASE || !self.asked.is_disjoint(used)
    }
}

impl Hold {
    fn new(wanted: Wanted, namespace: String) -> Self {
        let now = Instant::now();
        Self {
            missing: wanted.missing,
            waits: Waits { namespace, last: now, asked: BTreeSet::from([wanted.asked]) },
            wanted,
            agent: None,
            begun: now,
            state: HoldState::Begun,
            due: now,
            renewed: now,
            confirmed: now,
            failing: None,
            pauses: PAUSES,
        }
    }

    /// True if it counts among the warms: it is under way, at an agent that answers.
    fn takes_slot(&self) -> bool {
        matches!(self.state, HoldState::Begun | HoldState::Warming(_)) && self.wanted.missing > 0
    }

    /// True if a look has found less than the holder had before: its cache was lost, or a name is that of another tree.
    fn is_contradicted(&self, wanted: &Wanted) -> bool {
        matches!(self.state, HoldState::There(_)) && wanted.missing > 0 && self.confirmed < wanted.at
    }

    /// Has it committed again, which finds out.
    fn doubt(&mut self) {
        if let Some((_, has_answered)) = &mut self.agent {
            *has_answered = false;
        }
        self.due = Instant::now();
    }

    /// The hold after another call.
    async fn next(mut self, holders: &Holders) -> Self {
        let begun = Instant::now();
        let called = timeout(CALL_MAX, self.call(holders)).await;
        let called = called.unwrap_or_else(|_| Err(Error::unreachable("no answer in time").at(&self.wanted.site)));
        let now = Instant::now();
        match called {
            Ok(state) => {
                let moves = match (&state, &self.state) {
                    (HoldState::Warming(now), HoldState::Warming(before)) => now.missing < before.missing,
                    (HoldState::There(_), _) => true,
                    _ => false,
                };
                if moves {
                    (self.failing, self.pauses) = (None, PAUSES);
                }
                let every = if matches!(state, HoldState::There(_)) { RENEW_EVERY } else { PROGRESS_EVERY };
                Self { state, due: now + every, confirmed: begun, ..self }
            }
            Err(error) => {
                self.failing.get_or_insert(now);
                let state = HoldState::Failing(error.to_string());
                Self { state, due: now + self.pauses.pause(), ..self }
            }
        }
    }

    /// Commits what is not committed, and asks how far the rest is.
    async fn call(&mut self, holders: &Holders) -> Result<HoldState> {
        if let Some((agent, true)) = &self.agent {
            let agent = agent.clone();
            match self.progress(&agent).await {
                // It was restarted, or its lease has ended.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                progress => return progress,
            }
        }
        let agent = self.commit(holders).await?;
        self.progress(&agent).await
    }

    /// Has an agent of the site fetch and hold the names.
    async fn commit(&mut self, holders: &Holders) -> Result<Client> {
        let holder = holders.client.clone().routed_to(Some(holders.for_commitment(&self.wanted)?));
        // Before it is asked: it may have committed although its answer is lost.
        self.agent = Some((holder.clone(), false));
        let body = json!({
            "site": self.wanted.site,
            "inputs": *self.wanted.names,
            "lease": span::show(LEASE),
            "repository": holders.repository.to_string(),
        });
        let path = self.wanted.path();
        let (commit, outcome) = (format!("{path}/commit"), format!("{path}/outcome"));
        let committed: Result<(Commitment, Client)> = match holder.begin(&commit, &body).await {
            // One of the names is that of another tree since.
            Err(error) if error.kind() == ErrorKind::Conflict => {
                let _ended: Commitment = holder.post(&outcome, &json!({})).await?;
                holder.begin(&commit, &body).await
            }
            committed => committed,
        };
        let (commitment, agent) = committed?;
        self.agent = Some((agent.clone(), true));
        let now = Instant::now();
        (self.begun, self.missing, self.renewed) = (now, commitment.missing_bytes, now);
        Ok(agent)
    }

    /// Asks how far a warm is, and renews its lease.
    async fn progress(&mut self, agent: &Client) -> Result<HoldState> {
        let path = self.wanted.path();
        let commitment: Commitment = if self.renewed.elapsed() >= RENEW_EVERY {
            let renewed = agent.post(&format!("{path}/outcome"), &json!({ "lease": span::show(LEASE) })).await?;
            self.renewed = Instant::now();
            renewed
        } else {
            agent.get(&path).await?
        };
        if commitment.ready {
            return Ok(HoldState::There(commitment.bytes));
        }
        if let Some(task) = &commitment.task {
            let running = runs(agent, task, &path).await;
            if !matches!(running, Ok(true)) {
                // Another commit fetches the rest.
                self.agent = Some((agent.clone(), false));
            }
            running?;
        }
        let seconds = self.seconds_left(commitment.missing_bytes);
        Ok(HoldState::Warming(Progress { missing: commitment.missing_bytes, bytes: commitment.bytes, seconds }))
    }

    /// Ends the commitment, if one was asked for.
    async fn release(&self) {
        let Some((agent, _)) = &self.agent else { return };
        let path = format!("{}/outcome", self.wanted.path());
        let ended = timeout(CALL_MAX, agent.post::<Commitment>(&path, &json!({}))).await;
        if let Ok(Err(error)) = ended {
            tracing::debug!("what no workload waits for any more is held until its lease ends: {error:?}");
        }
    }

    /// Seconds until `missing` bytes are there, in the median and at the 90th percentile: by the pace so far, else by the hint.
    fn seconds_left(&self, missing: u64) -> Option<(u64, u64)> {
        let (elapsed, fetched) = (self.begun.elapsed(), self.missing.saturating_sub(missing));
        let (median, most) = self.wanted.estimate;
        let part = missing as f64 / self.missing.max(1) as f64;
        let whole = |seconds: f64| Duration::try_from_secs_f64(seconds.ceil()).ok().map(|time| time.as_secs());
        if fetched > 0 && elapsed >= PACE_AFTER {
            let left = whole(elapsed.as_secs_f64() * missing as f64 / fetched as f64)?;
            return Some((left, left));
        }
        Some((whole(median * part)?, whole(most * part)?)).filter(|(left, _)| *left > 0)
    }
}

impl Holders {
    /// Agent that holds what is wanted: always the same one, as long as it is among the holders.
    fn for_commitment(&self, wanted: &Wanted) -> Result<AgentSelector> {
        let own = self.agents.iter().filter(|holder| holder.site() == wanted.site);
        let weight =
            |holder: &&Identity| *blake3::hash(format!("{} {}", holder.path(), wanted.id).as_bytes()).as_bytes();
        match own.max_by_key(weight) {
            Some(holder) => Ok(AgentSelector::Agent(holder.clone())),
            None => wanted.site.parse(),
        }
    }
}

/// True if the task of a commitment runs, or has just made it ready.
///
/// # Errors
/// The task's error.
async fn runs(agent: &Client, task: &str, commitment: &str) -> Result<bool> {
    let task: Task = agent.get(&format!("/v1/tasks/{task}")).await?;
    if task.state == TaskState::Running {
        return Ok(true);
    }
    let now: Commitment = agent.get(commitment).await?;
    if now.ready {
        return Ok(true);
    }
    let message = task.error.as_ref().and_then(|error| error.get("message")).and_then(|text| text.as_str());
    match message {
        Some(message) => Err(Error::unreachable("warm has failed").got(message.to_owned())),
        None => Ok(false),
    }
}

/// Id under which a controller holds `names` at a site: what one releases, another may still hold.
fn commitment_id(owner: &str, site: &str, names: &BTreeSet<Name>) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(owner.as_bytes()).update(b"\n").update(site.as_bytes());
    for name in names {
        hasher.update(b"\n").update(name.as_str().as_bytes());
    }
    format!("h_{}", &hasher.finalize().to_hex()[..32])
}
