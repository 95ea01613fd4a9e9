//! Extension module of the Python package `towline`: the operations of the engine, run with the GIL released.
//!
//! The public API is in python/towline; this module is private to it. Memory is passed as addresses and lengths: the package
//! keeps the tensors alive, and only `memory.rs` accesses them; `cuda.rs` has a GPU do so.

mod agent;
mod audited;
mod command;
mod cuda;
mod errors;
mod json;
mod memory;
mod opening;
mod progress_counters;
mod quantity;
mod reading;
mod repository;
mod runtime;
mod saving;
mod stage;
mod staged;
mod tree;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
fn _towline(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<repository::Repository>()?;
    module.add_class::<saving::Task>()?;
    module.add_class::<tree::Tree>()?;
    module.add_class::<staged::StagedTensors>()?;
    module.add_class::<stage::Stager>()?;
    module.add_class::<stage::StagingBuffer>()?;
    module.add_function(wrap_pyfunction!(command::command, module)?)?;
    let ending = wrap_pyfunction!(audited::end_audit, module)?;
    module.py().import("atexit")?.call_method1("register", (ending,))?;
    module.add_class::<progress_counters::ProgressCounters>()?;
    module.add_function(wrap_pyfunction!(saving::check_run, module)?)?;
    module.add_function(wrap_pyfunction!(saving::check_save, module)?)?;
    module.add_function(wrap_pyfunction!(saving::lay_out, module)?)?;
    module.add_function(wrap_pyfunction!(quantity::size, module)?)?;
    module.add_function(wrap_pyfunction!(quantity::span, module)?)?;
    module.add_function(wrap_pyfunction!(agent::agent_request, module)?)?;
    module.add_function(wrap_pyfunction!(memory::huge_pages, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::cuda_name, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::copy_to_cuda, module)?)?;
    module.add_function(wrap_pyfunction!(memory::copy, module)?)
}
