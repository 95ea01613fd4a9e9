//! Steps that ranks save together, with no collective: each puts its part, and whoever finds all of them makes one commit.
//!
//! The log says which session the ranks of an attempt share. A part is an object that is created once, under a key that
//! follows from the session and the rank: so two processes of one rank cannot both have theirs counted, and to find what
//! is there takes no listing. Of two ranks that see all parts one commits, since the commit closes the session.

mod complete;
mod part;
mod session;

pub use complete::{Completed, JointTree};
pub use part::RankPart;
pub use session::{Parts, Standing};
