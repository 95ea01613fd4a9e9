//! Reasons for the end of a connection.

use thiserror::Error;

use super::message::ErrorCode;
use crate::error::{Error as PublicError, ErrorKind};
use crate::format::wire::Malformed;

/// Violation of the protocol by the other side.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A body does not fit its kind.
    #[error("{kind} is malformed")]
    Malformed {
        /// Kind of message.
        kind: &'static str,
        /// Error of the body.
        source: Malformed,
    },
    /// An unknown kind that must not be ignored.
    #[error("message of unknown kind {0}")]
    Unknown(u8),
    /// A message is longer than its kind or the remaining credit allows.
    #[error("{kind} of {len} bytes where {limit} are allowed")]
    TooLong {
        /// Kind of message.
        kind: &'static str,
        /// Length of its body.
        len: u64,
        /// Limit.
        limit: u64,
    },
    /// A frame says another length of its chunk than the manifest or its map.
    #[error("FRAME of a chunk of {got} bytes where the chunk has {expected}")]
    Length {
        /// Plain length of the requested chunk.
        expected: u32,
        /// Plain length in the frame.
        got: u32,
    },
    /// A message that is not allowed here, or now.
    #[error("{0}")]
    Unexpected(&'static str),
    /// A limit of the hello was exceeded.
    #[error("{0}")]
    Limit(&'static str),
    /// The sides share no version.
    #[error("no version of the protocol is shared: expected one of {ours:?}, got {theirs:?}")]
    Version {
        /// Versions of this side.
        ours: Vec<u8>,
        /// Versions of the other side.
        theirs: Vec<u8>,
    },
    /// The hello and the certificate name different agents.
    #[error("hello names another agent than the certificate: expected {expected}, got {got}")]
    Identity {
        /// Identity in the certificate.
        expected: String,
        /// Identity in the hello.
        got: String,
    },
}

impl Violation {
    /// Error code for the other side.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Version { .. } => ErrorCode::Version,
            Self::Identity { .. } => ErrorCode::Identity,
            Self::TooLong { .. } | Self::Limit(_) => ErrorCode::Limit,
            Self::Malformed { .. } | Self::Unknown(_) | Self::Unexpected(_) | Self::Length { .. } => {
                ErrorCode::Protocol
            }
        }
    }
}

/// Reason for the end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closed {
    /// Both sides said goodbye, and everything was done.
    Done,
    /// The other side violated the protocol, and was told so.
    Violated(Violation),
    /// The other side reported an error.
    ByPeer {
        /// Kind of error.
        code: ErrorCode,
        /// Details.
        text: String,
    },
    /// This side gave up: silence, no progress, a wrong frame.
    GaveUp {
        /// Kind of error.
        code: ErrorCode,
        /// Details.
        text: String,
    },
    /// The transport ended or broke before that.
    Lost(String),
}

impl From<Closed> for PublicError {
    fn from(closed: Closed) -> Self {
        match closed {
            Closed::Done => Self::unreachable("peer has said goodbye"),
            Closed::Violated(violation) => match violation.code() {
                ErrorCode::Version => Self::unsupported("peer speaks another version")
                    .help("use similar versions of towline on both sides")
                    .source(violation),
                ErrorCode::Identity => Self::denied("peer is not who it says").source(violation),
                _ => Self::unreachable("peer does not follow the protocol").source(violation),
            },
            Closed::ByPeer { code, text } => {
                let kind = match code {
                    ErrorCode::Version => ErrorKind::Unsupported,
                    ErrorCode::Identity => ErrorKind::Denied,
                    _ => ErrorKind::Unreachable,
                };
                Self::new(kind, format!("peer ended the connection ({}): {text}", code.word()))
            }
            Closed::GaveUp { code, text } => {
                Self::unreachable(format!("gave up on the peer ({}): {text}", code.word()))
            }
            Closed::Lost(text) => Self::unreachable(format!("connection to the peer is lost: {text}")),
        }
    }
}
