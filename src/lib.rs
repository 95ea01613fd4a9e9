//! Towline moves training state to wherever the next GPU is.
//!
//! Save once; every later byte that moves is a byte the other side does not have yet; every byte handed out has been
//! checked.
//!
//! ```text
//! save     input -> split -> hash -> skip known chunks -> encode -> pack -> put -> commit
//! restore  manifest -> plan -> fetch -> decode + verify -> write
//! ```
//!
//! ```
//! use towline::ops::{RestoreOptions, SaveOptions};
//! use towline::repository::{OpenOptions, Repository};
//! use towline::storage::{Location, StoreOptions, open};
//!
//! # #[tokio::main]
//! # async fn main() -> towline::Result<()> {
//! # let dir = std::env::temp_dir().join(format!("towline-doc-{}", std::process::id()));
//! # let options = OpenOptions { cache: Some(dir.join("cache")), ..OpenOptions::default() };
//! # std::fs::create_dir_all(dir.join("checkpoint")).unwrap();
//! # std::fs::write(dir.join("checkpoint/weights"), [7; 100_000]).unwrap();
//! let location: Location = dir.join("repository").display().to_string().parse()?; // or s3://bucket/prefix
//! let store = open(&location, &StoreOptions { create: true, ..StoreOptions::default() }).await?;
//! let (repository, _) = Repository::create(store, options).await?;
//!
//! let name = "run-7/step-1000".parse()?;
//! let saved = repository.save(&dir.join("checkpoint"), &name, &SaveOptions::default()).await?;
//! assert_eq!(saved.logical_bytes, 100_000);
//! repository.restore(&name, None, &dir.join("restored"), &RestoreOptions::default()).await?;
//! # assert_eq!(std::fs::read(dir.join("restored/weights")).unwrap(), [7; 100_000]);
//! # std::fs::remove_dir_all(&dir).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! Terms are in docs/glossary.md, guarantees in docs/semantics.md, the stored format in docs/format.md. A module uses only
//! lower layers, its own folder, and within a layer only folders to its left (`tests/tidy.rs` enforces that):
//!
//! ```text
//! layer 5  agent  cli                              entry points: parse, call one operation, render
//! layer 4  ops                                     save restore sync verify collect expire doctor ...
//! layer 3  transfer  placement  staging            peers: certificates, protocol, transports, exchange | sites, links, prices | shared memory, GPUs
//! layer 2  storage  tree  cache  repository  audit    stores | local files | local chunk cache | repositories | audit log
//! layer 1  codec  chunker  checkpoint  format  policy      pure, without I/O (+ chunk)
//! layer 0  id error clock backoff log_limit single_flight fair_turns limits blocks budget progress metrics size span pattern spelling toml_text work name selector identity
//! ```
//!
//! Feature `agent` (default) has agents and links between them: `agent`, `transfer`. Feature `cli` (default) has the command. With
//! `default-features = false` the crate has only repositories.

#[cfg(feature = "agent")]
pub mod agent;
pub mod audit;
mod backoff;
mod blocks;
pub mod budget;
pub mod cache;
pub mod checkpoint;
pub mod chunk;
pub mod chunker;
#[cfg(feature = "cli")]
pub mod cli;
pub mod clock;
pub mod codec;
pub mod error;
#[cfg(feature = "agent")]
mod fair_turns;
pub mod format;
pub mod id;
pub mod identity;
pub mod limits;
mod log_limit;
pub mod metrics;
pub mod name;
pub mod ops;
pub mod pattern;
pub mod placement;
pub mod policy;
pub mod progress;
pub mod repository;
pub mod selector;
mod single_flight;
pub mod size;
pub mod span;
mod spelling;
pub mod staging;
pub mod storage;
mod toml_text;
#[cfg(feature = "agent")]
pub mod transfer;
pub mod tree;
mod work;

pub use error::{Error, ErrorKind, Result};
