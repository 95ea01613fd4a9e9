//! The extension module behind the Python package `towline`: the engine's verbs, with the GIL released while they work.
//!
//! What people call is in python/towline; this is private to it. Memory is passed as addresses and lengths: the package
//! keeps the tensors behind them alive, and `memory.rs` is the only file that touches them.

mod command;
mod errors;
mod memory;
mod quantity;
mod reading;
mod repository;
mod runtime;
mod saving;
mod stage;
mod tree;
mod watched;

use pyo3::prelude::*;

/// The engine.
#[pymodule]
fn _towline(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<repository::Repository>()?;
    module.add_class::<saving::Saving>()?;
    module.add_class::<tree::Tree>()?;
    module.add_class::<stage::Stager>()?;
    module.add_class::<stage::Stage>()?;
    module.add_function(wrap_pyfunction!(command::command, module)?)?;
    module.add_class::<watched::Watched>()?;
    module.add_function(wrap_pyfunction!(saving::check_save, module)?)?;
    module.add_function(wrap_pyfunction!(saving::lay_out, module)?)?;
    module.add_function(wrap_pyfunction!(quantity::size, module)?)?;
    module.add_function(wrap_pyfunction!(quantity::span, module)?)?;
    module.add_function(wrap_pyfunction!(memory::huge_pages, module)?)?;
    module.add_function(wrap_pyfunction!(memory::copy, module)?)
}
