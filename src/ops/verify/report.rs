//! Report of the findings: each with the names and places that it hits, up to a limit. An untrusted log may give very many names to
//! one tree, whose map may name very many packs: all names of all findings would be the product of both.

use std::collections::{BTreeMap, BTreeSet};

use super::findings::{Finding, Subject};
use super::hits::{BytesLeft, Hits};
use super::{Damage, Verifying};
use crate::error::Error;
use crate::id::{ManifestKey, MapKey, PackId};
use crate::name::Name;
use crate::repository::log::RefValue;

/// Maximum number of names listed for one finding.
const NAMES_MAX: usize = 1_000;
/// Maximum number of names listed in all, beside one for each finding.
const NAMES_IN_ALL_MAX: usize = 20_000;
/// Maximum bytes of affected places in all, beside a mark for each finding that more are affected.
const PLACES_BYTES_MAX: usize = 16 << 20;

type Named<'a> = (&'a Name, &'a RefValue);

/// Names by what their values consist of, each list in their order.
struct Hit<'a> {
    all: Vec<Named<'a>>,
    by_manifest: BTreeMap<ManifestKey, Vec<Named<'a>>>,
    by_map: BTreeMap<MapKey, Vec<Named<'a>>>,
}

impl<'a> Hit<'a> {
    fn new(names: &'a BTreeMap<Name, RefValue>) -> Self {
        let mut hit = Self { all: names.iter().collect(), by_manifest: BTreeMap::new(), by_map: BTreeMap::new() };
        for named in names {
            hit.by_manifest.entry(named.1.manifest_key).or_default().push(named);
            hit.by_map.entry(named.1.map_key).or_default().push(named);
        }
        hit
    }
}

/// Names affected by one finding.
struct Affected<'a> {
    /// The first ones, up to a limit.
    listed: Vec<Named<'a>>,
    /// Number of the others.
    more: usize,
}

impl<'a> Affected<'a> {
    /// Of `lists`, which are in order and have no name in common, the first names of all, not more than `limit`.
    fn first<'l>(lists: impl Iterator<Item = &'l Vec<Named<'a>>>, limit: usize) -> Self
    where
        'a: 'l,
    {
        let (mut listed, mut count) = (Vec::new(), 0);
        for list in lists {
            count += list.len();
            listed.extend(list.iter().take(limit).copied());
            if listed.len() > NAMES_MAX * 2 {
                keep_first(&mut listed, limit);
            }
        }
        keep_first(&mut listed, limit);
        Self { more: count - listed.len(), listed }
    }
}

fn keep_first(listed: &mut Vec<Named<'_>>, limit: usize) {
    listed.sort_by_key(|(name, _)| *name);
    listed.truncate(limit);
}

impl Verifying<'_> {
    /// Findings, each with the affected names.
    pub(super) fn damage(&self, hits: &Hits) -> Vec<Damage> {
        let hit = Hit::new(&self.names);
        let (mut names_left, mut places_left) = (NAMES_IN_ALL_MAX, BytesLeft::new(PLACES_BYTES_MAX));
        let damage = |finding: &Finding| {
            let affected = self.affected(&hit, finding.subject, hits, names_left.clamp(1, NAMES_MAX));
            names_left = names_left.saturating_sub(affected.listed.len());
            Damage {
                what: finding.what.clone(),
                error: chain(&finding.error),
                names: affected.listed.iter().map(|(name, _)| name.to_string()).collect(),
                more_names: affected.more as u64,
                tensors: places(&affected.listed, finding.subject, hits, &mut places_left),
            }
        };
        let mut all: Vec<Damage> = self.findings.all.iter().map(damage).collect();
        all.extend(self.further(&hit));
        all
    }

    /// All objects without a finding of their own, as one.
    fn further(&self, hit: &Hit<'_>) -> Option<Damage> {
        let further = &self.findings.further;
        if further.is_empty() {
            return None;
        }
        let maps: BTreeSet<MapKey> = further.keys().flat_map(|subject| self.maps_of(hit, *subject)).collect();
        let affected = Affected::first(maps.iter().filter_map(|map| hit.by_map.get(map)), NAMES_MAX);
        Some(Damage {
            what: format!("{} more objects", further.len()),
            error: "more objects are damaged or missing than are listed: verify again after a repair".to_owned(),
            names: affected.listed.iter().map(|(name, _)| name.to_string()).collect(),
            more_names: affected.more as u64,
            tensors: Vec::new(),
        })
    }

    /// Maps of the values that need `subject`.
    fn maps_of(&self, hit: &Hit<'_>, subject: Subject) -> Vec<MapKey> {
        match subject {
            Subject::Log { .. } | Subject::Segment(_) => Vec::new(),
            Subject::Manifest(key) => {
                hit.by_manifest.get(&key).into_iter().flatten().map(|(_, value)| value.map_key).collect()
            }
            Subject::Map(key) => vec![key],
            Subject::Pack(pack) | Subject::Unindexed(pack) | Subject::Chunk(pack, _) => self.users.of(&pack).collect(),
        }
    }

    /// Names whose values need `subject`.
    fn affected<'h>(&self, hit: &Hit<'h>, subject: Subject, hits: &Hits, limit: usize) -> Affected<'h> {
        let of_pack = |pack: PackId| self.users.of(&pack).collect::<Vec<_>>().into_iter();
        let is_hit = |map: &MapKey| hits.get(map).is_some_and(|hits| hits.contains_key(&subject));
        match subject {
            Subject::Log { all: true } => Affected::first([&hit.all].into_iter(), limit),
            Subject::Log { all: false } | Subject::Segment(_) => Affected::first([].into_iter(), limit),
            Subject::Manifest(key) => Affected::first(hit.by_manifest.get(&key).into_iter(), limit),
            Subject::Map(key) => Affected::first(hit.by_map.get(&key).into_iter(), limit),
            Subject::Pack(pack) | Subject::Unindexed(pack) => {
                Affected::first(of_pack(pack).filter_map(|map| hit.by_map.get(&map)), limit)
            }
            Subject::Chunk(pack, _) => {
                Affected::first(of_pack(pack).filter(is_hit).filter_map(|map| hit.by_map.get(&map)), limit)
            }
        }
    }
}

/// Files and tensors of `names` that need `subject`, with `...` once there is no room for more.
fn places(names: &[Named<'_>], subject: Subject, hits: &Hits, left: &mut BytesLeft) -> Vec<String> {
    let of = |value: &RefValue| hits.get(&value.map_key).and_then(|hits| hits.get(&subject)).into_iter().flatten();
    let mut labels = Vec::new();
    for (name, place) in names.iter().flat_map(|(name, value)| of(value).map(move |place| (name, place))) {
        if !left.take(name.as_str().len() + place.len()) {
            labels.push(format!("{name}:..."));
            break;
        }
        labels.push(format!("{name}:{place}"));
    }
    labels
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::id::{ManifestId, Owned, SessionId};
    use crate::repository::log::StepFacts;

    fn value() -> RefValue {
        let key = Owned::fresh(SessionId::random());
        RefValue {
            version: 1,
            manifest: ManifestId::of(b""),
            manifest_key: key,
            map_key: key,
            saved: Timestamp(0),
            logical_bytes: 0,
            files: 0,
            chunks: 0,
            behind: 0,
            facts: StepFacts::default(),
            attempt: None,
        }
    }

    #[test]
    fn the_first_names_of_all_lists_are_listed_and_the_others_counted() {
        let value = value();
        let names: Vec<Name> = (0..5_000).map(|n| format!("n/{n:05}").parse().unwrap()).collect();
        let lists: Vec<Vec<Named<'_>>> =
            (0..7).map(|of| names.iter().skip(of).step_by(7).map(|name| (name, &value)).collect()).collect();
        for limit in [1, 3, NAMES_MAX] {
            let affected = Affected::first(lists.iter(), limit);
            assert_eq!(affected.more, names.len() - limit);
            assert!(affected.listed.iter().map(|(name, _)| *name).eq(names.iter().take(limit)), "{limit}");
        }
        assert_eq!(Affected::first([].into_iter(), 1).more, 0);
    }

    #[test]
    fn places_end_once_there_is_no_room_for_more() {
        let (value, subject) = (value(), Subject::Map(Owned::fresh(SessionId::random())));
        let names: Vec<Name> = ["a", "b"].map(|name| name.parse().unwrap()).into();
        let named: Vec<Named<'_>> = names.iter().map(|name| (name, &value)).collect();
        let hits = Hits::from([(value.map_key, [(subject, vec!["x".to_owned(), "y".to_owned()])].into())]);
        let mut left = BytesLeft::new(3 * (2 + size_of::<String>()) + 1);
        assert_eq!(places(&named, subject, &hits, &mut left), ["a:x", "a:y", "b:x", "b:..."]);
        assert_eq!(places(&named, subject, &hits, &mut left), ["a:..."]);
    }
}
