//! Storage of a repository: a directory or an S3 bucket behind one decorated `ObjectStore`.
//!
//! ```text
//! Location --open--> Store = metered( watchdog( routed( prefix( pages( S3 with retries | S3 without ) ) ) ) )
//!                                            or local files with fsync, large ones written directly
//! probe(store) -> Capabilities               actual abilities of the store, tested also with races
//! ```
//!
//! Callers use keys below the repository's root (`log/0000`) for every store. The interface is `object_store::ObjectStore`, with
//! decorators, and no trait of this crate.

mod bucket;
mod credentials;
mod directory;
mod endpoint;
mod http;
mod location;
mod metered;
mod notice;
mod options;
mod pages;
mod probe;
mod routed;
mod s3;
mod store;
mod watchdog;

pub(crate) use bucket::RIGHTS_HELP;
pub use bucket::{Bucket, LifecycleRule, ObjectLock, UnfinishedUpload, Versioning};
pub use credentials::ChainCredentials;
pub(crate) use directory::{DirectoryTrial, RESERVE, enclosing_repository, open_object, try_directory};
pub use directory::{Sharing, StagingFile, staging_files};
#[cfg(feature = "cli")]
pub(crate) use endpoint::without_user;
pub use location::Location;
pub use metered::Metered;
pub use options::{Keys, STALL, StoreOptions};
pub use probe::{Capabilities, Effort, Verdict, probe, scratch};
pub use routed::Routed;
pub use store::{Store, addresses, connect, open, open_and};
pub use watchdog::Watchdog;
