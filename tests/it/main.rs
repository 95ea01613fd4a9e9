//! The integration tests: one binary, a module for each subject, over memory, a directory, and the real servers that
//! `make test` starts.

mod conformance;
mod data;
mod faulty;
mod probe;
mod save_restore;
mod stores;
