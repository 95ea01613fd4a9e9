//! Hinted handoff: a checkpoint that may not be saved in time is sent to another agent. The receiver stores it on its disk and saves it,
//! unless the sender reports that it has saved it itself.
//!
//! ```text
//! watch, when time is short -> sender -- archive over a call --> store (a disk that survives the sender's node) -> receiver: saves it
//!                              sender -- it is saved ----------> store: deletes it
//! ```

mod archive;
mod path_memory;
mod receiver;
mod register;
mod sender;
mod store;
mod stored;
#[cfg(test)]
mod tests;

pub(super) use self::receiver::{ReceiverOptions, run_receiver};
pub(super) use self::sender::Sender;
pub(super) use self::store::HandoffStore;
pub(super) use self::stored::{Announced, StoredCheckpoint, names, read_modes};
