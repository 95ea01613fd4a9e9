//! Towline moves training state to wherever the next GPU is.
//!
//! Save once; every later byte that moves is a byte the other side does not have yet; every byte handed out has been
//! checked.
//!
//! ```text
//! save     input -> cut -> name (hash) -> skip what is known -> encode -> pack -> put -> commit
//! restore  manifest -> plan -> fetch -> decode + verify -> place
//! ```
//!
//! The words are in docs/glossary.md, the promises in docs/semantics.md, the bytes in docs/format.md. A module uses only
//! lower floors, its own folder, and within a floor only folders to its left (`tests/tidy.rs` holds that true):
//!
//! ```text
//! floor 5  cli                                     doors: parse, call one verb, render
//! floor 4  ops                                     save restore sync verify collect doctor ...
//! floor 2  storage  tree  repository               stores | files on this machine | the durable home of content
//! floor 1  codec  chunker  checkpoint  format      pure: bytes in, bytes out (+ chunk)
//! floor 0  id  error  clock  limits  budget  progress  metrics
//! ```

pub mod budget;
pub mod checkpoint;
pub mod chunk;
pub mod chunker;
pub mod cli;
pub mod clock;
pub mod codec;
pub mod error;
pub mod format;
pub mod id;
pub mod limits;
pub mod metrics;
pub mod ops;
pub mod progress;
pub mod repository;
pub mod storage;
pub mod tree;

pub use error::{Error, ErrorKind, Result};
