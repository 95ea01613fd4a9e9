//! Names for a caller that may not read all of them: lookups and errors depend only on the readable ones.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::log::{RefValue, State};
use super::{Repository, no_such_name};
use crate::error::Result;
use crate::id::RepositoryId;
use crate::name::Name;
use crate::selector::Selector;

impl Repository {
    /// Resolves `selector` among the names that `may` be read. Any other name is absent: the same error and the same
    /// reads, whether it exists or not.
    ///
    /// # Errors
    /// Not found, for a name or run that does not exist, or that may not be read; else as [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: a read that has begun goes on.
    pub async fn resolve_readable(&self, selector: &Selector, may: impl Fn(&Name) -> bool) -> Result<Name> {
        choose_readable(selector, &*self.state_since(Some(Instant::now())).await?, may, self.id())
    }
}

/// Names that somebody may read, for several selectors.
#[derive(Debug)]
pub struct ReadableNames(State);

impl ReadableNames {
    /// The names of `state` that `may` be read.
    pub fn of(state: &State, may: impl Fn(&Name) -> bool) -> Self {
        let own = state.refs.iter().filter(|(name, _)| may(name));
        let refs: BTreeMap<Name, RefValue> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
        Self(State { refs, ..State::default() })
    }

    /// As [`choose_readable`].
    ///
    /// # Errors
    /// As [`choose_readable`].
    pub fn choose(&self, selector: &Selector, repository: RepositoryId) -> Result<Name> {
        let name = selector.resolve(&self.0)?;
        if self.0.refs.contains_key(&name) {
            return Ok(name);
        }
        Err(no_such_name(&self.0.refs, &name, format!("repository {repository}")))
    }
}

/// Resolves `selector` among the names of `state` that `may` be read. The error depends on these alone.
///
/// # Errors
/// Not found, for a name or run that does not exist, or that may not be read.
pub fn choose_readable(
    selector: &Selector,
    state: &State,
    may: impl Fn(&Name) -> bool,
    repository: RepositoryId,
) -> Result<Name> {
    if let Selector::Name(name) = selector
        && may(name)
        && state.refs.contains_key(name)
    {
        return Ok(name.clone());
    }
    ReadableNames::of(state, may).choose(selector, repository)
}

#[cfg(test)]
mod tests {
    use super::super::runs::tests::{name, value};
    use super::*;

    fn state(names: &[&str]) -> State {
        let refs = (1..).zip(names).map(|(version, text)| (name(text), value(version, &[]))).collect();
        State { refs, ..State::default() }
    }

    #[test]
    fn what_may_not_be_read_is_as_what_is_not_there() {
        let all = state(&["run-7/step-1", "run-7/step-9", "secret/step-1", "run-7/secret"]);
        let without = state(&["run-7/step-1"]);
        let may = |name: &Name| name.as_str() == "run-7/step-1" || name.as_str() == "run-7/step-2";
        let id = RepositoryId::random();
        let chosen = |text: &str, state: &State| {
            choose_readable(&text.parse().unwrap(), state, may, id).map_err(|error| format!("{error:?}"))
        };
        assert_eq!(chosen("run-7/step-1", &all), Ok(name("run-7/step-1")));
        assert_eq!(chosen("run-7@latest", &all), Ok(name("run-7/step-1")), "a choice is made among what may be read");
        for text in ["secret/step-1", "run-7/secret", "run-7/step-9", "secret@latest", "none", "run-7/step-2", "secret"]
        {
            let refused = chosen(text, &all);
            assert!(refused.is_err(), "{text}");
            assert_eq!(refused, chosen(text, &without), "{text}");
        }
    }
}
