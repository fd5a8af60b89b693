//! Lines of a sequence that are no calls: processes that die, data that is written and read, and
//! looks at the node.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::tools;
use serde::Deserialize;

use super::bindings::Bindings;
use crate::csi::rig::Rig;
use crate::workload::guest;

/// A moment in a call that does not come within this time has passed unseen.
const PATIENCE: Duration = Duration::from_secs(60);

/// A step. `start_ms` is beside these fields.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Step {
    /// The plugin dies, once its log has gained a line with this text, if there is one.
    KillPlugin {
        log: Option<String>,
    },
    StartPlugin {},
    /// The plugin ends in order, as for an upgrade.
    StopPlugin {},
    /// The daemon dies, once the plugin's log has gained a line with this text, if there is one.
    KillDaemon {
        log: Option<String>,
    },
    StartDaemon {},
    /// The machine loses its power, and boots.
    Reboot {},
    /// Writes bytes of a pattern, and flushes them. The path is a file, or a device.
    Write {
        path: String,
        bytes: usize,
        seed: u64,
    },
    /// Reads them, past the cache.
    Read {
        path: String,
        bytes: usize,
        seed: u64,
    },
    /// Something is mounted there.
    Mounted {
        path: String,
        read_only: bool,
    },
    /// Nothing is mounted there.
    NotMounted {
        path: String,
    },
    /// The file system there has this size at least.
    FileSystem {
        path: String,
        at_least: u64,
    },
    /// The device there has this size.
    Device {
        path: String,
        bytes: u64,
    },
    /// Keeps a file open, until it is released.
    Hold {
        path: String,
    },
    Release {},
    /// The daemon has this number of volumes and snapshots.
    Volumes {
        count: usize,
    },
    /// The daemon has this limit for the volume.
    Iops {
        volume: String,
        iops: u64,
    },
}

/// Files that steps keep open.
pub(super) type Held = Vec<File>;

impl Step {
    /// Whether it looks at mounts or devices.
    pub(super) fn needs_devices(&self) -> bool {
        !matches!(
            self,
            Self::KillPlugin { .. }
                | Self::StartPlugin {}
                | Self::StopPlugin {}
                | Self::KillDaemon { .. }
                | Self::StartDaemon {}
                | Self::Volumes { .. }
                | Self::Iops { .. }
        )
    }

    /// Does it. `log` is the length of the plugin's log when the calls around it began.
    pub(super) fn run(
        &self,
        rig: &mut Rig,
        bindings: &Bindings,
        log: usize,
        held: &mut Held,
    ) -> Result<()> {
        match self {
            Self::KillPlugin { log: text } => {
                wait_for_line(rig, text.as_deref(), log)?;
                rig.plugin.kill()
            }
            Self::KillDaemon { log: text } => {
                wait_for_line(rig, text.as_deref(), log)?;
                rig.daemon.kill()
            }
            Self::StartPlugin {} => rig.plugin.start(),
            Self::StopPlugin {} => rig.plugin.stop(),
            Self::StartDaemon {} => {
                rig.daemon.start()?;
                rig.wait_until_ready()
            }
            Self::Reboot {} => bail!("a reboot is for a machine"),
            Self::Write { path, bytes, seed } => {
                write(Path::new(&bindings.text(path)?), *bytes, *seed)
            }
            Self::Read { path, bytes, seed } => {
                read(Path::new(&bindings.text(path)?), *bytes, *seed)
            }
            Self::Mounted { path, read_only } => {
                let path = bindings.text(path)?;
                let found = mount(&path)?.with_context(|| format!("{path} is not mounted"))?;
                ensure!(found == *read_only, "{path} is mounted, read-only: {found}");
                Ok(())
            }
            Self::NotMounted { path } => {
                let path = bindings.text(path)?;
                ensure!(mount(&path)?.is_none(), "{path} is mounted");
                Ok(())
            }
            Self::FileSystem { path, at_least } => {
                let found = rustix::fs::statvfs(bindings.text(path)?)?;
                let total = found.f_blocks * found.f_frsize;
                ensure!(total >= *at_least, "{path} has {total} bytes, not {at_least}");
                Ok(())
            }
            Self::Device { path, bytes } => {
                let line = format!("blockdev --getsize64 {}", bindings.text(path)?);
                let size: u64 = guest::shell(&line)?.trim().parse()?;
                ensure!(size == *bytes, "{path} has {size} bytes, not {bytes}");
                Ok(())
            }
            Self::Hold { path } => {
                held.push(File::open(bindings.text(path)?).with_context(|| path.clone())?);
                Ok(())
            }
            Self::Release {} => {
                held.clear();
                Ok(())
            }
            Self::Volumes { count } => {
                let names = rig.control()?.names()?;
                ensure!(names.len() == *count, "the daemon has {names:?}, not {count}");
                Ok(())
            }
            Self::Iops { volume, iops } => {
                let volume = rig.control()?.volume(&bindings.text(volume)?)?;
                let found = volume.settings.unwrap_or_default().iops;
                ensure!(found == *iops, "{} has iops {found}, not {iops}", volume.name);
                Ok(())
            }
        }
    }
}

fn wait_for_line(rig: &Rig, text: Option<&str>, from: usize) -> Result<()> {
    let Some(text) = text else { return Ok(()) };
    let has_it = || rig.plugin.log().get(from..)?.contains(text).then_some(());
    tools::wait_until(&format!("the plugin's log to say {text:?}"), PATIENCE, has_it)
}

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| rng.u8(..)).take(bytes).collect()
}

fn write(path: &Path, bytes: usize, seed: u64) -> Result<()> {
    let shown = || format!("writing {}", path.display());
    let file = File::options().write(true).create(true).truncate(false).open(path);
    let file = file.with_context(shown)?;
    file.write_all_at(&pattern(bytes, seed), 0)
        .and_then(|()| file.sync_all())
        .with_context(shown)?;
    match path.parent().filter(|_| file.metadata().is_ok_and(|data| data.is_file())) {
        Some(folder) => File::open(folder)?.sync_all().with_context(shown),
        None => Ok(()),
    }
}

fn read(path: &Path, bytes: usize, seed: u64) -> Result<()> {
    guest::shell("sync; echo 3 >/proc/sys/vm/drop_caches")?;
    let mut found = vec![0; bytes];
    let file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
    file.read_exact_at(&mut found, 0).with_context(|| format!("reading {}", path.display()))?;
    let wanted = pattern(bytes, seed);
    let differs = found.iter().zip(&wanted).position(|(one, other)| one != other);
    match differs {
        Some(at) => bail!("{} has other bytes from {at} on", path.display()),
        None => Ok(()),
    }
}

/// Whether the uppermost mount at a path is read-only, if there is one. A device that is bound
/// there is a mount too.
fn mount(path: &str) -> Result<Option<bool>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let line = table.lines().rfind(|line| line.split(' ').nth(4) == Some(path));
    let is_device = fs::metadata(path).is_ok_and(|data| data.file_type().is_block_device());
    Ok(line.map(|line| {
        let options = line.split(' ').nth(5).unwrap_or_default();
        !is_device && options.split(',').any(|word| word == "ro")
    }))
}
