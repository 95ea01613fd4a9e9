//! `towline custody`: what an agent keeps for others, and what of it could not be saved.

use std::fmt::Write as _;

use serde::Serialize;

use super::args::{CustodyVerb, Elsewhere};
use super::output::{printable, table};
use super::verbs::Door;
use crate::agent::view::{Custody, Kept, KeptList};
use crate::agent::{At, Client};
use crate::error::{Error, Result};
use crate::size::show;

impl Door {
    pub(super) async fn custody(&self, what: CustodyVerb) -> Result<()> {
        match what {
            CustodyVerb::List(elsewhere) => self.kept(elsewhere).await,
            CustodyVerb::Retry { ids } => self.retry(&ids).await,
            CustodyVerb::Drop { ids } => self.let_go(&ids).await,
        }
    }

    async fn kept(&self, Elsewhere { at }: Elsewhere) -> Result<()> {
        let kept: KeptList = agent(at)?.get("/v1/custody").await?;
        if kept.kept.is_empty() {
            self.output.remark("nothing is kept for others");
        }
        self.output.answer(&kept, |kept, _| listed(&kept.kept))
    }

    async fn retry(&self, ids: &[String]) -> Result<()> {
        #[derive(Serialize)]
        struct All {
            retried: Vec<Kept>,
        }
        let agent = agent(None)?;
        let mut all = All { retried: Vec::new() };
        for id in checked(ids)? {
            all.retried.push(agent.post(&format!("/v1/custody/{id}/retry"), &()).await?);
        }
        self.output.report(&all, |all, _| {
            let line = |kept: &Kept| format!("saving {} again: {}\n", printable(&kept.name), printable(&kept.id));
            all.retried.iter().map(line).collect()
        })
    }

    async fn let_go(&self, ids: &[String]) -> Result<()> {
        #[derive(Serialize)]
        struct All {
            dropped: Vec<String>,
        }
        let agent = agent(None)?;
        let mut all = All { dropped: Vec::new() };
        for id in checked(ids)? {
            let Custody { id } = agent.delete(&format!("/v1/custody/{id}")).await?;
            all.dropped.push(id);
        }
        self.output.report(&all, |all, _| format!("dropped {}\n", printable(&all.dropped.join(", "))))
    }
}

fn agent(at: Option<At>) -> Result<Client> {
    Ok(Client::required()?.elsewhere(at))
}

/// # Errors
/// Usage, if one is no id: nothing is asked of the agent then.
fn checked(ids: &[String]) -> Result<&[String]> {
    match ids.iter().find(|id| !id.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
        Some(id) => Err(Error::usage("this is not an id").got(id).help("`towline custody list` lists them")),
        None => Ok(ids),
    }
}

/// A table of what is kept, then the failures of what was set aside.
fn listed(kept: &[Kept]) -> String {
    let row = |kept: &Kept| {
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
    use crate::agent::view::Aside;

    #[test]
    fn what_was_set_aside_is_listed_with_what_to_do() {
        let kept = |aside| Kept {
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
        let aside = Aside { since, tries: 1, kind, error: "no step".into(), help: "towline custody drop 01A".into() };
        let text = listed(&[kept(Some(aside))]);
        assert!(text.contains("set aside"), "{text}");
        assert!(text.ends_with("01A was set aside: no step\n  what to do: towline custody drop 01A\n"), "{text}");
    }

    #[test]
    fn an_id_is_letters_and_digits() {
        assert!(checked(&["01KB".into()]).is_ok());
        assert!(checked(&["01KB".into(), "../pins".into()]).is_err());
    }
}
