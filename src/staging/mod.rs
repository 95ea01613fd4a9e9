//! Tensors in memory that the processes of a node share, and in the memory of GPUs.
//!
//! ```text
//! sealed   memory that nobody can change any more, passed between processes as a file descriptor
//! pages    whether it has huge pages
//! table    where each tensor lies in it
//! ring     pinned memory from which a device copies while other parts of it are filled, in few large copies
//! upload   copies of ordinary memory through such a ring
//! cuda     GPUs of NVIDIA
//! clock    time of each stage, and when tensors are complete
//! ```

mod clock;
pub mod cuda;
mod pages;
mod ring;
mod sealed;
mod table;
mod upload;

pub use self::clock::{StageClock, StageTimes};
pub use self::pages::small_pages;
pub use self::ring::{
    ChunkTarget, CopiedPart, CopyEngine, DecodeSizes, Landed, Part, PartTarget, Piece, PinnedRing, ReservedPart,
    SlotLens, SlotLimits, slot_bytes,
};
pub use self::sealed::{MappedMemory, SealedMemory, UnsealedMemory};
pub use self::table::{StagedTensor, TensorTable};
pub use self::upload::upload;
