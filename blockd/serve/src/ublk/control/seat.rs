//! A device's own thread: commands are sent from there, and one that hangs delays no other device.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use blockd_media::clock::Clock;
use blockd_media::hardening::protect_thread;
use crossbeam_channel::{RecvTimeoutError, Sender, bounded, unbounded};
use parking_lot::Mutex;

use super::driver::{DeviceControl, DriverError};
use super::{DeviceError, called};

/// How long a caller waits for a command, or for several that belong together: less than the 30 s
/// that the command line waits, so that its error has the reason, and not only that there is no
/// answer. Commands take milliseconds; only IO takes longer in normal operation: the IO that a
/// device's start reads its partitions with, or that its stop waits for.
pub(super) const COMMAND_LIMIT: Duration = Duration::from_secs(20);

/// The same for a recovery, for which no command line waits: longer than the kernel may take to see
/// that the previous server has died.
pub(super) const RECOVERY_LIMIT: Duration = Duration::from_secs(60);

/// Commands need some KiB, formatting of log lines some more. Memory may be locked.
pub(super) const STACK_BYTES: usize = 256 << 10;

/// Says when a wait has been long enough.
#[derive(Debug)]
pub(super) struct Patience {
    clock: Clock,
    limit: Duration,
}

impl Patience {
    pub(super) fn new(limit: Duration) -> Self {
        Self { clock: Clock::start(), limit }
    }

    pub(super) fn is_over(&self) -> bool {
        u128::from(self.clock.ns()) > self.limit.as_nanos()
    }
}

/// The device that a thread works on.
#[derive(Default)]
pub(super) struct Seat {
    /// The device, once it is added or found.
    pub(super) control: Option<Box<dyn DeviceControl>>,
    progress: Arc<Progress>,
}

/// A thread's progress, as other threads see it.
#[derive(Debug, Default)]
struct Progress(Mutex<Seen>);

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    number: Option<u32>,
    /// Being carried out, and maybe hanging.
    command: Option<&'static str>,
    /// Its caller has gone away.
    hangs: bool,
}

impl Seen {
    fn hang(self) -> DeviceError {
        let command = self.command.unwrap_or("a command");
        DeviceError::Hangs { device: called(self.number), command }
    }
}

impl Seat {
    /// Notes what is about to be asked of the kernel.
    pub(super) fn begin(&self, command: &'static str) {
        self.progress.0.lock().command = Some(command);
    }

    /// Notes which device it is.
    pub(super) fn number_is(&self, number: u32) {
        self.progress.0.lock().number = Some(number);
    }

    pub(super) fn number(&self) -> Option<u32> {
        self.progress.0.lock().number
    }

    /// A command of the device, which has to be there.
    pub(super) fn command<T>(
        &mut self,
        command: &'static str,
        ask: impl FnOnce(&mut (dyn DeviceControl + 'static)) -> Result<T, DriverError>,
    ) -> Result<T, DeviceError> {
        self.begin(command);
        let device = called(self.number());
        let control = self.control.as_deref_mut().ok_or(DeviceError::NotServed)?;
        ask(control).map_err(|error| {
            let DriverError { command, source } = error;
            DeviceError::Refused { command, device, source }
        })
    }
}

type Work = Box<dyn FnOnce(&mut Seat) + Send>;

/// The way to a device's thread, which ends with this.
#[derive(Debug)]
pub(super) struct DeviceThread {
    work: Sender<Work>,
    progress: Arc<Progress>,
}

/// Whether the caller waits, the work is done, or the caller has gone away.
const WAITING: u8 = 0;
const DONE: u8 = 1;
const LEFT: u8 = 2;

impl DeviceThread {
    pub(super) fn start() -> Result<Self, DeviceError> {
        let (work, inbox) = unbounded::<Work>();
        let progress = Arc::new(Progress::default());
        let shared = Arc::clone(&progress);
        let run = move || {
            let mut seat = Seat { control: None, progress: shared };
            // Writeback waits for a device that is being recovered.
            protect_thread("ublk-control");
            while let Ok(work) = inbox.recv() {
                work(&mut seat);
            }
        };
        std::thread::Builder::new()
            .name("ublk-control".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(run)
            .map_err(|source| DeviceError::Io { what: "start a device's thread", source })?;
        Ok(Self { work, progress })
    }

    /// Carries something out on the thread, and waits for no longer than the limit. Work that ends
    /// after its caller has left is reverted by `undo`.
    pub(super) fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&mut Seat) -> Result<T, DeviceError> + Send + 'static,
        undo: impl FnOnce(&mut Seat, T) + Send + 'static,
    ) -> Result<T, DeviceError> {
        if let Some(error) = self.hang() {
            return Err(error);
        }
        let (send, receive) = bounded(1);
        let waits = Arc::new(AtomicU8::new(WAITING));
        let state = Arc::clone(&waits);
        let whole = move |seat: &mut Seat| {
            let result = work(seat);
            let sent = state.compare_exchange(WAITING, DONE, Ordering::AcqRel, Ordering::Acquire);
            match (sent, result) {
                (Ok(_), result) => drop(send.send(result)),
                (Err(_), Ok(value)) => {
                    tracing::warn!(device = called(seat.number()), "a command came back late");
                    undo(seat, value);
                }
                (Err(_), Err(error)) => {
                    tracing::warn!(%error, "a command came back late, and failed");
                }
            }
            let mut seen = seat.progress.0.lock();
            seen.command = None;
            seen.hangs = false;
        };
        if self.work.send(Box::new(whole)).is_err() {
            return Err(DeviceError::NotServed);
        }
        match receive.recv_timeout(limit) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(DeviceError::NotServed),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // One that comes back from now on ends the hang after it was noted here.
        let mut seen = self.progress.0.lock();
        if waits.compare_exchange(WAITING, LEFT, Ordering::AcqRel, Ordering::Acquire).is_err() {
            drop(seen);
            // It came back at the last moment.
            return receive.recv().unwrap_or(Err(DeviceError::NotServed));
        }
        seen.hangs = true;
        let error = seen.hang();
        drop(seen);
        tracing::error!("{error}");
        Err(error)
    }

    /// The command that hangs, if one does.
    fn hang(&self) -> Option<DeviceError> {
        let seen = *self.progress.0.lock();
        seen.hangs.then(|| seen.hang())
    }
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat").field("progress", &self.progress).finish_non_exhaustive()
    }
}

/// An undo for results that cannot or need not be undone.
pub(super) fn keep<T: Any>(_: &mut Seat, _: T) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hanging_command_is_named_left_alone_and_undone_when_it_comes_back() {
        let thread = DeviceThread::start().unwrap();
        let (release, gate) = bounded::<()>(1);
        let (send, undone) = bounded(1);
        let work = move |seat: &mut Seat| {
            seat.number_is(7);
            seat.begin("START_DEV");
            let _ = gate.recv();
            Ok(11)
        };
        let undo = move |_: &mut Seat, value| send.send(value).unwrap();
        let short = Duration::from_millis(20);
        let error = thread.run(short, work, undo).unwrap_err();
        assert_eq!(error.to_string(), "/dev/ublkb7 hangs in START_DEV and is left alone");
        // A later caller does not wait.
        let error = thread.run(Duration::MAX, |_| Ok(()), keep).unwrap_err();
        assert!(matches!(error, DeviceError::Hangs { command: "START_DEV", .. }), "{error}");
        release.send(()).unwrap();
        assert_eq!(undone.recv_timeout(Duration::from_secs(10)).unwrap(), 11);
    }

    #[test]
    fn a_command_that_comes_back_in_the_moment_of_its_limit_leaves_no_hang() {
        let thread = DeviceThread::start().unwrap();
        let limit = Duration::from_micros(100);
        for round in 0..4000 {
            let clock = Clock::start();
            let work = move |seat: &mut Seat| {
                // Its caller waits for the lock of the progress when it leaves.
                while clock.elapsed() < limit + Duration::from_micros(40 + round % 80) {
                    seat.begin("GET_DEV_INFO");
                }
                Ok(())
            };
            let _ = thread.run(limit, work, keep);
            let (send, receive) = bounded(1);
            thread.work.send(Box::new(move |_| send.send(()).unwrap())).unwrap();
            receive.recv_timeout(COMMAND_LIMIT).unwrap();
            assert!(thread.hang().is_none(), "round {round}");
        }
    }

    #[test]
    fn a_thread_that_came_back_serves_again() {
        let thread = DeviceThread::start().unwrap();
        let (release, gate) = bounded::<()>(1);
        let work = move |_: &mut Seat| {
            let _ = gate.recv();
            Ok(())
        };
        thread.run(Duration::from_millis(5), work, keep).unwrap_err();
        release.send(()).unwrap();
        let start = blockd_media::clock::Clock::start();
        loop {
            match thread.run(COMMAND_LIMIT, |_| Ok(3), keep) {
                Ok(value) => break assert_eq!(value, 3),
                Err(_) if start.ns() < 10_000_000_000 => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }
}
