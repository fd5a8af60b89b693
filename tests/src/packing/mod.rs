//! How much more space a clone takes than was written to it. Debian is installed into an image,
//! a clone of the image boots, and packages are installed in it. All of its writes are logged, and
//! repeated on clones in pools with other extents.

mod image;
mod trace;

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use serde_json::{Value, json};

use crate::vm::{Drive, Vm};
use image::Image;
use trace::Trace;

/// Bytes of a pool's file, which is sparse: the image twice, and the clone.
const POOL: u64 = 8 << 30;
/// Bytes that the log may have. The file is sparse.
const LOG: u64 = 16 << 30;
/// Booting systemd and `cloud-init` takes minutes where the processor is emulated.
const LIMIT: Duration = Duration::from_secs(40 * 60);
/// Emulated services start late, and count as failed after a minute and a half otherwise. On a busy
/// host the kernel finds its timer too slow and stops.
const WORDS: &str = "systemd.default_timeout_start_sec=1800 no_timer_check";

/// The extents of a pool that are measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Kind {
    extent_kib: u64,
    composite: bool,
}

/// The kind that the guest is booted on: the defaults.
const BOOTED: Kind = Kind { extent_kib: 256, composite: true };
/// The others, on which its writes are repeated; and the first again, so that a difference between
/// the guest and the repetition shows.
const REPEATED: [Kind; 6] = [
    BOOTED,
    Kind { extent_kib: 64, composite: true },
    Kind { extent_kib: 1024, composite: true },
    Kind { extent_kib: 64, composite: false },
    Kind { extent_kib: 256, composite: false },
    Kind { extent_kib: 1024, composite: false },
];

/// The names of the stages, at which the guest waits for a word.
const STAGES: [&str; 3] = ["booted", "installed", "trimmed"];

/// The guest's script, run from a disk when it has booted. Nothing that it starts may page its
/// output, since a terminal is all that it has. The file system discards freed blocks some time
/// after the commit that frees them.
fn stages() -> String {
    let packages = image::INSTALLED;
    format!(
        r#"exec </dev/ttyS1 >/dev/ttyS1 2>&1
stty -echo -onlcr -icrnl
export DEBIAN_FRONTEND=noninteractive HOME=/root PAGER=cat SYSTEMD_PAGER=cat
stage() {{ sync; sleep 10; sync; printf '\nstage %s\n' "$1"; read -r go; }}
systemctl list-units --failed
stage booted
tar --extract --file=/dev/vdb --directory=/var/cache/apt
apt-get install --yes /var/cache/apt/archives/*.deb || status=1
dpkg-query --show {packages} || status=1
stage installed
apt-get clean
fstrim -v /
stage trimmed
printf '\n@@ended %s\n' "${{status:-0}}"
systemctl poweroff --no-block
exit
"#
    )
}

/// Hands over to the system on the disk.
const SWITCH: &str = "mount -t ext4 /dev/vda /mnt && exec switch_root /mnt /sbin/init\n";

/// A clone of the image in a pool of its own.
#[derive(Debug)]
struct Cloned {
    kind: Kind,
    daemon: Daemon,
    /// Bytes that the daemon had written to its pool when the clone was made.
    written_before: u64,
}

impl Cloned {
    fn of(image: &Image, kind: Kind) -> Result<Self> {
        let Kind { extent_kib, composite } = kind;
        let pool_lines = format!("extent_size = \"{extent_kib}K\"\ncomposite = {composite}\n");
        let settings = Settings { pool_size: POOL, pool_lines, ..Settings::default() };
        let mut daemon = Daemon::new("packing", &settings)?;
        daemon.start()?;
        let disk = image.disk.to_string_lossy();
        daemon.cli(&["import", "--format", "raw", &disk, "image"])?;
        daemon.cli(&["snapshot", "image=golden"])?;
        daemon.cli(&["clone", "golden", "clone"])?;
        daemon.cli(&["attach", "clone"])?;
        let mut clone = Self { kind, daemon, written_before: 0 };
        clone.written_before = clone.written()?;
        Ok(clone)
    }

    /// Bytes that the daemon has written to its pool, metadata included.
    fn written(&self) -> Result<u64> {
        let pid = self.daemon.pid().context("the daemon does not run")?;
        let text = fs::read_to_string(format!("/proc/{pid}/io"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
        Ok(line.context("the bytes that a process has written")?.parse()?)
    }

    /// The figures of a stage, beside the counts of what was written.
    fn figures(&self, stage: &str, source: &str, written: &trace::Written) -> Result<Value> {
        let volume = self.daemon.cli(&["show", "clone"])?;
        let folds = self.daemon.cli(&["pool", "fold", "--status"])?;
        let allocated = number(&volume["volume"]["exclusive_bytes"])?;
        let overlays = number(&folds["folds"]["composite_entries"])?;
        let changed = self.daemon.cli_output(&["--json", "diff", "clone", "--since", "golden"])?;
        let changed = String::from_utf8(changed.stdout)?;
        let changed: Value = serde_json::from_str(changed.lines().last().unwrap_or_default())
            .context("the sums of a difference")?;
        Ok(json!({
            "extent_kib": self.kind.extent_kib,
            "composite": self.kind.composite,
            "source": source,
            "stage": stage,
            "written_bytes": written.all,
            "distinct_bytes": written.distinct,
            "held_bytes": written.held,
            "allocated_bytes": allocated,
            "overlay_bytes": overlays * self.kind.extent_kib * 1024,
            "changed_bytes": changed["data_bytes"],
            "device_bytes": self.written()? - self.written_before,
        }))
    }
}

/// Measures all kinds of pools. The figures are in order of the kinds, and of the stages in each.
///
/// # Errors
/// When the image can't be made, or the guest or a daemon fails.
pub fn measure() -> Result<Vec<Value>> {
    let image = Image::get()?;
    let folder = Folder::new("packing")?;
    let log = folder.path().join("log");
    File::create(&log)?.set_len(LOG)?;
    let mut rows = Vec::new();
    let trace = boot(&image, &log, &mut rows)?;
    for kind in REPEATED {
        eprintln!("packing: repeating its writes, {kind:?}");
        let clone = Cloned::of(&image, kind)?;
        let mut connection = clone.daemon.connect("clone")?;
        for (stage, name) in STAGES.iter().enumerate() {
            trace.repeat(stage, &mut connection)?;
            rows.push(clone.figures(name, "repeated", &trace.written(stage))?);
        }
    }
    Ok(rows)
}

/// Boots the image's clone and takes figures at each stage.
fn boot(image: &Image, log: &Path, rows: &mut Vec<Value>) -> Result<Trace> {
    let clone = Cloned::of(image, BOOTED)?;
    let script = log.with_file_name("stages");
    let mut lines = stages().into_bytes();
    // A disk has whole sectors.
    lines.resize(lines.len().next_multiple_of(512), b'\n');
    fs::write(&script, lines)?;
    let mut running = Vm::new("packing")
        .limit(LIMIT)
        .words(WORDS)
        .script_as_first_process()
        .drive(Drive::LoggedNbd {
            socket: clone.daemon.nbd_socket(),
            export: "clone".to_owned(),
            log: log.to_path_buf(),
        })
        .drive(Drive::File(image.packages.clone()))
        .drive(Drive::File(script))
        .start(SWITCH)?;
    let mut trace = Trace::default();
    for (number, stage) in STAGES.into_iter().enumerate() {
        running.wait_for(&format!("stage {stage}"))?;
        trace.reached(log)?;
        eprintln!("packing: the guest has {stage}");
        rows.push(clone.figures(stage, "booted", &trace.written(number))?);
        running.send("go")?;
    }
    running.finish()?;
    Ok(trace)
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value} is no number of bytes"))
}
