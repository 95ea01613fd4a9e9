//! The messages, as docs/protocol.md lists them.

mod read;
mod write;

use bytes::Bytes;

use super::runs::Runs;
use crate::id::{ChunkId, ManifestId};
use crate::identity::Identity;

/// Hexadecimal digits of the hash that a hello has of a SPIFFE id.
const SPIFFE_HASH_LEN: usize = 32;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Identity and capabilities: the first message of each side.
    Hello(Hello),
    /// Request for the stored frames of some chunks.
    Request(Request),
    /// Question for the chunks of this manifest that are held.
    Find(Find),
    /// Answer to [`Message::Find`].
    Found(Found),
    /// One stored chunk.
    Frame(Frame),
    /// Chunks of a request that will not come.
    Missing(Missing),
    /// Early end of a request.
    Ended(Ended),
    /// Cancellation of a request.
    Cancel {
        /// Number of the request.
        request: u64,
    },
    /// Total of the bytes of frame messages that the receiver may have sent since the connection began.
    Credit {
        /// Total bytes, never less than before.
        granted: u64,
    },
    /// Question whether the other side is alive.
    Ping {
        /// Number that the pong repeats.
        nonce: u64,
    },
    /// Answer to a ping.
    Pong {
        /// Number in the ping.
        nonce: u64,
    },
    /// Announcement that the sender begins nothing new.
    Goodbye {
        /// Reason, for the log.
        text: String,
    },
    /// Progress report: the requested chunks are being fetched from further away.
    Fetching,
    /// Error of either side: the last message.
    Error {
        /// Kind of error.
        code: ErrorCode,
        /// Details, for the log.
        text: String,
    },
}

/// The kinds of messages. The numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// [`Message::Hello`].
    Hello = 1,
    /// [`Message::Request`].
    Request = 2,
    /// [`Message::Find`].
    Find = 3,
    /// [`Message::Found`].
    Found = 4,
    /// [`Message::Frame`].
    Frame = 5,
    /// [`Message::Missing`].
    Missing = 6,
    /// [`Message::Ended`].
    Ended = 7,
    /// [`Message::Cancel`].
    Cancel = 8,
    /// [`Message::Credit`].
    Credit = 9,
    /// [`Message::Ping`].
    Ping = 10,
    /// [`Message::Pong`].
    Pong = 11,
    /// [`Message::Goodbye`].
    Goodbye = 12,
    /// [`Message::Error`].
    Error = 13,
    /// [`Message::Request`] of which some chunks are to come without their bases.
    RequestAlone = 14,
    /// [`Message::Fetching`].
    Fetching = 128,
}

impl Kind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::Hello,
        Self::Request,
        Self::Find,
        Self::Found,
        Self::Frame,
        Self::Missing,
        Self::Ended,
        Self::Cancel,
        Self::Credit,
        Self::Ping,
        Self::Pong,
        Self::Goodbye,
        Self::Error,
        Self::RequestAlone,
        Self::Fetching,
    ];

    /// The kind with this number.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == byte)
    }

    /// Name in docs/protocol.md.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Hello => "HELLO",
            Self::Request => "REQUEST",
            Self::Find => "FIND",
            Self::Found => "FOUND",
            Self::Frame => "FRAME",
            Self::Missing => "MISSING",
            Self::Ended => "ENDED",
            Self::Cancel => "CANCEL",
            Self::Credit => "CREDIT",
            Self::Ping => "PING",
            Self::Pong => "PONG",
            Self::Goodbye => "GOODBYE",
            Self::Error => "ERROR",
            Self::RequestAlone => "REQUEST_ALONE",
            Self::Fetching => "FETCHING",
        }
    }
}

/// Identity and capabilities of a side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Supported versions of the protocol, ascending.
    pub versions: Vec<u8>,
    /// Version of its software.
    pub software: String,
    /// The site of its certificate.
    pub site: String,
    /// The agent of its certificate.
    pub agent: String,
    /// Bytes of frames that it allows in transit, apart from short delays; 0 if it will request nothing.
    pub window: u64,
    /// Requests that it serves at the same time; 0 if it serves none.
    pub requests: u32,
    /// Additions of later versions: a number and a value each. Unknown ones are ignored.
    pub extensions: Vec<(u64, Vec<u8>)>,
}

impl Hello {
    /// Number of the extension with the versions of policies that its sender has seen.
    pub const POLICY_VERSIONS: u64 = 1;
    /// Number of the extension by which a provider says that it sends frames without their bases where it is asked to. Without a value.
    pub const ALONE: u64 = 2;

    /// Value of the extension `number`, if it has it.
    #[must_use]
    pub fn extension(&self, number: u64) -> Option<&[u8]> {
        self.extensions.iter().find(|(own, _)| *own == number).map(|(_, value)| value.as_slice())
    }

    /// Site and agent in the hello of `identity`; of a SPIFFE id, which may be longer than a name, none and the begin of its hash.
    #[must_use]
    pub fn names_of(identity: &Identity) -> (String, String) {
        if identity.is_spiffe() {
            let hash = blake3::hash(identity.to_string().as_bytes()).to_hex();
            return (String::new(), hash.as_str()[..SPIFFE_HASH_LEN].to_owned());
        }
        (identity.site().to_owned(), identity.agent().to_owned())
    }
}

/// Priority of a request: lower ones are sent later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Priority {
    /// A caller waits for it.
    #[default]
    Restore = 0,
    /// A caller will wait for it later.
    Warm = 1,
    /// A further copy.
    Replicate = 2,
}

impl Priority {
    /// All of them, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Restore, Self::Warm, Self::Replicate];

    /// Name in docs/protocol.md.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Restore => "restore",
            Self::Warm => "warm",
            Self::Replicate => "replicate",
        }
    }
}

/// Requested chunks of one manifest. The chunks of `chunks` in ascending order, then those of `bases` in theirs, are
/// numbered from 0: a chunk's *ordinal* in the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Chunks by their place in the manifest's list.
    pub chunks: Runs,
    /// Chunks that frames of this manifest named as bases.
    pub bases: Vec<ChunkId>,
    /// Ordinals whose frames must have no base: only for a provider with the extension [`Hello::ALONE`].
    pub alone: Runs,
    /// Plain lengths of the chunks in bytes, by ordinal; empty if the requester does not know them. They are not sent: frames of other
    /// lengths are refused.
    pub lens: Vec<u32>,
}

impl Wanted {
    /// Number of chunks.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.chunks.len() + self.bases.len() as u64
    }

    /// True if no chunk is requested.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A request for stored frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Number, above those of all earlier requests on the connection.
    pub request: u64,
    /// Priority.
    pub priority: Priority,
    /// Manifest of the chunks.
    pub manifest: ManifestId,
    /// Chunks.
    pub wanted: Wanted,
}

/// A question for the chunks of a manifest that the other side holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Find {
    /// Number, in the same sequence as requests.
    pub request: u64,
    /// Manifest in question.
    pub manifest: ManifestId,
    /// First place in its list that the question is about.
    pub from: u32,
}

/// Answer to a [`Find`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Number of the question.
    pub request: u64,
    /// Survey.
    pub survey: Survey,
}

/// Held chunks of a manifest, for a part of its list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Chunks in the manifest's list.
    pub chunks: u32,
    /// End of the covered part of the list (exclusive); ask again from there.
    pub upto: u32,
    /// Held chunks.
    pub held: Runs,
}

/// One stored chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Number of the request.
    pub request: u64,
    /// Ordinal of the chunk in the request.
    pub ordinal: u32,
    /// Number of the codec.
    pub codec: u8,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// Base, if the codec needs one.
    pub base: Option<ChunkId>,
    /// Stored bytes; no more than the plain ones.
    pub stored: Bytes,
}

/// Beginning of a [`Frame`]: all but the stored bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHead {
    pub(super) request: u64,
    pub(super) ordinal: u32,
    pub(super) codec: u8,
    pub(super) plain_len: u32,
    pub(super) base: Option<ChunkId>,
}

/// Chunks of a request that will not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Number of the request.
    pub request: u64,
    /// Ordinals of the chunks.
    pub ordinals: Runs,
}

/// Early end of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Number of the request.
    pub request: u64,
    /// Reason.
    pub code: EndCode,
    /// Details, for the log.
    pub text: String,
}

/// Declares a code: an enum of bytes with names.
macro_rules! code {
    ($(#[$doc:meta])* $name:ident { $($(#[$one:meta])* $variant:ident = $byte:literal, $word:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$one])* $variant = $byte,)*
        }

        impl $name {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Name in docs/protocol.md, and in logs.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }
    };
}

code! {
    /// Reason for the early end of a request.
    EndCode {
        /// The provider has no such manifest, or the requester may not read it.
        NotHere = 1, "not here";
        /// The requester cancelled it.
        Cancelled = 2, "cancelled";
        /// The provider is shutting down and begins nothing new.
        Leaving = 3, "leaving";
        /// An error of the provider; a retry may work.
        Failed = 4, "failed";
        /// The requester is over its limits; retry later.
        Busy = 5, "busy";
    }
}

code! {
    /// Reason for the end of a connection.
    ErrorCode {
        /// The receiver of this error violated the protocol.
        Protocol = 1, "protocol";
        /// The sides share no version.
        Version = 2, "version";
        /// Hello and certificate name different agents.
        Identity = 3, "identity";
        /// The receiver of this error exceeded a limit.
        Limit = 4, "limit";
        /// Nothing was received for too long.
        Silent = 5, "silent";
        /// Open requests made no progress for too long.
        Stalled = 6, "stalled";
        /// A frame did not decode to its chunk.
        Corrupt = 7, "corrupt";
        /// An internal error of the sender.
        Broken = 8, "broken";
        /// The agent has too many connections, or all are taken.
        Busy = 9, "busy";
    }
}
