//! Whether a pool's disks were restarted since the pool was opened last.
//!
//! A disk that restarts forgets its write cache. The delta ring then names data that never reached
//! the media. The kernel counts disks as they appear, and a disk that was removed and added again
//! has another number; a file beside the ring remembers the numbers, for as long as the ring lives.
//! Lines in it have the identity of an open, that of a device, and the number.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use blockd_mapper::error::MapperError;
use blockd_mapper::format::superblock::Superblock;

use super::ring_file::RingFile;
use super::{PoolError, PoolSpec};

/// Largest file that is read: two lines for each of 16 devices, one for each that was added or is
/// away, some 70 bytes each, and room.
const MAX_BYTES: u64 = 1 << 14;

/// A pool's device on a disk that the kernel counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The device's identity in the pool.
    pub uuid: [u8; 16],
    /// The kernel's sequence number of the disk.
    pub sequence: u64,
    /// Where it lies, for messages.
    pub path: PathBuf,
}

impl Disk {
    /// The disk of a device whose superblock was found; none where it names no such device.
    #[must_use]
    pub fn of(found: &Superblock, sequence: u64, path: &Path) -> Option<Self> {
        let record = found.devices.as_slice().get(usize::from(found.this_device.0))?;
        Some(Self { uuid: record.uuid, sequence, path: path.to_owned() })
    }
}

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
    present: &[Disk],
) -> Result<Option<String>, PoolError> {
    let Some(former) = replayed(newest, boot_id) else { return Ok(None) };
    match restarted(ring, former, present)? {
        Some(problem) if !spec.accept_loss => Err(MapperError::RingLost { problem }.into()),
        other => Ok(other),
    }
}

/// The open whose ring would be replayed, if any.
#[must_use]
pub fn replayed(newest: &Superblock, boot_id: &[u8; 16]) -> Option<u64> {
    (!newest.clean && newest.boot_id == *boot_id).then_some(newest.open_id)
}

/// Describes the first disk that was restarted since the open with this id.
fn restarted(ring: &Path, open_id: u64, present: &[Disk]) -> Result<Option<String>, PoolError> {
    let path = file_of(ring);
    let text = match fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Ok(found) if found.len() > MAX_BYTES => {
            let (length, path) = (found.len(), path.display());
            let problem = format!(
                "has a delta ring, and the list of its disks can't be read: {path} has {length} \
                 bytes, {MAX_BYTES} at most"
            );
            return Ok(Some(problem));
        }
        _ => fs::read_to_string(&path).map_err(PoolError::io("read", &path))?,
    };
    let recorded = text.lines().filter_map(|line| parse(line, open_id));
    let differs = recorded.into_iter().find_map(|(uuid, before)| {
        let Disk { sequence: now, path, .. } = present.iter().find(|disk| disk.uuid == uuid)?;
        // A ring that is ignored brings nothing back: the pool opens as after power loss.
        (*now != before && !RingFile::is_ignored(ring, open_id)).then(|| {
            let path = path.display();
            format!(
                "has a delta ring from before the disk {path} was restarted (disk sequence number \
                 {before}, now {now}), and what the disk's write cache held may be lost"
            )
        })
    });
    Ok(differs)
}

fn line(open_id: u64, (uuid, sequence): ([u8; 16], u64)) -> String {
    format!("{open_id:016x} {:032x} {sequence}\n", u128::from_be_bytes(uuid))
}

fn parse(line: &str, open_id: u64) -> Option<([u8; 16], u64)> {
    let mut fields = line.split(' ');
    let of_open = fields.next() == Some(format!("{open_id:016x}").as_str());
    let uuid = u128::from_str_radix(fields.next()?, 16).ok()?;
    let sequence = fields.next()?.parse().ok()?;
    of_open.then_some((uuid.to_be_bytes(), sequence))
}

/// Remembers the disks for an open, and for the `former` one whose ring is replayed: a crash while
/// a pool is opened leaves either. A disk of the former open that is away keeps its number for
/// both, since it may come back before the ring is replayed.
///
/// Numbers of an open in between are dropped, although a disk that is away may have that one's
/// superblock. Where another disk has not got it, the open had answered no client, and had flushed
/// all disks before it wrote the first superblock (R12): a restart has lost nothing of the ring.
pub fn remember(
    ring: &Path,
    former: Option<u64>,
    open_id: u64,
    present: &[Disk],
) -> Result<(), PoolError> {
    let path = file_of(ring);
    let mut numbers: Vec<_> = present.iter().map(|disk| (disk.uuid, disk.sequence)).collect();
    if let Some(former) = former {
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other.map_err(PoolError::io("read", &path))?,
        };
        let is_away = |(uuid, _): &([u8; 16], u64)| present.iter().all(|disk| disk.uuid != *uuid);
        numbers.extend(text.lines().filter_map(|line| parse(line, former)).filter(is_away));
    }
    if numbers.is_empty() {
        // A pool in files. Numbers of an earlier open count for that one alone.
        return Ok(());
    }
    let opens = former.into_iter().chain([open_id]);
    let text: String = opens.flat_map(|id| numbers.iter().map(move |of| line(id, *of))).collect();
    let next = path.with_extension("next");
    let written = fs::write(&next, text).and_then(|()| fs::rename(&next, &path));
    written.map_err(PoolError::io("write", &path))
}

/// Remembers one more disk for the open with this id, before a device on it joins the pool.
pub fn remember_later(ring: &Path, open_id: u64, disk: &Disk) -> Result<(), PoolError> {
    let path = file_of(ring);
    let added = line(open_id, (disk.uuid, disk.sequence));
    let opened = fs::File::options().create(true).append(true).open(&path);
    let written = opened.and_then(|mut file| file.write_all(added.as_bytes()));
    written.map_err(PoolError::io("write", &path))
}

#[cfg(test)]
mod tests {
    use std::slice;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use blockd_mapper::ring::{DeltaRing, RingMemory, VecRingMemory};

    use super::*;

    fn disk(device: u8, sequence: u64) -> Disk {
        Disk { uuid: [device; 16], sequence, path: format!("/dev/{device}").into() }
    }

    #[test]
    fn only_a_disk_with_another_number_for_the_same_open_was_restarted() {
        let name = format!("blockd-storage-{}", std::process::id());
        let ring = std::env::temp_dir().join(name);
        assert_eq!(restarted(&ring, 7, &[disk(0, 1)]).unwrap(), None, "nothing is remembered");
        remember(&ring, Some(7), 8, &[disk(0, 1), disk(1, 2)]).unwrap();
        let now = |open_id, present: &[Disk]| restarted(&ring, open_id, present).unwrap();
        assert_eq!(now(7, &[disk(1, 2), disk(0, 1)]), None);
        assert_eq!(now(8, &[disk(0, 1)]), None, "a device without a number");
        assert_eq!(now(9, &[disk(0, 3)]), None, "another open");
        for open_id in [7, 8] {
            let problem = now(open_id, &[disk(0, 1), disk(1, 3)]).unwrap();
            assert!(problem.contains("/dev/1") && problem.contains("2, now 3"), "{problem}");
        }
        remember_later(&ring, 8, &disk(2, 4)).unwrap();
        assert_eq!(now(8, &[disk(0, 1), disk(2, 4)]), None);
        let problem = now(8, &[disk(0, 1), disk(2, 5)]).unwrap();
        assert!(problem.contains("/dev/2"), "a disk of a device that was added: {problem}");
        fs::write(file_of(&ring), vec![b'x'; 1 << 15]).unwrap();
        let problem = now(8, &[disk(0, 1)]).expect("a file that is no list of disks is doubtful");
        assert!(problem.contains("32768 bytes"), "{problem}");
        fs::remove_file(file_of(&ring)).unwrap();
    }

    #[test]
    fn a_disk_that_is_away_at_an_open_is_still_noticed_when_it_comes_back_restarted() {
        let name = format!("blockd-storage-away-{}", std::process::id());
        let ring = std::env::temp_dir().join(name);
        let (here, back) = (disk(0, 1), disk(1, 3));
        remember(&ring, None, 7, &[here.clone(), disk(1, 2)]).unwrap();
        // Twice: an attempt to open without it may be repeated.
        for open_id in [8, 9] {
            remember(&ring, Some(7), open_id, slice::from_ref(&here)).unwrap();
            for open_id in [7, open_id] {
                let now = |disk| restarted(&ring, open_id, &[here.clone(), disk]).unwrap();
                let problem = now(back.clone()).unwrap();
                assert!(problem.contains("/dev/1") && problem.contains("2, now 3"), "{problem}");
                assert_eq!(now(disk(1, 2)), None);
            }
        }
        remember(&ring, None, 10, slice::from_ref(&here)).unwrap();
        assert_eq!(restarted(&ring, 10, &[here, back]).unwrap(), None, "no ring names its data");
        fs::remove_file(file_of(&ring)).unwrap();
    }

    #[test]
    fn a_restarted_disk_does_not_count_where_clients_received_errors_and_the_ring_is_ignored() {
        let name = format!("blockd-storage-ignored-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let memory = Arc::new(VecRingMemory::new(1, 16));
        let ring = DeltaRing::format(memory.clone(), &[1; 16], &[2; 16], 1, 16).unwrap();
        ring.set_current(7);
        remember(&path, None, 7, &[disk(0, 1)]).unwrap();
        let problem = || {
            #[expect(clippy::host_endian_bytes, reason = "the words of shared memory, as mapped")]
            let word = |word: &AtomicU64| word.load(Ordering::Relaxed).to_ne_bytes();
            fs::write(&path, memory.words().iter().flat_map(word).collect::<Vec<_>>()).unwrap();
            restarted(&path, 7, &[disk(0, 2)]).unwrap()
        };
        assert!(problem().is_some());
        ring.poison();
        assert_eq!(problem(), None);
        ring.set_current(8);
        assert!(problem().is_some(), "another open's");
        fs::remove_file(file_of(&path)).unwrap();
        fs::remove_file(path).unwrap();
    }
}
