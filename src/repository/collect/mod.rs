//! Collecting: pure functions that plan which objects are unneeded, and the execution of that plan.
//!
//! ```text
//! forget    what was kept of removed names for as long as it was to be
//! mark      maps of all names, and of what is kept of removed ones -> which chunks of which packs are used
//! judge     state + marks + index -> condemn, pardon, purge, repack (a plan; nothing has happened yet)
//! repack    live chunks of mostly dead packs -> new packs, new maps, one commit that swaps them
//! sweep     keys in the store that nothing names, of sessions that are over -> list as unneeded, delete after the grace
//! ```
//!
//! A pack is deleted after two commits: it is condemned (readable, but new content must not rely on it), then, after another
//! marking, purged. Its bytes are deleted only then, once the grace is over. A commit in between that makes a tree reachable
//! either pardons the pack itself, or comes before the second marking, which sees it.

mod forget;
mod judge;
mod live;
mod mark;
mod repack;
mod sweep;
pub mod tombstones;

pub use forget::{KEEP_REMOVED, KeepUntil, kept_since, outlived};
pub use judge::{Judgement, judge};
pub use mark::{Marks, mark};
pub use repack::{NO_SPACE, Repacked, repack};
pub use sweep::{Cutoff, EntryTimes, SessionPacks, SweepCandidates, Unneeded, delete_all, leftovers, store_time};
