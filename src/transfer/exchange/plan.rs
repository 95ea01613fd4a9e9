//! Plan of sources: which chunks to fetch from whom. Pure.
//!
//! Chunks are grouped by *unit*: a range of a pack, so that agents of a site agree on units without communication.
//! Sources of a unit, in order: an agent of the site that holds it; the agent of the site that it is assigned to, which
//! fetches it for all of them (so a gang that starts cold costs the origin one copy); another site that holds it; the
//! repository.
//!
//! Units are assigned by rendezvous hashing (<https://doi.org/10.1109/90.663936>) with a bound on how many units of
//! each batch one agent gets: by hashing alone one of eight agents had five of sixteen units, and the others waited for
//! it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::error::Result;
use crate::id::PackId;
use crate::identity::Identity;
use crate::limits::MIB;
use crate::transfer::frame_request::REQUEST_CHUNKS_MAX;

/// Bytes of a pack that are fetched together.
pub(super) const UNIT_LEN: u64 = 8 * MIB;
/// Units of a pack in one batch, which is divided as evenly as possible.
const ASSIGNMENT_BATCH: u64 = 8;

/// Another agent, for a plan.
#[derive(Clone, Debug)]
pub(super) struct Candidate<P> {
    /// Name of the peer in the plan.
    pub(super) peer: P,
    /// Identity.
    pub(super) identity: Identity,
    /// Chunks of the manifest that it holds.
    pub(super) held: HeldChunks,
}

/// Known state of the other agents.
#[derive(Clone, Debug)]
pub(super) struct View<P> {
    /// Planning agent; None for a workload with a SPIFFE id: no agent asks it for chunks, so none are assigned to it.
    pub(super) own: Option<Identity>,
    /// Agents of the same site. None is asked for chunks that it would have to request from others.
    pub(super) site: Vec<Candidate<P>>,
    /// Agents of other sites.
    pub(super) remote: Vec<Candidate<P>>,
    /// True if an agent of the site may be asked for chunks that it does not hold.
    pub(super) through: bool,
    /// True if the repository may be read.
    pub(super) repository: bool,
}

/// Source of each chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan<P> {
    pub(super) groups: Vec<Group<P>>,
    /// Chunks that no permitted source holds.
    pub(super) unavailable: Vec<u32>,
}

/// Source of a group of chunks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin<P> {
    /// A peer.
    Peer(P),
    /// The repository's packs.
    Repository,
}

/// Chunks of one unit from one source, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group<P> {
    pub(super) from: Origin<P>,
    /// The peer has to fetch them itself, so the time it takes says nothing about its speed.
    pub(super) through: bool,
    pub(super) chunks: Vec<u32>,
}

/// Set of places in a manifest's list. Bases outside the list are not announced: an agent that holds some of the
/// manifest is assumed to hold them too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldChunks {
    words: Vec<u64>,
    listed: u32,
    any: bool,
}

impl HeldChunks {
    /// Empty set for a list of `listed` chunks.
    pub(super) fn none_of(listed: u32) -> Self {
        Self { words: vec![0; listed.div_ceil(64) as usize], listed, any: false }
    }

    /// Set of all places of such a list.
    pub(super) fn all_of(listed: u32) -> Self {
        Self { words: vec![u64::MAX; listed.div_ceil(64) as usize], listed, any: true }
    }

    pub(super) fn insert(&mut self, place: u32) {
        if let Some(word) = self.words.get_mut(place as usize / 64) {
            *word |= 1 << (place % 64);
            self.any = true;
        }
    }

    pub(super) fn contains(&self, place: u32) -> bool {
        let word = self.words.get(place as usize / 64);
        if place < self.listed { word.is_some_and(|word| word & (1 << (place % 64)) != 0) } else { self.any }
    }
}

/// Range of a pack.
pub(super) type Unit = (PackId, u64);

/// Weight of `agent` for `unit`: the same for all agents.
fn weight(unit: &Unit, agent: &Identity) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&unit.0.session.to_bytes()).update(&unit.0.object.to_bytes()).update(&unit.1.to_le_bytes());
    hasher.update(agent.to_string().as_bytes());
    hasher.finalize().as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Assigns `chunks`, whose units are those of `unit_of`, to peers.
///
/// # Errors
/// Errors of `unit_of`.
pub(super) fn plan<P: Clone + Ord>(
    chunks: &[u32],
    unit_of: impl Fn(u32) -> Result<Unit>,
    view: &View<P>,
) -> Result<Plan<P>> {
    let mut units: BTreeMap<Unit, Vec<u32>> = BTreeMap::new();
    for &chunk in chunks {
        units.entry(unit_of(chunk)?).or_default().push(chunk);
    }
    let (mut groups, mut unavailable) = (Vec::with_capacity(units.len()), Vec::new());
    for (unit, mut chunks) in units {
        chunks.sort_unstable();
        chunks.dedup();
        let (site, remote) = (ranked(&unit, &view.site), ranked(&unit, &view.remote));
        let responsible = responsible(&unit, view);
        let mut of_unit: BTreeMap<(Origin<P>, bool), Vec<u32>> = BTreeMap::new();
        for chunk in chunks {
            let near = holder(&site, chunk).map(|peer| (Origin::Peer(peer), false));
            let through = || responsible.clone().map(|peer| (Origin::Peer(peer), true));
            let far = || holder(&remote, chunk).map(|peer| (Origin::Peer(peer), false));
            let repository = view.repository.then_some((Origin::Repository, false));
            match near.or_else(through).or_else(far).or(repository) {
                Some(from) => of_unit.entry(from).or_default().push(chunk),
                None => unavailable.push(chunk),
            }
        }
        for ((from, through), chunks) in of_unit {
            let some = |some: &[u32]| Group { from: from.clone(), through, chunks: some.to_vec() };
            groups.extend(chunks.chunks(REQUEST_CHUNKS_MAX).map(some));
        }
    }
    Ok(Plan { groups: interleaved(groups), unavailable })
}

/// Candidates by descending weight for `unit`: spreads units over agents that hold the same.
fn ranked<'a, P>(unit: &Unit, candidates: &'a [Candidate<P>]) -> Vec<&'a Candidate<P>> {
    let mut ranked: Vec<_> = candidates.iter().collect();
    ranked.sort_by_cached_key(|candidate| Reverse(weight(unit, &candidate.identity)));
    ranked
}

fn holder<P: Clone>(ranked: &[&Candidate<P>], chunk: u32) -> Option<P> {
    ranked.iter().find(|candidate| candidate.held.contains(chunk)).map(|candidate| candidate.peer.clone())
}

/// Agent of the site that fetches `unit` from further away, if it is another. Agents with the same view agree; a
/// different view costs additional copies, and no more.
fn responsible<P: Clone>(unit: &Unit, view: &View<P>) -> Option<P> {
    if !view.through || view.site.is_empty() {
        return None;
    }
    let others = view.site.iter().map(|candidate| (&candidate.identity, Some(&candidate.peer)));
    let mut agents: Vec<_> =
        others.chain(view.own.iter().map(|own| (own, None))).map(|(agent, peer)| (agent, peer, 0)).collect();
    let most = ASSIGNMENT_BATCH.div_ceil(agents.len() as u64);
    let first = unit.1 - unit.1 % ASSIGNMENT_BATCH;
    let mut assigned = None;
    for at in first..=unit.1 {
        let free = agents.iter_mut().filter(|(_, _, has)| *has < most);
        if let Some((_, peer, has)) = free.max_by_key(|(agent, ..)| weight(&(unit.0, at), agent)) {
            *has += 1;
            assigned = *peer;
        }
    }
    assigned.cloned()
}

/// Groups of all origins in turn, so that all are busy.
fn interleaved<P: Clone + Ord>(groups: Vec<Group<P>>) -> Vec<Group<P>> {
    let mut counts: BTreeMap<Origin<P>, usize> = BTreeMap::new();
    let mut ordered: Vec<(usize, Group<P>)> = Vec::with_capacity(groups.len());
    for group in groups {
        let count = counts.entry(group.from.clone()).or_default();
        ordered.push((*count, group));
        *count += 1;
    }
    ordered.sort_by_key(|(count, _)| *count);
    ordered.into_iter().map(|(_, group)| group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Owned, SessionId};

    fn agent(site: &str, n: u32) -> Identity {
        Identity::new(site, &format!("agent-{n}")).unwrap()
    }

    fn holding(site: &str, n: u32, places: impl IntoIterator<Item = u32>) -> Candidate<u32> {
        let mut held = HeldChunks::none_of(400);
        places.into_iter().for_each(|place| held.insert(place));
        Candidate { peer: n, identity: agent(site, n), held }
    }

    /// Four chunks a unit.
    fn planned(chunks: impl IntoIterator<Item = u32>, pack: PackId, view: &View<u32>) -> Vec<Group<u32>> {
        let chunks: Vec<u32> = chunks.into_iter().collect();
        let Plan { groups, unavailable } = plan(&chunks, |chunk| Ok((pack, u64::from(chunk / 4))), view).unwrap();
        assert!(unavailable.is_empty() || !view.repository);
        groups
    }

    fn from(groups: &[Group<u32>], origin: &Origin<u32>) -> Vec<u32> {
        let mut chunks: Vec<u32> =
            groups.iter().filter(|group| group.from == *origin).flat_map(|group| group.chunks.clone()).collect();
        chunks.sort_unstable();
        chunks
    }

    #[test]
    fn near_before_far_before_the_repository() {
        let pack = Owned::fresh(SessionId::random());
        let view = View {
            own: Some(agent("west", 0)),
            site: vec![holding("west", 1, 0..6)],
            remote: vec![holding("east", 2, 4..10)],
            through: false,
            repository: true,
        };
        let groups = planned(0..12, pack, &view);
        assert_eq!(from(&groups, &Origin::Peer(1)), (0..6).collect::<Vec<_>>());
        assert_eq!(from(&groups, &Origin::Peer(2)), (6..10).collect::<Vec<_>>());
        assert_eq!(from(&groups, &Origin::Repository), [10, 11]);
        // Chunks outside the list.
        assert_eq!(from(&planned(400..404, pack, &view), &Origin::Peer(1)), [400, 401, 402, 403]);
        // All sources are busy from the start.
        let first: Vec<_> = groups.iter().take(3).map(|group| &group.from).collect();
        assert!(
            first.contains(&&Origin::Peer(1))
                && first.contains(&&Origin::Peer(2))
                && first.contains(&&Origin::Repository)
        );
    }

    #[test]
    fn the_repository_is_read_only_where_it_may_be() {
        let pack = Owned::fresh(SessionId::random());
        let remote = vec![holding("east", 2, 0..4)];
        let view = View { own: Some(agent("west", 0)), site: Vec::new(), remote, through: false, repository: false };
        let chunks: Vec<u32> = (0..8).collect();
        let planned = plan(&chunks, |chunk| Ok((pack, u64::from(chunk / 4))), &view).unwrap();
        assert_eq!(from(&planned.groups, &Origin::Peer(2)), [0, 1, 2, 3]);
        assert_eq!((planned.groups.len(), planned.unavailable), (1, vec![4, 5, 6, 7]));
    }

    #[test]
    fn a_cold_gang_brings_each_chunk_from_afar_once() {
        let pack = Owned::fresh(SessionId::random());
        let mut brought = vec![0; 400];
        for own in 0..8 {
            let others = (0..8).filter(|&n| n != own).map(|n| holding("west", n, []));
            let view = View {
                own: Some(agent("west", own)),
                site: others.collect(),
                remote: Vec::new(),
                through: true,
                repository: true,
            };
            let mine = from(&planned(0..400, pack, &view), &Origin::Repository);
            // An eighth each; of the last batch, which is half full, some have none.
            assert!((48..=52).contains(&mine.len()), "{} of 400", mine.len());
            mine.into_iter().for_each(|chunk| brought[chunk as usize] += 1);
        }
        assert!(brought.iter().all(|&times| times == 1));
    }

    #[test]
    fn a_workload_leaves_all_to_the_agents_of_its_site() {
        let pack = Owned::fresh(SessionId::random());
        let site = (0..3).map(|n| holding("west", n, [])).collect();
        let view = View { own: None, site, remote: Vec::new(), through: true, repository: true };
        let planned = planned(0..400, pack, &view);
        assert_eq!(from(&planned, &Origin::Repository).len(), 0);
        let each = (0..3).map(|n| from(&planned, &Origin::Peer(n)).len());
        assert!(each.clone().all(|many| many > 100) && each.sum::<usize>() == 400);
    }

    #[test]
    fn who_misses_an_agent_agrees_on_more_than_half() {
        let (mut same, mut all) = (0, 0);
        for _ in 0..50 {
            let pack = Owned::fresh(SessionId::random());
            let mine = |others: std::ops::Range<u32>| {
                let site = others.map(|n| holding("west", n, [])).collect();
                let view =
                    View { own: Some(agent("west", 0)), site, remote: Vec::new(), through: true, repository: true };
                from(&planned(0..400, pack, &view), &Origin::Repository)
            };
            let (of_all, without_one) = (mine(1..8), mine(1..7));
            same += of_all.iter().filter(|chunk| without_one.contains(chunk)).count();
            all += of_all.len();
            assert_eq!(mine(1..1).len(), 400, "who is alone brings all");
        }
        assert!(same * 2 > all, "{same} of {all}");
    }

    #[test]
    fn what_all_hold_is_asked_of_all() {
        let pack = Owned::fresh(SessionId::random());
        let site: Vec<_> = (1..5).map(|n| holding("west", n, 0..400)).collect();
        let view = View { own: Some(agent("west", 0)), site, remote: Vec::new(), through: true, repository: true };
        let groups = planned(0..400, pack, &view);
        for n in 1..5 {
            assert!(from(&groups, &Origin::Peer(n)).len() > 40);
        }
        assert!(from(&groups, &Origin::Repository).is_empty());
    }
}
