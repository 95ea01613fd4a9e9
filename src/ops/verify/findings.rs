//! Findings, compared with the newest state, and reported with the names that they affect.

use std::collections::BTreeSet;

use super::hits::Hits;
use super::{Damage, Verifying};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ManifestKey, MapKey, PackId, SegmentId};
use crate::name::Name;
use crate::repository::log::RefValue;

/// Subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// The log, or the description of the repository.
    Log {
        /// True if nothing can be read because of it.
        all: bool,
    },
    /// An index segment: it affects new saves, not saved data.
    Segment(SegmentId),
    /// A manifest.
    Manifest(ManifestKey),
    /// A map.
    Map(MapKey),
    /// A whole pack.
    Pack(PackId),
    /// One chunk of a pack.
    Chunk(PackId, u32),
    /// A pack that is intact but not indexed.
    Unindexed(PackId),
}

/// One finding.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) subject: Subject,
    what: String,
    error: Error,
}

/// All findings.
#[derive(Debug, Default)]
pub(super) struct Findings(Vec<Finding>);

impl Findings {
    pub(super) fn add(&mut self, subject: Subject, what: String, error: Error) {
        self.0.push(Finding { subject, what, error });
    }

    pub(super) fn subjects(&self) -> impl Iterator<Item = Subject> {
        self.0.iter().map(|finding| finding.subject)
    }

    /// Damaged packs, without those that a later version may have written.
    pub(super) fn damaged_packs(&self) -> BTreeSet<PackId> {
        let certain = self.0.iter().filter(|finding| finding.error.kind() != ErrorKind::Unsupported);
        let pack = |finding: &Finding| match finding.subject {
            Subject::Pack(pack) | Subject::Chunk(pack, _) => Some(pack),
            _ => None,
        };
        certain.filter_map(pack).collect()
    }
}

impl Verifying<'_> {
    /// Drops findings that are explained by changes of other processes meanwhile; returns the rest.
    pub(super) async fn settle(&mut self) -> Result<Vec<Damage>> {
        if self.findings.0.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.repository.state().await?;
        self.names.retain(|name, value| now.refs.get(name).is_some_and(|still| still.map_key == value.map_key));
        let hits = self.hits().await?;
        let (names, users) = (&self.names, &self.users);
        let used = |pack: &PackId| {
            let maps = users.get(pack);
            maps.is_some_and(|maps| names.values().any(|value| maps.contains(&value.map_key)))
        };
        // A purge whose record was dropped leaves no trace.
        let target = |pack: &PackId| now.is_target(pack) && now.forgotten == self.state.forgotten;
        self.findings.0.retain(|finding| match finding.subject {
            Subject::Log { .. } => true,
            Subject::Segment(id) => now.segments.contains_key(&id),
            Subject::Manifest(key) => names.values().any(|value| value.manifest_key == key),
            Subject::Map(key) => names.values().any(|value| value.map_key == key),
            Subject::Pack(pack) | Subject::Chunk(pack, _) => used(&pack) || target(&pack),
            Subject::Unindexed(pack) => used(&pack),
        });
        Ok(self.damage(&hits))
    }

    /// Findings, each with the affected names.
    pub(super) fn damage(&self, hits: &Hits) -> Vec<Damage> {
        let damages = self.findings.0.iter().map(|finding| {
            let hit: Vec<(&Name, &RefValue)> = self.hit_by(finding.subject, hits).collect();
            let felt = |(name, value): &(&Name, &RefValue)| {
                let places = hits.get(&value.map_key).and_then(|hits| hits.get(&finding.subject));
                let labels = places.into_iter().flatten().map(|place| format!("{name}:{place}"));
                labels.collect::<Vec<_>>()
            };
            Damage {
                what: finding.what.clone(),
                error: chain(&finding.error),
                names: hit.iter().map(|(name, _)| name.to_string()).collect(),
                tensors: hit.iter().flat_map(felt).collect(),
            }
        });
        damages.collect()
    }

    fn hit_by<'b>(&'b self, subject: Subject, hits: &'b Hits) -> impl Iterator<Item = (&'b Name, &'b RefValue)> {
        let uses = move |value: &RefValue, pack: &PackId| {
            self.users.get(pack).is_some_and(|maps| maps.contains(&value.map_key))
        };
        let hit = move |value: &RefValue| match subject {
            Subject::Log { all } => all,
            Subject::Segment(_) => false,
            Subject::Manifest(key) => value.manifest_key == key,
            Subject::Map(key) => value.map_key == key,
            Subject::Pack(pack) | Subject::Unindexed(pack) => uses(value, &pack),
            Subject::Chunk(..) => hits.get(&value.map_key).is_some_and(|hits| hits.contains_key(&subject)),
        };
        self.names.iter().filter(move |(_, value)| hit(value))
    }
}

/// An error with its causes, on one line.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
