//! Numbers of the protocol; docs/protocol.md repeats them, and a test compares the two.

use std::time::Duration;

use crate::limits::{AGENT_NAME_LEN_MAX, CHUNK_LEN_MAX, KIB, MIB};

/// Protocol name in TLS (ALPN, RFC 7301).
pub const ALPN: &[u8] = b"towline";
/// First bytes of the first message of each side.
pub const MAGIC: [u8; 4] = *b"TWLP";
/// Supported versions of the protocol, ascending.
pub const VERSIONS: &[u8] = &[1];
/// Maximum number of versions in a hello.
pub const VERSIONS_MAX: usize = 8;
/// Bytes before the body of a message: its length (4) and its kind (1).
pub const HEADER_LEN: usize = 5;
/// First kind that a side may ignore if it does not know it.
pub const IGNORABLE_FROM: u8 = 128;

/// Maximum length of the body of any message but a frame.
pub const CONTROL_LEN_MAX: u64 = 128 * KIB;
/// Maximum number of bytes in the body of a frame before the stored bytes.
pub const FRAME_HEAD_MAX: u64 = 64;
/// Maximum length of the body of a frame.
pub const FRAME_LEN_MAX: u64 = FRAME_HEAD_MAX + CHUNK_LEN_MAX;
/// Maximum length of a text for logs.
pub const TEXT_LEN_MAX: usize = 256;
/// Maximum length of the software version, and of the name of an agent or a site.
pub const NAME_LEN_MAX: usize = AGENT_NAME_LEN_MAX;
/// Maximum number of extensions in a hello.
pub const EXTENSIONS_MAX: usize = 16;
/// Maximum length of one extension.
pub const EXTENSION_LEN_MAX: usize = 1024;
/// Maximum number of runs of chunks in one message.
pub const RUNS_MAX: usize = 4096;
/// Maximum number of chunks that one request may name by their place in the manifest.
pub const CHUNKS_MAX: u64 = 65_536;
/// Maximum number of chunks that one request may name by their id.
pub const BASES_MAX: usize = 1024;
/// Maximum number of open requests on one connection.
pub const REQUESTS_MAX: u32 = 64;
/// Maximum number of streams of a connection besides the first one.
pub const LANES_MAX: u32 = 16;
/// Smallest window of a requester: fits a frame of the longest chunk that cutters make.
pub const WINDOW_MIN: u64 = 4 * MIB;
/// Largest window of a requester.
pub const WINDOW_MAX: u64 = 1 << 40;
/// Maximum number of bytes of frames that a provider reads ahead and queues, unless one frame alone is longer.
pub const READ_AHEAD_MAX: u64 = 8 * MIB;
/// Maximum number of frames that a provider reads at the same time.
pub const READS_MAX: usize = 16;

/// Time limit for the arrival of a hello.
pub const GREETING_MAX: Duration = Duration::from_secs(10);
/// Time without sending after which a side sends PING.
pub const PING_AFTER: Duration = Duration::from_secs(3);
/// Time without receiving after which a side gives up.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time without receiving after which a side that waits for an answer sends PING.
pub const ANSWER_PING_AFTER: Duration = Duration::from_secs(1);
/// Time without receiving after which a side that waits for an answer gives up: a machine that has died costs no more than this.
pub const ANSWER_SILENCE_MAX: Duration = Duration::from_secs(5);
/// Time without progress on any open request after which a side gives up.
pub const STALL_MAX: Duration = Duration::from_secs(30);
/// Time of reading without an answer after which a provider sends FETCHING.
pub const FETCHING_AFTER: Duration = Duration::from_secs(10);
/// Time for which FETCHING alone counts as progress.
pub const FETCHING_MAX: Duration = Duration::from_mins(10);
/// Received bytes of an incomplete frame that count as progress.
pub const PROGRESS_MIN: u64 = 16 * KIB;
