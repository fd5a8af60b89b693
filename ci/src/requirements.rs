//! `cargo ci requirements`: each row of `docs/REQUIREMENTS.md` that claims to be met, in whole or
//! in part, names tests, and those tests exist.
//!
//! The heading of a table's last column says what its rows claim: `shown by` lists the tests of a
//! row that is met, or cases of the conformance suite, as `` `path/to/file.rs::name` `` (modules
//! between the two are for the reader); `what is missing` follows `shown by` where a row is met in
//! part; `why not ours` gives the reason for a row that other software has to meet.

use std::path::Path;

use anyhow::{Context, Result, bail};

/// Where the table is.
const DOCUMENT: &str = "docs/REQUIREMENTS.md";

/// Where the conformance suite has its cases: they are named like tests.
const CASES: &str = "tests/src/csi/cases/";

/// The folder of tests in virtual machines: its functions are named like tests.
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
    let Report { met, in_part, not_ours, .. } = report;
    println!("requirements: {met} met, {in_part} in part, {not_ours} not ours");
    Ok(())
}

/// Rows of each table, and the rows that don't hold.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    met: usize,
    in_part: usize,
    not_ours: usize,
    problems: Vec<String>,
}

impl Report {
    fn rows(&self) -> usize {
        self.met + self.in_part + self.not_ours
    }
}

/// Which table a line belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Table {
    Other,
    Met,
    InPart,
    NotOurs,
}

impl Table {
    /// The table whose last column has this heading.
    fn of(heading: &str) -> Option<Self> {
        match heading {
            "shown by" => Some(Self::Met),
            "what is missing" => Some(Self::InPart),
            "why not ours" => Some(Self::NotOurs),
            _ => None,
        }
    }

    const fn columns(self) -> usize {
        match self {
            Self::InPart => 4,
            Self::Other | Self::Met | Self::NotOurs => 3,
        }
    }
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
        if let Some(begun) = Table::of(last) {
            table = begun;
        } else if table != Table::Other && !separator {
            let problems = check_row(table, &cells, &mut seen, allow_pending, read);
            let place = |problem| format!("{DOCUMENT}:{}: {problem}", index + 1);
            report.problems.extend(problems.into_iter().map(place));
            match table {
                Table::Met => report.met += 1,
                Table::InPart => report.in_part += 1,
                Table::NotOurs => report.not_ours += 1,
                Table::Other => {}
            }
        }
    }
    if report.rows() == 0 {
        report.problems.push(format!("{DOCUMENT}: there is no table"));
    }
    report
}

/// Problems of one row: its cells, the name it shares with an earlier row, and its tests.
fn check_row<'a>(
    table: Table,
    cells: &[&'a str],
    seen: &mut Vec<&'a str>,
    allow_pending: bool,
    read: &dyn Fn(&str) -> Option<String>,
) -> Vec<String> {
    let columns = table.columns();
    let [row, _, evidence, ..] = *cells else {
        return vec![format!("a row of this table has {columns} cells")];
    };
    let mut problems = Vec::new();
    if cells.len() != columns {
        problems.push(format!("{row}: a row of this table has {columns} cells"));
    }
    if cells.iter().any(|cell| cell.is_empty()) {
        problems.push(format!("{row}: an empty cell"));
    }
    if seen.contains(&row) {
        problems.push(format!("{row} stands here twice"));
    }
    seen.push(row);
    if table != Table::NotOurs {
        let missing = missing(evidence, allow_pending, read);
        problems.extend(missing.into_iter().map(|problem| format!("{row}: {problem}")));
    }
    problems
}

/// The cells of a line of a table; `None` for any other line.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

/// Returns the problems of one cell of the column `shown by`.
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

/// Whether the file's table of cases of the conformance suite names this one. The compiler checks
/// that the named case exists.
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
            assert_eq!(report, Report { met: 1, ..Report::default() });
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
    fn a_row_is_listed_once() {
        let text = format!(
            "{}\n| row | meaning | why not ours |\n|---|---|---|\n| T1 | same | no daemon |\n",
            met("`a/src/x.rs::it_holds`")
        );
        assert!(problems(&text).contains("T1 stands here twice"));
    }

    #[test]
    fn a_row_met_in_part_names_its_tests_and_the_missing_part() {
        let part = |evidence: &str, missing: &str| {
            let heading = "| row | meaning | shown by | what is missing |\n|---|---|---|---|\n";
            format!("{heading}| T1 | small volumes | {evidence} | {missing} |\n")
        };
        let report = check(&part("`a/src/x.rs::it_holds`", "large ones"), false, &read);
        assert_eq!(report, Report { in_part: 1, ..Report::default() });
        assert!(problems(&part("`a/src/x.rs::gone`", "large ones")).contains("has no test gone"));
        assert!(problems(&part("`a/src/x.rs::it_holds`", "")).contains("an empty cell"));
    }

    #[test]
    fn a_row_has_as_many_cells_as_its_table() {
        let text = met("`a/src/x.rs::it_holds` | large ones");
        assert!(problems(&text).contains("T1: a row of this table has 3 cells"));
    }

    #[test]
    fn a_document_without_a_table_is_refused() {
        assert!(problems("# Requirements\n").contains("there is no table"));
    }
}
