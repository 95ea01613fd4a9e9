//! Entries `[[webhook.allow]]`, `[[kueue.allow]]` and `[[gates.allow]]`: names by namespace and service account.

use serde::Deserialize;

use crate::agent::pods::AccountRule;
use crate::error::{Error, Result};
use crate::pattern::Patterns;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AccountSection {
    namespaces: Patterns,
    accounts: Option<Patterns>,
    names: Patterns,
}

impl AccountSection {
    /// The rules of `sections`, which are in the settings as `key`.
    ///
    /// # Errors
    /// Usage, for an entry that permits nothing.
    pub(super) fn rules(sections: Vec<Self>, key: &str) -> Result<Vec<AccountRule>> {
        sections.into_iter().map(|section| section.settle(key)).collect()
    }

    fn settle(self, key: &str) -> Result<AccountRule> {
        if self.namespaces.is_empty() || self.names.is_empty() {
            return Err(Error::usage(format!("[[{key}]] permits nothing"))
                .expected("at least one pattern in each of namespaces and names")
                .help("name them, or remove the entry"));
        }
        let accounts = self.accounts.map_or_else(|| Patterns::of(&["**"]), Ok)?;
        Ok(AccountRule { namespaces: self.namespaces, accounts, names: self.names })
    }
}
