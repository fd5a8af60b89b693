//! Records that a guest appends to a file, each of them durable before its number is printed.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};

use super::super::super::files::Files;
use super::super::super::guest;
use crate::kill::content::{self, SECTOR};

/// Marks the content of records.
const ID: u32 = 0x5245_4344;
const RECORD: usize = 8 * SECTOR;
/// Printed before the number of a record whose fsync was answered.
pub(super) const KEPT: &str = "kept ";
/// The file of the records.
pub(super) const FILE: &str = "records";
/// Files between two comparisons of all files with the disk.
const COMPARED: u64 = 100;

/// The guest's half: appends records to a file in this folder until the file `stop` is there, and
/// prints the number of each to `port` after its fsync. Beside them other files come and go.
///
/// # Errors
/// With the file system's error, when something else is read than was written, or when the kernel
/// has logged an error.
pub fn records(folder: &Path, port: &Path, stop: &Path) -> Result<()> {
    let others = folder.join("others");
    fs::create_dir(&others)?;
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let result = write_others(&others, &has_ended);
            has_ended.fetch_or(result.is_err(), Ordering::Relaxed);
            result
        });
        let result = append(folder, port, || stop.exists() || has_ended.load(Ordering::Relaxed));
        has_ended.store(true, Ordering::Relaxed);
        let Ok(others) = others.join() else { bail!("the writer of other files panicked") };
        result.and(others)
    })?;
    guest::no_errors()
}

fn append(folder: &Path, port: &Path, has_ended: impl Fn() -> bool) -> Result<()> {
    let mut port = File::options().write(true).open(port).context("opening the port")?;
    let mut file = File::create(folder.join(FILE)).context("making the file of records")?;
    for number in 0.. {
        if has_ended() {
            break;
        }
        file.write_all(&of(number)).with_context(|| format!("writing record {number}"))?;
        file.sync_all().with_context(|| format!("fsync of record {number}"))?;
        port.write_all(format!("{KEPT}{number}\n").as_bytes()).context("writing to the port")?;
    }
    Ok(())
}

fn write_others(folder: &Path, has_ended: &AtomicBool) -> Result<()> {
    let files = Files::new(folder);
    for number in 1.. {
        if has_ended.load(Ordering::Relaxed) {
            break;
        }
        files.write(number)?;
        if number % COMPARED == 0 {
            // So that they are read from the disk.
            fs::write("/proc/sys/vm/drop_caches", "3")?;
            files.check(number)?;
        }
    }
    Ok(())
}

/// Compares a file of records, of which this many were answered. One more may be there, in part.
pub(super) fn check(file: &[u8], answered: u64) -> Result<()> {
    let wanted = usize::try_from(answered)? * RECORD;
    ensure!(file.len() >= wanted, "{} bytes of {answered} records of {RECORD}", file.len());
    for (number, record) in (0..answered).zip(file.chunks(RECORD)) {
        let start = content::describe(&record[..SECTOR]);
        ensure!(record == of(number), "record {number} begins with {start}");
    }
    Ok(())
}

fn of(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; RECORD];
    for (index, sector) in (number * 8..).zip(bytes.chunks_exact_mut(SECTOR)) {
        content::fill(sector, ID, index, 1);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_lost_or_garbled_is_noticed() {
        let mut file = [of(0), of(1), of(2)].concat();
        check(&file, 3).unwrap();
        check(&file[..3 * RECORD - 1], 2).unwrap();
        check(&file[..3 * RECORD - 1], 3).unwrap_err();
        file[RECORD + 5] ^= 1;
        check(&file, 1).unwrap();
        check(&file, 3).unwrap_err();
    }
}
