//! Contents of blocks that identify the last write, so that each read can be checked.

use anyhow::{Context, Result, ensure};
use blockd_mapper::io::{IoBuffer, Page};

/// Bytes of the unit that carries a stamp of its own: a torn block shows.
const SECTOR: usize = 512;

/// Number of the last write of each block of a volume; 0 for none.
#[derive(Debug)]
pub struct Expected {
    last: Vec<u32>,
    next: u32,
    /// On the heap: a page is aligned to its size, which stacks are not made for.
    fill: IoBuffer,
}

/// Set in [`Expected::last`] while a write of the block is in flight.
const IN_FLIGHT: u32 = 1 << 31;

impl Expected {
    /// Creates the state before the first write.
    pub fn new(blocks: usize) -> Result<Self> {
        let mut fill = IoBuffer::new(1).context("no memory for a page")?;
        let mut random = fastrand::Rng::with_seed(0xB10C);
        fill.as_bytes_mut().iter_mut().for_each(|byte| *byte = random.u8(1..));
        Ok(Self { last: vec![0; blocks], next: 0, fill })
    }

    /// Blocks of the volume.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.last.len()
    }

    /// Resets the state for a new volume.
    pub fn clear(&mut self) {
        self.last.fill(0);
    }

    /// Fills a buffer with the data between the stamps.
    pub fn prepare(&self, page: &mut Page) {
        page.0.copy_from_slice(self.fill.as_bytes());
    }

    /// Whether a write of the block may begin: none is in flight, so that it is known which of
    /// two comes last.
    #[must_use]
    pub fn is_free(&self, block: usize) -> bool {
        self.last[block] & IN_FLIGHT == 0
    }

    /// Begins a write: stamps each sector of a prepared buffer.
    pub fn begin(&mut self, block: usize, page: &mut Page) {
        self.next += 1;
        self.last[block] = self.next | IN_FLIGHT;
        let number = self.next;
        for (sector, at) in page.0.chunks_exact_mut(SECTOR).zip(0..) {
            sector[..16].copy_from_slice(&stamp(block, number, at));
        }
    }

    /// The write has ended well.
    pub fn end(&mut self, block: usize) {
        self.last[block] &= !IN_FLIGHT;
    }

    /// Compares the stamps of a block that was read: cheap enough for a timed run.
    pub fn check_stamps(&self, block: usize, page: &Page) -> Result<()> {
        let number = self.last[block];
        for (sector, at) in page.0.chunks_exact(SECTOR).zip(0..) {
            let expected = if number == 0 { [0; 16] } else { stamp(block, number, at) };
            ensure!(
                sector[..16] == expected,
                "block {block}, sector {at}: wrong data: expected write {number}, read {:02x?}",
                &sector[..16]
            );
        }
        Ok(())
    }

    /// Compares every byte of a block that was read.
    pub fn check_all(&self, block: usize, page: &Page) -> Result<()> {
        self.check_stamps(block, page)?;
        let written = self.last[block] != 0;
        let sectors = page.0.chunks_exact(SECTOR).zip(self.fill.as_bytes().chunks_exact(SECTOR));
        for (sector, fill) in sectors {
            let same = if written {
                sector[16..] == fill[16..]
            } else {
                sector.iter().all(|byte| *byte == 0)
            };
            ensure!(same, "block {block}: wrong data between the stamps");
        }
        Ok(())
    }
}

fn stamp(block: usize, number: u32, sector: u32) -> [u8; 16] {
    let mut stamp = [0; 16];
    stamp[..8].copy_from_slice(&(block as u64).to_le_bytes());
    stamp[8..12].copy_from_slice(&number.to_le_bytes());
    stamp[12..].copy_from_slice(&sector.to_le_bytes());
    stamp
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_misdirected_writes_show() {
        let mut expected = Expected::new(8).unwrap();
        let mut page = Page::zeroed();
        assert!(expected.check_all(3, &page).is_ok());
        expected.prepare(&mut page);
        expected.begin(3, &mut page);
        assert!(!expected.is_free(3));
        expected.end(3);
        assert!(expected.check_all(3, &page).is_ok());
        assert!(expected.check_all(4, &page).is_err(), "misdirected");
        let old = page.clone();
        expected.begin(3, &mut page);
        expected.end(3);
        assert!(expected.check_stamps(3, &old).is_err(), "lost");
        page.0[700] ^= 1;
        assert!(expected.check_all(3, &page).is_err(), "damaged");
    }
}
