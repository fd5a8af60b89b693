//! The view of a writer of files while a thin pool fills up: ours beside device-mapper's
//! `thin-pool`, in one machine, with the same writers.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use super::fill::{Failure, Fill};
use super::{KINDS, MIB, POOL, VOLUME, daemon_on};
use crate::vm::Drive;
use crate::workload::{MARK, Run, device_of, figures, guest, sparse};

/// How long the pool stays full: longer than the default timeout of dm-thin, which is 60 s.
const FULL: Duration = Duration::from_secs(75);
/// All of it takes some five minutes.
const BESIDE_LIMIT: Duration = Duration::from_secs(900);
/// A writer whose file takes so long does not get on.
const STUCK: Duration = Duration::from_secs(2);
/// A writer that goes on does so within this.
const GOES_ON: Duration = Duration::from_secs(15);
/// By how much pools grow.
const MORE: u64 = 96 * MIB;
/// Bytes of dm-thin's blocks: our extents have as many.
const BLOCK: u64 = 256 << 10;
/// The unit of device-mapper's tables.
const SECTOR: u64 = 512;

/// The behaviour of a full pool towards a writer.
#[derive(Clone, Copy, Debug)]
enum Side {
    /// Ours, with this policy.
    Ours(&'static str),
    /// dm-thin, with these words in its table and the name of what they mean.
    Thin(&'static str, &'static str),
}

const SIDES: [Side; 5] = [
    Side::Ours("block"),
    Side::Ours("timeout=60s"),
    Side::Ours("error"),
    Side::Thin("0", "queue_if_no_space, no_space_timeout 60"),
    Side::Thin("1 error_if_no_space", "error_if_no_space"),
];

/// The host's half.
pub(super) fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("beside")?;
    let disk = |name, bytes| Ok::<_, anyhow::Error>(Drive::File(sparse(&folder, name, bytes)?));
    let vm = run
        .machine("space-beside")?
        .limit(BESIDE_LIMIT)
        .modules(&["xfs", "dm-thin-pool"])
        .programs(&["mkfs.xfs", "xfs_repair", "dd", "dmsetup"])
        // Both let writers wait: that is what is looked at.
        .expects("blocked for more than")
        .expects("blocked in I/O wait for more than")
        .drive(disk("disk", 2 << 30)?)
        .drive(disk("data", 1 << 30)?)
        .drive(disk("metadata", 16 << 20)?);
    let mut running = vm.start(&run.inside("space-beside"))?;
    loop {
        // Every line contains nothing; rows are shown as they come.
        let line = running.wait_for("")?;
        println!("{line}");
        if line.starts_with(MARK) {
            break;
        }
    }
    Ok(figures(&running.finish()?.text)?.to_owned())
}

/// A pool with a volume for each kind of file system.
enum Pool {
    Ours(Box<Daemon>),
    Thin(&'static str),
}

impl Pool {
    fn make(side: Side) -> Result<Self> {
        match side {
            Side::Ours(policy) => {
                let daemon = daemon_on("/dev/vda", POOL)?;
                for (kind, _, _) in KINDS {
                    guest::add_device(&daemon, kind, VOLUME)?;
                    daemon.cli(&["set", kind, "--on-full", policy])?;
                }
                Ok(Self::Ours(Box::new(daemon)))
            }
            Side::Thin(features, _) => {
                guest::shell("dd if=/dev/zero of=/dev/vdc bs=1M count=1 oflag=direct status=none")?;
                guest::shell(&format!(
                    "dmsetup create --noudevsync data --table '{}'; dmsetup mknodes
                     dmsetup create --noudevsync pool --table '{}'; dmsetup mknodes",
                    data_table(POOL),
                    pool_table(POOL, features)
                ))?;
                for (number, (kind, _, _)) in KINDS.iter().enumerate() {
                    guest::shell(&format!(
                        "dmsetup message pool 0 'create_thin {number}'
                         dmsetup create --noudevsync {kind} --table \
                         '0 {} thin /dev/mapper/pool {number}'; dmsetup mknodes",
                        VOLUME / SECTOR
                    ))?;
                }
                Ok(Self::Thin(features))
            }
        }
    }

    fn device(&self, kind: &str) -> PathBuf {
        match self {
            Self::Ours(_) => device_of(kind),
            Self::Thin(_) => Path::new("/dev/mapper").join(kind),
        }
    }

    fn grow(&self) -> Result<()> {
        match self {
            Self::Ours(daemon) => {
                daemon.cli(&["pool", "grow", "--size", &format!("+{MORE}")]).map(|_| ())
            }
            Self::Thin(features) => guest::shell(&format!(
                "dmsetup suspend --noudevsync data
                 dmsetup reload data --table '{}'; dmsetup resume --noudevsync data
                 dmsetup reload pool --table '{}'
                 dmsetup suspend --noudevsync --noflush --nolockfs pool
                 dmsetup resume --noudevsync pool",
                data_table(POOL + MORE),
                pool_table(POOL + MORE, features)
            ))
            .map(|_| ()),
        }
    }

    fn remove(self) -> Result<()> {
        match self {
            Self::Ours(mut daemon) => {
                for (kind, _, _) in KINDS {
                    daemon.cli(&["del", "--force", kind])?;
                }
                ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
                guest::shell("umount /pool").map(|_| ())
            }
            Self::Thin(_) => {
                let names = "ext4 xfs pool data";
                guest::shell(&format!(
                    "for name in {names}; do dmsetup remove --noudevsync --retry $name; done"
                ))
                .map(|_| ())
            }
        }
    }
}

fn data_table(bytes: u64) -> String {
    format!("0 {} linear /dev/vdb 0", bytes / SECTOR)
}

fn pool_table(bytes: u64, features: &str) -> String {
    let (sectors, block) = (bytes / SECTOR, BLOCK / SECTOR);
    format!("0 {sectors} thin-pool /dev/vdc /dev/mapper/data {block} 0 {features}")
}

/// The guest's half.
///
/// # Errors
/// When one of ours loses a file or fails a write that should wait; dm-thin may.
pub fn inside(seed: u64) -> Result<()> {
    println!(
        "| pool | file system | while it is full | after growing | check | files |\n\
         |---|---|---|---|---|---|"
    );
    for side in SIDES {
        one(side, seed).with_context(|| format!("{side:?}"))?;
    }
    println!("{MARK}{} ways of being full compared, {} of them dm-thin's", SIDES.len(), 2);
    Ok(())
}

fn one(side: Side, seed: u64) -> Result<()> {
    let pool = Pool::make(side)?;
    let mut fills = Vec::new();
    for ((kind, make, _), seed) in KINDS.into_iter().zip(seed..) {
        let device = pool.device(kind).display().to_string();
        guest::shell(&format!(
            "{make} {device}; mkdir -p /mnt/{kind}; mount -t {kind} {device} /mnt/{kind}"
        ))?;
        fills.push(Fill::start(&Path::new("/mnt").join(kind), seed));
    }
    tools::wait_until("the pool to be full", guest::PATIENCE, || {
        let is_stuck = |fill: &Fill| fill.failure().is_some() || fill.waits() > STUCK;
        fills.iter().all(is_stuck).then_some(())
    })?;
    let begun = Clock::start();
    while begun.elapsed() < FULL && fills.iter().any(|fill| fill.failure().is_none()) {
        std::thread::sleep(Duration::from_millis(200));
    }
    let while_full: Vec<Option<Failure>> = fills.iter().map(Fill::failure).collect();
    let before: Vec<u64> = fills.iter().map(Fill::done).collect();
    pool.grow()?;
    for (number, (kind, _, check)) in KINDS.into_iter().enumerate() {
        let fill = &mut fills[number];
        let after = after_growing(kind, fill, before[number], while_full[number].as_ref());
        let device = pool.device(kind).display().to_string();
        let found = checked(kind, check, &device);
        let compared = fill.compare();
        let files = match &compared {
            Ok(files) => format!("{files}, all there"),
            Err(error) => format!("{} written; {error:#}", fill.done()),
        };
        let full = while_full[number].as_ref().map_or_else(
            || format!("waits for {} s", FULL.as_secs()),
            |failure| format!("{} after {:.0} s", failure.text, failure.after.as_secs_f64()),
        );
        let name = match side {
            Side::Ours(policy) => format!("blockd, `{policy}`"),
            Side::Thin(_, name) => format!("dm-thin, {name}"),
        };
        println!("| {name} | {kind} | {full} | {after} | {found} | {files} |");
        let _ = guest::shell(&format!("umount /mnt/{kind}"));
        if let Side::Ours(policy) = side {
            compared?;
            ensure!(
                (policy == "block") == while_full[number].is_none(),
                "{policy}: {:?}",
                while_full[number]
            );
        }
    }
    pool.remove()
}

/// Whether the writer goes on, or could, without any further action.
fn after_growing(kind: &str, fill: &mut Fill, before: u64, failure: Option<&Failure>) -> String {
    let said = if failure.is_none() {
        let went = tools::wait_until("it goes on", GOES_ON, || {
            (fill.done() > before || fill.failure().is_some()).then_some(())
        });
        match (went, fill.failure()) {
            (_, Some(failure)) => format!("fails: {}", failure.text),
            (Ok(()), None) => "goes on".to_owned(),
            (Err(_), None) => "waits on".to_owned(),
        }
    } else {
        let path = Path::new("/mnt").join(kind).join("more");
        match fs::write(&path, [1; 4096]).and_then(|()| fs::File::open(&path)?.sync_all()) {
            Ok(()) => "can be written".to_owned(),
            Err(error) => format!("can't be written: {error}"),
        }
    };
    let _ = tools::wait_until("the writer to end", GOES_ON, || fill.stop().then_some(()));
    said
}

/// Unmounts, checks and mounts, and describes each result. It stays mounted, if that succeeds.
fn checked(kind: &str, check: &str, device: &str) -> String {
    let is_clean = |line: &str| guest::shell(line).is_ok();
    if !is_clean(&format!("umount /mnt/{kind}")) {
        return "can't be unmounted".to_owned();
    }
    if is_clean(&format!("{check} {device}")) {
        let mounts = is_clean(&format!("mount -t {kind} {device} /mnt/{kind}"));
        return if mounts { "clean" } else { "clean, but can't be mounted" }.to_owned();
    }
    // Both replay their journals when they are mounted.
    if !is_clean(&format!("mount -t {kind} {device} /mnt/{kind}; umount /mnt/{kind}")) {
        return "errors, can't be mounted".to_owned();
    }
    let replayed = is_clean(&format!("{check} {device}"));
    let repaired = replayed
        || is_clean(&match kind {
            "ext4" => format!("e2fsck -fp {device} || test $? = 1"),
            _ => format!("xfs_repair {device}"),
        });
    let mounts = is_clean(&format!("mount -t {kind} {device} /mnt/{kind}"));
    match (replayed, repaired, mounts) {
        (true, _, true) => "clean once the journal was replayed".to_owned(),
        (_, true, true) => "repaired".to_owned(),
        _ => "can't be repaired".to_owned(),
    }
}
