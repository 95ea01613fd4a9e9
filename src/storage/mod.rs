//! Where a repository lives: a directory or an S3 bucket behind one decorated `ObjectStore`.
//!
//! ```text
//! Location --open--> Store = metered( watchdog( prefix( routed( S3 with retries | S3 without ) ) ) )
//!                                            or local files with fsync, large ones written directly
//! probe(store) -> Capabilities               what the store really does, found out by trying, raced
//! ```
//!
//! Callers use keys below the repository's root (`log/0000`), whatever the store. The seam is
//! `object_store::ObjectStore`; it is decorated, never wrapped in a trait of our own.

mod bucket;
mod credentials;
mod direct;
mod home;
mod http;
mod location;
mod metered;
mod modes;
mod probe;
mod routed;
mod s3;
mod staging;
mod store;
mod watchdog;

pub use bucket::{AbortedUpload, Bucket, LifecycleRule, ObjectLock, Versioning};
pub use credentials::ChainCredentials;
pub(crate) use home::open_object;
pub use location::Location;
pub use metered::Metered;
pub use modes::Sharing;
pub use probe::{Capabilities, Effort, Verdict, probe, scratch};
pub use routed::Routed;
pub use s3::Keys;
pub use staging::{StagingFile, staging_files};
pub use store::{STALL, Store, StoreOptions, connect, open};
pub use watchdog::Watchdog;
