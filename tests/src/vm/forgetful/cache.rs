//! The content of a disk, and the part that it would lose.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

/// The smallest unit that a disk writes whole.
pub(super) const SECTOR: usize = 512;

/// Sectors of the largest unit that a cut loses or keeps whole.
const LARGEST_UNIT: u64 = 8;

/// Sectors in the cache beyond which the disk writes all of it, as any disk with a cache does some
/// time: 64 MiB.
const CACHED: usize = 64 << 11;

type Sector = [u8; SECTOR];

/// The effect of a cut, in sectors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cut {
    /// Not flushed, and of an older content now.
    pub lost: u64,
    /// Not flushed, and there all the same.
    pub kept: u64,
}

/// The file, and the sectors that were written since the last flush: each with all its contents
/// since then, any of which may be the one that stays.
#[derive(Debug)]
pub struct Cache {
    file: File,
    size: u64,
    unflushed: BTreeMap<u64, Vec<Sector>>,
    rng: fastrand::Rng,
}

impl Cache {
    pub(super) fn new(file: File, seed: u64) -> Result<Self> {
        let size = file.metadata().context("the size of a disk")?.len();
        let rng = fastrand::Rng::with_seed(seed);
        Ok(Self { file, size, unflushed: BTreeMap::new(), rng })
    }

    /// Bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Whether a request lies within the disk and on whole sectors.
    pub(super) fn takes(&self, offset: u64, len: u64) -> bool {
        let whole = |value: u64| value.is_multiple_of(SECTOR as u64);
        let end = offset.checked_add(len);
        whole(offset) && whole(len) && end.is_some_and(|end| end <= self.size)
    }

    /// A number below this one.
    pub(super) fn draw(&mut self, below: usize) -> usize {
        self.rng.usize(..below)
    }

    pub(super) fn read(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(data, offset).context("reading the disk")?;
        let first = offset / SECTOR as u64;
        let last = first + (data.len() / SECTOR) as u64;
        for (sector, contents) in self.unflushed.range(first..last) {
            let at = usize::try_from(sector - first)? * SECTOR;
            if let Some(newest) = contents.last() {
                data[at..at + SECTOR].copy_from_slice(newest);
            }
        }
        Ok(())
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let first = offset / SECTOR as u64;
        for (number, bytes) in (first..).zip(data.chunks_exact(SECTOR)) {
            let content = Sector::try_from(bytes)?;
            self.unflushed.entry(number).or_default().push(content);
        }
        if self.unflushed.len() > CACHED {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes through: what these sectors held before can't come back.
    pub(super) fn write_durably(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let first = offset / SECTOR as u64;
        for number in first..first + (data.len() / SECTOR) as u64 {
            self.unflushed.remove(&number);
        }
        self.file.write_all_at(data, offset).context("writing the disk")
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        for (number, contents) in std::mem::take(&mut self.unflushed) {
            if let Some(newest) = contents.last() {
                self.put(number, newest)?;
            }
        }
        Ok(())
    }

    /// For each unit, drawn anew at every cut between a sector and 4 KiB: what it held at the last
    /// flush stays, or one of the contents since then.
    pub(super) fn cut(&mut self) -> Result<Cut> {
        let unit = 1 << self.rng.u32(..=LARGEST_UNIT.ilog2());
        let mut cut = Cut::default();
        let mut chosen = (u64::MAX, 0.0);
        for (number, contents) in std::mem::take(&mut self.unflushed) {
            // One choice for all sectors of a unit, as a part of however many contents each has.
            if chosen.0 != number / unit {
                chosen = (number / unit, self.rng.f64());
            }
            let choices = contents.len() + 1;
            let choice = (0..choices).rev().find(|&choice| part(choice, choices) <= chosen.1);
            match choice.unwrap_or(0) {
                0 => cut.lost += 1,
                choice => {
                    self.put(number, &contents[choice - 1])?;
                    let newest = choice == contents.len();
                    *(if newest { &mut cut.kept } else { &mut cut.lost }) += 1;
                }
            }
        }
        Ok(cut)
    }

    fn put(&self, number: u64, content: &Sector) -> Result<()> {
        let offset = number * SECTOR as u64;
        self.file.write_all_at(content, offset).context("writing the disk")
    }
}

/// Where the share of a choice begins, of a whole that is one.
fn part(choice: usize, choices: usize) -> f64 {
    let number = |count: usize| u32::try_from(count).map_or(f64::MAX, f64::from);
    number(choice) / number(choices)
}
