//! `towline undelete` and `towline history`, and what `towline rm` says of them.

use std::fmt::Write as _;
use std::iter;

use super::args::Undelete;
use super::output::table;
use super::render;
use super::render::counted;
use super::verbs::Context;
use crate::audit::Action;
use crate::error::Result;
use crate::name::Name;
use crate::ops::{NameHistory, NameValue, RemovalCause, UndeleteOptions, UndeleteReport};
use crate::size::show;

impl Context {
    pub(super) async fn undelete(&self, undelete: Undelete) -> Result<()> {
        let Undelete { name, recursive, version, to, replace } = undelete;
        let repository = self.open().await?;
        if recursive {
            let recorded = self.record(Action::Copy, &[name.to_string()], &repository, None).await?;
            let report = recorded.end(repository.undelete_below(&name).await, |_| 0).await?;
            if let Some(first) = report.earlier.first() {
                let count = counted(report.earlier.len() as u64, "name");
                self.output.remark(&format!(
                    "{count} below {name} stay removed, as they were removed before, such as {first}: do the same again for those \
                     removed last among them, or `towline undelete` one"
                ));
            }
            return self.output.report(&report, |report, _| report.names.iter().map(undeleted).collect());
        }
        // A name that stands for something again is a copy of what it was, or what another was.
        let names: Vec<_> =
            iter::once(&name).chain(to.as_ref().filter(|to| **to != name)).map(Name::to_string).collect();
        let recorded = self.record(Action::Copy, &names, &repository, None).await?;
        let options = UndeleteOptions { version, to, replace };
        let report = recorded.end(repository.undelete(&name, &options).await, |_| 0).await?;
        self.output.report(&report, |report, _| undeleted(report))
    }

    pub(super) async fn history(&self, name: &Name) -> Result<()> {
        let history = self.open().await?.history(name).await?;
        self.output.answer(&history, |history, _| values(history))
    }
}

fn undeleted(report: &UndeleteReport) -> String {
    let UndeleteReport { name, from, value, was, replaced } = report;
    let of = if name == from { String::new() } else { format!(" of {from}") };
    format!(
        "{name} is again version {was}{of}: {}, saved {}{}\n",
        show(value.bytes),
        value.saved,
        render::replaced(replaced.as_ref()),
    )
}

fn values(history: &NameHistory) -> String {
    let row = |value: &NameValue, taken: String, until: String| {
        let manifest: String = value.manifest.chars().take(16).collect();
        vec![value.version.to_string(), show(value.bytes), value.saved.clone(), manifest, taken, until]
    };
    let mut rows: Vec<_> =
        history.present.iter().map(|value| row(value, "is there".to_owned(), String::new())).collect();
    rows.extend(history.kept.iter().map(|kept| {
        let by = match kept.taken.by {
            Some(RemovalCause::Removed) => "removed",
            Some(RemovalCause::Replaced) => "replaced",
            None => "taken",
        };
        row(&kept.value, format!("{by} {}", kept.taken.at), kept.until.clone().unwrap_or_default())
    }));
    table(&[">VERSION", ">SIZE", "SAVED", "MANIFEST", "TAKEN", "UNTIL"], &rows)
}

/// Outcome for `removed` names, of which `kept` are kept, in words.
pub(super) fn kept(removed: u64, kept: u64, forgotten: u64, now: bool) -> String {
    let mut text = String::new();
    if now {
        let _ = writeln!(text, "nothing is kept; `towline collect --grace 0` deletes at once what nothing else needs");
    } else if kept > 0 {
        let all = if removed > 1 { ", with --recursive for all below a name," } else { "" };
        let _ = writeln!(text, "`towline undelete`{all} takes it back, for 7 days unless a collect is told otherwise");
    }
    if !now && kept < removed {
        let _ = writeln!(text, "{} not kept: too many, or too large", counted(removed - kept, "name"));
    }
    if forgotten > 0 {
        let why = if now { "" } else { ", since too many are kept, or too large ones" };
        let _ = writeln!(text, "forgot {}{why}", counted(forgotten, "earlier value"));
    }
    text
}
