//! The durable home of content in one object store.

pub mod layout;
pub mod log;
mod name;
mod objects;

pub use name::Name;
