//! The backing device: cells with a volatile cache.
//!
//! One cell holds one sub-block, WAL block, checkpoint image or superblock copy. After power loss a
//! cell holds any value written to it since the last flush that covered it, so a recovery can never
//! count on the order in which the device wrote its cache back.

use super::state::{PHYS, SUBS, ix};

/// The content of a cell: a data tag, or the index of a block, image or superblock. 0 is "nothing".
pub type Value = u16;

/// Index of a cell.
pub type CellId = u8;

/// Cells in all: data, WAL, images, superblock copies.
pub const CELLS: usize = 32;
/// First WAL cell.
pub const WAL0: CellId = 21;
/// Most blocks a WAL can have.
pub const WAL_MAX: u8 = 6;
/// First checkpoint place.
pub const PAGE0: CellId = 27;
/// Places for checkpoint images: two that superblock copies may refer to, and one to write.
pub const PLACES: u8 = 3;
/// First superblock copy.
pub const SB0: CellId = 30;

/// Flush requests in flight are distinguished by their sender.
pub const FLUSH_COMMIT: usize = 0;
/// A checkpoint's flush.
pub const FLUSH_CKPT: usize = 1;
/// A FLUSH served by a device flush alone.
pub const FLUSH_SHORT: usize = 2;

/// Unflushed values a cell remembers; the device writes the oldest back when one more arrives.
const PENDING: usize = 3;

#[derive(Clone, Copy, Debug)]
struct Cell {
    durable: Value,
    pending: [Value; PENDING],
    n: u8,
    // Which of `pending` may be torn, as a bit mask.
    unseen: u8,
    // How many of `pending` each flush in flight covers.
    mark: [u8; 3],
}

/// The device.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    cells: [Cell; CELLS],
    dirty: u32,
}

/// The cell of a sub-block of a physical extent.
pub fn data_cell(p: u8, s: u8) -> CellId {
    debug_assert!(ix(p) < PHYS && ix(s) < SUBS);
    p * 3 + s
}

impl Default for Device {
    fn default() -> Self {
        Self::new()
    }
}

impl Device {
    /// A device whose data cells hold data of previous tenants.
    pub fn new() -> Self {
        let blank = Cell { durable: 0, pending: [0; PENDING], n: 0, unseen: 0, mark: [0; 3] };
        let mut dev = Self { cells: [blank; CELLS], dirty: 0 };
        for c in 0..WAL0 {
            dev.cells[ix(c)].durable = GARBAGE | u16::from(c);
        }
        dev
    }

    /// Returns the value that a read returns now.
    pub fn get(&self, c: CellId) -> Value {
        let cell = &self.cells[ix(c)];
        if cell.n == 0 { cell.durable } else { cell.pending[ix(cell.n) - 1] }
    }

    /// A write reaches the cache.
    pub fn put(&mut self, c: CellId, value: Value) {
        let cell = &mut self.cells[ix(c)];
        if ix(cell.n) == PENDING {
            cell.drop_front(1);
        }
        cell.pending[ix(cell.n)] = value;
        cell.n += 1;
        self.dirty |= 1 << c;
    }

    /// A write that nothing keeps whole reaches the cache.
    pub fn put_unseen(&mut self, c: CellId, value: Value) {
        self.put(c, value);
        let cell = &mut self.cells[ix(c)];
        cell.unseen |= 1 << (cell.n - 1);
    }

    /// The cell's newest value reaches the media (FUA, or the device's own write-back).
    pub fn persist(&mut self, c: CellId) {
        let cell = &mut self.cells[ix(c)];
        cell.drop_front(cell.n);
        self.dirty &= !(1 << c);
    }

    /// The media holds half of the cell's newest write, if nothing keeps that whole.
    pub fn tear(&mut self, c: CellId) {
        let cell = &mut self.cells[ix(c)];
        if c < WAL0 && cell.unseen == 0 {
            return;
        }
        cell.durable = if c < WAL0 { TORN } else { 0 };
        cell.clean();
        self.dirty &= !(1 << c);
    }

    /// True if the cell has unflushed values.
    pub fn is_dirty(&self, c: CellId) -> bool {
        self.dirty & (1 << c) != 0
    }

    /// A flush starts: it covers the present cache and nothing later.
    pub fn flush_sent(&mut self, sender: usize) {
        for cell in &mut self.cells {
            cell.mark[sender] = cell.n;
        }
    }

    /// Completes a flush.
    pub fn flush_done(&mut self, sender: usize) {
        let mut rest = self.dirty;
        while rest != 0 {
            let c = rest.trailing_zeros();
            rest &= rest - 1;
            let cell = &mut self.cells[c as usize];
            cell.drop_front(cell.mark[sender]);
            if cell.n == 0 {
                self.dirty &= !(1 << c);
            }
        }
    }

    /// A flush with nothing else in flight.
    pub fn flush_all(&mut self) {
        self.flush_sent(FLUSH_COMMIT);
        self.flush_done(FLUSH_COMMIT);
    }

    /// The cache is lost. For each unflushed cell `pick(n)` chooses one of `n` outcomes: 0 the
    /// durable value, then a torn block for metadata and unseen data, then the unflushed values in
    /// order.
    pub fn lose(&mut self, mut pick: impl FnMut(u8) -> u8) {
        while self.dirty != 0 {
            let c = self.dirty.trailing_zeros();
            self.dirty &= self.dirty - 1;
            let cell = &mut self.cells[c as usize];
            let tears = u8::from(c >= u32::from(WAL0) || cell.unseen != 0);
            let choice = pick(cell.n + 1 + tears);
            if choice > tears {
                cell.durable = cell.pending[ix(choice - tears) - 1];
            } else if choice > 0 {
                let data = c < u32::from(WAL0);
                cell.durable = if data { TORN } else { 0 };
            }
            cell.clean();
        }
    }
}

/// Tags of data from before the pool existed.
pub const GARBAGE: Value = 0xE000;
/// A sub-block that is half of one write and half of another.
pub const TORN: Value = GARBAGE | 0xFFF;

impl Cell {
    fn drop_front(&mut self, n: u8) {
        if n == 0 {
            return;
        }
        self.durable = self.pending[ix(n) - 1];
        self.pending.copy_within(ix(n)..ix(self.n), 0);
        self.n -= n;
        self.unseen >>= n;
        for mark in &mut self.mark {
            *mark = mark.saturating_sub(n);
        }
    }

    fn clean(&mut self) {
        self.n = 0;
        self.unseen = 0;
        self.mark = [0; 3];
    }
}
