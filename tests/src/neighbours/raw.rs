//! The share of its throughput that a plain program keeps on plain files, beside another one that
//! writes as deeply as any neighbour may: no daemon can leave a victim more of the same disk.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::clock::Clock;
use blockd_testkit::folder::Folder;
use memmap2::MmapMut;
use nix::libc::O_DIRECT;
use serde::Serialize;

use super::victim::{BLOCK, Victim};

/// Requests of the writer in flight, and their bytes.
const DEPTH: u64 = 16;
const WRITE: u64 = 256 << 10;
/// Bytes of each file: all are written before anything is measured.
const FILE: u64 = 64 << 20;

/// Parts of what each has alone.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Raw {
    pub read: f64,
    pub write: f64,
    pub flush: f64,
}

impl Raw {
    /// Measures for twice this long each, in a folder of a disk.
    pub(super) fn measure(folder: Option<&Path>, window: Duration) -> Result<Self> {
        let folder = match folder {
            Some(folder) => Folder::below(folder, "raw")?,
            None => Folder::new("raw")?,
        };
        let own = written(&folder.path().join("own"))?;
        let other = written(&folder.path().join("other"))?;
        let share = |victim| {
            let alone = per_second(&own, victim, window)?;
            let beside = beside_writers(&other, || per_second(&own, victim, window))?;
            anyhow::Ok(beside / alone.max(f64::MIN_POSITIVE))
        };
        let (read, write) = (share(Victim::Read)?, share(Victim::Write)?);
        Ok(Self { read, write, flush: share(Victim::Flush)? })
    }

    /// The share of a victim of this kind, if it does IO.
    pub(super) const fn of(&self, victim: Victim) -> Option<f64> {
        match victim {
            Victim::Read => Some(self.read),
            Victim::Write | Victim::FirstWrite => Some(self.write),
            Victim::Flush => Some(self.flush),
            Victim::Connect | Victim::Control | Victim::Metrics => None,
        }
    }
}

/// A new file without a hole in it, open for IO past the page cache where there is such.
fn written(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let direct = options.clone().custom_flags(O_DIRECT).open(path);
    let file = direct.or_else(|_| options.open(path)).context("a file of plain IO")?;
    let data = memory(WRITE)?;
    for offset in (0..FILE).step_by(data.len()) {
        file.write_all_at(&data, offset)?;
    }
    file.sync_all()?;
    Ok(file)
}

/// Memory as direct IO needs it.
fn memory(bytes: u64) -> Result<MmapMut> {
    let mut memory = MmapMut::map_anon(usize::try_from(bytes)?)?;
    memory.fill(0x5a);
    Ok(memory)
}

/// Operations of a victim on a file, one after the other.
fn per_second(file: &File, victim: Victim, window: Duration) -> Result<f64> {
    let mut data = memory(BLOCK)?;
    let mut random = fastrand::Rng::with_seed(1);
    let (start, mut operations) = (Clock::start(), 0_u32);
    while start.elapsed() < window {
        let offset = random.u64(..FILE / BLOCK) * BLOCK;
        match victim {
            Victim::Read => file.read_exact_at(&mut data, offset)?,
            _ => file.write_all_at(&data, offset)?,
        }
        if victim == Victim::Flush {
            file.sync_data()?;
        }
        operations += 1;
    }
    Ok(f64::from(operations) / start.elapsed().as_secs_f64())
}

/// Runs `measured` while the writer writes.
fn beside_writers(file: &File, measured: impl FnOnce() -> Result<f64>) -> Result<f64> {
    let stop = AtomicBool::new(false);
    let writer = |seed: u64| -> Result<()> {
        let data = memory(WRITE)?;
        let mut random = fastrand::Rng::with_seed(seed);
        while !stop.load(Ordering::Relaxed) {
            file.write_all_at(&data, random.u64(..FILE / WRITE) * WRITE)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..DEPTH).map(|seed| scope.spawn(move || writer(seed))).collect();
        let result = measured();
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))??;
        }
        result
    })
}
