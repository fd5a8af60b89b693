//! Which module of a package may import which of its neighbours. No modules of a package import
//! each other in a circle, and those of the mapper and the engine lie in layers.

use std::collections::{BTreeMap, BTreeSet};

use super::Problem;
use super::metadata::Metadata;
use super::source::{self, Line};
use super::tree::Tree;

/// The folder of a package's sources, and its modules in layers, the lowest first.
type Layers = (&'static str, &'static [&'static [&'static str]]);

/// A module may import those of the layers below its own, and none beside it.
const LAYERS: [Layers; 2] = [
    (
        "mapper/src",
        &[
            &["mutation", "sync", "units"],
            &["allocator", "directory", "geometry", "io_epoch", "mapping", "mutation_gate"],
            &["entry"],
            &["io", "leaf", "read_cache", "shared_counts", "stripe"],
            &["arena", "format"],
            &["claim", "error"],
            &["create", "plan", "ring", "space"],
            &["volume"],
            &["volumes"],
            &["pool"],
            &["change", "diff"],
            &["engine", "worker"],
            &["open"],
        ],
    ),
    (
        "blockd/engine/src",
        &[
            &["block", "limit", "mailbox", "stats"],
            &["backing", "schedule"],
            &["pool"],
            &["volume"],
        ],
    ),
];

/// Folders of packages that still have circles.
const WITH_CIRCLES: [&str; 2] = ["csi/src", "tests/src"];

/// Every import that leads upwards, and every circle.
pub(super) fn check(tree: &Tree, metadata: &Metadata) -> Vec<Problem> {
    let roots = metadata.packages.iter().flat_map(|package| &package.roots);
    let folder = |root: &str| {
        let folder = root.strip_suffix("/lib.rs").or_else(|| root.strip_suffix("/main.rs"));
        folder.map(str::to_owned)
    };
    let folders: BTreeSet<String> = roots.filter_map(|root| folder(root)).collect();
    let checked = folders.iter().filter(|folder| !WITH_CIRCLES.contains(&folder.as_str()));
    let circles = checked.flat_map(|folder| check_circles(tree, folder));
    circles.chain(check_layers(tree, &LAYERS)).collect()
}

fn check_layers(tree: &Tree, packages: &[Layers]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for &(folder, layers) in packages {
        let layer_of = |module: &str| layers.iter().position(|layer| layer.contains(&module));
        let mut unused: BTreeSet<&str> = layers.iter().copied().flatten().copied().collect();
        for import in imports_of(tree, folder) {
            unused.remove(import.module.as_str());
            let Some(layer) = layer_of(&import.module) else {
                let text = format!("module {} is in no layer", import.module);
                problems.push(Problem::new(import.path, 0, text));
                continue;
            };
            for (line, name) in &import.names {
                if *name != import.module && layer_of(name).is_some_and(|other| other >= layer) {
                    let text = format!("module {} may not import {name}", import.module);
                    problems.push(Problem::new(import.path, *line, text));
                }
            }
        }
        for module in unused {
            let text = format!("there is a layer for module {module}, and no such module");
            problems.push(Problem::new(folder, 0, text));
        }
    }
    problems
}

fn check_circles(tree: &Tree, folder: &str) -> Vec<Problem> {
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let imports = imports_of(tree, folder);
    for import in &imports {
        let names = import.names.iter().map(|(_, name)| name.clone());
        graph.entry(import.module.clone()).or_default().extend(names);
    }
    let mut problems = Vec::new();
    for import in &imports {
        for (line, name) in &import.names {
            if *name != import.module && reaches(&graph, name, &import.module) {
                let text = format!("modules {} and {name} import each other", import.module);
                problems.push(Problem::new(import.path, *line, text));
            }
        }
    }
    problems
}

/// Whether a module imports another one, directly or by way of others.
fn reaches(graph: &BTreeMap<String, BTreeSet<String>>, from: &str, to: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        if module == to {
            return true;
        }
        if seen.insert(module) {
            next.extend(graph.get(module).into_iter().flatten().map(String::as_str));
        }
    }
    false
}

/// A file, the module of its package that it belongs to, and the names that it imports from the
/// crate's root, each with its line from 1.
struct Imports<'a> {
    path: &'a str,
    module: String,
    names: Vec<(usize, String)>,
}

/// The imports of all files below a package's folder, but for its roots and its tests.
fn imports_of<'a>(tree: &'a Tree, folder: &str) -> Vec<Imports<'a>> {
    let of_file = |(path, text): (&'a str, &'a str)| {
        let (module, depth) = module_of(path, folder)?;
        Some(Imports { path, module, names: imports(text, depth) })
    };
    tree.texts("rs").filter_map(of_file).collect()
}

/// The module of a file, and how many `super::` lead from the file to the crate's root. `None` for
/// roots and for files of tests: a test may import anything.
fn module_of(path: &str, folder: &str) -> Option<(String, usize)> {
    let inside = path.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
    let mut parts: Vec<&str> = inside.split('/').collect();
    if parts.last() == Some(&"mod") {
        parts.pop();
    }
    let is_test = |name: &&str| name.ends_with("tests") || name.starts_with("tests_of_");
    let module = *parts.first()?;
    let is_root = matches!(module, "lib" | "main" | "bin");
    (!is_root && !parts.iter().any(is_test)).then(|| (module.to_owned(), parts.len()))
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

    const LAYER: [Layers; 1] = [("m/src", &[&["units"], &["leaf"], &["pool"]])];

    fn problems(path: &str, text: &str) -> Vec<String> {
        let mut files = vec![("m/src/units.rs", ""), ("m/src/pool.rs", ""), ("m/src/leaf.rs", "")];
        files.retain(|(other, _)| *other != path);
        files.push((path, text));
        let found = check_layers(&tree(&files), &LAYER);
        found.into_iter().map(|problem| problem.to_string()).collect()
    }

    #[test]
    fn an_allowed_import_is_fine() {
        assert!(
            problems("m/src/leaf.rs", "use crate::units::Lba;\nuse crate::leaf::X;").is_empty()
        );
    }

    #[test]
    fn an_import_against_the_layers_is_found() {
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
    fn every_module_has_a_layer_and_every_layer_a_module() {
        let found = problems("m/src/other.rs", "");
        assert_eq!(found, ["m/src/other.rs: module other is in no layer"]);
        let found = check_layers(&tree(&[("m/src/leaf.rs", "")]), &LAYER);
        let found: Vec<String> = found.into_iter().map(|problem| problem.to_string()).collect();
        assert_eq!(
            found,
            [
                "m/src: there is a layer for module pool, and no such module",
                "m/src: there is a layer for module units, and no such module",
            ]
        );
    }

    #[test]
    fn tests_may_import_anything() {
        let text = "#[cfg(test)]\nmod tests {\n    use crate::pool::Pool;\n}\n";
        assert!(problems("m/src/leaf.rs", text).is_empty());
        assert!(problems("m/src/leaf/tests.rs", "use crate::pool::Pool;").is_empty());
    }

    #[test]
    fn a_circle_is_found_however_long_it_is() {
        let files = [
            ("m/src/lib.rs", "use crate::a::A;"),
            ("m/src/a/mod.rs", "use super::b::B;"),
            ("m/src/b.rs", "\nuse crate::c::C;"),
            ("m/src/c/part.rs", "use crate::{a::A, d::D};"),
            ("m/src/d.rs", "use crate::E;"),
        ];
        let found = check_circles(&tree(&files), "m/src");
        let found: Vec<String> = found.into_iter().map(|problem| problem.to_string()).collect();
        assert_eq!(
            found,
            [
                "m/src/a/mod.rs:1: modules a and b import each other",
                "m/src/b.rs:2: modules b and c import each other",
                "m/src/c/part.rs:1: modules c and a import each other",
            ]
        );
        assert!(check_circles(&tree(&files[..3]), "m/src").is_empty());
    }
}
