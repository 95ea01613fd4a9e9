//! Why a connection is over, and what of it is somebody's fault.

use thiserror::Error;

use super::message::ErrorCode;
use crate::error::{Error as PublicError, ErrorKind};
use crate::format::wire::Malformed;

/// Violation of the protocol by the other side.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A body is not what its kind says.
    #[error("{kind} is malformed")]
    Malformed {
        /// Of which message.
        kind: &'static str,
        /// Fault.
        source: Malformed,
    },
    /// A kind that nobody who speaks this version may leave unread.
    #[error("message of unknown kind {0}")]
    Unknown(u8),
    /// A message is longer than its kind may be, or than the credit that is left.
    #[error("{kind} of {len} bytes where {limit} are allowed")]
    TooLong {
        /// Of which message.
        kind: &'static str,
        /// Its body's length.
        len: u64,
        /// Limit.
        limit: u64,
    },
    /// A message that makes no sense here, or now.
    #[error("{0}")]
    Unexpected(&'static str),
    /// A limit that the hello told was passed.
    #[error("{0}")]
    Limit(&'static str),
    /// No version is spoken by both.
    #[error("no version of the protocol is shared: expected one of {ours:?}, got {theirs:?}")]
    Version {
        /// The versions of this side.
        ours: Vec<u8>,
        /// By the other side.
        theirs: Vec<u8>,
    },
    /// The hello and the certificate name different agents.
    #[error("hello names another agent than the certificate: expected {expected}, got {got}")]
    Identity {
        /// By certificate.
        expected: String,
        /// By hello.
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
            Self::Malformed { .. } | Self::Unknown(_) | Self::Unexpected(_) => ErrorCode::Protocol,
        }
    }
}

/// Why a connection is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closed {
    /// Both sides had said goodbye, and all was done.
    Done,
    /// The other side broke the protocol, and was told.
    Violated(Violation),
    /// The other side says that something is wrong.
    ByPeer {
        /// What.
        code: ErrorCode,
        /// Details.
        text: String,
    },
    /// This side gave up: silence, no progress, a frame that was not true.
    GaveUp {
        /// Why.
        code: ErrorCode,
        /// Why exactly.
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
                    .help("use towline of about the same age on both sides")
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
