//! Which package may import which: the table of `docs/ARCHITECTURE.md`.

use super::Problem;
use super::metadata::Metadata;

/// Each package and the packages of the workspace that it may import. A package that is not listed
/// is refused, so that the table grows with the workspace.
const ALLOWED: &[(&str, &[&str])] = &[
    ("blockd-mapper", &[]),
    ("blockd-inspect", &["blockd-mapper"]),
    ("blockd-pmem", &[]),
    ("blockd-api", &[]),
    ("blockd-http", &[]),
    ("blockd-nbd", &[]),
    ("blockd-media", &["blockd-mapper", "blockd-inspect", "blockd-pmem", "blockd-api"]),
    ("blockd-engine", &["blockd-mapper", "blockd-media"]),
    ("blockd-serve", &["blockd-mapper", "blockd-nbd", "blockd-media", "blockd-engine"]),
    (
        "blockd-control",
        &[
            "blockd-mapper",
            "blockd-inspect",
            "blockd-pmem",
            "blockd-api",
            "blockd-nbd",
            "blockd-media",
            "blockd-engine",
            "blockd-serve",
        ],
    ),
    (
        "blockd-cli",
        &[
            "blockd-mapper",
            "blockd-inspect",
            "blockd-pmem",
            "blockd-api",
            "blockd-nbd",
            "blockd-media",
        ],
    ),
    (
        "blockd",
        &[
            "blockd-mapper",
            "blockd-inspect",
            "blockd-pmem",
            "blockd-api",
            "blockd-nbd",
            "blockd-media",
            "blockd-engine",
            "blockd-serve",
            "blockd-control",
            "blockd-cli",
            "blockd-testkit",
        ],
    ),
    ("blockd-csi-base", &[]),
    ("blockd-kata", &["blockd-csi-base"]),
    ("blockd-extender", &["blockd-csi-base", "blockd-http"]),
    (
        "blockd-csi",
        &["blockd-api", "blockd-csi-base", "blockd-extender", "blockd-http", "blockd-kata"],
    ),
    ("blockd-bench", &["blockd-mapper", "blockd-nbd", "blockd-pmem", "blockd-testkit"]),
    ("blockd-sim", &["blockd-mapper", "blockd-inspect", "blockd-pmem"]),
    ("blockd-testkit", &["blockd-nbd"]),
    (
        "blockd-tests",
        &[
            "blockd-mapper",
            "blockd-pmem",
            "blockd-api",
            "blockd-nbd",
            "blockd-csi",
            "blockd-kata",
            "blockd-sim",
            "blockd-testkit",
        ],
    ),
    ("blockd-ci", &["blockd-testkit"]),
];

/// Every import that the table does not allow.
pub(super) fn check(metadata: &Metadata) -> Vec<Problem> {
    let mut problems = Vec::new();
    for package in &metadata.packages {
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == package.name) else {
            let text = format!("package {} is missing in the table of layers", package.name);
            problems.push(Problem::new("ci/src/tidy/layering.rs", 0, text));
            continue;
        };
        for import in &package.imports {
            if !allowed.contains(&import.as_str()) {
                let text = format!("{} may not depend on {import}", package.name);
                problems.push(Problem::new("Cargo.toml", 0, text));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::super::metadata::Package;
    use super::*;

    fn package(name: &str, imports: &[&str]) -> Metadata {
        let imports = imports.iter().map(|&import| import.to_owned()).collect();
        let package = Package { name: name.to_owned(), imports, roots: Vec::new() };
        Metadata { packages: vec![package] }
    }

    #[test]
    fn an_edge_of_the_table_is_fine() {
        assert!(check(&package("blockd-bench", &["blockd-mapper"])).is_empty());
    }

    #[test]
    fn the_mapper_imports_nothing_of_ours() {
        let problems = check(&package("blockd-mapper", &["blockd-tests"]));
        assert_eq!(problems[0].text, "blockd-mapper may not depend on blockd-tests");
    }

    #[test]
    fn an_unlisted_package_is_refused() {
        let problems = check(&package("blockd-extra", &[]));
        assert!(problems[0].text.contains("missing in the table"));
    }
}
