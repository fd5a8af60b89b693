//! Changed blocks and groups in real bytes: backups that copy only the listed ranges, compared
//! with the snapshot byte by byte; streams that are cut; and one cut across two volumes.

#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    BlockMetadata, ControllerExpandVolumeRequest, CreateSnapshotRequest,
    CreateVolumeGroupSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest,
    GetMetadataAllocatedRequest, GetMetadataDeltaRequest,
};
use blockd_testkit::nbd::{Connection, Kind, NO_HOLE};
use blockd_tests::csi::rig::{Relay, Rig, Settings};
use blockd_tests::csi::{Answer, Driver, block, range};
use fastrand::Rng;
use tonic::{Code, Request};

const MIB: i64 = 1 << 20;
/// The logical block of volumes in a file.
const BLOCK: u64 = 512;
/// Bytes of which a pool knows whether they were written.
const SUB_BLOCK: u32 = 4096;
/// Bytes of one read.
const STEP: usize = 1 << 20;

fn volume(driver: &Driver, name: &str, size: i64) -> String {
    let request = CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: range(size, size),
        volume_capabilities: vec![block(Mode::SingleNodeWriter)],
        ..Default::default()
    };
    driver.create_volume(request).unwrap().volume.unwrap().volume_id
}

fn snapshot(driver: &Driver, volume: &str, name: &str) -> String {
    let request = CreateSnapshotRequest {
        source_volume_id: volume.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    };
    driver.create_snapshot(request).unwrap().snapshot.unwrap().snapshot_id
}

/// Does something over NBD with a volume or snapshot, which is attached for it.
fn with<T>(rig: &Rig, id: &str, act: impl FnOnce(&mut Connection) -> T) -> T {
    let name = id.split_once('/').unwrap().1;
    rig.daemon.cli(&["attach", "--nbd", name]).unwrap();
    let mut connection = rig.daemon.connect(name).unwrap();
    let done = act(&mut connection);
    drop(connection);
    rig.daemon.cli(&["detach", "--force", name]).unwrap();
    done
}

fn read(connection: &mut Connection, from: usize, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    // Of whole blocks, of which the wanted bytes are cut out.
    let block = usize::try_from(BLOCK).unwrap();
    let (begin, end) = (from / block * block, (from + len).next_multiple_of(block));
    for at in (begin..end).step_by(STEP) {
        bytes.extend(connection.read(at as u64, STEP.min(end - at)).unwrap());
    }
    bytes[from - begin..from - begin + len].to_vec()
}

fn read_all(rig: &Rig, id: &str) -> Vec<u8> {
    with(rig, id, |connection| {
        let size = usize::try_from(connection.size).unwrap();
        read(connection, 0, size)
    })
}

/// Writes, trims and zeroes somewhere, in whole blocks, often below what the pool maps.
fn change(connection: &mut Connection, rng: &mut Rng, count: usize) {
    let blocks = connection.size / BLOCK;
    for _ in 0..count {
        let from = rng.u64(..blocks);
        let most = if rng.u8(..8) == 0 { 512 } else { 40 };
        let len = rng.u64(1..=most).min(blocks - from) * BLOCK;
        let mut data = vec![0; usize::try_from(len).unwrap()];
        let (kind, flags) = match rng.u8(..8) {
            0 | 1 => (Kind::Trim, 0),
            2 => (Kind::WriteZeroes, NO_HOLE),
            3 => (Kind::WriteZeroes, 0),
            // Zeroes that are written as data.
            4 => (Kind::Write, 0),
            _ => {
                rng.fill(&mut data);
                (Kind::Write, 0)
            }
        };
        // Of the others only the length goes over the wire.
        connection.ask(kind, from * BLOCK, &mut data, flags).unwrap();
    }
    connection.flush().unwrap();
}

/// A request: for one snapshot, or since another.
#[derive(Clone, Copy)]
struct Ask<'a> {
    base: Option<&'a str>,
    target: &'a str,
}

/// The content of a stream as far as it was read.
#[derive(Debug, Default)]
struct Said {
    ranges: Vec<BlockMetadata>,
    capacity: Option<i64>,
    has_ended: bool,
}

impl Ask<'_> {
    /// Reads at most `messages` messages, by the rules of the specification.
    fn read(self, driver: &Driver, from: i64, max_results: i32, messages: usize) -> Answer<Said> {
        let mut client = driver.changes();
        let limit = Duration::from_secs(120);
        let starting_offset = from;
        driver.runtime().block_on(async move {
            let mut said = Said::default();
            macro_rules! go_through {
                ($stream:expr) => {{
                    let mut stream = $stream;
                    for _ in 0..messages {
                        let Some(one) = stream.message().await? else {
                            said.has_ended = true;
                            break;
                        };
                        said.take(one.volume_capacity_bytes, &one.block_metadata, max_results);
                    }
                }};
            }
            if let Some(base) = self.base {
                let mut request = Request::new(GetMetadataDeltaRequest {
                    base_snapshot_id: base.to_owned(),
                    target_snapshot_id: self.target.to_owned(),
                    starting_offset,
                    max_results,
                    ..Default::default()
                });
                request.set_timeout(limit);
                go_through!(client.get_metadata_delta(request).await?.into_inner());
            } else {
                let mut request = Request::new(GetMetadataAllocatedRequest {
                    snapshot_id: self.target.to_owned(),
                    starting_offset,
                    max_results,
                    ..Default::default()
                });
                request.set_timeout(limit);
                go_through!(client.get_metadata_allocated(request).await?.into_inner());
            }
            let first = said.ranges.first();
            assert!(first.is_none_or(|one| from < one.byte_offset + one.size_bytes));
            Ok(said)
        })
    }

    /// All of it, by a caller that disconnects time and again, and resumes where it was, or in the
    /// middle of the last range that it has received.
    fn read_in_pieces(self, driver: &Driver, rng: &mut Rng) -> (Vec<BlockMetadata>, i64, u32) {
        let (mut all, mut capacity, mut from, mut restarts) = (Vec::new(), None, 0, 0);
        loop {
            // It disconnects at least once where there is more than one message.
            let max_results = if restarts == 0 { 1 } else { *rng.choice(&[0, 1, 2, 5]).unwrap() };
            let messages = if restarts < 40 { rng.usize(1..5) } else { usize::MAX };
            let said = self.read(driver, from, max_results, messages).unwrap();
            assert!(capacity.is_none() || said.capacity.is_none() || capacity == said.capacity);
            capacity = capacity.or(said.capacity);
            all.extend(said.ranges);
            if said.has_ended {
                return (all, capacity.expect("no message had the size"), restarts);
            }
            restarts += 1;
            let Some(last) = all.last_mut() else { continue };
            if rng.bool() {
                last.size_bytes = rng.i64(1..=last.size_bytes);
            }
            from = last.byte_offset + last.size_bytes;
        }
    }
}

impl Said {
    fn take(&mut self, capacity: i64, ranges: &[BlockMetadata], max_results: i32) {
        let most = usize::try_from(max_results).unwrap();
        assert!(max_results == 0 || ranges.len() <= most, "{} of {most}", ranges.len());
        assert!(self.capacity.is_none_or(|known| known == capacity));
        self.capacity = Some(capacity);
        for range in ranges {
            let end = self.ranges.last().map_or(0, |last| last.byte_offset + last.size_bytes);
            assert!(range.byte_offset >= end && range.size_bytes > 0, "{range:?} after {end}");
            assert!(range.byte_offset + range.size_bytes <= capacity, "{range:?} of {capacity}");
            self.ranges.push(*range);
        }
    }
}

/// Copies these ranges of a snapshot into a backup, which becomes as long as the snapshot. How many
/// bytes that were.
fn apply(rig: &Rig, id: &str, ranges: &[BlockMetadata], size: i64, backup: &mut Vec<u8>) -> usize {
    backup.resize(usize::try_from(size).unwrap(), 0);
    with(rig, id, |connection| {
        let mut moved = 0;
        for range in ranges {
            let from = usize::try_from(range.byte_offset).unwrap();
            let len = usize::try_from(range.size_bytes).unwrap();
            backup[from..from + len].copy_from_slice(&read(connection, from, len));
            moved += len;
        }
        moved
    })
}

/// Compared without printing megabytes.
fn same(one: &[u8], other: &[u8]) -> Result<(), String> {
    if one == other {
        return Ok(());
    }
    if one.len() != other.len() {
        return Err(format!("{} and {} bytes", one.len(), other.len()));
    }
    let differs = one.iter().zip(other).position(|(one, other)| one != other);
    differs.map_or(Ok(()), |at| Err(format!("byte {at} differs")))
}

#[test]
fn a_backup_of_changed_blocks_is_the_snapshot_byte_for_byte() {
    let rig = Rig::start("backup", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let mut rng = Rng::with_seed(7);
    let id = volume(&driver, "source", 12 * MIB);
    let name = id.split_once('/').unwrap().1.to_owned();
    let mut backup = Vec::new();
    let (mut base, mut caught, mut caught_zeroes) = (None::<String>, 0, 0);
    for round in 0..7 {
        match round {
            2 => {
                let request = ControllerExpandVolumeRequest {
                    volume_id: id.clone(),
                    capacity_range: range(15 * MIB, 0),
                    ..Default::default()
                };
                driver.controller_expand_volume(request).unwrap();
            }
            // Cut off by hand, and grown again: what was behind the cut is zeroes.
            4 => {
                let cut = (8 * MIB).to_string();
                rig.daemon.cli(&["resize", "--shrink", "--size", &cut, &name]).unwrap();
                let size = (14 * MIB).to_string();
                rig.daemon.cli(&["resize", "--size", &size, &name]).unwrap();
            }
            _ => {}
        }
        // Once nothing is written at all.
        let count = [60, 60, 40, 0, 30, 60, 3][round];
        with(&rig, &id, |connection| change(connection, &mut rng, count));
        let target = snapshot(&driver, &id, &format!("round-{round}"));
        let truth = read_all(&rig, &target);
        let ask = Ask { base: base.as_deref(), target: &target };
        let (ranges, size, restarts) = ask.read_in_pieces(&driver, &mut rng);
        let before = backup.clone();
        let moved = apply(&rig, &target, &ranges, size, &mut backup);
        same(&backup, &truth).unwrap_or_else(|why| panic!("round {round}: {why}"));
        println!(
            "round {round}: {moved} of {size} bytes moved in {} ranges, {restarts} restarts",
            ranges.len()
        );
        assert!(round != 3 || ranges.is_empty(), "nothing was written: {ranges:?}");
        assert!(moved < truth.len(), "no more than a copy of all of it");
        (caught, caught_zeroes) = lose_each(&before, &truth, &ranges, (caught, caught_zeroes));
        // A backup taken anew is the same.
        let (whole, size, _) =
            Ask { base: None, target: &target }.read_in_pieces(&driver, &mut rng);
        let mut anew = Vec::new();
        apply(&rig, &target, &whole, size, &mut anew);
        same(&anew, &truth).unwrap_or_else(|why| panic!("round {round}, anew: {why}"));
        // The older one is not needed any more.
        if let Some(snapshot_id) = base.replace(target) {
            let request = DeleteSnapshotRequest { snapshot_id, ..Default::default() };
            driver.delete_snapshot(request).unwrap();
        }
    }
    println!("{caught} ranges left out were noticed, {caught_zeroes} of them zeroes");
    assert!(caught > 50 && caught_zeroes > 5, "{caught}, {caught_zeroes}");
}

/// Leaves out one range at a time, as a faulty plugin would: the comparison must fail wherever the
/// bytes were others before. Returns how many failed, and how many of them were zeroes.
fn lose_each(
    before: &[u8],
    truth: &[u8],
    ranges: &[BlockMetadata],
    (mut caught, mut zeroes): (u32, u32),
) -> (u32, u32) {
    let old = |at: usize| before.get(at).copied().unwrap_or(0);
    let mut without: Vec<u8> = truth.to_vec();
    for range in ranges {
        let from = usize::try_from(range.byte_offset).unwrap();
        let end = from + usize::try_from(range.size_bytes).unwrap();
        without[from..end].iter_mut().enumerate().for_each(|(at, byte)| *byte = old(from + at));
        let changed = (from..end).any(|at| old(at) != truth[at]);
        assert_eq!(same(&without, truth).is_err(), changed);
        caught += u32::from(changed);
        zeroes += u32::from(changed && truth[from..end].iter().all(|byte| *byte == 0));
        without[from..end].copy_from_slice(&truth[from..end]);
    }
    (caught, zeroes)
}

#[test]
fn a_stream_that_is_cut_at_any_message_is_an_error_and_goes_on_where_it_stopped() {
    let mut rig = Rig::start("cuts", &Settings::default()).unwrap();
    let relay = Relay::start(&rig.daemon.control_socket()).unwrap();
    rig.plugin.kill().unwrap();
    rig.plugin.redirect(&relay.socket());
    rig.plugin.start().unwrap();
    let driver = rig.plugin.driver().unwrap();
    let id = volume(&driver, "source", 40 * MIB);
    // Enough ranges for several messages of the daemon.
    with(&rig, &id, |connection| {
        for at in (0..connection.size).step_by(8192) {
            connection.write(at, &[1; 4096]).unwrap();
        }
        connection.flush().unwrap();
    });
    let target = snapshot(&driver, &id, "taken");
    let ask = Ask { base: None, target: &target };
    let expected = ask.read(&driver, 0, 0, usize::MAX).unwrap();
    assert_eq!(expected.ranges.len(), 40 * 128);
    let mut cuts = 0;
    for number in 0.. {
        assert!(number < 400, "it never ends");
        relay.arm(number);
        let done = AtomicBool::new(false);
        let (said, cut) = std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let said = read_until_it_fails(ask, &driver);
                done.store(true, Ordering::SeqCst);
                said
            });
            let cut = relay.wait(Duration::from_millis(2), || done.load(Ordering::SeqCst));
            relay.open();
            (reading.join().unwrap(), cut)
        });
        let (mut ranges, error) = said;
        if !cut {
            assert_eq!((ranges, error), (expected.ranges.clone(), None));
            break;
        }
        cuts += 1;
        if let Some(code) = error {
            assert_eq!(code, Code::Unavailable, "cut at message {number}");
            let from = ranges.last().map_or(0, |last| last.byte_offset + last.size_bytes);
            ranges.extend(ask.read(&driver, from, 0, usize::MAX).unwrap().ranges);
        }
        // A stream that ended without an error has all ranges.
        assert_eq!(ranges.len(), expected.ranges.len(), "cut at message {number}");
        assert_eq!(ranges, expected.ranges);
    }
    println!("{cuts} cuts");
    assert!(cuts > 8, "{cuts}");
}

/// The ranges that came, and the error that ended the stream, if one did.
fn read_until_it_fails(ask: Ask<'_>, driver: &Driver) -> (Vec<BlockMetadata>, Option<Code>) {
    let mut client = driver.changes();
    let mut request = Request::new(GetMetadataAllocatedRequest {
        snapshot_id: ask.target.to_owned(),
        ..Default::default()
    });
    request.set_timeout(Duration::from_secs(120));
    driver.runtime().block_on(async move {
        let mut ranges = Vec::new();
        let mut stream = match client.get_metadata_allocated(request).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => return (ranges, Some(status.code())),
        };
        loop {
            match stream.message().await {
                Ok(Some(message)) => ranges.extend(message.block_metadata),
                Ok(None) => return (ranges, None),
                Err(status) => return (ranges, Some(status.code())),
            }
        }
    })
}

#[test]
fn a_group_is_one_moment_of_all_its_volumes() {
    let rig = Rig::start("moment", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let ids = ["first", "second"].map(|name| volume(&driver, name, 8 * MIB));
    let names = ids.clone().map(|id| id.split_once('/').unwrap().1.to_owned());
    for name in &names {
        rig.daemon.cli(&["attach", "--nbd", name]).unwrap();
    }
    let stop = AtomicBool::new(false);
    let mut groups = Vec::new();
    let written = std::thread::scope(|scope| {
        // A number is in the second volume only after the first has answered for it.
        let writing = scope.spawn(|| {
            let mut connections = names.clone().map(|name| rig.daemon.connect(&name).unwrap());
            let mut number: u64 = 0;
            while !stop.load(Ordering::SeqCst) {
                number += 1;
                let mut block = [0; 512];
                block[..8].copy_from_slice(&number.to_le_bytes());
                for connection in &mut connections {
                    connection.write(4096, &block).unwrap();
                }
            }
            number
        });
        for number in 0..8 {
            let request = CreateVolumeGroupSnapshotRequest {
                name: format!("group-{number}"),
                source_volume_ids: ids.to_vec(),
                ..Default::default()
            };
            let answer = driver.create_volume_group_snapshot(request).unwrap();
            groups.push(answer.group_snapshot.unwrap());
        }
        stop.store(true, Ordering::SeqCst);
        writing.join().unwrap()
    });
    for name in &names {
        rig.daemon.cli(&["detach", "--force", name]).unwrap();
    }
    let mut last = 0;
    for group in &groups {
        let value = |volume: &str| {
            let one = group.snapshots.iter().find(|one| one.source_volume_id == volume).unwrap();
            let bytes = with(&rig, &one.snapshot_id, |connection| read(connection, 4096, 8));
            u64::from_le_bytes(bytes.try_into().unwrap())
        };
        let (first, second) = (value(&ids[0]), value(&ids[1]));
        assert!(first == second || first == second + 1, "{first} and {second}: {group:?}");
        assert!(last <= second && first <= written, "{last}, {first}, {second}, {written}");
        last = second;
    }
    println!("{} groups, {written} numbers written, the last group has {last}", groups.len());
}

/// As a mover of backups does: each snapshot's ranges go from the snapshot into a volume elsewhere,
/// here a new one. After the first snapshot what is listed is what was written. Later a write takes
/// the blocks along that lie in its extent and were written since the first, and they are listed
/// again.
#[test]
fn a_volume_is_restored_from_about_as_many_bytes_as_were_written() {
    const WRITES: u16 = 200;
    let rig = Rig::start("restore", &Settings::default()).unwrap();
    let driver = rig.plugin.driver().unwrap();
    let mut rng = Rng::with_seed(11);
    let source = volume(&driver, "source", 64 * MIB);
    with(&rig, &source, |connection| {
        let mut data = vec![0; STEP];
        for at in (0..connection.size).step_by(STEP) {
            rng.fill(&mut data);
            connection.write(at, &data).unwrap();
        }
        connection.flush().unwrap();
    });
    let copy = volume(&driver, "copy", 64 * MIB);
    let mut base = None::<String>;
    for round in 0..3 {
        if round > 0 {
            with(&rig, &source, |connection| {
                let blocks = connection.size / u64::from(SUB_BLOCK);
                let mut places: Vec<u64> = (0..blocks).collect();
                rng.shuffle(&mut places);
                let mut data = [0; SUB_BLOCK as usize];
                for place in &places[..WRITES.into()] {
                    rng.fill(&mut data);
                    connection.write(place * u64::from(SUB_BLOCK), &data).unwrap();
                }
                connection.flush().unwrap();
            });
        }
        let target = snapshot(&driver, &source, &format!("round-{round}"));
        let ask = Ask { base: base.as_deref(), target: &target };
        let ranges = ask.read(&driver, 0, 0, usize::MAX).unwrap().ranges;
        let listed: i64 = ranges.iter().map(|range| range.size_bytes).sum();
        let written = if round == 0 { 64 * MIB } else { i64::from(WRITES) * i64::from(SUB_BLOCK) };
        let most = if round < 2 { written } else { 2 * written };
        assert!((written..=most).contains(&listed), "round {round}: {listed}, not {written}");
        let parts: Vec<Vec<u8>> = with(&rig, &target, |connection| {
            let read = |range: &BlockMetadata| {
                let from = usize::try_from(range.byte_offset).unwrap();
                read(connection, from, usize::try_from(range.size_bytes).unwrap())
            };
            ranges.iter().map(read).collect()
        });
        with(&rig, &copy, |connection| {
            for (range, bytes) in ranges.iter().zip(&parts) {
                for (number, part) in bytes.chunks(STEP).enumerate() {
                    let from = u64::try_from(range.byte_offset).unwrap();
                    connection.write(from + (number * STEP) as u64, part).unwrap();
                }
            }
            connection.flush().unwrap();
        });
        same(&read_all(&rig, &copy), &read_all(&rig, &target)).unwrap();
        base = Some(target);
    }
}
