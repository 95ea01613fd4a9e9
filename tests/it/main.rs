//! The integration tests: one binary, a module for each subject.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod data;
mod save_restore;
