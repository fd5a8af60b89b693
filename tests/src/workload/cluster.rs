//! `cluster`: the sequences of `tests/cluster`, or a recording, replayed against the plugin and the
//! daemon with block devices and mounts. In one of them the machine loses its power: it is booted
//! again with the disks that it had.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::{self, Home};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;
use serde::{Deserialize, Serialize};

use super::csi::{CONTAINER, life};
use super::{MARK, Run, figures, guest, sparse};
use crate::cluster::{Bindings, Progress, Recorder, Replay, Sequence};
use crate::csi::rig::{Rig, Settings};
use crate::vm::{Drive, Vm};

/// The guest's folder of sequences.
const SEQUENCES: &str = "/cluster";
/// The folders of kubelet, plugin and daemon, on a disk that stays over a reboot.
const HOME: &str = "/var/lib";
/// The sequence that is recorded, and whose recording is replayed.
const RECORDED: &str = "first-volume";
/// The state of a replay that goes on after a reboot.
const SAVED: &str = "/var/lib/replay.json";
/// Printed when the power may be cut.
const UP: &str = "the power may go";
/// The guest takes two minutes; one that gets stuck is not waited for.
const GUEST_LIMIT: Duration = Duration::from_secs(900);

/// A replay in its middle.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    file: PathBuf,
    entry: usize,
    bindings: Bindings,
}

/// The host's half. Replays a recording, if there is one, and else the sequences of this
/// repository.
///
/// # Errors
/// When an answer or the node is another one than a sequence has, or something is left.
pub fn run(run: &Run, recording: Option<&Path>) -> Result<String> {
    let files = match recording {
        Some(file) => vec![file.to_path_buf()],
        None => Sequence::paths()?,
    };
    let sequences = files.iter().map(|path| Sequence::read(path));
    let sequences: Vec<Sequence> = sequences.collect::<Result<_>>()?;
    let kernel = run.kernel.name();
    // The test of the same name replays sequences without devices.
    let is_tested = |one: &Sequence| run.is_short() && recording.is_none() && !one.needs_devices();
    let is_for = |one: &Sequence| {
        one.header.kernel.as_ref().is_none_or(|name| name == kernel) && !is_tested(one)
    };
    let folder = Folder::new("cluster")?;
    let mut vm = run
        .machine("cluster")?
        .memory(2048)
        .limit(GUEST_LIMIT)
        .modules(&["xfs", "btrfs", "loop", "dm-mod", "dm-crypt", "xts"])
        .programs(&["blkid", "blockdev", "mkfs.xfs", "xfs_repair", "xfs_growfs", "mkfs.btrfs"])
        .programs(&["btrfs", "cryptsetup", "resize2fs", "losetup", "mount", "unshare"])
        .program(&tools::blockd_csi()?)
        .drive(Drive::File(sparse(&folder, "pool", 8 << 30)?))
        .drive(Drive::File(sparse(&folder, "home", 512 << 20)?));
    let mut reboots = false;
    for (path, sequence) in files.iter().zip(&sequences).filter(|(_, one)| is_for(one)) {
        reboots |= sequence.reboots();
        vm = vm.file(path, &format!("{SEQUENCES}/{}.jsonl", sequence.name), false);
    }
    let mut said = boot(run, &vm, "cluster", reboots)?;
    if reboots {
        said = format!("{said}; {}", boot(run, &vm, "cluster --again", false)?);
    }
    Ok(said)
}

fn boot(run: &Run, vm: &Vm, words: &str, is_cut: bool) -> Result<String> {
    let script = format!("export BLOCKD_CSI_BIN=/usr/bin/blockd-csi\n{}", run.inside(words));
    let mut running = vm.start(&script)?;
    let output = if is_cut {
        running.wait_for(UP)?;
        running.cut()?
    } else {
        running.finish()?
    };
    println!("{}", output.text);
    Ok(figures(&output.text)?.to_owned())
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(again: bool) -> Result<()> {
    let make = if again { "" } else { "mkfs.ext4 -q /dev/vdb; " };
    // The kubelet shares its mounts with the containers that it starts. /run is new with each boot.
    guest::shell(&format!(
        "{make}mkdir -p {HOME}; mount /dev/vdb {HOME}; mkdir -p {HOME}/blockd/run; \
         mount -t tmpfs tmpfs {HOME}/blockd/run; mount --make-rshared /"
    ))?;
    let settings = Settings {
        daemon: daemon::Settings {
            home: Home::Kept(Path::new(HOME).join("blockd")),
            pool: Some("/dev/vda".into()),
            ..daemon::Settings::default()
        },
        // As the shipped manifest has it.
        words: vec!["--expand-on-node".to_owned()],
        launcher: CONTAINER.to_owned(),
        home: Some(HOME.into()),
        ..Settings::default()
    };
    let mut rig = Rig::start("cluster", &settings)?;
    if again {
        after_reboot(&mut rig)?;
    } else {
        before_reboot(&mut rig)?;
    }
    guest::no_errors()?;
    rig.plugin.stop()?;
    ensure!(rig.daemon.stop()?.success(), "the daemon's end: {}", rig.daemon.last_words());
    Ok(())
}

fn before_reboot(rig: &mut Rig) -> Result<()> {
    let (mut count, mut calls) = (0, 0);
    let mut last = None;
    for path in Sequence::in_folder(Path::new(SEQUENCES))? {
        let sequence = Sequence::read(&path)?;
        if sequence.reboots() {
            ensure!(last.is_none(), "one sequence of a run may reboot");
            last = Some((path, sequence));
            continue;
        }
        (count, calls) = (count + 1, calls + sequence.calls());
        let progress = replay(rig, &sequence, 0, None)?.0;
        ensure!(progress == Progress::Done, "{} did not end", sequence.name);
        if sequence.name == RECORDED {
            recorded(rig, &sequence)?;
        }
    }
    ensure!(count > 0 || last.is_some(), "nothing was replayed");
    println!("{MARK}{count} sequences with {calls} calls");
    let Some((file, sequence)) = last else { return Ok(()) };
    let (progress, bindings) = replay(rig, &sequence, 0, None)?;
    let Progress::Reboot(entry) = progress else { return Ok(()) };
    guest::no_errors()?;
    fs::write(SAVED, serde_json::to_string(&Saved { file, entry, bindings })?)?;
    fs::File::open(SAVED)?.sync_all()?;
    println!("{UP}");
    // Nothing is taken down: the power goes.
    loop {
        std::thread::park();
    }
}

/// Replays a sequence through a recorder, and then what that has written.
fn recorded(rig: &mut Rig, sequence: &Sequence) -> Result<()> {
    let recorder = Recorder::start(&rig.plugin.socket())?;
    Replay::through(rig, &recorder.socket())?.run(sequence)?;
    let recorded = recorder.stop()?;
    let (was, is) = (sequence.calls(), recorded.calls());
    ensure!(was == is, "of {was} calls {is} were recorded");
    replay(rig, &recorded, 0, None).context("the recording").map(drop)
}

fn after_reboot(rig: &mut Rig) -> Result<()> {
    let saved: Saved = serde_json::from_str(&fs::read_to_string(SAVED)?)?;
    let sequence = Sequence::read(&saved.file)?;
    let (progress, _) = replay(rig, &sequence, saved.entry, Some(saved.bindings))?;
    ensure!(progress == Progress::Done, "{} reboots more than once", sequence.name);
    println!("{MARK}one over a reboot with {} calls; nothing left", sequence.calls());
    Ok(())
}

/// Replays a sequence from an entry on. Nothing may be left at its end.
fn replay(
    rig: &mut Rig,
    sequence: &Sequence,
    entry: usize,
    bindings: Option<Bindings>,
) -> Result<(Progress, Bindings)> {
    let start = Clock::start();
    let mut replay = Replay::new(rig)?;
    if let Some(bindings) = bindings {
        replay.bind(bindings);
    }
    let progress = replay.run_from(sequence, entry);
    let bindings = replay.bindings();
    drop(replay);
    let progress = progress.with_context(|| rig.plugin.last_words())?;
    if progress == Progress::Done {
        life::nothing_left(rig, &sequence.name)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{}: {} calls, {progress:?}, {seconds:.1} s", sequence.name, sequence.calls());
    Ok((progress, bindings))
}
