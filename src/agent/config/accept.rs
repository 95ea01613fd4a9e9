//! Section `[[custody.accept]]`: which agents may hand over checkpoints, under which names, and how many bytes.

use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;

use super::quantity::Bytes;
use crate::error::{Error, Result};
use crate::pattern::Patterns;
use crate::repository::Name;
use crate::transfer::identity::Identity;

/// Default quota of a giver: the capacity divided by this.
const CAPACITY_PART: u64 = 2;
/// Default limit of checkpoints of a giver.
const PARCELS: usize = 64;

/// A section `[[custody.accept]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AcceptSection {
    from: Patterns,
    names: Patterns,
    max: Option<Bytes>,
    max_parcels: Option<usize>,
}

/// The entries of `[[custody.accept]]`. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Accepts(Arc<RwLock<Vec<Accept>>>);

#[derive(Clone, Debug)]
struct Accept {
    from: Patterns,
    names: Patterns,
    allowance: Allowance,
}

/// Quota of one giver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes of its checkpoints.
    pub bytes: u64,
    /// Checkpoints.
    pub parcels: usize,
}

impl Accepts {
    /// The entries of a shelf for `capacity` bytes.
    ///
    /// # Errors
    /// Usage, for an entry that accepts nothing.
    pub(super) fn of(sections: Vec<AcceptSection>, capacity: u64) -> Result<Self> {
        let entries = sections.into_iter().map(|section| Accept::of(section, capacity)).collect::<Result<_>>()?;
        Ok(Self(Arc::new(RwLock::new(entries))))
    }

    /// True if an entry names `giver`.
    #[must_use]
    pub fn include(&self, giver: &Identity) -> bool {
        self.entries().iter().any(|entry| entry.from.take(&giver.path()))
    }

    /// Quota of `giver` for `name`, from the first entry that matches both; None if no entry does.
    #[must_use]
    pub fn allowance(&self, giver: &Identity, name: &Name) -> Option<Allowance> {
        let entries = self.entries();
        let path = giver.path();
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
        let AcceptSection { from, names, max, max_parcels } = section;
        if from.is_empty() || names.is_empty() {
            return Err(Error::usage("[[custody.accept]] accepts nothing")
                .expected("at least one pattern in each of from and names")
                .help("name them, or remove the entry"));
        }
        let allowance = Allowance {
            bytes: max.map_or(capacity / CAPACITY_PART, |bytes| bytes.0),
            parcels: max_parcels.unwrap_or(PARCELS),
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
        struct Custody {
            accept: Vec<AcceptSection>,
        }
        let custody: Custody = toml::from_str(entries).map_err(|source| Error::usage("malformed").source(source))?;
        Accepts::of(custody.accept, capacity)
    }

    #[test]
    fn the_first_entry_that_fits_giver_and_name_decides() {
        let accepts = accepts(
            "[[accept]]\nfrom = 'home/a'\nnames = ['run/*', 'other/*']\nmax = '1K'\nmax_parcels = 2\n\
             [[accept]]\nfrom = ['home/*', 'cloud/c']\nnames = '**'\n",
            100,
        )
        .unwrap();
        let allowed = |giver: &str, name: &str| {
            let (site, agent) = giver.split_once('/').unwrap();
            accepts.allowance(&Identity::new(site, agent).unwrap(), &name.parse().unwrap())
        };
        let (told, usual) = (Allowance { bytes: 1024, parcels: 2 }, Allowance { bytes: 50, parcels: PARCELS });
        assert_eq!(allowed("home/a", "run/step-1"), Some(told));
        assert_eq!(allowed("home/a", "other/step-1"), Some(told));
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
