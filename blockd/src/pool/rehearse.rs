//! Opens a pool as the daemon does, without a write: to its devices, or to its delta ring.

use std::sync::Arc;

use blockd_mapper::inspect::Media;
use blockd_mapper::io::{IoCommand, IoError, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, OpenReport, Opening};
use blockd_mapper::pool::Tuning;
use blockd_mapper::ring::RingMemory;

use super::open::{boot_id, ring_path};
use super::ring_file::RingFile;
use super::{MAX_WORKERS, Offline, PoolError, PoolSpec};

/// Replays log and delta ring into memory. The report, and the error where there is one, are those
/// of [`open`](super::open()) with the same spec, whose devices are `devices`. `pool_id` is the
/// pool's, which names the ring's file.
pub fn rehearse(
    spec: &PoolSpec,
    pool_id: &[u8; 16],
    devices: &mut Offline,
) -> Result<OpenReport, PoolError> {
    let path = ring_path(&spec.ring_dir, pool_id);
    let ring: Arc<dyn RingMemory> = RingFile::copy(&path, MAX_WORKERS, spec.ring_records)?;
    let mut opening = Opening::new(OpenOptions {
        devices: devices.present().to_vec(),
        mode: OpenMode::ReadOnly,
        ring: Some(ring),
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
    Ok(opening.finish()?.report)
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
