//! Names for a caller that may not read all of them: lookups and errors depend only on the readable ones.

use std::collections::BTreeMap;
use std::fmt::Display;

use tokio::time::Instant;

use super::Repository;
use super::log::{RefValue, State};
use super::missing::{absent_name, absent_run};
use super::runs::Run;
use crate::error::{Error, Result};
use crate::id::RepositoryId;
use crate::name::Name;
use crate::selector::Selector;
use crate::work::blocking;

impl Repository {
    /// Resolves `selector` among the names that `may` be read. Any other name is absent: the same error and the same
    /// reads, whether it exists or not.
    ///
    /// # Errors
    /// Not found, for a name or run that does not exist, or that may not be read; else as [`Repository::state`].
    ///
    /// # Cancel safety
    /// Safe: a read that has begun goes on.
    pub async fn resolve_readable(
        &self,
        selector: &Selector,
        may: impl Fn(&Name) -> bool + Send + 'static,
    ) -> Result<Name> {
        let state = self.state_since(Some(Instant::now())).await?;
        match selector {
            Selector::Name(name) if may(name) && state.refs.contains_key(name) => Ok(name.clone()),
            // A run may have many steps, and an error looks at all names.
            _ => {
                let (selector, repository) = (selector.clone(), self.id());
                blocking(move || choose_readable(&selector, &state, may, repository)).await
            }
        }
    }
}

/// Names of a state that somebody `may` read, for several selectors: the steps of each run are looked up once.
#[derive(Debug)]
pub struct ReadableNames<'a, M> {
    refs: &'a BTreeMap<Name, RefValue>,
    may: M,
    runs: BTreeMap<Name, Option<Run<'a>>>,
}

impl<'a, M: Fn(&Name) -> bool> ReadableNames<'a, M> {
    /// The names of `state` that `may` be read.
    pub fn of(state: &'a State, may: M) -> Self {
        Self { refs: &state.refs, may, runs: BTreeMap::new() }
    }

    /// Resolves `selector` in the repository that errors call `place`. The error depends on the readable names alone.
    ///
    /// # Errors
    /// Not found, for a name or run that does not exist, or that may not be read.
    pub fn choose(&mut self, selector: &Selector, place: impl Display) -> Result<Name> {
        let Self { refs, may, runs } = self;
        let readable = || refs.keys().filter(|name| may(name));
        match selector {
            Selector::Name(name) if may(name) && refs.contains_key(name) => Ok(name.clone()),
            Selector::Name(name) => Err(absent_name(readable, name, place)),
            Selector::Step { run, choice } => {
                let found = runs.entry(run.clone()).or_insert_with(|| Run::find_among(refs, run, &*may));
                let steps = found.as_ref().ok_or_else(|| absent_run(readable, run))?;
                Ok(steps.choose(choice)?.name.clone())
            }
        }
    }

    /// Resolves all `selectors`.
    ///
    /// # Errors
    /// As [`ReadableNames::choose`], with the place of the selector.
    pub fn choose_all(&mut self, selectors: &[Selector], place: impl Display) -> Result<Vec<Name>, (usize, Error)> {
        let chosen = |(at, selector)| self.choose(selector, &place).map_err(|error| (at, error));
        selectors.iter().enumerate().map(chosen).collect()
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
    ReadableNames::of(state, may).choose(selector, format_args!("repository {repository}"))
}

#[cfg(test)]
mod tests {
    use super::super::runs::tests::{name, value};
    use super::*;

    fn state(names: &[&str]) -> State {
        let refs = (1..).zip(names).map(|(version, text)| (name(text), value(version, &[]))).collect();
        State::of(refs)
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

    #[test]
    fn many_choices_look_at_the_steps_of_a_run_once_and_at_no_others() {
        let mut names: Vec<String> = (0..1000).map(|number| format!("run-7/step-{number}")).collect();
        names.extend((0..1000).map(|number| format!("run-8/step-{number}")));
        let all = state(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let looks = std::cell::Cell::new(0);
        let mut readable = ReadableNames::of(&all, |_| {
            looks.set(looks.get() + 1);
            true
        });
        let selectors: Vec<Selector> =
            (1..=256).map(|number| format!("run-7@upto={number}").parse().unwrap()).collect();
        let chosen = readable.choose_all(&selectors, "here").map_err(|(at, _)| at).unwrap();
        assert_eq!(chosen[255], name("run-7/step-256"));
        assert_eq!(looks.get(), 1000);
        let (at, error) = readable.choose_all(&["run-7".parse().unwrap()], "here").unwrap_err();
        assert!(at == 0 && error.to_string().contains("`run-7` is a run: try `run-7@latest`"), "{error:?}");
    }
}
