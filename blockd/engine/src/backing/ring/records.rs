//! The operations of a ring that are out, each with a record until it ends.

use blockd_mapper::io::IoCommand;

use super::clients::Outgoing;
use super::media::FileIo;
use crate::backing::operation::{FileSlot, Socket};
use crate::block::Place;

/// The record of an operation until it ends.
#[derive(Debug)]
pub(super) enum Record {
    Free,
    Io { token: u64, io: FileIo },
    Sync { token: u64 },
    Command { file: FileSlot, command: IoCommand, len: u32, moved: u32 },
    Select { token: u64 },
    Receive { token: u64, place: Place },
    Send { token: u64, socket: Socket, outgoing: Box<Outgoing> },
    Fetch { token: u64, place: Option<Place> },
    Doorbell,
}

/// The records of a ring. Address space is taken for all of them at the start, so that none of them
/// is ever allocated or moved; memory only for as many as were in use at once.
#[derive(Debug)]
pub(super) struct Records {
    all: Vec<Record>,
    /// Records that are free, the one that is used next last.
    free: Vec<u32>,
    most: usize,
}

impl Records {
    pub(super) fn new(most: usize) -> Self {
        Self { all: Vec::with_capacity(most), free: Vec::with_capacity(most), most }
    }

    /// How many there can be.
    pub(super) const fn most(&self) -> usize {
        self.most
    }

    /// How many more can be taken.
    #[inline]
    pub(super) const fn room(&self) -> usize {
        self.free.len() + self.most - self.all.len()
    }

    /// Stores the record of an operation; returns it if all places are in use.
    #[inline]
    pub(super) fn take(&mut self, record: Record) -> Result<u32, Record> {
        match self.free.pop() {
            Some(at) => {
                self.all[at as usize] = record;
                Ok(at)
            }
            None => self.add(record),
        }
    }

    /// More are in use at once than ever before.
    #[cold]
    fn add(&mut self, record: Record) -> Result<u32, Record> {
        match u32::try_from(self.all.len()) {
            Ok(at) if self.all.len() < self.most => {
                self.all.push(record);
                Ok(at)
            }
            _ => Err(record),
        }
    }

    /// The operation has ended.
    #[inline]
    pub(super) fn end(&mut self, at: u32) -> Record {
        let record = std::mem::replace(&mut self.all[at as usize], Record::Free);
        self.free.push(at);
        record
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Record> {
        self.all.iter()
    }

    /// Leaves everything where it is for ever: the kernel may still use it.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.all));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_records_as_were_in_use_at_once() {
        let mut records = Records::new(1000);
        for _ in 0..100 {
            let taken = [0, 1].map(|token| records.take(Record::Sync { token }).unwrap());
            assert_eq!(taken, [0, 1]);
            assert_eq!(records.room(), 998);
            assert!(matches!(records.end(1), Record::Sync { token: 1 }));
            assert!(matches!(records.end(0), Record::Sync { token: 0 }));
        }
        assert_eq!((records.iter().count(), records.room()), (2, 1000));
        for _ in 0..1000 {
            records.take(Record::Doorbell).unwrap();
        }
        assert!(matches!(records.take(Record::Doorbell), Err(Record::Doorbell)));
        assert_eq!((records.all.capacity(), records.room()), (1000, 0));
    }
}
