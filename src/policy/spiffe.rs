//! SPIFFE ids, as a policy maps them to agents: one id, or all ids below a path. No two entries take the same id.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::identity::Identity;

/// End of an entry that takes all ids below.
const BELOW: &str = "/**";

/// Agents by SPIFFE id, as the policy writes it. The default maps none.
#[derive(Clone, Debug, Default)]
pub struct SpiffeMap(BTreeMap<String, Entry>);

/// Agent of an entry, and its line in the policy.
#[derive(Clone, Debug)]
struct Entry {
    agent: Identity,
    line: usize,
}

impl SpiffeMap {
    /// Adds that `id` is `agent`: `spiffe://TRUST-DOMAIN/PATH`, or that and `/**` for all ids below. `line` is where the policy says so.
    ///
    /// # Errors
    /// Usage, for a malformed id, and one that an entry before takes as well, or takes one of.
    pub(super) fn add(&mut self, id: &str, agent: Identity, line: usize) -> Result<()> {
        let base = id.strip_suffix(BELOW);
        // All ids of a trust domain have no path in common: any one stands for them.
        Identity::spiffe(&base.map_or_else(|| id.to_owned(), |base| format!("{base}/any")))?;
        if let Some(other) = self.overlapping(id, base) {
            return Err(Error::usage("SPIFFE id is mapped twice")
                .got(format!("{id}, and line {} maps it to {}", other.line, other.agent.path()))
                .help("remove one of the two: an id is one agent, and no entry goes before another"));
        }
        self.0.insert(id.to_owned(), Entry { agent, line });
        Ok(())
    }

    /// An entry that takes an id that the entry `id` takes; `base` is that of one for all ids below.
    fn overlapping(&self, id: &str, base: Option<&str>) -> Option<&Entry> {
        let inner = |base: &str| {
            let start = format!("{base}/");
            let mut after = self.0.range(start.clone()..);
            after.next().filter(|(id, _)| id.starts_with(&start)).map(|(_, entry)| entry)
        };
        let same = self.0.get(id).or_else(|| self.above(base.unwrap_or(id)));
        same.or_else(|| base.and_then(inner))
    }

    /// The entry for all ids below one that is above `id`.
    fn above(&self, id: &str) -> Option<&Entry> {
        let ancestors = std::iter::successors(Some(id), |id| id.rsplit_once('/').map(|(above, _)| above)).skip(1);
        ancestors.into_iter().find_map(|above| self.0.get(&format!("{above}{BELOW}")))
    }

    /// The agent that `identity` is: itself, unless it is a SPIFFE id; none for an id that nothing maps.
    #[must_use]
    pub fn agent<'a>(&'a self, identity: &'a Identity) -> Option<Cow<'a, Identity>> {
        if !identity.is_spiffe() {
            return Some(Cow::Borrowed(identity));
        }
        let id = identity.to_string();
        self.0.get(&id).or_else(|| self.above(&id)).map(|entry| Cow::Borrowed(&entry.agent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(entries: &[(&str, &str)]) -> Result<SpiffeMap> {
        let mut map = SpiffeMap::default();
        for (line, (id, agent)) in entries.iter().enumerate() {
            map.add(id, Identity::new("cloud", agent)?, line + 1)?;
        }
        Ok(map)
    }

    #[test]
    fn an_id_is_the_agent_of_its_entry_or_of_the_path_above() {
        let map = map(&[("spiffe://a/ns/ml/**", "ml"), ("spiffe://a/ns/ops", "ops"), ("spiffe://b/**", "b")]).unwrap();
        for (id, agent) in [
            ("spiffe://a/ns/ml/x/y", Some("ml")),
            ("spiffe://a/ns/ml", None),
            ("spiffe://a/ns/mlx/y", None),
            ("spiffe://a/ns/ops", Some("ops")),
            ("spiffe://a/ns/ops/x", None),
            ("spiffe://b/any", Some("b")),
            ("spiffe://bb/any", None),
            ("spiffe://c/any", None),
        ] {
            let identity = Identity::spiffe(id).unwrap();
            assert_eq!(
                map.agent(&identity).map(|agent| agent.path()),
                agent.map(|agent| format!("cloud/{agent}")),
                "{id}"
            );
        }
        let plain = Identity::new("home", "a").unwrap();
        assert_eq!(map.agent(&plain).as_deref(), Some(&plain));
    }

    #[test]
    fn entries_that_take_the_same_id_are_refused() {
        for (one, other) in [
            ("spiffe://a/x", "spiffe://a/x"),
            ("spiffe://a/**", "spiffe://a/x"),
            ("spiffe://a/x", "spiffe://a/**"),
            ("spiffe://a/x/**", "spiffe://a/**"),
            ("spiffe://a/**", "spiffe://a/x/y/**"),
        ] {
            let error = map(&[(one, "one"), (other, "other")]).unwrap_err().to_string();
            assert!(error.contains("mapped twice") && error.contains("line 1"), "{error}");
        }
        for (one, other) in [
            ("spiffe://a/x", "spiffe://a/x/y"),
            ("spiffe://a/x", "spiffe://a/x/**"),
            ("spiffe://a/x/y/**", "spiffe://a/x/yy"),
        ] {
            assert!(map(&[(one, "one"), (other, "other")]).is_ok(), "{one} {other}");
        }
        for bad in ["spiffe://a", "spiffe://a/*", "spiffe://a/x*/**", "towline://a/b", "spiffe://A/**", "**"] {
            assert!(map(&[(bad, "x")]).is_err(), "{bad}");
        }
    }
}
