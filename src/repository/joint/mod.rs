//! Steps that ranks save together without collectives: each rank saves its part, and the one that finds all parts commits the
//! step.
//!
//! The ranks of an attempt share a session, which is recorded in the log. A part is a create-only object whose key is computed
//! from the session and the rank. So of two processes of one rank only one part counts, and finding parts needs no listing. If
//! two ranks see all parts, only one commits, because the commit closes the session.

mod complete;
mod part;
mod session;

pub use complete::{Completed, JointTree};
pub use part::RankPart;
pub use session::{AttemptState, Parts};
