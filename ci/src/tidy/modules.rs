//! Which module of a package may import which of its neighbours.

use super::Problem;
use super::source::{self, Line};
use super::tree::Tree;

/// The folder of a package's sources, a module in it, and the modules it may import.
type Rule = (&'static str, &'static str, &'static [&'static str]);

/// A module without a rule is not checked. A module may always import itself.
const RULES: &[Rule] = &[
    ("mapper/src", "units", &[]),
    ("mapper/src", "geometry", &["error", "units"]),
    ("mapper/src", "error", &["format", "io"]),
    ("mapper/src", "io", &["geometry", "units"]),
    ("mapper/src", "mapping", &["units"]),
    ("mapper/src", "sync", &[]),
    ("mapper/src", "format", &["error", "geometry", "io", "mapping", "units"]),
    ("mapper/src", "leaf", &["mapping", "sync", "units"]),
    ("mapper/src", "arena", &["leaf", "mapping", "sync", "units"]),
    ("mapper/src", "directory", &["geometry", "sync", "units"]),
    ("mapper/src", "shared_counts", &["geometry", "sync", "units"]),
    ("mapper/src", "allocator", &["units"]),
    ("mapper/src", "io_epoch", &["sync"]),
    ("mapper/src", "mutation_gate", &["sync", "units"]),
    ("mapper/src", "ring", &["error", "format", "sync", "units"]),
    ("mapper/src", "plan", &["error", "geometry", "units"]),
    ("mapper/src", "stripe", &["units"]),
    ("mapper/src", "space", &["error", "format"]),
    (
        "mapper/src",
        "volume",
        &["directory", "error", "format", "geometry", "space", "sync", "units"],
    ),
    (
        "mapper/src",
        "pool",
        &[
            "allocator",
            "arena",
            "error",
            "format",
            "geometry",
            "io_epoch",
            "mutation",
            "mutation_gate",
            "plan",
            "ring",
            "shared_counts",
            "space",
            "stripe",
            "sync",
            "units",
            "volume",
        ],
    ),
    (
        "mapper/src",
        "change",
        &[
            "arena",
            "directory",
            "format",
            "leaf",
            "mapping",
            "mutation",
            "pool",
            "ring",
            "stripe",
            "sync",
            "units",
            "volume",
        ],
    ),
    (
        "mapper/src",
        "diff",
        &["directory", "error", "leaf", "mapping", "mutation", "pool", "sync", "units", "volume"],
    ),
    ("mapper/src", "claim", &["format"]),
    ("mapper/src", "create", &["error", "format", "geometry", "io", "units"]),
    (
        "mapper/src",
        "worker",
        &[
            "change",
            "diff",
            "directory",
            "error",
            "format",
            "geometry",
            "io",
            "mapping",
            "mutation",
            "mutation_gate",
            "plan",
            "pool",
            "stripe",
            "space",
            "sync",
            "units",
            "volume",
        ],
    ),
    (
        "mapper/src",
        "engine",
        &[
            "allocator",
            "change",
            "create",
            "diff",
            "directory",
            "error",
            "format",
            "geometry",
            "io",
            "leaf",
            "mapping",
            "mutation",
            "plan",
            "pool",
            "ring",
            "shared_counts",
            "stripe",
            "space",
            "sync",
            "units",
            "volume",
        ],
    ),
    (
        "mapper/src",
        "open",
        &[
            "arena",
            "change",
            "directory",
            "engine",
            "error",
            "format",
            "geometry",
            "io",
            "leaf",
            "mapping",
            "mutation",
            "pool",
            "ring",
            "stripe",
            "sync",
            "units",
            "volume",
        ],
    ),
    ("blockd/engine/src", "block", &[]),
    ("blockd/engine/src", "stats", &[]),
    ("blockd/engine/src", "mailbox", &[]),
    ("blockd/engine/src", "limit", &[]),
    ("blockd/engine/src", "schedule", &["limit", "stats"]),
    ("blockd/control/src", "node", &[]),
    ("blockd/control/src", "health", &[]),
    ("blockd/control/src", "hook", &[]),
    ("blockd/engine/src", "backing", &["block"]),
    ("blockd/engine/src", "pool", &["backing", "mailbox", "schedule", "stats"]),
    ("blockd/engine/src", "volume", &["backing", "block", "pool", "schedule", "stats"]),
    ("blockd/control/src", "config", &["node"]),
    ("blockd/control/src", "services", &["config", "direct", "health", "hook", "node"]),
    ("csi/src", "capability", &["error", "limits", "proto"]),
    ("csi/src", "changes", &["controller", "daemon", "error", "ids", "limits", "plugin", "proto"]),
    ("csi/src", "config", &["capability", "error", "ids", "limits"]),
    (
        "csi/src",
        "controller",
        &[
            "capability",
            "config",
            "error",
            "health",
            "ids",
            "limits",
            "parameters",
            "plugin",
            "pmem",
            "proto",
            "provision",
            "room",
            "sizes",
        ],
    ),
    ("csi/src", "daemon", &["error"]),
    ("csi/src", "error", &[]),
    ("csi/src", "group", &["controller", "error", "ids", "limits", "plugin", "proto"]),
    ("csi/src", "health", &["limits", "proto"]),
    ("csi/src", "identity", &["plugin", "proto"]),
    ("csi/src", "ids", &["error", "limits"]),
    ("csi/src", "limits", &["error"]),
    ("csi/src", "locks", &["error"]),
    ("csi/src", "logging", &["error"]),
    ("csi/src", "metrics", &["capability", "error"]),
    (
        "csi/src",
        "node",
        &[
            "capability",
            "config",
            "error",
            "health",
            "ids",
            "limits",
            "parameters",
            "plugin",
            "pmem",
            "proto",
            "provision",
            "room",
            "sizes",
        ],
    ),
    ("csi/src", "options", &["error"]),
    ("csi/src", "parameters", &["capability", "error", "limits", "pmem"]),
    (
        "csi/src",
        "plugin",
        &["config", "daemon", "error", "ids", "locks", "metrics", "parameters", "topology"],
    ),
    ("csi/src", "pmem", &["capability", "config", "error"]),
    ("csi/src", "proto", &[]),
    ("csi/src", "provision", &["config", "error", "parameters", "plugin", "pmem", "room", "sizes"]),
    ("csi/src", "room", &["config", "error", "plugin", "pmem", "sizes"]),
    ("csi/src", "sizes", &["error", "proto"]),
    ("csi/src", "topology", &["error", "limits", "proto"]),
];

/// Every import that a rule does not allow.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    check_rules(tree, RULES)
}

fn check_rules(tree: &Tree, rules: &[Rule]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for &(folder, module, allowed) in rules {
        let mut files = 0;
        for (path, text) in tree.texts("rs") {
            let Some(depth) = depth_in_module(path, folder, module) else {
                continue;
            };
            files += 1;
            for (line, import) in imports(text, depth) {
                if import != module && !allowed.contains(&import.as_str()) {
                    let text = format!("module {module} may not import {import}");
                    problems.push(Problem::new(path, line, text));
                }
            }
        }
        if files == 0 {
            let text = format!("there is a rule for module {module}, and no such module");
            problems.push(Problem::new(folder, 0, text));
        }
    }
    problems
}

/// How many `super::` lead from this file to the crate's root; `None` when the file is not part of
/// the module. Files of tests are no part of it: a test may import anything.
fn depth_in_module(path: &str, folder: &str, module: &str) -> Option<usize> {
    let inside = path.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
    let mut parts: Vec<&str> = inside.split('/').collect();
    if parts.last() == Some(&"mod") {
        parts.pop();
    }
    let tests = parts.iter().any(|name| name.ends_with("tests"));
    (parts.first() == Some(&module) && !tests).then_some(parts.len())
}

/// Each name imported from the crate's root, with its line from 1.
fn imports(text: &str, depth: usize) -> Vec<(usize, String)> {
    let lines = source::lines(text);
    let code = &lines[..source::tests_start(&lines)];
    let joined: String = code.iter().map(|line: &Line| format!("{}\n", line.code)).collect();
    let mut found = Vec::new();
    let to_root = "super::".repeat(depth);
    for prefix in ["crate::", to_root.as_str()] {
        for (at, _) in joined.match_indices(prefix) {
            let before = &joined[..at];
            let continued = before.ends_with(|c: char| c.is_alphanumeric() || "_$:".contains(c));
            if continued {
                continue;
            }
            let line = before.matches('\n').count() + 1;
            let after = joined[at + prefix.len()..].trim_start();
            found.extend(first_names(after).into_iter().map(|name| (line, name)));
        }
    }
    found
}

/// The first name of a path, or of every path in a group.
fn first_names(after: &str) -> Vec<String> {
    let Some(group) = after.strip_prefix('{') else {
        return vec![name(after)];
    };
    let mut names = Vec::new();
    let mut depth = 0_usize;
    let mut fresh = true;
    for (at, c) in group.char_indices() {
        match c {
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            '{' => depth += 1,
            ',' if depth == 0 => fresh = true,
            _ if fresh && !c.is_whitespace() => {
                names.push(name(&group[at..]));
                fresh = false;
            }
            _ => {}
        }
    }
    names
}

fn name(text: &str) -> String {
    text.chars().take_while(|&c| c.is_alphanumeric() || c == '_' || c == '*').collect()
}

#[cfg(test)]
mod tests {
    use super::super::tree::testing::tree;
    use super::*;

    const RULE: [Rule; 1] = [("m/src", "leaf", &["units"])];

    fn problems(path: &str, text: &str) -> Vec<String> {
        let found = check_rules(&tree(&[(path, text)]), &RULE);
        found.into_iter().map(|problem| problem.to_string()).collect()
    }

    #[test]
    fn an_allowed_import_is_fine() {
        assert!(
            problems("m/src/leaf.rs", "use crate::units::Lba;\nuse crate::leaf::X;").is_empty()
        );
    }

    #[test]
    fn an_import_against_the_rule_is_found() {
        let found = problems("m/src/leaf.rs", "\nuse crate::pool::Pool;");
        assert_eq!(found, ["m/src/leaf.rs:2: module leaf may not import pool"]);
        assert_eq!(problems("m/src/leaf/entry.rs", "fn f(x: crate::pool::P) {}").len(), 1);
    }

    #[test]
    fn groups_are_looked_into() {
        let found = problems("m/src/leaf.rs", "use crate::{\n  units::{Lba, A},\n  pool,\n};");
        assert_eq!(found, ["m/src/leaf.rs:1: module leaf may not import pool"]);
    }

    #[test]
    fn super_is_no_way_around() {
        assert_eq!(problems("m/src/leaf.rs", "use super::pool::Pool;").len(), 1);
        assert_eq!(problems("m/src/leaf/mod.rs", "use super::pool::Pool;").len(), 1);
        assert!(problems("m/src/leaf/a.rs", "use super::b::B;").is_empty());
        assert_eq!(problems("m/src/leaf/a.rs", "use super::super::pool::P;").len(), 1);
    }

    #[test]
    fn a_rule_for_nothing_is_found() {
        let found = problems("m/src/other.rs", "");
        assert_eq!(found, ["m/src: there is a rule for module leaf, and no such module"]);
    }

    #[test]
    fn tests_may_import_anything() {
        let text = "#[cfg(test)]\nmod tests {\n    use crate::pool::Pool;\n}\n";
        assert!(problems("m/src/leaf.rs", text).is_empty());
        let files = [("m/src/leaf.rs", ""), ("m/src/leaf/tests.rs", "use crate::pool::Pool;")];
        assert!(check_rules(&tree(&files), &RULE).is_empty());
    }
}
