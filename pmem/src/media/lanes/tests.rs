use std::collections::BTreeSet;
use std::ops::Range;

use super::*;
use crate::recorder::Recorder;

/// Lanes in front, three blocks of data behind them.
const AREA: Range<u64> = 0..2 * LANE_BYTES;
const DATA: u64 = 2 * LANE_BYTES;
const LEN: usize = (2 * (BLOCKS + 1) + 3) * BLOCK;

/// A write as a client sees it: from when it was under way, until when it was answered.
struct Write {
    at: u64,
    bytes: Vec<u8>,
    begun: usize,
    answered: usize,
    /// Not through a lane: it may be torn until it is answered.
    plain: bool,
}

struct Rig {
    lanes: [Lanes<Recorder>; 2],
    writes: Vec<Write>,
}

impl Rig {
    fn new(left: Left) -> Self {
        let first = Recorder::new(vec![0; LEN]);
        let second = first.another_thread();
        let mut first = Lanes::format(first, AREA, 2).unwrap();
        let mut second = Lanes::new(second, AREA).unwrap();
        first.left = left;
        second.left = left;
        Self { lanes: [first, second], writes: Vec::new() }
    }

    fn recorder(&self) -> &Recorder {
        self.lanes[0].media()
    }

    /// A write by one of the threads, answered when it comes back.
    fn write(&mut self, lane: usize, at: u64, value: u8, len: usize) {
        let bytes = vec![value; len];
        let begun = self.recorder().moment();
        self.lanes[lane].write(lane, at, &bytes).unwrap();
        let answered = self.recorder().moment();
        self.writes.push(Write { at, bytes, begun, answered, plain: false });
    }

    /// A write that needs no lane, as to a place that is not visible yet.
    fn write_plainly(&mut self, thread: usize, at: u64, value: u8, len: usize) {
        let bytes = vec![value; len];
        let begun = self.recorder().moment();
        self.lanes[thread].media().write(at, &bytes).unwrap();
        self.lanes[thread].media().fence();
        let answered = self.recorder().moment();
        self.writes.push(Write { at, bytes, begun, answered, plain: true });
    }

    /// Loses power at every moment, recovers, and loses it again at every moment of that. Returns
    /// the invalid contents that were found.
    fn faults(&self) -> BTreeSet<String> {
        let mut faults = BTreeSet::new();
        for moment in 0..=self.recorder().moment() {
            if self.lanes[0].left != Left::Nothing && !faults.is_empty() {
                // One is enough to see that a step is needed.
                break;
            }
            for (number, image) in
                self.recorder().images(moment, 24, moment as u64).into_iter().enumerate()
            {
                let again = Recorder::new(image);
                self.recover(again.another_thread());
                faults.extend(self.judge(moment, &again.present()));
                // A second loss, while the first is recovered from.
                if number % 8 > 0 {
                    continue;
                }
                let step = (again.moment() / 4).max(1);
                for second in (0..again.moment()).step_by(step) {
                    for image in again.images(second, 3, second as u64) {
                        let last = Recorder::new(image);
                        self.recover(last.another_thread());
                        faults.extend(self.judge(moment, &last.present()));
                    }
                }
            }
        }
        faults
    }

    fn recover(&self, memory: Recorder) {
        let mut lanes = Lanes::new(memory, AREA).unwrap();
        lanes.left = self.lanes[0].left;
        lanes.replay().unwrap();
    }

    /// Each written range holds the content of a single write: the last that was answered, or one
    /// that was under way.
    fn judge(&self, moment: usize, image: &[u8]) -> Option<String> {
        for write in &self.writes {
            let len = write.bytes.len() as u64;
            let range =
                usize::try_from(write.at).unwrap()..usize::try_from(write.at + len).unwrap();
            let found = &image[range.clone()];
            let same = |other: &&Write| other.at == write.at && other.bytes.len() as u64 == len;
            let of_range: Vec<&Write> = self.writes.iter().filter(same).collect();
            let known = of_range.iter().filter(|one| one.answered <= moment);
            let known = known.max_by_key(|one| one.answered);
            let old = known.map_or_else(|| vec![0; write.bytes.len()], |one| one.bytes.clone());
            let under_way = |one: &&&Write| one.begun < moment && moment < one.answered;
            if of_range.iter().filter(under_way).any(|one| one.plain) {
                continue;
            }
            let allowed = of_range.iter().filter(under_way).map(|one| &one.bytes);
            if found != old && !allowed.into_iter().any(|bytes| found == *bytes) {
                let first = found.first();
                let cut = found.iter().position(|byte| Some(byte) != first);
                return Some(format!("moment {moment}, {range:?}: {first:?}, cut at {cut:?}"));
            }
        }
        None
    }
}

/// The clients' writes: both threads over the same block in turn, parts of blocks, two blocks at
/// once, and a plain write behind one through a lane.
fn story(left: Left) -> BTreeSet<String> {
    let mut rig = Rig::new(left);
    rig.write(0, DATA, 1, BLOCK);
    rig.write(1, DATA, 2, BLOCK);
    rig.write(0, DATA + BLOCK as u64, 3, BLOCK);
    rig.write_plainly(1, DATA, 4, BLOCK);
    rig.write(1, DATA + BLOCK as u64, 5, BLOCK);
    rig.write(0, DATA, 6, BLOCK);
    rig.faults()
}

/// Row: P24.
#[test]
fn a_block_is_always_the_old_or_the_new_one() {
    assert_eq!(story(Left::Nothing), BTreeSet::new());
}

#[test]
fn sectors_beside_each_other_do_not_disturb_each_other() {
    let mut rig = Rig::new(Left::Nothing);
    rig.write(0, DATA + 512, 1, 512);
    rig.write(1, DATA, 2, 512);
    rig.write(0, DATA + 512, 3, 512);
    rig.write(1, DATA + 1024, 4, 1024);
    assert_eq!(rig.faults(), BTreeSet::new());
}

/// Row: P24.
#[test]
fn every_step_that_is_left_out_is_missed() {
    let steps = [
        Left::FenceOfData,
        Left::FenceOfLine,
        Left::FenceOfPlace,
        Left::Clearing,
        Left::RestOfClearing,
        Left::FenceOfClearing,
        Left::Lane,
    ];
    for left in steps {
        assert_ne!(story(left), BTreeSet::new(), "{left:?} is not needed");
    }
}

#[test]
fn a_write_across_blocks_is_whole_in_each() {
    let recorder = Recorder::new(vec![0; LEN]);
    let lanes = Lanes::format(recorder, AREA, 2).unwrap();
    let begun = lanes.media().moment();
    lanes.write(1, DATA + 2048, &[7; BLOCK]).unwrap();
    let end = lanes.media().moment();
    let mut kinds = BTreeSet::new();
    for moment in begun..=end {
        for image in lanes.media().images(moment, 12, 3) {
            let again = Recorder::new(image);
            Lanes::open(again.another_thread(), AREA).unwrap();
            let at = usize::try_from(DATA).unwrap();
            let found = again.present();
            let halves = [&found[at + 2048..at + BLOCK], &found[at + BLOCK..at + BLOCK + 2048]];
            for half in halves {
                assert!(half.iter().all(|byte| byte == &half[0]), "torn at moment {moment}");
            }
            kinds.insert(halves.map(|half| half[0]));
        }
    }
    assert!(kinds.contains(&[0, 0]) && kinds.contains(&[7, 7]), "{kinds:?}");
}

#[test]
fn lines_are_laid_out_as_described() {
    let line = Line::new(0x0102_0304_0506_0708, 0x1000, 4096);
    let mut expected = [0; 64];
    expected[..8].copy_from_slice(b"ENALDKLB");
    expected[8..16].copy_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1]);
    expected[17] = 0x10;
    expected[25] = 0x10;
    let sum = crc32c::crc32c(&expected[..60]);
    expected[60..].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(line.as_bytes(), expected);
    assert_eq!(line.parse(), Some((0x1000, 4096)));
    let mut torn = line;
    torn.target = 0x2000.into();
    assert_eq!(torn.parse(), None);
    assert_eq!(Line::new(1, 0x1200, 4096).parse(), None, "it leaves its block");
}

#[test]
fn an_area_that_does_not_do_is_refused() {
    let media = || Recorder::new(vec![0; LEN]);
    assert!(Lanes::format(media(), 0..LANE_BYTES, 2).is_err());
    assert!(Lanes::format(media(), 0..LANE_BYTES - 1, 1).is_err());
    assert!(Lanes::format(media(), 512..512 + LANE_BYTES, 1).is_err());
    assert!(Lanes::format(media(), 0..1 << 30, 1).is_err());
    let lanes = Lanes::format(media(), AREA, 2).unwrap();
    assert!(lanes.write(2, DATA, &[1]).is_err());
}

/// A mapping of memory of this process: lanes in front, and as much again.
fn mapping() -> (std::sync::Arc<crate::media::Mapping>, u64) {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let file = nix::sys::memfd::memfd_create(c"blockd-test", flags).unwrap();
    let file = std::fs::File::from(file);
    file.set_len(2 * AREA.end).unwrap();
    let options = crate::media::MappingOptions::default();
    let map = crate::media::Mapping::from_file(std::sync::Arc::new(file), &options).unwrap();
    (std::sync::Arc::new(map), AREA.end)
}

#[test]
fn threads_that_write_the_same_blocks_leave_one_of_them_in_each() {
    let (map, data) = mapping();
    let lanes = Lanes::format(std::sync::Arc::clone(&map), AREA, 2).unwrap();
    let blocks = 9;
    for round in 0..20_u8 {
        std::thread::scope(|scope| {
            // Two threads share a lane: they wait for each other, and nothing is lost.
            for (thread, lane) in [0, 1, 1].into_iter().enumerate() {
                let lanes = &lanes;
                scope.spawn(move || {
                    let value = round * 3 + u8::try_from(thread).unwrap() + 1;
                    lanes.write(lane, data, &vec![value; blocks * BLOCK]).unwrap();
                });
            }
        });
        let mut found = vec![0; blocks * BLOCK];
        map.read(data, &mut found).unwrap();
        for block in found.chunks(BLOCK) {
            let value = block[0];
            assert!((round * 3 + 1..=round * 3 + 3).contains(&value), "round {round}: {value}");
            assert!(block.iter().all(|byte| *byte == value), "torn in round {round}");
        }
    }
    // All lines are cleared.
    let (_, replayed) = Lanes::open(map, AREA).unwrap();
    assert_eq!(replayed, Replayed::default());
}

#[test]
fn a_lane_in_bad_memory_is_not_used() {
    let (map, data) = mapping();
    let format = || Lanes::format(std::sync::Arc::clone(&map), AREA, 2).unwrap();
    let lanes = format();
    let bad = |start: u64| map.set_bad(std::iter::once(start..start + 512).collect());
    // A block of the first lane, found when it is written.
    bad(lanes.block_of(0, 1));
    lanes.write(0, data, &[3; 3 * BLOCK]).unwrap();
    assert!(lanes.is_bad(0) && !lanes.is_bad(1));
    // Its lines, found when it is opened.
    bad(lanes.line_of(0, 0));
    let (lanes, replayed) = Lanes::open(std::sync::Arc::clone(&map), AREA).unwrap();
    assert_eq!((replayed.bad_lanes, replayed.writes), (1, 0));
    lanes.write(0, data, &[4; 3 * BLOCK]).unwrap();
    let mut found = [0; 3 * BLOCK];
    map.read(data, &mut found).unwrap();
    assert_eq!(found, [4; 3 * BLOCK]);
    // Nothing that is good is left.
    map.set_bad([0, 1].map(|lane| lanes.line_of(lane, 0)..lanes.line_of(lane, 1)).to_vec());
    assert!(lanes.write(0, data, &[5; BLOCK]).is_err());
    assert!(Lanes::open(std::sync::Arc::clone(&map), AREA).is_err());
    map.read(data, &mut found).unwrap();
    assert_eq!(found, [4; 3 * BLOCK], "a write that was refused has written");
}

#[test]
fn a_bad_block_fails_and_those_beside_it_are_whole() {
    let (map, data) = mapping();
    let lanes = Lanes::format(std::sync::Arc::clone(&map), AREA, 2).unwrap();
    let bad = data + BLOCK as u64;
    map.set_bad(std::iter::once(bad..bad + 512).collect());
    let failed = lanes.write(0, data, &[1; 3 * BLOCK]).unwrap_err();
    assert!(matches!(failed, MediaError::KnownBad { at } if at == bad), "{failed}");
    let mut found = [0; BLOCK];
    for block in [data, data + 2 * BLOCK as u64] {
        map.read(block, &mut found).unwrap();
        assert_eq!(found, [1; BLOCK]);
    }
    // The lane serves on, and nothing is carried out again later.
    lanes.write(0, data, &[2; BLOCK]).unwrap();
    let (_, replayed) = Lanes::open(map, AREA).unwrap();
    assert_eq!(replayed, Replayed::default());
}

#[test]
fn several_writes_at_once_are_each_whole() {
    let recorder = Recorder::new(vec![0; LEN]);
    let lanes = Lanes::format(recorder, AREA, 2).unwrap();
    let begun = lanes.media().moment();
    let block = |number: u64| DATA + number * BLOCK as u64;
    let (one, two, three) = ([1; BLOCK], [2; 512], [3; BLOCK]);
    // Two of the same block: the later one remains.
    let writes: [(u64, &[u8]); 4] =
        [(block(0), &one), (block(1) + 512, &two), (block(2), &one), (block(2), &three)];
    lanes.write_each(1, &writes).unwrap();
    let end = lanes.media().moment();
    let range = |number: u64, from: usize, len: usize| {
        let start = usize::try_from(block(number)).unwrap() + from;
        start..start + len
    };
    let mut kinds = BTreeSet::new();
    for moment in begun..=end {
        for image in lanes.media().images(moment, 12, 5) {
            let again = Recorder::new(image);
            Lanes::open(again.another_thread(), AREA).unwrap();
            let found = again.present();
            let kind = [range(0, 0, BLOCK), range(1, 512, 512), range(2, 0, BLOCK)].map(|range| {
                let part = &found[range];
                assert!(part.iter().all(|byte| *byte == part[0]), "torn at moment {moment}");
                part[0]
            });
            assert!(found[range(1, 0, 512)].iter().all(|byte| *byte == 0), "a sector beside it");
            kinds.insert(kind);
        }
    }
    assert!(kinds.contains(&[0, 0, 0]) && kinds.contains(&[1, 2, 3]), "{kinds:?}");
    let settled = lanes.media().images(end, 4, 1);
    assert!(settled.iter().all(|image| image[range(2, 0, BLOCK)] == three));
}
