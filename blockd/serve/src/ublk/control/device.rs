//! The steps of one device's commands, on its own thread.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockd_engine::pool::VolumeId;
use blockd_media::ublk::features;

use super::driver::{AddRequest, DeviceInfo, DeviceState, Driver, DriverError, Serve};
use super::mark::Mark;
use super::params::Params;
use super::seat::{Patience, Seat};
use super::users::{Places, numbers_of};
use super::{DeviceError, DeviceOptions, QueueHost, called};
use crate::ublk::{QueueSpec, QueueStandby};

/// Requests of a queue when each has a buffer of its own: 32 of 128 KiB are 4 MiB, half of what an
/// idle device may take in memory.
const COPY_DEPTH: u16 = 32;
/// Requests of a queue when nothing is copied: they cost a few hundred bytes each.
const ZERO_COPY_DEPTH: u16 = 128;

/// How long workers may take to let go of a device that was stopped: the media's IO that is under
/// way ends in this time, or the media is what hangs.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How long the block device's file may take to appear. The kernel makes it before `START_DEV`
/// comes back; where udev makes it, some milliseconds later.
const FILE_LIMIT: Duration = Duration::from_secs(1);
const FILE_LOOK: Duration = Duration::from_millis(5);

/// How long the kernel's look for partitions is waited for, and how long no read means its end.
const LOOK_LIMIT: Duration = Duration::from_secs(3);
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// The kernel's timeout for slow requests, in milliseconds: it checks each second.
const TIMEOUT_MS: &str = "1000";

/// The volume that a device is of, and what was asked for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSpec {
    /// The identity of the pool.
    pub pool: [u8; 16],
    /// The pool's name.
    pub pool_name: String,
    /// Which of its volumes.
    pub volume: VolumeId,
    /// The volume's name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Logical block in bytes.
    pub block_size: u32,
    /// The pool's extent in bytes.
    pub extent_size: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Answered writes may have to be flushed.
    pub write_cache: bool,
    /// How many queues. 0: as configured.
    pub queues: u16,
    /// Requests that each can have in flight. 0: as configured.
    pub depth: u16,
    /// The pool's devices can do IO with pages that are not ours.
    pub zero_copy: bool,
    /// The present device's mark, if that device was added before it was known for which volume.
    pub ready_mark: Option<u16>,
    /// The pool is not open here: requests wait until it is.
    pub stands_by: bool,
}

/// A device, or why there is none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceView {
    /// N of `/dev/ublkbN`.
    pub number: Option<u32>,
    /// Its path, when it is served.
    pub path: Option<PathBuf>,
    /// Its numbers.
    pub numbers: Option<(u32, u32)>,
    /// How many queues it has.
    pub queues: u16,
    /// Requests that each can have in flight.
    pub depth: u16,
    /// Nothing is copied.
    pub zero_copy: bool,
    /// Features that were asked for.
    pub asked: u64,
    /// Features that the kernel granted.
    pub granted: u64,
    /// Why it is not served.
    pub problem: Option<String>,
    /// Its mark, if it was added before it was known for which volume.
    pub ready_mark: Option<u16>,
    /// A command has removed it that had ended with an error before: it comes back by a call alone.
    pub is_removed: bool,
}

/// The parts that the steps need.
#[derive(Clone)]
pub(super) struct Kit {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) host: Arc<dyn QueueHost>,
    pub(super) options: DeviceOptions,
    pub(super) places: Places,
}

/// The part of a device that the kernel has to know when it is added; all else when it is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    /// 0: as configured.
    pub(super) queues: u16,
    /// 0: as configured.
    pub(super) depth: u16,
    pub(super) zero_copy: bool,
}

/// A device that serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Serving {
    pub(super) info: DeviceInfo,
    pub(super) asked: u64,
    pub(super) numbers: Option<(u32, u32)>,
    pub(super) ready_mark: Option<u16>,
}

impl Serving {
    pub(super) fn view(&self) -> DeviceView {
        let number = self.info.number;
        DeviceView {
            number: Some(number),
            path: Some(PathBuf::from(called(Some(number)))),
            numbers: self.numbers,
            queues: self.info.queues,
            depth: self.info.depth,
            zero_copy: is_zero_copy(&self.info),
            asked: self.asked,
            granted: self.info.flags,
            problem: None,
            ready_mark: self.ready_mark,
            is_removed: false,
        }
    }
}

fn is_zero_copy(info: &DeviceInfo) -> bool {
    info.flags & features::ZERO_COPY == features::ZERO_COPY
}

impl Kit {
    /// Whether a device is the volume's: it was ready and is remembered so, or was added for it.
    /// The record of one that was added again may be older than that.
    pub(super) fn is_of(&self, spec: &DeviceSpec, info: &DeviceInfo) -> bool {
        let mark = self.new_mark(spec);
        let ready = spec.ready_mark.map(|volume| Mark { volume, ..mark });
        let found = Mark::from_bits(info.mark);
        found.is_some() && (found == Some(mark) || found == ready)
    }

    /// The mark of a device that is added for a volume.
    fn new_mark(&self, spec: &DeviceSpec) -> Mark {
        Mark::new(self.options.owner, &spec.pool, spec.volume)
    }

    /// The form of a volume's device.
    pub(super) fn shape(&self, spec: &DeviceSpec) -> Shape {
        let zero_copy = self.options.zero_copy && spec.zero_copy;
        Shape { queues: spec.queues, depth: spec.depth, zero_copy }
    }

    /// The request to the driver for a device.
    fn request(&self, shape: Shape, driver: u64, number: Option<u32>, mark: Mark) -> AddRequest {
        let flags = features::to_ask(driver, shape.zero_copy);
        let zero_copy = flags & features::ZERO_COPY == features::ZERO_COPY;
        let depth = match (shape.depth, self.options.depth) {
            (0, 0) if zero_copy => ZERO_COPY_DEPTH,
            (0, 0) => COPY_DEPTH,
            (0, depth) | (depth, _) => depth,
        };
        let most = u16::try_from(self.host.workers()).unwrap_or(u16::MAX).max(1);
        let queues = if shape.queues == 0 { self.options.queues } else { shape.queues };
        AddRequest {
            number,
            queues: queues.clamp(1, most),
            depth,
            max_bytes: self.options.max_bytes,
            flags,
            mark: mark.to_bits(),
        }
    }

    /// Adds a device and starts it. Leaves nothing behind when that fails.
    pub(super) fn add(
        &self,
        seat: &mut Seat,
        spec: &DeviceSpec,
        number: Option<u32>,
    ) -> Result<Serving, DeviceError> {
        let asked = self.add_unstarted(seat, self.shape(spec), number, self.new_mark(spec))?;
        self.start(seat, spec, asked)
    }

    /// Adds a device. Returns the features that were asked for.
    pub(super) fn add_unstarted(
        &self,
        seat: &mut Seat,
        shape: Shape,
        number: Option<u32>,
        mark: Mark,
    ) -> Result<u64, DeviceError> {
        if !self.driver.is_there() {
            return Err(DeviceError::NoDriver);
        }
        let refused = |DriverError { command, source }: DriverError| DeviceError::Refused {
            command,
            device: called(None),
            source,
        };
        seat.begin("GET_FEATURES");
        let driver = self.driver.features().map_err(refused)?;
        let taken = self.driver.numbers();
        let number = number.filter(|number| !taken.contains(number));
        let request = self.request(shape, driver, number, mark);
        seat.begin("ADD_DEV");
        let control = self.driver.add(&request).map_err(|error| {
            // The limit has no error of its own, and libublk may retry and return the second error.
            let is_limit = matches!(error.errno(), Some(libc::EACCES | libc::EOPNOTSUPP));
            let count = u64::try_from(taken.len()).unwrap_or(u64::MAX);
            match self.driver.limit() {
                Some(max) if is_limit && count >= max => DeviceError::Exhausted { max },
                _ => refused(error),
            }
        })?;
        seat.number_is(control.info().number);
        seat.control = Some(control);
        Ok(request.flags)
    }

    /// Returns whether the device is there as it was added ahead of need. Another program may have
    /// deleted it, and its number may be that of a device in use.
    pub(super) fn is_still_spare(seat: &mut Seat, mark: Mark) -> Result<bool, DeviceError> {
        match seat.command("GET_DEV_INFO", |it| it.refresh()) {
            Ok(info) => Ok(info.state == DeviceState::Dead && info.mark == mark.to_bits()),
            Err(DeviceError::Refused { source, .. })
                if source.raw_os_error() == Some(libc::ENODEV) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Starts a device that was added. Leaves nothing behind when that fails.
    pub(super) fn start(
        &self,
        seat: &mut Seat,
        spec: &DeviceSpec,
        asked: u64,
    ) -> Result<Serving, DeviceError> {
        let params = Params {
            size: spec.size,
            block_size: spec.block_size,
            extent_size: spec.extent_size,
            max_bytes: self.options.max_bytes,
            read_only: spec.read_only,
            write_cache: spec.write_cache,
        };
        let served = self.serve(seat, spec, asked, Serve::Start(&params));
        if served.is_err()
            && let Err(error) = self.take_down(seat, false)
        {
            tracing::warn!(%error, "a device that could not be started stays");
        }
        served
    }

    /// Has the queues served and the device started.
    pub(super) fn serve(
        &self,
        seat: &mut Seat,
        spec: &DeviceSpec,
        asked: u64,
        how: Serve<'_>,
    ) -> Result<Serving, DeviceError> {
        seat.begin(match how {
            Serve::Start(_) => "START_DEV",
            Serve::Recover => "END_USER_RECOVERY",
        });
        let control = seat.control.as_deref_mut().ok_or(DeviceError::NotServed)?;
        let info = control.info();
        let standby = match (spec.stands_by, &how) {
            (false, _) => QueueStandby::No,
            (true, Serve::Start(_)) => QueueStandby::Fails,
            (true, Serve::Recover) => QueueStandby::Waits,
        };
        control.serve(how, &mut |file| self.fetch(spec, standby, &info, &file))?;
        if standby == QueueStandby::Fails {
            self.await_look(info.number);
            self.host.let_wait(info.number);
        }
        let info = seat.command("GET_DEV_INFO", |it| it.refresh())?;
        let missing = asked & !info.flags;
        if missing != 0 {
            let missing = features::names(missing).join(", ");
            tracing::warn!(device = called(Some(info.number)), missing, "not granted");
        }
        let numbers = self.await_file(info.number);
        self.shorten_timeout(info.number);
        let marked = Mark::from_bits(info.mark).map(|mark| mark.volume);
        let ready_mark = marked.filter(|mark| *mark != self.new_mark(spec).volume);
        Ok(Serving { info, asked, numbers, ready_mark })
    }

    /// Waits until the kernel has looked for partitions: until it has read something, and nothing
    /// more for a moment. Linux from 7.0 on looks some time after the start.
    fn await_look(&self, number: u32) {
        let path = self.places.sys_block.join(format!("ublkb{number}/stat"));
        let reads = || -> Option<u64> {
            std::fs::read_to_string(&path).ok()?.split_whitespace().next()?.parse().ok()
        };
        let patience = Patience::new(LOOK_LIMIT);
        let mut before = reads();
        loop {
            std::thread::sleep(LOOK_PAUSE);
            let now = reads();
            if patience.is_over() {
                tracing::debug!(number, "the kernel has not looked for partitions in time");
                return;
            }
            if now == before && now != Some(0) {
                return;
            }
            before = now;
        }
    }

    /// Makes the kernel check requests that take long each second. While their server lives, it
    /// only waits on. When the server has died, a device of Linux up to 6.12 all of whose requests
    /// were with it begins to wait for a new server at this check, and not after the usual 30 s.
    ///
    /// A recovered device has this timeout already, and it must not be set again: before the kernel
    /// changes it, it waits for all requests and holds back new ones, and some may be waiting for
    /// space.
    fn shorten_timeout(&self, number: u32) {
        let path = self.places.sys_block.join(format!("ublkb{number}/queue/io_timeout"));
        if std::fs::read_to_string(&path).is_ok_and(|present| present.trim() == TIMEOUT_MS) {
            return;
        }
        if let Err(error) = std::fs::write(&path, TIMEOUT_MS) {
            tracing::warn!(%error, path = %path.display(), "the kernel keeps its limit of 30 s");
        }
    }

    fn fetch(
        &self,
        spec: &DeviceSpec,
        standby: QueueStandby,
        info: &DeviceInfo,
        file: &Arc<File>,
    ) -> Result<(), DeviceError> {
        let workers = self.host.workers().max(1);
        let first = usize::try_from(info.number).unwrap_or(0);
        for queue in 0..info.queues {
            let worker = first.wrapping_add(usize::from(queue)) % workers;
            let queue = QueueSpec {
                device: info.number,
                queue,
                depth: info.depth,
                max_bytes: info.max_bytes,
                zero_copy: is_zero_copy(info),
                device_file: Arc::clone(file),
                pool: spec.pool,
                volume: spec.volume,
                name: spec.name.clone(),
                read_only: spec.read_only,
                standby,
            };
            let device = || called(Some(info.number));
            self.host
                .start_queue(worker, queue)
                .map_err(|source| DeviceError::Queue { device: device(), source })?;
        }
        Ok(())
    }

    fn await_file(&self, number: u32) -> Option<(u32, u32)> {
        let disk = format!("ublkb{number}");
        let patience = Patience::new(FILE_LIMIT);
        while !self.places.dev.join(&disk).exists() {
            if patience.is_over() {
                tracing::warn!("/dev/{disk} does not appear: is /dev a devtmpfs?");
                break;
            }
            std::thread::sleep(FILE_LOOK);
        }
        numbers_of(&self.places, &disk)
    }

    /// Stops the device, has the workers let go of it, and deletes it.
    ///
    /// By force it may be open: then it goes, but for its number, which stays taken until the last
    /// has closed it.
    pub(super) fn take_down(&self, seat: &mut Seat, force: bool) -> Result<(), DeviceError> {
        let Some(number) = seat.number() else { return Ok(()) };
        seat.command("STOP_DEV", |it| it.stop())?;
        seat.begin("giving its queues back");
        if !self.host.await_end(number, END_LIMIT) {
            let command = "giving its queues back";
            return Err(DeviceError::Hangs { device: called(Some(number)), command });
        }
        let command = if force { "DEL_DEV_ASYNC" } else { "DEL_DEV" };
        seat.command(command, |it| it.delete(!force))?;
        seat.control = None;
        Ok(())
    }
}
