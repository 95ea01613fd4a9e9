//! The integration tests: one binary, a module for each subject, over memory, a directory, and the real servers that
//! `make test` starts.

#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test says what fails by failing, and what is skipped")]

mod agent;
mod amend;
mod bombs;
mod cache;
mod checkpoints;
mod cli;
mod cli_audit;
mod cli_identity;
mod cli_interrupted;
mod cli_look;
mod cli_plans;
mod cli_repair;
mod cli_runs;
mod cli_s3;
mod cli_sites;
mod cli_tensors;
mod collect;
mod conformance;
mod crash;
mod credentials;
mod cuda;
mod data;
mod differences;
mod doctor;
mod documents;
mod exchange;
mod faster;
mod faulty;
mod fuzz_smoke;
mod golden;
mod kubernetes;
mod links;
mod memory;
mod peers;
mod policy;
mod ports;
mod probe;
mod ranks;
mod redirects;
mod restore_resumed;
mod rights;
mod runs;
mod save_restore;
mod semantics;
mod stand_alone;
mod stolen_key;
mod stores;
mod sync;
mod tensors;
mod together;
mod undelete;
mod verify;
mod watch;
