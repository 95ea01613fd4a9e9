//! Labels of a name: jurisdictions, sensitivity, tenants, purposes and origins of its content.
//!
//! Labels only ever get stricter: two sets are joined. A residency is an intersection, a sensitivity the higher of two,
//! tenants and purposes are united.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::LABEL_LEN_MAX;
use crate::name::{Name, is_segment};
use crate::spelling::edits;

/// Maximum bytes of a list of owners as text.
const TENANTS_TEXT_MAX: usize = 200;
/// Maximum number of jurisdictions, of tenants, of purposes and of origins of one name.
pub const LABEL_VALUES_MAX: usize = 32;
/// Maximum length of a jurisdiction, tenant or purpose.
pub const LABEL_VALUE_LEN_MAX: usize = 64;

/// Maximum number of each that the labels of one name may come to.
pub const LABEL_VALUES_JOINED_MAX: usize = 256;

/// Keys of these labels in `KEY=VALUE`.
pub const LABEL_KEYS: [&str; 5] = ["residency", "sensitivity", "tenant", "purpose", "derived-from"];

/// Harm that the content does in the wrong hands; each level includes those below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sensitivity {
    /// None.
    Public,
    /// For members of the organisation.
    Internal,
    /// For some of them.
    Restricted,
    /// For named persons.
    Secret,
}

impl Sensitivity {
    /// Every level, the lowest first.
    pub const ALL: [Self; 4] = [Self::Public, Self::Internal, Self::Restricted, Self::Secret];

    /// Name in labels.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Internal => "internal",
            Self::Restricted => "restricted",
            Self::Secret => "secret",
        }
    }
}

impl fmt::Display for Sensitivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Sensitivity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|level| level.word() == text).ok_or_else(|| {
            Error::usage("unknown sensitivity")
                .expected("public, internal, restricted or secret")
                .got(format!("{text:?}"))
        })
    }
}

/// Labels of a name. The default has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Labels {
    /// Jurisdictions that the content may be in; none: any. An empty set: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    residency: Option<BTreeSet<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sensitivity: Option<Sensitivity>,
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    tenant: BTreeSet<String>,
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    purpose: BTreeSet<String>,
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    derived_from: BTreeSet<Name>,
}

/// Bytes of memory of a value besides its text: its place in a set, whose nodes are partly empty, and its allocation.
pub(crate) const LABEL_VALUE_WEIGHT: usize = 96;

impl Labels {
    /// True if it has no labels.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// True if content with these labels is restricted. `public` alone, and an origin alone, restrict nothing.
    #[must_use]
    pub fn restrict(&self) -> bool {
        self.residency.is_some()
            || self.sensitivity.is_some_and(|level| level > Sensitivity::Public)
            || !self.tenant.is_empty()
            || !self.purpose.is_empty()
    }

    /// Jurisdictions that the content may be in; none: any.
    #[must_use]
    pub fn residency(&self) -> Option<&BTreeSet<String>> {
        self.residency.as_ref()
    }

    /// True if these are few enough values to be the labels of one name.
    #[must_use]
    pub fn fit_one_name(&self) -> bool {
        let lists = [self.tenant.len(), self.purpose.len(), self.derived_from.len()];
        lists.into_iter().chain(self.residency.as_ref().map(BTreeSet::len)).all(|len| len <= LABEL_VALUES_JOINED_MAX)
    }

    /// These labels, or those of [`Labels::nowhere`] if they have more values than one name may have: so labels that many names hand
    /// on stay small. Nobody satisfies so many.
    #[must_use]
    pub fn bounded(self) -> Self {
        if self.fit_one_name() { self } else { Self::nowhere() }
    }

    /// Labels of content that must not be anywhere: as strict as any.
    #[must_use]
    pub fn nowhere() -> Self {
        Self { residency: Some(BTreeSet::new()), sensitivity: Some(Sensitivity::Secret), ..Self::default() }
    }

    /// Demands of these labels, without the origins; [bounded](Labels::bounded).
    #[must_use]
    pub fn demands(mut self) -> Self {
        self.derived_from.clear();
        self = self.bounded();
        if self.residency.as_ref().is_some_and(BTreeSet::is_empty) {
            self.tenant.clear();
            self.purpose.clear();
        }
        self
    }

    /// The same, derived from `origins`.
    #[must_use]
    pub fn with_origins(mut self, origins: BTreeSet<Name>) -> Self {
        self.derived_from = origins;
        self
    }

    /// The same, but not derived from `name`.
    #[must_use]
    pub fn without_origin(mut self, name: &Name) -> Self {
        self.derived_from.remove(name);
        self
    }

    /// Sensitivity, if given.
    #[must_use]
    pub fn sensitivity(&self) -> Option<Sensitivity> {
        self.sensitivity
    }

    /// Owners of the content.
    #[must_use]
    pub fn tenants(&self) -> &BTreeSet<String> {
        &self.tenant
    }

    /// Owners of the content, separated by commas; of very many, the first ones.
    #[must_use]
    pub fn tenants_text(&self) -> String {
        let mut text = String::new();
        for tenant in &self.tenant {
            if text.len() + tenant.len() >= TENANTS_TEXT_MAX {
                text.push_str(",...");
                break;
            }
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(tenant);
        }
        text
    }

    /// Purposes that it was collected for.
    #[must_use]
    pub fn purposes(&self) -> &BTreeSet<String> {
        &self.purpose
    }

    /// Names that it was made from.
    #[must_use]
    pub fn origins(&self) -> &BTreeSet<Name> {
        &self.derived_from
    }

    /// Adds the label `key`, tightened by `value`: values of a list are separated by commas.
    ///
    /// # Errors
    /// Usage, for a key that is not in [`LABEL_KEYS`] and a malformed value; exhausted, for too many values.
    pub fn with(self, key: &str, value: &str) -> Result<Self> {
        let labels = self.with_stored(key, value)?;
        labels.check_size()?;
        Ok(labels)
    }

    /// As [`Labels::with`], for labels that were stored: those of several names together may have any number of values.
    ///
    /// # Errors
    /// Usage, for an unknown key and a malformed value.
    pub fn with_stored(mut self, key: &str, value: &str) -> Result<Self> {
        let mut added = Self::default();
        match key {
            "residency" => {
                added.residency = Some(values(key, value)?.into_iter().map(|code| code.to_uppercase()).collect());
            }
            "sensitivity" => added.sensitivity = Some(value.parse()?),
            "tenant" => added.tenant = values(key, value)?,
            "purpose" => added.purpose = values(key, value)?,
            "derived-from" => {
                added.derived_from = value.split(',').map(|name| name.trim().parse()).collect::<Result<_>>()?;
            }
            _ => {
                return Err(Error::usage("unknown label").expected(LABEL_KEYS.join(", ")).got(format!("{key:?}")));
            }
        }
        self.join(&added);
        Ok(self)
    }

    /// Splits `pairs` into these labels and others.
    ///
    /// # Errors
    /// As [`Labels::with`]. Usage, for a key that is almost one of [`LABEL_KEYS`]: it would bind nothing; and for a key or value that
    /// no manifest may have.
    pub fn split(pairs: &BTreeMap<String, String>) -> Result<(Self, BTreeMap<String, String>)> {
        let mut labels = Self::default();
        let mut others = BTreeMap::new();
        for (key, value) in pairs {
            if key.len().max(value.len()) > LABEL_LEN_MAX {
                return Err(Error::usage("label is too long")
                    .expected(format!("at most {LABEL_LEN_MAX} bytes in its key, and in its value"))
                    .got(format!("{} and {} bytes in {:.40?}...", key.len(), value.len(), key)));
            }
            if LABEL_KEYS.contains(&key.as_str()) {
                labels = labels.with(key, value)?;
            } else if let Some(meant) = LABEL_KEYS.into_iter().find(|meant| is_mistyped(key, meant)) {
                return Err(Error::usage("label is mistyped: it would bind nothing")
                    .expected(meant)
                    .got(format!("{key:?}"))
                    .help("use that key, or one that is less like it"));
            } else {
                others.insert(key.clone(), value.clone());
            }
        }
        Ok((labels, others))
    }

    /// Joins `other`: the result is as strict as both.
    pub fn join(&mut self, other: &Self) {
        self.residency = match (self.residency.take(), &other.residency) {
            (Some(own), Some(others)) => Some(own.intersection(others).cloned().collect()),
            (own, others) => own.or_else(|| others.clone()),
        };
        self.sensitivity = self.sensitivity.max(other.sensitivity);
        self.tenant.extend(other.tenant.iter().cloned());
        self.purpose.extend(other.purpose.iter().cloned());
        self.derived_from.extend(other.derived_from.iter().cloned());
    }

    /// `self` joined with `other`.
    #[must_use]
    pub fn joined(mut self, other: &Self) -> Self {
        self.join(other);
        self
    }

    /// True if these labels are at least as strict as `other`, origins aside.
    #[must_use]
    pub fn imply(&self, other: &Self) -> bool {
        let within = match (&self.residency, &other.residency) {
            (_, None) => true,
            (None, Some(_)) => false,
            (Some(own), Some(others)) => own.is_subset(others),
        };
        within
            && self.sensitivity >= other.sensitivity
            && self.tenant.is_superset(&other.tenant)
            && self.purpose.is_superset(&other.purpose)
    }

    /// True if joining `other` changes nothing.
    #[must_use]
    pub fn cover(&self, other: &Self) -> bool {
        self.imply(other) && self.derived_from.is_superset(&other.derived_from)
    }

    /// `(key, value)` of each label, as [`Labels::with`] reads them. A residency of nowhere is the value `-`.
    #[must_use]
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let list = |values: &BTreeSet<String>| values.iter().map(String::as_str).collect::<Vec<_>>().join(",");
        let mut pairs = Vec::new();
        if let Some(residency) = &self.residency {
            pairs.push(("residency", if residency.is_empty() { "-".to_owned() } else { list(residency) }));
        }
        if let Some(sensitivity) = self.sensitivity {
            pairs.push(("sensitivity", sensitivity.to_string()));
        }
        for (key, set) in [("tenant", &self.tenant), ("purpose", &self.purpose)] {
            if !set.is_empty() {
                pairs.push((key, list(set)));
            }
        }
        if !self.derived_from.is_empty() {
            let names: Vec<&str> = self.derived_from.iter().map(Name::as_str).collect();
            pairs.push(("derived-from", names.join(",")));
        }
        pairs
    }

    /// Approximate bytes of memory beside its own size.
    #[must_use]
    pub fn weight(&self) -> usize {
        let weight = |value: &str| value.len() + LABEL_VALUE_WEIGHT;
        let sets = [self.residency.as_ref(), Some(&self.tenant), Some(&self.purpose)].into_iter().flatten();
        let values = sets.flatten().map(|value| weight(value));
        values.chain(self.derived_from.iter().map(|name| weight(name.as_str()))).sum()
    }

    /// # Errors
    /// Exhausted, if a list is too long.
    fn check_size(&self) -> Result<()> {
        let residency = self.residency.as_ref().map_or(0, BTreeSet::len);
        let longest = [residency, self.tenant.len(), self.purpose.len(), self.derived_from.len()].into_iter().max();
        if longest.is_some_and(|len| len > LABEL_VALUES_MAX) {
            return Err(Error::exhausted("label has too many values").expected(format!("at most {LABEL_VALUES_MAX}")));
        }
        Ok(())
    }
}

impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (key, value)) in self.pairs().iter().enumerate() {
            write!(f, "{}{key}={value}", if at == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

/// True if `key` is one of the keys that bind but for capitals or two letters.
fn is_mistyped(key: &str, meant: &str) -> bool {
    edits(key.to_lowercase().as_bytes(), meant.as_bytes(), 2).is_some()
}

/// Values of a list: `a,b`; `-` is the empty one.
fn values(key: &str, text: &str) -> Result<BTreeSet<String>> {
    if key == "residency" && text == "-" {
        return Ok(BTreeSet::new());
    }
    let value = |value: &str| {
        let value = value.trim();
        if value != "-" && value.len() <= LABEL_VALUE_LEN_MAX && is_segment(value) {
            return Ok(value.to_owned());
        }
        Err(Error::usage("value of a label is malformed")
            .at(key)
            .expected(format!("[A-Za-z0-9._+=-], at most {LABEL_VALUE_LEN_MAX} bytes, several separated by commas"))
            .got(format!("{value:?}")))
    };
    text.split(',').map(value).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().try_fold(Labels::default(), |labels, (key, value)| labels.with(key, value)).unwrap()
    }

    fn any_labels() -> impl Strategy<Value = Labels> {
        let set = || prop::collection::btree_set("[A-D]", 0..4);
        let level = prop::option::of(prop::sample::select(Sensitivity::ALL.to_vec()));
        (prop::option::of(set()), level, set(), set()).prop_map(|(residency, sensitivity, tenant, purpose)| Labels {
            residency,
            sensitivity,
            tenant,
            purpose,
            derived_from: BTreeSet::new(),
        })
    }

    proptest! {
        #[test]
        fn a_join_is_as_strict_as_both_in_any_order(a in any_labels(), b in any_labels(), c in any_labels()) {
            let joined = a.clone().joined(&b);
            prop_assert!(joined.imply(&a) && joined.imply(&b));
            prop_assert_eq!(a.cover(&b), joined == a);
            prop_assert_eq!(&joined, &b.clone().joined(&a));
            prop_assert_eq!(a.clone().joined(&b.clone().joined(&c)), joined.joined(&c));
            prop_assert_eq!(a.clone().joined(&a), a);
        }

        #[test]
        fn labels_survive_their_text(a in any_labels()) {
            let read = a.pairs().iter().try_fold(Labels::default(), |labels, (key, value)| labels.with(key, value));
            prop_assert_eq!(read.unwrap(), a);
        }
    }

    #[test]
    fn labels_are_tightened_by_their_kind() {
        let mut strict = labels(&[("residency", "de,fr"), ("sensitivity", "restricted"), ("tenant", "a")]);
        strict.join(&labels(&[("residency", "FR,US"), ("sensitivity", "internal"), ("tenant", "b")]));
        assert_eq!(strict.to_string(), "residency=FR sensitivity=restricted tenant=a,b");
        strict.join(&labels(&[("residency", "US")]));
        assert_eq!(strict.to_string(), "residency=- sensitivity=restricted tenant=a,b");
        assert!(strict.imply(&labels(&[("residency", "DE,FR")])) && !labels(&[("residency", "DE")]).imply(&strict));
    }

    #[test]
    fn some_labels_restrict_nothing() {
        for free in [&[][..], &[("sensitivity", "public")], &[("derived-from", "raw/set")]] {
            assert!(!labels(free).restrict(), "{free:?}");
        }
        for bound in [("residency", "EU"), ("sensitivity", "internal"), ("tenant", "a"), ("purpose", "research")] {
            assert!(labels(&[bound]).restrict(), "{bound:?}");
        }
    }

    #[test]
    fn malformed_labels_are_refused() {
        let refused = |key: &str, value: &str| Labels::default().with(key, value).unwrap_err().kind();
        for (key, value) in [
            ("residence", "EU"),
            ("residency", ""),
            ("residency", "E U"),
            ("residency", "EU,,US"),
            ("sensitivity", "high"),
            ("tenant", "-"),
            ("tenant", "a/b"),
            ("derived-from", "a//b"),
            ("purpose", &"p".repeat(LABEL_VALUE_LEN_MAX + 1)),
        ] {
            assert_eq!(refused(key, value), ErrorKind::Usage, "{key}={value}");
        }
        let many: Vec<String> = (0..=LABEL_VALUES_MAX).map(|n| format!("t{n}")).collect();
        assert_eq!(refused("tenant", &many.join(",")), ErrorKind::Exhausted);
    }

    #[test]
    fn binding_labels_are_taken_out_of_others() {
        let pairs = [("license", "mit"), ("residency", "eu")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        let (binding, others) = Labels::split(&pairs.into()).unwrap();
        assert_eq!(binding.to_string(), "residency=EU");
        assert_eq!(others, BTreeMap::from([("license".to_owned(), "mit".to_owned())]));
        // No manifest could be read with a longer one.
        let long = "x".repeat(LABEL_LEN_MAX + 1);
        for (key, value) in [(long.clone(), String::new()), ("note".to_owned(), long)] {
            assert_eq!(Labels::split(&[(key, value)].into()).unwrap_err().kind(), ErrorKind::Usage);
        }
    }
}
