//! Conversion of the engine's error to Python exceptions: `towline.errors` creates one class for each kind.

use std::error::Error as StdError;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyAny;
use towline::Error;

/// `towline.errors.make`.
static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Exception for `error`; its message includes the causes and the help.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    let text = [vec![error.to_string()], error.causes()].concat().join(": ");
    let mut causes = std::iter::successors(error.source(), |&cause| cause.source());
    let errno = causes.find_map(|cause| errno_of(cause.downcast_ref()?));
    let function = MAKE.get_or_try_init(py, || Ok(py.import("towline.errors")?.getattr("make")?.unbind()));
    let made =
        function.and_then(|make| make.call1(py, (error.kind().word(), text, error.place(), error.help_text(), errno)));
    match made {
        Ok(exception) => PyErr::from_value(exception.into_bound(py)),
        Err(error) => error,
    }
}

/// Error number (errno) of an I/O error; a full disk may have only the kind of error.
fn errno_of(error: &std::io::Error) -> Option<i32> {
    let full = error.kind() == std::io::ErrorKind::StorageFull;
    error.raw_os_error().or(full.then_some(rustix::io::Errno::NOSPC.raw_os_error()))
}
