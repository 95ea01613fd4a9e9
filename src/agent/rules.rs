//! Rules of what other agents may do, read again when the settings file changes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::config::{Accepts, Config};
use crate::error::Result;
use crate::transfer::exchange::{Callers, Policy};
use crate::tree::Look;
use crate::work::blocking;

/// Interval between looks at the file.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The rules of `[[allow]]`, `callers` and `[[handoff.accept]]`, shared with whoever enforces them.
#[derive(Debug)]
pub(super) struct Rules {
    file: PathBuf,
    policy: Policy,
    callers: Callers,
    accepts: Option<Accepts>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// State of the file when it was last read, successfully or not.
    seen: Look,
    /// Problem of the file as it is now.
    problem: Option<String>,
}

impl Rules {
    /// The rules of `config`, which was read when its file looked as `seen`.
    pub(super) fn of(config: &Config) -> Self {
        Self {
            file: config.file.clone(),
            policy: config.policy.clone(),
            callers: config.callers.clone(),
            accepts: config.handoff.as_ref().map(|handoff| handoff.accept.clone()),
            state: Mutex::new(State { seen: config.seen, problem: None }),
        }
    }

    /// The reason why the rules in force are not those of the file.
    pub(super) fn problem(&self) -> Option<String> {
        self.state().problem.clone()
    }

    /// Looks at the file again and again.
    ///
    /// # Cancel safety
    /// Safe: rules are replaced as a whole.
    pub(super) async fn keep_up(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let rules = Arc::clone(&self);
            let looked = blocking(move || {
                rules.look();
                Ok(())
            });
            if let Err(error) = looked.await {
                tracing::warn!("settings cannot be looked at: {error}");
            }
        }
    }

    /// Takes the rules from the file, if that has changed and can be used.
    fn look(&self) {
        let seen = Look::at(&self.file);
        if seen == self.state().seen {
            return;
        }
        let read = Config::read(&self.file);
        if Look::at(&self.file) != seen {
            // The file is still being written.
            return;
        }
        self.take(seen, read);
    }

    fn take(&self, seen: Look, read: Result<Config>) {
        let mut state = self.state();
        state.seen = seen;
        match read {
            Ok(config) => {
                self.policy.replace(&config.policy);
                self.callers.replace(&config.callers);
                if let Some(accepts) = &self.accepts {
                    accepts.replace(&config.handoff.map(|handoff| handoff.accept).unwrap_or_default());
                }
                state.problem = None;
                tracing::info!(file = %self.file.display(), "read the rules again");
            }
            Err(error) => {
                let problem = format!("settings changed and cannot be used, so the rules before hold: {error}");
                tracing::warn!("{problem}: {error:?}");
                state.problem = Some(problem);
            }
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::transfer::identity::Identity;

    const SETTINGS: &str =
        "repository = '/r'\nidentity = 'i'\nlisten = '127.0.0.1:0'\ncache = { dir = 'c', capacity = '1G' }";

    fn write(file: &Path, rules: &str) {
        std::fs::write(file, format!("{SETTINGS}\n{rules}")).unwrap();
    }

    #[test]
    fn a_changed_file_changes_the_rules_and_a_bad_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("agent.toml");
        write(&file, "callers = 'home/*'\n[[allow]]\nagents = 'home/*'\nnames = 'run/*'");
        let config = Config::read(&file).unwrap();
        let (policy, callers) = (config.policy.clone(), config.callers.clone());
        let rules = Rules::of(&config);
        let may = |site: &str| {
            let agent = Identity::new(site, "a").unwrap();
            (policy.allows(&agent, &"run/1".parse().unwrap()), callers.include(&agent))
        };
        assert_eq!((may("home"), may("cloud")), ((true, true), (false, false)));

        // Withdrawn: nobody calls, and others read.
        write(&file, "[[allow]]\nagents = 'cloud/*'\nnames = '**'");
        rules.look();
        assert_eq!((may("home"), may("cloud"), rules.problem()), ((false, false), (true, false), None));

        for bad in ["", "[[allow]]\nagents = '['\nnames = '*'", "[[allow]]\nagents = 'home/*'", "[[all"] {
            write(&file, bad);
            rules.look();
            assert_eq!((may("home"), may("cloud")), ((false, false), (true, false)), "{bad}");
            assert!(rules.problem().unwrap().contains("the rules before hold"), "{bad}");
        }
        std::fs::remove_file(&file).unwrap();
        rules.look();
        assert!(rules.problem().is_some() && may("cloud").0);

        write(&file, "callers = 'home/*'\n[[allow]]\nagents = 'home/*'\nnames = 'run/*'");
        rules.look();
        assert_eq!((may("home"), may("cloud"), rules.problem()), ((true, true), (false, false), None));
    }
}
