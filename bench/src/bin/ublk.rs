//! ublk devices beside other ways from a block device to the same ramdisk. Runs as root in a
//! virtual machine that the tests' package boots: it changes the machine's devices as it likes.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use blockd_bench::block::Jobs;
use blockd_bench::nbd::print::{self as claims, Claim};
use blockd_bench::report::{self, Row};
use blockd_bench::ublk::backing::{self, Disk};
use blockd_bench::ublk::daemon::{Daemon, Pool};
use blockd_bench::ublk::mapped::{self, Devices, Pair, WORKLOADS};
use blockd_bench::ublk::peers::{Chunk, Device, Loop, Rublk, Thin};
use blockd_bench::ublk::{
    Bench, Mode, after_snapshot, clones, counts, first_touch, print, restart,
};
use blockd_bench::{before, facts, ublk};
use blockd_testkit::clock;
use clap::Parser;
use serde_json::{Value, json};

/// Measures ublk devices, rublk's, the kernel's loop and dm-thin in turns on ramdisks of one
/// machine, and compares the ratios with the claims. Tables are in Markdown.
#[derive(Debug, Parser)]
struct Arguments {
    /// The daemon's program; without it only the others are measured
    #[arg(long)]
    blockd: Option<PathBuf>,
    /// Another build of the daemon, such as one from before a change: the two are compared in
    /// pairs, and nothing else is measured
    #[arg(long)]
    before: Option<PathBuf>,
    /// rublk's program
    #[arg(long, default_value = "/usr/bin/rublk")]
    rublk: PathBuf,
    /// The folder of the job files
    #[arg(long, default_value = "/jobs")]
    jobs: PathBuf,
    /// fio's engine: libaio or io_uring, which makes dm-thin much slower at depth 1
    #[arg(long, default_value = "libaio")]
    engine: String,
    /// Shorter runs, 3 pairs, fewer workloads: shows that everything works, and resolves no claim
    #[arg(long)]
    quick: bool,
    /// Only workloads with this in their name: mapped/randread-1, first-touch/64k, after-snapshot,
    /// counts, restart, clones
    #[arg(long)]
    only: Option<String>,
    /// Persistent memory in place of ramdisks, and nothing but blocks that were written before
    #[arg(long)]
    pmem: bool,
    /// The disks' limits, in words: they are no ramdisks
    #[arg(long)]
    limits: Option<String>,
    /// Seconds of each run
    #[arg(long)]
    seconds: Option<f64>,
    /// Interleaved pairs
    #[arg(long)]
    pairs: Option<usize>,
}

/// Before the line with everything as JSON, for the program that has booted the machine.
const JSON: &str = "@@json ";

/// The results so far.
#[derive(Default)]
struct Findings {
    claims: Vec<Claim>,
    counts: Vec<Row>,
    pauses: Vec<Row>,
    mapped: Vec<Value>,
    first_touch: Vec<Value>,
    after_snapshot: Vec<Value>,
    clones: Option<Value>,
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
    let bench = bench(&arguments)?;
    facts::print_known();
    let words = if arguments.pmem { PMEM.to_owned() } else { backing::words()? };
    println!("backing  {words}, {}", bench.limits.as_deref().unwrap_or("ramdisks"));
    println!("engine   {}", arguments.engine);
    println!("\n{} pairs of {} s, medians", bench.pairs, bench.seconds);
    if bench.quick {
        println!("note: a quick run; it resolves no claim");
    }
    if arguments.pmem {
        return in_memory(&bench, watch);
    }
    if let Some(before) = &arguments.before {
        return compare(&bench, before, watch);
    }
    let mut findings = Findings::default();
    let done = run_mapped(&bench, &mut findings);
    findings.note("mapped", done);
    let done = run_first_touch(&bench, &mut findings);
    findings.note("first-touch", done);
    let done = after_snapshot::measure(&bench, print::after_snapshot);
    let done = done.map(|outcomes| {
        findings.claims.extend(outcomes.iter().flat_map(after_snapshot::Outcome::claims));
        findings.after_snapshot = outcomes.iter().map(print::after_snapshot_json).collect();
    });
    findings.note("after-snapshot", done);
    let done = clones::measure(&bench).map(|outcome| {
        outcome.iter().for_each(clones::Outcome::print);
        findings.claims.extend(outcome.iter().flat_map(clones::Outcome::claims));
        findings.clones = outcome.map(|outcome| outcome.to_json());
    });
    findings.note("clones", done);
    if bench.includes("restart") {
        let done = restart::rows(&bench).map(|rows| findings.pauses = rows);
        findings.note("restart", done);
    }
    if !findings.claims.is_empty() {
        claims::claims(&findings.claims);
    }
    for (title, rows) in [("counts", &findings.counts), ("pauses", &findings.pauses)] {
        if !rows.is_empty() {
            report::print(title, rows);
        }
    }
    println!("\n{:.0} s in the machine", watch.seconds());
    let rows = |rows: &[Row]| rows.iter().map(Row::to_json).collect::<Vec<Value>>();
    let value = json!({
        "machine": facts::to_json(), "engine": arguments.engine,
        "seconds": bench.seconds, "pairs": bench.pairs,
        "mapped": findings.mapped, "first_touch": findings.first_touch,
        "after_snapshot": findings.after_snapshot, "clones": findings.clones,
        "claims": claims::claims_json(&findings.claims),
        "counts": rows(&findings.counts), "pauses": rows(&findings.pauses),
    });
    println!("{JSON}{value}");
    ensure!(findings.failed.is_empty(), "failed: {}", findings.failed.join(", "));
    Ok(())
}

/// The replacement of ramdisks.
const PMEM: &str = "three regions of persistent memory, two as character devices, one as a \
                    block device";

/// A pool in persistent memory compared with devices that only forward requests to it.
fn in_memory(bench: &Bench, watch: clock::Clock) -> Result<()> {
    let rig = Rig::in_memory(bench)?;
    rig.devices.prepare(bench)?;
    let rounds = bench.pairs * mapped::ROUNDS_PER_PAIR;
    let (mut claims, mut json) = (Vec::new(), Vec::new());
    for workload in WORKLOADS.iter().filter(|one| bench.includes(&one.name())) {
        let outcome = mapped::measure(bench, workload, &rig.devices)?;
        print::mapped(workload, &outcome);
        let said = print::mapped_claims(workload, &outcome, rounds);
        claims.extend(said.map(|claim| Claim { target: 1.0, ..claim }));
        json.push(print::mapped_json(workload, &outcome));
    }
    claims::claims(&claims);
    println!("\n{:.0} s in the machine", watch.seconds());
    let all = json!({
        "machine": facts::to_json(), "mapped": json, "claims": claims::claims_json(&claims),
    });
    println!("{JSON}{all}");
    Ok(())
}

/// This daemon beside another build of it.
fn compare(bench: &Bench, other: &std::path::Path, watch: clock::Clock) -> Result<()> {
    before::print_head();
    let outcomes = ublk::before::measure(bench, other, before::Outcome::print)?;
    println!("\n{:.0} s in the machine", watch.seconds());
    let rows: Vec<Value> = outcomes.iter().map(before::Outcome::to_json).collect();
    println!("{JSON}{}", json!({ "machine": facts::to_json(), "before": rows }));
    before::check(&outcomes)
}

fn bench(arguments: &Arguments) -> Result<Bench> {
    let quick = arguments.quick;
    let scratch = std::env::temp_dir().join("blockd-bench-ublk");
    std::fs::create_dir_all(&scratch)?;
    let folder = arguments.jobs.canonicalize().context("the folder of job files")?;
    Ok(Bench {
        blockd: arguments.blockd.clone(),
        rublk: arguments.rublk.clone(),
        jobs: Jobs { folder, engine: arguments.engine.clone(), scratch },
        seconds: arguments.seconds.unwrap_or(if quick { 0.2 } else { 0.4 }),
        pairs: arguments.pairs.unwrap_or(if quick { 3 } else { 9 }).max(1),
        quick,
        only: arguments.only.clone(),
        limits: arguments.limits.clone(),
    })
}

/// The devices for workloads on blocks that are written before. Their servers end with it.
struct Rig {
    devices: Devices,
    _daemons: Vec<Daemon>,
    _rublks: Vec<Rublk>,
    _loop: Loop,
    _thin: Vec<Thin>,
}

impl Rig {
    fn new(bench: &Bench) -> Result<Self> {
        let mut pairs = Vec::new();
        let (mut daemons, mut rublks) = (Vec::new(), Vec::new());
        for (mode, disk) in Mode::ALL.into_iter().zip([Disk::First, Disk::Second]) {
            let log = bench.jobs.scratch.join(format!("rublk-{mode:?}"));
            let rublk = match Rublk::start(&bench.rublk, Disk::Plain, mode, &log) {
                Ok(rublk) => rublk,
                // Older kernels have none.
                Err(error) if mode == Mode::ZeroCopy => {
                    println!("note: zero copy is not measured, rublk has none here: {error:#}");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let peer = rublk.device();
            rublks.push(rublk);
            let ours = match &bench.blockd {
                Some(program) => {
                    let folder = bench.jobs.scratch.join(format!("{mode:?}"));
                    let pool = Pool { name: "mapped", disk, extent: 256 << 10 };
                    let daemon = Daemon::start(program, &folder, mode, &[pool])?;
                    let (device, real) = daemon.add("mapped", "data", mapped::BYTES)?;
                    ensure!(real == mode, "{mode:?} was asked for, {real:?} is served");
                    daemons.push(daemon);
                    Some(device)
                }
                None => None,
            };
            pairs.push(Pair { mode, ours, peer });
        }
        let kernel_loop = Loop::start(Disk::Plain)?;
        let plain = Disk::Plain.path();
        let mut others = vec![
            kernel_loop.device(),
            Device { name: "raw".to_owned(), path: plain, server: None },
        ];
        let mut thins = Vec::new();
        for (bytes, data, meta) in [
            (64 << 10, Disk::ThinSmall, Disk::MetaSmall),
            (256 << 10, Disk::ThinLarge, Disk::MetaLarge),
        ] {
            let mut thin = Thin::start(Chunk { bytes, zeroing: true }, data, meta)?;
            let mut device = thin.renew(mapped::BYTES)?;
            device.name = format!("dm-thin, {} KiB", bytes >> 10);
            others.push(device);
            thins.push(thin);
        }
        let devices = Devices { pairs, others };
        Ok(Self { devices, _daemons: daemons, _rublks: rublks, _loop: kernel_loop, _thin: thins })
    }
}

impl Rig {
    /// On persistent memory: our pool on a character device, the others on a block device.
    fn in_memory(bench: &Bench) -> Result<Self> {
        let log = bench.jobs.scratch.join("rublk");
        let rublk = Rublk::start(&bench.rublk, Disk::Pmem, Mode::Copy, &log)?;
        let program = bench.blockd.as_ref().context("the daemon's program")?;
        let pool = Pool { name: "mapped", disk: Disk::Dax, extent: 256 << 10 };
        let folder = bench.jobs.scratch.join("daemon");
        let daemon = Daemon::start(program, &folder, Mode::Copy, &[pool])?;
        let (device, _) = daemon.add("mapped", "data", mapped::BYTES)?;
        let pairs = vec![Pair { mode: Mode::Copy, ours: Some(device), peer: rublk.device() }];
        let kernel_loop = Loop::start(Disk::Pmem)?;
        let path = Disk::Pmem.path();
        let raw = Device { name: "raw, /dev/pmem1".to_owned(), path, server: None };
        let pool = Pool { disk: Disk::DaxTorn, ..pool };
        let folder = bench.jobs.scratch.join("daemon-torn");
        let other = Daemon::start(program, &folder, Mode::Copy, &[pool])?;
        let (mut torn, _) = other.add("mapped", "data", mapped::BYTES)?;
        torn.name.push_str(", atomicity none");
        let devices = Devices { pairs, others: vec![torn, kernel_loop.device(), raw] };
        let (daemons, rublks) = (vec![daemon, other], vec![rublk]);
        Ok(Self {
            devices,
            _daemons: daemons,
            _rublks: rublks,
            _loop: kernel_loop,
            _thin: Vec::new(),
        })
    }
}

fn run_mapped(bench: &Bench, findings: &mut Findings) -> Result<()> {
    let wanted: Vec<_> = WORKLOADS
        .into_iter()
        .filter(|workload| bench.includes(&workload.name()))
        .filter(|workload| !bench.quick || workload.quick || bench.only.is_some())
        .collect();
    let counted = bench.includes("counts");
    if wanted.is_empty() && !counted {
        return Ok(());
    }
    let rig = Rig::new(bench)?;
    rig.devices.prepare(bench)?;
    let rounds = bench.pairs * mapped::ROUNDS_PER_PAIR;
    for workload in &wanted {
        let outcome = mapped::measure(bench, workload, &rig.devices)?;
        print::mapped(workload, &outcome);
        findings.claims.extend(print::mapped_claims(workload, &outcome, rounds));
        findings.mapped.push(print::mapped_json(workload, &outcome));
    }
    if counted {
        let outcome = counts::measure(bench, &rig.devices)?;
        findings.claims.extend(print::enters_claims(&outcome, bench.pairs));
        findings.counts = outcome.rows;
    }
    Ok(())
}

fn run_first_touch(bench: &Bench, findings: &mut Findings) -> Result<()> {
    let outcomes = first_touch::measure(bench, print::first_touch)?;
    for outcome in &outcomes {
        findings.claims.extend(print::first_touch_claims(outcome, bench.pairs));
        findings.first_touch.push(print::first_touch_json(outcome));
    }
    Ok(())
}
