//! Collecting: deciding what nothing needs any more, as pure functions from what was read to a plan, and carrying it out.
//!
//! ```text
//! mark      maps of all names -> which chunks of which packs are used
//! judge     state + marks + index -> condemn, pardon, purge, repack (a plan; nothing has happened yet)
//! repack    live chunks of mostly dead packs -> new packs, new maps, one commit that swaps them
//! sweep     keys in the store that nothing names, of sessions that are over -> list as unneeded, delete after the grace
//! ```
//!
//! A pack dies in two commits: condemned (readable, but nothing new may rely on it), and, after a new marking, purged;
//! only then, and after the grace, are its bytes deleted. What made a tree reachable in between pardoned the pack by the same commit, or came
//! before the new marking and is seen by it.

mod judge;
mod mark;
mod repack;
mod sweep;
pub mod tombstones;

pub use judge::{Judgement, judge};
pub use mark::{Marks, mark};
pub use repack::repack;
pub use sweep::{Cutoff, Held, Leftovers, Unneeded, delete_all, leftovers, store_time};
