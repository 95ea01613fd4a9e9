//! The one public error: what happened, where, expected and got, what to do.
//!
//! A kind exists where a caller would act differently; each has one exit code. Messages are lower case, name the thing,
//! and do not repeat their source: whoever handles an error prints the chain once.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt::{self, Write as _};

use serde::ser::{Serialize, SerializeStruct as _, Serializer};

/// Help about a file system that denies access.
const ACCESS_CURE: &str = "check the owner and mode of the path, and how it is mounted";
/// Help about a full file system.
const SPACE_CURE: &str = "free some space there and run the same command again";

/// Help about a limit of the length of files.
const LENGTH_CURE: &str =
    "raise the limit of file sizes (ulimit -f), or use another file system, and run the same command again";

/// The result of anything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of an error, by what a caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema), schema(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request itself makes no sense: fix the call.
    Usage,
    /// A name, file or repository that does not exist.
    NotFound,
    /// Stored bytes are not what was written.
    Damaged,
    /// Lost a race, or something is in the way.
    Conflict,
    /// Others change the same thing all the time: a later try may succeed.
    Busy,
    /// The store does not answer, or not now.
    Unreachable,
    /// The store or the file system says no.
    Denied,
    /// Not enough memory budget, disk or descriptors.
    Exhausted,
    /// The caller stopped it.
    Cancelled,
    /// This program is too old, or this store too weak, for what was asked.
    Unsupported,
    /// Anything else: an I/O error, a bug.
    Other,
}

impl ErrorKind {
    /// The process exit code, the same for every command.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Damaged => 4,
            Self::Conflict | Self::Busy => 5,
            Self::Unreachable => 6,
            Self::Denied => 7,
            Self::Exhausted | Self::Cancelled | Self::Unsupported | Self::Other => 1,
        }
    }

    /// The word that `--json` errors carry.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::NotFound => "not-found",
            Self::Damaged => "damaged",
            Self::Conflict => "conflict",
            Self::Busy => "busy",
            Self::Unreachable => "unreachable",
            Self::Denied => "denied",
            Self::Exhausted => "exhausted",
            Self::Cancelled => "cancelled",
            Self::Unsupported => "unsupported",
            Self::Other => "other",
        }
    }

    /// True for a lost race, whether a later try may succeed or not.
    #[must_use]
    pub const fn is_conflict(self) -> bool {
        matches!(self, Self::Conflict | Self::Busy)
    }

    /// The kind that a word of [`ErrorKind::word`] means; what a later version calls by a new one is other.
    #[must_use]
    pub fn from_word(word: &str) -> Self {
        let all = [
            Self::Usage,
            Self::NotFound,
            Self::Damaged,
            Self::Conflict,
            Self::Busy,
            Self::Unreachable,
            Self::Denied,
            Self::Exhausted,
            Self::Cancelled,
            Self::Unsupported,
        ];
        all.into_iter().find(|kind| kind.word() == word).unwrap_or(Self::Other)
    }
}

/// Error. Built as a sentence: `Error::damaged("pack footer").at(key).expected(a).got(b).help("...")`.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    what: Cow<'static, str>,
    place: Option<String>,
    expected: Option<String>,
    got: Option<String>,
    help: Option<Cow<'static, str>>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Limit of each part of an error, in bytes: whoever sent a long text is not sent it back.
const PART_LEN_MAX: usize = 4096;

/// `text`, or its beginning and its length.
fn clipped(mut text: String) -> String {
    let len = text.len();
    if len > PART_LEN_MAX {
        text.truncate(text.floor_char_boundary(PART_LEN_MAX));
        // Text takes all that is written to it.
        let _ = write!(text, "... ({len} bytes)");
    }
    text
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $kind:ident,)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(what: impl Into<Cow<'static, str>>) -> Self {
            Self::new(ErrorKind::$kind, what)
        })*
    };
}

impl Error {
    /// An error of `kind`; `what` names the thing, lower case, no full stop.
    #[must_use]
    pub fn new(kind: ErrorKind, what: impl Into<Cow<'static, str>>) -> Self {
        let what = match what.into() {
            long if long.len() > PART_LEN_MAX => clipped(long.into_owned()).into(),
            what => what,
        };
        Self(Box::new(Inner { kind, what, place: None, expected: None, got: None, help: None, source: None }))
    }

    constructors! {
        /// The call is wrong.
        usage => Usage,
        /// Something named does not exist.
        not_found => NotFound,
        /// Stored bytes are wrong.
        damaged => Damaged,
        /// Something is in the way.
        conflict => Conflict,
        /// Others change the same thing all the time.
        busy => Busy,
        /// The store does not answer.
        unreachable => Unreachable,
        /// Refused by the store or the file system.
        denied => Denied,
        /// Not enough of a bounded thing.
        exhausted => Exhausted,
        /// The caller stopped it.
        cancelled => Cancelled,
        /// Too old a program or too weak a store.
        unsupported => Unsupported,
        /// Anything else.
        other => Other,
    }

    /// An I/O error on a local path, classified by its code.
    #[must_use]
    pub fn io(what: impl Into<Cow<'static, str>>, path: &std::path::Path, source: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let (kind, help) = match source.kind() {
            Io::NotFound => (ErrorKind::NotFound, None),
            Io::PermissionDenied | Io::ReadOnlyFilesystem => (ErrorKind::Denied, Some(ACCESS_CURE)),
            Io::StorageFull | Io::QuotaExceeded => (ErrorKind::Exhausted, Some(SPACE_CURE)),
            Io::FileTooLarge => (ErrorKind::Exhausted, Some(LENGTH_CURE)),
            _ => (ErrorKind::Other, None),
        };
        let error = Self::new(kind, without_room(&source, what.into())).at(path.display()).source(source);
        match help {
            Some(help) => error.help(help),
            None => error,
        }
    }

    /// A failed write to standard output.
    pub(crate) fn standard_output(source: std::io::Error) -> Self {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        if matches!(source.kind(), StorageFull | QuotaExceeded) {
            return Self::exhausted(without_room(&source, "cannot write standard output".into()))
                .source(source)
                .help("free some space where it goes, or send it elsewhere, then run the same command again");
        }
        Self::other("cannot write standard output").source(source)
    }

    /// Where: a key, a path, an offset.
    #[must_use]
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.0.place = Some(clipped(place.to_string()));
        self
    }

    /// Adds a file to the place, which is one in it, such as a line.
    #[must_use]
    pub fn in_file(self, file: &std::path::Path) -> Self {
        let place = self.place().map_or_else(|| file.display().to_string(), |at| format!("{}, {at}", file.display()));
        self.at(place)
    }

    /// Adds the expected value.
    #[must_use]
    pub fn expected(mut self, expected: impl fmt::Display) -> Self {
        self.0.expected = Some(clipped(expected.to_string()));
        self
    }

    /// Adds the actual value.
    #[must_use]
    pub fn got(mut self, got: impl fmt::Display) -> Self {
        self.0.got = Some(clipped(got.to_string()));
        self
    }

    /// Adds help for the user.
    #[must_use]
    pub fn help(mut self, help: impl Into<Cow<'static, str>>) -> Self {
        self.0.help = Some(help.into());
        self
    }

    /// The error underneath.
    #[must_use]
    pub fn source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The error underneath `error`, whose own words this one holds.
    #[must_use]
    pub(crate) fn source_of(mut self, error: &std::sync::Arc<Self>) -> Self {
        self.0.source = error.0.source.is_some().then(|| Box::from(SharedSource(std::sync::Arc::clone(error))));
        self
    }

    /// The same error again, for one of several callers who get it.
    pub(crate) fn shared(error: &std::sync::Arc<Self>) -> Self {
        error.restated().source_of(error)
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Place, if known.
    #[must_use]
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }

    /// Help, if there is any.
    #[must_use]
    pub fn help_text(&self) -> Option<&str> {
        self.0.help.as_deref()
    }

    /// Causes, from the top; a cause with which the text above it ends is left out.
    #[must_use]
    pub fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let own = self.to_string();
        let mut next = StdError::source(self);
        while let Some(cause) = next {
            let text = cause.to_string().trim_end().to_owned();
            let repeated = causes.last().unwrap_or(&own).ends_with(&text);
            if !repeated {
                causes.push(text);
            }
            next = cause.source();
        }
        causes
    }
}

/// The source of an error that several callers get.
#[derive(Debug)]
struct SharedSource(std::sync::Arc<Error>);

impl SharedSource {
    fn get(&self) -> Option<&(dyn StdError + 'static)> {
        StdError::source(&*self.0)
    }
}

impl fmt::Display for SharedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().map_or(Ok(()), |source| fmt::Display::fmt(source, f))
    }
}

impl StdError for SharedSource {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.get()?.source()
    }
}

/// `what`, after the kind of room that is lacking, if `source` is about that.
fn without_room(source: &std::io::Error, what: Cow<'static, str>) -> Cow<'static, str> {
    use std::io::ErrorKind as Io;
    let lacking = match source.kind() {
        Io::StorageFull => "disk full",
        Io::QuotaExceeded => "disk quota exceeded",
        Io::FileTooLarge => "file too large",
        _ => return what,
    };
    format!("{lacking}: {what}").into()
}

impl Serialize for ErrorKind {
    /// Its word.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

impl Serialize for Error {
    /// `{kind, message, place, help, causes}`: for programs: on the command line, in the API and in Python.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Error", 5)?;
        fields.serialize_field("kind", self.kind().word())?;
        fields.serialize_field("message", &self.to_string())?;
        fields.serialize_field("place", &self.place())?;
        fields.serialize_field("help", &self.help_text())?;
        fields.serialize_field("causes", &self.causes())?;
        fields.end()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { what, place, expected, got, .. } = &*self.0;
        f.write_str(what)?;
        if let Some(place) = place {
            write!(f, " at {place}")?;
        }
        match (expected, got) {
            (Some(expected), Some(got)) => write!(f, ": expected {expected}, got {got}"),
            (Some(expected), None) => write!(f, ": expected {expected}"),
            (None, Some(got)) => write!(f, ": got {got}"),
            (None, None) => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)?;
        self.causes().iter().try_for_each(|cause| write!(f, "; caused by: {cause}"))
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|source| source.as_ref() as &(dyn StdError + 'static))
    }
}

impl From<object_store::Error> for Error {
    fn from(error: object_store::Error) -> Self {
        use object_store::Error as Store;
        let (kind, what, place) = match &error {
            Store::NotFound { path, .. } => (ErrorKind::NotFound, "object not found", Some(path.clone())),
            Store::AlreadyExists { path, .. } => (ErrorKind::Conflict, "object exists already", Some(path.clone())),
            Store::Precondition { path, .. } => (ErrorKind::Conflict, "object changed meanwhile", Some(path.clone())),
            Store::PermissionDenied { path, .. } => (ErrorKind::Denied, "store refused access", Some(path.clone())),
            Store::Unauthenticated { path, .. } => {
                (ErrorKind::Denied, "store did not accept the credentials", Some(path.clone()))
            }
            Store::NotImplemented { .. } | Store::NotSupported { .. } => {
                (ErrorKind::Unsupported, "store cannot do this", None)
            }
            Store::InvalidPath { .. } | Store::UnknownConfigurationKey { .. } => {
                (ErrorKind::Usage, "store address is malformed", None)
            }
            _ => return Self::from_generic(error),
        };
        let helped = match kind {
            ErrorKind::Denied => {
                Self::new(kind, what).help("`towline doctor` says which credentials were used, and what they may do")
            }
            _ => Self::new(kind, what),
        };
        match place {
            Some(place) => helped.at(place).source(error),
            None => helped.source(error),
        }
    }
}

impl Error {
    /// The same words, without a source.
    fn restated(&self) -> Self {
        let Inner { kind, what, place, expected, got, help, source: _ } = &*self.0;
        Self(Box::new(Inner {
            kind: *kind,
            what: what.clone(),
            place: place.clone(),
            expected: expected.clone(),
            got: got.clone(),
            help: help.clone(),
            source: None,
        }))
    }

    /// True if a disk was full, or its user's quota used up.
    #[must_use]
    pub(crate) fn is_of_full_disk(&self) -> bool {
        let mut cause = StdError::source(self);
        while let Some(inner) = cause {
            let inner = inner.downcast_ref::<SharedSource>().and_then(SharedSource::get).unwrap_or(inner);
            if let Some(io) = inner.downcast_ref::<std::io::Error>() {
                return matches!(io.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded);
            }
            cause = inner.source();
        }
        false
    }

    /// A store error without a class of its own: a local disk's errno if there is one below, else the network's fault.
    fn from_generic(error: object_store::Error) -> Self {
        let mut cause: Option<&(dyn StdError + 'static)> = Some(&error);
        while let Some(inner) = cause {
            // An error of Towline itself, below the store's client.
            if let Some(own) = inner.downcast_ref::<Self>() {
                return own.restated().source(error);
            }
            if let Some(io) = inner.downcast_ref::<std::io::Error>() {
                use std::io::ErrorKind as Io;
                let (kind, help) = match io.kind() {
                    Io::StorageFull | Io::QuotaExceeded => (ErrorKind::Exhausted, SPACE_CURE),
                    Io::FileTooLarge => (ErrorKind::Exhausted, LENGTH_CURE),
                    Io::PermissionDenied | Io::ReadOnlyFilesystem => (ErrorKind::Denied, ACCESS_CURE),
                    _ => break,
                };
                let what = without_room(io, "cannot use the store".into());
                return Self::new(kind, what).help(help).source(error);
            }
            cause = inner.source();
        }
        Self::unreachable("store did not answer as it should")
            .help("`towline doctor` tells what the store does; run the same command again to resume")
            .source(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_not_sent_back() {
        let long = "\u{e9}".repeat(1 << 20);
        let error = Error::usage(long.clone()).at(&long).expected(&long).got(&long);
        let text = error.to_string();
        assert!(text.len() < 5 * PART_LEN_MAX && text.contains("(2097152 bytes)"), "{}", text.len());
    }

    #[test]
    fn an_error_reads_as_what_where_expected_got() {
        let error = Error::damaged("pack footer").at("pack/A/B").expected("64 bytes").got("12").help("verify --repair");
        assert_eq!(error.to_string(), "pack footer at pack/A/B: expected 64 bytes, got 12");
        assert_eq!(error.kind().exit_code(), 4);
        assert_eq!(error.help_text(), Some("verify --repair"));
    }

    #[test]
    fn a_full_disk_below_the_store_is_exhaustion_not_the_network() {
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let error = Error::from(object_store::Error::Generic { store: "test", source: Box::new(full) });
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert_eq!(error.to_string(), "disk full: cannot use the store");
    }

    #[test]
    fn a_full_disk_is_one_for_all_who_get_the_error() {
        use std::io::ErrorKind as Io;
        for (kind, full) in [(Io::StorageFull, true), (Io::QuotaExceeded, true), (Io::FileTooLarge, false)] {
            let error = std::sync::Arc::new(Error::io("cannot write a file", std::path::Path::new("o/s"), kind.into()));
            assert_eq!((error.is_of_full_disk(), Error::shared(&error).is_of_full_disk()), (full, full), "{kind}");
        }
    }

    #[test]
    fn a_cause_that_was_said_is_not_said_again() {
        let cause = || std::io::Error::other("address in use");
        let error = Error::unreachable("cannot listen: address in use").source(Error::other("bind").source(cause()));
        assert_eq!(
            format!("{error:?}"),
            "Unreachable: cannot listen: address in use; caused by: bind; caused by: address in use"
        );
        let error = Error::unreachable("cannot listen: address in use").source(cause());
        assert_eq!(format!("{error:?}"), "Unreachable: cannot listen: address in use");
        assert!(error.causes().is_empty());
    }

    #[test]
    fn what_lacks_room_says_so_first() {
        use std::io::ErrorKind as Io;
        let said = |kind: Io| Error::io("cannot write a file", std::path::Path::new("o/s"), kind.into()).to_string();
        assert_eq!(said(Io::StorageFull), "disk full: cannot write a file at o/s");
        assert_eq!(said(Io::QuotaExceeded), "disk quota exceeded: cannot write a file at o/s");
        assert_eq!(said(Io::PermissionDenied), "cannot write a file at o/s");
    }
}
