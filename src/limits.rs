//! Every hard limit in one table. What exceeds one is refused with a clear error, never truncated.

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// Plain bytes in a chunk, at most. Cutters stay at or below 2 MiB; the rest is room for later ones.
pub const CHUNK_LEN_MAX: u64 = 16 * MIB;
/// Bytes in a pack that this version writes, about: a pack is closed once it holds this much.
pub const PACK_LEN_TARGET: u64 = 64 * MIB;
/// Bytes in a pack that this version reads, at most.
pub const PACK_LEN_MAX: u64 = GIB;
/// Chunks in a pack, at most.
pub const PACK_CHUNKS_MAX: u64 = 1 << 20;
/// Bytes in a body that an envelope may announce (manifest, map, index segment, snapshot).
pub const BODY_LEN_MAX: u64 = 4 * GIB;
/// Bytes in a log entry, at most.
pub const ENTRY_LEN_MAX: u64 = 64 * MIB;
/// Bytes in a NAME, at most.
pub const NAME_LEN_MAX: usize = 512;
/// Bytes in the name of an agent or a site, at most.
pub const AGENT_NAME_LEN_MAX: usize = 63;
/// Metrics of one step, at most.
pub const METRICS_MAX: usize = 64;
/// Bytes in the name of a metric, at most.
pub const METRIC_NAME_LEN_MAX: usize = 128;
/// Bytes in the name of a framework, at most.
pub const FRAMEWORK_LEN_MAX: usize = 64;
/// Bytes in the name of an attempt, at most.
pub const ATTEMPT_LEN_MAX: usize = 64;
/// Bytes in a path within a tree, at most (Linux's `PATH_MAX`).
pub const PATH_LEN_MAX: usize = 4096;
/// Bytes in one name of a path, at most (Linux's `NAME_MAX`).
pub const SEGMENT_LEN_MAX: usize = 255;
/// Bytes in a safetensors header, at most: the limit of the format's own reader
/// (<https://github.com/huggingface/safetensors>, README, "Format").
pub const SAFETENSORS_HEADER_MAX: u64 = 100_000_000;
/// Bytes in the table of the tensors in shared memory, at most.
pub const TENSOR_TABLE_LEN_MAX: u64 = 256 << 20;
/// Tensors in one file, at most (the largest models have about 200,000 in all their files).
pub const TENSORS_MAX: usize = 1 << 19;
/// Dimensions of one tensor, at most: `PyTorch`'s own limit.
pub const RANK_MAX: usize = 64;
/// Bytes in a tensor's name, at most.
pub const TENSOR_NAME_MAX: usize = 1 << 16;
/// Bytes in the name of a tensor's element type, at most.
pub const DTYPE_NAME_MAX: usize = 64;
/// Values that are kept of removed and replaced names, at most: with their names and facts a few MiB of every fold.
pub const REMOVED_MAX: usize = 1024;
/// Bytes in all files of these values, at most, but for the one that was taken last: 64 TiB, as many values of 64 GiB as there may
/// be. Whoever replaces one large name every few minutes for days stores no more than that for nobody.
pub const REMOVED_BYTES_MAX: u64 = 64 << 40;
/// Entries between two snapshots of the log.
pub const SNAPSHOT_EVERY: u64 = 64;
/// Live index segments above which a commit merges some.
pub const SEGMENTS_MAX: usize = 24;
/// The smallest memory budget that Towline runs in.
pub const MEMORY_MIN: u64 = 64 * MIB;
