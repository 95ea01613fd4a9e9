//! Names of things: content digests and time-ordered random ids.

use std::fmt;
use std::str::FromStr;

use ulid::Ulid;

/// Declares a 32-byte content digest with a role of its own.
macro_rules! digest {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; 32]);

        impl $name {
            /// Bytes in an id.
            pub const LEN: usize = 32;

            /// The BLAKE3-256 digest of `bytes`.
            #[must_use]
            pub fn of(bytes: &[u8]) -> Self {
                Self(*blake3::hash(bytes).as_bytes())
            }

            /// Wraps a digest read from somewhere; says nothing about any content.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes)
            }

            /// The digest itself.
            #[must_use]
            pub const fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let shown = f.precision().unwrap_or(64) / 2;
                self.0.iter().take(shown).try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:.16})"), self)
            }
        }
    };
}

digest! {
    /// The name of a chunk: BLAKE3-256 of its plain bytes.
    ChunkId
}

digest! {
    /// The name of a manifest: BLAKE3-256 of its body, the same at every site.
    ManifestId
}

digest! {
    /// The hash of an entry of an audit log, and of all entries before it.
    EntryHash
}

impl ChunkId {
    /// The first eight bytes, big-endian: what index segments sort by.
    #[must_use]
    pub const fn prefix(&self) -> u64 {
        let b = &self.0;
        u64::from_be_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])
    }
}

/// Declares a 16-byte ULID with a role of its own: unique for ever, never derived from content.
macro_rules! unique {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Ulid);

        impl $name {
            /// A fresh id, different from every other.
            #[must_use]
            pub fn random() -> Self {
                Self(Ulid::generate())
            }

            /// Wraps an id read from somewhere.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(Ulid::from_bytes(bytes))
            }

            /// The id, big-endian.
            #[must_use]
            pub const fn to_bytes(self) -> [u8; 16] {
                self.0.to_bytes()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl FromStr for $name {
            type Err = ulid::DecodeError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Ulid::from_string(text).map(Self)
            }
        }
    };
}

unique! {
    /// A writer's open claim on the objects it uploads.
    SessionId
}

unique! {
    /// One object within its session: the last segment of its key.
    ObjectId
}

unique! {
    /// Stamped on each log entry, so that a writer can recognise its own.
    WriteId
}

unique! {
    /// One repository, for ever.
    RepositoryId
}

unique! {
    /// One promise to keep chunks in a cache.
    PinId
}

unique! {
    /// One audit log, from its first entry on.
    AuditLogId
}

/// An object that some session wrote. Its key is `kind/<session>/<object>`; the kind is known from context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owned {
    /// The session that wrote the object.
    pub session: SessionId,
    /// Object of the session.
    pub object: ObjectId,
}

impl Owned {
    /// A fresh name under `session`.
    #[must_use]
    pub fn fresh(session: SessionId) -> Self {
        Self { session, object: ObjectId::random() }
    }
}

impl fmt::Display for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.session, self.object)
    }
}

/// The name of a pack.
pub type PackId = Owned;
/// The name of an index segment.
pub type SegmentId = Owned;
/// Key of one copy of a manifest.
pub type ManifestKey = Owned;
/// Key of a manifest's map.
pub type MapKey = Owned;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_print_as_hex_and_can_be_shortened() {
        let id = ChunkId::of(b"towline");
        assert_eq!(id.to_string().len(), 64);
        assert_eq!(format!("{id:.12}"), id.to_string()[..12]);
        assert_eq!(id.prefix().to_be_bytes(), id.as_bytes()[..8]);
    }

    #[test]
    fn unique_ids_differ_and_survive_text() {
        let (a, b) = (SessionId::random(), SessionId::random());
        assert_ne!(a, b);
        assert_eq!(a.to_string().parse::<SessionId>().unwrap(), a);
        assert_eq!(SessionId::from_bytes(a.to_bytes()), a);
    }
}
