//! Manifests that each agent may read, decided before any lookup, so that a forbidden and an absent manifest are the
//! same: a miss.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::id::ManifestId;
use crate::identity::Identity;
use crate::name::Name;
use crate::repository::log::State;

/// Maximum number of agents that are remembered.
const AGENTS_MAX: usize = 32;
/// Maximum number of misses of one agent that are remembered.
const MISSES_MAX: usize = 1024;
/// Maximum number of misses of one agent in that time for which the log is read at once.
const LOOKS: u32 = 4;
/// Lifetime of an agent's entry: rules change, too.
const LASTING: Duration = Duration::from_secs(1);

/// Rights of recent agents, in one repository.
#[derive(Debug, Default)]
pub(super) struct Rights(Mutex<VecDeque<AgentRights>>);

/// Rights of one agent.
#[derive(Debug)]
struct AgentRights {
    /// None: a process of this node, which may read everything.
    agent: Option<Identity>,
    /// Entry of the log that they follow, and the time since when that is known.
    seq: u64,
    since: Instant,
    /// Readable manifests; sorted.
    readable: Vec<ManifestId>,
    /// Manifests that it requested and did not get, forbidden or absent.
    missed: BTreeSet<ManifestId>,
    /// Reads of the log on its behalf that skipped the pause.
    looks: u32,
}

impl Rights {
    /// True if `agent` may read `manifest`; `may` decides by name.
    pub(super) fn has(
        &self,
        agent: Option<&Identity>,
        state: &State,
        may: impl Fn(&Name) -> bool,
        manifest: &ManifestId,
    ) -> bool {
        let mut all = self.all();
        own(&mut all, agent, state, may).readable.binary_search(manifest).is_ok()
    }

    /// True if `agent` missed `manifest` a moment ago, at the same entry of the log.
    pub(super) fn is_missed(&self, agent: Option<&Identity>, state: &State, manifest: &ManifestId) -> bool {
        let all = self.all();
        all.iter().any(|own| own.is_of(agent, state.seq) && own.missed.contains(manifest))
    }

    /// True if the log may be read at once for a miss of `agent`: for a few misses, or always for a process of this
    /// node.
    pub(super) fn may_hurry(&self, agent: Option<&Identity>, state: &State, may: impl Fn(&Name) -> bool) -> bool {
        let mut all = self.all();
        let own = own(&mut all, agent, state, may);
        own.looks = own.looks.saturating_add(1);
        agent.is_none() || own.looks <= LOOKS
    }

    /// Records that `agent` missed `manifest`.
    pub(super) fn miss(
        &self,
        agent: Option<&Identity>,
        state: &State,
        may: impl Fn(&Name) -> bool,
        manifest: ManifestId,
    ) {
        let mut all = self.all();
        let own = own(&mut all, agent, state, may);
        if own.missed.len() == MISSES_MAX {
            own.missed.clear();
        }
        own.missed.insert(manifest);
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<AgentRights>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AgentRights {
    fn is_of(&self, agent: Option<&Identity>, seq: u64) -> bool {
        self.agent.as_ref() == agent && self.seq == seq && self.since.elapsed() < LASTING
    }
}

/// Rights of `agent`, computed if they are not remembered.
fn own<'a>(
    all: &'a mut VecDeque<AgentRights>,
    agent: Option<&Identity>,
    state: &State,
    may: impl Fn(&Name) -> bool,
) -> &'a mut AgentRights {
    let known = all.iter().position(|own| own.agent.as_ref() == agent);
    let known = known.and_then(|at| all.remove(at)).filter(|own| own.is_of(agent, state.seq));
    let own = known.unwrap_or_else(|| {
        let readable = state.refs.iter().filter(|(name, _)| may(name)).map(|(_, value)| value.manifest);
        let mut readable: Vec<ManifestId> = readable.collect();
        readable.sort_unstable();
        readable.dedup();
        let agent = agent.cloned();
        AgentRights { agent, seq: state.seq, since: Instant::now(), readable, missed: BTreeSet::new(), looks: 0 }
    });
    all.truncate(AGENTS_MAX - 1);
    all.push_front(own);
    &mut all[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(n: usize) -> ManifestId {
        ManifestId::of(&n.to_le_bytes())
    }

    #[test]
    fn what_is_remembered_is_bounded_and_goes_with_a_newer_log() {
        let (rights, mut state) = (Rights::default(), State::default());
        let agent = |n: usize| Identity::new("site", &format!("a{n}")).unwrap();
        for n in 0..10 * MISSES_MAX {
            rights.miss(Some(&agent(0)), &state, |_| true, manifest(n));
        }
        let last = manifest(10 * MISSES_MAX - 1);
        assert!(rights.is_missed(Some(&agent(0)), &state, &last));
        assert!(!rights.is_missed(Some(&agent(1)), &state, &last) && !rights.is_missed(None, &state, &last));
        for n in 1..10 * AGENTS_MAX {
            rights.miss(Some(&agent(n)), &state, |_| true, manifest(n));
        }
        let all = rights.all();
        assert!(all.len() == AGENTS_MAX && all.iter().all(|own| own.missed.len() <= MISSES_MAX));
        drop(all);
        let last = (agent(10 * AGENTS_MAX - 1), manifest(10 * AGENTS_MAX - 1));
        assert!(rights.is_missed(Some(&last.0), &state, &last.1));
        assert_eq!((0..100).filter(|_| rights.may_hurry(Some(&last.0), &state, |_| true)).count(), LOOKS as usize);
        assert_eq!((0..100).filter(|_| rights.may_hurry(None, &state, |_| true)).count(), 100);
        state.seq += 1;
        assert!(!rights.is_missed(Some(&last.0), &state, &last.1), "the log went on");
    }
}
