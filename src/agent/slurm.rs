//! Hints for Slurm: small files that `job_submit.lua` reads while slurmctld waits, one for each name that a job may read.
//!
//! ```text
//! towline 1
//! at <seconds since 1970>
//! users <users, with commas, or *>
//! elsewhere <allow|deny|unknown>
//! <site> <allow|deny|unknown> <missing bytes> <milliseconds, median> <micro-dollars> <first denial>    with tabs
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::getuid;
use tokio::time::{MissedTickBehavior, interval};

use super::advisor::{Advisor, Epoch, HintCaller};
use super::state::AgentState;
use super::user::user_name;
use super::user_rules::{ALL, UserRules};
use crate::error::{Error, Result};
use crate::log_limit::LogLimit;
use crate::name::Name;
use crate::pattern::Patterns;
use crate::placement::{Hint, HintRequest};
use crate::policy::LocalCaller;
use crate::repository::Repository;
use crate::repository::log::State;
use crate::selector::Selector;
use crate::work::blocking;

/// Interval at which the files are written. `towline.lua` ignores those older than ten minutes.
const EVERY: Duration = Duration::from_secs(30);
/// Maximum number of files: as many as an advisor keeps up to date.
const FILES_MAX: usize = 64;
/// Time that a hint waits for chunks that are not read yet; all hints together must not take minutes.
const WAIT: Duration = Duration::from_secs(3);
/// First line of a file.
const FIRST: &str = "towline 1\n";
/// Start of the names of files that are being written.
const UNFINISHED: &str = ".new-";
/// Log lines about names without hints.
static WARNINGS: LogLimit = LogLimit::new();
/// Permissions of a file: the group of the folder may read it, as a denial is not for everybody.
const MODE: u32 = 0o640;

/// Files of hints for Slurm.
#[derive(Clone, Debug)]
pub struct SlurmHints {
    /// Folder that they are written to.
    pub dir: PathBuf,
    /// Rules of who may ask about what.
    pub rules: UserRules,
}

/// Writes the files of `hints` until it is dropped.
///
/// # Cancel safety
/// Safe: every file is whole.
pub(super) async fn run(state: Arc<AgentState>, hints: SlurmHints) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = write(&state, &hints).await {
            tracing::warn!(dir = %hints.dir.display(), "hints for Slurm are not written: {error:?}");
        }
    }
}

async fn write(state: &AgentState, hints: &SlurmHints) -> Result<()> {
    let origin = state.origin(None)?;
    let advisor = state.advisor(origin)?;
    let epoch = advisor.epoch().await?;
    let (log, rules) = (Arc::clone(epoch.log()), hints.rules.clone());
    let mut wanted = blocking(move || Ok(wanted(&log, &rules))).await?;
    if wanted.len() > FILES_MAX
        && let Some(kept_back) = WARNINGS.may()
    {
        tracing::warn!(
            names = wanted.len(),
            files = FILES_MAX,
            kept_back,
            "not all names of [[advisor.slurm]] get hints"
        );
    }
    wanted.truncate(FILES_MAX);
    let mut files = BTreeSet::new();
    for (selector, users) in wanted {
        let file = file_name(&selector.to_string());
        let (path, now) = (hints.dir.join(&file), state.now().0 / 1_000_000_000);
        let written = async {
            let text = text(&hint_of(advisor, &epoch, origin, &selector).await?, &users, now);
            blocking(move || put(&path, &text)).await
        };
        match written.await {
            Ok(()) => drop(files.insert(file)),
            Err(error) => {
                if let Some(kept_back) = WARNINGS.may() {
                    tracing::warn!(name = %selector, kept_back, "no hint for Slurm: {error:?}");
                }
            }
        }
    }
    let dir = hints.dir.clone();
    blocking(move || remove_others(&dir, &files)).await
}

async fn hint_of(advisor: &Advisor, epoch: &Arc<Epoch>, origin: &Repository, selector: &Selector) -> Result<Hint> {
    let reader = origin.for_caller(Some(LocalCaller::user(&user_name(getuid()))));
    let name = selector.resolve(epoch.log())?;
    advisor.hint(epoch, &reader, &HintRequest::about([selector]), &[name], (WAIT, HintCaller::User)).await
}

/// Names, and `RUN@latest` of runs, with the users who may ask about them. Rules take turns, each with those that were saved last, so
/// that no team's names keep out another's.
fn wanted(log: &State, rules: &UserRules) -> Vec<(Selector, BTreeSet<String>)> {
    let mut turns: Vec<_> = rules.0.iter().map(|rule| latest_of(log, &rule.names).into_iter()).collect();
    let mut found: Vec<String> = Vec::new();
    let mut selectors: BTreeMap<String, (Selector, BTreeSet<String>)> = BTreeMap::new();
    let mut left = true;
    while left {
        left = false;
        for (rule, turn) in rules.0.iter().zip(&mut turns) {
            let Some(selector) = turn.next() else { continue };
            left = true;
            let text = selector.to_string();
            let (_, users) = selectors.entry(text.clone()).or_insert_with(|| {
                found.push(text);
                (selector, BTreeSet::new())
            });
            users.extend(rule.users.iter().cloned());
        }
    }
    found.iter().filter_map(|text| selectors.remove(text)).collect()
}

/// Names that match, of each run the latest step alone, and its `RUN@latest`; those that were saved last come first.
fn latest_of(log: &State, names: &Patterns) -> Vec<Selector> {
    let matching: Vec<&Name> = log.refs.keys().filter(|name| names.take(name.as_str())).collect();
    let mut latest: BTreeMap<Name, (u64, &Name)> = BTreeMap::new();
    for &name in &matching {
        if let Some((run, step)) = name.step() {
            let newest = latest.entry(run).or_insert((step, name));
            if newest.0 <= step {
                *newest = (step, name);
            }
        }
    }
    let steps: BTreeSet<&Name> = latest.values().map(|(_, name)| *name).collect();
    let mut found: Vec<(i64, Selector)> = Vec::new();
    for name in matching.into_iter().filter(|name| name.step().is_none() || steps.contains(name)) {
        let saved = log.refs.get(name).map_or(0, |value| value.saved.0);
        if let Some(selector) = name.step().and_then(|(run, _)| format!("{run}@latest").parse().ok()) {
            found.push((saved, selector));
        }
        found.push((saved, Selector::Name(name.clone())));
    }
    found.sort_by_key(|(saved, selector)| (std::cmp::Reverse(*saved), selector.to_string()));
    found.into_iter().map(|(_, selector)| selector).collect()
}

fn text(hint: &Hint, users: &BTreeSet<String>, at: i64) -> String {
    // `*` alone is all.
    let users: Vec<&str> = match users.get(ALL) {
        Some(all) => vec![all],
        None => users.iter().map(String::as_str).collect(),
    };
    let elsewhere = hint.elsewhere.word();
    let mut text = format!("{FIRST}at {at}\nusers {}\nelsewhere {elsewhere}\n", users.join(","));
    for candidate in &hint.candidates {
        let verdict = candidate.verdict.word();
        let denial = candidate.deny.first().map(|denial| printable(&denial.rule)).unwrap_or_default();
        let (missing, usd) = (candidate.bytes.missing, candidate.usd_micro.total);
        let time = candidate.eta_s.p50 * 1000.0;
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}\t{verdict}\t{missing}\t{time:.0}\t{usd}\t{denial}", candidate.site);
    }
    text
}

/// `text` on one line, without control characters.
fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(200).collect()
}

/// File name of the hint about `name`: bytes other than letters, digits and `.`, `_`, `@`, `-` become `%` and two digits.
fn file_name(name: &str) -> String {
    let mut file = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'@' | b'-' => file.push(byte.into()),
            // Files that begin with a dot are unfinished ones.
            b'.' if !file.is_empty() => file.push('.'),
            // Writing to a string does not fail.
            _ => drop(write!(file, "%{byte:02x}")),
        }
    }
    file
}

fn put(path: &Path, text: &str) -> Result<()> {
    let failed = |error| Error::io("cannot write a hint for Slurm", path, error);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = path.with_file_name(format!("{UNFINISHED}{name}"));
    // One of a write that broke off, or what others put there: a link must not be followed.
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(&unfinished).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    // Whatever the umask is.
    file.set_permissions(fs::Permissions::from_mode(MODE)).map_err(failed)?;
    fs::rename(&unfinished, path).map_err(failed)
}

/// True if the file at `path` is a hint.
fn is_hint(path: &Path) -> bool {
    let mut first = [0; FIRST.len()];
    fs::File::open(path).and_then(|mut file| file.read_exact(&mut first)).is_ok() && first == FIRST.as_bytes()
}

/// Removes hints about other names; leaves other files alone.
fn remove_others(dir: &Path, files: &BTreeSet<String>) -> Result<()> {
    let failed = |error| Error::io("cannot remove an old hint for Slurm", dir, error);
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let is_wanted = name.to_str().is_some_and(|name| files.contains(name));
        if entry.file_type().map_err(failed)?.is_file() && !is_wanted && is_hint(&entry.path()) {
            fs::remove_file(entry.path()).map_err(failed)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_names_of_files() {
        for (name, file) in [
            ("run-7@latest", "run-7@latest"),
            ("team a/x", "team%20a%2fx"),
            (".hidden", "%2ehidden"),
            ("v1.5", "v1.5"),
            ("\u{e9}", "%c3%a9"),
        ] {
            assert_eq!(file_name(name), file);
        }
        assert_eq!(printable("a\tb\nc"), "a b c");
    }

    #[test]
    fn a_link_in_place_of_an_unfinished_hint_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("precious");
        fs::write(&target, "precious").unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join(format!("{UNFINISHED}n"))).unwrap();
        put(&dir.path().join("n"), "hint").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        assert_eq!(fs::read_to_string(dir.path().join("n")).unwrap(), "hint");
    }
}
