//! The shared array: media under a write cache, and persistent reservations.

use super::parts::{
    CELLS, DEVICES, HOSTS, NONE, PATHS, Payload, Stored, Superblock, UNIT_BLOCKS, UNITS,
};

/// A key that no host has: nothing is registered.
pub const NO_KEY: u8 = 0;
/// Structures on the media, by number: superblocks, trees, logs, blocks of units, the directory.
pub const STRUCTURES: u8 = 6 + 8 + 1;

/// The array.
#[derive(Clone, Copy, Debug)]
pub struct Array {
    /// The superblock of each cell.
    pub superblocks: [Stored<Superblock>; CELLS],
    /// The tree of each cell: blocks that are mapped.
    pub trees: [Stored<u8>; CELLS],
    /// The log of each cell: blocks that are mapped.
    pub logs: [Stored<u8>; CELLS],
    /// The version in each block of each unit.
    pub data: [[Stored<u8>; UNIT_BLOCKS]; UNITS],
    /// The cell that each unit is granted to, or `NONE`.
    pub directory: Stored<[u8; UNITS]>,
    /// The key of each path of each host, on each device.
    pub keys: [[[u8; PATHS]; HOSTS]; DEVICES],
    /// The reservation is there.
    pub reserved: [bool; DEVICES],
}

impl Array {
    /// Empty cells of one unit each.
    pub fn new() -> Self {
        let superblock = Superblock { id: 1, is_clean: true, units: 1 };
        let mut directory = [NONE; UNITS];
        for (cell, unit) in (0..).zip(&mut directory[..CELLS]) {
            *unit = cell;
        }
        Self {
            superblocks: [Stored::durable(superblock); CELLS],
            trees: [Stored::durable(0); CELLS],
            logs: [Stored::durable(0); CELLS],
            data: [[Stored::durable(0); UNIT_BLOCKS]; UNITS],
            directory: Stored::durable(directory),
            keys: [[[NO_KEY; PATHS]; HOSTS]; DEVICES],
            reserved: [false; DEVICES],
        }
    }

    /// A write reaches the cache.
    pub fn land(&mut self, payload: Payload) {
        match payload {
            Payload::Data(unit, at, version) => {
                self.data[usize::from(unit)][usize::from(at)].cached = version;
            }
            Payload::Log(cell, mapped) => self.logs[usize::from(cell)].cached = mapped,
            Payload::Tree(cell, mapped) => self.trees[usize::from(cell)].cached = mapped,
            Payload::Superblock(cell, superblock) => {
                self.superblocks[usize::from(cell)].cached = superblock;
            }
            Payload::Directory(directory) => self.directory.cached = directory,
        }
    }

    /// A device writes its cache back.
    pub fn flush(&mut self, device: usize) {
        for cell in (0..CELLS).filter(|cell| cell % DEVICES == device) {
            self.superblocks[cell].flush();
            self.trees[cell].flush();
            self.logs[cell].flush();
        }
        for unit in (0..UNITS).filter(|unit| unit % DEVICES == device) {
            self.data[unit].iter_mut().for_each(Stored::flush);
        }
        if device == 0 {
            self.directory.flush();
        }
    }

    /// The array writes one structure back on its own.
    pub fn write_back(&mut self, structure: u8) {
        let at = usize::from(structure);
        match at {
            0..2 => self.superblocks[at].flush(),
            2..4 => self.trees[at - 2].flush(),
            4..6 => self.logs[at - 4].flush(),
            6..14 => self.data[(at - 6) / UNIT_BLOCKS][(at - 6) % UNIT_BLOCKS].flush(),
            _ => self.directory.flush(),
        }
    }

    /// Power is lost: each structure that was not flushed is kept or not, by a bit of `outcome`.
    pub fn lose_power(&mut self, outcome: u16) {
        let mut rest = outcome;
        let mut next = || {
            let is_kept = rest & 1 == 1;
            rest = rest.rotate_right(1);
            is_kept
        };
        for cell in 0..CELLS {
            self.superblocks[cell].lose(next());
            self.trees[cell].lose(next());
            self.logs[cell].lose(next());
        }
        for block in self.data.iter_mut().flatten() {
            block.lose(next());
        }
        self.directory.lose(next());
    }
}

impl Default for Array {
    fn default() -> Self {
        Self::new()
    }
}
