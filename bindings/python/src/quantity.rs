//! Sizes and times as people write them, read by the same functions as on the command line.

use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::raised;

/// Bytes that `text` means, such as `512M` or `1.5G`. It was given as `argument`.
///
/// # Errors
/// Usage, if it is no size.
#[pyfunction]
pub(crate) fn size(py: Python<'_>, text: &str, argument: &str) -> PyResult<u64> {
    towline::size::parse(text).map_err(|error| raised(py, &error.at(argument)))
}

/// The time that `text` means, such as `24h` or `0`. It was given as `argument`.
///
/// # Errors
/// Usage, if it is no time.
#[pyfunction]
pub(crate) fn span(py: Python<'_>, text: &str, argument: &str) -> PyResult<Duration> {
    towline::span::parse(text).map_err(|error| raised(py, &error.at(argument)))
}
