//! Where unsafe code may be.

use super::Problem;
use super::metadata::Metadata;
use super::source::{self, has_word};
use super::tree::Tree;

/// The files that may hold unsafe code, each with the reason why it cannot do without. The mapper
/// has none and gets none.
const ALLOWED: [(&str, &str); 23] = [
    ("api/src/lookup.rs", "a call of the C library that no package has"),
    ("blockd/hosts/src/reservation_ioctl.rs", "ioctls of persistent reservations"),
    ("blockd/media/src/heap.rs", "a call of the C library that no package has"),
    ("blockd/media/src/ioctl.rs", "ioctls of block devices"),
    ("blockd/media/src/mapped.rs", "copies to and from a mapping that others may write"),
    ("blockd/engine/src/backing/receive.rs", "shares a ring of buffers with the kernel"),
    ("blockd/engine/src/backing/ring/mod.rs", "hands memory to the kernel through io_uring"),
    ("blockd/engine/src/backing/ring/clients.rs", "messages that the kernel reads"),
    (
        "blockd/engine/src/backing/ring/fetch.rs",
        "sets a field that the io_uring package has no call for",
    ),
    ("blockd/engine/src/backing/ring/memory.rs", "makes memory known to the kernel"),
    ("blockd/cli/src/transfer/confine.rs", "Landlock, for which the libc package has no calls"),
    ("blockd/serve/src/ublk/descriptor.rs", "shared memory, and a descriptor known by number"),
    ("blockd/media/src/pool/ring_file.rs", "memory shared with the process before this one"),
    ("pmem/src/media/copy.rs", "routines in assembly"),
    ("pmem/src/media/fault.rs", "a handler of signals"),
    ("pmem/src/media/map.rs", "maps files, and copies to and from them"),
    ("pmem/src/media/plain.rs", "copies between memory and mappings"),
    ("tests/src/vm/counter.rs", "an instruction that reads the processor's counter"),
    ("tests/src/workload/hosts/reservation.rs", "ioctls of persistent reservations"),
    ("bench/src/ublk/mapper_control.rs", "ioctls of the device mapper"),
    ("bench/src/ring.rs", "hands buffers to the kernel through io_uring"),
    ("bench/src/pmem/bare.rs", "the instructions that the engine is held against"),
    ("bench/src/alloc_count.rs", "a global allocator is an unsafe trait"),
];

/// Unsafe code outside the named files.
pub(super) fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in tree.texts("rs") {
        if ALLOWED.iter().any(|(allowed, _)| *allowed == path) {
            continue;
        }
        for (index, line) in source::lines(text).iter().enumerate() {
            if has_word(&line.code, "unsafe") {
                let text = "unsafe code outside the named files";
                problems.push(Problem::new(path, index + 1, text));
            }
        }
    }
    problems
}

/// Crate roots that leave unsafe code to chance.
pub(super) fn check_roots(tree: &Tree, metadata: &Metadata) -> Vec<Problem> {
    let mut problems = Vec::new();
    for root in metadata.packages.iter().flat_map(|package| &package.roots) {
        let text = tree.text(root).unwrap_or_default();
        let lines = source::lines(text);
        let says = |lint: &str| lines.iter().any(|line| line.code.trim() == lint);
        if !says("#![forbid(unsafe_code)]") && !says("#![deny(unsafe_code)]") {
            let text = "a crate root says #![forbid(unsafe_code)], or deny where a module is named";
            problems.push(Problem::new(root, 0, text));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::super::metadata::Package;
    use super::super::tree::testing::tree;
    use super::*;

    #[test]
    fn unsafe_code_is_found_outside_the_named_files() {
        let text = "// unsafe is a word here\nfn f() { unsafe { g() } }";
        let problems = check(&tree(&[("mapper/src/leaf.rs", text), ("bench/src/ring.rs", text)]));
        assert_eq!(problems.len(), 1);
        assert_eq!((problems[0].path.as_str(), problems[0].line), ("mapper/src/leaf.rs", 2));
    }

    #[test]
    fn a_root_without_the_lint_is_found() {
        let roots = vec!["a/src/lib.rs".to_owned(), "b/src/lib.rs".to_owned()];
        let package = Package { name: "a".to_owned(), imports: Vec::new(), roots };
        let metadata = Metadata { packages: vec![package] };
        let good = "//! Says what it is.\n#![forbid(unsafe_code)]\n";
        let bad = "// #![forbid(unsafe_code)]\n";
        let problems =
            check_roots(&tree(&[("a/src/lib.rs", good), ("b/src/lib.rs", bad)]), &metadata);
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].path, "b/src/lib.rs");
    }
}
