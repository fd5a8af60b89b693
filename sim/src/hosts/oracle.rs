//! The promises: for each block the versions that a client may find.
//!
//! Versions of a block are numbered in the order in which they were submitted. `may` has those that
//! a read can find now, `lossy` those that it can find after a loss of power or a takeover. A read
//! or an answer narrows `may`, an answered flush narrows `lossy`; a loss turns `may` into `lossy`;
//! a hand-over in order turns `lossy` into `may`, because everything answered is durable then (H6).

use super::parts::{BLOCKS, CELLS, HOSTS};

/// Versions of one block that a history can write.
pub const VERSIONS: u8 = 15;

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A flushed version is gone.
    FlushedLost,
    /// An answered version is gone, without a loss that allows it.
    AnsweredLost,
    /// A read returned a version from before an answered write.
    StaleRead,
    /// A write of a former owner landed.
    ForeignWrite,
    /// A former owner answered a write that it took after another had opened the cell.
    TwoWriters,
    /// A unit has data of two cells.
    DoubleUse,
    /// The superblock or the map of a cell reaches beyond its space.
    Unreadable,
    /// A lease came free, and its cell is not closed.
    Unclean,
    /// A reservation conflict on a host that was not fenced.
    ConflictUnfenced,
    /// A fence has removed the key of an incarnation that was not its target.
    InnocentFenced,
    /// A request is never answered.
    Stuck,
}

/// A violation.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Its kind.
    pub kind: FaultKind,
    /// The host.
    pub host: usize,
    /// The cell.
    pub cell: usize,
    /// The version, unit or block.
    pub found: u8,
}

/// The versions of one block, a bit for each.
#[derive(Clone, Copy, Debug)]
pub struct Register {
    /// Allowed now.
    pub may: u16,
    /// Allowed after a loss.
    pub lossy: u16,
    /// Submitted, not ended.
    pub pending: u16,
    /// The version written next.
    pub next: u8,
    /// Versions that were over when a write of each host's client was answered: its next flush
    /// promises that they do not come back.
    pub over: [u16; HOSTS],
}

/// A block that was never written.
pub const FRESH: Register = Register { may: 1, lossy: 1, pending: 0, next: 1, over: [0; HOSTS] };

/// All registers.
pub type Registers = [[Register; BLOCKS]; CELLS];

impl Register {
    /// A write begins; gives its version.
    pub fn submit(&mut self) -> u8 {
        let version = self.next;
        self.next += 1;
        self.may |= bit(version);
        self.lossy |= bit(version);
        self.pending |= bit(version);
        version
    }

    /// A write ends without an answer: it may have taken effect.
    pub fn end(&mut self, version: u8) {
        self.pending &= !bit(version);
    }

    /// A write is answered.
    pub fn answer(&mut self, version: u8, host: usize) {
        self.pending &= !bit(version);
        self.may = bit(version) | self.pending;
        self.over[host] = (bit(self.next) - 1) & !self.may;
    }

    /// True if a read may find the version.
    pub fn allows(&self, version: u8) -> bool {
        self.may & bit(version) != 0
    }

    /// A read found a version: reads do not go back.
    pub fn found(&mut self, version: u8) {
        self.may = bit(version) | self.pending;
    }

    /// An open found a version after its flush: a later loss of power does not go back either.
    pub fn settled(&mut self, version: u8) {
        self.found(version);
        self.lossy = self.may;
    }

    /// Versions are promised not to come back; false if nothing else is allowed.
    pub fn promise(&mut self, over: u16) -> bool {
        self.lossy &= !over;
        self.lossy != 0
    }

    /// A loss of power, or a takeover.
    pub fn lose(&mut self) {
        self.may = self.lossy;
    }

    /// A hand-over in order.
    pub fn hand_over(&mut self) {
        self.lossy = self.may;
    }
}

fn bit(version: u8) -> u16 {
    1 << version
}
