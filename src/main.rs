//! The `towline` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    towline::cli::run()
}
