//! A pool over plain memory with one worker, driven to rest after every step. Nothing fails here
//! and nothing is reordered: those are the simulator's business.

use std::sync::Arc;

use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::{IoCommand, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, Opening, PresentDevice};
use blockd_mapper::plan::{Answer, CommitTicket, OpKind, Plan, Step};
use blockd_mapper::pool::{Pool, Tuning};
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Attachment, Worker};

/// Rounds after which something that should have ended never will.
const PATIENCE: usize = 100_000;
/// What a device holds before anything is written: nobody may count on zeroes.
const UNWRITTEN: u8 = 0xEE;

/// The devices of a pool, as bytes.
#[derive(Clone, Debug, Default)]
pub struct Media {
    /// One entry for each device.
    pub devices: Vec<Vec<u8>>,
}

impl Media {
    /// Makes a pool on new devices of these sizes, with a log of so many bytes or the default.
    pub fn create(
        extent_size: u32,
        sizes: &[usize],
        wal_size: Option<u64>,
    ) -> Result<Self, MapperError> {
        let mut media = Self { devices: sizes.iter().map(|&s| vec![UNWRITTEN; s]).collect() };
        let device = |(index, &size): (usize, &usize)| NewDevice {
            name: format!("disk{index}"),
            uuid: [byte(index) + 1; 16],
            size: size as u64,
            block_size: 512,
            class: 0,
        };
        let mut creating = Creating::new(&CreateOptions {
            pool_id: [7; 16],
            extent_size,
            devices: sizes.iter().enumerate().map(device).collect(),
            wal_size,
            reserve_size: None,
            node: 0,
        })?;
        while let Some(mut command) = creating.poll() {
            media.run(&mut command);
            creating.complete(command, Ok(()));
        }
        creating.finish()?;
        Ok(media)
    }

    fn run(&mut self, command: &mut IoCommand) {
        let device = &mut self.devices[usize::from(command.device.0)];
        match &mut command.op {
            IoOp::Fence | IoOp::Flush | IoOp::Discard { .. } => {}
            IoOp::Read { offset, buffer } => {
                let (at, bytes) = (place(*offset), buffer.as_bytes_mut());
                bytes.copy_from_slice(&device[at..at + bytes.len()]);
            }
            IoOp::Write { offset, buffer, .. } => {
                let (at, bytes) = (place(*offset), buffer.as_bytes());
                device[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }
}

/// An open pool.
#[derive(Debug)]
pub struct Rig {
    /// What it lies on.
    pub media: Media,
    engine: Engine,
    pool: Arc<Pool>,
    worker: Worker,
    plan: Plan,
    now: u64,
}

impl Rig {
    /// Opens the pool on these devices, with no ring.
    pub fn open(mut media: Media) -> Result<Self, MapperError> {
        let device = |(index, bytes): (usize, &Vec<u8>)| PresentDevice {
            name: format!("disk{index}"),
            size: bytes.len() as u64,
            block_size: 512,
        };
        let mut opening = Opening::new(OpenOptions {
            devices: media.devices.iter().enumerate().map(device).collect(),
            mode: OpenMode::ReadWrite,
            ring: None,
            boot_id: [9; 16],
            open_id: 0x1234,
            accept_loss: true,
            node: 0,
            tuning: Tuning::default(),
        })?;
        while let Some(mut command) = opening.poll() {
            media.run(&mut command);
            opening.complete(command, Ok(()));
        }
        let opened = opening.finish()?;
        let worker = opened.pool.worker()?;
        let plan = Plan::with_capacity(64);
        let mut rig =
            Self { media, engine: opened.engine, pool: opened.pool, worker, plan, now: 1 };
        rig.settle();
        Ok(rig)
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

    /// Does a control command.
    pub fn control(&mut self, control: Control) -> Result<Outcome, MapperError> {
        self.engine.submit(control);
        for _ in 0..64 {
            self.settle();
            if let Some((_, outcome)) = self.engine.take_outcome() {
                return outcome;
            }
            self.now += 1_000_000;
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
        let ask = |w: &mut Worker, v: &Attachment, o, l, p: &mut Plan| w.write(v, o, l, false, p);
        self.all(id, offset, &mut data.to_vec(), ask)
    }

    /// Reads from a volume.
    pub fn read(&mut self, id: VolumeId, offset: u64, len: usize) -> Result<Vec<u8>, MapperError> {
        let mut data = vec![0xAB; len];
        self.all(id, offset, &mut data, |w, v, o, l, p| w.read(v, o, l, p))?;
        Ok(data)
    }

    /// Discards a range of a volume.
    pub fn discard(&mut self, id: VolumeId, offset: u64, len: usize) -> Result<(), MapperError> {
        self.all(id, offset, &mut vec![0; len], |w, v, o, l, _| w.discard(v, o, l))
    }

    /// Makes a range of a volume read as zeroes.
    pub fn write_zeroes(
        &mut self,
        id: VolumeId,
        offset: u64,
        len: usize,
        unmap: bool,
    ) -> Result<(), MapperError> {
        self.all(id, offset, &mut vec![0; len], |w, v, o, l, p| w.write_zeroes(v, o, l, unmap, p))
    }

    /// Makes what was answered durable, through a volume.
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
    ) -> Result<(), MapperError> {
        let volume = self.worker.attach(id)?;
        let (mut done, len) = (0, data.len() as u64);
        for _ in 0..PATIENCE {
            if done == len {
                self.worker.detach(volume);
                return Ok(());
            }
            match ask(&mut self.worker, &volume, offset + done, len - done, &mut self.plan)? {
                Step::Issue { covered } => {
                    self.perform(&mut data[place(done)..]);
                    self.finish(&volume)?;
                    done += covered;
                }
                Step::Done { covered } => done += covered,
                Step::Wait(ticket) => self.wait(&ticket)?,
                Step::Park(_) => self.settle(),
            }
        }
        panic!("the request never ended");
    }

    /// Does the planned operations on the media; `data` is the request's buffer.
    fn perform(&mut self, data: &mut [u8]) {
        for stage in 0..2 {
            for op in self.plan.ops().iter().filter(|op| op.stage == stage) {
                let (at, len, from) = (place(op.offset), place(op.len), place(op.buffer_offset));
                let buffer = from..from + len;
                if let OpKind::Copy { from_device, from_offset } = op.kind {
                    let start = place(from_offset);
                    let source = &self.media.devices[usize::from(from_device.0)];
                    let copy = source[start..start + len].to_vec();
                    self.media.devices[usize::from(op.device.0)][at..at + len]
                        .copy_from_slice(&copy);
                    continue;
                }
                if matches!(op.kind, OpKind::Flush) {
                    continue;
                }
                if matches!(op.kind, OpKind::ReadZeroes) {
                    data[buffer].fill(0);
                    continue;
                }
                let media = &mut self.media.devices[usize::from(op.device.0)][at..at + len];
                match op.kind {
                    OpKind::Read => data[buffer].copy_from_slice(media),
                    OpKind::Write { .. } => media.copy_from_slice(&data[buffer]),
                    OpKind::WriteZeroes { .. } => media.fill(0),
                    OpKind::ReadZeroes | OpKind::Copy { .. } | OpKind::Flush => {}
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
            self.settle();
        }
        panic!("the commit never ended");
    }
}

/// An offset or length as an index into memory.
fn place(bytes: u64) -> usize {
    usize::try_from(bytes).expect("devices of a rig fit into memory")
}

fn byte(index: usize) -> u8 {
    u8::try_from(index).expect("a pool has at most 16 devices")
}
