//! `cargo ci requirements`: each line of `docs/REQUIREMENTS.md` that claims to be met names tests,
//! and those tests exist.
//!
//! Two kinds of table are understood, told apart by the heading of their last column: `shown by`
//! lists tests, or cases of the conformance suite, as `` `path/to/file.rs::name` `` (modules
//! between the two are for the reader), and `why not yet` gives a reason.

use std::path::Path;

use anyhow::{Context, Result, bail};

/// Where the table is.
const DOCUMENT: &str = "docs/REQUIREMENTS.md";

/// Where the conformance suite has its cases: they are named like tests.
const CASES: &str = "tests/src/csi/cases/";

/// What runs in virtual machines: its functions are named like tests.
const WORKLOADS: &str = "tests/src/workload/";

/// Stands in place of a test while one is being written.
const PENDING: &str = "pending";

/// Reads the document and checks it against the sources.
///
/// # Errors
/// Lists every line that does not hold.
pub(crate) fn run(root: &Path, allow_pending: bool) -> Result<()> {
    let path = root.join(DOCUMENT);
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let read = |file: &str| std::fs::read_to_string(root.join(file)).ok();
    let report = check(&text, allow_pending, &read);
    if !report.problems.is_empty() {
        bail!("{}", report.problems.join("\n"));
    }
    println!("requirements: {} met, {} not yet", report.met, report.not_yet);
    Ok(())
}

/// What the check found.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    met: usize,
    not_yet: usize,
    problems: Vec<String>,
}

/// Which table a line belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Table {
    Other,
    Met,
    NotYet,
}

fn check(text: &str, allow_pending: bool, read: &dyn Fn(&str) -> Option<String>) -> Report {
    let mut report = Report::default();
    let mut table = Table::Other;
    let mut seen = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(cells) = cells(line) else {
            table = Table::Other;
            continue;
        };
        let last = cells.last().copied().unwrap_or_default();
        let separator = last.starts_with("--") || last.starts_with(":-");
        match (table, last) {
            (_, "shown by") => table = Table::Met,
            (_, "why not yet") => table = Table::NotYet,
            (Table::Other, _) => {}
            _ if separator => {}
            _ => {
                let mut complain = |what: String| {
                    report.problems.push(format!("{DOCUMENT}:{}: {what}", index + 1))
                };
                let [row, meaning, evidence] = cells[..] else {
                    complain("a line of this table has three cells".to_owned());
                    continue;
                };
                if meaning.is_empty() || evidence.is_empty() {
                    complain(format!("{row}: an empty cell"));
                }
                if seen.contains(&row) {
                    complain(format!("{row} stands here twice"));
                }
                seen.push(row);
                if table == Table::Met {
                    for problem in missing(evidence, allow_pending, read) {
                        complain(format!("{row}: {problem}"));
                    }
                    report.met += 1;
                } else {
                    report.not_yet += 1;
                }
            }
        }
    }
    if report.met + report.not_yet == 0 {
        report.problems.push(format!("{DOCUMENT}: there is no table"));
    }
    report
}

/// The cells of a line of a table; `None` for any other line.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

/// What is wrong with one cell of the column `shown by`.
fn missing(
    evidence: &str,
    allow_pending: bool,
    read: &dyn Fn(&str) -> Option<String>,
) -> Vec<String> {
    if evidence == PENDING {
        let problem = "no test shows it yet: it belongs in the other table".to_owned();
        return if allow_pending { Vec::new() } else { vec![problem] };
    }
    // Every second piece stands between backticks.
    let names: Vec<&str> = evidence.split('`').skip(1).step_by(2).collect();
    if names.is_empty() {
        return vec!["it names no test".to_owned()];
    }
    names.into_iter().filter_map(|name| problem_with(name, read)).collect()
}

fn problem_with(name: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let Some((file, path)) = name.split_once("::") else {
        return Some(format!("`{name}` is not of the form file.rs::test"));
    };
    let Some(source) = read(file) else {
        return Some(format!("there is no file {file}"));
    };
    let test = path.rsplit("::").next().unwrap_or(path);
    let found = has_test(&source, test)
        || file.starts_with(CASES) && has_case(&source, test)
        || file.starts_with(WORKLOADS) && has_function(&source, test);
    if found { None } else { Some(format!("{file} has no test {test}")) }
}

/// Whether the file has a function of this name. A workload runs all that it has: one that nothing
/// calls does not pass the lints.
fn has_function(source: &str, name: &str) -> bool {
    source.lines().any(|line| {
        let line = line.trim_start_matches("pub(super) ").trim_start_matches("pub ");
        let rest = line.strip_prefix("fn ").and_then(|rest| rest.strip_prefix(name));
        rest.is_some_and(|rest| rest.starts_with('('))
    })
}

/// Whether the file's table of cases of the conformance suite names this one. What it names runs;
/// the compiler sees to it that it is there.
fn has_case(source: &str, case: &str) -> bool {
    let table = source.lines().map(str::trim).skip_while(|line| !line.starts_with("cases! {"));
    let named = table.skip(1).take_while(|line| *line != "}");
    named.into_iter().any(|line| {
        let line = line.strip_suffix(';').unwrap_or(line);
        line.split_once(':').map_or(line, |(name, _)| name) == case
    })
}

/// Whether a function of this name stands below a line `#[test]` or `#[tokio::test]`, with only
/// attributes and comments in between.
fn has_test(source: &str, test: &str) -> bool {
    let mut marked = false;
    for line in source.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            marked = true;
        }
        if let Some(rest) = line.split_once("fn ").map(|(_, rest)| rest) {
            let name: &str =
                rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
            if marked && name == test {
                return true;
            }
        }
        marked &= line.starts_with("#[") || line.starts_with("//");
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
        #[test]\n/// Says why.\n#[should_panic]\nfn it_holds() {}\n\nfn helper() {}\n\
        #[tokio::test]\nasync fn it_waits() {}\n";

    fn read(file: &str) -> Option<String> {
        (file == "a/src/x.rs").then(|| SOURCE.to_owned())
    }

    fn met(evidence: &str) -> String {
        format!(
            "| row | meaning | shown by |\n|---|---|---|\n| T1 | small volumes | {evidence} |\n"
        )
    }

    fn problems(text: &str) -> String {
        check(text, false, &read).problems.join("\n")
    }

    #[test]
    fn a_line_with_an_existing_test_is_met() {
        for test in ["it_holds", "it_waits"] {
            let report = check(&met(&format!("`a/src/x.rs::tests::{test}`")), false, &read);
            assert_eq!(report, Report { met: 1, not_yet: 0, problems: Vec::new() });
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        assert!(problems(&met("`a/src/y.rs::it_holds`")).contains("there is no file a/src/y.rs"));
    }

    #[test]
    fn a_missing_test_is_named() {
        assert!(problems(&met("`a/src/x.rs::gone`")).contains("has no test gone"));
    }

    #[test]
    fn a_function_that_is_no_test_shows_nothing() {
        assert!(problems(&met("`a/src/x.rs::helper`")).contains("has no test helper"));
    }

    #[test]
    fn a_case_of_the_conformance_suite_counts_where_it_runs() {
        let source = "cases! { [CREATE]\n    one;\n    two: LIST, Rows;\n}\n\nfn three() {}\n";
        assert!(has_case(source, "one") && has_case(source, "two"));
        assert!(!has_case(source, "three") && !has_case(source, "LIST") && !has_case("", "one"));
        let read = |file: &str| (file == "tests/src/csi/cases/x.rs").then(|| source.to_owned());
        let problem =
            |name: &str| problem_with(&format!("tests/src/csi/cases/x.rs::{name}"), &read);
        assert_eq!(problem("two"), None);
        assert!(problem("three").is_some_and(|problem| problem.contains("has no test three")));
    }

    #[test]
    fn a_function_of_a_workload_counts() {
        let source = "fn one() {}\npub(super) fn two(a: u8) {}\n    fn three() {}\n";
        assert!(["one", "two"].iter().all(|name| has_function(source, name)));
        assert!(["tw", "four", "three"].iter().all(|name| !has_function(source, name)));
        let read = |_: &str| Some(source.to_owned());
        let of = |file: &str| problem_with(&format!("{file}::one"), &read);
        assert_eq!(of("tests/src/workload/x.rs"), None);
        assert!(of("tests/src/x.rs").is_some());
    }

    #[test]
    fn every_test_of_a_line_is_looked_for() {
        let text = met("`a/src/x.rs::it_holds`, `a/src/x.rs::gone`");
        assert!(problems(&text).contains("T1: a/src/x.rs has no test gone"));
    }

    #[test]
    fn a_promise_is_not_a_test() {
        assert!(problems(&met("the simulator")).contains("names no test"));
        assert!(problems(&met("pending")).contains("belongs in the other table"));
        assert!(check(&met("pending"), true, &read).problems.is_empty());
    }

    #[test]
    fn a_row_stands_in_one_place() {
        let text = format!(
            "{}\n| row | meaning | why not yet |\n|---|---|---|\n| T1 | same | no daemon |\n",
            met("`a/src/x.rs::it_holds`")
        );
        assert!(problems(&text).contains("T1 stands here twice"));
    }

    #[test]
    fn a_document_without_a_table_is_refused() {
        assert!(problems("# Requirements\n").contains("there is no table"));
    }
}
