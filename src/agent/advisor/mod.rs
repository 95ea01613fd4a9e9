//! Advisor: answers where a job should run, from one immutable snapshot a second.
//!
//! ```text
//! epoch = log + policy + inventories + sites and prices, at one moment
//! epoch + names -> what each site holds of their chunks, remembered -> placement::hint
//! ```
//!
//! Everything comes from the repository and two files, so any number of advisors give the same answers.

mod inputs;
mod month;
mod remembered;
pub(super) mod samples;
mod site_list;
mod sites_files;
mod usage;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use self::inputs::{InventoriesAt, KnownInputs};
use self::month::{MonthSoFar, MonthVolumes};
use self::samples::Samples;
use self::sites_files::SitesFiles;
pub use self::sites_files::{SitesPaths, SitesRead};
pub use self::usage::read_usage;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::placement::{Closure, Hint, HintRequest, Holdings, Input, LinkCalibration, Snapshot, calibration, hint};
use crate::policy::PolicyRules;
use crate::repository::log::{RefValue, State};
use crate::repository::{Repository, no_such_name};
use crate::single_flight::SingleFlight;
use crate::transfer::identity::Trusted;
use crate::transfer::inventories::{Counted, Inventories, InventoriesRead, UnusableInventory};
use crate::transfer::policy::Policies;
use crate::transfer::usage::UsageReports;
use crate::work::blocking;

/// Age from which an epoch is replaced.
const EPOCH_AGE: Duration = Duration::from_secs(1);
/// Age up to which an epoch answers while the next one is made.
const EPOCH_AGE_MAX: Duration = Duration::from_secs(10);
/// Time that a hint waits for the repository while an older epoch can answer.
const REPOSITORY_WITHIN: Duration = Duration::from_secs(1);
/// Time that a hint waits for the chunks of its inputs, if the request does not say.
pub const WAIT: Duration = Duration::from_millis(3);

/// Rulings, of an input at a site, of a hint that is computed at once; a larger one is computed on another thread.
const RULINGS_MAX: usize = 2_000;
/// Chunks of the inputs of such a hint: their split among sources is linear in them.
const CHUNKS_AT_ONCE: usize = 16_384;

/// Inventories that cannot be used of which a hint tells.
const UNUSABLE_SHOWN: usize = 8;

/// Authority by which inventories are verified.
pub type Authority = dyn Fn() -> Result<Option<Trusted>> + Send + Sync;

/// Detail of errors and of the notes on what an epoch lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintDetail {
    /// With other names, names of agents, and causes.
    All,
    /// Only that something is lacking: for other agents and tokens.
    Little,
}

/// Requester of a hint. What hints of one take is limited together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HintCaller {
    /// User of the advisor.
    User,
    /// Another agent, a token, the pods of a namespace: a hash of its name.
    Other(blake3::Hash),
}

impl HintCaller {
    /// The requester `name` of a `kind`, such as a namespace.
    #[must_use]
    pub fn other(kind: &str, name: &str) -> Self {
        Self::Other(blake3::hash(format!("{kind} {name}").as_bytes()))
    }

    /// The pods of `namespace`.
    #[must_use]
    pub fn namespace(namespace: &str) -> Self {
        Self::other("namespace", namespace)
    }

    fn detail(self) -> HintDetail {
        if self == Self::User { HintDetail::All } else { HintDetail::Little }
    }
}

/// Answers requests for hints about one repository. Clones share everything.
#[derive(Clone)]
pub struct Advisor(Arc<Shared>);

struct Shared {
    repository: Repository,
    files: SitesFiles,
    policies: Arc<Policies>,
    authority: Box<Authority>,
    inventories: Inventories,
    samples: Samples,
    month: MonthVolumes,
    usage_reports: UsageReports,
    current: Mutex<Option<(Instant, Arc<Epoch>)>>,
    making: SingleFlight<(), Arc<Epoch>>,
    inputs: Arc<KnownInputs>,
}

/// Everything that hints of one moment are computed from.
pub struct Epoch {
    at: Timestamp,
    log: Arc<State>,
    policy: Option<Arc<PolicyRules>>,
    inventories: Vec<Arc<Counted>>,
    /// Inventories that samples contradict.
    false_inventories: Vec<Arc<Counted>>,
    sites: Arc<SitesRead>,
    month: Arc<MonthSoFar>,
    gaps: Vec<String>,
    hash: blake3::Hash,
}

impl fmt::Debug for Advisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Advisor").field("files", &self.0.files).finish_non_exhaustive()
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch").field("at", &self.at).field("log", &self.log.seq).finish_non_exhaustive()
    }
}

impl Epoch {
    /// Measured links between sites, and how well hints have predicted transfers over them.
    #[must_use]
    pub fn calibration(&self) -> Vec<LinkCalibration> {
        calibration(self.inventories.iter().map(|counted| &***counted))
    }

    /// Time at which it was made.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// The log's state.
    #[must_use]
    pub fn log(&self) -> &Arc<State> {
        &self.log
    }
}

impl Advisor {
    /// An advisor for `repository`. `policies` verifies its policy, and `authority` its inventories.
    ///
    /// # Errors
    /// As [`SitesPaths::read`].
    pub fn new(
        repository: Repository,
        paths: SitesPaths,
        policies: Arc<Policies>,
        authority: Box<Authority>,
    ) -> Result<Self> {
        let shared = Shared {
            inputs: Arc::new(KnownInputs::new(&repository)),
            repository,
            files: SitesFiles::open(paths)?,
            policies,
            authority,
            inventories: Inventories::default(),
            samples: Samples::default(),
            month: MonthVolumes::default(),
            usage_reports: UsageReports::default(),
            current: Mutex::default(),
            making: SingleFlight::default(),
        };
        Ok(Self(Arc::new(shared)))
    }

    /// The sites file as it is now.
    #[must_use]
    pub fn sites(&self) -> Arc<SitesRead> {
        self.0.files.current().0
    }

    /// Epoch to answer from. One that is older than a second is replaced, and answers meanwhile unless it is older than ten. If the
    /// repository cannot be reached, the last one answers.
    ///
    /// # Errors
    /// Unreachable or denied, as the store says, if there is no epoch yet; conflict, if the sites file contradicts the policy.
    ///
    /// # Cancel safety
    /// Safe: the work continues for later requests.
    pub async fn epoch(&self) -> Result<Arc<Epoch>> {
        let known = self.0.current();
        if let Some((made, epoch)) = &known
            && made.elapsed() < EPOCH_AGE
        {
            return Ok(Arc::clone(epoch));
        }
        let next = self.next_epoch();
        match known {
            Some((made, epoch)) if made.elapsed() < EPOCH_AGE_MAX => {
                // The work goes on when the wait ends.
                match timeout(WAIT, next).await {
                    Ok(Ok(next)) => Ok(next),
                    _ => Ok(epoch),
                }
            }
            Some((_, epoch)) => match timeout(REPOSITORY_WITHIN, next).await {
                Err(_) => Ok(Arc::new(epoch.outdated(&Error::unreachable("no answer yet")))),
                Ok(Err(error)) if error.kind() == ErrorKind::Unreachable => Ok(Arc::new(epoch.outdated(&error))),
                Ok(next) => next,
            },
            None => next.await,
        }
    }

    /// Epoch to answer from about something that the last one lacks: a new one, if the log has changed since. All who ask meanwhile share
    /// the read of the log.
    ///
    /// # Errors
    /// As [`Advisor::epoch`]; unreachable, if the repository is.
    ///
    /// # Cancel safety
    /// Safe: the work continues.
    pub async fn later_epoch(&self, than: &Arc<Epoch>) -> Result<Arc<Epoch>> {
        let log = self.0.repository.state_since(Some(Instant::now())).await?;
        match self.0.current() {
            Some((_, current)) if current.log.seq >= log.seq => Ok(current),
            _ if than.log.seq >= log.seq => Ok(Arc::clone(than)),
            _ => self.next_epoch().await,
        }
    }

    /// Epoch that is at most a second old. Unlike [`Advisor::later_epoch`], it costs no reads of its own however often it is asked for.
    ///
    /// # Errors
    /// As [`Advisor::epoch`]; unreachable, if the repository is.
    ///
    /// # Cancel safety
    /// Safe: the work continues.
    pub async fn fresh_epoch(&self) -> Result<Arc<Epoch>> {
        match self.0.current() {
            Some((made, epoch)) if made.elapsed() < EPOCH_AGE => Ok(epoch),
            _ => self.next_epoch().await,
        }
    }

    async fn next_epoch(&self) -> Result<Arc<Epoch>> {
        let shared = Arc::clone(&self.0);
        self.0.making.get(&(), || async move { shared.make_epoch().await }).await
    }

    /// The hint for `request`, whose inputs are `names`. Waits at most `wait` until the chunks of inputs that are new to this advisor
    /// are read; then the hint counts all of their bytes as missing, and is not complete.
    ///
    /// # Errors
    /// Not found, for a name that is gone; denied, if the policy does not let its tree come here; usage, for a malformed request or an
    /// unknown site; damaged, unreachable or exhausted, as for a tree that is opened.
    ///
    /// # Cancel safety
    /// Safe: what is being read is read on.
    pub async fn hint(
        &self,
        epoch: &Arc<Epoch>,
        reader: &Repository,
        request: &HintRequest,
        names: &[Name],
        (wait, caller): (Duration, HintCaller),
    ) -> Result<Hint> {
        request.check()?;
        let detail = caller.detail();
        self.0.samples.asked();
        let mut inputs = Vec::with_capacity(names.len());
        let mut trees = Vec::with_capacity(names.len());
        let mut seen = BTreeSet::new();
        for name in names.iter().filter(|name| seen.insert(*name)) {
            let missing = || match detail {
                HintDetail::All => no_such_name(&epoch.log.refs, name, self.0.repository.store().location()),
                HintDetail::Little => Error::not_found("name was removed meanwhile").at(name),
            };
            let value = epoch.log.refs.get(name).ok_or_else(missing)?;
            reader.check_readable(name, &value.manifest).await?;
            let labels = reader.labels_in(&epoch.log, name, Some(&value.manifest));
            // The step before may be one that other callers may not read.
            let step_seconds = if detail == HintDetail::All { step_seconds(&epoch.log, name, value) } else { None };
            inputs.push(Input { name: name.clone(), labels, saved: value.saved, step_seconds });
            trees.push((name.clone(), value.clone()));
        }
        let mut gaps = epoch.notes(detail);
        let reading = self.0.inputs.holdings(epoch.told(), reader, trees.clone(), caller);
        let held = match timeout(wait, reading).await {
            Ok(held) => held?,
            Err(_) => {
                gaps.push(
                    "the chunks of the inputs are still being read: all of their bytes count as missing".to_owned(),
                );
                Arc::new(unread(&trees))
            }
        };
        let candidates = match request.candidates.len() {
            0 => epoch.sites.sites.sites().count(),
            some => some,
        };
        let log = match detail {
            HintDetail::All => epoch.log.seq,
            // The position of the whole log would tell when names are saved that the caller may not read.
            HintDetail::Little => trees.iter().map(|(_, value)| value.version).max().unwrap_or_default(),
        };
        if candidates * inputs.len() <= RULINGS_MAX && held.closure().len() <= CHUNKS_AT_ONCE {
            return hint(&Snapshot { log, ..epoch.snapshot(&self.0.repository, gaps) }, request, &inputs, &held);
        }
        let (epoch, repository, request) = (Arc::clone(epoch), self.0.repository.clone(), request.clone());
        let computed = move || {
            let snapshot = Snapshot { log, ..epoch.snapshot(&repository, gaps) };
            hint(&snapshot, &request, &inputs, &held)
        };
        blocking(computed).await
    }
}

impl Shared {
    fn current(&self) -> Option<(Instant, Arc<Epoch>)> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn make_epoch(&self) -> Result<Arc<Epoch>> {
        let repository = &self.repository;
        // Before anything is read: what changes while it is read is in the next epoch.
        let (begun, at) = (Instant::now(), repository.clock().now());
        let log = repository.state().await?;
        let mut gaps = Vec::new();
        let (sites, problem) = self.files.current();
        gaps.extend(problem);
        let policy = match repository.policy_of(&log).await? {
            None => None,
            Some(text) => {
                let rules = self.policies.rules(repository.id(), &text);
                rules.inspect_err(|error| gaps.push(format!("the policy cannot be used here: {error}"))).ok()
            }
        };
        if let Some(rules) = &policy {
            sites.sites.check(rules)?;
        }
        let mut read = self.read_inventories(&sites).await?;
        let shown = read.unusable.iter().take(UNUSABLE_SHOWN);
        gaps.extend(
            shown.map(|unusable| {
                format!("the inventory of {} cannot be used: {}", unusable.agent.path(), unusable.error)
            }),
        );
        if let Some(others @ 1..) = read.unusable.len().checked_sub(UNUSABLE_SHOWN) {
            gaps.push(format!("{others} more inventories cannot be used"));
        }
        if read.more {
            gaps.push("more agents have inventories than are read".to_owned());
        }
        let falsehoods = self.samples.falsehoods();
        let is_false = |counted: &mut Arc<Counted>| falsehoods.contains_key(&counted.agent);
        let false_inventories: Vec<Arc<Counted>> = read.inventories.extract_if(.., is_false).collect();
        gaps.extend(false_inventories.iter().map(|counted| {
            let reason = falsehoods.get(&counted.agent).map(ToString::to_string).unwrap_or_default();
            format!("the inventory of {} is false, so what it holds is unknown: {reason}", counted.agent.path())
        }));
        let month = self.month.at(repository, (self.authority)()?.as_ref(), (&sites, at)).await?;
        gaps.extend(month.gaps.iter().cloned());
        let hash = read.hash(sites.hash);
        self.inputs.update(InventoriesAt { inventories: &read.inventories, at }, &log).await;
        let epoch = Arc::new(Epoch {
            at,
            log,
            policy,
            inventories: read.inventories,
            false_inventories,
            sites,
            month,
            gaps,
            hash,
        });
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some((begun, Arc::clone(&epoch)));
        Ok(epoch)
    }

    /// Inventories that the authority confirms.
    async fn read_inventories(&self, sites: &SitesRead) -> Result<InventoriesRead> {
        // Nobody asks about other sites.
        let wanted = |site: &str| sites.sites.site(site).is_some();
        if let Some(trusted) = (self.authority)()? {
            return self.inventories.read(&self.repository, &trusted, wanted).await;
        }
        let unverified = |agent: Identity| UnusableInventory {
            error: Error::denied("this machine has no authority to verify it with")
                .help("issue a certificate to it: towline identity issue SITE/AGENT --to DIR"),
            agent,
        };
        let (stored, more) = self.repository.stored_inventories(wanted).await?;
        let unusable = stored.into_iter().map(|stored| unverified(stored.agent)).collect();
        Ok(InventoriesRead { inventories: Vec::new(), unusable, more })
    }
}

impl Epoch {
    fn told(&self) -> InventoriesAt<'_> {
        InventoriesAt { inventories: &self.inventories, at: self.at }
    }

    /// Remarks on data that cannot be read, and so is missing.
    fn notes(&self, detail: HintDetail) -> Vec<String> {
        match detail {
            HintDetail::All => self.gaps.clone(),
            HintDetail::Little if self.gaps.is_empty() => Vec::new(),
            HintDetail::Little => {
                vec!["something that counts cannot be read; the user of the advisor is told what".to_owned()]
            }
        }
    }

    fn snapshot<'e>(&'e self, repository: &Repository, gaps: Vec<String>) -> Snapshot<'e> {
        Snapshot {
            at: self.at,
            log: self.log.seq,
            repository: [repository.store().location().to_string(), repository.id().to_string()],
            sites: &self.sites.sites,
            book: &self.sites.book,
            agents: self.inventories.iter().map(|counted| counted.agent.clone()).collect(),
            unknown: self.false_inventories.iter().map(|counted| counted.agent.site().to_owned()).collect(),
            policy: self.policy.as_deref(),
            gaps,
            month_so_far: Arc::clone(&self.month.volumes),
            hash: self.hash,
        }
    }

    /// The same, for answers while the repository cannot be reached.
    fn outdated(&self, error: &Error) -> Self {
        let mut gaps = self.gaps.clone();
        gaps.push(format!("the repository cannot be reached, so this is as of {}: {error}", self.at));
        Self {
            at: self.at,
            log: Arc::clone(&self.log),
            policy: self.policy.clone(),
            inventories: self.inventories.clone(),
            false_inventories: self.false_inventories.clone(),
            sites: Arc::clone(&self.sites),
            month: Arc::clone(&self.month),
            gaps,
            hash: self.hash,
        }
    }
}

/// Seconds for a step of the run of `name`, whose value is `value`, between the step before it and this one.
fn step_seconds(log: &State, name: &Name, value: &RefValue) -> Option<f64> {
    let (run, step) = name.step()?;
    let below: Name = format!("{run}/step-").parse().ok()?;
    let steps = log.refs.range::<Name, _>(&below..).take_while(|(other, _)| other.as_str().starts_with(below.as_str()));
    let earlier = steps.filter_map(|(other, value)| Some((other.step()?.1, value))).filter(|(other, _)| *other < step);
    let (before, saved) = earlier.map(|(before, value)| (before, value.saved)).max()?;
    let seconds = value.saved.since(saved).as_secs_f64();
    (seconds > 0.0).then(|| seconds / (step - before) as f64)
}

/// Trees whose chunks are not read yet: every byte counts, and is in the repository.
fn unread(trees: &[(Name, RefValue)]) -> Holdings {
    let logical = trees.iter().map(|(_, value)| value.logical_bytes).fold(0, u64::saturating_add);
    Holdings::join(Arc::new(Closure::unread(logical)), [])
}
