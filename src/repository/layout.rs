//! The one place that spells object keys.
//!
//! ```text
//! repository                      what this is; created once
//! log/<20 digits>                 entries, created once each, dense above the boundary
//! snapshot/<20 digits>            the log's state after that entry
//! aside/<20 digits>               copies of entries that could not be read; nothing reads them
//! boundary/<20 digits>            the n-th truncation; created once, never deleted
//! pack|index|manifest|map/<session>/<ulid>
//! part/<session>/<rank, as a ulid>  what one rank has saved; created once
//! tombstone/<session>/<ulid>      objects that a collect found unneeded
//! agent/<site>/<agent>            where an agent listens; the only key that is written again and again
//! ```

use object_store::path::Path;

use crate::id::{ObjectId, Owned, SessionId};

/// Folder of lists of unneeded objects.
const TOMBSTONE: &str = "tombstone";

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
}

impl Numbered {
    const fn folder(self) -> &'static str {
        match self {
            Self::Entry => "log",
            Self::Snapshot => "snapshot",
            Self::Boundary => "boundary",
            Self::Aside => "aside",
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

/// The object that says what this is.
#[must_use]
pub fn repository() -> Path {
    Path::from("repository")
}

/// Key of one object of a session.
#[must_use]
pub fn owned(family: Family, id: Owned) -> Path {
    Path::from(format!("{}/{id}", family.folder()))
}

/// The name of what `rank` saves under `session`: the one name that is not random, so that nobody needs a listing.
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

/// Whether `key` is that of a list of unneeded objects.
#[must_use]
pub fn is_tombstone(key: &Path) -> bool {
    owner_below(TOMBSTONE, key).is_some()
}

/// Key of the address that the agent `agent` of `site` announces.
#[must_use]
pub fn agent(site: &str, agent: &str) -> Path {
    Path::from_iter(["agent", site, agent])
}

/// Prefix of all agents' addresses.
#[must_use]
pub fn agents() -> Path {
    Path::from("agent")
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

/// Whether `key`, told from the repository's root, is of an object of this layout that may be uploaded in parts. What another
/// program uploads beside the repository, even below its prefix, is not Towline's to end.
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
    }
}
