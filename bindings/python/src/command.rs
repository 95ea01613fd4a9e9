//! The `towline` command, for the program of that name that the wheel installs.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command that `args` spell, its own name first; returns the exit code. SIGINT and SIGTERM are the command's from
/// then on: call it in a process that is there for nothing else.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| towline::cli::run_with(args))
}
