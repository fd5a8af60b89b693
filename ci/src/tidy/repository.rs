//! Files that the repository must have, and how files must be.

use super::Problem;
use super::tree::Tree;

/// Missing files, a changelog without its first section, packages without lints, and wrong
/// executable bits.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = changelog(tree);
    problems.extend(lints(tree));
    for path in ["LICENSE-MIT", "LICENSE-APACHE", "README.md", "CONTRIBUTING.md", ".ci/run"] {
        if !tree.has(path) {
            problems.push(Problem::new(path, 0, "missing"));
        }
    }
    for file in &tree.files {
        let Some(text) = &file.text else {
            continue;
        };
        // An inner attribute of Rust begins with the same two characters.
        let script = text.starts_with("#!") && !text.starts_with("#![");
        if script && !file.executable {
            problems.push(Problem::new(&file.path, 1, "a script that is not executable"));
        }
        if !script && file.executable {
            problems.push(Problem::new(&file.path, 0, "executable, yet no script"));
        }
    }
    problems
}

/// A package that does not say so escapes the lints of the workspace.
fn lints(tree: &Tree) -> Vec<Problem> {
    let packages = tree.texts("toml").filter(|(path, _)| path.ends_with("/Cargo.toml"));
    let lax = packages.filter(|(_, text)| !text.contains("[lints]\nworkspace = true"));
    lax.map(|(path, _)| Problem::new(path, 0, "does not take the lints of the workspace")).collect()
}

/// The first section is where the next change is written down.
fn changelog(tree: &Tree) -> Vec<Problem> {
    let text = tree.text("CHANGELOG.md").unwrap_or_default();
    let first = text.lines().find(|line| line.starts_with("## "));
    if first == Some("## [Unreleased]") {
        return Vec::new();
    }
    vec![Problem::new("CHANGELOG.md", 0, "the first section is not `## [Unreleased]`")]
}

#[cfg(test)]
mod tests {
    use super::super::tree::testing::tree;
    use super::*;

    const COMPLETE: [(&str, &str); 6] = [
        ("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n"),
        ("LICENSE-MIT", ""),
        ("LICENSE-APACHE", ""),
        ("README.md", ""),
        ("CONTRIBUTING.md", ""),
        (".ci/run", ""),
    ];

    #[test]
    fn a_complete_repository_is_fine() {
        assert!(check(&tree(&COMPLETE)).is_empty());
    }

    #[test]
    fn each_missing_file_is_named() {
        for (index, (path, _)) in COMPLETE.iter().enumerate() {
            let mut files = COMPLETE.to_vec();
            files.remove(index);
            assert_eq!(check(&tree(&files))[0].path, *path);
        }
    }

    #[test]
    fn a_package_takes_the_lints_of_the_workspace() {
        let mut files = COMPLETE.to_vec();
        files.push(("a/Cargo.toml", "[package]\n\n[lints]\nworkspace = true\n"));
        files.push(("b/Cargo.toml", "[package]\n"));
        let problems = check(&tree(&files));
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].path, "b/Cargo.toml");
    }

    #[test]
    fn a_changelog_begins_with_unreleased_changes() {
        let mut files = COMPLETE;
        files[0].1 = "# Changelog\n\n## [0.1.0]\n\n## [Unreleased]\n";
        assert_eq!(check(&tree(&files)).len(), 1);
    }

    #[test]
    fn executable_bits_mark_scripts() {
        let mut files = COMPLETE.to_vec();
        files.push(("a.py", "#!/usr/bin/env python3\n"));
        files.push(("b.rs", "#![forbid(unsafe_code)]\n"));
        let mut found = tree(&files);
        assert_eq!(check(&found)[0].path, "a.py");
        for file in &mut found.files {
            file.executable = file.path != ".ci/run";
        }
        assert!(check(&found).iter().any(|problem| problem.path == "b.rs"));
    }
}
