//! Custody: a checkpoint that may not be saved in time is given to another agent. That one has it on its disk, and saves it if it is not
//! told that somebody else did.
//!
//! ```text
//! watch, when time is short -> giver -- parcel over a call --> shelf (a disk that survives the giver's node) -> keeper: saves it
//!                              giver -- it is saved ---------> shelf: lets go of it
//! ```

mod giver;
mod held;
mod keeper;
mod parcel;
mod register;
mod shelf;
#[cfg(test)]
mod tests;

pub(super) use self::giver::Giver;
pub(super) use self::held::{Announced, Held, names, read_modes};
pub(super) use self::keeper::{Keeping, keep};
pub(super) use self::shelf::Shelf;
