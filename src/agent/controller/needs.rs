//! Needs: names that pods use at a site. What many pods need is looked up and held once.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use super::finding::{Finding, SiteFinding, absence};
use super::gathering::Gathering;
use super::holds::{Holds, Wanted};
use crate::agent::advisor::HintCaller;
use crate::agent::api::hint_for_caller;
use crate::agent::pods::{AccountRights, PodNames, ResolvedNames, ServiceAccount};
use crate::agent::state::AgentState;
use crate::error::{Error, ErrorKind, Result};
use crate::fair_turns::FairTurns;
use crate::name::Name;
use crate::placement::{Candidate, HintCandidate, HintRequest, HintVerdict};

/// Needs that are looked up at a time, and those of one namespace.
const LOOKED_UP: usize = 16;
const LOOKED_UP_SHARE: usize = 8;
/// Time for one look.
const LOOK_MAX: Duration = Duration::from_secs(30);
/// Time that a hint waits for the chunks of inputs that are new to this agent.
const HINT_WAIT: Duration = Duration::from_secs(2);
/// Time that a pass waits for what is looked up and held.
const MOMENT: Duration = Duration::from_millis(200);
/// Time for which what was found is kept.
const KEPT_FOR: Duration = Duration::from_secs(10);
/// Bytes of memory of a need and of the look at it, beside the names.
const NEED_LEN: usize = 2 << 10;
/// Bytes of memory of a name in a set, beside its text.
const NAME_LEN: usize = 96;

/// Names that pods use at a site.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::agent) struct Need {
    pub(in crate::agent) account: ServiceAccount,
    pub(in crate::agent) names: PodNames,
    pub(in crate::agent) site: String,
}

/// Digest of the names of a need as the pods have them, and of its site.
pub(in crate::agent) type Asked = [u8; 32];

/// Last look at a need.
#[derive(Clone, Debug)]
struct Look {
    outcome: Outcome,
    /// Remarks for whoever waits.
    notes: Vec<String>,
    /// Time of the next look.
    due: Instant,
    /// Since when it has been absent, or has failed.
    since: Instant,
}

/// Outcome of a look.
#[derive(Clone, Debug)]
enum Outcome {
    Nothing,
    There(u64),
    Missing(Wanted),
    Absent(String),
    Denied(String),
    Failing(String),
}

/// Outcome of a look, with remarks for whoever waits.
type Found = (Outcome, Vec<String>);

/// Looks needs up in the background, and has agents fetch and hold what is missing.
pub(in crate::agent) struct Needs {
    lookup: Arc<Lookup>,
    holds: Holds,
    known: BTreeMap<Arc<Need>, Look>,
    looks: Looks,
    /// Needs of the last pass.
    gathered: BTreeSet<Arc<Need>>,
}

/// Looks under way.
#[derive(Default)]
struct Looks {
    by_need: BTreeMap<Arc<Need>, AbortHandle>,
    tasks: JoinSet<(Arc<Need>, Result<Found>)>,
}

/// Looks one need up.
struct Lookup {
    agent: Arc<AgentState>,
    rights: Arc<AccountRights>,
    /// The controller.
    owner: &'static str,
    /// True if what is there by inventories is held as well, and counts once its holder says so: an inventory is of a while ago.
    holds_all: bool,
    /// Turns by namespace: names that are absent take a while.
    turns: FairTurns<String>,
}

impl Need {
    /// Bytes of memory that it takes, about, with what is found of it: the names that its own stand for.
    pub(super) fn len(&self) -> usize {
        let saves = self.names.saves.iter().map(|run| run.as_str().len());
        let reads = self.names.reads.iter().map(|name| name.to_string().len());
        NEED_LEN + saves.chain(reads).map(|len| 2 * (NAME_LEN + len)).sum::<usize>()
    }

    pub(in crate::agent) fn asked(&self) -> Asked {
        let saves = self.names.saves.iter().map(|run| format!("saves {run}"));
        let reads = self.names.reads.iter().map(|name| format!("reads {name}"));
        let mut hasher = blake3::Hasher::new();
        for part in saves.chain(reads).chain([self.site.clone()]) {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
        *hasher.finalize().as_bytes()
    }
}

impl Looks {
    fn begin(&mut self, need: &Arc<Need>, look: impl Future<Output = Result<Found>> + Send + 'static) {
        let own = Arc::clone(need);
        let task = self.tasks.spawn(async move { (own, look.await) });
        self.by_need.insert(Arc::clone(need), task);
    }

    /// Ends the looks at what is not `needed` any more.
    fn keep(&mut self, needed: &BTreeSet<Arc<Need>>) {
        self.by_need.retain(|need, look| {
            let is_needed = needed.contains(need);
            if !is_needed {
                look.abort();
            }
            is_needed
        });
    }

    /// The next look that has come to an end; none if none is under way.
    ///
    /// # Cancel safety
    /// Safe.
    async fn next(&mut self) -> Option<(Arc<Need>, Result<Found>)> {
        loop {
            match self.tasks.join_next().await? {
                Ok((need, found)) => {
                    self.by_need.remove(&need);
                    return Some((need, found));
                }
                // Nothing needs it any more.
                Err(error) if error.is_cancelled() => {}
                // One that panicked would never be looked up again, so the panic goes on.
                Err(error) => resume_unwind(error.into_panic()),
            }
        }
    }
}

impl Needs {
    pub(super) fn new(
        agent: Arc<AgentState>,
        rights: AccountRights,
        (owner, holds_all): (&'static str, bool),
        holds: Holds,
    ) -> Self {
        let turns = FairTurns::new(LOOKED_UP, LOOKED_UP_SHARE);
        let lookup = Arc::new(Lookup { agent, rights: Arc::new(rights), owner, holds_all, turns });
        Self { lookup, holds, known: BTreeMap::new(), looks: Looks::default(), gathered: BTreeSet::new() }
    }

    /// Begins to gather the needs of a pass.
    pub(in crate::agent) fn gathering(&self) -> Gathering {
        Gathering::new(Arc::clone(&self.lookup.rights), self.gathered.clone())
    }

    /// Looks up those of `needs` that are due, has what they lack fetched, in their order, and waits a moment for what comes of it. What
    /// is not needed any more is released, unless it is there and `in_use`.
    ///
    /// # Cancel safety
    /// Safe: leases run out, and a repetition finds what is held already.
    pub(in crate::agent) async fn look_up(&mut self, needs: Gathering, in_use: impl Fn() -> BTreeSet<Asked>) {
        let Gathering { needs: needed, in_order, .. } = needs;
        self.known.retain(|need, _| needed.contains(need));
        self.looks.keep(&needed);
        self.gathered = needed;
        let now = Instant::now();
        for need in &in_order {
            let is_due = self.known.get(need).is_none_or(|look| look.due <= now);
            if is_due && !self.looks.by_need.contains_key(need) {
                let (lookup, own) = (Arc::clone(&self.lookup), Arc::clone(need));
                self.looks.begin(need, async move { lookup.look(&own).await });
            }
        }
        let moment = now + MOMENT;
        while let Ok(Some((need, found))) = timeout_at(moment, self.looks.next()).await {
            self.take(need, found);
        }
        let wanted = |need: &Arc<Need>| match self.known.get(need).map(|look| &look.outcome) {
            Some(Outcome::Missing(wanted)) => Some((wanted.clone(), need.account.namespace.clone())),
            _ => None,
        };
        let wanted: Vec<(Wanted, String)> = in_order.iter().filter_map(wanted).collect();
        self.holds.pass(&wanted, in_use).await;
        self.holds.settle(moment).await;
    }

    fn take(&mut self, need: Arc<Need>, found: Result<Found>) {
        let now = Instant::now();
        let (outcome, notes) = found.unwrap_or_else(|error| (Outcome::Failing(error.to_string()), Vec::new()));
        let before = self.known.get(&need);
        let same = |before: &&Look| {
            let both = (&before.outcome, &outcome);
            matches!(both, (Outcome::Absent(_), Outcome::Absent(_)) | (Outcome::Failing(_), Outcome::Failing(_)))
        };
        let since = before.filter(same).map_or(now, |before| before.since);
        self.known.insert(need, Look { outcome, notes, due: now + KEPT_FOR, since });
    }

    /// Finding about a need; none before the first look.
    pub(in crate::agent) fn finding(&self, need: &Need) -> Option<SiteFinding> {
        let Look { outcome, notes, since, .. } = self.known.get(need)?;
        let finding = match outcome {
            Outcome::Nothing => Finding::Nothing,
            Outcome::There(bytes) => Finding::There(*bytes),
            Outcome::Missing(wanted) => self.holds.finding(wanted),
            Outcome::Absent(text) => Finding::Absent(since.elapsed(), text.clone()),
            Outcome::Denied(text) => Finding::Denied(text.clone()),
            Outcome::Failing(text) => Finding::Failing(since.elapsed(), text.clone()),
        };
        Some(SiteFinding { site: need.site.clone(), finding, notes: notes.clone() })
    }

    /// Time of the next pass that finds something new.
    pub(in crate::agent) fn due(&self) -> Option<Instant> {
        let looks = if self.looks.by_need.is_empty() {
            self.known.values().map(|look| look.due).min()
        } else {
            Some(Instant::now())
        };
        [looks, self.holds.due()].into_iter().flatten().min()
    }
}

impl Lookup {
    async fn look(&self, need: &Need) -> Result<Found> {
        let _turn = self.turns.take(need.account.namespace.clone()).await;
        let late = || Error::unreachable("no answer in time");
        // Boxed: one that waits for its turn takes little memory.
        timeout(LOOK_MAX, Box::pin(self.look_now(need))).await.unwrap_or_else(|_| Err(late()))
    }

    async fn look_now(&self, need: &Need) -> Result<Found> {
        let resolved = match self.rights.resolve(&self.agent, &need.account, &need.names).await {
            Ok(resolved) => resolved,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok((Outcome::Absent(absence(&error)), Vec::new()));
            }
            Err(error) => return Err(error),
        };
        let ResolvedNames { names, warnings, denied_here } = resolved;
        if names.is_empty() {
            return Ok((Outcome::Nothing, warnings));
        }
        // A hint needs the lists of chunks, which must not come here either.
        if let Some(name) = denied_here {
            let text = format!("{name}: the policy does not let it come here");
            if need.site == self.agent.credentials()?.identity().site() {
                return Ok((Outcome::Denied(text), warnings));
            }
            return Err(Error::denied(text));
        }
        let at = Instant::now();
        let (candidate, complete) = self.candidate(need, &names).await?;
        let outcome = match candidate.verdict {
            HintVerdict::Deny => Outcome::Denied(denial(&candidate)),
            HintVerdict::Unknown => return Err(Error::denied("no policy can be read that decides on the data")),
            HintVerdict::Allow
                if complete && !self.holds_all && candidate.bytes.missing + candidate.bytes.in_flight == 0 =>
            {
                Outcome::There(candidate.bytes.present)
            }
            HintVerdict::Allow => Outcome::Missing(Wanted::new((self.owner, at), need, names, &candidate)),
        };
        Ok((outcome, warnings))
    }

    /// The hint about the site of a need, and whether it is complete. A name that was just saved may be new to the advisor: not found.
    async fn candidate(&self, need: &Need, names: &[Name]) -> Result<(Candidate, bool)> {
        let about =
            HintRequest { candidates: vec![HintCandidate { site: need.site.clone() }], ..HintRequest::about(names) };
        let may = |name: &Name| self.rights.allow(&need.account, name);
        let caller = HintCaller::namespace(&need.account.namespace);
        let hint = hint_for_caller(&self.agent, caller, &about, may, HINT_WAIT).await?;
        let complete = hint.complete;
        let candidate = hint.candidates.into_iter().next();
        let candidate = candidate.ok_or_else(|| Error::other("hint has no candidate").at(&need.site))?;
        Ok((candidate, complete))
    }
}

fn denial(candidate: &Candidate) -> String {
    let Some((first, others)) = candidate.deny.split_first() else { return "its data".to_owned() };
    let more = if others.is_empty() { "" } else { ", and other inputs" };
    format!("{:.100}: {:.200}{more}", first.input, first.rule)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn need(namespace: &str, name: &str) -> Arc<Need> {
        let account = ServiceAccount { namespace: namespace.to_owned(), name: "trainer".to_owned() };
        let names = PodNames { reads: BTreeSet::from([name.parse().unwrap()]), ..PodNames::default() };
        Arc::new(Need { account, names, site: "home".to_owned() })
    }

    #[tokio::test]
    async fn looks_at_what_is_gone_are_ended() {
        let (gone, needed) = (need("a", "x"), need("b", "x"));
        let mut looks = Looks::default();
        looks.begin(&gone, pending());
        looks.begin(&needed, async { Ok((Outcome::Nothing, Vec::new())) });
        looks.keep(&BTreeSet::from([Arc::clone(&needed)]));
        assert_eq!(looks.by_need.keys().collect::<Vec<_>>(), [&needed]);
        assert_eq!(looks.next().await.map(|(need, _)| need), Some(needed));
        assert!(looks.next().await.is_none() && looks.by_need.is_empty());
    }

    #[test]
    fn names_are_told_apart_as_they_are_asked_for() {
        let latest = need("a", "run@latest").asked();
        assert_eq!(latest, need("b", "run@latest").asked());
        assert_ne!(latest, need("a", "run/step-5").asked());
        assert_ne!(latest, Need { site: "cloud".to_owned(), ..Need::clone(&need("a", "run@latest")) }.asked());
    }
}
