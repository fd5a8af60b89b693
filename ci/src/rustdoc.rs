//! `rustdoc` for `cargo test --doc` in CI: it runs a library's examples, as it was called to, and
//! then documents the library with every warning an error. `cargo doc` would compile all
//! dependencies again, without code, which takes longer than all else that it does.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::command;

/// Set where this program is called in place of rustdoc: the path of the real one.
const REAL: &str = "BLOCKD_CI_RUSTDOC";

/// Options of a run of examples, with the value that follows each. A library is no dependency of
/// its own documentation.
const OF_EXAMPLES: [&str; 4] =
    ["--test-args", "--test-run-directory", "--test-runtool", "--test-runtool-arg"];

/// The variables by which cargo calls this program in place of rustdoc.
///
/// # Errors
/// When the compiler does not say where it is installed.
pub(crate) fn environment(root: &Path) -> Result<[(&'static str, OsString); 2]> {
    let real = command::sysroot(root)?.join("bin").join("rustdoc");
    let ours = std::env::current_exe().context("this program has no path")?;
    Ok([("RUSTDOC", ours.into_os_string()), (REAL, real.into_os_string())])
}

/// Runs as rustdoc, if that is how this program was called.
#[must_use]
pub(crate) fn called() -> Option<ExitCode> {
    let real = std::env::var_os(REAL)?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let documents = documents(&arguments);
    let passed = runs(&real, &arguments)
        && documents.is_none_or(|arguments| {
            let folder = std::env::temp_dir().join(format!("rustdoc-{}", std::process::id()));
            let output = [OsString::from("--out-dir"), folder.clone().into_os_string()];
            let passed = runs(&real, &[arguments, output.to_vec()].concat());
            let _ = std::fs::remove_dir_all(folder);
            passed
        });
    Some(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn runs(program: &OsStr, arguments: &[OsString]) -> bool {
    Command::new(program).args(arguments).status().is_ok_and(|status| status.success())
}

/// The arguments that document the library whose examples `arguments` run; none when they run no
/// examples, for example when cargo asks for the version.
fn documents(arguments: &[OsString]) -> Option<Vec<OsString>> {
    if !arguments.iter().any(|argument| argument == "--test") {
        return None;
    }
    let name = arguments.iter().skip_while(|argument| *argument != "--crate-name").nth(1);
    let itself = name.map(|name| format!("{}=", name.to_string_lossy()));
    let is_itself = |value: &OsStr| {
        itself.as_ref().is_some_and(|itself| value.to_string_lossy().starts_with(itself.as_str()))
    };
    let mut kept: Vec<OsString> =
        ["--document-private-items", "-Dwarnings"].map(OsString::from).to_vec();
    let mut rest = arguments.iter().filter(|argument| *argument != "--test").peekable();
    while let Some(argument) = rest.next() {
        let left_out = OF_EXAMPLES.iter().any(|option| argument == option)
            || (argument == "--extern" && rest.peek().is_some_and(|value| is_itself(value)));
        if left_out {
            rest.next();
        } else {
            kept.push(argument.clone());
        }
    }
    Some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Option<Vec<OsString>> {
        documents(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn what_runs_no_examples_documents_nothing() {
        assert_eq!(of("-vV"), None);
    }

    #[test]
    fn a_library_is_documented_with_its_dependencies() {
        let arguments = of("--edition=2024 --crate-name a --test a/src/lib.rs \
             --test-run-directory /w/a --extern b=/t/libb.rlib --extern a=/t/liba.rlib \
             -L dependency=/t --cfg test_feature")
        .expect("arguments");
        let line = arguments.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>();
        assert_eq!(
            line.join(" "),
            "--document-private-items -Dwarnings --edition=2024 --crate-name a a/src/lib.rs \
             --extern b=/t/libb.rlib -L dependency=/t --cfg test_feature"
        );
    }
}
