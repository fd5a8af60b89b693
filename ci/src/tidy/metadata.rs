//! The packages of the workspace, by `cargo metadata`.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command;

/// A package of the workspace.
#[derive(Debug, Clone)]
pub(super) struct Package {
    pub(super) name: String,
    /// Names of the workspace's packages it depends on, in whatever way, and of others that are
    /// part of what it builds.
    pub(super) imports: Vec<String>,
    /// Sources of its library, its binaries and its build script, relative to the root.
    pub(super) roots: Vec<String>,
}

/// The packages of the workspace.
#[derive(Debug, Clone, Default)]
pub(super) struct Metadata {
    pub(super) packages: Vec<Package>,
}

impl Metadata {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut cargo = command::cargo(root);
        cargo.args(["metadata", "--no-deps", "--format-version", "1"]);
        let text = command::output(&mut cargo)?;
        Self::parse(&text).context("reading the output of cargo metadata")
    }

    fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        let root = string(&value, "workspace_root")?;
        let mut packages = Vec::new();
        for package in array(&value, "packages")? {
            let mut found = Package {
                name: string(package, "name")?.to_owned(),
                imports: Vec::new(),
                roots: Vec::new(),
            };
            for dependency in array(package, "dependencies")? {
                // Only a package of ours is named by a path, and what only tests or build scripts
                // use has a kind.
                if dependency["path"].is_string() || dependency["kind"].is_null() {
                    found.imports.push(string(dependency, "name")?.to_owned());
                }
            }
            for target in array(package, "targets")? {
                let kinds = array(target, "kind")?;
                if kinds.iter().any(|kind| kind == "lib" || kind == "bin" || kind == "custom-build")
                {
                    let path = string(target, "src_path")?;
                    let path = path.strip_prefix(root).unwrap_or(path);
                    found.roots.push(path.trim_start_matches('/').to_owned());
                }
            }
            packages.push(found);
        }
        Ok(Self { packages })
    }
}

fn string<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("no text at {key}"))
}

fn array<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    value[key].as_array().with_context(|| format!("no list at {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_and_roots_are_read() {
        let text = r#"{"workspace_root": "/r", "packages": [{"name": "a",
            "dependencies": [{"name": "b", "path": "/r/b"}, {"name": "clap", "path": null},
                {"name": "proptest", "path": null, "kind": "dev"}],
            "targets": [{"kind": ["lib"], "src_path": "/r/a/src/lib.rs"},
                        {"kind": ["test"], "src_path": "/r/a/tests/t.rs"}]}]}"#;
        let metadata = Metadata::parse(text).unwrap();
        assert_eq!(metadata.packages[0].imports, ["b", "clap"]);
        assert_eq!(metadata.packages[0].roots, ["a/src/lib.rs"]);
    }

    #[test]
    fn strange_output_is_an_error() {
        assert!(Metadata::parse("{}").is_err());
    }
}
