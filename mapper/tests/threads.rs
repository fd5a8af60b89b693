//! Workers and the engine on threads of their own, over memory, with snapshots, checkpoints and
//! volumes that come and go: the small cases of loom, run at scale.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::io::{IoCommand, IoOp};
use blockd_mapper::open::{OpenOptions, Opening};
use blockd_mapper::plan::{Answer, OpKind, Plan, Step};
use blockd_mapper::pool::{Pool, Tuning};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Attachment, Worker};
use common::Media;

const BLOCK: usize = 4096;
const POOL: usize = 48 << 20;
const WORKERS: u64 = 3;
/// Blocks of the volume that all workers share; each writes those of its own number.
const BLOCKS: u64 = 3 << 10;
const ROUNDS: u64 = 200_000;

/// A device of blocks that threads may touch at once; each block is read and written whole.
#[derive(Debug)]
struct Shared {
    blocks: Vec<Mutex<Vec<u8>>>,
}

impl Shared {
    fn new(bytes: &[u8]) -> Self {
        Self { blocks: bytes.chunks(BLOCK).map(|c| Mutex::new(c.to_vec())).collect() }
    }

    fn each(&self, offset: u64, len: u64, mut with: impl FnMut(&mut Vec<u8>, usize)) {
        let first = usize::try_from(offset).unwrap() / BLOCK;
        for n in 0..usize::try_from(len).unwrap() / BLOCK {
            with(&mut self.blocks[first + n].lock().unwrap(), n * BLOCK);
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.each(offset, bytes.len() as u64, |block, at| {
            block.copy_from_slice(&bytes[at..at + BLOCK]);
        });
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.each(offset, bytes.len() as u64, |block, at| {
            bytes[at..at + BLOCK].copy_from_slice(block);
        });
    }

    fn run(&self, command: &mut IoCommand) {
        match &mut command.op {
            IoOp::Fence | IoOp::Flush | IoOp::Discard { .. } => {}
            IoOp::Read { offset, buffer } => self.read(*offset, buffer.as_bytes_mut()),
            IoOp::Write { offset, buffer, .. } => self.write(*offset, buffer.as_bytes()),
        }
    }

    fn perform(&self, plan: &Plan, data: &mut [u8]) {
        for stage in 0..2 {
            for op in plan.ops().iter().filter(|op| op.stage == stage) {
                let from = usize::try_from(op.buffer_offset).unwrap();
                let len = usize::try_from(op.len).unwrap();
                match op.kind {
                    OpKind::Read => self.read(op.offset, &mut data[from..from + len]),
                    OpKind::ReadZeroes => data[from..from + len].fill(0),
                    OpKind::Write { .. } => self.write(op.offset, &data[from..from + len]),
                    OpKind::WriteZeroes { .. } => self.each(op.offset, op.len, |b, _| b.fill(0)),
                    OpKind::Copy { from_offset, .. } => {
                        let mut copy = vec![0; len];
                        self.read(from_offset, &mut copy);
                        self.write(op.offset, &copy);
                    }
                    OpKind::Flush => {}
                }
            }
        }
    }
}

/// One worker's thread: its requests, one at a time, and its expected reads.
struct Client {
    worker: Worker,
    pool: Arc<Pool>,
    media: Arc<Shared>,
    plan: Plan,
    number: u64,
    random: fastrand::Rng,
    /// Per own block: the tag last written, 0 for zeroes.
    expect: Vec<u64>,
}

impl Client {
    fn drive(
        &mut self,
        volume: &Attachment,
        data: &mut [u8],
        ask: impl Fn(&mut Worker, &mut Plan) -> Step,
    ) {
        loop {
            let events = self.pool.events();
            match ask(&mut self.worker, &mut self.plan) {
                Step::Issue { .. } => {
                    self.media.perform(&self.plan, data);
                    match self.worker.complete(volume, &mut self.plan, Ok(())).unwrap() {
                        Answer::Done => return,
                        Answer::Wait(ticket) => return self.wait(&ticket),
                    }
                }
                Step::Done { .. } => return,
                Step::Wait(ticket) => return self.wait(&ticket),
                Step::Park(_) => {
                    while self.pool.events() == events {
                        thread::yield_now();
                    }
                }
            }
        }
    }

    fn wait(&self, ticket: &blockd_mapper::plan::CommitTicket) {
        loop {
            match self.pool.commit_state(ticket) {
                Some(result) => return result.unwrap(),
                None => thread::yield_now(),
            }
        }
    }

    fn round(&mut self, volume: &Attachment, round: u64) {
        let own = self.random.u64(0..BLOCKS / WORKERS);
        let offset = (own * WORKERS + self.number) * BLOCK as u64;
        let at = usize::try_from(own).unwrap();
        let mut data = vec![0; BLOCK];
        match self.random.u8(0..20) {
            0..=8 => {
                let tag = (round << 8) | self.number | 0x80;
                data.chunks_mut(8).for_each(|c| c.copy_from_slice(&tag.to_le_bytes()));
                let fua = self.random.u8(0..50) == 0;
                self.drive(volume, &mut data, |w, p| {
                    w.write(volume, offset, BLOCK as u64, fua, p).unwrap()
                });
                self.expect[at] = tag;
            }
            9..=11 => {
                self.drive(volume, &mut data, |w, _| {
                    w.discard(volume, offset, BLOCK as u64).unwrap()
                });
                self.expect[at] = 0;
            }
            12 => {
                let unmap = round.is_multiple_of(2);
                self.drive(volume, &mut data, |w, p| {
                    w.write_zeroes(volume, offset, BLOCK as u64, unmap, p).unwrap()
                });
                self.expect[at] = 0;
            }
            13 if round.is_multiple_of(8) => {
                self.drive(volume, &mut [], |w, p| w.flush(volume, p).unwrap())
            }
            _ => {
                data.fill(0xAA);
                self.drive(volume, &mut data, |w, p| {
                    w.read(volume, offset, BLOCK as u64, p).unwrap()
                });
                let tag = self.expect[at].to_le_bytes();
                let number = self.number;
                assert!(
                    data.chunks(8).all(|c| c == tag),
                    "worker {number} block {own}: {:x?}",
                    &data[..8]
                );
            }
        }
    }
}

fn poll(engine: &mut Engine, media: &Shared, clock: &AtomicU64) {
    let now = clock.fetch_add(100_000, Ordering::Relaxed);
    while let Some(mut command) = engine.poll(now) {
        media.run(&mut command);
        engine.complete(command, Ok(()));
    }
}

/// The engine's thread: polls, and in between takes snapshots and drops them again.
fn serve(engine: &mut Engine, media: &Shared, volume: VolumeId, stop: &AtomicBool) -> u64 {
    let (clock, mut snapshot, mut taken) = (AtomicU64::new(1), None, 0);
    let mut waiting = None;
    let mut turns = 0_u64;
    while !stop.load(Ordering::Acquire) || waiting.is_some() {
        poll(engine, media, &clock);
        turns += 1;
        if let Some((_, outcome)) = engine.take_outcome() {
            waiting = None;
            match outcome.unwrap() {
                Outcome::Created(id) => {
                    taken += 1;
                    snapshot = Some(id);
                }
                Outcome::Deleted => snapshot = None,
                _ => {}
            }
        }
        if waiting.is_none() && turns.is_multiple_of(64) {
            let control = match snapshot {
                Some(volume) => Control::Delete { volume },
                None if turns.is_multiple_of(128) => Control::Checkpoint,
                None => Control::Snapshot { source: volume, name: format!("s{turns}") },
            };
            waiting = Some(engine.submit(control));
        }
        thread::yield_now();
    }
    taken
}

#[test]
fn workers_and_engine_on_their_own_threads() {
    let mut media = Media::new(&[POOL]);
    media.create();
    let workers = usize::try_from(WORKERS).unwrap();
    let tuning = Tuning { workers, commit_interval_ns: 10_000_000, ..Tuning::default() };
    let mut opening = Opening::new(OpenOptions { tuning, ..media.open_options() }).unwrap();
    let shared = Arc::new(Shared::new(&media.devices[0]));
    while let Some(mut command) = opening.poll() {
        shared.run(&mut command);
        opening.complete(command, Ok(()));
    }
    let opened = opening.finish().unwrap();
    let (mut engine, pool) = (opened.engine, opened.pool);
    let clock = AtomicU64::new(1);
    let size = BLOCKS * BLOCK as u64;
    engine.submit(Control::Create { name: "v".into(), size, block_size: 4096 });
    let volume = loop {
        poll(&mut engine, &shared, &clock);
        if let Some((_, outcome)) = engine.take_outcome() {
            let Outcome::Created(id) = outcome.unwrap() else { panic!("not created") };
            break id;
        }
    };
    let stop = AtomicBool::new(false);
    let taken = thread::scope(|scope| {
        let clients: Vec<_> = (0..WORKERS)
            .map(|number| {
                let (worker, pool, media) =
                    (pool.worker().unwrap(), Arc::clone(&pool), Arc::clone(&shared));
                let expect = vec![0; usize::try_from(BLOCKS / WORKERS).unwrap()];
                let random = fastrand::Rng::with_seed(number + 1);
                let plan = Plan::with_capacity(64);
                let mut client = Client { worker, pool, media, plan, number, random, expect };
                scope.spawn(move || {
                    let attachment = client.worker.attach(volume).unwrap();
                    for round in 1..=ROUNDS {
                        client.round(&attachment, round);
                    }
                    client.worker.detach(attachment);
                })
            })
            .collect();
        let (engine, media, stop) = (&mut engine, &shared, &stop);
        let server = scope.spawn(move || serve(engine, media, volume, stop));
        for client in clients {
            client.join().unwrap();
        }
        stop.store(true, Ordering::Release);
        server.join().unwrap()
    });
    assert!(taken > 10, "only {taken} snapshots were taken");
    for _ in 0..200 {
        clock.fetch_add(1_000_000_000, Ordering::Relaxed);
        poll(&mut engine, &shared, &clock);
    }
    assert!(pool.failure().is_none(), "{:?}", pool.failure());
    assert!(engine.is_idle());
    engine.check_invariants().unwrap();
}
