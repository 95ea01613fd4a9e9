//! The guard of a repository: decides whether content of a name may come to this process, or go from it to a
//! repository.
//!
//! A repository opened without a guard has [`Unidentified`]: a process without a certificate belongs to no site, and
//! content with labels stays.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::log::{Action, Declassified, LabelView, PolicyMark, RefValue, State};
use super::policy::PolicyText;
use super::{Repository, Saved};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ManifestId, RepositoryId};
use crate::identity::Identity;
use crate::log_limit::LogLimit;
use crate::name::Name;
use crate::policy::{Basis, Labels, LocalCaller, Ruling};
use crate::work::blocking;

/// Destination of content.
#[derive(Clone, Copy, Debug)]
pub enum Destination<'a> {
    /// To this process.
    Here,
    /// The repository that holds it, at these addresses.
    Itself(&'a [String]),
    /// Another repository, at these addresses: the first is its location.
    Repository(&'a [String]),
    /// To another agent.
    Agent(&'a Identity),
}

/// Content to be moved.
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    /// Repository that holds it.
    pub repository: RepositoryId,
    /// Name.
    pub name: &'a Name,
    /// Its labels.
    pub labels: &'a Labels,
    /// Destination.
    pub to: Destination<'a>,
}

/// A tree that may not come to this process.
#[derive(Debug)]
pub struct DeniedTree<'n> {
    /// A name of it.
    pub name: &'n Name,
    /// The name's value.
    pub value: &'n RefValue,
    /// The refusal, with the rule.
    pub refusal: Error,
}

/// Decides what may move. Implementations verify the policy's signature, since this layer knows no certificates.
pub trait Guard: fmt::Debug + Send + Sync {
    /// The ruling on `access` by `caller` under `policy`; none: the repository has no policy, or not one that can be read. A caller is
    /// whoever asks on this machine, if that is known.
    fn rule_on(&self, policy: Option<&PolicyText>, access: &Access<'_>, caller: Option<&LocalCaller>) -> Ruling;

    /// True if the policy key has signed `declassified` for `name`.
    fn accepts_declassification(&self, repository: RepositoryId, name: &Name, declassified: &Declassified) -> bool;

    /// Refuses if a policy with a higher version than `mark` was seen before: somebody replaced the log or the policy
    /// by an old one.
    ///
    /// # Errors
    /// Denied, with both versions.
    fn check_version(&self, repository: RepositoryId, mark: Option<PolicyMark>) -> Result<()> {
        let _ = (repository, mark);
        Ok(())
    }

    /// Time since which the log must have been read before something is ruled by it: somebody told of a later policy then. None: any.
    fn announced_at(&self, repository: RepositoryId) -> Option<Instant> {
        let _ = repository;
        None
    }
}

/// Guard of a process without a certificate.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unidentified;

impl Guard for Unidentified {
    fn rule_on(&self, _: Option<&PolicyText>, access: &Access<'_>, _: Option<&LocalCaller>) -> Ruling {
        if access.labels.restrict() {
            return Ruling::deny(Basis::UnknownSite);
        }
        Ruling { verdict: crate::policy::Verdict::Allow, basis: Basis::NoRule }
    }

    fn accepts_declassification(&self, _: RepositoryId, _: &Name, _: &Declassified) -> bool {
        false
    }
}

/// Log lines about policies that cannot be read.
static UNREADABLE_POLICY: LogLimit = LogLimit::new();
/// Age of a ruling on an open tree after which it is asked for again.
const RULING_AGE_MAX: Duration = Duration::from_secs(1);
/// The same, while the repository has neither labels nor a policy.
const OPEN_RULING_AGE_MAX: Duration = Duration::from_mins(1);

/// Callers whose last rulings on an open tree are remembered.
const RULED_CALLERS_MAX: usize = 64;

/// Times of the last rulings that allowed an open tree, by who asks: what one may read says nothing of another. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct LastRulings(Arc<Mutex<Vec<CallerRuling>>>);

/// Last ruling that allowed it to one caller; none: a process that nobody is known of.
#[derive(Debug)]
struct CallerRuling {
    caller: Option<LocalCaller>,
    at: Instant,
}

impl LastRulings {
    /// True if a ruling is due for `caller`: whoever asks makes it, and tells its outcome by [`Self::allowed`] or [`Self::denied`]. Only
    /// where an older one allowed, others of the same caller go on meanwhile.
    fn is_due(&self, caller: Option<&LocalCaller>, age_max: Duration) -> bool {
        let mut all = self.lock();
        let Some(last) = all.iter_mut().find(|last| last.caller.as_ref() == caller) else { return true };
        let due = last.at.elapsed() >= age_max;
        if due {
            last.at = Instant::now();
        }
        due
    }

    fn allowed(&self, caller: Option<&LocalCaller>) {
        let mut all = self.lock();
        all.retain(|last| last.caller.as_ref() != caller);
        if all.len() >= RULED_CALLERS_MAX {
            all.remove(0);
        }
        all.push(CallerRuling { caller: caller.cloned(), at: Instant::now() });
    }

    /// From now on, each request of `caller` makes a ruling of its own.
    fn denied(&self, caller: Option<&LocalCaller>) {
        self.lock().retain(|last| last.caller.as_ref() != caller);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<CallerRuling>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if `state` restricts nobody: it has neither labels nor a policy.
pub(crate) fn is_open(state: &State) -> bool {
    state.policy.is_none() && state.labels.is_empty()
}

impl Repository {
    /// Guard of this repository.
    #[must_use]
    pub fn guard(&self) -> &Arc<dyn Guard> {
        &self.shared.guard
    }

    /// Labels of the tree of `name` in `state`, or of a new tree there; if `tree` is given, also those of its other
    /// names.
    #[must_use]
    pub fn labels_in(&self, state: &State, name: &Name, tree: Option<&ManifestId>) -> Labels {
        let view = self.label_view(state);
        let labels = view.of(name);
        match tree {
            // `view.of` covers the name's own tree.
            Some(tree) if state.refs.get(name).is_none_or(|value| value.manifest != *tree) => {
                labels.joined(&view.of_tree(tree))
            }
            _ => labels,
        }
    }

    /// The action that gives `to`, in `state`, the labels of the tree that `from` stands or stood for; none if it has them already.
    /// Part of every commit that gives a name what was another's.
    ///
    /// # Errors
    /// Exhausted, for too many labels.
    pub(crate) fn inherited_labels(
        &self,
        state: &State,
        (from, tree): (&Name, &ManifestId),
        to: &Name,
    ) -> Result<Option<Action>> {
        let mut labels = self.labels_in(state, from, Some(tree));
        if labels.is_empty() {
            return Ok(None);
        }
        if from != to {
            labels = labels.with_stored("derived-from", from.as_str())?;
        }
        state.label(to, &labels.without_origin(to))
    }

    /// Labels of all content of `state`.
    #[must_use]
    pub fn label_view<'s>(&self, state: &'s State) -> LabelView<'s> {
        let (guard, id) = (Arc::clone(self.guard()), self.id());
        LabelView::new(state, move |name, declassified| guard.accepts_declassification(id, name, declassified))
    }

    /// The state to rule by: the one that was read last, unless somebody told of a later policy since then.
    ///
    /// # Errors
    /// As [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn state_for_policy(&self) -> Result<Arc<State>> {
        self.state_since(self.guard().announced_at(self.id())).await
    }

    /// Checks that what `name` stands for may come to this process.
    ///
    /// # Errors
    /// Denied, with the rule.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn check_readable(&self, name: &Name, tree: &ManifestId) -> Result<()> {
        let state = self.state_for_policy().await?;
        if is_open(&state) {
            return self.guard().check_version(self.id(), None);
        }
        let (repository, of, asked, tree) = (self.clone(), Arc::clone(&state), name.clone(), *tree);
        // Takes long where a tree has very many names.
        let labels = blocking(move || Ok(repository.labels_in(&of, &asked, Some(&tree)))).await?;
        self.check_access(&state, &Access { repository: self.id(), name, labels: &labels, to: Destination::Here }).await
    }

    /// Refusals of those of `names` whose trees may not come to this process, by the labels and the policy of `state`.
    ///
    /// # Errors
    /// Errors of the store.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn denied_here<'n>(
        &self,
        state: &State,
        names: impl IntoIterator<Item = (&'n Name, &'n RefValue)> + Send,
    ) -> Result<Vec<DeniedTree<'n>>> {
        let mut denied = Vec::new();
        if is_open(state) {
            self.guard().check_version(self.id(), None)?;
            return Ok(denied);
        }
        let view = self.label_view(state);
        let trees = view.of_all_trees();
        for (name, value) in names.into_iter().collect::<Vec<_>>() {
            let stands = state.refs.get(name).is_some_and(|now| now.manifest == value.manifest);
            let own = if stands { Labels::default() } else { view.of(name) };
            let labels = trees.get(&value.manifest).map_or(own.clone(), |of_tree| own.joined(of_tree));
            let access = Access { repository: self.id(), name, labels: &labels, to: Destination::Here };
            match self.check_access(state, &access).await {
                Err(refusal) if refusal.kind() == ErrorKind::Denied => denied.push(DeniedTree { name, value, refusal }),
                checked => checked?,
            }
        }
        Ok(denied)
    }

    /// Checks that an open tree may still come to this process, by the policy and the labels as they are now. Asks at most once a
    /// second; once a minute, while the repository has neither. If the store does not answer, what was read last decides.
    ///
    /// # Errors
    /// Denied, with the rule.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn check_still_readable(&self, saved: &Saved) -> Result<()> {
        let open = self.log().last_seen().is_some_and(|state| is_open(&state));
        if !saved.rulings.is_due(self.caller(), if open { OPEN_RULING_AGE_MAX } else { RULING_AGE_MAX }) {
            return Ok(());
        }
        if let Err(error) = self.state().await {
            tracing::debug!("the policy cannot be read again: {error:?}");
        }
        let checked = self.check_readable(&saved.name, &saved.value.manifest).await;
        match checked {
            Ok(()) => saved.rulings.allowed(self.caller()),
            Err(_) => saved.rulings.denied(self.caller()),
        }
        checked
    }

    /// Checks under the policy of this repository that content with `labels` may go to the repository `to` as `name`.
    ///
    /// # Errors
    /// Denied, with the rule.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn check_writable(&self, state: &State, name: &Name, labels: &Labels, to: &Self) -> Result<()> {
        if is_open(state) {
            return Ok(());
        }
        let addresses = to.store().addresses();
        let is_itself = to.id() == self.id() && to.store().address() == self.store().address();
        let to = if is_itself { Destination::Itself(&addresses) } else { Destination::Repository(&addresses) };
        self.check_access(state, &Access { repository: self.id(), name, labels, to }).await
    }

    /// Refusals of those of `names` that may not be copied to a new repository at `addresses`, which has no policy of its own:
    /// denied, with the rule; or conflict, if a name has labels under which nobody could read it there.
    ///
    /// # Errors
    /// Errors of the store.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn refused_anew<'n>(
        &self,
        state: &State,
        names: impl IntoIterator<Item = &'n Name> + Send,
        addresses: &[String],
    ) -> Result<Vec<(&'n Name, Error)>> {
        let mut refused = Vec::new();
        if is_open(state) {
            return Ok(refused);
        }
        let (view, place) = (self.label_view(state), first(addresses));
        for name in names.into_iter().collect::<Vec<_>>() {
            let labels = view.of(name);
            let to = Destination::Repository(addresses);
            match self.check_access(state, &Access { repository: self.id(), name, labels: &labels, to }).await {
                Err(refusal) if refusal.kind() == ErrorKind::Denied => refused.push((name, refusal)),
                checked => checked?,
            }
            if labels.restrict() {
                let refusal = Error::conflict("a new repository has no policy, so nobody could read what has labels")
                    .at(format!("{name}, to {place}"))
                    .got(format!("labels {labels}"))
                    .help(format!("make it and set its policy first: towline init {place}; towline policy set FILE"));
                refused.push((name, refusal));
            }
        }
        Ok(refused)
    }

    /// Checks `access` under the policy of `state`.
    ///
    /// # Errors
    /// Denied, with the rule.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn check_access(&self, state: &State, access: &Access<'_>) -> Result<()> {
        self.guard().check_version(self.id(), state.policy)?;
        let ruling = self.ruling_on(state, access).await?;
        if ruling.allows() { Ok(()) } else { Err(denied(access, &ruling)) }
    }

    /// Ruling on `access` under the policy of `state`.
    ///
    /// # Errors
    /// Errors of the store.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn ruling_on(&self, state: &State, access: &Access<'_>) -> Result<Ruling> {
        let policy = match self.policy_of(state).await {
            // A process that may not read the policy is bound by it all the same.
            Err(error) if matches!(error.kind(), ErrorKind::Damaged | ErrorKind::NotFound | ErrorKind::Denied) => {
                if let Some(kept_back) = UNREADABLE_POLICY.may() {
                    tracing::warn!(kept_back, "policy cannot be read: {error:?}");
                }
                None
            }
            policy => policy?,
        };
        Ok(self.guard().rule_on(policy.as_deref(), access, self.caller()))
    }
}

/// The location among the addresses of a repository.
fn first(addresses: &[String]) -> &str {
    addresses.first().map_or("", String::as_str)
}

/// Error for the denied `access`.
fn denied(access: &Access<'_>, ruling: &Ruling) -> Error {
    let (what, place) = match access.to {
        Destination::Here => ("policy denies this name here", access.name.to_string()),
        Destination::Agent(agent) => {
            ("policy denies this name to the agent", format!("{}, to {}", access.name, agent.path()))
        }
        Destination::Itself(addresses) | Destination::Repository(addresses) => {
            ("policy denies this name in the repository", format!("{}, to {}", access.name, first(addresses)))
        }
    };
    // The origins are names that whoever asks may not read.
    let labels = access.labels.clone().demands();
    let labels = if labels.is_empty() { "no labels".to_owned() } else { labels.to_string() };
    let help = match &ruling.basis {
        Basis::UnknownSite => {
            "content with labels goes only to sites that the policy describes: a machine's site is that of its certificate \
             (`towline policy show`, `towline identity show`), a repository's the [[site]] that lists it"
        }
        Basis::NoPolicy => "the repository has no policy that can be read here: `towline policy show` says why",
        _ => "`towline policy explain NAME --to SITE` shows what decides; whoever signs the policy can change it",
    };
    Error::denied(what).at(place).got(format!("{labels}; {}", ruling.basis)).help(help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_goes_on_before_a_ruling_that_allows() {
        let rulings = LastRulings::default();
        let (one, other) = (LocalCaller::token("job", Some("clinic")), LocalCaller::token("job", Some("other")));
        let due = |caller: &LocalCaller, age: Duration| rulings.is_due(Some(caller), age);
        // Requests of one caller that are there before its first ruling make their own.
        assert!(due(&one, RULING_AGE_MAX) && due(&one, RULING_AGE_MAX));
        rulings.allowed(Some(&one));
        assert!(!due(&one, RULING_AGE_MAX), "it was ruled a moment ago");
        assert!(
            due(&other, RULING_AGE_MAX) && rulings.is_due(None, RULING_AGE_MAX),
            "another tenant is another caller"
        );
        // When it is old, one renews it and the others go on.
        assert!(due(&one, Duration::ZERO));
        assert!(!due(&one, RULING_AGE_MAX));
        rulings.denied(Some(&one));
        assert!(due(&one, RULING_AGE_MAX) && due(&one, RULING_AGE_MAX), "nobody goes on after a refusal");
    }

    #[test]
    fn a_refusal_does_not_tell_the_origins() {
        let labels =
            Labels::default().with("sensitivity", "restricted").unwrap().with("derived-from", "secret/raw").unwrap();
        let name = "pub/denied".parse().unwrap();
        let access = Access { repository: RepositoryId::random(), name: &name, labels: &labels, to: Destination::Here };
        let error = denied(&access, &Ruling::deny(Basis::NoPolicy));
        assert!(error.to_string().contains("sensitivity=restricted"), "{error:?}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
}
