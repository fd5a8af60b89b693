//! `cargo ci screens`: the pictures in `docs/screens` and the screens that tests of `blockd top`
//! expect. Tests of their packages draw them from examples, compare them with the files, and write
//! the files on request.

use std::path::Path;

use anyhow::Result;

use crate::command;

/// The packages that draw, and the names of their tests.
const TESTS: [(&str, &str); 2] =
    [("blockd-cli", "screens"), ("blockd-tests", "story::example::tests")];

/// Compares the files with the examples, or writes them.
///
/// # Errors
/// When a file is out of date, or a package cannot be built.
pub(crate) fn run(root: &Path, write: bool) -> Result<()> {
    for (package, test) in TESTS {
        let mut cargo = command::cargo(root);
        cargo.args(["test", "--quiet", "--package", package, "--lib", "--", test]);
        if write {
            cargo.env("BLOCKD_WRITE_SCREENS", "1");
        }
        command::run(&mut cargo)?;
    }
    Ok(())
}
