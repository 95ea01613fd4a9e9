//! Judging: decides for each pack whether to keep, rewrite or delete it. Pure: equal inputs give an equal plan.

use super::Marks;
use crate::format::PackRef;
use crate::id::{PackId, SessionId};
use crate::limits::MIB;
use crate::repository::log::{Action, State};
use std::collections::BTreeMap;

/// Share of a pack's chunk bytes in use below which the pack is rewritten: that frees more bytes than it copies.
const REPACK_BELOW: f64 = 0.5;

/// Decisions on one state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Judgement {
    /// Unused packs to condemn.
    pub condemn: Vec<PackRef>,
    /// Condemned packs that are in use again, with the entries that condemned them.
    pub pardon: Vec<(PackId, u64)>,
    /// Condemned packs to purge: unused, and their grace is over. With the entries that condemned them, and their bytes.
    pub purge: Vec<(PackId, u64, u64)>,
    /// Packs to rewrite: mostly unused, or purged although in use.
    pub repack: Vec<PackRef>,
    /// Sessions without progress for long, with the entries that last touched them.
    pub fence: Vec<(SessionId, u64)>,
}

/// Makes the plan for the indexed `packs`, given the marks. `is_due` says whether the grace of a condemned pack is over; the
/// grace only delays a purge, safety does not depend on it.
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
        } else if is_mostly_unused(pack, marks.used_bytes(id)) {
            judgement.repack.push(*pack);
        }
    }
    // A correct collector never purges packs in use. Another program did, so the chunks are moved to new packs.
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

/// True if a pack of whose chunks these bytes are used is worth rewriting.
pub(super) fn is_mostly_unused(pack: &PackRef, used: u64) -> bool {
    (used as f64) < pack.content_len() as f64 * REPACK_BELOW
}

impl Judgement {
    /// Takes the lengths of packs from a listing, in which `len` finds them, for a report: those in the log, the index and the
    /// maps are the word of whoever wrote them. A pack that is not listed has none.
    pub fn measure(&mut self, len: impl Fn(PackId) -> Option<u64>) {
        for pack in self.condemn.iter_mut().chain(&mut self.repack) {
            pack.len = len(pack.id).unwrap_or(0);
        }
        for (pack, _, bytes) in &mut self.purge {
            *bytes = len(*pack).unwrap_or(0);
        }
    }

    /// Actions of the plan. The repacker commits those of a repack itself.
    #[must_use]
    pub fn actions(&self) -> Vec<Action> {
        let condemn = self.condemn.iter().map(|pack| Action::Condemn { pack: pack.id, len: pack.len, damaged: false });
        let pardon = self.pardon.iter().map(|&(pack, at)| Action::Pardon { pack, at });
        let purge = self.purge.iter().map(|&(pack, at, _)| Action::Purge { pack, at });
        let fence = self.fence.iter().map(|&(session, touched)| Action::Fence { session, touched });
        condemn.chain(pardon).chain(purge).chain(fence).collect()
    }

    /// Description of the plan, for a dry run.
    #[must_use]
    pub fn describe(&self) -> Vec<String> {
        let mut steps = Vec::new();
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        steps.extend(self.condemn.iter().map(|p| format!("condemn pack {} ({:.1} MiB unused)", p.id, mib(p.len))));
        steps.extend(self.pardon.iter().map(|(id, _)| format!("pardon pack {id}: it is used again")));
        steps.extend(self.purge.iter().map(|(id, _, len)| format!("purge pack {id} ({:.1} MiB)", mib(*len))));
        steps
            .extend(self.repack.iter().map(|p| format!("repack pack {} ({:.1} MiB, mostly unused)", p.id, mib(p.len))));
        steps.extend(self.fence.iter().map(|(id, _)| format!("fence session {id}: no progress for long")));
        steps
    }
}
