//! Subcommands that build another package's binary in release form and hand their arguments on.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::Result;

use crate::{built, command, setup};

/// A binary of the simulator's package: `model`, `sim`, `crash`.
///
/// # Errors
/// When it cannot be built or does not exit with 0.
pub(crate) fn sim(root: &Path, binary: &str, arguments: &[String]) -> Result<()> {
    release(root, "blockd-sim", binary, arguments)
}

/// A virtual machine for a workload or a script.
///
/// # Errors
/// As [`sim`], and when a tool is missing.
pub(crate) fn vm(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&[&setup::MACHINES[..], &setup::WORKLOADS].concat())?;
    built::run(root, "vm", arguments)
}

/// The story of a pool that fills up.
///
/// # Errors
/// As [`sim`], and when libclang is missing.
pub(crate) fn demo_space(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&[setup::LIBCLANG])?;
    built::run(root, "story", arguments)
}

/// Kill rounds, half of them in a virtual machine.
///
/// # Errors
/// As [`vm`].
pub(crate) fn kill(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::MACHINES)?;
    built::run(root, "kill", arguments)
}

/// The mapper's figures, then the pump with its defaults, as root on a loop device too: together
/// they are the whole table.
///
/// # Errors
/// When either cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn bench_mapper(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&[setup::FIO, setup::LOSETUP])?;
    let budgets = release(root, "blockd-bench", "mapper", arguments);
    // A missed budget must not hide the pump's figures.
    let arguments =
        if setup::is_root().unwrap_or(false) { &["--loop".to_owned()][..] } else { &[] };
    let pump = release(root, "blockd-bench", "pump", arguments);
    budgets.and(pump)
}

/// The NBD server beside others. The daemon is built as it is shipped: together with the benches it
/// could have features of theirs.
///
/// # Errors
/// When something cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn bench_nbd(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::NBD_BENCH)?;
    let daemon = built::daemon(root)?;
    let jobs = root.join("bench").join("fio");
    let mut all = vec![
        "--blockd".to_owned(),
        daemon.to_string_lossy().into_owned(),
        "--jobs".to_owned(),
        jobs.to_string_lossy().into_owned(),
    ];
    all.extend(arguments.iter().cloned());
    release(root, "blockd-bench", "nbd", &all)
}

/// ublk devices beside others, in a virtual machine. The daemon is built as it is shipped; rublk is
/// installed below the build folder.
///
/// # Errors
/// As [`bench_nbd`].
pub(crate) fn bench_ublk(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::UBLK_BENCH)?;
    setup::ensure(&setup::MACHINES)?;
    let rublk = rublk(root)?;
    let release = command::target_dir(root).join("release");
    let daemon = built::daemon(root)?;
    let mut build = command::cargo(root);
    build.args(["build", "--quiet", "--release", "--package", "blockd-bench", "--bin", "ublk"]);
    command::run(&mut build)?;
    let places = [
        ("--blockd", daemon),
        ("--runner", release.join("ublk")),
        ("--rublk", rublk),
        ("--jobs", root.join("bench").join("fio")),
    ];
    let mut all = Vec::new();
    for (name, path) in places {
        all.extend([name.to_owned(), path.to_string_lossy().into_owned()]);
    }
    all.extend(arguments.iter().cloned());
    built::run(root, "ublk_bench", &all)
}

/// Runs the bench of the server's cost per operation, counted in a virtual machine whose clock
/// counts instructions.
///
/// # Errors
/// As [`bench_nbd`], and when a row has too many more instructions than before.
pub(crate) fn bench_counts(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::MACHINES)?;
    let daemon = built::daemon(root)?;
    let mut places = vec![("--blockd", daemon)];
    // The others are part of it unless two builds are compared, or one with its baseline.
    let is_of_ours = |word: &String| {
        ["--before", "--baseline", "--write-baseline"].iter().any(|flag| word.starts_with(flag))
    };
    let mut all = Vec::new();
    if !arguments.iter().any(is_of_ours) {
        setup::ensure(&setup::NBD_BENCH)?;
        places.push(("--rublk", rublk(root)?));
        all.push("--peers".to_owned());
    }
    for (name, path) in places {
        all.extend([name.to_owned(), path.to_string_lossy().into_owned()]);
    }
    all.extend(arguments.iter().cloned());
    built::run(root, "counts_bench", &all)
}

/// Runs the bench of tenants that share one daemon.
///
/// # Errors
/// When something cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn bench_isolation(root: &Path, arguments: &[String]) -> Result<()> {
    let daemon = built::daemon(root)?;
    let mut all = vec!["--blockd".to_owned(), daemon.to_string_lossy().into_owned()];
    all.extend(arguments.iter().cloned());
    release(root, "blockd-bench", "isolation", &all)
}

/// Runs the bench of the control plane with few volumes and with many.
///
/// # Errors
/// When something cannot be built or does not exit with 0: a call takes too much more with many.
pub(crate) fn bench_control(root: &Path, arguments: &[String]) -> Result<()> {
    let daemon = built::daemon(root)?;
    let mut all = vec!["--blockd".to_owned(), daemon.to_string_lossy().into_owned()];
    all.extend(arguments.iter().cloned());
    release(root, "blockd-bench", "control", &all)
}

/// Runs the bench of the command line's tools beside programs of others.
///
/// # Errors
/// When something cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn bench_tools(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::TOOLS_BENCH)?;
    let daemon = built::daemon(root)?;
    let mut all = vec!["--blockd".to_owned(), daemon.to_string_lossy().into_owned()];
    all.extend(arguments.iter().cloned());
    release(root, "blockd-bench", "tools", &all)
}

/// Runs the bench of clones of one image: over NBD, and as block devices beside dm-thin in a
/// virtual machine. Words that are for the former only leave the latter out.
///
/// # Errors
/// As [`bench_tools`].
pub(crate) fn bench_clones(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::CLONES_BENCH)?;
    let daemon = built::daemon(root)?;
    let mut all = vec!["--blockd".to_owned(), daemon.to_string_lossy().into_owned()];
    all.extend(arguments.iter().cloned());
    let served = release(root, "blockd-bench", "clones", &all);
    if arguments.iter().any(|word| word != "--quick") {
        return served;
    }
    let words = ["--only", "clones"].map(str::to_owned).into_iter();
    let words: Vec<String> = words.chain(arguments.iter().cloned()).collect();
    // A figure that is missed must not hide others.
    let machine = bench_ublk(root, &words);
    served.and(machine)
}

/// The copy engine beside bare copies, then a pool in persistent memory beside others over NBD and
/// ublk.
///
/// # Errors
/// As [`bench_nbd`].
pub(crate) fn bench_pmem(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::NBD_BENCH)?;
    let engine = release(root, "blockd-bench", "pmem", arguments);
    let mut words = vec!["--only".to_owned(), "pmem".to_owned()];
    words.extend(arguments.iter().filter(|word| *word == "--quick").cloned());
    let served = bench_nbd(root, &words);
    let mut words = vec!["--pmem".to_owned()];
    words.extend(arguments.iter().filter(|word| *word == "--quick").cloned());
    // A figure that is missed must not hide others.
    let machine = bench_ublk(root, &words);
    engine.and(served).and(machine)
}

/// The version of rublk that ours is measured beside.
const RUBLK: &str = "0.2.15";

/// rublk's program, of the public registry. Without its default features it needs no OpenCL.
fn rublk(root: &Path) -> Result<PathBuf> {
    let folder = command::target_dir(root).join("peers").join(format!("rublk-{RUBLK}"));
    let program = folder.join("bin").join("rublk");
    if !program.exists() {
        println!("bench: installing rublk {RUBLK} below the build folder");
        let mut install = command::cargo(root);
        install.args(["install", "rublk", "--quiet", "--locked", "--no-default-features"]);
        install.args(["--version", RUBLK, "--root"]).arg(&folder);
        install.env("CARGO_TARGET_DIR", command::target_dir(root).join("peers").join("build"));
        command::run(&mut install)?;
    }
    Ok(program)
}

/// A disk by itself and under a pool of ours; everything on it is lost.
///
/// # Errors
/// As [`bench_nbd`], and when the disk is in use or its name is not confirmed.
pub(crate) fn bench_device(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&setup::DEVICE_BENCH)?;
    let daemon = built::daemon(root)?;
    let jobs = root.join("bench").join("fio");
    let mut cargo = command::cargo(root);
    cargo.args(["run", "--quiet", "--release", "--package", "blockd-bench", "--bin", "device"]);
    cargo.arg("--").arg("--blockd").arg(daemon).arg("--jobs").arg(jobs).args(arguments);
    // It asks before it erases.
    command::run(cargo.stdin(Stdio::inherit()))
}

/// Runs the bench of snapshots, and of writes after them compared with others: qcow2 over NBD, and
/// dm-thin in a virtual machine. The space that a clone of an installed system takes is measured
/// only on request.
///
/// # Errors
/// As [`bench_nbd`].
pub(crate) fn bench_snapshot(root: &Path, arguments: &[String]) -> Result<()> {
    const BESIDE: &str = "after-snapshot";
    const PACKING: &str = "packing";
    let at = arguments.iter().position(|word| word == "--only");
    let only = at.and_then(|at| arguments.get(at + 1));
    if only.is_some_and(|only| only == PACKING) {
        setup::ensure(&[&setup::MACHINES[..], &[setup::MMDEBSTRAP]].concat())?;
        let json: Vec<String> =
            arguments.iter().filter(|word| *word == "--json").cloned().collect();
        return built::run(root, "packing_bench", &json);
    }
    let beside = only.is_some_and(|only| only.starts_with(BESIDE));
    if !beside {
        release(root, "blockd-bench", "snapshot", arguments)?;
    }
    // With --json one object is printed, that of the parts here.
    let json = arguments.iter().any(|word| word == "--json");
    if beside || (only.is_none() && !json) {
        let mut words = vec!["--only".to_owned(), only.map_or(BESIDE, String::as_str).to_owned()];
        words.extend(arguments.iter().find(|word| *word == "--quick").cloned());
        if let Some(at) = arguments.iter().position(|word| word == "--pairs") {
            words.extend(arguments[at..].iter().take(2).cloned());
        }
        let served = bench_nbd(root, &words);
        // A part that fails must not hide the other one. Bytes that are copied cost nothing on the
        // machine's ramdisks.
        words.push("--limited".to_owned());
        let machine = bench_ublk(root, &words);
        served.and(machine)?;
    }
    Ok(())
}

/// Charts of results that benches have written.
///
/// # Errors
/// When it cannot be built, or the results have no claim.
pub(crate) fn bench_charts(root: &Path, arguments: &[String]) -> Result<()> {
    release(root, "blockd-bench", "charts", arguments)
}

/// Runs the bench of listing many volumes through the CSI plugin.
///
/// # Errors
/// When something cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn bench_csi(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&[setup::LIBCLANG, setup::FIO])?;
    built::run(root, "csi_bench", arguments)
}

/// The mapper on a real file.
///
/// # Errors
/// When it cannot be built or does not exit with 0, or a tool is missing.
pub(crate) fn pump(root: &Path, arguments: &[String]) -> Result<()> {
    setup::ensure(&[setup::FIO, setup::LOSETUP])?;
    release(root, "blockd-bench", "pump", arguments)
}

fn release(root: &Path, package: &str, binary: &str, arguments: &[String]) -> Result<()> {
    let mut cargo = command::cargo(root);
    cargo.args(["run", "--quiet", "--release", "--package", package, "--bin", binary, "--"]);
    command::run(cargo.args(arguments))
}
