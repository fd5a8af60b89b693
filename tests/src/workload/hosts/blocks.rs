//! Blocks that say who wrote them, and when.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::super::device::{Buffer, Device};

const BLOCK: usize = 4096;
/// Blocks at the start of a device that are written, compared, and written again.
const BLOCKS: u64 = 512;
/// The error of a reservation conflict: `EBADE`.
pub(super) const CONFLICT: i32 = 52;
/// A file that stops `flushing`.
const STOP: &str = "/tmp/stop";
/// Printed when the first write of `on` has been done.
pub(super) const WRITES: &str = "writes";
/// Printed before the number of the last write that was flushed.
pub(super) const FLUSHED: &str = "flushed ";

/// The guest's half. Write `n` goes to block `n` modulo their number. `once` and `fill` do the
/// first one and the first round and flush, `write` does the round without, `verify` compares
/// after it. `on` writes until there is an error, `flushing` goes on with a flush after each write,
/// and `since` compares when write `last` was the last one that was flushed.
///
/// # Errors
/// With the kernel's error where a write or a read has to work, and when a block is another's.
pub fn blocks(device: &str, what: &str, owner: u64, last: Option<u64>) -> Result<()> {
    let device = Device::open(Path::new(device))?;
    let mut blocks = Blocks { device, owner, buffer: Buffer::default() };
    match what {
        "once" => blocks.write(0).and_then(|()| blocks.device.flush()),
        "write" => (0..BLOCKS).try_for_each(|number| blocks.write(number)),
        "fill" => {
            (0..BLOCKS).try_for_each(|number| blocks.write(number))?;
            blocks.device.flush()
        }
        "verify" => blocks.verify(BLOCKS - 1),
        "since" => blocks.verify(last.context("since which write?")?),
        "on" => blocks.until_refused(),
        "flushing" => (BLOCKS..).take_while(|_| !Path::new(STOP).exists()).try_for_each(|number| {
            blocks.write(number)?;
            blocks.device.flush()?;
            println!("{FLUSHED}{number}");
            Ok(())
        }),
        _ => bail!("{what:?}: once, fill, write, verify, since, on or flushing"),
    }
}

struct Blocks {
    device: Device,
    owner: u64,
    buffer: Buffer,
}

impl Blocks {
    fn content(&self, number: u64) -> Vec<u8> {
        [self.owner.to_le_bytes(), number.to_le_bytes()].concat().repeat(BLOCK / 16)
    }

    fn write(&mut self, number: u64) -> Result<()> {
        let content = self.content(number);
        self.buffer.of(BLOCK).copy_from_slice(&content);
        self.device.write(number % BLOCKS * BLOCK as u64, &self.buffer)
    }

    /// Each block has the last write of it that was flushed; the write after the last one of all
    /// may be there or not.
    fn verify(&mut self, last: u64) -> Result<()> {
        for number in last + 1 - BLOCKS..=last {
            self.device.read(number % BLOCKS * BLOCK as u64, BLOCK, &mut self.buffer)?;
            let under_way = number + BLOCKS == last + 1;
            let found = self.buffer.bytes();
            let right = *found == self.content(number)
                || under_way && *found == self.content(number + BLOCKS);
            let start = &found[..16];
            ensure!(right, "write {number} of {} is not there: {start:?}", self.owner);
        }
        Ok(())
    }

    fn until_refused(&mut self) -> Result<()> {
        for round in 0_u64.. {
            let Err(error) = self.write(round) else {
                if round == 0 {
                    println!("{WRITES}");
                }
                continue;
            };
            ensure!(round > 0, "not one write before the error: {error:#}");
            println!("refused after {round} writes: {error:#}");
            return Ok(());
        }
        bail!("no error at all")
    }
}
