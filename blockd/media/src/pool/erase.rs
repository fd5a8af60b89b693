//! Erases a pool from its devices, so that they are found unused. The pool's owner has given it up
//! before: what is erased here can't be had back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockd_inspect::{MediaMut, newest_copy};
use blockd_mapper::format::claim::{CLAIM_OFFSET, Claim, ClaimPage, ClaimState};
use blockd_mapper::format::superblock::{Superblock, copy_offsets};
use blockd_mapper::geometry::{Geometry, PAGE_SIZE};
use blockd_mapper::io::IoError;
use blockd_mapper::units::DeviceIndex;

use crate::device::MARKED_BYTES;

use super::{Access, Offline, PoolError};

/// Zeroes that are written at a time.
const PIECE_BYTES: u64 = 64 << 10;

/// The devices of a pool that is about to be erased, locked and claimed.
#[derive(Debug)]
pub struct Erasing {
    devices: Offline,
    /// Positions of the pool's devices, and what is on them.
    members: Vec<(usize, Superblock)>,
    pool_id: [u8; 16],
}

impl Erasing {
    /// Locks the devices at these paths that hold the pool. Others are left as they are; `None`
    /// where the first device is not among them, which has the pool's claim. `leased_until_ns`: as
    /// of [`PoolSpec`](super::PoolSpec).
    pub fn open(
        paths: &[PathBuf],
        pool_id: &[u8; 16],
        claim_wait: Duration,
        leased_until_ns: u64,
    ) -> Result<Option<Self>, PoolError> {
        // Opened for writing, also a device that does not belong to the pool would get a claim.
        let mut of_pool = Vec::new();
        for path in paths {
            if holds(path, pool_id)? {
                of_pool.push(path.clone());
            }
        }
        if of_pool.is_empty() {
            return Ok(None);
        }
        let mut devices = Offline::open_as(&of_pool, Access::Write, claim_wait, leased_until_ns)?;
        let members = without_departed(members(&mut devices, pool_id));
        let has_first = members.iter().any(|(_, copy)| copy.this_device == DeviceIndex(0));
        Ok(has_first.then_some(Self { devices, members, pool_id: *pool_id }))
    }

    /// Erases them durably, the superblocks first. Files in `remove` are removed as well, while
    /// they are locked. Gives the paths of the pool's devices.
    pub fn erase(mut self, remove: &[PathBuf]) -> Result<Vec<PathBuf>, PoolError> {
        let members = std::mem::take(&mut self.members);
        for (at, copy) in &members {
            self.on(*at, |devices, device| erase_copies(devices, device, copy))?;
        }
        let paths: Vec<_> = members.iter().map(|(at, _)| self.path(*at)).collect();
        for (at, _) in &members {
            let size = self.devices.present()[*at].size;
            self.on(*at, |devices, device| erase_ends(devices, device, size))?;
        }
        let (removed, kept): (Vec<PathBuf>, Vec<PathBuf>) =
            paths.iter().cloned().partition(|path| remove.contains(path));
        for path in removed {
            std::fs::remove_file(&path).map_err(PoolError::io("remove", &path))?;
            let folder = path.parent().unwrap_or_else(|| Path::new("/"));
            let synced = File::open(folder).and_then(|folder| folder.sync_all());
            synced.map_err(PoolError::io("sync", folder))?;
        }
        // The claim, which is given up with the devices, is a page of its own.
        drop(self.devices);
        for path in &kept {
            erase_claim(path, &self.pool_id).map_err(PoolError::io("erase claim of", path))?;
        }
        Ok(paths)
    }

    fn path(&self, at: usize) -> PathBuf {
        PathBuf::from(&self.devices.present()[at].name)
    }

    fn on(
        &mut self,
        at: usize,
        erase: impl FnOnce(&mut Offline, DeviceIndex) -> Result<(), IoError>,
    ) -> Result<(), PoolError> {
        let device = DeviceIndex(u8::try_from(at).unwrap_or(u8::MAX));
        let erased = erase(&mut self.devices, device).and_then(|()| self.devices.flush(device));
        let path = self.path(at);
        erased.map_err(|error| PoolError::io("erase", path)(std::io::Error::other(error)))
    }
}

/// Whether the device at a path is one of the pool. It is only read; none where nothing is there.
fn holds(path: &Path, pool_id: &[u8; 16]) -> Result<bool, PoolError> {
    if !path.try_exists().map_err(PoolError::io("find", path))? {
        return Ok(false);
    }
    let mut device = Offline::open(&[path.to_path_buf()], Access::Look, Duration::ZERO)?;
    Ok(!members(&mut device, pool_id).is_empty())
}

/// Positions of the pool's devices, and what is on them.
fn members(devices: &mut Offline, pool_id: &[u8; 16]) -> Vec<(usize, Superblock)> {
    let present = devices.present().to_vec();
    let mut members = Vec::new();
    for (at, one) in present.iter().enumerate() {
        let device = DeviceIndex(u8::try_from(at).unwrap_or(u8::MAX));
        let found = newest_copy(devices, device, one);
        members.extend(found.filter(|copy| copy.pool_id == *pool_id).map(|copy| (at, copy)));
    }
    members
}

/// The copies of devices that the newest one has in its table: one that has left may be used for
/// something else.
fn without_departed(members: Vec<(usize, Superblock)>) -> Vec<(usize, Superblock)> {
    let newest = members.iter().map(|(_, copy)| copy).max_by_key(|copy| copy.generation);
    let Some(table) = newest.map(|newest| newest.devices) else { return members };
    let is_present = |copy: &Superblock| {
        let own = copy.devices.as_slice().get(usize::from(copy.this_device.0));
        own.is_some_and(|own| table.present().any(|(_, record)| record.uuid == own.uuid))
    };
    members.into_iter().filter(|(_, copy)| is_present(copy)).collect()
}

/// Erases all copies of the superblock on a device.
fn erase_copies(
    devices: &mut Offline,
    device: DeviceIndex,
    copy: &Superblock,
) -> Result<(), IoError> {
    let records = copy.devices.as_slice();
    let record = records.get(usize::from(copy.this_device.0)).ok_or(IoError::Media)?;
    let geometry = Geometry::new(copy.extent_size).map_err(|_| IoError::Media)?;
    let offsets = copy_offsets(geometry, record.extents);
    for offset in offsets.first_pair.into_iter().chain(offsets.second_pair) {
        devices.write(device, offset, &[0; PAGE_SIZE])?;
    }
    Ok(())
}

/// Erases the beginning and the end of a device, but for its claim.
fn erase_ends(devices: &mut Offline, device: DeviceIndex, size: u64) -> Result<(), IoError> {
    let zeroes = vec![0; usize::try_from(PIECE_BYTES).unwrap_or(PAGE_SIZE)];
    let size = size / PAGE_SIZE as u64 * PAGE_SIZE as u64;
    let behind_claim = CLAIM_OFFSET + PAGE_SIZE as u64;
    let tail = size.saturating_sub(MARKED_BYTES).max(behind_claim);
    for (start, end) in [(behind_claim, size.min(MARKED_BYTES)), (tail, size)] {
        let mut at = start;
        while at < end {
            let length = usize::try_from((end - at).min(PIECE_BYTES)).unwrap_or(PAGE_SIZE);
            devices.write(device, at, &zeroes[..length])?;
            at += length as u64;
        }
    }
    Ok(())
}

/// Erases the claim that this host has just given up. Until then another host finds the device in
/// use, and makes no pool on it.
fn erase_claim(path: &Path, pool_id: &[u8; 16]) -> std::io::Result<()> {
    if !std::fs::metadata(path)?.is_file() && !is_block_device(path)? {
        return Ok(());
    }
    let file = File::options().read(true).write(true).open(path)?;
    let mut page = [0; PAGE_SIZE];
    file.read_exact_at(&mut page, CLAIM_OFFSET)?;
    match ClaimPage::decode(&page) {
        ClaimPage::Claim(Claim { state: ClaimState::Free, pool_id: of, .. }) if of == *pool_id => {
            file.write_all_at(&[0; PAGE_SIZE], CLAIM_OFFSET)?;
            file.sync_all()
        }
        _ => Ok(()),
    }
}

fn is_block_device(path: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::FileTypeExt;
    Ok(std::fs::metadata(path)?.file_type().is_block_device())
}
