//! `towline label`.

use super::output::printable;
use super::verbs::Context;
use crate::audit::Action;
use crate::error::Result;
use crate::name::Name;
use crate::ops::Labelled;
use crate::policy::Labels;

impl Context {
    /// Shows the labels of `name`, after adding `labels`.
    pub(super) async fn label(&self, name: &Name, labels: &[(String, String)]) -> Result<()> {
        let repository = self.open().await?;
        let given = labels.iter().try_fold(Labels::default(), |given, (key, value)| given.with(key, value))?;
        let labelled = if given.is_empty() {
            repository.labels(name).await?
        } else {
            let recorded = self.record(Action::Label, &[name.to_string()], &repository, None).await?;
            recorded.end(repository.tighten(name, &given).await, |_| 0).await?
        };
        let state = repository.state().await?;
        if let Some(value) = state.refs.get(name).filter(|_| !given.is_empty())
            && let Err(error) = repository.check_readable(name, &value.manifest).await
        {
            self.output.remark(&format!(
                "with these labels it cannot be read here any more: {}",
                printable(&error.to_string())
            ));
        }
        self.output.answer(&labelled, |labelled, _| described(labelled))
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
    format!("{}: {}\n{from}", printable(&labelled.name), printable(&binding))
}
