//! A pool over plain memory, driven to rest after every step. No faults: those are the
//! simulator's business.
#![allow(dead_code, clippy::unwrap_used, reason = "test code; every test file uses a part of it")]

use std::sync::Arc;

use blockd_mapper::create::{CreateOptions, Creating, NewDevice};
use blockd_mapper::engine::{Control, Engine, Outcome};
use blockd_mapper::error::MapperError;
use blockd_mapper::io::{IoCommand, IoOp};
use blockd_mapper::open::{OpenMode, OpenOptions, OpenReport, Opening, PresentDevice};
use blockd_mapper::plan::{Answer, CommitTicket, OpKind, Plan, Step};
use blockd_mapper::pool::{Pool, Tuning};
use blockd_mapper::ring::RingMemory;
use blockd_mapper::units::VolumeId;
use blockd_mapper::worker::{Attachment, Worker};

pub(crate) const POOL: [u8; 16] = [7; 16];
pub(crate) const BOOT: [u8; 16] = [9; 16];

#[derive(Clone, Debug, Default)]
pub(crate) struct Media {
    pub(crate) devices: Vec<Vec<u8>>,
    pub(crate) flushes: u64,
    pub(crate) writes: u64,
    pub(crate) fua_writes: u64,
    /// Bytes that all devices have read and written, for requests and for the engine.
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
}

impl Media {
    pub(crate) fn new(sizes: &[usize]) -> Self {
        Self { devices: sizes.iter().map(|&s| vec![0xEE; s]).collect(), ..Self::default() }
    }

    pub(crate) fn run(&mut self, command: &mut IoCommand) {
        let device = &mut self.devices[usize::from(command.device.0)];
        match &mut command.op {
            IoOp::Fence | IoOp::Discard { .. } => {}
            IoOp::Flush => self.flushes += 1,
            IoOp::Read { offset, buffer } => {
                let at = usize::try_from(*offset).unwrap();
                let bytes = buffer.as_bytes_mut();
                bytes.copy_from_slice(&device[at..at + bytes.len()]);
                self.read_bytes += bytes.len() as u64;
            }
            IoOp::Write { offset, buffer, fua } => {
                let at = usize::try_from(*offset).unwrap();
                let bytes = buffer.as_bytes();
                device[at..at + bytes.len()].copy_from_slice(bytes);
                self.written_bytes += bytes.len() as u64;
                self.writes += 1;
                self.fua_writes += u64::from(*fua);
            }
        }
    }

    pub(crate) fn options(&self) -> CreateOptions {
        let device = |(index, bytes): (usize, &Vec<u8>)| NewDevice {
            name: format!("disk{index}"),
            uuid: [u8::try_from(index).unwrap() + 1; 16],
            size: bytes.len() as u64,
            block_size: 512,
            class: 0,
        };
        CreateOptions {
            pool_id: POOL,
            extent_size: 64 << 10,
            devices: self.devices.iter().enumerate().map(device).collect(),
            wal_size: None,
            reserve_size: None,
            node: 0,
            composite: false,
        }
    }

    pub(crate) fn create(&mut self) {
        self.create_with(&self.options());
    }

    pub(crate) fn create_with(&mut self, options: &CreateOptions) {
        let mut creating = Creating::new(options).unwrap();
        while let Some(mut command) = creating.poll() {
            self.run(&mut command);
            creating.complete(command, Ok(()));
        }
        creating.finish().unwrap();
    }

    pub(crate) fn open_options(&self) -> OpenOptions {
        let device = |(index, bytes): (usize, &Vec<u8>)| PresentDevice {
            name: format!("disk{index}"),
            size: bytes.len() as u64,
            block_size: 512,
        };
        OpenOptions {
            devices: self.devices.iter().enumerate().map(device).collect(),
            mode: OpenMode::ReadWrite,
            ring: None,
            boot_id: BOOT,
            open_id: 0x1234,
            accept_loss: true,
            node: 0,
            tuning: Tuning::default(),
        }
    }
}

/// An open pool with one worker.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) media: Media,
    pub(crate) engine: Engine,
    pub(crate) pool: Arc<Pool>,
    pub(crate) worker: Worker,
    pub(crate) plan: Plan,
    pub(crate) now: u64,
    pub(crate) report: OpenReport,
}

impl Rig {
    pub(crate) fn new(sizes: &[usize]) -> Self {
        let mut media = Media::new(sizes);
        media.create();
        Self::open(media).unwrap()
    }

    pub(crate) fn open(media: Media) -> Result<Self, MapperError> {
        let options = media.open_options();
        Self::open_with(media, options)
    }

    pub(crate) fn open_with(mut media: Media, options: OpenOptions) -> Result<Self, MapperError> {
        let mut opening = Opening::new(options)?;
        while let Some(mut command) = opening.poll() {
            media.run(&mut command);
            opening.complete(command, Ok(()));
        }
        let opened = opening.finish()?;
        let worker = opened.pool.worker()?;
        let mut rig = Self {
            media,
            engine: opened.engine,
            pool: opened.pool,
            worker,
            plan: Plan::with_capacity(64),
            now: 1,
            report: opened.report,
        };
        rig.settle();
        Ok(rig)
    }

    pub(crate) fn with_ring(ring: Arc<dyn RingMemory>, media: Media) -> Result<Self, MapperError> {
        let options = OpenOptions { ring: Some(ring), accept_loss: false, ..media.open_options() };
        Self::open_with(media, options)
    }

    /// Steps the engine until it has nothing to do at this time.
    pub(crate) fn settle(&mut self) {
        for _ in 0..8 {
            while let Some(mut command) = self.engine.poll(self.now) {
                self.media.run(&mut command);
                self.engine.complete(command, Ok(()));
            }
        }
    }

    pub(crate) fn control(&mut self, control: Control) -> Result<Outcome, MapperError> {
        let id = self.engine.submit(control);
        for round in 0..20_000 {
            self.settle();
            if let Some((ended, outcome)) = self.engine.take_outcome() {
                assert_eq!(ended, id);
                return outcome;
            }
            // It waits for another thread of the test, which may not be running.
            if round < 64 {
                self.now += 1_000_000;
            } else {
                std::thread::yield_now();
            }
        }
        panic!("the command never ended: {:?}", self.engine);
    }

    pub(crate) fn create(&mut self, name: &str, size: u64) -> VolumeId {
        let control = Control::Create { name: name.to_owned(), size, block_size: 512 };
        match self.control(control).unwrap() {
            Outcome::Created(id) => id,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn wait(&mut self, ticket: &CommitTicket) -> Result<(), MapperError> {
        for _ in 0..64 {
            if let Some(result) = self.pool.commit_state(ticket) {
                return result;
            }
            self.settle();
        }
        panic!("the commit never ended");
    }

    /// Does the planned operations on the media; `data` is the request's buffer.
    fn perform(&mut self, data: &mut [u8]) {
        for stage in 0..2 {
            for op in self.plan.ops().iter().filter(|op| op.stage == stage) {
                let (at, len) =
                    (usize::try_from(op.offset).unwrap(), usize::try_from(op.len).unwrap());
                let from = usize::try_from(op.buffer_offset).unwrap();
                let device = usize::from(op.device.0);
                if matches!(op.kind, OpKind::Read | OpKind::Copy { .. }) {
                    self.media.read_bytes += op.len;
                }
                if !matches!(op.kind, OpKind::Read | OpKind::ReadZeroes | OpKind::Flush) {
                    self.media.written_bytes += op.len;
                }
                match op.kind {
                    OpKind::Read => {
                        data[from..from + len]
                            .copy_from_slice(&self.media.devices[device][at..at + len]);
                    }
                    OpKind::ReadZeroes => data[from..from + len].fill(0),
                    OpKind::Write { .. } => {
                        self.media.devices[device][at..at + len]
                            .copy_from_slice(&data[from..from + len]);
                    }
                    OpKind::WriteZeroes { .. } => self.media.devices[device][at..at + len].fill(0),
                    OpKind::Copy { from_device, from_offset } => {
                        let start = usize::try_from(from_offset).unwrap();
                        let copy = self.media.devices[usize::from(from_device.0)]
                            [start..start + len]
                            .to_vec();
                        self.media.devices[device][at..at + len].copy_from_slice(&copy);
                    }
                    OpKind::Flush => self.media.flushes += 1,
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

    /// Repeats a request until all of it is done.
    fn all(
        &mut self,
        volume: &Attachment,
        offset: u64,
        data: &mut [u8],
        ask: impl Fn(&mut Worker, u64, u64, &mut Plan) -> Result<Step, MapperError>,
    ) -> Result<(), MapperError> {
        let (mut done, len) = (0, data.len() as u64);
        let mut parked = None;
        for _ in 0..100_000 {
            if done == len {
                return Ok(());
            }
            match ask(&mut self.worker, offset + done, len - done, &mut self.plan)? {
                Step::Issue { covered } => {
                    let start = usize::try_from(done).unwrap();
                    self.perform(&mut data[start..]);
                    self.finish(volume)?;
                    done += covered;
                }
                Step::Done { covered } => done += covered,
                Step::Wait(ticket) => self.wait(&ticket)?,
                Step::Park(reason) => {
                    parked = Some(reason);
                    self.settle();
                }
            }
        }
        panic!("the request never ended: {parked:?}, {:?}", self.engine.space());
    }

    pub(crate) fn write(
        &mut self,
        volume: &Attachment,
        offset: u64,
        data: &[u8],
    ) -> Result<(), MapperError> {
        let mut data = data.to_vec();
        self.all(volume, offset, &mut data, |w, o, l, p| w.write(volume, o, l, false, p))
    }

    pub(crate) fn write_fua(
        &mut self,
        volume: &Attachment,
        offset: u64,
        data: &[u8],
    ) -> Result<(), MapperError> {
        let mut data = data.to_vec();
        self.all(volume, offset, &mut data, |w, o, l, p| w.write(volume, o, l, true, p))
    }

    pub(crate) fn read(&mut self, volume: &Attachment, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0xAB; len];
        self.all(volume, offset, &mut data, |w, o, l, p| w.read(volume, o, l, p)).unwrap();
        data
    }

    pub(crate) fn discard(&mut self, volume: &Attachment, offset: u64, len: usize) {
        let mut data = vec![0; len];
        self.all(volume, offset, &mut data, |w, o, l, _| w.discard(volume, o, l)).unwrap();
    }

    pub(crate) fn write_zeroes(
        &mut self,
        volume: &Attachment,
        offset: u64,
        len: usize,
        unmap: bool,
    ) {
        let mut data = vec![0; len];
        self.all(volume, offset, &mut data, |w, o, l, p| w.write_zeroes(volume, o, l, unmap, p))
            .unwrap();
    }

    pub(crate) fn flush(&mut self, volume: &Attachment) -> Result<(), MapperError> {
        match self.worker.flush(volume, &mut self.plan)? {
            Step::Issue { .. } => {
                self.perform(&mut []);
                self.finish(volume)
            }
            Step::Wait(ticket) => self.wait(&ticket),
            Step::Done { .. } => Ok(()),
            Step::Park(reason) => panic!("a flush parked: {reason:?}"),
        }
    }

    pub(crate) fn attach(&mut self, volume: VolumeId) -> Attachment {
        self.worker.attach(volume).unwrap()
    }

    /// Everything counted again, at rest.
    pub(crate) fn check(&mut self) {
        for _ in 0..4 {
            self.now += 2_000_000_000;
            self.settle();
        }
        assert!(self.engine.is_idle(), "{:?}", self.engine);
        self.engine.check_invariants().unwrap();
    }

    /// Kills the process; only the media are left.
    pub(crate) fn kill(self) -> Media {
        self.media
    }
}
