//! Section `[[handoff.accept]]`: agents that may hand off checkpoints, with names and quotas.

use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;

use super::quantity::Bytes;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::pattern::Patterns;
use crate::policy::pattern_text;

/// Default quota of a sender: the capacity divided by this.
const CAPACITY_PART: u64 = 2;
/// Default limit of checkpoints of a sender.
const CHECKPOINTS: usize = 64;

/// A section `[[handoff.accept]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AcceptSection {
    from: Patterns,
    names: Patterns,
    max: Option<Bytes>,
    max_checkpoints: Option<usize>,
}

/// The entries of `[[handoff.accept]]`. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Accepts(Arc<RwLock<Vec<Accept>>>);

#[derive(Clone, Debug)]
struct Accept {
    from: Patterns,
    names: Patterns,
    allowance: SenderQuota,
}

/// Quota of one sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderQuota {
    /// Bytes of its checkpoints.
    pub bytes: u64,
    /// Checkpoints.
    pub checkpoints: usize,
}

impl Accepts {
    /// The entries of a store for `capacity` bytes.
    ///
    /// # Errors
    /// Usage, for an entry that accepts nothing.
    pub(super) fn of(sections: Vec<AcceptSection>, capacity: u64) -> Result<Self> {
        let entries = sections.into_iter().map(|section| Accept::of(section, capacity)).collect::<Result<_>>()?;
        Ok(Self(Arc::new(RwLock::new(entries))))
    }

    /// True without any entry: nothing is accepted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries().is_empty()
    }

    /// True if an entry names `sender`.
    #[must_use]
    pub fn include(&self, sender: &Identity) -> bool {
        pattern_text(sender).is_some_and(|sender| self.entries().iter().any(|entry| entry.from.take(&sender)))
    }

    /// Quota of `sender` for `name`, from the first entry that matches both; None if no entry does.
    #[must_use]
    pub fn allowance(&self, sender: &Identity, name: &Name) -> Option<SenderQuota> {
        let entries = self.entries();
        let path = pattern_text(sender)?;
        let fits = |entry: &&Accept| entry.from.take(&path) && entry.names.take(name.as_str());
        entries.iter().find(fits).map(|entry| entry.allowance)
    }

    /// Replaces the entries by those of `other`, for all clones.
    pub fn replace(&self, other: &Self) {
        let entries = other.entries();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = entries;
    }

    fn entries(&self) -> Vec<Accept> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Accept {
    fn of(section: AcceptSection, capacity: u64) -> Result<Self> {
        let AcceptSection { from, names, max, max_checkpoints } = section;
        if from.is_empty() || names.is_empty() {
            return Err(Error::usage("[[handoff.accept]] accepts nothing")
                .expected("at least one pattern in each of from and names")
                .help("name them, or remove the entry"));
        }
        let allowance = SenderQuota {
            bytes: max.map_or(capacity / CAPACITY_PART, |bytes| bytes.0),
            checkpoints: max_checkpoints.unwrap_or(CHECKPOINTS),
        };
        Ok(Self { from, names, allowance })
    }
}

#[cfg(test)]
pub(in crate::agent) mod tests {
    use super::*;

    /// Entries as settings have them.
    pub(in crate::agent) fn accepts(entries: &str, capacity: u64) -> Result<Accepts> {
        #[derive(Deserialize)]
        struct Handoff {
            accept: Vec<AcceptSection>,
        }
        let handoff: Handoff = toml::from_str(entries).map_err(|source| Error::usage("malformed").source(source))?;
        Accepts::of(handoff.accept, capacity)
    }

    #[test]
    fn the_first_entry_that_fits_sender_and_name_decides() {
        let accepts = accepts(
            "[[accept]]\nfrom = 'home/a'\nnames = ['run/*', 'other/*']\nmax = '1K'\nmax_checkpoints = 2\n\
             [[accept]]\nfrom = ['home/*', 'cloud/c']\nnames = '**'\n",
            100,
        )
        .unwrap();
        let allowed = |sender: &str, name: &str| {
            let (site, agent) = sender.split_once('/').unwrap();
            accepts.allowance(&Identity::new(site, agent).unwrap(), &name.parse().unwrap())
        };
        let (limited, usual) =
            (SenderQuota { bytes: 1024, checkpoints: 2 }, SenderQuota { bytes: 50, checkpoints: CHECKPOINTS });
        assert_eq!(allowed("home/a", "run/step-1"), Some(limited));
        assert_eq!(allowed("home/a", "other/step-1"), Some(limited));
        assert_eq!(allowed("home/a", "third/step-1"), Some(usual));
        assert_eq!(allowed("cloud/c", "run/step-1"), Some(usual));
        assert_eq!(allowed("cloud/d", "run/step-1"), None);
        assert!(!accepts.include(&Identity::new("cloud", "d").unwrap()));
    }

    #[test]
    fn an_entry_that_accepts_nothing_is_a_mistake() {
        for entry in ["from = []\nnames = '*'", "from = '*'\nnames = []", "from = '['\nnames = '*'", "from = 'a/b'"] {
            assert!(accepts(&format!("[[accept]]\n{entry}"), 1).is_err(), "{entry}");
        }
        assert!(!Accepts::default().include(&Identity::new("home", "a").unwrap()), "nothing, unless it is named");
    }
}
