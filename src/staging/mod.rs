//! Tensors in memory that the processes of a node share.
//!
//! ```text
//! sealed   memory that nobody can change any more, passed between processes as a file descriptor
//! pages    whether it has huge pages
//! table    where each tensor lies in it
//! ```

mod pages;
mod sealed;
mod table;

pub use self::pages::small_pages;
pub use self::sealed::{MappedMemory, SealedMemory, UnsealedMemory};
pub use self::table::{StagedTensor, TensorTable};
