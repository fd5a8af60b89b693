//! A pool in persistent memory under losses of power, by a memory that records which stores have
//! been fenced: log, data and lanes of the real mapper, carried out by the daemon's rules. Every
//! image that could be left opens and holds what was answered; every fence that is left out is
//! missed.

#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use std::sync::Arc;

use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::io::{IoCommand, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, Opening, PresentDevice};
use blockd_mapper::plan::{Answer, CommitTicket, OpKind, Plan, PlanOp, Step};
use blockd_mapper::pool::{Pool, Tuning};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Attachment, Worker};
use blockd_pmem::media::{LANE_BYTES, Lanes, Media};
use blockd_pmem::recorder::Recorder;

const POOL_BYTES: u64 = 4 << 20;
const EXTENT: u32 = 64 << 10;
const BLOCK: usize = 4096;
/// Blocks that are written, in four extents.
const BLOCKS: usize = 64;
const LANES: u64 = 2;

/// The steps that a test omits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    Nothing,
    /// Before the map shows what was written.
    FenceBeforeMap,
    /// Before what has ended is answered.
    FenceBeforeAnswer,
    /// Of the log, and all metadata.
    FenceOfEngine,
    /// The commit that a change of the map is answered after.
    Commit,
    Lane,
}

/// The content of a block from a moment on, and the moment since when that was answered.
#[derive(Clone, Copy, Debug)]
struct Write {
    value: u64,
    begun: usize,
    answered: Option<usize>,
}

struct Rig {
    memory: Arc<Recorder>,
    /// The same memory for the pool's thread.
    engines: Recorder,
    lanes: Lanes<Arc<Recorder>>,
    pool: Arc<Pool>,
    engine: Engine,
    worker: Worker,
    plan: Plan,
    now: u64,
    whole: bool,
    left: Left,
}

fn run(memory: &dyn Media, command: &mut IoCommand, fences: bool) {
    match &mut command.op {
        IoOp::Fence | IoOp::Discard { .. } | IoOp::Flush => {}
        IoOp::Read { offset, buffer } => memory.read(*offset, buffer.as_bytes_mut()).unwrap(),
        IoOp::Write { offset, buffer, .. } => {
            memory.write(*offset, buffer.as_bytes()).unwrap();
            if fences {
                memory.fence();
            }
        }
    }
}

fn open_options() -> OpenOptions {
    let device = PresentDevice { name: "memory".to_owned(), size: POOL_BYTES, block_size: 512 };
    OpenOptions {
        devices: vec![device],
        mode: OpenMode::ReadWrite,
        ring: None,
        boot_id: [9; 16],
        open_id: 0x1234,
        accept_loss: true,
        node: 0,
        tuning: Tuning {
            workers: 1,
            quantum: 4,
            synchronous: true,
            whole_blocks: true,
            commit_blocks: 4,
            ..Tuning::default()
        },
    }
}

fn area() -> std::ops::Range<u64> {
    POOL_BYTES..POOL_BYTES + LANES * LANE_BYTES
}

impl Rig {
    fn new(whole: bool, left: Left) -> Self {
        let bytes = usize::try_from(area().end).unwrap();
        let first = Recorder::new(vec![0xEE; bytes]);
        let options = CreateOptions {
            pool_id: [7; 16],
            extent_size: EXTENT,
            devices: vec![NewDevice {
                name: "memory".to_owned(),
                uuid: [1; 16],
                size: POOL_BYTES,
                block_size: 512,
                class: 0,
            }],
            wal_size: None,
            reserve_size: None,
            node: 0,
            composite: false,
        };
        let mut creating = Creating::new(&options).unwrap();
        while let Some(mut command) = creating.poll() {
            run(&first, &mut command, true);
            creating.complete(command, Ok(()));
        }
        creating.finish().unwrap();
        Lanes::format(Arc::new(first.another_thread()), area(), 2).unwrap();
        Self::open(first.present(), whole, left)
    }

    fn open(image: Vec<u8>, whole: bool, left: Left) -> Self {
        let memory = Arc::new(Recorder::new(image));
        let (lanes, _) = Lanes::open(Arc::clone(&memory), area()).unwrap();
        let engines = memory.another_thread();
        let mut opening = Opening::new(open_options()).unwrap();
        while let Some(mut command) = opening.poll() {
            run(&engines, &mut command, true);
            opening.complete(command, Ok(()));
        }
        let opened = opening.finish().unwrap();
        let worker = opened.pool.worker().unwrap();
        let (pool, engine) = (opened.pool, opened.engine);
        let plan = Plan::with_capacity(64);
        let mut rig =
            Self { memory, engines, lanes, pool, engine, worker, plan, now: 1, whole, left };
        rig.settle();
        rig
    }

    fn settle(&mut self) {
        let fences = self.left != Left::FenceOfEngine;
        for _ in 0..8 {
            while let Some(mut command) = self.engine.poll(self.now) {
                run(&self.engines, &mut command, fences);
                self.engine.complete(command, Ok(()));
            }
        }
    }

    fn volume(&mut self) -> VolumeId {
        let (name, size) = ("v".to_owned(), (BLOCKS * BLOCK) as u64);
        let id = self.engine.submit(Control::Create { name, size, block_size: 512 });
        for _ in 0..1000 {
            self.settle();
            self.now += 1_000_000;
            if let Some((ended, Ok(Outcome::Created(volume) | Outcome::Existing(volume)))) =
                self.engine.take_outcome()
            {
                assert_eq!(ended, id);
                return volume;
            }
        }
        panic!("no volume");
    }

    fn wait(&mut self, ticket: &CommitTicket) {
        if self.left == Left::Commit {
            return;
        }
        for _ in 0..64 {
            if let Some(result) = self.pool.commit_state(ticket) {
                return result.unwrap();
            }
            self.settle();
        }
        panic!("the commit never ended");
    }

    fn perform(&self, op: PlanOp, data: &mut [u8]) {
        let from = usize::try_from(op.buffer_offset).unwrap();
        let len = usize::try_from(op.len).unwrap();
        let write = |bytes: &[u8]| {
            if op.unseen || !self.whole || self.left == Left::Lane {
                return self.memory.write(op.offset, bytes).unwrap();
            }
            self.lanes.write(0, op.offset, bytes).unwrap();
        };
        match op.kind {
            OpKind::Read => self.memory.read(op.offset, &mut data[from..from + len]).unwrap(),
            OpKind::ReadZeroes => data[from..from + len].fill(0),
            OpKind::Write { .. } => write(&data[from..from + len]),
            OpKind::WriteZeroes { .. } => write(&vec![0; len]),
            OpKind::Copy { from_offset, .. } => {
                let mut bytes = vec![0; len];
                self.memory.read(from_offset, &mut bytes).unwrap();
                write(&bytes);
            }
            OpKind::Flush => {}
        }
    }

    /// Does a request, up to where only the fence before its answer is left.
    fn all(
        &mut self,
        volume: &Attachment,
        at: u64,
        data: &mut [u8],
        ask: impl Fn(&mut Worker, u64, u64, &mut Plan) -> Step,
    ) {
        let (mut done, len) = (0, data.len() as u64);
        while done < len {
            match ask(&mut self.worker, at + done, len - done, &mut self.plan) {
                Step::Issue { covered } => {
                    let start = usize::try_from(done).unwrap();
                    for stage in 0..2 {
                        for op in self.plan.ops().iter().filter(|op| op.stage == stage) {
                            self.perform(*op, &mut data[start..]);
                        }
                    }
                    if self.plan.changes_map() && self.left != Left::FenceBeforeMap {
                        self.memory.fence();
                    }
                    if let Answer::Wait(ticket) =
                        self.worker.complete(volume, &mut self.plan, Ok(())).unwrap()
                    {
                        self.wait(&ticket);
                    }
                    done += covered;
                }
                Step::Done { covered } => done += covered,
                Step::Wait(ticket) => self.wait(&ticket),
                Step::Park(_) => self.settle(),
            }
        }
    }

    fn flush(&mut self, volume: &Attachment) {
        match self.worker.flush(volume, &mut self.plan).unwrap() {
            Step::Wait(ticket) => self.wait(&ticket),
            Step::Issue { .. } => {
                self.worker.complete(volume, &mut self.plan, Ok(())).unwrap();
            }
            Step::Done { .. } | Step::Park(_) => {}
        }
    }

    /// Writes and discards, some in batches with one fence. Gives what each block was to hold.
    fn work(&mut self, seed: u64) -> Vec<Vec<Write>> {
        let id = self.volume();
        let volume = self.worker.attach(id).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut histories: Vec<Vec<Write>> = vec![Vec::new(); BLOCKS];
        let mut number = 0;
        for _ in 0..24 {
            let mut batch = Vec::new();
            for _ in 0..random.usize(1..=2) {
                let count = random.usize(1..=2);
                let first = random.usize(..BLOCKS - count) / if random.bool() { 1 } else { 16 };
                let discards = random.usize(..8) == 0;
                number += 1;
                let value = if discards { 0 } else { number };
                for history in &mut histories[first..first + count] {
                    let begun = self.memory.moment();
                    history.push(Write { value, begun, answered: None });
                }
                batch.extend(first..first + count);
                let mut data = content(value).repeat(count);
                let at = (first * BLOCK) as u64;
                if discards {
                    self.all(&volume, at, &mut data, |w, at, len, _| {
                        w.discard(&volume, at, len).unwrap()
                    });
                    self.flush(&volume);
                } else {
                    self.all(&volume, at, &mut data, |w, at, len, plan| {
                        w.write(&volume, at, len, true, plan).unwrap()
                    });
                }
            }
            if self.left != Left::FenceBeforeAnswer {
                self.memory.fence();
            }
            let answered = Some(self.memory.moment());
            for block in batch {
                for write in histories[block].iter_mut().filter(|one| one.answered.is_none()) {
                    write.answered = answered;
                }
            }
        }
        self.worker.detach(volume);
        histories
    }
}

fn content(value: u64) -> Vec<u8> {
    (0..BLOCK as u64 / 8)
        .flat_map(|word| if value == 0 { [0; 8] } else { (value << 16 | word).to_le_bytes() })
        .collect()
}

/// Whether a block's content can be there after a loss of power at a moment.
fn is_allowed(history: &[Write], moment: usize, whole: bool, found: &[u8]) -> bool {
    let known = history.iter().rposition(|one| one.answered.is_some_and(|at| at <= moment));
    let later = &history[known.map_or(0, |at| at + 1)..];
    let begun: Vec<u64> =
        later.iter().filter(|one| one.begun < moment).map(|one| one.value).collect();
    let known = known.map_or(0, |at| history[at].value);
    if begun.is_empty() || whole {
        return found == content(known) || begun.iter().any(|&value| found == content(value));
    }
    // Torn, but only of values that were written.
    let values: Vec<Vec<u8>> = begun.iter().chain([&known]).map(|&value| content(value)).collect();
    let mut words = found.chunks(8).enumerate();
    words.all(|(at, word)| values.iter().any(|value| &value[at * 8..at * 8 + 8] == word))
}

/// How many images were looked at, or what is wrong with one.
fn look(whole: bool, left: Left, seed: u64, moments: usize) -> Result<usize, String> {
    let mut rig = Rig::new(whole, left);
    let begin = rig.memory.moment();
    let histories = rig.work(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut looked, end) = (0, rig.memory.moment());
    for _ in 0..moments {
        let moment = random.usize(begin..=end);
        for image in rig.memory.images(moment, 2, random.u64(..)) {
            looked += 1;
            let mut after = Rig::open(image, whole, Left::Nothing);
            let Some(summary) = after.pool.summaries().into_iter().find(|one| one.name == "v")
            else {
                // It was just being made.
                let written = histories.iter().flatten().any(|one| one.begun < moment);
                if written {
                    return Err(format!("at {moment} the volume is gone"));
                }
                continue;
            };
            let volume = after.worker.attach(summary.id).unwrap();
            let mut found = vec![0xAB; BLOCKS * BLOCK];
            after.all(&volume, 0, &mut found, |w, at, len, plan| {
                w.read(&volume, at, len, plan).unwrap()
            });
            after.worker.detach(volume);
            for (block, bytes) in found.chunks(BLOCK).enumerate() {
                if !is_allowed(&histories[block], moment, whole, bytes) {
                    return Err(format!("at {moment} of {end} block {block} holds what it can't"));
                }
            }
        }
    }
    Ok(looked)
}

/// Row: P24.
#[test]
fn every_image_that_could_be_left_holds_what_was_answered() {
    for (whole, seed) in [(true, 1), (true, 2), (false, 3)] {
        let looked = look(whole, Left::Nothing, seed, 60);
        assert!(looked.clone().is_ok_and(|images| images >= 120), "{whole} {seed}: {looked:?}");
    }
}

/// Row: P24.
#[test]
fn each_fence_that_is_left_out_is_missed() {
    for (whole, left) in [
        (true, Left::FenceBeforeMap),
        (false, Left::FenceBeforeAnswer),
        (true, Left::FenceOfEngine),
        (true, Left::Commit),
        (true, Left::Lane),
    ] {
        let missed = (1..20).any(|seed| look(whole, left, seed, 60).is_err());
        assert!(missed, "{left:?}");
    }
}
