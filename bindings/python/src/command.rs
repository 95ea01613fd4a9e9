//! The `towline` command, as the wheel installs it.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command with `args`, which begin with the program's name; returns the exit code. It takes over SIGINT and SIGTERM:
/// call it only in a process that does nothing else.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| towline::cli::run_with(args))
}
