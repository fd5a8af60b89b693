//! `cargo ci check`: all checks of the sources that run no test.

use std::path::Path;

use crate::command;
use crate::steps::{Outcome, Steps};
use crate::{built, docs, manifests, messages, requirements, rules, setup, tidy};

/// The packages for clippy. The mapper is also built alone: the packages of a workspace share one
/// set of features, which would hide a mapper that builds only with `mutations` on, or only
/// without.
const LINTED: [(&str, &[&str]); 3] = [
    ("clippy, workspace", &["--workspace"]),
    ("clippy, mapper alone", &["--package", "blockd-mapper"]),
    (
        "clippy, mapper with mutations",
        &["--package", "blockd-mapper", "--features", "blockd-mapper/mutations"],
    ),
];

/// Runs every check; true when all passed.
#[must_use]
pub(crate) fn run(root: &Path) -> bool {
    let mut steps = Steps::new();
    steps.run("tools", || setup::ensure(&[setup::LIBCLANG]).map(|()| Outcome::Passed));
    steps.run("lock file", || {
        let mut cargo = command::cargo(root);
        command::output(cargo.args(["metadata", "--locked", "--format-version", "1"]))?;
        Ok(Outcome::Passed)
    });
    steps.run("features of shipped programs", || built::features(root));
    cargo_step(&mut steps, root, "fmt", &["fmt", "--all", "--check"]);
    // The next step in CI compiles everything with the linter.
    let linted_later = command::in_ci() && command::linting(root).is_some();
    for (name, selection) in LINTED.into_iter().skip(usize::from(linted_later)) {
        let mut arguments = vec!["clippy", "--quiet", "--all-targets"];
        arguments.extend(selection);
        arguments.extend(["--", "-D", "warnings"]);
        cargo_step(&mut steps, root, name, &arguments);
    }
    // The next step in CI documents each library when it has run its examples.
    if !command::in_ci() {
        steps.run("doc", || {
            let mut cargo = command::cargo(root);
            cargo.args(["doc", "--quiet", "--workspace", "--no-deps", "--document-private-items"]);
            command::run(cargo.env("RUSTDOCFLAGS", "-D warnings"))?;
            Ok(Outcome::Passed)
        });
    }
    steps.run("tidy", || tidy::run(root).map(|()| Outcome::Passed));
    steps.run("requirements", || requirements::run(root, false).map(|()| Outcome::Passed));
    steps.run("messages", || messages::run(root, false).map(|()| Outcome::Passed));
    steps.run("documents", || docs::check(root).map(|()| Outcome::Passed));
    steps.run("book", || docs::book(root));
    // In CI, all tests follow.
    if !command::in_ci() {
        let help = ["test", "--quiet", "--package", "blockd", "--test", "cli_offline", "document"];
        cargo_step(&mut steps, root, "docs/CLI.md", &help);
    }
    steps.run("alert rules and dashboard", || rules::run(root).map(|()| Outcome::Passed));
    manifests(&mut steps, root);
    steps.finish()
}

/// Checks the files of `deploy/` for Kubernetes.
pub(crate) fn manifests(steps: &mut Steps, root: &Path) {
    steps.run("chart and manifests", || manifests::chart(root));
    steps.run("kustomize", || manifests::kustomize(root));
}

fn cargo_step(steps: &mut Steps, root: &Path, name: &str, arguments: &[&str]) {
    steps.run(name, || {
        command::run(command::cargo(root).args(arguments))?;
        Ok(Outcome::Passed)
    });
}
