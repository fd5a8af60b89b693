//! The bill of materials: every package that is compiled into the programs, as CycloneDX 1.5, by
//! `cargo tree`, which knows the features that they are built with, and by the lock file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::PROGRAMS;
use crate::{command, package};

/// A package that is compiled in. Its key is `name@version`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    name: String,
    version: String,
    licence: String,
    repository: String,
    is_ours: bool,
}

/// All parts, and the parts that each of them uses.
#[derive(Debug, Default)]
struct Parts {
    all: BTreeMap<String, Part>,
    uses: BTreeMap<String, BTreeSet<String>>,
}

/// The bill of both programs.
///
/// # Errors
/// When cargo fails, or a package of the registry has no checksum in the lock file.
pub(super) fn bill(root: &Path, target: &str, epoch: u64) -> Result<Value> {
    let mut cargo = command::cargo(root);
    // Macros and build scripts run while the programs are built, and are not part of them.
    cargo.args(["tree", "--locked", "--edges", "normal,no-proc-macro", "--target", target]);
    cargo.args(["--prefix", "depth", "--format", "|{p}|{l}|{r}"]);
    cargo.args(PROGRAMS.iter().flat_map(|name| ["--package", name]));
    let parts = parse(&command::output(&mut cargo)?)?;
    let lock = std::fs::read_to_string(root.join("Cargo.lock"))?;
    let components = components(&parts, &checksums(&lock))?;
    println!("release: {} packages are compiled in", components.len());
    let mut all = components;
    all.extend(toolchain(root)?);
    let version = env!("CARGO_PKG_VERSION");
    let programs = PROGRAMS.map(|name| format!("{name}@{version}"));
    let mut uses = vec![json!({ "ref": "release", "dependsOn": programs })];
    uses.extend(parts.uses.iter().map(|(user, used)| json!({ "ref": user, "dependsOn": used })));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": package::date(epoch, "+%Y-%m-%dT%H:%M:%SZ")?,
            "component": {
                "type": "application", "bom-ref": "release", "name": "blockd", "version": version,
            },
        },
        "components": all,
        "dependencies": uses,
    }))
}

/// Reads lines of `cargo tree` like `2|bytes v1.2.3 (/folder)|MIT|https://... (*)`.
fn parse(tree: &str) -> Result<Parts> {
    let mut parts = Parts::default();
    let mut above: Vec<String> = Vec::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let fields: Vec<&str> = line.trim_end_matches(" (*)").split('|').collect();
        let [depth, package, licence, repository] = fields[..] else {
            anyhow::bail!("cargo tree says {line}");
        };
        let depth: usize = depth.parse().with_context(|| format!("cargo tree says {line}"))?;
        let mut words = package.split(' ');
        let (name, version) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let version = version.trim_start_matches('v').to_owned();
        let key = format!("{name}@{version}");
        ensure!(depth <= above.len(), "cargo tree leaves out a level: {line}");
        above.truncate(depth);
        if let Some(user) = above.last() {
            parts.uses.entry(user.clone()).or_default().insert(key.clone());
        }
        above.push(key.clone());
        parts.uses.entry(key.clone()).or_default();
        parts.all.entry(key).or_insert_with(|| Part {
            name: name.to_owned(),
            version,
            // Older manifests separate by a slash.
            licence: licence.replace('/', " OR "),
            repository: repository.to_owned(),
            is_ours: package.contains(" (/"),
        });
    }
    ensure!(!parts.all.is_empty(), "cargo tree is empty");
    Ok(parts)
}

/// Checksums of packages in the lock file, by `name@version`.
fn checksums(lock: &str) -> BTreeMap<String, String> {
    let mut sums = BTreeMap::new();
    for package in lock.split("[[package]]") {
        let field = |key: &str| {
            let begin = format!("{key} = \"");
            package.lines().find_map(|line| line.strip_prefix(&begin)?.strip_suffix('"'))
        };
        if let (Some(name), Some(version), Some(sum)) =
            (field("name"), field("version"), field("checksum"))
        {
            sums.insert(format!("{name}@{version}"), sum.to_owned());
        }
    }
    sums
}

fn components(parts: &Parts, sums: &BTreeMap<String, String>) -> Result<Vec<Value>> {
    let mut components = Vec::new();
    for (key, part) in &parts.all {
        let mut component = json!({
            "type": "library", "bom-ref": key, "name": part.name, "version": part.version,
        });
        if !part.licence.is_empty() {
            component["licenses"] = json!([{ "expression": part.licence }]);
        }
        if !part.is_ours {
            let sum = sums.get(key).with_context(|| format!("no checksum of {key}"))?;
            component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
            component["purl"] = json!(format!("pkg:cargo/{key}"));
        }
        if !part.repository.is_empty() {
            component["externalReferences"] = json!([{ "type": "vcs", "url": part.repository }]);
        }
        components.push(component);
    }
    Ok(components)
}

/// The libraries that the toolchain links in: Rust's own, and the C library.
fn toolchain(root: &Path) -> Result<[Value; 2]> {
    let rustc = command::output(Command::new("rustc").current_dir(root).arg("--version"))?;
    let glibc = command::output(Command::new("getconf").arg("GNU_LIBC_VERSION"))?;
    let version = |text: &str| text.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let library = |name: &str, version: String, licence: &str| {
        json!({
            "type": "library", "bom-ref": format!("{name}@{version}"), "name": name,
            "version": version, "licenses": [{ "expression": licence }],
        })
    };
    Ok([
        library("rust-std", version(&rustc), "MIT OR Apache-2.0"),
        library("glibc", version(&glibc), "LGPL-2.1-or-later"),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0|blockd v0.1.0 (/w/blockd)|MIT|\n1|a v1.2.3|MIT/Apache-2.0|https://a.example\n\
                        2|b v2.0.0|MIT|\n1|b v2.0.0|MIT| (*)\n\n0|blockd-csi v0.1.0 (/w/csi)|MIT|\n";

    #[test]
    fn parts_and_their_users_are_read() {
        let parts = parse(TREE).unwrap();
        let names: Vec<&String> = parts.all.keys().collect();
        assert_eq!(names, ["a@1.2.3", "b@2.0.0", "blockd-csi@0.1.0", "blockd@0.1.0"]);
        assert_eq!(parts.all["a@1.2.3"].licence, "MIT OR Apache-2.0");
        assert!(parts.all["blockd@0.1.0"].is_ours && !parts.all["b@2.0.0"].is_ours);
        let uses = |user: &str| parts.uses[user].iter().cloned().collect::<Vec<_>>();
        assert_eq!(uses("blockd@0.1.0"), ["a@1.2.3", "b@2.0.0"]);
        assert_eq!(uses("a@1.2.3"), ["b@2.0.0"]);
        assert!(uses("blockd-csi@0.1.0").is_empty());
    }

    #[test]
    fn strange_lines_are_errors() {
        assert!(parse("").is_err());
        assert!(parse("0|x v1|MIT|\n2|y v1|MIT|\n").is_err());
        assert!(parse("x v1\n").is_err());
    }

    #[test]
    fn packages_of_the_registry_have_the_checksum_of_the_lock_file() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.2.3\"\nsource = \"r\"\n\
                    checksum = \"0a\"\n\n[[package]]\nname = \"blockd\"\nversion = \"0.1.0\"\n";
        let sums = checksums(lock);
        assert_eq!(sums.len(), 1);
        let mut parts = parse(TREE).unwrap();
        assert!(components(&parts, &sums).unwrap_err().to_string().contains("b@2.0.0"));
        parts.all.remove("b@2.0.0");
        let all = components(&parts, &sums).unwrap();
        assert_eq!(all[0]["hashes"][0]["content"], "0a");
        assert_eq!(all[0]["purl"], "pkg:cargo/a@1.2.3");
        assert!(all[1]["hashes"].is_null());
    }
}
