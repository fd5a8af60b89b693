//! The NBD server beside qemu-nbd, qemu-storage-daemon, nbdkit and nbd-server.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use blockd_bench::nbd::claims::{Stage, Workload};
use blockd_bench::nbd::endurance::{self, Extent};
use blockd_bench::nbd::fio::Jobs;
use blockd_bench::nbd::measure::Effort;
use blockd_bench::nbd::print::{self, Claim};
use blockd_bench::nbd::server::Kind;
use blockd_bench::nbd::{
    Bench, Folders, after_snapshot, composite_reads, evacuation, first_touch, flushed_first_touch,
};
use blockd_bench::report::{self, Row};
use blockd_bench::{before, facts, nbd};
use blockd_testkit::clock;
use clap::Parser;
use serde_json::{Value, json};

/// Runs fio's NBD client against our server and others, in turns, and compares the ratios with the
/// claims. Tables are in Markdown.
#[derive(Debug, Parser)]
struct Arguments {
    /// The daemon's program
    #[arg(long)]
    blockd: Option<PathBuf>,
    /// Another build of the daemon, such as one from before a change: only the two are measured,
    /// beside each other. Ends with an error if ours is slower beyond the intervals
    #[arg(long)]
    before: Option<PathBuf>,
    /// The folder of the job files
    #[arg(long, default_value = "bench/fio")]
    jobs: PathBuf,
    /// Two minutes: shorter runs, 3 pairs, smaller volumes, 1 connection. Shows that everything
    /// works, and resolves no claim
    #[arg(long)]
    quick: bool,
    /// Only workloads whose name contains this: tmpfs/randread-1, disk, first-touch, memory-use,
    /// after-snapshot/32, after-snapshot/reads, evacuation
    #[arg(long)]
    only: Option<String>,
    /// Only the other servers, beside the first of them
    #[arg(long)]
    peers_only: bool,
    /// Memory after 10 million operations and 10,000 connects, in place of a tenth of that
    #[arg(long)]
    long: bool,
    /// Seconds of each run
    #[arg(long)]
    seconds: Option<f64>,
    /// Interleaved pairs
    #[arg(long)]
    pairs: Option<usize>,
    /// MiB of the first-touch volume; halved until the disk has room
    #[arg(long)]
    first_touch_size: Option<u64>,
    /// Where the figures go as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

/// The results so far.
#[derive(Default)]
struct Findings {
    claims: Vec<Claim>,
    counts: Vec<Row>,
    workloads: Vec<Value>,
    first_touch: Option<Value>,
    failed: Vec<&'static str>,
}

impl Findings {
    /// A part that fails leaves the figures of the others.
    fn note(&mut self, part: &'static str, done: Result<()>) {
        if let Err(error) = done {
            println!("\n{part} FAILED: {error:#}");
            self.failed.push(part);
        }
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let watch = clock::Clock::start();
    let folders = Folders::new()?;
    let bench = bench(&arguments)?;
    facts::print();
    println!(
        "\n{} pairs of {} s, medians; volumes of {} MiB, each written once and verified",
        bench.effort.pairs,
        bench.effort.seconds,
        bench.size >> 20
    );
    if arguments.quick {
        println!("note: a quick run; it resolves no claim");
    }
    if let Some(before) = &arguments.before {
        return run_before(&arguments, &bench, before, &folders);
    }
    let mut findings = Findings::default();
    for (stage, workloads) in bench.plan() {
        let done = run_stage(&bench, &stage, &workloads, &folders, &mut findings);
        findings.note(stage.name, done);
    }
    let wanted =
        |name: &str| arguments.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    if wanted("first-touch") {
        let done = run_first_touch(&arguments, &bench, &folders, &mut findings);
        findings.note("first-touch", done);
    }
    if wanted("flushed-first-touch") {
        let done = run_flushed_first_touch(&bench, &folders, &mut findings);
        findings.note("flushed-first-touch", done);
    }
    // On request only: it takes minutes, and 20 GiB.
    if arguments.only.as_ref().is_some_and(|only| only == "evacuation") {
        let done = run_evacuation(&arguments, &bench, &folders, &mut findings);
        findings.note("evacuation", done);
    }
    // `cargo ci bench snapshot` asks for it.
    if arguments.only.as_ref().is_some_and(|only| only.starts_with("after-snapshot")) {
        let done = run_after_snapshot(&arguments, &bench, &folders, &mut findings);
        findings.note("after-snapshot", done);
    }
    if wanted("memory-use") && bench.blockd.is_some() {
        let done =
            memory_use(&arguments, &bench, &folders).map(|rows| findings.counts.extend(rows));
        findings.note("memory-use", done);
    }
    if !findings.claims.is_empty() {
        print::claims(&findings.claims);
    }
    if !findings.counts.is_empty() {
        report::print("counts", &findings.counts);
    }
    println!("\n{:.0} s", watch.seconds());
    if let Some(path) = &arguments.json {
        let rows: Vec<Value> = findings.counts.iter().map(Row::to_json).collect();
        let value = json!({
            "machine": facts::to_json(),
            "seconds": bench.effort.seconds, "pairs": bench.effort.pairs,
            "workloads": findings.workloads, "first_touch": findings.first_touch,
            "claims": print::claims_json(&findings.claims), "counts": rows,
        });
        let text = serde_json::to_string_pretty(&value)?;
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    ensure!(findings.failed.is_empty(), "failed: {}", findings.failed.join(", "));
    Ok(())
}

fn bench(arguments: &Arguments) -> Result<Bench> {
    let quick = arguments.quick;
    let blockd = arguments.blockd.clone().filter(|_| !arguments.peers_only);
    if let Some(blockd) = &blockd {
        ensure!(blockd.exists(), "{} is not there", blockd.display());
    }
    let effort = Effort {
        seconds: arguments.seconds.unwrap_or(if quick { 0.3 } else { 0.7 }),
        pairs: arguments.pairs.unwrap_or(if quick { 3 } else { 9 }).max(1),
        rounds: if quick { 1 } else { 2 },
    };
    let size = if quick { 128 << 20 } else { 512 << 20 };
    let folder = arguments.jobs.canonicalize().context("the folder of job files")?;
    Ok(Bench { blockd, jobs: Jobs { folder }, effort, size, quick, only: arguments.only.clone() })
}

fn run_before(
    arguments: &Arguments,
    bench: &Bench,
    other: &std::path::Path,
    folders: &Folders,
) -> Result<()> {
    ensure!(other.exists(), "{} is not there", other.display());
    let mut outcomes = Vec::new();
    for (stage, workloads) in bench.plan() {
        outcomes.extend(nbd::before::stage(bench, other, &stage, &workloads, folders)?);
    }
    if arguments.only.as_ref().is_none_or(|only| "first-touch".contains(only.as_str())) {
        let wanted = arguments.first_touch_size.unwrap_or(1024);
        let size = folders.room(wanted << 20)?;
        let folder = folders.memory.path().join("first-touch");
        std::fs::create_dir_all(&folder)?;
        let file = folders.disk.path().join("first-touch.image");
        let place = first_touch::Place { folder: &folder, file, size, blockd: None };
        outcomes.extend(nbd::before::first_touch(bench, other, &place)?);
    }
    before::print_head();
    outcomes.iter().for_each(before::Outcome::print);
    before::check(&outcomes)
}

fn run_stage(
    bench: &Bench,
    stage: &Stage,
    workloads: &[Workload],
    folders: &Folders,
    findings: &mut Findings,
) -> Result<()> {
    let servers = bench.start(stage, folders)?;
    for workload in workloads {
        let outcome = bench.measure(workload, &servers)?;
        print::outcome(stage, workload, &outcome);
        let name = workload.name(stage);
        let pairs = bench.effort.pairs;
        let claims = outcome.findings.iter();
        findings.claims.extend(claims.map(|found| Claim::of(name.clone(), found, pairs)));
        findings.workloads.push(print::outcome_json(&name, &outcome));
        findings.counts.extend(bench.counts(stage, workload, &servers)?);
    }
    Ok(())
}

fn run_after_snapshot(
    arguments: &Arguments,
    bench: &Bench,
    folders: &Folders,
    findings: &mut Findings,
) -> Result<()> {
    // The pool has six to seven times that.
    let size = folders.room(if arguments.quick { 256 << 20 } else { 1 << 30 })?;
    let folder = folders.memory.path().join("after-snapshot");
    std::fs::create_dir_all(&folder)?;
    let file = folders.disk.path().join("after-snapshot.image");
    let place = first_touch::Place { folder: &folder, file, size, blockd: bench.blockd.as_deref() };
    let wanted = |name: &str| arguments.only.as_ref().is_none_or(|only| name.contains(only));
    for found in after_snapshot::measure(&bench.jobs, &place, bench.effort.pairs, wanted)? {
        found.print();
        findings.claims.extend(found.claims());
    }
    for found in composite_reads::measure(&bench.jobs, &place, bench.effort, wanted)? {
        found.print();
        findings.claims.extend(found.claim());
    }
    Ok(())
}

fn run_evacuation(
    arguments: &Arguments,
    bench: &Bench,
    folders: &Folders,
    findings: &mut Findings,
) -> Result<()> {
    const WANTED: u64 = 10 << 30;
    // It is there twice.
    let size = folders.room(2 * if arguments.quick { 1 << 30 } else { WANTED })? / 2;
    if size != WANTED {
        println!("\nnote: {} MiB are moved in place of 10 GiB", size >> 20);
    }
    let folder = folders.memory.path().join("evacuation");
    std::fs::create_dir_all(&folder)?;
    let file = folders.disk.path().join("evacuation.image");
    let place = first_touch::Place { folder: &folder, file, size, blockd: bench.blockd.as_deref() };
    if let Some(found) = evacuation::measure(&bench.jobs, &place)? {
        found.print();
        findings.claims.extend(found.claim());
    }
    Ok(())
}

fn run_first_touch(
    arguments: &Arguments,
    bench: &Bench,
    folders: &Folders,
    findings: &mut Findings,
) -> Result<()> {
    let wanted =
        arguments.first_touch_size.unwrap_or(if arguments.quick { 1024 } else { 16 << 10 });
    let size = folders.room(wanted << 20)?;
    if size != 16 << 30 {
        println!("\nnote: first-touch on {} MiB in place of 16 GiB", size >> 20);
    }
    let folder = folders.memory.path().join("first-touch");
    std::fs::create_dir_all(&folder)?;
    let place = first_touch::Place {
        folder: &folder,
        file: folders.disk.path().join("first-touch.image"),
        size,
        blockd: bench.blockd.as_deref(),
    };
    let outcome = first_touch::measure(&bench.jobs, &place, bench.effort)?;
    print::first_touch(&outcome);
    findings.first_touch = Some(print::first_touch_json(&outcome));
    if bench.blockd.is_none() {
        return Ok(());
    }
    let claim = |claim: String, ratio, target| {
        let (workload, pairs) = ("first-touch".to_owned(), bench.effort.pairs);
        Claim { workload, claim, ratio, target, pairs }
    };
    findings.claims.push(claim("IOPS, first touch/overwrite".to_owned(), outcome.overwrite, 0.9));
    for (kind, ratio) in outcome.qcow2 {
        findings.claims.push(claim(format!("IOPS, ours/it; {}", kind.name()), ratio, 2.0));
    }
    Ok(())
}

fn run_flushed_first_touch(
    bench: &Bench,
    folders: &Folders,
    findings: &mut Findings,
) -> Result<()> {
    let folder = folders.memory.path().join("flushed-first-touch");
    let file = folders.disk.path().join("flushed-first-touch.image");
    let size = flushed_first_touch::SIZE;
    let place = first_touch::Place { folder: &folder, file, size, blockd: bench.blockd.as_deref() };
    let found = flushed_first_touch::measure(&place, bench.effort.pairs)?;
    found.print();
    findings.claims.extend(found.claims());
    Ok(())
}

fn memory_use(arguments: &Arguments, bench: &Bench, folders: &Folders) -> Result<Vec<Row>> {
    let extent = if arguments.long {
        Extent { millions: 10, connects: 10_000 }
    } else if arguments.quick {
        Extent { millions: 1, connects: 500 }
    } else {
        println!(
            "\nnote: memory after 1 M operations and 1,000 connects; --long has ten times that"
        );
        Extent { millions: 1, connects: 1000 }
    };
    let server = bench.alone(Kind::Blockd, folders)?;
    endurance::rows(&bench.jobs, &server, extent)
}
