//! Entries of the audit log.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, SecondsFormat};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::clock::Timestamp;
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::limits::NAME_LEN_MAX;

/// Maximum length of a rule or an outcome; longer ones are cut.
const REASON_LEN_MAX: usize = 1024;
/// Maximum length of any other text; longer ones are cut.
const TEXT_LEN_MAX: usize = 256;

/// Requester.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Actor {
    /// Another agent, by its certificate.
    Agent(Identity),
    /// User of this machine.
    User(String),
    /// Token, by its label.
    Token(String),
}

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Chunks for another agent or another process.
    Serve,
    /// Bytes of files, over HTTP or by `towline cat`.
    Read,
    /// Chunks from another agent, at the side that asks.
    Fetch,
    /// Chunks into a cache, ahead of a reader.
    Warm,
    /// A pin in a cache.
    Pin,
    /// The end of a pin.
    Unpin,
    /// A save under a name.
    Save,
    /// A restore.
    Restore,
    /// A copy into another repository.
    Sync,
    /// A copy under another name.
    Copy,
    /// Removal of a name.
    Remove,
    /// A checkpoint that another agent hands off.
    Handoff,
    /// A change of labels.
    Label,
    /// Declassification of a name.
    Declassify,
    /// A change of the policy.
    Policy,
}

/// Verdict on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The request was carried out.
    Allow,
    /// The request was refused.
    Deny,
}

/// A decision about a request for a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Decision {
    /// Requester.
    pub actor: Actor,
    /// Kind of request.
    pub action: Action,
    /// Requested name; none if the request matches nothing in the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Manifest, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Id of the repository, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// Destination site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The other agent that is asked, at the side that asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Allowed or not.
    pub verdict: Verdict,
    /// Rule that decided, or the reason.
    pub rule: String,
}

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Number: from 1, without gaps.
    pub seq: u64,
    /// Time, by this machine's clock.
    #[serde(serialize_with = "write_time", deserialize_with = "read_time")]
    pub time: Timestamp,
    /// Content.
    #[serde(flatten)]
    pub what: EntryKind,
}

/// Content of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum EntryKind {
    /// The first line of a segment.
    Begin {
        /// Version of the format: 1.
        version: u8,
        /// Id of the log.
        log: String,
        /// Agent or command line that owns the log.
        origin: String,
        /// Hash of the previous entry.
        previous: String,
    },
    /// A decision.
    Decision(Decision),
    /// End of an allowed request.
    End {
        /// Number of the decision's entry.
        of: u64,
        /// Bytes sent to the requester.
        bytes: u64,
        /// Number of requests that share the entry.
        requests: u64,
        /// `done`, or the reason of a failure.
        outcome: String,
    },
    /// Bytes at the end of the log that were not entries when it was opened: after a power loss, or a change by
    /// somebody.
    Torn {
        /// Number of bytes, which were moved to a file beside.
        bytes: u64,
        /// Their digest.
        digest: String,
    },
}

impl Decision {
    /// Cuts long texts to the limits of an entry.
    #[must_use]
    pub(super) fn bounded(mut self) -> Self {
        clip(&mut self.rule, REASON_LEN_MAX);
        for (text, most) in [
            (&mut self.name, NAME_LEN_MAX),
            (&mut self.manifest, TEXT_LEN_MAX),
            (&mut self.repository, TEXT_LEN_MAX),
            (&mut self.to, TEXT_LEN_MAX),
            (&mut self.asked, TEXT_LEN_MAX),
        ] {
            if let Some(text) = text {
                clip(text, most);
            }
        }
        if let Actor::User(text) | Actor::Token(text) = &mut self.actor {
            clip(text, TEXT_LEN_MAX);
        }
        self
    }
}

impl EntryKind {
    /// Cuts long texts to the limits of an entry.
    #[must_use]
    pub(super) fn bounded(mut self) -> Self {
        match &mut self {
            Self::End { outcome, .. } => clip(outcome, REASON_LEN_MAX),
            Self::Decision(decision) => *decision = decision.clone().bounded(),
            Self::Begin { .. } | Self::Torn { .. } => {}
        }
        self
    }
}

fn clip(text: &mut String, most: usize) {
    text.truncate(text.floor_char_boundary(most));
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent(identity) => identity.fmt(f),
            Self::User(name) => write!(f, "user:{name}"),
            Self::Token(label) => write!(f, "token:{label}"),
        }
    }
}

impl FromStr for Actor {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            Some(("user", name)) => Ok(Self::User(name.to_owned())),
            Some(("token", label)) => Ok(Self::Token(label.to_owned())),
            _ => text.parse().map(Self::Agent),
        }
    }
}

impl Serialize for Actor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Actor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Action {
    /// Name in an entry.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Read => "read",
            Self::Fetch => "fetch",
            Self::Warm => "warm",
            Self::Pin => "pin",
            Self::Unpin => "unpin",
            Self::Save => "save",
            Self::Restore => "restore",
            Self::Sync => "sync",
            Self::Copy => "copy",
            Self::Remove => "remove",
            Self::Handoff => "handoff",
            Self::Label => "label",
            Self::Declassify => "declassify",
            Self::Policy => "policy",
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn write_time<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&DateTime::from_timestamp_nanos(time.0).to_rfc3339_opts(SecondsFormat::Nanos, true))
}

fn read_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
    let text = String::deserialize(deserializer)?;
    let time = DateTime::parse_from_rfc3339(&text).map_err(serde::de::Error::custom)?;
    time.timestamp_nanos_opt().map(Timestamp).ok_or_else(|| serde::de::Error::custom("time is out of range"))
}
