//! Holds: data that agents of a site fetch and hold for pods, by commitments. Needs for the same names at a site share one.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::finding::{Finding, Progress};
use super::needs::Need;
use crate::agent::client::Client;
use crate::agent::pods::PodNames;
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
/// Progress from which on its own pace tells how long the rest takes.
const PACE_AFTER: Duration = Duration::from_secs(5);

/// Names that a site lacks.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// Id of their commitment.
    id: String,
    site: String,
    names: BTreeSet<Name>,
    /// Names as the pods have them.
    asked: PodNames,
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

/// Commitments, and how far each is.
pub(super) struct Holds {
    holders: Holders,
    /// Warms at a time.
    warms: usize,
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
    /// Namespace whose workload began it.
    namespace: String,
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
            names,
            asked: need.names.clone(),
            missing: candidate.bytes.missing + candidate.bytes.in_flight,
            estimate: (candidate.eta_s.p50, candidate.eta_s.p90),
        }
    }

    fn path(&self) -> String {
        format!("/v1/hints/{}", self.id)
    }
}

impl Holds {
    pub(super) fn new(holders: Holders, warms: usize) -> Self {
        let (by_id, busy, calls) = (BTreeMap::new(), BTreeSet::new(), JoinSet::new());
        Self { holders, warms, by_id, busy, calls, compared: Instant::now() }
    }

    /// Begins what is `wanted`, in this order, as far as there are slots, and releases the rest: what is there stays while workloads that
    /// run are `in_use` of it, at most until its lease ends.
    ///
    /// # Cancel safety
    /// Safe: leases run out.
    pub(super) async fn pass(
        &mut self,
        wanted: &[(Wanted, String)],
        in_use: impl Fn() -> BTreeSet<(String, PodNames)>,
    ) {
        self.settle(Instant::now()).await;
        self.release(wanted, in_use);
        for (wanted, namespace) in wanted {
            let id = &wanted.id;
            if self.busy.contains(id) {
                continue;
            }
            if let Some(hold) = self.by_id.get_mut(id) {
                if hold.is_contradicted(wanted) {
                    hold.doubt();
                }
            } else if wanted.missing == 0 || self.has_slot(namespace) {
                self.by_id.insert(id.clone(), Hold::new(wanted.clone(), namespace.clone()));
            }
        }
        let now = Instant::now();
        let due = self.by_id.iter().filter(|(id, hold)| hold.due <= now && !self.busy.contains(*id));
        let due: Vec<(String, Hold)> = due.map(|(id, hold)| (id.clone(), hold.clone())).collect();
        for (id, hold) in due {
            // Agents that do not answer leave half of the slots to others.
            if hold.failing.is_some() && 2 * self.retried() >= self.warms.max(2) || self.calls.len() >= CALLS_MAX {
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
            if let (Some(hold), true) = (hold, self.by_id.contains_key(&id)) {
                self.by_id.insert(id, hold);
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
        let own = taken.iter().filter(|hold| hold.namespace == namespace).count();
        taken.len() < self.warms && own < self.warms.div_ceil(2)
    }

    /// Calls under way that try again what has failed.
    fn retried(&self) -> usize {
        let failing = |id: &&String| self.by_id.get(*id).is_some_and(|hold| hold.failing.is_some());
        self.busy.iter().filter(failing).count()
    }

    /// Releases what nothing wants any more.
    fn release(&mut self, wanted: &[(Wanted, String)], in_use: impl Fn() -> BTreeSet<(String, PodNames)>) {
        let ids: BTreeSet<&str> = wanted.iter().map(|(wanted, _)| wanted.id.as_str()).collect();
        let mut others: Vec<String> = self.by_id.keys().filter(|id| !ids.contains(id.as_str())).cloned().collect();
        others.retain(|id| !self.busy.contains(id));
        if others.is_empty() {
            return;
        }
        let compares = self.compared.elapsed() >= COMPARE_EVERY;
        let used = if compares { in_use() } else { BTreeSet::new() };
        for id in others {
            let Some(hold) = self.by_id.get(&id) else { continue };
            let is_there = matches!(hold.state, HoldState::There(_));
            let uses = || used.contains(&(hold.wanted.site.clone(), hold.wanted.asked.clone()));
            if is_there && hold.renewed.elapsed() < LEASE && (!compares || uses()) {
                continue;
            }
            if let Some(hold) = self.by_id.remove(&id) {
                // Until it is released, the same names are not committed again.
                self.busy.insert(id.clone());
                self.calls.spawn(async move {
                    hold.release().await;
                    (id, None)
                });
            }
        }
        if compares {
            self.compared = Instant::now();
        }
    }
}

impl Hold {
    fn new(wanted: Wanted, namespace: String) -> Self {
        let now = Instant::now();
        Self {
            missing: wanted.missing,
            wanted,
            namespace,
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
            "inputs": self.wanted.names,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::check_hint_id;

    #[test]
    fn the_same_data_at_a_site_is_held_once() {
        let names = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<BTreeSet<Name>>();
        let id = commitment_id("gates", "home", &names(&["a", "b"]));
        check_hint_id(&id).unwrap();
        assert_eq!(id, commitment_id("gates", "home", &names(&["b", "a", "a"])));
        assert_ne!(id, commitment_id("kueue", "home", &names(&["a", "b"])));
        for (site, other) in [("cloud", &["a", "b"][..]), ("home", &["a"]), ("home", &["a/b"])] {
            assert_ne!(id, commitment_id("gates", site, &names(other)));
        }
    }

    #[test]
    fn a_namespace_has_half_of_the_slots() {
        let client = Client::at("/none");
        let holders = Holders { client, agents: Vec::new(), repository: RepositoryId::random() };
        let mut holds = Holds::new(holders, 4);
        let wanted = Wanted {
            id: String::new(),
            site: "home".to_owned(),
            names: BTreeSet::new(),
            asked: PodNames::default(),
            missing: 1,
            at: Instant::now(),
            estimate: (0.0, 0.0),
        };
        let begin = |holds: &mut Holds, id: &str, namespace: &str| {
            let hold = Hold::new(Wanted { id: id.to_owned(), ..wanted.clone() }, namespace.to_owned());
            holds.has_slot(namespace) && holds.by_id.insert(id.to_owned(), hold).is_none()
        };
        assert!(begin(&mut holds, "1", "a") && begin(&mut holds, "2", "a") && !begin(&mut holds, "3", "a"));
        assert!(begin(&mut holds, "4", "b") && begin(&mut holds, "5", "c") && !begin(&mut holds, "6", "d"));
        // Neither data that is there nor an agent that does not answer takes one.
        holds.by_id.get_mut("1").unwrap().state = HoldState::There(1);
        holds.by_id.get_mut("5").unwrap().state = HoldState::Failing(String::new());
        assert!(begin(&mut holds, "7", "a") && begin(&mut holds, "8", "d") && !begin(&mut holds, "9", "e"));
    }

    #[test]
    fn a_later_look_outvotes_what_a_holder_has_said() {
        let wanted = |missing| Wanted {
            id: String::new(),
            site: "home".to_owned(),
            names: BTreeSet::new(),
            asked: PodNames::default(),
            missing,
            at: Instant::now() + Duration::from_secs(1),
            estimate: (0.0, 0.0),
        };
        let mut hold = Hold::new(wanted(0), "a".to_owned());
        hold.agent = Some((Client::at("/none"), true));
        assert!(!hold.takes_slot() && !hold.is_contradicted(&wanted(1)), "nothing is said yet");
        hold.state = HoldState::There(1);
        assert!(hold.is_contradicted(&wanted(1)) && !hold.is_contradicted(&wanted(0)));
        hold.doubt();
        assert!(hold.agent.as_ref().is_some_and(|(_, answered)| !answered) && hold.due <= Instant::now());
        // The holder has answered since.
        hold.confirmed = Instant::now() + Duration::from_secs(2);
        assert!(!hold.is_contradicted(&wanted(1)));
    }
}
