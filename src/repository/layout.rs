//! The one place that spells object keys.
//!
//! ```text
//! repository                      description of the repository; created once
//! log/<20 digits>                 entries, created once each, dense above the boundary
//! snapshot/<20 digits>            the log's state after that entry
//! aside/<20 digits>               copies of entries that could not be read; nothing reads them
//! aside/snapshot-<20 digits>      copies of such snapshots
//! boundary/<20 digits>            the n-th truncation; created once, never deleted
//! policy/<20 digits>              signed policies, created once each; the log says which is in force
//! pack|index|manifest|map/<session>/<ulid>
//! part/<session>/<rank, as a ulid>  one rank's part of a step; created once
//! tombstone/<session>/<ulid>      objects that a collect found unneeded
//! agent/<site>/<agent>            where an agent listens; written again and again
//! inventory/<site>/<agent>/head   what an agent's cache holds; written again and again
//! inventory/<site>/<agent>/<set>-<0 or 1>  sets that it is based on; written again and again, in turn
//! usage/<month>/<site>/<agent>/<20 digits>  what a process of an agent moved in a month; written again and again
//! audit/<site>/<agent>/<20 digits>  heads of an agent's audit log; created once
//! ```

use object_store::path::Path;

use crate::clock::Timestamp;
use crate::format::Month;
use crate::id::{ObjectId, Owned, SessionId};
use crate::identity::Identity;
use crate::storage::RESERVE;

/// Folder of heads of audit logs.
const AUDIT: &str = "audit";
/// Folder of inventories.
const INVENTORY: &str = "inventory";
/// Last part of the key of an inventory's head.
const INVENTORY_HEAD: &str = "head";
/// Folder of usage.
const USAGE: &str = "usage";
/// Folder of lists of unneeded objects.
const TOMBSTONE: &str = "tombstone";

/// True if `name` is that of a file or folder at the root of a repository.
#[must_use]
pub fn is_own(name: &str) -> bool {
    let numbered = [Numbered::Entry, Numbered::Snapshot, Numbered::Boundary, Numbered::Aside, Numbered::Policy];
    name == repository().as_ref()
        || name == RESERVE
        || [AUDIT, INVENTORY, TOMBSTONE, USAGE, "agent"].contains(&name)
        || Family::ALL.iter().any(|family| family.folder() == name)
        || numbered.iter().any(|numbered| numbered.folder() == name)
}

/// Kinds of objects that sessions write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Chunks.
    Pack,
    /// Index segments.
    Index,
    /// Manifests.
    Manifest,
    /// Maps.
    Map,
    /// Parts that ranks have saved.
    Part,
}

impl Family {
    /// All of them, in the order that a sweep visits.
    pub const ALL: [Self; 5] = [Self::Pack, Self::Index, Self::Manifest, Self::Map, Self::Part];

    const fn folder(self) -> &'static str {
        match self {
            Self::Pack => "pack",
            Self::Index => "index",
            Self::Manifest => "manifest",
            Self::Map => "map",
            Self::Part => "part",
        }
    }
}

/// Numbered objects of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbered {
    /// An entry.
    Entry,
    /// A snapshot after an entry.
    Snapshot,
    /// A truncation.
    Boundary,
    /// A copy of an entry that could not be read.
    Aside,
    /// A signed policy.
    Policy,
}

impl Numbered {
    const fn folder(self) -> &'static str {
        match self {
            Self::Entry => "log",
            Self::Snapshot => "snapshot",
            Self::Boundary => "boundary",
            Self::Aside => "aside",
            Self::Policy => "policy",
        }
    }

    /// Prefix of all of them.
    #[must_use]
    pub fn prefix(self) -> Path {
        Path::from(self.folder())
    }

    /// The key of number `n`.
    #[must_use]
    pub fn key(self, n: u64) -> Path {
        Path::from(format!("{}/{n:020}", self.folder()))
    }

    /// The number in a key of this kind.
    #[must_use]
    pub fn number(self, key: &Path) -> Option<u64> {
        let mut parts = key.parts();
        let (folder, digits, end) = (parts.next()?, parts.next()?, parts.next());
        let digits = digits.as_ref();
        let whole = folder.as_ref() == self.folder() && end.is_none() && digits.len() == 20;
        whole.then(|| digits.parse().ok()).flatten()
    }
}

/// Key of the copy of a snapshot that could not be read.
#[must_use]
pub fn aside_snapshot(n: u64) -> Path {
    Path::from(format!("{}/snapshot-{n:020}", Numbered::Aside.folder()))
}

/// Key of the description of the repository.
#[must_use]
pub fn repository() -> Path {
    Path::from("repository")
}

/// Key of one object of a session.
#[must_use]
pub fn owned(family: Family, id: Owned) -> Path {
    Path::from(format!("{}/{id}", family.folder()))
}

/// Id of the part of `rank` in `session`. It is the only id that is not random, so that parts are found without a listing.
#[must_use]
pub fn part(session: SessionId, rank: u32) -> Owned {
    Owned { session, object: ObjectId::from_bytes(u128::from(rank).to_be_bytes()) }
}

/// Prefix of all objects of a kind.
#[must_use]
pub fn family(family: Family) -> Path {
    Path::from(family.folder())
}

/// Prefix of all lists of unneeded objects.
#[must_use]
pub fn tombstones() -> Path {
    Path::from(TOMBSTONE)
}

/// Key of one list of unneeded objects, written by a collect under its session.
#[must_use]
pub fn tombstone(id: Owned) -> Path {
    Path::from(format!("{TOMBSTONE}/{id}"))
}

/// True if `key` is that of a list of unneeded objects.
#[must_use]
pub fn is_tombstone(key: &Path) -> bool {
    owner_below(TOMBSTONE, key).is_some()
}

/// Key of the address of the agent `agent` of `site`.
#[must_use]
pub fn agent(site: &str, agent: &str) -> Path {
    Path::from_iter(["agent", site, agent])
}

/// Prefix of all agents' addresses.
#[must_use]
pub fn agents() -> Path {
    Path::from("agent")
}

/// Key of the head of the inventory of `identity`.
#[must_use]
pub fn inventory_head(identity: &Identity) -> Path {
    Path::from_iter([INVENTORY, identity.site(), identity.agent(), INVENTORY_HEAD])
}

/// Key of the set `set` that inventories of `identity` are based on, in one of its two slots.
#[must_use]
pub fn inventory_set(identity: &Identity, set: &str, slot: bool) -> Path {
    Path::from_iter([INVENTORY, identity.site(), identity.agent(), &format!("{set}-{}", u8::from(slot))])
}

/// Prefix of all inventories.
#[must_use]
pub fn inventories() -> Path {
    Path::from(INVENTORY)
}

/// Agent of an inventory's head, from its key.
#[must_use]
pub fn inventory_agent(key: &Path) -> Option<Identity> {
    let parts: Vec<_> = key.parts().collect();
    let [folder, site, agent, last] = parts.as_slice() else { return None };
    if folder.as_ref() != INVENTORY || last.as_ref() != INVENTORY_HEAD {
        return None;
    }
    Identity::new(site.as_ref(), agent.as_ref()).ok()
}

/// Key of the usage of `month` by a process of `identity`; `n` is its start, in nanoseconds since 1970.
#[must_use]
pub fn usage(month: Month, identity: &Identity, n: u64) -> Path {
    Path::from_iter([USAGE, &month.to_string(), identity.site(), identity.agent(), &format!("{n:020}")])
}

/// Prefix of all usage of `month`.
#[must_use]
pub fn usage_of(month: Month) -> Path {
    Path::from_iter([USAGE, &month.to_string()])
}

/// Agent of a usage object and the start of its process, from its key.
#[must_use]
pub fn usage_of_key(key: &Path) -> Option<(Identity, Timestamp)> {
    let parts: Vec<_> = key.parts().collect();
    let [folder, _, site, agent, digits] = parts.as_slice() else { return None };
    if folder.as_ref() != USAGE || !is_number(digits.as_ref()) {
        return None;
    }
    let started = Timestamp(digits.as_ref().parse().ok()?);
    Some((Identity::new(site.as_ref(), agent.as_ref()).ok()?, started))
}

/// Key of a head of the audit log of `identity`; `n` is the time, in nanoseconds since 1970.
#[must_use]
pub fn audit_head(identity: &Identity, n: u64) -> Path {
    Path::from_iter([AUDIT, identity.site(), identity.agent(), &format!("{n:020}")])
}

/// Prefix of all heads of audit logs of `identity`.
#[must_use]
pub fn audit_heads(identity: &Identity) -> Path {
    Path::from_iter([AUDIT, identity.site(), identity.agent()])
}

/// True if `key` is that of a head of an audit log.
#[must_use]
pub fn is_audit_head(key: &Path) -> bool {
    let parts: Vec<_> = key.parts().collect();
    let [folder, _, _, digits] = parts.as_slice() else { return false };
    folder.as_ref() == AUDIT && is_number(digits.as_ref())
}

fn is_number(digits: &str) -> bool {
    digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Owner of a key of this kind.
#[must_use]
pub fn owner(family: Family, key: &Path) -> Option<Owned> {
    owner_below(family.folder(), key)
}

fn owner_below(wanted: &str, key: &Path) -> Option<Owned> {
    let mut parts = key.parts();
    let (folder, session, object) = (parts.next()?, parts.next()?, parts.next()?);
    if folder.as_ref() != wanted || parts.next().is_some() {
        return None;
    }
    Some(Owned { session: session.as_ref().parse().ok()?, object: object.as_ref().parse().ok()? })
}

/// True if `key`, relative to the repository's root, belongs to an object of this layout that may be a multipart upload. Uploads
/// of other programs, even below the same prefix, must not be aborted.
#[must_use]
pub fn is_uploaded_in_parts(key: &str) -> bool {
    let Ok(key) = Path::parse(key) else { return false };
    Family::ALL.into_iter().any(|family| owner(family, &key).is_some()) || Numbered::Snapshot.number(&key).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::SessionId;

    #[test]
    fn uploads_of_other_programs_are_not_ours() {
        let id = Owned::fresh(SessionId::random());
        for family in Family::ALL {
            assert!(is_uploaded_in_parts(owned(family, id).as_ref()));
        }
        assert!(is_uploaded_in_parts(Numbered::Snapshot.key(64).as_ref()));
        let inside = format!("other/{}", owned(Family::Pack, id));
        let beyond = format!("{}/more", owned(Family::Pack, id));
        let bare = format!("pack/{}", id.session);
        for other in
            ["", "video.mp4", "pack/video.mp4", "pack/a/b", "snapshot/latest", "pack//", &inside, &beyond, &bare]
        {
            assert!(!is_uploaded_in_parts(other), "{other}");
        }
    }

    #[test]
    fn keys_read_back() {
        let id = Owned::fresh(SessionId::random());
        for kind in Family::ALL {
            assert_eq!(owner(kind, &owned(kind, id)), Some(id));
        }
        assert_eq!(owner(Family::Pack, &owned(Family::Map, id)), None);
        assert_eq!(Numbered::Entry.number(&Numbered::Entry.key(42)), Some(42));
        assert_eq!(Numbered::Entry.number(&Numbered::Snapshot.key(42)), None);
        let head = audit_head(&Identity::new("west", "node-7").unwrap(), 42);
        assert_eq!(head.as_ref(), "audit/west/node-7/00000000000000000042");
        assert!(is_audit_head(&head) && !is_audit_head(&agent("west", "node-7")));
        let west = Identity::new("west", "node-7").unwrap();
        assert_eq!(inventory_agent(&inventory_head(&west)), Some(west.clone()));
        assert_eq!(inventory_agent(&inventory_set(&west, "held", true)), None);
        let month = "2026-11".parse().unwrap();
        let used = usage(month, &west, 42);
        assert_eq!(used.as_ref(), "usage/2026-11/west/node-7/00000000000000000042");
        assert_eq!((usage_of_key(&used), usage_of_key(&head)), (Some((west, Timestamp(42))), None));
        assert!(used.prefix_matches(&usage_of(month)));
    }
}
