//! Cells without a pool: a call that made or deleted one was interrupted. There is nothing in them
//! that could be lost, so any host that has the lease goes on with the call.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use blockd_hosts::{Cell, Holder, HostsError};
use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::error::MapperError;
use blockd_mapper::format::claim::{CLAIM_OFFSET, ClaimPage};
use blockd_mapper::geometry::PAGE_SIZE;
use blockd_media::MARKED_BYTES;
use blockd_media::error::{Error, shown};

use super::groups::Group;
use super::handing_on::refuse_owned;
use super::{Control, blocking};

/// Bytes that are read at a time: the first ones have the superblock, and the claim.
const PIECE_BYTES: usize = 64 << 10;

/// No pool needs as much for what is not data.
const LARGE_BYTES: u64 = 1 << 40;

impl Control {
    /// The cell of an interrupted call that made it, which this host has then. Others are refused.
    pub(super) async fn begun_cell(&self, group: &Arc<Group>, cell: Cell) -> Result<Cell, Error> {
        let Some(held) = self.acquire_unmade(group, &cell).await? else {
            if cell.is_new || matches!(cell.holder, Holder::Unknown(_)) {
                return Err(unmade(group, &cell));
            }
            let problem = "exists: `blockd cell take` opens it";
            return Err(Error::in_use(format!("cell {}", cell.name), problem));
        };
        // Of a former pool, which there is not.
        self.note_taking(group, &held.name, None).await?;
        Ok(held)
    }

    /// Prepares the device of a cell for a pool.
    pub(super) async fn clear_cell(&self, cell: &Cell) -> Result<(), Error> {
        let path = cell.path.clone();
        let cleared = blocking(move || {
            // A call that has failed may have IO in flight still.
            refuse_owned(std::slice::from_ref(&path))?;
            clear_ends(&path)
        });
        cleared.await
    }

    /// Takes the lease of a cell that no other host has and that has no pool; `None` for others,
    /// whose leases stay.
    pub(super) async fn acquire_unmade(
        &self,
        group: &Arc<Group>,
        cell: &Cell,
    ) -> Result<Option<Cell>, Error> {
        if !is_obtainable(group, cell) || self.pool_in(cell).is_some() {
            return Ok(None);
        }
        let held = self.acquire_cell(group, &cell.name).await?;
        let is_unmade = match held.is_new {
            true => Ok(true),
            false => self.is_unmade(&held).await,
        };
        if matches!(is_unmade, Ok(true)) {
            return Ok(Some(held));
        }
        // Its pool may be one that only another host can open.
        if cell.holder == Holder::Free {
            let name = cell.name.clone();
            self.coordinate(group, move |leases| leases.release(&name)).await?;
        }
        is_unmade.map(|_| None)
    }

    /// Whether a cell that this host has is without a pool, by its device.
    pub(super) async fn is_unmade(&self, cell: &Cell) -> Result<bool, Error> {
        let path = cell.path.clone();
        blocking(move || {
            holds_no_pool(&path).map_err(|error| Error::file("read the ends of", &path, error))
        })
        .await
    }
}

/// Whether this host has a cell, or can take it without another one.
pub(super) fn is_obtainable(group: &Group, cell: &Cell) -> bool {
    match &cell.holder {
        Holder::This | Holder::Free => true,
        // From before this host's last boot.
        Holder::Other(owner) => owner.host == group.host(),
        Holder::Unknown(_) => false,
    }
}

/// The error of a cell that has no pool to open.
pub(super) fn unmade(group: &Group, cell: &Cell) -> Error {
    let problem = match &cell.holder {
        Holder::Unknown(problem) => {
            let (cell, problem) = (cell.name.clone(), problem.clone());
            return HostsError::NotKnown { cell, problem }.into();
        }
        Holder::Other(owner) if owner.host != group.host() => format!(
            "was not made to the end: `blockd cell create` on host {host} finishes it, or \
             `blockd node declare-dead {group}/{host}` frees it if that host is dead",
            host = owner.host,
            group = shown(&group.name)
        ),
        _ => "was not made to the end: `blockd cell create` finishes it".to_owned(),
    };
    Error::in_use(format!("cell {}", cell.name), problem)
}

/// Refuses a device that is too small for a pool. Before it is made: the claim of a pool is the
/// first part of it that is written. `what`: the size, as the caller has named it.
pub(super) fn check_size(what: &str, bytes: u64, extent_size: u32) -> Result<(), Error> {
    // More than a pool may have is more than a group has, which says so.
    if bytes > LARGE_BYTES {
        return Ok(());
    }
    let (uuid, name) = ([1; 16], what.to_owned());
    let device = NewDevice { name, uuid, size: bytes, block_size: 4096, class: 0 };
    let options = CreateOptions { extent_size, ..CreateOptions::single(uuid, device) };
    match Creating::new(&options) {
        Err(MapperError::DeviceSize { allowed, .. }) => Err(Error::invalid(what, bytes, allowed)),
        planned => Ok(planned.map(drop)?),
    }
}

/// Whether both ends of a device are zeroes, but for the claim of a pool: its making or erasure has
/// stopped there. Blocks.
fn holds_no_pool(path: &Path) -> std::io::Result<bool> {
    let file = File::open(path)?;
    let end = std::io::Seek::seek(&mut &file, std::io::SeekFrom::End(0))?;
    let mut piece = vec![0; PIECE_BYTES];
    let tail = end.saturating_sub(MARKED_BYTES).max(MARKED_BYTES);
    for (start, end) in [(0, end.min(MARKED_BYTES)), (tail, end)] {
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(usize::MAX).min(piece.len());
            let part = &mut piece[..length];
            file.read_exact_at(part, at)?;
            if at == 0 {
                blank_claim(part);
            }
            if part.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
            at += length as u64;
        }
    }
    Ok(true)
}

/// Overwrites a claim in the first bytes of a device.
fn blank_claim(first: &mut [u8]) {
    let at = usize::try_from(CLAIM_OFFSET).unwrap_or(usize::MAX);
    let page = first.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<PAGE_SIZE>());
    if let Some(page) = page
        && matches!(ClaimPage::decode(page), ClaimPage::Claim(_))
    {
        page.fill(0);
    }
}

/// Overwrites both ends of a cell's device: its space may have been another cell's, whose
/// superblocks would be found there. Blocks.
fn clear_ends(path: &Path) -> Result<(), Error> {
    let failed = |error| Error::file("clear the ends of", path, error);
    let clear = || {
        let file = File::options().write(true).read(true).open(path)?;
        let end = std::io::Seek::seek(&mut &file, std::io::SeekFrom::End(0))?;
        let zeroes = vec![0; usize::try_from(MARKED_BYTES).unwrap_or(usize::MAX)];
        for at in [0, end.saturating_sub(MARKED_BYTES)] {
            let length = zeroes.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
            file.write_all_at(&zeroes[..length], at)?;
        }
        file.sync_all()
    };
    clear().map_err(failed)
}
