//! The messages, as docs/protocol.md lists them.

mod read;
mod write;

use bytes::Bytes;

use super::runs::Runs;
use crate::id::{ChunkId, ManifestId};

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Identity and abilities: the first message of either side.
    Hello(Hello),
    /// Send me the stored frames of these chunks.
    Request(Request),
    /// Question for the chunks of this manifest that are held.
    Find(Find),
    /// These.
    Found(Found),
    /// One stored chunk.
    Frame(Frame),
    /// These chunks of a request will not come.
    Missing(Missing),
    /// Nothing more comes of a request.
    Ended(Ended),
    /// Send no more of a request.
    Cancel {
        /// Which.
        request: u64,
    },
    /// You may have sent so many bytes of frame messages since the connection began.
    Credit {
        /// Bytes of frames in all, never less than before.
        granted: u64,
    },
    /// Ping.
    Ping {
        /// Comes back in the pong.
        nonce: u64,
    },
    /// I am.
    Pong {
        /// Of the ping.
        nonce: u64,
    },
    /// I shall begin nothing new.
    Goodbye {
        /// Why, for the log.
        text: String,
    },
    /// I bring what you asked for from further away, and more of it has come.
    Fetching,
    /// You or I broke something: this is the last message.
    Error {
        /// What.
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
    /// [`Message::Fetching`].
    Fetching = 128,
}

impl Kind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 14] = [
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
        Self::Fetching,
    ];

    /// The kind with this number.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == byte)
    }

    /// Its name in docs/protocol.md.
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
            Self::Fetching => "FETCHING",
        }
    }
}

/// Identity and abilities of a side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Versions of the protocol that it speaks, ascending.
    pub versions: Vec<u8>,
    /// The number of its software.
    pub software: String,
    /// The site of its certificate.
    pub site: String,
    /// The agent of its certificate.
    pub agent: String,
    /// Bytes of frames that it lets be on their way to it, at least from time to time; 0 if it will request nothing.
    pub window: u64,
    /// Requests that it serves at the same time; 0 if it serves none.
    pub requests: u32,
    /// Additions of later versions: a number and a value each. Unknown ones are passed over.
    pub extensions: Vec<(u64, Vec<u8>)>,
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

    /// Its name in docs/protocol.md.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Restore => "restore",
            Self::Warm => "warm",
            Self::Replicate => "replicate",
        }
    }
}

/// Chunks that somebody wants of one manifest. The chunks of `chunks` in ascending order, then those of `bases` in theirs,
/// are numbered from 0: a chunk's *ordinal* in the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Chunks by their place in the manifest's list.
    pub chunks: Runs,
    /// Chunks that frames of this manifest were said to be based on.
    pub bases: Vec<ChunkId>,
}

impl Wanted {
    /// Number of chunks.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.chunks.len() + self.bases.len() as u64
    }

    /// None?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A request for stored frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its number, above those of all requests before it on the connection.
    pub request: u64,
    /// Priority.
    pub priority: Priority,
    /// Of which manifest.
    pub manifest: ManifestId,
    /// Chunks.
    pub wanted: Wanted,
}

/// A question for the chunks of a manifest that the other side holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Find {
    /// Its number, as a request's.
    pub request: u64,
    /// Of which manifest.
    pub manifest: ManifestId,
    /// From which place in its list on.
    pub from: u32,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Of which question.
    pub request: u64,
    /// Survey.
    pub survey: Survey,
}

/// Chunks of a manifest that somebody holds, over a part of its list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Chunks in the manifest's list.
    pub chunks: u32,
    /// Up to where in the list (excluded) this speaks; ask again from there.
    pub upto: u32,
    /// The chunks that are held.
    pub held: Runs,
}

/// One stored chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Of which request.
    pub request: u64,
    /// Ordinal of the chunk in the request.
    pub ordinal: u32,
    /// The codec's number.
    pub codec: u8,
    /// Bytes of the chunk.
    pub plain_len: u32,
    /// The chunk that it cannot be decoded without, if its codec needs one.
    pub base: Option<ChunkId>,
    /// The stored bytes; no more than the plain ones.
    pub stored: Bytes,
}

/// Chunks of a request that will not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Of which request.
    pub request: u64,
    /// Which, by ordinal.
    pub ordinals: Runs,
}

/// The end of a request before all of it was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Of which request.
    pub request: u64,
    /// Why.
    pub code: EndCode,
    /// Why exactly, for the log.
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

            /// Its name in docs/protocol.md, and in logs.
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
    /// Why a request ended early.
    EndCode {
        /// There is no such manifest, or none that you may read.
        NotHere = 1, "not here";
        /// You cancelled it.
        Cancelled = 2, "cancelled";
        /// I am about to go and begin nothing new.
        Leaving = 3, "leaving";
        /// Something broke on my side; another time it may work.
        Failed = 4, "failed";
        /// You ask for more than I let one agent ask for; later it will work.
        Busy = 5, "busy";
    }
}

code! {
    /// Why a connection ended.
    ErrorCode {
        /// Violation of the protocol.
        Protocol = 1, "protocol";
        /// We share no version.
        Version = 2, "version";
        /// The hello does not say what the certificate says.
        Identity = 3, "identity";
        /// A limit was passed.
        Limit = 4, "limit";
        /// Nothing was heard for too long.
        Silent = 5, "silent";
        /// Open requests made no progress for too long.
        Stalled = 6, "stalled";
        /// A frame was not the chunk that it was said to be.
        Untrue = 7, "untrue";
        /// Something broke on the sender's side.
        Broken = 8, "broken";
        /// You have more connections than the sender lets one agent have, or all are taken.
        Busy = 9, "busy";
    }
}
