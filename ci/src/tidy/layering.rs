//! Packages that a package must not depend on. Cargo refuses circles of packages; these are the
//! dependencies that it would permit and the design does not.

use super::Problem;
use super::metadata::Metadata;

/// A package, and the beginnings of the names of packages that it must not depend on.
const BANNED: &[(&str, &[&str])] = &[
    // It does no IO, and everything else is above it.
    ("blockd-mapper", &["blockd-"]),
    // Each stands alone: a protocol, encryption, a server, what the plugins share.
    ("blockd-nbd", &["blockd-"]),
    ("blockd-luks", &["blockd-"]),
    ("blockd-http", &["blockd-"]),
    ("blockd-csi-base", &["blockd-"]),
    // It blocks, and knows nothing of pools.
    ("blockd-hosts", &["tokio", "blockd-mapper", "blockd-api", "blockd-engine"]),
    // The data path has threads of its own, and knows nothing of messages or tools.
    ("blockd-engine", &["tokio", "blockd-api", "blockd-inspect", "blockd-pmem"]),
    ("blockd-serve", &["blockd-api", "blockd-inspect", "blockd-pmem"]),
    // The command line and the plugins know the daemon by its API alone.
    ("blockd-cli", DAEMON),
    ("blockd-csi", DAEMON),
    ("blockd-extender", DAEMON),
    ("blockd-kata", DAEMON),
    ("blockd-record", DAEMON),
];

/// Packages that only the daemon itself may use.
const DAEMON: &[&str] = &["blockd-engine", "blockd-serve", "blockd-control"];

/// Every dependency that is banned.
pub(super) fn check(metadata: &Metadata) -> Vec<Problem> {
    let mut problems = Vec::new();
    for package in &metadata.packages {
        let rules = BANNED.iter().filter(|(name, _)| *name == package.name);
        for banned in rules.flat_map(|(_, banned)| *banned) {
            for import in package.imports.iter().filter(|import| import.starts_with(banned)) {
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

    fn problems(name: &str, imports: &[&str]) -> Vec<String> {
        let imports = imports.iter().map(|&import| import.to_owned()).collect();
        let package = Package { name: name.to_owned(), imports, roots: Vec::new() };
        let found = check(&Metadata { packages: vec![package] });
        found.into_iter().map(|problem| problem.text).collect()
    }

    #[test]
    fn other_dependencies_are_fine() {
        assert!(problems("blockd-bench", &["blockd-mapper"]).is_empty());
        assert!(problems("blockd-cli", &["blockd-media"]).is_empty());
    }

    #[test]
    fn the_mapper_imports_nothing_of_ours() {
        let found = problems("blockd-mapper", &["blockd-tests"]);
        assert_eq!(found, ["blockd-mapper may not depend on blockd-tests"]);
    }

    #[test]
    fn the_command_line_sees_nothing_of_the_daemon() {
        let found = problems("blockd-cli", &["blockd-control"]);
        assert_eq!(found, ["blockd-cli may not depend on blockd-control"]);
    }
}
