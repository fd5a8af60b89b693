//! Blocks that are written one after the other. Each has to be there once its write was answered,
//! without any flush. The guest prints the answered writes for the host.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};

use crate::workload::device::{Buffer, Device};

/// The unit that must not be torn.
const BLOCK: usize = 4096;
/// Answers between two lines.
const BATCH: u64 = 32;
/// Writers, each with blocks of its own.
const WRITERS: u64 = 2;
/// Precedes a writer, and how many of its writes were answered.
const SAID: &str = "answered ";

/// The block that a writer's write goes to.
fn target(rng: &mut fastrand::Rng, blocks: u64, writer: u64) -> u64 {
    rng.u64(..blocks / WRITERS) * WRITERS + writer
}

fn writer_rng(seed: u64, writer: u64) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed.wrapping_mul(31).wrapping_add(writer))
}

/// The content of a block after a write of it: no two writes leave the same anywhere.
fn fill(bytes: &mut [u8], block: u64, number: u64) {
    let mut rng = fastrand::Rng::with_seed(number.wrapping_mul(0x9e37_79b9).wrapping_add(block));
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match at {
            0 => number,
            1 => block,
            _ => rng.u64(..),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Writes until `stop` is set, and prints the answered writes.
///
/// # Errors
/// When a write fails.
pub(super) fn write(device: &Path, seed: u64, stop: &AtomicBool) -> Result<()> {
    writers(device, seed, stop, true).map(|_| ())
}

/// The same without output; returns how many writes of each writer were answered.
///
/// # Errors
/// When a write fails.
pub(super) fn write_quietly(device: &Path, seed: u64, stop: &AtomicBool) -> Result<Vec<u64>> {
    writers(device, seed, stop, false)
}

fn writers(device: &Path, seed: u64, stop: &AtomicBool, reports: bool) -> Result<Vec<u64>> {
    let one = |writer: u64| -> Result<u64> {
        let device = Device::open(device)?;
        let blocks = device.size / BLOCK as u64;
        let (mut rng, mut buffer) = (writer_rng(seed, writer), Buffer::default());
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            let block = target(&mut rng, blocks, writer);
            fill(buffer.of(BLOCK), block, number);
            device.write(block * BLOCK as u64, &buffer)?;
            if reports && number % BATCH == 0 {
                println!("{SAID}{writer} {number}");
            }
        }
        Ok(number)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let all: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || one(writer))).collect();
        let joined = all.into_iter().map(|thread| thread.join());
        joined.map(|end| end.map_err(|_| anyhow::anyhow!("a writer panicked"))?).collect()
    })
}

/// How many writes of each writer are known to have been answered.
#[must_use]
pub(super) fn said(text: &str) -> Vec<u64> {
    let mut all = vec![0; usize::try_from(WRITERS).unwrap_or(0)];
    for line in text.lines().filter_map(|line| line.strip_prefix(SAID)) {
        let mut words = line.split(' ').map(|word| word.parse::<u64>());
        if let (Some(Ok(writer)), Some(Ok(number)), None) =
            (words.next(), words.next(), words.next())
            && let Some(known) = usize::try_from(writer).ok().and_then(|at| all.get_mut(at))
        {
            *known = number.max(*known);
        }
    }
    all
}

/// Compares the device with what was answered. Gives how many blocks hold a write that had been
/// answered, and how many one that came after.
///
/// # Errors
/// When a write that was answered is not there, or a block is of two writes.
pub(super) fn check(device: &Path, seed: u64, answered: &[u64]) -> Result<(u64, u64)> {
    let open = Device::open(device)?;
    let blocks = open.size / BLOCK as u64;
    let mut last = HashMap::new();
    for (writer, &count) in (0..).zip(answered) {
        let mut rng = writer_rng(seed, writer);
        for number in 1..=count {
            last.insert(target(&mut rng, blocks, writer), number);
        }
    }
    let (mut buffer, mut expected) = (Buffer::default(), vec![0; BLOCK]);
    let (mut known, mut later) = (0, 0);
    for block in 0..blocks {
        open.read(block * BLOCK as u64, BLOCK, &mut buffer)?;
        let bytes = buffer.bytes();
        let wanted = last.get(&block).copied().unwrap_or(0);
        let found = u64::from_le_bytes(bytes[..8].try_into()?);
        ensure!(
            found >= wanted,
            "block {block}: write {wanted} was answered, and there is write {found}"
        );
        expected.fill(0);
        if found > 0 {
            fill(&mut expected, block, found);
        }
        let same = bytes.iter().zip(&expected).position(|(a, b)| a != b);
        ensure!(same.is_none(), "block {block}: torn at byte {same:?} of write {found}");
        known += u64::from(wanted > 0);
        later += u64::from(found > wanted);
    }
    ensure!(known > 0, "nothing was answered");
    Ok((known, later))
}

/// Parses what [`said`] gave, as words of a command line.
///
/// # Errors
/// When one is no number.
pub(super) fn parse(text: &str) -> Result<Vec<u64>> {
    text.split(',').map(|word| word.parse().with_context(|| format!("{word:?}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_answers_are_read_back() {
        assert_eq!(said("answered 0 32\nx\nanswered 1 64\nanswered 0 96\nansw"), [96, 64]);
        assert_eq!(said("answered 7 32\nanswered 0\nanswered 0 1 2"), [0, 0]);
    }

    #[test]
    fn blocks_differ_by_place_and_write() {
        let of = |block, number| {
            let mut bytes = vec![0; BLOCK];
            fill(&mut bytes, block, number);
            bytes
        };
        let first = of(1, 1);
        for other in [of(1, 2), of(2, 1)] {
            let same = first.chunks(8).zip(other.chunks(8)).filter(|(a, b)| a == b).count();
            assert!(same <= 1, "{same} words are the same");
        }
    }
}
