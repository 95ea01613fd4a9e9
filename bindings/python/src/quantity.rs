//! Sizes and times as text, parsed by the same functions as on the command line.

use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::raised;

/// Parses a size such as `512M` or `1.5G` to bytes; `argument` is its name in errors.
///
/// # Errors
/// Usage, if the text is no size.
#[pyfunction]
pub(crate) fn size(py: Python<'_>, text: &str, argument: &str) -> PyResult<u64> {
    towline::size::parse(text).map_err(|error| raised(py, &error.at(argument)))
}

/// Parses a time such as `24h` or `0`; `argument` is its name in errors.
///
/// # Errors
/// Usage, if the text is no time.
#[pyfunction]
pub(crate) fn span(py: Python<'_>, text: &str, argument: &str) -> PyResult<Duration> {
    towline::span::parse(text).map_err(|error| raised(py, &error.at(argument)))
}
