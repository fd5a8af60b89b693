//! Opens a pool as the daemon does, without a write: to its devices, or to its delta ring.

use std::path::Path;
use std::sync::Arc;

use blockd_inspect::{Media, newest_copy};
use blockd_mapper::format::superblock::Superblock;
use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, OpenReport, Opening};
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::RingMemory;
use blockd_mapper::units::DeviceIndex;

use super::ring_file::RingFile;
use super::storage::Disk;
use super::{MAX_WORKERS, Offline, PoolError, PoolSpec, storage};
use crate::pool::boot_id;
use crate::pool::ring_file::ring_path;

/// Replays log and delta ring into memory. The report, and the error where there is one, are those
/// of opening the pool with the same spec, whose devices are `devices`. `pool_id` is the pool's,
/// which names the ring's file.
pub fn rehearse(
    spec: &PoolSpec,
    pool_id: &[u8; 16],
    devices: &mut Offline,
) -> Result<OpenReport, PoolError> {
    let first = (0..).zip(devices.present().to_vec()).find_map(|(index, present)| {
        let device = DeviceIndex(index);
        let copy = newest_copy(devices, device, &present)?;
        (copy.this_device == DeviceIndex(0)).then_some(device)
    });
    if let Some(first) = first {
        devices.check_unused(pool_id, first, spec.claim_wait)?;
    }
    let path = ring_path(&spec.ring_dir, pool_id);
    let problem = check_storage(spec, &path, devices)?;
    let ring: Option<Arc<dyn RingMemory>> = match problem {
        Some(_) => None,
        None => Some(RingFile::copy(&path, MAX_WORKERS, spec.ring_records)?),
    };
    let mut opening = Opening::new(OpenOptions {
        devices: devices.present().to_vec(),
        mode: OpenMode::ReadOnly,
        ring,
        boot_id: boot_id()?,
        open_id: fastrand::u64(1..),
        accept_loss: spec.accept_loss,
        node: spec.node,
        tuning: Tuning { workers: MAX_WORKERS, ..Tuning::default() },
    })?;
    while let Some(mut command) = opening.poll() {
        let result = read(devices, &mut command);
        opening.complete(command, result);
    }
    let mut report = opening.finish()?.report;
    report.ring_problem = problem.or(report.ring_problem);
    Ok(report)
}

/// Why the ring is not to be replayed, where one of the disks was restarted.
fn check_storage(
    spec: &PoolSpec,
    ring: &Path,
    devices: &mut Offline,
) -> Result<Option<String>, PoolError> {
    let (mut newest, mut sequences): (Option<Superblock>, _) = (None, Vec::new());
    for (index, present) in (0..).zip(devices.present().to_vec()) {
        let device = DeviceIndex(index);
        let Some(found) = newest_copy(devices, device, &present) else { continue };
        let sequence = devices.disk_sequence(device);
        let path = Path::new(&present.name);
        sequences.extend(sequence.and_then(|sequence| Disk::of(&found, sequence, path)));
        if newest.as_ref().is_none_or(|newest| newest.generation < found.generation) {
            newest = Some(found);
        }
    }
    newest.map_or(Ok(None), |newest| storage::check(spec, ring, &newest, &boot_id()?, &sequences))
}

/// Does a read. The tool's shared lock is the fence; a flush is a write, and is not asked for.
fn read(devices: &mut Offline, command: &mut IoCommand) -> Result<(), IoError> {
    match &mut command.op {
        IoOp::Read { offset, buffer } => {
            devices.read(command.device, *offset, buffer.as_bytes_mut())
        }
        IoOp::Fence => Ok(()),
        IoOp::Flush | IoOp::Write { .. } | IoOp::Discard { .. } => Err(IoError::Media),
    }
}
