//! Rules for other agents, reloaded when the settings file changes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::config::{Accepts, Config};
use crate::error::Result;
use crate::policy::{AllowList, Callers};
use crate::tree::FileStamp;
use crate::work::blocking;

/// Polling interval of the settings file.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The rules of `[[allow]]`, `callers`, `scrapers` and `[[handoff.accept]]`, shared with the code that enforces them.
#[derive(Debug)]
pub(super) struct Rules {
    file: PathBuf,
    allow: AllowList,
    callers: Callers,
    scrapers: Callers,
    accepts: Option<Accepts>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// State of the file when it was last read, successfully or not.
    stamp: FileStamp,
    /// Problem with the current file, if any.
    problem: Option<String>,
}

impl Rules {
    /// Rules of `config`; `stamp` is the state of its file when it was read.
    pub(super) fn of(config: &Config) -> Self {
        Self {
            file: config.file.clone(),
            allow: config.allow.clone(),
            callers: config.callers.clone(),
            scrapers: config.scrapers.clone(),
            accepts: config.handoff.as_ref().map(|handoff| handoff.accept.clone()),
            state: Mutex::new(State { stamp: config.stamp, problem: None }),
        }
    }

    /// Reason why the rules in force differ from the file.
    pub(super) fn problem(&self) -> Option<String> {
        self.state().problem.clone()
    }

    /// Polls the file until dropped.
    ///
    /// # Cancel safety
    /// Safe: rules are replaced as a whole.
    pub(super) async fn poll(self: Arc<Self>) {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let rules = Arc::clone(&self);
            let polled = blocking(move || {
                rules.reload_if_changed();
                Ok(())
            });
            if let Err(error) = polled.await {
                tracing::warn!("cannot read the state of the settings file: {error}");
            }
        }
    }

    /// Reloads the rules if the file has changed and is valid.
    fn reload_if_changed(&self) {
        let stamp = FileStamp::at(&self.file);
        if stamp == self.state().stamp {
            return;
        }
        let read = Config::read(&self.file);
        if FileStamp::at(&self.file) != stamp {
            // Skips a file that is still being written.
            return;
        }
        self.apply(stamp, read);
    }

    fn apply(&self, stamp: FileStamp, read: Result<Config>) {
        let mut state = self.state();
        state.stamp = stamp;
        match read {
            Ok(config) => {
                self.allow.replace(&config.allow);
                self.callers.replace(&config.callers);
                self.scrapers.replace(&config.scrapers);
                if let Some(accepts) = &self.accepts {
                    accepts.replace(&config.handoff.map(|handoff| handoff.accept).unwrap_or_default());
                }
                state.problem = None;
                tracing::info!(file = %self.file.display(), "reloaded the rules");
            }
            Err(error) => {
                let causes = error.causes().join(": ").split_whitespace().collect::<Vec<_>>().join(" ");
                let causes = if causes.is_empty() { causes } else { format!(": {causes}") };
                let problem = format!("settings changed and cannot be used, so the rules before hold: {error}{causes}");
                tracing::warn!("{problem}");
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
    use crate::identity::Identity;

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
        let (allow, callers, scrapers) = (config.allow.clone(), config.callers.clone(), config.scrapers.clone());
        let rules = Rules::of(&config);
        let may = |site: &str| {
            let agent = Identity::new(site, "a").unwrap();
            (allow.allows(&agent, &"run/1".parse().unwrap()), callers.include(&agent))
        };
        let scrapes = |site: &str| scrapers.include(&Identity::new(site, "a").unwrap());
        assert_eq!((may("home"), may("cloud")), ((true, true), (false, false)));

        // Withdrawn: nobody calls, and others read.
        write(&file, "scrapers = 'cloud/*'\n[[allow]]\nagents = 'cloud/*'\nnames = '**'");
        rules.reload_if_changed();
        assert!(scrapes("cloud") && !scrapes("home"));
        assert_eq!((may("home"), may("cloud"), rules.problem()), ((false, false), (true, false), None));

        for bad in ["", "[[allow]]\nagents = '['\nnames = '*'", "[[allow]]\nagents = 'home/*'", "[[all"] {
            write(&file, bad);
            rules.reload_if_changed();
            assert_eq!((may("home"), may("cloud")), ((false, false), (true, false)), "{bad}");
            assert!(rules.problem().unwrap().contains("the rules before hold"), "{bad}");
        }
        std::fs::remove_file(&file).unwrap();
        rules.reload_if_changed();
        assert!(rules.problem().is_some() && may("cloud").0);

        write(&file, "callers = 'home/*'\n[[allow]]\nagents = 'home/*'\nnames = 'run/*'");
        rules.reload_if_changed();
        assert_eq!((may("home"), may("cloud"), rules.problem()), ((true, true), (false, false), None));
    }
}
