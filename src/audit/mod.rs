//! The audit log of decisions about requests for names: lines of JSON, each with a hash over itself and all before it.
//!
//! ```text
//! decision -> recorder (bounded queue, one thread) -> journal: segments of lines on disk (chain)
//!                 every minute: head (number and hash of the last line), signed -> repository (publish)
//! commands: a log that is opened for each entry, since many processes share it
//! verify:  segments + published heads -> the first bad line, and how far the heads reach
//! ```
//!
//! Lines of JSON, not a binary format, so that any tool can read them. The hash covers a line's bytes, so that no other
//! encoding of the same values passes. Fail closed: without a line there is no permission ([`Recorder::record`]).

#[cfg(feature = "agent")]
mod actor_limit;
mod chain;
mod commands;
mod entry;
mod head;
mod journal;
mod latest;
mod publish;
mod recorder;
mod requests;
mod segments;
#[cfg(test)]
mod tests;
mod verify;

#[cfg(feature = "agent")]
pub(crate) use self::actor_limit::{ActorLimit, DENIED_NAMES, RECORDED_REQUESTS, SERVED_TREES};
pub use self::chain::LINE_LEN_MAX;
pub use self::commands::{CommandLog, EndedCommand, HeadPublisher, Recorded};
pub use self::entry::{Action, Actor, Decision, Entry, EntryKind, Verdict};
pub use self::head::{Head, SignedHead};
pub use self::journal::{Journal, SEGMENT_LEN};
pub use self::latest::{LatestEntries, latest_entries};
pub use self::publish::{FallbackPublisher, PUBLISH_EVERY, Publisher, Signer, publish_head, published};
pub use self::recorder::{Recorder, RecorderOptions};
pub use self::requests::{Repeats, Request};
pub use self::segments::{SegmentText, read_segments};
pub use self::verify::{Fault, Findings, verify};
