//! Tensors of saved trees in sealed memory, which the processes of this node map instead of reading them again.
//!
//! ```text
//! stage    reads tensors of a tree into memory, once for all who ask
//! trees    the trees in memory: limits, leases, expiry
//! pass     passes the memory to another process over the agent's socket
//! client   the other side of that
//! ```

mod client;
mod pass;
mod stage;
mod trees;

pub use self::client::{StageRequest, StagedMemory};
pub(super) use self::pass::pass;
pub use self::stage::StageReport;
pub(super) use self::stage::{StageOrder, stage};
pub(super) use self::trees::StagedTrees;
