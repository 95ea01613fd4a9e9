//! Samples of inventories: agents are asked for chunks that they have said to hold.
//!
//! An agent that repeatedly lacks what its inventory lists, or that has sent wrong data, has a false inventory. Hints do not use it, and
//! say that what is there is unknown, until a sample agrees with it again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use tokio::time::{Instant, timeout};

use super::{Advisor, Epoch};
use crate::agent::state::AgentState;
use crate::error::Result;
use crate::identity::Identity;
use crate::name::Name;
use crate::repository::Saved;
use crate::repository::log::RefValue;
use crate::transfer::inventories::Counted;
use crate::transfer::peers::{Peer, Peers};
use crate::transfer::protocol::Runs;
use crate::work::blocking;

/// Fewest listed chunks that a sample judges by.
const LISTED_MIN: u64 = 4;
/// Fewest listed chunks that a sample judges by, one in this many that are asked for: an inventory lists one in 65,536 by mistake.
const LISTED_PART: u64 = 1024;
/// Percent of the listed chunks that must be there: some may have been evicted since the inventory.
const FOUND_PERCENT: u64 = 75;
/// Samples in a row that must disagree. An honest agent publishes a new inventory in between.
const DISAGREEMENTS: u32 = 3;
/// Agents that are asked at a time.
const ASKED_AT_ONCE: usize = 4;
/// Agents that are asked in a round, at most.
const ASKED_MAX: usize = 64;
/// Time limit for the answer of one agent.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Time after the last hint from which no more samples are drawn.
const IDLE_AFTER: Duration = Duration::from_mins(10);

/// Results of samples.
#[derive(Debug, Default)]
pub(super) struct Samples(Mutex<SamplesState>);

#[derive(Debug, Default)]
struct SamplesState {
    /// Agents whose last sample disagreed with their inventory.
    disagreeing: BTreeMap<Identity, Disagreement>,
    /// Agents that are avoided at present, as they sent wrong data.
    banned: BTreeSet<Identity>,
    /// Rounds of samples so far.
    rounds: usize,
    /// Time of the last hint.
    asked: Option<Instant>,
}

#[derive(Clone, Debug)]
struct Disagreement {
    /// Samples in a row that disagreed.
    in_a_row: u32,
    last: Sample,
}

/// Reason why an inventory is false.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Falsehood {
    /// It lists chunks that its agent lacks.
    Lacks(Sample),
    /// Its agent sent wrong data.
    WrongData,
}

/// Listed chunks of a part of a tree, and those of them that the agent has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    name: Name,
    listed: u64,
    found: u64,
}

impl fmt::Display for Falsehood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lacks(Sample { name, listed, found }) => {
                write!(f, "of {listed} chunks of {name} that it lists, its agent has {found}")
            }
            Self::WrongData => f.write_str("its agent has sent wrong data"),
        }
    }
}

impl Sample {
    fn agrees(&self) -> bool {
        self.found.saturating_mul(100) >= self.listed.saturating_mul(FOUND_PERCENT)
    }
}

impl Samples {
    /// Agents whose inventories are false, with the reasons.
    pub(super) fn falsehoods(&self) -> BTreeMap<Identity, Falsehood> {
        let state = self.lock();
        let lacking = state.disagreeing.iter().filter(|(_, found)| found.in_a_row >= DISAGREEMENTS);
        let lacking = lacking.map(|(agent, found)| (agent.clone(), Falsehood::Lacks(found.last.clone())));
        lacking.chain(state.banned.iter().map(|agent| (agent.clone(), Falsehood::WrongData))).collect()
    }

    fn record(&self, agent: Identity, sample: Sample) {
        let mut state = self.lock();
        if sample.agrees() {
            state.disagreeing.remove(&agent);
            return;
        }
        let in_a_row = state.disagreeing.get(&agent).map_or(0, |before| before.in_a_row) + 1;
        state.disagreeing.insert(agent, Disagreement { in_a_row, last: sample });
    }

    /// Records the agents that are avoided at present, as they sent wrong data.
    fn record_banned(&self, banned: BTreeSet<Identity>) {
        self.lock().banned = banned;
    }

    /// Records that a hint was asked for.
    pub(super) fn asked(&self) {
        self.lock().asked = Some(Instant::now());
    }

    /// Number of the next round; none if no hint was asked for lately.
    fn next_round(&self) -> Option<usize> {
        let mut state = self.lock();
        state.asked.filter(|asked| asked.elapsed() < IDLE_AFTER)?;
        state.rounds = state.rounds.wrapping_add(1);
        Some(state.rounds)
    }

    fn lock(&self) -> MutexGuard<'_, SamplesState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Draws samples for the hints of `state`'s agent every `every`.
///
/// # Cancel safety
/// Safe: it only reads.
pub(in crate::agent) async fn run(state: Arc<AgentState>, every: Duration) {
    let Ok(exchange) = state.exchange() else { return };
    loop {
        tokio::time::sleep(every).await;
        for advisor in state.advisors() {
            if let Err(error) = advisor.sample(exchange.peers()).await {
                tracing::info!("no sample of inventories is drawn: {error}");
            }
        }
    }
}

impl Advisor {
    /// Draws one sample of each inventory whose agent is among `peers`: a part of one of the trees that hints were asked for lately.
    ///
    /// # Errors
    /// As [`Advisor::fresh_epoch`] and [`Repository::saved_as`](crate::repository::Repository::saved_as).
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    async fn sample(&self, peers: &Peers) -> Result<()> {
        let samples = &self.0.samples;
        samples.record_banned(peers.banned());
        let Some(round) = samples.next_round() else { return Ok(()) };
        // An older inventory may list what was evicted since.
        let epoch = self.fresh_epoch().await?;
        let Some((name, value)) = self.sampled_tree(&epoch, round) else { return Ok(()) };
        let tree = Arc::new(self.0.repository.saved_as(&name, &value).await?);
        let live = peers.live().await.into_iter();
        let asked = live.filter_map(|peer| {
            let agent = peer.identity()?;
            let mut inventories = epoch.inventories.iter().chain(&epoch.false_inventories);
            inventories.find(|counted| counted.agent == agent).map(|counted| (peer, Arc::clone(counted)))
        });
        let asked: Vec<_> = asked.take(ASKED_MAX).collect();
        let answers = stream::iter(asked).map(|(peer, counted)| {
            let tree = &tree;
            async move { (counted.agent.clone(), draw_sample(&peer, counted, tree, round).await) }
        });
        let mut answers = answers.buffer_unordered(ASKED_AT_ONCE);
        while let Some((agent, sample)) = answers.next().await {
            // An agent that does not answer, or does not let this one read the tree, is not judged.
            if let Some(sample) = sample? {
                samples.record(agent, sample);
            }
        }
        Ok(())
    }

    /// One of the trees that hints were asked for lately.
    fn sampled_tree(&self, epoch: &Epoch, round: usize) -> Option<(Name, RefValue)> {
        let trees = self.0.inputs.trees();
        let map = trees.get(round % trees.len().max(1))?;
        let found = epoch.log.refs.iter().find(|(_, value)| value.map_key == *map);
        found.map(|(name, value)| (name.clone(), value.clone()))
    }
}

/// Asks `peer` for a part of `tree`'s list; none, if it does not answer or its inventory lists too few chunks of it.
async fn draw_sample(peer: &Peer, counted: Arc<Counted>, tree: &Arc<Saved>, round: usize) -> Result<Option<Sample>> {
    let chunks = tree.manifest.chunks.ids.len();
    let Ok(link) = peer.link() else { return Ok(None) };
    // A prime, so that parts differ from round to round.
    let from = u32::try_from(round.wrapping_mul(7919) % chunks.max(1)).unwrap_or_default();
    let Ok(Ok(survey)) = timeout(ANSWER_WITHIN, link.find(tree.value.manifest, from)).await else { return Ok(None) };
    let (name, tree) = (tree.name.clone(), Arc::clone(tree));
    let (listed, found) = blocking(move || Ok(compared(&counted, &tree, from..survey.upto, &survey.held))).await?;
    let asked = u64::from(survey.upto.saturating_sub(from));
    Ok((listed >= LISTED_MIN.max(asked / LISTED_PART)).then_some(Sample { name, listed, found }))
}

/// Number of chunks in `part` of the tree's list that the inventory lists, and how many of them are in `held`.
fn compared(counted: &Counted, tree: &Saved, part: Range<u32>, held: &Runs) -> (u64, u64) {
    let (mut listed, mut found) = (0, 0);
    for place in part {
        let Some(id) = tree.manifest.chunks.ids.get(place as usize) else { break };
        if counted.held.contains(id.prefix()) {
            listed += 1;
            found += u64::from(held.contains(place));
        }
    }
    (listed, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(listed: u64, found: u64) -> Sample {
        Sample { name: "run/step-1".parse().unwrap(), listed, found }
    }

    #[test]
    fn an_inventory_is_false_once_three_samples_in_a_row_disagree() {
        let (samples, agent) = (Samples::default(), Identity::new("cloud", "c").unwrap());
        for found in [0, 74, 75, 10, 0] {
            samples.record(agent.clone(), sample(100, found));
            assert!(samples.falsehoods().is_empty(), "{found}");
        }
        samples.record(agent.clone(), sample(100, 3));
        let told = samples.falsehoods().remove(&agent).unwrap().to_string();
        assert_eq!(told, "of 100 chunks of run/step-1 that it lists, its agent has 3");
        samples.record(agent, sample(100, 100));
        assert!(samples.falsehoods().is_empty());
    }

    #[test]
    fn who_sent_wrong_data_is_not_believed_while_it_is_avoided() {
        let (samples, agent) = (Samples::default(), Identity::new("cloud", "c").unwrap());
        samples.record_banned(BTreeSet::from([agent.clone()]));
        assert_eq!(samples.falsehoods().remove(&agent), Some(Falsehood::WrongData));
        samples.record_banned(BTreeSet::new());
        assert!(samples.falsehoods().is_empty());
    }
}
