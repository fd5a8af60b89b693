//! `--svg FOLDER` among the arguments of a bench: its claims as charts, drawn from the file that it
//! writes with `--json`, so that one program draws those of every bench.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::{command, forward};

/// Runs a bench, and draws its charts if they are asked for.
///
/// # Errors
/// Errors of the bench, and when the charts cannot be drawn.
pub(crate) fn run(
    root: &Path,
    arguments: &[String],
    bench: fn(&Path, &[String]) -> Result<()>,
) -> Result<()> {
    let results = command::target_dir(root).join("bench.json");
    let (arguments, words) = split(arguments, &results.to_string_lossy())?;
    bench(root, &arguments)?;
    if words.is_empty() { Ok(()) } else { forward::bench_charts(root, &words) }
}

/// Splits arguments into those of the bench and those of the program that draws, which has none
/// without `--svg`. `results` is the file between them unless `--json` names another one.
fn split(arguments: &[String], results: &str) -> Result<(Vec<String>, Vec<String>)> {
    let mut all: Vec<String> = Vec::new();
    for word in arguments {
        match word.split_once('=') {
            Some((flag @ ("--svg" | "--json" | "--before"), value)) => {
                all.extend([flag.to_owned(), value.to_owned()]);
            }
            _ => all.push(word.clone()),
        }
    }
    let find = |all: &[String], flag: &str| all.iter().position(|word| word == flag);
    let Some(svg) = find(&all, "--svg") else { return Ok((all, Vec::new())) };
    ensure!(find(&all, "--before").is_none(), "--svg draws claims, and --before has none");
    ensure!(svg + 1 < all.len(), "--svg needs a folder");
    let mut words: Vec<String> = all.drain(svg..svg + 2).collect();
    let results = match find(&all, "--json") {
        Some(json) => all.get(json + 1).context("--json needs a file")?.clone(),
        None => {
            all.extend(["--json".to_owned(), results.to_owned()]);
            results.to_owned()
        }
    };
    words.push(results);
    Ok((all, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<(String, String)> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        split(&words, "r.json").map(|(bench, charts)| (bench.join(" "), charts.join(" ")))
    }

    #[test]
    fn the_file_of_results_goes_from_the_bench_to_the_charts() {
        for (line, bench, charts) in [
            ("--quick --only x", "--quick --only x", ""),
            ("--svg a --quick", "--quick --json r.json", "--svg a r.json"),
            ("--json=b --svg=a", "--json b", "--svg a b"),
        ] {
            assert_eq!(of(line).unwrap(), (bench.to_owned(), charts.to_owned()), "{line}");
        }
    }

    #[test]
    fn charts_that_cannot_be_drawn_are_refused_before_the_bench() {
        for (line, error) in [
            ("--svg", "--svg needs a folder"),
            ("--svg a --json", "--json needs a file"),
            ("--svg a --before=b", "--svg draws claims, and --before has none"),
        ] {
            assert_eq!(of(line).unwrap_err().to_string(), error);
        }
    }
}
