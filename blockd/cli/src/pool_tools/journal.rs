//! `blockd journal`.

use std::path::PathBuf;

use blockd_inspect::{LogEnd, LogEntry, read_log};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::record::Change;
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::open::OpenReport;
use blockd_media::DeviceSpec;
use blockd_media::error::Error;
use blockd_media::place::Places;
use blockd_media::pool::{Access, PoolSpec};
use serde::Serialize;

use super::{ClaimWait, Devices, failed, reader};
use crate::Context;

/// Show or empty the log of a pool that no daemon serves
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Example:\n  blockd journal dump /var/lib/blockd/default.pool")]
pub(crate) enum Journal {
    Dump(Dump),
    Replay(Replay),
}

/// Print the changes that the log holds
///
/// One a line, from the oldest on: number of the block, LSN, what it does. Those that the trees
/// hold already are marked "done": a replay skips them. Where the log is broken, what is good is
/// printed, then where it broke, with exit code 10. Writes nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd journal dump /var/lib/blockd/default.pool")]
pub(crate) struct Dump {
    #[command(flatten)]
    devices: Devices,
}

/// Bring the trees up to date with the log, and empty it
///
/// Opens the pool as the daemon does, its delta ring included, and closes it in order. It can be
/// repeated: of a pool that is clean it does nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd journal replay /var/lib/blockd/default.pool")]
pub(crate) struct Replay {
    #[command(flatten)]
    devices: Devices,

    /// Print what a replay would do, and write nothing: log and delta ring are replayed in memory
    #[arg(long)]
    dry_run: bool,

    /// Folder of the delta ring [default: the daemon's, or /dev/shm where that is no tmpfs]
    #[arg(long, value_name = "DIR")]
    ring_dir: Option<PathBuf>,

    /// Go on without the delta ring: answered writes that were not flushed are lost
    #[arg(long)]
    accept_loss: bool,

    #[command(flatten)]
    claim: ClaimWait,
}

/// A line of `journal dump --json`.
#[derive(Debug, Serialize)]
struct Entry {
    sequence: u64,
    epoch: u64,
    lsn: u64,
    done: bool,
    volume_id: u32,
    change: String,
}

/// The last line of `journal dump --json`.
#[derive(Debug, Serialize)]
struct End {
    blocks: u64,
    changes: u64,
    pending: u64,
    broken: Option<String>,
}

/// The output of `journal replay --json`.
#[derive(Debug, Serialize)]
struct Replayed {
    changed: bool,
    log_blocks: u64,
    log_changes: u64,
    ring_changes: u64,
}

impl Journal {
    pub(crate) fn run(&self, context: &Context) -> Result<(), Error> {
        match self {
            Self::Dump(dump) => dump.run(context),
            Self::Replay(replay) => replay.run(context),
        }
    }
}

impl Dump {
    fn run(&self, context: &Context) -> Result<(), Error> {
        let mut devices = self.devices.open(Access::Read)?;
        let mut reader = reader(&mut devices)?;
        let mut printed = Ok(());
        let end = read_log(&mut reader, |entry| {
            if printed.is_ok() {
                printed = print_entry(context, entry);
            }
        });
        printed?;
        let broken = end.broken.map(|fault| fault.to_string());
        let LogEnd { blocks, changes, pending, .. } = end;
        if context.output.is_json() {
            let problem = broken.clone();
            context.output.json_line(&End { blocks, changes, pending, broken: problem })?;
        } else {
            let text =
                format!("{blocks} block(s), {changes} change(s), {pending} to be replayed\n");
            context.output.text(&text)?;
        }
        broken.map_or(Ok(()), |problem| Err(Error::Corrupt { what: "log".to_owned(), problem }))
    }
}

fn print_entry(context: &Context, entry: &LogEntry<'_>) -> Result<(), Error> {
    let change = words(entry.change);
    if context.output.is_json() {
        return context.output.json_line(&Entry {
            sequence: entry.sequence,
            epoch: entry.epoch.0,
            lsn: entry.lsn.0,
            done: entry.in_checkpoint,
            volume_id: entry.change.volume().0,
            change,
        });
    }
    let done = if entry.in_checkpoint { " done" } else { "" };
    context.output.text(&format!("{} {}{done} {change}\n", entry.sequence, entry.lsn))
}

/// A change in words. Ids, not names: that is what the log has.
fn words(change: &Change) -> String {
    match change {
        Change::Map { volume, extent, physical, valid } => {
            format!("map volume {volume} extent {extent} to {physical} valid {valid:x}")
        }
        Change::Composite { volume, extent, overlay, top, base, under } => format!(
            "map volume {volume} extent {extent} to {overlay} valid {top:x} over {base} valid \
             {under:x}"
        ),
        Change::Unmap { volume, extent } => format!("unmap volume {volume} extent {extent}"),
        Change::UnmapLeaf { volume, slot } => format!("unmap volume {volume} slot {slot}"),
        Change::Create { volume, size, block_size, made, name } => {
            let name = name.as_str();
            format!("create volume {volume} size {size} block {block_size} at {made} name {name}")
        }
        Change::Delete { volume } => format!("delete volume {volume}"),
        Change::Resize { volume, size } => format!("resize volume {volume} size {size}"),
        Change::Snapshot { volume, source, made, name } => {
            format!("snapshot {volume} of volume {source} at {made} name {}", name.as_str())
        }
        Change::Clone { volume, source, size, made, name } => {
            let name = name.as_str();
            format!("clone {volume} of volume {source} size {size} at {made} name {name}")
        }
        Change::Rollback { volume, snapshot, size } => {
            let size = size.map_or_else(String::new, |size| format!(" size {size}"));
            format!("roll back volume {volume} to snapshot {snapshot}{size}")
        }
        Change::Rename { volume, name } => format!("rename volume {volume} name {}", name.as_str()),
        Change::SnapshotGroup { volume, made, members } => {
            let each = (volume.0..).zip(members.iter());
            let each = each.map(|(id, member)| {
                format!("snapshot {id} of volume {} name {}", member.source, member.name.as_str())
            });
            format!("in one cut at {made}: {}", each.collect::<Vec<_>>().join(", "))
        }
    }
}

impl Replay {
    fn run(&self, context: &Context) -> Result<(), Error> {
        let superblock = self.superblock()?;
        if superblock.clean {
            let replayed =
                Replayed { changed: false, log_blocks: 0, log_changes: 0, ring_changes: 0 };
            let text = || "closed in order: there is nothing to replay\n".to_owned();
            return context.output.either(&replayed, text);
        }
        let mut device_specs = Vec::new();
        for path in &self.devices.paths {
            device_specs.push(device_spec(path)?);
        }
        let first = device_specs[0].clone();
        let mut spec = PoolSpec::new("replay", first, self.ring_dir());
        spec.devices = device_specs;
        spec.accept_loss = self.accept_loss;
        spec.claim_wait = self.claim.claim_wait;
        // The user who replays by hand has to ensure that its owner is gone; the replay does not
        // make this host the owner.
        spec.node = superblock.node;
        let report = if self.dry_run {
            let mut devices = self.devices.open(Access::Read)?;
            blockd_media::pool::rehearse(&spec, &superblock.pool_id, &mut devices)
                .map_err(failed)?
        } else {
            replay(context, &spec)?
        };
        let replayed = Replayed {
            changed: !self.dry_run,
            log_blocks: report.log_blocks,
            log_changes: report.log_changes,
            ring_changes: report.ring_changes,
        };
        let would = if self.dry_run { "would be " } else { "" };
        context.output.either(&replayed, || {
            format!(
                "{} change(s) {would}replayed from {} block(s) of the log, {} from the delta \
                 ring\n",
                replayed.log_changes, replayed.log_blocks, replayed.ring_changes
            )
        })
    }

    fn superblock(&self) -> Result<Superblock, Error> {
        let mut devices = self.devices.open(Access::Read)?;
        let superblock = reader(&mut devices)?.superblock().clone();
        let features = superblock.unknown_ro_compat();
        if features != 0 && !superblock.clean {
            return Err(MapperError::Unsupported { features }.into());
        }
        Ok(superblock)
    }

    fn ring_dir(&self) -> PathBuf {
        let dir = self.ring_dir.clone();
        dir.unwrap_or_else(|| blockd_media::pool::ring_dir(&Places::of_process().runtime_dir))
    }
}

/// Opens the pool, which replays log and ring, and closes it.
fn replay(context: &Context, spec: &PoolSpec) -> Result<OpenReport, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|source| Error::io("starting", source))?;
    context.program.replay(spec, &runtime).map_err(failed)
}

fn device_spec(path: &std::path::Path) -> Result<DeviceSpec, Error> {
    let kind = blockd_media::pool::kind_of(path);
    let kind = kind.map_err(|source| Error::file("cannot open", path, source))?;
    Ok(DeviceSpec { path: path.to_owned(), kind, size: None, preallocate: false, direct: true })
}
