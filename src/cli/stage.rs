//! `towline stage`: tensors in the agent's memory.

use super::args::Stage;
use super::output::{printable, table};
use super::render::by_source;
use super::verbs::Context;
use crate::agent::view::{Evicted, StagedList};
use crate::agent::{Client, StageReport, StageRequest};
use crate::error::{Error, Result};
use crate::selector::Selector;
use crate::size::show;
use crate::staging::small_pages;

impl Context {
    /// Has the agent read tensors into its memory, lists what is there, or frees it.
    pub(super) async fn stage(&self, stage: Stage) -> Result<()> {
        if stage.list {
            let staged: StagedList = Client::required()?.get("/v1/staged").await?;
            return self.output.answer(&staged, |staged, _| listed(staged));
        }
        if stage.clear {
            let freed: Evicted = Client::required()?.delete("/v1/staged").await?;
            return self.output.report(&freed, |freed, _| format!("freed {}\n", show(freed.freed_bytes)));
        }
        let Some(what) = &stage.what else { return Ok(()) };
        if stage.bench {
            return self.bench_staging(what, &stage).await;
        }
        let path = what.path.clone().map(String::from_utf8).transpose();
        let path = path.map_err(|source| {
            let error = Error::usage("path is not UTF-8, as an agent takes it").at(&what.name).source(source);
            error.help("stage the folder that it is in")
        })?;
        let request = StageRequest {
            name: what.name.to_string(),
            path,
            repository: self.named_repository()?,
            tensors: stage.tensors.iter().map(ToString::to_string).collect(),
            hold: false,
        };
        let agent = Client::required()?;
        let begun = agent.begin_staging(&request).await?;
        let line = self.line();
        let task = agent.follow(&begun.id, |view| self.relay(view)).await?;
        drop(line);
        let report = StageReport::of(&task)?;
        if matches!(what.name, Selector::Step { .. }) {
            self.output.remark(&format!("{} is {}", what.name, printable(&report.name)));
        }
        if let Some(remark) = small_pages().filter(|_| !report.reused) {
            self.output.remark(&remark);
        }
        self.output.report(&report, |report, _| staged(report))
    }
}

/// A line about what was staged.
fn staged(report: &StageReport) -> String {
    let (name, tensors, bytes) = (printable(&report.name), report.tensors, show(report.bytes));
    if report.reused {
        return format!("{name}: {tensors} tensors, {bytes}, were in memory\n");
    }
    let (fetched, from) = (show(report.fetched_bytes), by_source(&report.sources));
    let first = report.times.map_or_else(String::new, |times| format!("; the first after {:.2} s", times.first_tensor));
    format!(
        "{name}: {tensors} tensors, {bytes}, read into memory in {:.2} s from {fetched}{from}{first}\n",
        report.seconds
    )
}

/// Table of what is in memory.
fn listed(staged: &StagedList) -> String {
    let rows = staged.trees.iter().map(|tree| {
        let name = match &tree.below {
            Some(below) => format!("{}:{below}", tree.name),
            None => tree.name.clone(),
        };
        let users = if tree.users > 0 { tree.users.to_string() } else { format!("none since {}", tree.last_used) };
        vec![name, tree.selectors.join(" "), tree.tensors.to_string(), show(tree.bytes), users]
    });
    let rows: Vec<Vec<String>> = rows.map(|row| row.iter().map(|cell| printable(cell)).collect()).collect();
    let used: u64 = staged.trees.iter().map(|tree| tree.bytes).sum();
    let all = table(&["NAME", "SELECTED", ">TENSORS", ">SIZE", "USERS"], &rows);
    format!("{all}{} of {} are used\n", show(used), show(staged.memory))
}
