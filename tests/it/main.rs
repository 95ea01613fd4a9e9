//! The integration tests: one binary, a module for each subject.

mod data;
mod save_restore;
