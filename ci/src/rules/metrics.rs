//! The metrics of a daemon that runs, judged by promtool.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use blockd_testkit::daemon::{Daemon, Settings};

use crate::command;
use crate::steps::Outcome;

/// Starts a daemon with a volume and a snapshot, and checks its answer to a scrape.
///
/// # Errors
/// When the daemon does not serve, or promtool complains.
pub(crate) fn run(root: &Path, program: &Path) -> Result<Outcome> {
    let promtool = super::tool(root)?;
    let settings = Settings {
        program: Some(program.to_path_buf()),
        tables: "[metrics]\naddress = \"127.0.0.1:0\"".to_owned(),
        ..Settings::default()
    };
    let mut daemon = Daemon::new("ci-metrics", &settings)?;
    daemon.start()?;
    daemon.cli(&["add", "--nbd", "--size", "64M", "v"])?;
    daemon.cli(&["snapshot", "v=s"])?;
    let text = text_format(&daemon.metrics()?);
    daemon.stop()?;
    ensure!(text.contains("\nblockd_volume_size_bytes{"), "a scrape has no volume:\n{text}");
    let mut command = Command::new(promtool);
    command::answer(command.args(["check", "metrics"]), text.as_bytes(), super::LIMIT)?;
    println!("rules: {} lines of metrics hold", text.lines().count());
    Ok(Outcome::Passed)
}

/// OpenMetrics in the older text format, which is the only one that `promtool check metrics` reads:
/// samples are the same, and names of counters end with `_total` in their comments too.
fn text_format(openmetrics: &str) -> String {
    let is_counter = |line: &&str| line.starts_with("# TYPE ") && line.ends_with(" counter");
    let counters = openmetrics.lines().filter(is_counter);
    let counters: BTreeSet<&str> = counters.filter_map(|line| line.split(' ').nth(2)).collect();
    let mut text = String::new();
    for line in openmetrics.lines().filter(|line| *line != "# EOF") {
        let mut words: Vec<&str> = line.splitn(4, ' ').collect();
        let name = match words.as_slice() {
            ["#", "HELP" | "TYPE", name, _] if counters.contains(name) => format!("{name}_total"),
            ["#", "HELP" | "TYPE", name, _] => (*name).to_owned(),
            _ => {
                text.push_str(line);
                text.push('\n');
                continue;
            }
        };
        words[2] = &name;
        if words[1] == "TYPE" && words[3] == "unknown" {
            words[3] = "untyped";
        }
        text.push_str(&words.join(" "));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_of_counters_have_the_names_of_their_samples() {
        let openmetrics = "# HELP a b c.\n# TYPE a counter\na_total{x=\"# TYPE\"} 1\n# HELP g d.\n# \
                           TYPE g gauge\ng 2\n# TYPE u unknown\nu 3\n# EOF\n";
        let text = "# HELP a_total b c.\n# TYPE a_total counter\na_total{x=\"# TYPE\"} 1\n# HELP \
                    g d.\n# TYPE g gauge\ng 2\n# TYPE u untyped\nu 3\n";
        assert_eq!(text_format(openmetrics), text);
    }
}
