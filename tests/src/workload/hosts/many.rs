//! Many cells on one host: the memory, threads and files that each takes, and a start with all of
//! them.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use super::natively;

/// Between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(20);
/// Bytes of a cell, and of its volume.
const CELL: &str = "64M";
const VOLUME: &str = "1G";
/// The most memory that a cell may take: 1 MiB of its own, and its part of the threads that the
/// daemon keeps for control calls.
const MOST_KIB: u64 = 1280;
/// The fewest cells of which that is asked: the daemon's own memory grows, too.
const FEWEST: u64 = 20;

/// The kernel's account of a daemon.
#[derive(Clone, Copy, Debug)]
struct Account {
    resident_kib: u64,
    /// Without the pages of its program, of which calls use more and more.
    own_kib: u64,
    /// Addresses whose pages stay in memory once they are used.
    locked_kib: u64,
    threads: u64,
    files: u64,
}

/// Makes cells with an attached volume each, kills the daemon and starts it again. The limits of
/// its process are part of an error.
///
/// # Errors
/// When a cell can't be made, is not there after the start, or takes too much memory.
pub fn many(cells: u64) -> Result<String> {
    let below = tools::build_folder()?.join("vm/run");
    fs::create_dir_all(&below)?;
    let folder = Folder::below(&below, "many")?;
    let mut daemon = natively::daemon(folder.path(), 1)?;
    let before = Account::of(&daemon)?;
    let (start, mut said) = (Clock::start(), Clock::start());
    for number in 1..=cells {
        make(&daemon, number).with_context(|| {
            let pid = daemon.pid().unwrap_or_default();
            let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
            format!("cell {number}, {:?}; limits of the daemon:\n{limits}", Account::of(&daemon))
        })?;
        if said.elapsed() >= PROGRESS {
            println!("many: {number} of {cells} cells");
            said = Clock::start();
        }
    }
    let made = start.seconds();
    let after = Account::of(&daemon)?;
    println!("many: made in {made:.1} s; {}", after.since(&before, cells));
    after.check(&before, cells)?;
    daemon.kill()?;
    let served = daemon.start()?;
    let all_there = || -> Option<()> {
        let listed = daemon.cli(&["cell", "list"]).ok()?;
        let all = listed["cells"].as_array()?;
        let open = all.iter().filter(|cell| cell["state"] == "open").count() as u64;
        (open == cells).then_some(())
    };
    let limit = Duration::from_secs(60);
    tools::wait_until("all cells to be open", limit, all_there)
        .with_context(|| daemon.last_words())?;
    let again = Account::of(&daemon)?;
    again.check(&before, cells)?;
    Ok(format!(
        "{cells} cells after kill -9 served in {:.1} s; {}",
        served.as_secs_f64(),
        again.since(&before, cells)
    ))
}

fn make(daemon: &Daemon, number: u64) -> Result<()> {
    let name = format!("cell-{number}");
    daemon.cli(&["cell", "create", "--size", CELL, &format!("vg/{name}")])?;
    daemon.cli(&["add", "disk", "--pool", &name, "--size", VOLUME, "--nbd"]).map(|_| ())
}

impl Account {
    fn of(daemon: &Daemon) -> Result<Self> {
        let process = format!("/proc/{}", daemon.pid().context("the daemon does not run")?);
        let status = fs::read_to_string(Path::new(&process).join("status"))?;
        let value = |key: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let word = line.and_then(|rest| rest.split_whitespace().next());
            word.with_context(|| format!("no {key} in {process}/status"))?
                .parse()
                .context(key.to_owned())
        };
        Ok(Self {
            resident_kib: value("VmRSS:")?,
            own_kib: value("RssAnon:")? + value("RssShmem:")?,
            locked_kib: value("VmLck:")?,
            threads: value("Threads:")?,
            files: fs::read_dir(Path::new(&process).join("fd"))?.count() as u64,
        })
    }

    /// Refuses cells that take more memory than they should.
    fn check(&self, before: &Self, cells: u64) -> Result<()> {
        let each = self.own_kib.saturating_sub(before.own_kib) / cells.max(1);
        if cells >= FEWEST && each > MOST_KIB {
            bail!("a cell takes {each} KiB of memory, more than {MOST_KIB}");
        }
        Ok(())
    }

    /// A text about all, and about each cell.
    fn since(&self, before: &Self, cells: u64) -> String {
        let each = |now: u64, before: u64| now.saturating_sub(before) as f64 / cells as f64;
        format!(
            "{} MiB resident, {:.2} MiB a cell; {} MiB of addresses locked, {:.2} MiB a cell; {} threads, \
             {:.1} a cell; {} files, {:.1} a cell",
            self.resident_kib / 1024,
            each(self.resident_kib, before.resident_kib) / 1024.0,
            self.locked_kib / 1024,
            each(self.locked_kib, before.locked_kib) / 1024.0,
            self.threads,
            each(self.threads, before.threads),
            self.files,
            each(self.files, before.files)
        )
    }
}
