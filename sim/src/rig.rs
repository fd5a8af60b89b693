//! A pool over plain memory with one worker, driven to rest after every step. Nothing fails here
//! and nothing is reordered: the simulator covers those. The operations on the media can be
//! recorded in a journal, for tests that interrupt it.

mod journal;
mod media;

use std::collections::BTreeMap;
use std::sync::Arc;

use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::open::{OpenOptions, OpenReport, Opened, Opening};
use blockd_mapper::plan::{Answer, CommitTicket, OpKind, ParkReason, Plan, Step};
use blockd_mapper::pool::Pool;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Attachment, DiffRange, Look, Worker};

pub use journal::{Event, Journal, image};
pub use media::Media;

/// Rounds after which something that should have ended never will.
const PATIENCE: usize = 100_000;
/// Attempts before a parked request counts as stuck: no other client exists that could free space.
const ATTEMPTS: usize = 12;
/// The content of a device before the first write: code must not rely on zeroes.
const UNWRITTEN: u8 = 0xEE;
/// Bytes of a block as [`Rig::blocks`] counts them.
pub const BLOCK: usize = 4096;

/// A request that changes a volume.
#[derive(Clone, Copy, Debug)]
pub enum Request<'a> {
    /// To write bytes.
    Write {
        /// The bytes.
        data: &'a [u8],
        /// Durable on answer.
        fua: bool,
    },
    /// Discards a number of bytes.
    Discard {
        /// How many.
        len: usize,
    },
    /// Zeroes a number of bytes.
    Zeroes {
        /// How many.
        len: usize,
        /// Their space is given back.
        unmap: bool,
    },
}

/// How far a request came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes done, from the start.
    pub bytes: usize,
    /// The reason for which it would wait for ever.
    pub stuck: Option<ParkReason>,
}

/// An open pool.
#[derive(Debug)]
pub struct Rig {
    /// Its media.
    pub media: Media,
    /// The report of the opening.
    pub report: OpenReport,
    engine: Engine,
    pool: Arc<Pool>,
    worker: Worker,
    plan: Plan,
    now: u64,
}

impl Rig {
    /// Opens the pool on these devices, with no ring.
    pub fn open(media: Media) -> Result<Self, MapperError> {
        let options = media.options();
        Self::open_with(media, options).map_err(|(error, _)| error)
    }

    /// Opens the pool so; an error comes with the resulting media.
    pub fn open_with(
        mut media: Media,
        options: OpenOptions,
    ) -> Result<Self, (MapperError, Box<Media>)> {
        let opened = match run_opening(&mut media, options) {
            Ok(opened) => opened,
            Err(error) => return Err((error, Box::new(media))),
        };
        let worker = match opened.pool.worker() {
            Ok(worker) => worker,
            Err(error) => return Err((error, Box::new(media))),
        };
        let plan = Plan::with_capacity(64);
        let (engine, pool, report) = (opened.engine, opened.pool, opened.report);
        let mut rig = Self { media, report, engine, pool, worker, plan, now: 1 };
        rig.settle();
        Ok(rig)
    }

    /// The engine, to be asked about the pool.
    #[must_use]
    pub const fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Advances time until no work is left, then recounts everything.
    pub fn check(&mut self) -> Result<(), String> {
        for _ in 0..4 {
            self.now += 2_000_000_000;
            self.settle();
        }
        if !self.engine.is_idle() {
            return Err(format!("never at rest: {:?}", self.engine));
        }
        self.engine.check_invariants()
    }

    /// Lets this many nanoseconds pass.
    pub fn pass(&mut self, ns: u64) {
        self.now += ns;
        self.settle();
    }

    /// Steps the engine until it has nothing to do at this time.
    pub fn settle(&mut self) {
        for _ in 0..8 {
            while let Some(mut command) = self.engine.poll(self.now) {
                self.media.run(&mut command);
                self.engine.complete(command, Ok(()));
            }
        }
    }

    /// One command of the engine, at this time; `false`: it has none.
    fn step(&mut self) -> bool {
        let Some(mut command) = self.engine.poll(self.now) else { return false };
        self.media.run(&mut command);
        self.engine.complete(command, Ok(()));
        true
    }

    /// Does a control command. Work of the engine after its answer is left for later.
    pub fn control(&mut self, control: Control) -> Result<Outcome, MapperError> {
        self.engine.submit(control);
        for _ in 0..PATIENCE {
            let stepped = self.step();
            if let Some((_, outcome)) = self.engine.take_outcome() {
                return outcome;
            }
            self.now += if stepped { 0 } else { 1_000_000 };
        }
        panic!("the command never ended: {:?}", self.engine);
    }

    /// Does a control command that makes something.
    pub fn make(&mut self, control: Control) -> Result<VolumeId, MapperError> {
        match self.control(control)? {
            Outcome::Created(id) => Ok(id),
            other => panic!("nothing was made: {other:?}"),
        }
    }

    /// Writes to a volume.
    pub fn write(&mut self, id: VolumeId, offset: u64, data: &[u8]) -> Result<(), MapperError> {
        self.whole(id, offset, Request::Write { data, fua: false })
    }

    /// Returns the worker's differences of a whole volume from another.
    pub fn changes(
        &mut self,
        id: VolumeId,
        since: Option<VolumeId>,
    ) -> Result<Option<Vec<DiffRange>>, MapperError> {
        let volume = self.worker.attach(id)?;
        let size = volume.size();
        let (mut all, mut part, mut offset): (Vec<DiffRange>, Vec<DiffRange>, u64) =
            (Vec::new(), Vec::new(), 0);
        while offset < size {
            let look = Look { offset, len: size - offset, max_ranges: 3, max_work: 1 };
            let is_found = self.worker.changes(&volume, since, &look, &mut part);
            if is_found != Ok(true) {
                self.worker.detach(volume);
                return is_found.map(|_| None);
            }
            assert!((1..=3).contains(&part.len()), "{part:?}");
            for range in part.drain(..) {
                assert_eq!(range.offset, offset);
                offset += range.len;
                match all.last_mut() {
                    Some(last) if last.state == range.state => last.len += range.len,
                    _ => all.push(range),
                }
            }
        }
        self.worker.detach(volume);
        Ok(Some(all))
    }

    /// Reads from a volume.
    pub fn read(&mut self, id: VolumeId, offset: u64, len: usize) -> Result<Vec<u8>, MapperError> {
        let mut data = vec![0xAB; len];
        let progress = self.all(id, offset, &mut data, |w, v, o, l, p| w.read(v, o, l, p))?;
        assert_eq!(progress.stuck, None, "a read parked");
        Ok(data)
    }

    /// All of a volume that isn't zero, by the number of its 4 KiB block, whatever its size.
    pub fn blocks(
        &mut self,
        id: VolumeId,
        size: u64,
    ) -> Result<BTreeMap<u64, Vec<u8>>, MapperError> {
        let volume = self.worker.attach(id)?;
        let (mut blocks, mut done) = (BTreeMap::new(), 0);
        while done < size {
            let len = size - done;
            let Step::Issue { covered } = self.worker.read(&volume, done, len, &mut self.plan)?
            else {
                panic!("a read of {len} bytes at {done} wasn't planned");
            };
            for op in self.plan.ops().iter().filter(|op| op.kind == OpKind::Read) {
                let (at, len) = (place(op.offset), place(op.len));
                let bytes = &self.media.devices[usize::from(op.device.0)][at..at + len];
                let first = (done + op.buffer_offset) / BLOCK as u64;
                for (number, block) in (first..).zip(bytes.chunks(BLOCK)) {
                    if block.iter().any(|byte| *byte != 0) {
                        blocks.insert(number, block.to_vec());
                    }
                }
            }
            self.finish(&volume)?;
            done += covered;
        }
        self.worker.detach(volume);
        Ok(blocks)
    }

    /// Discards a range of a volume.
    pub fn discard(&mut self, id: VolumeId, offset: u64, len: usize) -> Result<(), MapperError> {
        self.whole(id, offset, Request::Discard { len })
    }

    /// Makes a range of a volume read as zeroes.
    pub fn write_zeroes(
        &mut self,
        id: VolumeId,
        offset: u64,
        len: usize,
        unmap: bool,
    ) -> Result<(), MapperError> {
        self.whole(id, offset, Request::Zeroes { len, unmap })
    }

    fn whole(
        &mut self,
        id: VolumeId,
        offset: u64,
        request: Request<'_>,
    ) -> Result<(), MapperError> {
        let progress = self.request(id, offset, request)?;
        assert_eq!(progress.stuck, None, "{request:?}");
        Ok(())
    }

    /// Does a request, or as much of it as there is room for.
    pub fn request(
        &mut self,
        id: VolumeId,
        offset: u64,
        request: Request<'_>,
    ) -> Result<Progress, MapperError> {
        match request {
            Request::Write { data, fua } => {
                self.all(id, offset, &mut data.to_vec(), |w, v, o, l, p| w.write(v, o, l, fua, p))
            }
            Request::Discard { len } => {
                self.all(id, offset, &mut vec![0; len], |w, v, o, l, _| w.discard(v, o, l))
            }
            Request::Zeroes { len, unmap } => {
                let ask = |w: &mut Worker, v: &Attachment, o, l, p: &mut Plan| {
                    w.write_zeroes(v, o, l, unmap, p)
                };
                self.all(id, offset, &mut vec![0; len], ask)
            }
        }
    }

    /// Makes answered changes durable, through a volume.
    pub fn flush(&mut self, id: VolumeId) -> Result<(), MapperError> {
        let volume = self.worker.attach(id)?;
        match self.worker.flush(&volume, &mut self.plan)? {
            Step::Issue { .. } => {
                self.perform(&mut []);
                self.finish(&volume)?;
            }
            Step::Wait(ticket) => self.wait(&ticket)?,
            Step::Done { .. } => {}
            Step::Park(reason) => panic!("a flush parked: {reason:?}"),
        }
        self.worker.detach(volume);
        Ok(())
    }

    /// Repeats a request until all of it is done.
    fn all(
        &mut self,
        id: VolumeId,
        offset: u64,
        data: &mut [u8],
        ask: impl Fn(&mut Worker, &Attachment, u64, u64, &mut Plan) -> Result<Step, MapperError>,
    ) -> Result<Progress, MapperError> {
        let volume = self.worker.attach(id)?;
        let (mut done, len) = (0, data.len() as u64);
        let (mut parked, mut stuck) = (0, None);
        for _ in 0..PATIENCE {
            if done == len || stuck.is_some() {
                self.worker.detach(volume);
                return Ok(Progress { bytes: place(done), stuck });
            }
            match ask(&mut self.worker, &volume, offset + done, len - done, &mut self.plan)? {
                Step::Issue { covered } => {
                    self.perform(&mut data[place(done)..]);
                    self.finish(&volume)?;
                    (done, parked) = (done + covered, 0);
                }
                Step::Done { covered } => (done, parked) = (done + covered, 0),
                Step::Wait(ticket) => self.wait(&ticket)?,
                Step::Park(reason) => {
                    parked += 1;
                    stuck = (parked > ATTEMPTS).then_some(reason);
                    // The timers may free something.
                    self.now += if parked > ATTEMPTS / 2 { 1_000_000_000 } else { 0 };
                    self.settle();
                }
            }
        }
        panic!("the request never ended");
    }

    /// Does the planned operations on the media; `data` is the request's buffer.
    fn perform(&mut self, data: &mut [u8]) {
        let media = &mut self.media;
        for stage in 0..2 {
            for op in self.plan.ops().iter().filter(|op| op.stage == stage) {
                let (at, len, from) = (place(op.offset), place(op.len), place(op.buffer_offset));
                let (device, buffer) = (usize::from(op.device.0), from..from + len);
                match op.kind {
                    OpKind::Read => {
                        data[buffer].copy_from_slice(&media.devices[device][at..at + len]);
                    }
                    OpKind::ReadZeroes => data[buffer].fill(0),
                    OpKind::Write { fua } => media.write(device, at, &data[buffer], fua),
                    OpKind::WriteZeroes { fua } => media.write(device, at, &vec![0; len], fua),
                    OpKind::Copy { from_device, from_offset } => {
                        let start = place(from_offset);
                        let source = &media.devices[usize::from(from_device.0)];
                        let copy = source[start..start + len].to_vec();
                        media.write(device, at, &copy, false);
                    }
                    OpKind::Flush => media.flush(device),
                }
            }
        }
    }

    fn finish(&mut self, volume: &Attachment) -> Result<(), MapperError> {
        match self.worker.complete(volume, &mut self.plan, Ok(()))? {
            Answer::Done => Ok(()),
            Answer::Wait(ticket) => self.wait(&ticket),
        }
    }

    fn wait(&mut self, ticket: &CommitTicket) -> Result<(), MapperError> {
        for _ in 0..PATIENCE {
            if let Some(result) = self.pool.commit_state(ticket) {
                return result;
            }
            self.step();
        }
        panic!("the commit never ended");
    }
}

/// Steps an opening to its end.
fn run_opening(media: &mut Media, options: OpenOptions) -> Result<Opened, MapperError> {
    let mut opening = Opening::new(options)?;
    while let Some(mut command) = opening.poll() {
        media.run(&mut command);
        opening.complete(command, Ok(()));
    }
    opening.finish()
}

/// An offset or length as an index into memory.
fn place(bytes: u64) -> usize {
    usize::try_from(bytes).expect("devices of a rig fit into memory")
}

fn byte(index: usize) -> u8 {
    u8::try_from(index).expect("a pool has at most 16 devices")
}
