//! Owners of a pool's extents: 16 bytes for each extent in use, in blocks of 4096 extents.

use blockd_mapper::format::superblock::{DeviceTable, Superblock};
use blockd_mapper::pool::split;
use blockd_mapper::units::PhysicalExtent;

const CHUNK: usize = 4096;

/// The owner of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Owner {
    #[default]
    Free,
    /// A superblock area or the log.
    Fixed,
    /// The run kept for metadata.
    Reserve,
    /// Pages of metadata.
    Pages,
    /// The volumes of a lineage, all at the same logical extent.
    Lineage(u32, u64),
}

/// Extents by their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Account {
    /// All extents of all devices.
    pub total: u64,
    /// Superblock areas and the log.
    pub fixed: u64,
    /// The run kept for metadata.
    pub reserve: u64,
    /// Other extents with pages of metadata.
    pub pages: u64,
    /// Extents of data.
    pub data: u64,
    /// The free extents.
    pub free: u64,
}

/// The owners of all extents.
#[derive(Debug)]
pub(crate) struct Owners {
    devices: Vec<Vec<Option<Box<[Owner]>>>>,
    table: DeviceTable,
    pub(crate) account: Account,
}

impl Owners {
    /// Only the areas that the superblock names are in use.
    pub(crate) fn new(superblock: &Superblock) -> Self {
        let table = superblock.devices;
        let chunks = |extents: u64| usize::try_from(extents.div_ceil(CHUNK as u64)).unwrap_or(0);
        let blocks = |count| std::iter::repeat_with(|| None).take(count).collect();
        let devices = table.as_slice().iter().map(|d| blocks(chunks(d.extents))).collect();
        let total = table.as_slice().iter().map(|d| d.extents).sum();
        let account = Account { total, free: total, ..Account::default() };
        let mut owners = Self { devices, table, account };
        for extent in blockd_mapper::engine::fixed_extents(superblock) {
            let _ = owners.claim(extent, Owner::Fixed);
        }
        let first = superblock.reserve_start.0;
        for extent in first..first + u64::from(superblock.reserve_extents) {
            let _ = owners.claim(PhysicalExtent(extent), Owner::Reserve);
        }
        owners
    }

    /// Returns the owner of an extent; `None` if the pool has no such extent.
    pub(crate) fn get(&self, extent: PhysicalExtent) -> Option<Owner> {
        let (device, chunk, at) = self.position(extent)?;
        let chunk = self.devices.get(device)?.get(chunk)?;
        Some(chunk.as_ref().map_or(Owner::Free, |chunk| chunk[at]))
    }

    /// Takes an extent that has no owner. Otherwise returns the owner.
    pub(crate) fn claim(&mut self, extent: PhysicalExtent, owner: Owner) -> Result<(), Owner> {
        let Some((device, chunk, at)) = self.position(extent) else { return Err(Owner::Fixed) };
        let Some(chunk) = self.devices.get_mut(device).and_then(|d| d.get_mut(chunk)) else {
            return Err(Owner::Fixed);
        };
        let chunk = chunk.get_or_insert_with(|| vec![Owner::Free; CHUNK].into());
        if chunk[at] != Owner::Free {
            return Err(chunk[at]);
        }
        chunk[at] = owner;
        let account = &mut self.account;
        let count = match owner {
            Owner::Free => return Ok(()),
            Owner::Fixed => &mut account.fixed,
            Owner::Reserve => &mut account.reserve,
            Owner::Pages => &mut account.pages,
            Owner::Lineage(..) => &mut account.data,
        };
        *count += 1;
        account.free -= 1;
        Ok(())
    }

    fn position(&self, extent: PhysicalExtent) -> Option<(usize, usize, usize)> {
        let (device, local) = split(extent);
        let record = self.table.as_slice().get(device)?;
        let local = usize::try_from(local.0).ok().filter(|_| local.0 < record.extents)?;
        Some((device, local / CHUNK, local % CHUNK))
    }
}
