//! `towline handoff`: checkpoints that an agent stores for others.

use std::fmt::Write as _;

use serde::Serialize;

use super::args::{AtOption, HandoffVerb};
use super::output::{printable, table};
use super::verbs::Context;
use crate::agent::view::{Handoff, HandoffId, HandoffList};
use crate::agent::{AgentSelector, Client};
use crate::error::{Error, Result};
use crate::size::show;

impl Context {
    pub(super) async fn handoff(&self, what: HandoffVerb) -> Result<()> {
        match what {
            HandoffVerb::List(at) => self.handoffs(at).await,
            HandoffVerb::Retry { ids } => self.retry(&ids).await,
            HandoffVerb::Drop { ids } => self.drop_handoffs(&ids).await,
        }
    }

    async fn handoffs(&self, AtOption { at }: AtOption) -> Result<()> {
        let all: HandoffList = agent(at)?.get("/v1/handoffs").await?;
        if all.handoffs.is_empty() {
            self.output.remark("no checkpoints of other agents");
        }
        self.output.answer(&all, |all, _| listed(&all.handoffs))
    }

    async fn retry(&self, ids: &[String]) -> Result<()> {
        #[derive(Serialize)]
        struct All {
            retried: Vec<Handoff>,
        }
        let agent = agent(None)?;
        let mut all = All { retried: Vec::new() };
        for id in checked(ids)? {
            all.retried.push(agent.post(&format!("/v1/handoffs/{id}/retry"), &()).await?);
        }
        self.output.report(&all, |all, _| {
            let line = |kept: &Handoff| format!("saving {} again: {}\n", printable(&kept.name), printable(&kept.id));
            all.retried.iter().map(line).collect()
        })
    }

    async fn drop_handoffs(&self, ids: &[String]) -> Result<()> {
        #[derive(Serialize)]
        struct All {
            dropped: Vec<String>,
        }
        let agent = agent(None)?;
        let mut all = All { dropped: Vec::new() };
        for id in checked(ids)? {
            let HandoffId { id } = agent.delete(&format!("/v1/handoffs/{id}")).await?;
            all.dropped.push(id);
        }
        self.output.report(&all, |all, _| format!("dropped {}\n", printable(&all.dropped.join(", "))))
    }
}

fn agent(at: Option<AgentSelector>) -> Result<Client> {
    Ok(Client::required()?.routed_to(at))
}

/// # Errors
/// Usage, if one is no id: nothing is asked of the agent then.
fn checked(ids: &[String]) -> Result<&[String]> {
    match ids.iter().find(|id| !id.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
        Some(id) => Err(Error::usage("this is not an id").got(id).help("`towline handoff list` lists them")),
        None => Ok(ids),
    }
}

/// Table of handoffs, then the errors of those that were set aside.
fn listed(kept: &[Handoff]) -> String {
    if kept.is_empty() {
        return String::new();
    }
    let row = |kept: &Handoff| {
        let state = if kept.aside.is_some() { "set aside" } else { "to be saved" };
        vec![
            printable(&kept.id),
            printable(kept.from.trim_start_matches("towline://")),
            kept.since.clone(),
            show(kept.bytes),
            state.to_owned(),
            printable(&kept.name),
        ]
    };
    let rows: Vec<_> = kept.iter().map(row).collect();
    let mut text = table(&["ID", "FROM", "SINCE", ">BYTES", "STATE", "NAME"], &rows);
    for (kept, aside) in kept.iter().filter_map(|kept| kept.aside.as_ref().map(|aside| (kept, aside))) {
        // Text takes all that is written to it.
        let _ = writeln!(
            text,
            "\n{} was set aside: {}\n  what to do: {}",
            printable(&kept.id),
            printable(&aside.error),
            printable(&aside.help)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::agent::view::SetAside;

    #[test]
    fn what_was_set_aside_is_listed_with_what_to_do() {
        let kept = |aside| Handoff {
            id: "01A".into(),
            from: "towline://home/a".into(),
            since: "2026-01-01T00:00:00Z".into(),
            name: "run/step-7".into(),
            repository: "r".into(),
            labels: BTreeMap::default(),
            bytes: 2048,
            aside,
        };
        let text = listed(&[kept(None)]);
        assert!(text.contains("to be saved") && text.contains("home/a") && text.contains("2.0 KiB"), "{text}");
        let (since, kind) = ("2026-01-01T00:10:00Z".into(), "usage".into());
        let aside =
            SetAside { since, tries: 1, kind, error: "no step".into(), help: "towline handoff drop 01A".into() };
        let text = listed(&[kept(Some(aside))]);
        assert!(text.contains("set aside"), "{text}");
        assert!(text.ends_with("01A was set aside: no step\n  what to do: towline handoff drop 01A\n"), "{text}");
    }

    #[test]
    fn an_id_is_letters_and_digits() {
        assert!(checked(&["01KB".into()]).is_ok());
        assert!(checked(&["01KB".into(), "../pins".into()]).is_err());
    }
}
