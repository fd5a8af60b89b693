//! Owns a pool until it is killed, with IO on its way all the time. For the test of the owner lock:
//! it uses the lock like a daemon.
#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result};
use blockd_bench::pump::driver::Driver;
use blockd_bench::ring::Ring;
use blockd_mapper::engine::Control;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("usage: owner FILE BYTES")?;
    let size = arguments.next().context("usage: owner FILE BYTES")?.parse()?;
    let file = std::fs::File::options().read(true).write(true).open(Path::new(&path))?;
    let (mut driver, _) = Driver::open(Ring::new(file, 1)?, &path, size)?;
    println!("owner");
    for turn in 0_u64.. {
        let name = format!("v{turn}");
        let made = driver.control(Control::Create { name, size: 1 << 20, block_size: 4096 })?;
        if let blockd_mapper::engine::Outcome::Created(volume) = made {
            driver.control(Control::Delete { volume })?;
        }
        driver.control(Control::Checkpoint)?;
    }
    Ok(())
}
