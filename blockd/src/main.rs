//! The daemon and its command line.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    blockd_cli::main(&blockd::program::Blockd)
}
