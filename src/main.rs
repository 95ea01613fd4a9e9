//! The `towline` command: a door to the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    towline::cli::run()
}
