//! `csi`: the plugin beside the daemon on real devices, called as a kubelet calls it: the
//! conformance suite with its node part, a node that loses its power and boots again, the events of
//! a node's life, a daemon that is away for a while, and deaths at every step.

mod away;
mod deaths;
mod encryption;
pub(super) mod life;
pub(super) mod node;
mod reboot;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use super::{Form, INSIDE, MARK, Run, figures, guest, sparse};
use crate::csi::rig::{Rig, Settings};
use crate::csi::{self, Options};
use crate::vm::Drive;

/// Where the plugin's and the kubelet's folders are in the guest, on a disk that stays.
const HOME: &str = "/csi";

/// The daemon's folder, with one below it that is in memory, as `/run` is.
const DAEMON: &str = "/csi/daemon";

/// The plugin's container in the manifests: a root file system that can't be written, but for
/// folders that are mounted there, whose mounts are propagated to the host.
pub(super) const CONTAINER: &str = "mount -o remount,bind,ro /\nexec \"$@\"";

/// The capabilities that the plugin keeps there: CAP_DAC_OVERRIDE, CAP_SYS_ADMIN and
/// CAP_SYS_RESOURCE.
const KEPT: u64 = 1 << 1 | 1 << 21 | 1 << 24;

/// The host's half.
///
/// # Errors
/// When a case fails, something was lost, or something is left.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("csi")?;
    let disk = sparse(&folder, "disk", 8 << 30)?;
    let home = sparse(&folder, "home", 256 << 20)?;
    let vm = run
        .machine("csi")?
        .memory(2048)
        .modules(&["xfs", "btrfs", "loop", "dm-mod", "dm-crypt", "xts"])
        .programs(&["blkid", "mkfs.xfs", "xfs_repair", "xfs_growfs", "mkfs.btrfs", "btrfs"])
        .programs(&[
            "cryptsetup",
            "resize2fs",
            "losetup",
            "lvm",
            "sfdisk",
            "mkswap",
            "mount",
            "unshare",
        ])
        .program(&tools::blockd_csi()?)
        .drive(Drive::File(disk))
        .drive(Drive::File(home));
    let seed = run.seed;
    let seconds = run.either(12, 300);
    let form = run.form.flag();
    let script = |words: &str| {
        format!(
            "export BLOCKD_BIN=/usr/bin/blockd BLOCKD_CSI_BIN=/usr/bin/blockd-csi\n\
             {INSIDE} inside --seed {seed} csi --seconds {seconds}{form}{words}\n"
        )
    };
    let mut first = vm.start(&script(" --until-cut"))?;
    first.wait_for(reboot::READY)?;
    println!("{}", first.cut()?.text);
    let output = vm.run(&script(""))?;
    println!("{}", output.text);
    Ok(figures(&output.text)?.to_owned())
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(seconds: u64, form: Form, until_cut: bool, seed: u64) -> Result<()> {
    let short = form == Form::Short;
    if short {
        guest::derive_keys_with_less_memory()?;
    }
    let mut rig = boot(until_cut)?;
    if until_cut {
        return reboot::before(&rig);
    }
    reboot::after(&rig)?;
    privileges(&rig)?;
    reboot::orphans(&rig)?;
    let suite = if short { 0 } else { suite(&rig)? };
    let steps = node::all(&mut rig, short)?;
    let encryption = encryption::all(&mut rig)?;
    let away = away::all(&mut rig, form)?;
    life::nothing_left(&rig, "the daemon was away")?;
    let deaths = deaths::all(&mut rig, Duration::from_secs(seconds), seed)?;
    guest::no_errors()?;
    rig.plugin.stop()?;
    ensure!(rig.daemon.stop()?.success(), "the daemon's end: {}", rig.daemon.last_words());
    println!(
        "{MARK}a power cut and orphans, {suite} cases of the suite, {steps} steps of a node, \
         {encryption} of encryption, {away}, {deaths}; nothing left"
    );
    Ok(())
}

/// Starts daemon and plugin as a node does when it boots, for the first time or again.
fn boot(is_first: bool) -> Result<Rig> {
    if is_first {
        guest::shell("mkfs.ext4 -q /dev/vdb")?;
    }
    // The kubelet shares its mounts with the containers that it starts.
    guest::shell(&format!(
        "mkdir -p {HOME} && mount -t ext4 /dev/vdb {HOME} && mkdir -p {DAEMON}/run && \
         mount -t tmpfs run {DAEMON}/run && mount --make-rshared /"
    ))?;
    let daemon = daemon::Settings {
        home: daemon::Home::Kept(DAEMON.into()),
        pool: Some(Path::new("/dev/vda").to_path_buf()),
        ..daemon::Settings::default()
    };
    let settings = Settings {
        daemon,
        launcher: CONTAINER.to_owned(),
        home: Some(HOME.into()),
        ..Settings::default()
    };
    Rig::start("csi", &settings)
}

/// Fails when the plugin has other privileges than those that it is shipped with: everything else
/// here is done with them.
fn privileges(rig: &Rig) -> Result<()> {
    let process = format!("/proc/{}", rig.plugin.pid().context("the plugin does not run")?);
    let status = std::fs::read_to_string(format!("{process}/status"))?;
    for name in ["CapPrm", "CapEff", "CapBnd"] {
        let line = format!("{name}:\t{KEPT:016x}");
        ensure!(status.lines().any(|one| one == line), "the plugin lacks {line}: {status}");
    }
    let mounts = std::fs::read_to_string(format!("{process}/mountinfo"))?;
    let is_root = |line: &&str| line.split(' ').nth(4) == Some("/");
    let root = mounts.lines().find(is_root).context("the plugin has no root")?;
    let is_read_only = root.split(' ').nth(5).is_some_and(|words| words.starts_with("ro"));
    ensure!(is_read_only, "the plugin can write its root: {root}");
    println!("privileges: capabilities {KEPT:x}, a read-only root");
    Ok(())
}

/// The part of the suite that needs devices: it takes minutes, so only the long form has it.
fn suite(rig: &Rig) -> Result<usize> {
    let start = Clock::start();
    let kubelet = rig.plugin.kubelet_dir();
    let options = Options {
        skip_node: false,
        staging_dir: kubelet.join("plugins/kubernetes.io/csi"),
        target_dir: kubelet.join("pods"),
        only_host: true,
        ..rig.options()
    };
    for folder in [&options.staging_dir, &options.target_dir] {
        std::fs::create_dir_all(folder)?;
    }
    let report = csi::run(&options).with_context(|| rig.plugin.last_words())?;
    report.print(false);
    ensure!(report.is_good(), "the suite failed; {}", rig.plugin.last_words());
    println!("suite: {} passed, {:.1} s", report.passed(), start.elapsed().as_secs_f64());
    Ok(report.passed())
}
