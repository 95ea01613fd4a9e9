//! The numbers of the protocol in one place; docs/protocol.md repeats them, and a test compares the two.

use std::time::Duration;

use crate::limits::{CHUNK_LEN_MAX, KIB, MIB};

/// Protocol name in TLS (ALPN, RFC 7301).
pub const ALPN: &[u8] = b"towline";
/// The first bytes of the first message of either side.
pub const MAGIC: [u8; 4] = *b"TWLP";
/// The versions of the protocol that this program speaks, ascending.
pub const VERSIONS: &[u8] = &[1];
/// Versions in a hello, at most.
pub const VERSIONS_MAX: usize = 8;
/// Bytes before the body of a message: its length (4) and its kind (1).
pub const HEADER_LEN: usize = 5;
/// Kinds from here on may be passed over by who does not know them.
pub const IGNORABLE_FROM: u8 = 128;

/// Bytes in the body of a message that is no frame, at most.
pub const CONTROL_LEN_MAX: u64 = 128 * KIB;
/// Bytes in the body of a frame before the stored bytes, at most.
pub const FRAME_HEAD_MAX: u64 = 64;
/// Bytes in the body of a frame, at most.
pub const FRAME_LEN_MAX: u64 = FRAME_HEAD_MAX + CHUNK_LEN_MAX;
/// Bytes in a text that is meant for a log, at most.
pub const TEXT_LEN_MAX: usize = 256;
/// Bytes in the number of the software, and in the name of an agent or a site, at most.
pub const NAME_LEN_MAX: usize = 63;
/// Extensions in a hello, at most.
pub const EXTENSIONS_MAX: usize = 16;
/// Bytes in one extension, at most.
pub const EXTENSION_LEN_MAX: usize = 1024;
/// Runs of chunks in one message, at most.
pub const RUNS_MAX: usize = 4096;
/// Chunks that one request may name by their place in the manifest, at most.
pub const CHUNKS_MAX: u64 = 65_536;
/// Chunks that one request may name by their id, at most.
pub const BASES_MAX: usize = 1024;
/// Requests that are open on one connection, at most.
pub const REQUESTS_MAX: u32 = 64;
/// Streams of a connection besides the first one, at most.
pub const LANES_MAX: u32 = 16;
/// The smallest window that a requester may announce: room for a frame of the longest chunk that cutters make.
pub const WINDOW_MIN: u64 = 4 * MIB;
/// The largest.
pub const WINDOW_MAX: u64 = 1 << 40;
/// Bytes of frames that a provider reads ahead and queues, at most, unless one frame alone is longer.
pub const AHEAD_MAX: u64 = 8 * MIB;
/// Frames that a provider reads at the same time, at most.
pub const READS_MAX: usize = 16;

/// A hello must arrive within this.
pub const GREETING_MAX: Duration = Duration::from_secs(10);
/// Time without a word after which a side says PING.
pub const PING_AFTER: Duration = Duration::from_secs(5);
/// After so long without a word from the other side it is given up.
pub const SILENCE_MAX: Duration = Duration::from_secs(20);
/// After so long without progress on any open request the connection is given up.
pub const STALL_MAX: Duration = Duration::from_secs(30);
/// A provider that brings chunks for so long without an answer says FETCHING.
pub const FETCHING_AFTER: Duration = Duration::from_secs(10);
/// For so long FETCHING alone counts as progress.
pub const FETCHING_MAX: Duration = Duration::from_mins(10);
/// A frame that is still arriving counts as progress each time that this many more of its bytes are there.
pub const PROGRESS_MIN: u64 = 16 * KIB;
