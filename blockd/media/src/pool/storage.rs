//! Whether a pool's disks were restarted since the pool was opened last.
//!
//! A disk that restarts forgets its write cache. The delta ring then names data that never reached
//! the media. The kernel counts disks as they appear, and a disk that was removed and added again
//! has another number; a file beside the ring remembers the numbers, for as long as the ring lives.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::Superblock;

use super::{PoolError, PoolSpec};

/// Largest file that is read: two lines for each of 16 devices, some 40 bytes each, and room.
const MAX_BYTES: u64 = 1 << 14;

/// A device's number in the pool, and the kernel's sequence number of its disk.
pub type Sequence = (u8, u64);

/// The file of a delta ring.
pub fn file_of(ring: &Path) -> PathBuf {
    let name = ring.file_name().unwrap_or_default().to_string_lossy();
    ring.with_file_name(format!("disks-{}", name.trim_start_matches("ring-")))
}

/// Why the ring of a pool is not to be replayed: a disk was restarted since it was written. A ring
/// in doubt is an error unless the loss is accepted.
pub fn check(
    spec: &PoolSpec,
    ring: &Path,
    newest: &Superblock,
    boot_id: &[u8; 16],
    present: &[Sequence],
) -> Result<Option<String>, PoolError> {
    if newest.clean || newest.boot_id != *boot_id {
        return Ok(None);
    }
    match restarted(ring, newest.open_id, present)? {
        Some(problem) if !spec.accept_loss => Err(MapperError::RingLost { problem }.into()),
        other => Ok(other),
    }
}

/// Describes the first disk that was restarted since the open with this id.
fn restarted(ring: &Path, open_id: u64, present: &[Sequence]) -> Result<Option<String>, PoolError> {
    let path = file_of(ring);
    let text = match fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Ok(found) if found.len() > MAX_BYTES => String::new(),
        _ => fs::read_to_string(&path).map_err(PoolError::io("read", &path))?,
    };
    let recorded = text.lines().filter_map(|line| parse(line, open_id));
    let differs = recorded.into_iter().find_map(|(index, before)| {
        let now = present.iter().find(|(other, _)| *other == index)?.1;
        (now != before).then(|| {
            format!(
                "has a delta ring from before the disk of device {index} was restarted (disk \
                 sequence number {before}, now {now}), and what the disk's write cache held may be \
                 lost"
            )
        })
    });
    Ok(differs)
}

fn parse(line: &str, open_id: u64) -> Option<Sequence> {
    let mut fields = line.split(' ');
    let of_open = fields.next() == Some(format!("{open_id:016x}").as_str());
    let sequence = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    of_open.then_some(sequence)
}

/// Remembers the disks for the opens with these ids: a crash while a pool is opened leaves either.
pub fn remember(ring: &Path, open_ids: &[u64], present: &[Sequence]) -> Result<(), PoolError> {
    let path = file_of(ring);
    if present.is_empty() {
        // A pool in files. Numbers of an earlier open count for that one alone.
        return Ok(());
    }
    let mut text = String::new();
    for open_id in open_ids {
        for (index, sequence) in present {
            let _ = writeln!(text, "{open_id:016x} {index} {sequence}");
        }
    }
    let next = path.with_extension("next");
    let written = fs::write(&next, text).and_then(|()| fs::rename(&next, &path));
    written.map_err(PoolError::io("write", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_disk_with_another_number_for_the_same_open_was_restarted() {
        let name = format!("blockd-storage-{}", std::process::id());
        let ring = std::env::temp_dir().join(name);
        assert_eq!(restarted(&ring, 7, &[(0, 1)]).unwrap(), None, "nothing is remembered");
        remember(&ring, &[7, 8], &[(0, 1), (1, 2)]).unwrap();
        let now = |open_id, present: &[Sequence]| restarted(&ring, open_id, present).unwrap();
        assert_eq!(now(7, &[(1, 2), (0, 1)]), None);
        assert_eq!(now(8, &[(0, 1)]), None, "a device without a number");
        assert_eq!(now(9, &[(0, 3)]), None, "another open");
        for open_id in [7, 8] {
            let problem = now(open_id, &[(0, 1), (1, 3)]).unwrap();
            assert!(problem.contains("device 1") && problem.contains("2, now 3"), "{problem}");
        }
        fs::remove_file(file_of(&ring)).unwrap();
    }
}
