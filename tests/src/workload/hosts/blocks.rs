//! Blocks that say which host wrote them.

use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::super::device::{Buffer, Device};

const BLOCK: usize = 4096;
/// Blocks at the start of a device that are written, compared, and written again.
const BLOCKS: u64 = 512;
/// The error of a reservation conflict: `EBADE`.
pub(super) const CONFLICT: i32 = 52;

/// The guest's half: `once`, `fill`, `verify`, or `on`, which writes until the disk refuses.
///
/// # Errors
/// With the kernel's error where a write or a read has to work, and when a block is another's.
pub fn blocks(device: &str, what: &str, owner: u64) -> Result<()> {
    let device = Device::open(Path::new(device))?;
    let mut buffer = Buffer::default();
    match what {
        "once" => write(&device, &mut buffer, owner, 0).and_then(|()| device.flush()),
        "fill" => {
            for number in 0..BLOCKS {
                write(&device, &mut buffer, owner, number)?;
            }
            device.flush()
        }
        "verify" => (0..BLOCKS).try_for_each(|number| {
            device.read(number * BLOCK as u64, BLOCK, &mut buffer)?;
            ensure!(*buffer.bytes() == content(owner, number), "block {number} is another's");
            Ok(())
        }),
        "on" => until_refused(&device, &mut buffer, owner),
        _ => bail!("{what:?}: once, fill, verify or on"),
    }
}

fn content(owner: u64, number: u64) -> Vec<u8> {
    [owner.to_le_bytes(), number.to_le_bytes()].concat().repeat(BLOCK / 16)
}

fn write(device: &Device, buffer: &mut Buffer, owner: u64, number: u64) -> Result<()> {
    buffer.of(BLOCK).copy_from_slice(&content(owner, number));
    device.write(number * BLOCK as u64, buffer)
}

fn until_refused(device: &Device, buffer: &mut Buffer, owner: u64) -> Result<()> {
    for round in 0_u64.. {
        let Err(error) = write(device, buffer, owner, round % BLOCKS) else { continue };
        let io = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        ensure!(io == Some(CONFLICT), "no conflict after {round} writes: {error:#}");
        ensure!(round > 0, "not one write before the conflict");
        println!("refused after {round} writes");
        return Ok(());
    }
    bail!("no conflict at all")
}
