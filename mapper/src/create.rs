//! Making a new pool: its parts are laid out, the log's place is cleared, the superblocks written.

use std::collections::VecDeque;

use crate::error::MapperError;
use crate::format::superblock::{
    COMPOSITE, DeviceRecord, DeviceState, DeviceTable, Superblock, copy_offsets,
};
use crate::format::{FORMAT_MAJOR, FORMAT_MINOR, PageRef};
use crate::geometry::{
    DEFAULT_EXTENT_SIZE, DEVICE_SHIFT, EXTENT_SIZE_RANGE, Geometry, MAX_DEVICES,
};
use crate::io::{IoBuffer, IoCommand, IoError, IoOp};
use crate::units::{DeviceIndex, Epoch, Lsn, PhysicalExtent};

/// Zeroes written at a time where the log will be.
const CLEAR_PAGES: usize = 64;

/// A device as it joins a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewDevice {
    /// The caller's name for it, for messages.
    pub name: String,
    /// Its identity from now on.
    pub uuid: [u8; 16],
    /// Bytes.
    pub size: u64,
    /// Its logical block in bytes.
    pub block_size: u32,
    /// The kind of storage; only the caller interprets the number.
    pub class: u8,
}

/// The parameters of a new pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CreateOptions {
    /// Random identity of the pool.
    pub pool_id: [u8; 16],
    /// Bytes of an extent.
    pub extent_size: u32,
    /// 1 to 16 devices.
    pub devices: Vec<NewDevice>,
    /// Bytes of the log; [`Geometry::default_wal_size`] by default.
    pub wal_size: Option<u64>,
    /// Bytes kept for metadata; [`Geometry::default_reserve_size`] by default.
    pub reserve_size: Option<u64>,
    /// The node that makes it.
    pub node: u32,
    /// Whether the first write of a shared extent lays an extent over it instead of copying it.
    pub composite: bool,
}

impl CreateOptions {
    /// A pool of one device with default sizes.
    #[must_use]
    pub fn single(pool_id: [u8; 16], device: NewDevice) -> Self {
        Self {
            pool_id,
            extent_size: DEFAULT_EXTENT_SIZE,
            devices: vec![device],
            wal_size: None,
            reserve_size: None,
            node: 0,
            composite: false,
        }
    }
}

/// The making of a pool, stepped by the caller like the engine. Everything it writes is physically
/// there afterwards: log, reserve and superblocks never wait for space below.
#[derive(Debug)]
pub struct Creating {
    queue: VecDeque<IoCommand>,
    /// Groups of commands; each starts when the one before it has ended.
    stages: VecDeque<Vec<(DeviceIndex, Work)>>,
    out: usize,
    next: u64,
    superblock: Superblock,
    failure: Option<MapperError>,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Fence,
    Clear { offset: u64, pages: usize },
    Super { offset: u64 },
    Flush,
}

impl Creating {
    /// Checks the options and plans the work. Nothing is written before [`Self::poll`].
    pub fn new(options: &CreateOptions) -> Result<Self, MapperError> {
        let geometry = Geometry::new(options.extent_size)?;
        let superblock = first_superblock(geometry, options)?;
        let mut creating = Self {
            queue: VecDeque::new(),
            stages: VecDeque::new(),
            out: 0,
            next: 1,
            superblock,
            failure: None,
        };
        creating.plan(geometry);
        Ok(creating)
    }

    /// The next IO command.
    pub fn poll(&mut self) -> Option<IoCommand> {
        while self.failure.is_none() && self.queue.is_empty() && self.out == 0 {
            let stage = self.stages.pop_front()?;
            for (device, work) in stage {
                self.push(device, work);
            }
        }
        let command = self.queue.pop_front()?;
        self.out += 1;
        Some(command)
    }

    /// Takes a command back with its result.
    pub fn complete(&mut self, command: IoCommand, result: Result<(), IoError>) {
        self.out = self.out.saturating_sub(1);
        if let Err(error) = result {
            let (operation, device) = (command.op.name(), command.device.0);
            self.failure.get_or_insert(MapperError::Io { operation, device, error });
            self.queue.clear();
            self.stages.clear();
        }
    }

    /// Whether there is nothing left to do.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.out == 0 && self.queue.is_empty() && self.stages.is_empty()
    }

    /// How it ended.
    pub fn finish(self) -> Result<(), MapperError> {
        match self.failure {
            Some(failure) => Err(failure),
            None if self.is_done() => Ok(()),
            None => Err(MapperError::Internal("the pool is not made yet")),
        }
    }

    fn plan(&mut self, geometry: Geometry) {
        let devices: Vec<DeviceRecord> = self.superblock.devices.as_slice().to_vec();
        let indices: Vec<DeviceIndex> = (0..).map(DeviceIndex).take(devices.len()).collect();
        self.stages.push_back(indices.iter().map(|&d| (d, Work::Fence)).collect());
        // An old superblock must not be found beside a half-made pool.
        let mut clear = Vec::new();
        // Nor one at the end of a pool with extents of another size.
        for (&index, device) in indices.iter().zip(&devices) {
            clear.push((index, Work::Clear { offset: 0, pages: 2 }));
            let mut extent = *EXTENT_SIZE_RANGE.start();
            while extent <= *EXTENT_SIZE_RANGE.end() {
                if let Some(last) = (device.size / u64::from(extent)).checked_sub(1) {
                    let offset = last * u64::from(extent);
                    clear.push((index, Work::Clear { offset, pages: 2 }));
                }
                extent *= 2;
            }
        }
        let runs = [
            (self.superblock.wal_start, self.superblock.wal_extents),
            (self.superblock.reserve_start, self.superblock.reserve_extents),
        ];
        for (start, extents) in runs {
            let first = start.0 * geometry.extent_size();
            let end = first + u64::from(extents) * geometry.extent_size();
            let step = CLEAR_PAGES as u64 * crate::geometry::PAGE_BYTES;
            let mut offset = first;
            while offset < end {
                let len = step.min(end - offset);
                let pages =
                    usize::try_from(len / crate::geometry::PAGE_BYTES).unwrap_or(CLEAR_PAGES);
                clear.push((DeviceIndex(0), Work::Clear { offset, pages }));
                offset += len;
            }
        }
        // One after the other: the log may be 64 MiB and a command carries its memory.
        for work in clear {
            self.stages.push_back(vec![work]);
        }
        let flush: Vec<_> = indices.iter().map(|&d| (d, Work::Flush)).collect();
        self.stages.push_back(flush.clone());
        for first in [true, false] {
            let mut copies = Vec::new();
            for (&index, device) in indices.iter().zip(&devices) {
                let offsets = copy_offsets(geometry, device.extents);
                let pair = if first { offsets.first_pair } else { offsets.second_pair };
                copies.extend(pair.map(|offset| (index, Work::Super { offset })));
            }
            self.stages.push_back(copies);
            self.stages.push_back(flush.clone());
        }
    }

    fn push(&mut self, device: DeviceIndex, work: Work) {
        let buffer = |pages| {
            IoBuffer::new(pages).ok_or(MapperError::Limit { what: "memory for IO", limit: 0 })
        };
        let op = match work {
            Work::Fence => Ok(IoOp::Fence),
            Work::Flush => Ok(IoOp::Flush),
            Work::Clear { offset, pages } => {
                buffer(pages).map(|buffer| IoOp::Write { offset, buffer, fua: false })
            }
            Work::Super { offset } => buffer(1).map(|mut buffer| {
                let copy = Superblock { this_device: device, ..self.superblock.clone() };
                copy.encode(&mut buffer.pages_mut()[0]);
                IoOp::Write { offset, buffer, fua: false }
            }),
        };
        match op {
            Ok(op) => {
                self.queue.push_back(IoCommand { id: self.next, device, op });
                self.next += 1;
            }
            Err(error) => self.failure = Some(error),
        }
    }
}

/// The record of a device in the table, at this position.
pub(crate) fn device_record(
    geometry: Geometry,
    index: usize,
    device: &NewDevice,
) -> Result<DeviceRecord, MapperError> {
    let extents = device.size / geometry.extent_size();
    let refuse = |problem: String| MapperError::Device { name: device.name.clone(), problem };
    if !(3..=1 << DEVICE_SHIFT).contains(&extents) {
        return Err(MapperError::DeviceSize {
            name: device.name.clone(),
            size: device.size,
            allowed: format!(
                "from 3 to 2^{DEVICE_SHIFT} extents of {} bytes",
                geometry.extent_size()
            ),
        });
    }
    if !device.block_size.is_power_of_two() || !(512..=4096).contains(&device.block_size) {
        return Err(refuse(format!(
            "logical block of {} bytes: must be 512 to 4096",
            device.block_size
        )));
    }
    Ok(DeviceRecord {
        uuid: device.uuid,
        size: device.size,
        first: PhysicalExtent((index as u64) << DEVICE_SHIFT),
        extents,
        block_size: device.block_size,
        class: device.class,
        state: DeviceState::InUse,
        keeps: 0,
    })
}

fn first_superblock(
    geometry: Geometry,
    options: &CreateOptions,
) -> Result<Superblock, MapperError> {
    let mut records = Vec::new();
    for (index, device) in options.devices.iter().enumerate() {
        records.push(device_record(geometry, index, device)?);
        if options.devices[..index].iter().any(|other| other.uuid == device.uuid) {
            let problem = "has the identity of another device of the pool".to_owned();
            return Err(MapperError::Device { name: device.name.clone(), problem });
        }
    }
    let devices = DeviceTable::new(&records).ok_or(MapperError::Invalid {
        field: "devices",
        value: records.len() as u64,
        allowed: "1 to 16 devices",
    })?;
    debug_assert!(records.len() <= MAX_DEVICES, "the table takes no more");
    let size: u64 = records.iter().map(|r| r.extents * geometry.extent_size()).sum();
    let wal = extents_of(geometry, options.wal_size, geometry.default_wal_size(size), "wal_size")?;
    let reserve = extents_of(
        geometry,
        options.reserve_size,
        geometry.default_reserve_size(size),
        "reserve_size",
    )?;
    // Both superblock areas, the log, the reserve, and one extent that a volume can have.
    let needed = 2 + u64::from(wal) + u64::from(reserve) + 1;
    if records[0].extents < needed {
        return Err(MapperError::DeviceSize {
            name: options.devices[0].name.clone(),
            size: records[0].size,
            allowed: format!(
                "at least {} bytes: the pool's first device has log, reserve and superblocks",
                needed * geometry.extent_size()
            ),
        });
    }
    Ok(Superblock {
        pool_id: options.pool_id,
        generation: 1,
        previous_sum: 0,
        major: FORMAT_MAJOR,
        minor: FORMAT_MINOR,
        compat: 0,
        ro_compat: 0,
        incompat: if options.composite { COMPOSITE } else { 0 },
        extent_size: options.extent_size,
        node: options.node,
        epoch: Epoch(0),
        clean: true,
        open_id: 0,
        boot_id: [0; 16],
        devices,
        this_device: DeviceIndex(0),
        wal_start: PhysicalExtent(1),
        wal_extents: wal,
        wal_tail_sequence: 1,
        wal_tail_hash: 0,
        checkpoint_lsn: Lsn(0),
        catalogue_root: PageRef::NONE,
        catalogue_levels: 0,
        labels_root: PageRef::NONE,
        catalogue_records: 0,
        next_volume_id: 1,
        reserve_start: PhysicalExtent(1 + u64::from(wal)),
        reserve_extents: reserve,
    })
}

fn extents_of(
    geometry: Geometry,
    size: Option<u64>,
    default: u64,
    field: &'static str,
) -> Result<u32, MapperError> {
    let size = size.unwrap_or(default);
    let allowed = "a multiple of the extent size, from one extent to 1 GiB";
    if size == 0 || size > 1 << 30 || !size.is_multiple_of(geometry.extent_size()) {
        return Err(MapperError::Invalid { field, value: size, allowed });
    }
    u32::try_from(size / geometry.extent_size()).map_err(|_| MapperError::Invalid {
        field,
        value: size,
        allowed,
    })
}
