//! Judging: what becomes of each pack. Pure: the same state, marks and clock give the same plan.

use super::Marks;
use crate::format::PackRef;
use crate::id::{PackId, SessionId};
use crate::limits::MIB;
use crate::repository::log::{Action, State};
use std::collections::BTreeMap;

/// A pack is rewritten when less than this part of its bytes is used: rewriting then frees more than it moves.
const REPACK_BELOW: f64 = 0.5;

/// Decisions on one state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Judgement {
    /// Unused packs, to be condemned.
    pub condemn: Vec<PackRef>,
    /// Condemned packs that are used after all, with the entries that condemned them.
    pub pardon: Vec<(PackId, u64)>,
    /// Condemned packs that nothing uses and whose grace is over, with those entries and their bytes.
    pub purge: Vec<(PackId, u64, u64)>,
    /// Packs that are mostly dead, or used though somebody purged them.
    pub repack: Vec<PackRef>,
    /// Sessions that stood still for long, with the entries that touched them last.
    pub fence: Vec<(SessionId, u64)>,
}

/// Decides what becomes of the `packs` that are indexed, given what is used. `is_due` says whether the grace of a condemned pack is
/// over: it only delays a purge, and never makes one safe.
#[must_use]
pub fn judge(
    state: &State,
    packs: &BTreeMap<PackId, PackRef>,
    marks: &Marks,
    is_due: impl Fn(&PackId) -> bool,
) -> Judgement {
    let mut judgement = Judgement::default();
    for (id, pack) in packs {
        let root = state.sessions.contains_key(&id.session);
        if root || !state.is_target(id) {
            continue;
        }
        if !marks.uses(id) {
            judgement.condemn.push(*pack);
        } else if (marks.used_bytes(id) as f64) < pack.len as f64 * REPACK_BELOW {
            judgement.repack.push(*pack);
        }
    }
    // No collector purges what is used: somebody else wrote that. Its chunks are needed, so they move.
    judgement.repack.extend(marks.packs().filter(|pack| state.purged.contains_key(&pack.id)));
    for (id, condemned) in &state.condemned {
        match (marks.uses(id), condemned.damaged) {
            (true, false) => judgement.pardon.push((*id, condemned.at)),
            (false, _) if is_due(id) => {
                judgement.purge.push((*id, condemned.at, condemned.len));
            }
            (true, true) | (false, _) => {}
        }
    }
    judgement
}

impl Judgement {
    /// Its verdicts on packs, as actions. What repacking does is committed by the repacker.
    #[must_use]
    pub fn actions(&self) -> Vec<Action> {
        let condemn = self.condemn.iter().map(|pack| Action::Condemn { pack: pack.id, len: pack.len, damaged: false });
        let pardon = self.pardon.iter().map(|&(pack, at)| Action::Pardon { pack, at });
        let purge = self.purge.iter().map(|&(pack, at, _)| Action::Purge { pack, at });
        let fence = self.fence.iter().map(|&(session, touched)| Action::Fence { session, touched });
        condemn.chain(pardon).chain(purge).chain(fence).collect()
    }

    /// The same in words, for a dry run.
    #[must_use]
    pub fn describe(&self) -> Vec<String> {
        let mut steps = Vec::new();
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        steps.extend(self.condemn.iter().map(|p| format!("condemn pack {} ({:.1} MiB unused)", p.id, mib(p.len))));
        steps.extend(self.pardon.iter().map(|(id, _)| format!("pardon pack {id}: it is used again")));
        steps.extend(self.purge.iter().map(|(id, _, len)| format!("purge pack {id} ({:.1} MiB)", mib(*len))));
        steps.extend(self.repack.iter().map(|p| format!("repack pack {} ({:.1} MiB, mostly dead)", p.id, mib(p.len))));
        steps.extend(self.fence.iter().map(|(id, _)| format!("fence session {id}: it stood still for long")));
        steps
    }
}
