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
    let copies = copies(pool_id, devices);
    let first = copies.iter().find(|(_, copy)| copy.this_device == DeviceIndex(0));
    if let Some((first, _)) = first {
        devices.check_unused(pool_id, *first, spec.claim_wait)?;
    }
    let path = ring_path(&spec.ring_dir, pool_id);
    let problem = check_storage(spec, &path, &copies, devices)?;
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

/// The newest superblock of each of the pool's devices. Devices of other pools are left out: the
/// opening refuses them by name.
fn copies(pool_id: &[u8; 16], devices: &mut Offline) -> Vec<(DeviceIndex, Superblock)> {
    let mut copies = Vec::new();
    for (index, present) in (0..).zip(devices.present().to_vec()) {
        let device = DeviceIndex(index);
        let copy = newest_copy(devices, device, &present);
        copies.extend(copy.filter(|copy| copy.pool_id == *pool_id).map(|copy| (device, copy)));
    }
    copies
}

/// Why the ring is not to be replayed, where one of the disks was restarted.
fn check_storage(
    spec: &PoolSpec,
    ring: &Path,
    copies: &[(DeviceIndex, Superblock)],
    devices: &Offline,
) -> Result<Option<String>, PoolError> {
    let Some((_, newest)) = copies.iter().max_by_key(|(_, copy)| copy.generation) else {
        return Ok(None);
    };
    let sequences = copies.iter().filter_map(|(device, copy)| {
        let present = devices.present().get(usize::from(device.0))?;
        Disk::of(copy, devices.disk_sequence(*device)?, Path::new(&present.name))
    });
    let sequences: Vec<_> = sequences.collect();
    storage::check(spec, ring, newest, &boot_id()?, &sequences)
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;

    use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
    use blockd_mapper::format::Place;
    use blockd_mapper::io::Page;

    use super::*;
    use crate::pool::Access;
    use crate::{DeviceKind, DeviceSpec};

    const SIZE: u64 = 16 << 20;

    /// A pool of one file, with the change in all copies of its superblock.
    fn pool(path: &Path, id: u8, change: impl Fn(&mut Superblock)) {
        let device = NewDevice {
            name: "disk".into(),
            uuid: [id; 16],
            size: SIZE,
            block_size: 512,
            class: 0,
        };
        let file = std::fs::File::create(path).unwrap();
        file.set_len(SIZE).unwrap();
        let mut creating = Creating::new(&CreateOptions {
            pool_id: [id; 16],
            extent_size: 64 << 10,
            devices: vec![device],
            wal_size: None,
            reserve_size: None,
            node: 0,
            composite: false,
        })
        .unwrap();
        while let Some(command) = creating.poll() {
            if let IoOp::Write { offset, buffer, .. } = &command.op {
                let mut bytes = buffer.as_bytes().to_vec();
                for bytes in bytes.chunks_exact_mut(4096) {
                    if let Ok(mut copy) = Superblock::decode(bytes, Place::Memory) {
                        change(&mut copy);
                        let mut page = Page::zeroed();
                        copy.encode(&mut page);
                        bytes.copy_from_slice(&page.0);
                    }
                }
                file.write_all_at(&bytes, *offset).unwrap();
            }
            creating.complete(command, Ok(()));
        }
        creating.finish().unwrap();
    }

    #[test]
    fn a_newer_superblock_of_another_pool_says_nothing_about_the_ring() {
        let folder = std::env::temp_dir().join(format!("blockd-rehearse-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let paths: [PathBuf; 2] = ["own", "foreign"].map(|name| folder.join(name));
        let boot_id = boot_id().unwrap();
        pool(&paths[0], 1, |_| {});
        pool(&paths[1], 2, |copy| {
            copy.generation += 9;
            (copy.clean, copy.boot_id, copy.open_id) = (false, boot_id, 7);
        });
        // A list of disks by which a ring that is to be replayed would be in doubt.
        let ring = ring_path(&folder, &[1; 16]);
        std::fs::write(storage::file_of(&ring), vec![b'x'; 1 << 15]).unwrap();
        let spec = |path: &PathBuf| DeviceSpec {
            path: path.clone(),
            kind: DeviceKind::File,
            size: None,
            preallocate: false,
            direct: false,
        };
        let spec = PoolSpec::new("replay", spec(&paths[0]), folder.clone());
        let mut devices = Offline::open(&paths, Access::Read, spec.claim_wait).unwrap();
        let error = rehearse(&spec, &[1; 16], &mut devices).unwrap_err().to_string();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains("belongs to pool 0202"), "{error}");
    }
}
