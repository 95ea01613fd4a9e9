//! Labels of names: look at them, tighten them, hand them on.

#[cfg(feature = "agent")]
use std::collections::BTreeMap;
use std::collections::BTreeSet;

use serde::Serialize;

use super::save::SaveOptions;
use super::stand_alone::has_foreign_bases;
use crate::error::{Error, Result};
use crate::id::ManifestId;
use crate::name::Name;
use crate::policy::Labels;
use crate::repository::log::{Action, Declassified, REASON_LEN_MAX, State, labelled_name};
use crate::repository::{NameScope, Repository, StoredChunks, is_open};

/// Labels of a name.
#[derive(Clone, Debug, Serialize)]
pub struct Labelled {
    /// Name or prefix.
    pub name: String,
    /// Labels that bind it: its own, those of its prefixes, of other names of the same tree, and of what it was made from.
    pub labels: Labels,
    /// Labels that the name itself has.
    pub own: Labels,
    /// Names below it that its own labels and those of its prefixes bind, too.
    pub names_below: usize,
    /// True if a signed declassification takes the place of its own labels.
    pub declassified: bool,
}

/// Options of a save, without the labels that bind.
pub(super) struct BoundOptions {
    /// Options, with free labels alone.
    pub(super) options: SaveOptions,
    /// Labels of the name, or of the run that it is a step of.
    pub(super) labels: Labels,
}

impl Repository {
    /// The labels of `name`, or those that it would begin with.
    ///
    /// # Errors
    /// The store's.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn labels(&self, name: &Name) -> Result<Labelled> {
        let state = self.state().await?;
        let view = self.label_view(&state);
        let below = state.refs.keys().filter(|other| *other != name && other.is_under(name));
        Ok(Labelled {
            name: name.to_string(),
            labels: view.of(name),
            own: state.labels.get(name).cloned().unwrap_or_default(),
            names_below: if state.own_labels(name).is_empty() { 0 } else { below.count() },
            declassified: view.is_declassified(name),
        })
    }

    /// Joins `labels` to those of `name`, and of every name below it. There is no way to loosen them but a signed declassification.
    ///
    /// # Errors
    /// Conflict, if they restrict and the repository has no policy: nobody could read the name then; and if they leave no place for the
    /// content, unless their residency is empty itself.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn tighten(&self, name: &Name, labels: &Labels) -> Result<Labelled> {
        self.check_residency(&*self.state().await?, name, labels)?;
        self.add_labels(name, labels, &NameScope::default()).await?;
        self.labels(name).await
    }

    /// Refuses `given` labels of `name` whose residency has nothing in common with the one that it has: only a declassification would
    /// undo that.
    fn check_residency(&self, state: &State, name: &Name, given: &Labels) -> Result<()> {
        let own = self.labels_in(state, name, state.refs.get(name).map(|value| &value.manifest));
        let (Some(before), Some(asked)) = (own.residency(), given.residency()) else { return Ok(()) };
        if before.is_empty() || asked.is_empty() || !before.is_disjoint(asked) {
            return Ok(());
        }
        let list = |codes: &BTreeSet<String>| codes.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        Err(Error::conflict(
            "no place would be left for the content: its residency and the new one have none in common",
        )
        .at(name)
        .expected(format!("one of {}", list(before)))
        .got(list(asked))
        .help("`residency=-` forbids it everywhere; only `towline declassify` undoes that"))
    }

    pub(super) async fn add_labels(&self, name: &Name, labels: &Labels, scope: &NameScope) -> Result<()> {
        if labels.is_empty() {
            return Ok(());
        }
        self.check_labels(&*self.state().await?, name, labels)?;
        let commit = self.log().commit(None, |state| {
            let actions: Vec<Action> = state.label(name, labels)?.into_iter().collect();
            self.check_label_scope(state, (None, &actions), scope)?;
            Ok(actions)
        });
        commit.await.map(drop)
    }

    /// Refuses `labels` of `name` under which nobody could read it.
    fn check_labels(&self, state: &State, name: &Name, labels: &Labels) -> Result<()> {
        if state.policy.is_some() || !labels.restrict() {
            return Ok(());
        }
        Err(Error::conflict("the repository has no policy, so nobody could read what has labels")
            .at(format!("{name} in {}", self.store().location()))
            .got(format!("labels {labels}"))
            .help("set a policy first: towline policy set FILE"))
    }

    /// Gives `to` the labels of what `from` stands for, and says that it was made from that. For whoever copies content by itself.
    ///
    /// # Errors
    /// Not found, if there is no `from`; denied, if it may not be read here; exhausted, for too many labels.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn inherit_labels(&self, from: &Name, to: &Name) -> Result<()> {
        let manifest = self.current(&*self.state().await?, from)?.manifest;
        self.check_readable(from, &manifest).await?;
        let commit = self.log().commit(None, |state| {
            let manifest = self.current(state, from)?.manifest;
            Ok(self.inherited_labels(state, (from, &manifest), to)?.into_iter().collect())
        });
        commit.await.map(drop)
    }

    /// The labels that the name has in `source`, if the policy there lets it come here. Of the names below it, which would have them
    /// as well, only those that have `come` from there may get stricter.
    pub(super) async fn coming_labels(
        &self,
        source: (&Self, &State),
        name: &Name,
        come: &BTreeSet<Name>,
    ) -> Result<Labels> {
        let (from, state) = source;
        let labels = from.labels_in(state, name, state.refs.get(name).map(|value| &value.manifest));
        from.check_writable(state, name, &labels, self).await?;
        self.check_policy_here(name, &labels).await?;
        let here = self.state().await?;
        check_below(&here, (name, &labels), come)?;
        self.check_labels(&here, name, &labels)?;
        Ok(labels)
    }

    /// Gives the name of this repository the `labels` of a source, just before it gets the tree of that.
    pub(super) async fn take_labels(&self, name: &Name, labels: &Labels, come: &BTreeSet<Name>) -> Result<()> {
        if labels.is_empty() {
            return Ok(());
        }
        let commit = self.log().commit(None, |state| {
            check_below(state, (name, labels), come)?;
            Ok(state.label(name, labels)?.into_iter().collect())
        });
        commit.await.map(drop)
    }

    /// Checks by the policy of this repository that content with `labels` may be stored in it under `name`, which may have others.
    ///
    /// # Errors
    /// Denied, with the rule; conflict, for a residency that has nothing in common with that of the name.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    async fn check_policy_here(&self, name: &Name, labels: &Labels) -> Result<()> {
        let state = self.state().await?;
        self.check_residency(&state, name, labels)?;
        let bound = labels.clone().joined(&self.labels_in(&state, name, None));
        self.check_writable(&state, name, &bound, self).await
    }

    /// Checks that the content of `from`, its tree `tree`, may be read here and stored under `to`.
    ///
    /// # Errors
    /// Denied, with the rule; conflict, as [`Self::check_policy_here`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(super) async fn check_copy(&self, (from, tree): (&Name, &ManifestId), to: &Name) -> Result<()> {
        self.check_readable(from, tree).await?;
        let labels = self.labels_in(&*self.state().await?, from, Some(tree));
        self.check_policy_here(to, &labels).await
    }

    /// Takes the labels that bind out of the options of a save, and checks that content with them may be stored here. Whoever
    /// publishes the save commits them with it: [`Publication::labels`](crate::repository::Publication::labels).
    pub(super) async fn bind(&self, name: &Name, options: &SaveOptions) -> Result<BoundOptions> {
        let (mut labels, others) = Labels::split(&options.labels)?;
        let state = self.state().await?;
        if let Some(base) = &options.base {
            let stricter = self.labels_in(&state, base, None);
            if stricter.restrict() && !self.labels_in(&state, name, None).imply(&stricter) {
                labels = labels.joined(&stricter).with_stored("derived-from", base.as_str())?;
            }
        }
        self.check_residency(&state, name, &labels)?;
        // Labels of what it is said to be made from bind it, as they will once that is recorded.
        let origins = labels.origins().iter().map(|origin| self.labels_in(&state, origin, None));
        let bound = origins.fold(self.labels_in(&state, name, None).joined(&labels), |bound, more| bound.joined(&more));
        self.check_writable(&state, name, &bound, self).await?;
        self.check_labels(&state, name, &labels)?;
        Ok(BoundOptions { options: SaveOptions { labels: others, ..options.clone() }, labels })
    }

    /// As [`Self::bind`], but commits the labels at once: of a save in parts, each of which must find them.
    pub(super) async fn bind_first(&self, name: &Name, options: &SaveOptions) -> Result<SaveOptions> {
        let BoundOptions { options, labels } = self.bind(name, options).await?;
        self.add_labels(&labelled_name(name), &labels, &options.label_scope).await?;
        Ok(options)
    }

    /// Prepares a declassification of what `name` stands for: `labels` in place of all that it has, for `reason`. The caller signs its
    /// statement.
    ///
    /// # Errors
    /// Not found, if there is no such name; usage, for a reason that is empty or too long; conflict, if some of its chunks are stored
    /// as differences to chunks of other names, or if another name stands for the same tree under labels that stay.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn plan_declassification(&self, name: &Name, labels: Labels, reason: &str) -> Result<Declassified> {
        if reason.is_empty() || reason.len() > REASON_LEN_MAX {
            let error =
                Error::usage("declassification needs a reason").expected(format!("1 to {REASON_LEN_MAX} bytes"));
            return Err(error.got(format!("{} bytes", reason.len())));
        }
        let saved = self.saved(name).await?;
        if has_foreign_bases(&saved) {
            return Err(Error::conflict("name needs chunks that its files do not have, which stay classified")
                .at(name)
                .help(format!(
                    "make a copy that needs none: towline cp --stand-alone {name} NEW; then declassify that"
                )));
        }
        let state = self.state().await?;
        let others =
            state.refs.iter().filter(|(other, value)| *other != name && value.manifest == saved.value.manifest);
        for (other, _) in others {
            if !labels.imply(&state.own_labels(other)) {
                return Err(Error::conflict("another name stands for the same tree and stays classified")
                    .at(name)
                    .got(other)
                    .help("declassify or remove that name, too"));
            }
        }
        let reason = reason.to_owned();
        let replaces = state.own_labels(name);
        Ok(Declassified { manifest: saved.value.manifest, labels, replaces, reason, signature: Vec::new() })
    }

    /// Records a signed declassification of `name`.
    ///
    /// # Errors
    /// Conflict, if the name moved or got other labels since it was signed.
    ///
    /// # Cancel safety
    /// Not safe: it may have happened.
    pub async fn declassify(&self, name: &Name, declassified: Declassified) -> Result<Labelled> {
        let replaces = declassified.replaces.clone();
        let action = Action::Declassify { name: name.clone(), declassified };
        let decide = |state: &State| {
            if state.own_labels(name) == replaces {
                return Ok(vec![action.clone()]);
            }
            Err(Error::conflict("name got other labels meanwhile").at(name).help("declassify it again"))
        };
        self.log().commit(None, decide).await?;
        self.labels(name).await
    }

    /// The chunks that a save may rely on. Where labels or a policy restrict somebody, or the saver has limited rights, those that
    /// are stored as differences are not among them: whoever reads a chunk may read its base, which may be another name's.
    pub(super) async fn stored_for(&self, scope: &NameScope) -> Result<StoredChunks> {
        let known = StoredChunks::load(self).await?;
        let is_restricted = !is_open(known.state()) || scope.is_limited();
        Ok(if is_restricted { known.without_differences() } else { known })
    }
}

/// Refuses `labels` from another repository for `name` that would bind names below it, unless these have `come` from there, too.
fn check_below(state: &State, (name, labels): (&Name, &Labels), come: &BTreeSet<Name>) -> Result<()> {
    let mut others = state.tightened_below(name, labels).filter(|other| !come.contains(*other));
    let Some(first) = others.next() else { return Ok(()) };
    Err(Error::conflict("labels of the source would bind names of the destination that did not come from it")
        .at(name)
        .expected("labels that the names below it have already")
        .got(format!("labels {labels}, which {first} lacks"))
        .help(format!("if they should bind all names below it: `towline label {name} {labels}` at the destination; then sync again")))
}

/// Free labels and labels that bind, as one list: for whoever saves it elsewhere.
#[cfg(feature = "agent")]
pub(crate) fn all_labels(free: &BTreeMap<String, String>, binding: &Labels) -> BTreeMap<String, String> {
    let binding = binding.pairs().into_iter().map(|(key, value)| (key.to_owned(), value));
    free.clone().into_iter().chain(binding).collect()
}
