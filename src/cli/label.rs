//! `towline label`.

use super::output::printable;
use super::render::counted;
use super::verbs::Context;
use crate::audit::Action;
use crate::error::{Error, Result};
use crate::name::Name;
use crate::ops::Labelled;
use crate::policy::Labels;
use crate::repository::Repository;
use crate::selector::Selector;

impl Context {
    /// Shows the labels of `selected`, after adding `labels`.
    pub(super) async fn label(&self, selected: &Selector, labels: &[(String, String)]) -> Result<()> {
        let repository = self.open().await?;
        let name = &match selected {
            // A prefix of names, perhaps.
            Selector::Name(name) => name.clone(),
            Selector::Step { .. } if labels.is_empty() => self.resolve(&repository, selected).await?,
            Selector::Step { .. } => {
                return Err(Error::usage("labels are given to a name, not to a choice among steps")
                    .at(selected)
                    .help("they bind all steps of the run: name the run, or one step"));
            }
        };
        let given = labels.iter().try_fold(Labels::default(), |given, (key, value)| given.with(key, value))?;
        let labelled = if given.is_empty() {
            repository.labels(name).await?
        } else {
            let before = repository.labels(name).await.ok();
            let recorded = self.record(Action::Label, &[name.to_string()], &repository, None).await?;
            let labelled = recorded.end(repository.tighten(name, &given).await, |_| 0).await?;
            if before.is_some_and(|before| before.own == labelled.own) {
                self.output.remark(&format!("{} had these labels before", printable(name.as_str())));
            }
            labelled
        };
        let state = repository.state().await?;
        if !state.refs.keys().any(|other| other.is_under(name)) {
            self.output.remark(&format!("nothing is saved as {} or below it yet", printable(name.as_str())));
        }
        // All names below a prefix have its labels, so the first one is checked.
        let bound = state.refs.iter().find(|(other, _)| other.is_under(name)).filter(|_| !given.is_empty());
        if let Some((bound, value)) = bound
            && let Err(error) = repository.check_readable(bound, &value.manifest).await
        {
            let (bound, why) = (printable(bound.as_str()), printable(&error.to_string()));
            self.output.remark(&format!("with these labels {bound} cannot be read here any more: {why}"));
        }
        self.output.answer(&labelled, |labelled, _| described(labelled))?;
        let more: Vec<&Name> = state
            .labels
            .iter()
            .filter_map(|(below, labels)| {
                (below != name && below.is_under(name) && !labelled.labels.imply(labels)).then_some(below)
            })
            .collect();
        if let Some(first) = more.first() {
            let names = counted(more.len() as u64, "name");
            self.output.remark(&format!(
                "{names} below it, such as {first}, with more labels of their own: `towline label {first}`"
            ));
        }
        self.tell_free_labels(&repository, name).await;
        Ok(())
    }

    /// Says which labels the tree of `name` has that bind nothing, if it can be read.
    async fn tell_free_labels(&self, repository: &Repository, name: &Name) {
        let Ok(saved) = repository.saved(name).await else { return };
        let keys: Vec<&str> = saved.manifest.labels.keys().map(String::as_str).collect();
        if !keys.is_empty() {
            let keys = printable(&keys.join(", "));
            self.output.remark(&format!(
                "its tree has other labels, which bind nothing: {keys}; `towline show {name}` shows them"
            ));
        }
    }
}

pub(super) fn described(labelled: &Labelled) -> String {
    let binding = if labelled.labels.is_empty() { "no labels".to_owned() } else { labelled.labels.to_string() };
    let from = match (&labelled.own, labelled.declassified) {
        (_, true) => "  declassified\n".to_owned(),
        (own, _) if *own == labelled.labels => String::new(),
        (own, _) if own.is_empty() => {
            "  inherited: from a name above, an origin, or another name of the same content\n".to_owned()
        }
        (own, _) => format!("  of its own: {own}\n"),
    };
    let below = match labelled.names_below {
        0 => String::new(),
        names => format!("  labels of the name bind {} below it, too\n", counted(names as u64, "name")),
    };
    format!("{}: {}\n{from}{below}", printable(&labelled.name), printable(&binding))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_below_that_are_bound_are_counted() {
        let labels = Labels::default().with("residency", "DE").unwrap();
        let mut labelled =
            Labelled { name: "a".into(), own: labels.clone(), labels, names_below: 2, declassified: false };
        assert_eq!(described(&labelled), "a: residency=DE\n  labels of the name bind 2 names below it, too\n");
        labelled.names_below = 0;
        assert_eq!(described(&labelled), "a: residency=DE\n");
    }
}
