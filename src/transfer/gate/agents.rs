//! Connections and requests of each remote agent, over all transports.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::Admission;
use super::bucket::Bucket;
use crate::identity::Identity;
use crate::limits::MIB;
use crate::transfer::protocol::limits::REQUESTS_MAX;

/// Approximate maximum number of remembered agents: those without a link go first.
const KNOWN_MAX: usize = 1024;

/// Memory limit of an agent's open requests, over all of its connections: those of some hundred thousand chunks.
const REQUESTED_MAX: u64 = 4 * MIB;

/// All remote agents.
#[derive(Debug)]
pub(super) struct Agents {
    limits: Admission,
    began: Instant,
    known: Mutex<HashMap<Identity, AgentUsage>>,
}

#[derive(Debug)]
struct AgentUsage {
    links: usize,
    requests: Bucket,
    work: Arc<Semaphore>,
    /// Bytes of memory of its open requests.
    requested: Arc<AtomicU64>,
}

/// Admission of a link or a call of a remote agent; it counts until this is dropped.
#[derive(Debug)]
pub struct ConnectionPermit {
    agents: Option<(Arc<Agents>, Identity)>,
    work: Arc<Semaphore>,
    requested: Arc<AtomicU64>,
    /// Part of these bytes that belongs to this link.
    own: AtomicU64,
}

impl Agents {
    pub(super) fn new(limits: Admission) -> Self {
        Self { limits, began: Instant::now(), known: Mutex::default() }
    }

    /// Links of all agents.
    pub(super) fn links(&self) -> usize {
        self.known().values().map(|known| known.links).sum()
    }

    /// Admits one more link of `agent`, or returns the reason of a refusal.
    pub(super) fn admit(self: &Arc<Self>, agent: &Identity) -> Result<ConnectionPermit, String> {
        self.admit_at(agent, self.began.elapsed())
    }

    fn admit_at(self: &Arc<Self>, agent: &Identity, now: Duration) -> Result<ConnectionPermit, String> {
        let limits = self.limits;
        let mut known = self.known();
        let taken = known.values().map(|known| known.links).sum::<usize>();
        let free = limits.links.saturating_sub(taken);
        if free == 0 {
            return Err(format!("all {} connections are taken", limits.links));
        }
        if known.len() >= KNOWN_MAX {
            known.retain(|_, known| known.links > 0 || !known.requests.is_full(now));
        }
        let new = || AgentUsage {
            links: 0,
            requests: Bucket::new(limits.requests_per_second, now),
            work: Arc::new(Semaphore::new(REQUESTS_MAX as usize)),
            requested: Arc::default(),
        };
        let own = known.entry(agent.clone()).or_insert_with(new);
        if own.links >= limits.links_per_agent {
            return Err(format!("too many connections of one agent: at most {}", limits.links_per_agent));
        }
        // Leaves connections for new agents: one more is for an agent with less than half as many as are free.
        if 2 * own.links > free {
            return Err(format!("too many connections of one agent, while few of all {} are free", limits.links));
        }
        // Connecting counts as a request, so reconnecting does not evade the rate.
        if !own.requests.take(now) {
            return Err(too_many_requests(limits.requests_per_second));
        }
        own.links += 1;
        let agents = Some((Arc::clone(self), agent.clone()));
        let (work, requested) = (Arc::clone(&own.work), Arc::clone(&own.requested));
        Ok(ConnectionPermit { agents, work, requested, own: AtomicU64::new(0) })
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Identity, AgentUsage>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionPermit {
    /// Permit of a process of this node, whose requests are not limited.
    pub(in crate::transfer) fn of_this_node() -> Self {
        let work = Arc::new(Semaphore::new(REQUESTS_MAX as usize));
        Self { agents: None, work, requested: Arc::default(), own: AtomicU64::new(0) }
    }

    /// Admits one more request now, or returns the reason of a refusal.
    pub(in crate::transfer) fn admit_request(&self) -> Result<(), String> {
        self.agents.as_ref().map_or(Ok(()), |(agents, _)| self.admit_request_at(agents.began.elapsed()))
    }

    fn admit_request_at(&self, now: Duration) -> Result<(), String> {
        let Some((agents, agent)) = &self.agents else { return Ok(()) };
        let may = agents.known().get_mut(agent).is_none_or(|known| known.requests.take(now));
        if may { Ok(()) } else { Err(too_many_requests(agents.limits.requests_per_second)) }
    }

    /// Records that open requests of this link take `bytes` of memory.
    pub(in crate::transfer) fn set_request_memory(&self, bytes: u64) {
        let before = self.own.swap(bytes, Ordering::AcqRel);
        // Atomics wrap, so this also subtracts.
        self.requested.fetch_add(bytes.wrapping_sub(before), Ordering::AcqRel);
    }

    /// Checks the memory of all open requests of its agent, or returns the reason of a refusal.
    pub(in crate::transfer) fn check_request_memory(&self) -> Result<(), String> {
        if self.requested.load(Ordering::Acquire) <= REQUESTED_MAX {
            return Ok(());
        }
        Err(format!("too many chunks are requested at a time: their lists may take {} MiB", REQUESTED_MAX / MIB))
    }

    /// Permit for one lookup on its behalf: as many at a time as one link may have requests, over all links of the
    /// agent.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::transfer) fn work(&self) -> impl Future<Output = Option<OwnedSemaphorePermit>> + Send + 'static {
        let work = Arc::clone(&self.work);
        async move { work.acquire_owned().await.ok() }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.set_request_memory(0);
        if let Some((agents, agent)) = &self.agents
            && let Some(known) = agents.known().get_mut(agent)
        {
            known.links -= 1;
        }
    }
}

fn too_many_requests(most: u32) -> String {
    format!("too many requests of one agent: at most {most} a second")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(name: &str) -> Identity {
        Identity::new("site", name).unwrap()
    }

    #[tokio::test]
    async fn an_agent_has_so_many_links_and_requests_and_leaves_room_for_others() {
        let limits = Admission { links: 10, links_per_agent: 4, requests_per_second: 5, ..Admission::default() };
        let agents = Arc::new(Agents::new(limits));
        let now = Duration::from_secs(5);
        let held: Vec<ConnectionPermit> = (0..4).map(|_| agents.admit_at(&agent("a"), now).unwrap()).collect();
        let refusal = agents.admit_at(&agent("a"), now).unwrap_err();
        assert_eq!(refusal, "too many connections of one agent: at most 4");
        let other = agents.admit_at(&agent("b"), now).unwrap();
        assert_eq!(agents.links(), 5);
        // The links took four of ten.
        assert_eq!((0..100).filter(|n| held[n % 4].admit_request_at(now).is_ok()).count(), 6, "over all of its links");
        assert!(
            held[0].admit_request_at(now).unwrap_err().contains("at most 5 a second")
                && other.admit_request_at(now).is_ok()
        );
        drop(held);
        let again = agents.admit_at(&agent("a"), now).unwrap_err();
        assert!(again.contains("too many requests"), "coming again gives no more");
        assert!(agents.admit_at(&agent("a"), now + Duration::from_secs(1)).is_ok());
        assert_eq!(agents.links(), 1);
    }

    #[tokio::test]
    async fn a_few_agents_do_not_take_all_links() {
        let agents = Arc::new(Agents::new(Admission { requests_per_second: 100_000, ..Admission::default() }));
        let mut held = Vec::new();
        for n in 0..12 {
            held.extend(std::iter::from_fn(|| agents.admit(&agent(&format!("a{n}"))).ok()));
        }
        assert!((490..510).contains(&agents.links()), "{}", agents.links());
        assert!(agents.admit(&agent("late")).is_ok());
    }

    #[tokio::test]
    async fn open_requests_of_an_agent_take_so_much_memory_over_all_of_its_links() {
        let agents = Arc::new(Agents::new(Admission::default()));
        let [first, second] = [0, 1].map(|_| agents.admit(&agent("a")).unwrap());
        first.set_request_memory(REQUESTED_MAX);
        assert!(first.check_request_memory().is_ok() && second.check_request_memory().is_ok());
        second.set_request_memory(1);
        assert!(first.check_request_memory().is_err() && second.check_request_memory().unwrap_err().contains("4 MiB"));
        assert!(agents.admit(&agent("b")).unwrap().check_request_memory().is_ok(), "others have their own");
        first.set_request_memory(1);
        second.set_request_memory(REQUESTED_MAX - 1);
        assert!(second.check_request_memory().is_ok());
        drop(second);
        first.set_request_memory(REQUESTED_MAX);
        assert!(first.check_request_memory().is_ok(), "a link that is gone holds nothing");
    }

    #[tokio::test]
    async fn all_links_together_are_bounded_and_who_is_gone_is_forgotten() {
        let agents = Arc::new(Agents::new(Admission { links: 3, ..Admission::default() }));
        let held: Vec<ConnectionPermit> = (0..3).map(|n| agents.admit(&agent(&format!("a{n}"))).unwrap()).collect();
        assert_eq!(agents.admit(&agent("b")).unwrap_err(), "all 3 connections are taken");
        drop(held);
        let slow = Admission { requests_per_second: u32::MAX, ..Admission::default() };
        let agents = Arc::new(Agents::new(slow));
        for n in 0..5 * KNOWN_MAX {
            drop(agents.admit(&agent(&format!("a{n}"))).unwrap());
        }
        assert!(agents.known().len() <= KNOWN_MAX + 1, "{}", agents.known().len());
    }
}
