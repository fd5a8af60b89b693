//! Devices on a driver that is not the kernel's.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use blockd_engine::pool::VolumeId;
use blockd_media::ublk::features;
use parking_lot::Mutex;

use super::driver::{
    AddRequest, DeviceControl, DeviceInfo, DeviceState, Driver, DriverError, Fetch, Serve,
};
use super::links::Links;
use super::mark::Mark;
use super::users::Places;
use super::{DeviceError, DeviceOptions, DeviceSpec, Devices, Recovered};
use crate::FrontendError;
use crate::ublk::{QueueHost, QueueSpec};

/// A kernel: its devices, and the commands sent to it.
#[derive(Debug, Default)]
struct FakeKernel {
    devices: Mutex<BTreeMap<u32, DeviceInfo>>,
    sent: Mutex<Vec<String>>,
    /// The command that is refused, with this error.
    refuses: Mutex<Option<(&'static str, i32)>>,
    limit: u64,
    /// A deletion does not come back while this is set.
    is_open: AtomicBool,
}

impl FakeKernel {
    fn send(&self, command: &'static str, number: u32) -> Result<(), DriverError> {
        self.sent.lock().push(format!("{command} {number}"));
        match *self.refuses.lock() {
            Some((refused, code)) if refused == command => {
                Err(DriverError { command, source: io::Error::from_raw_os_error(code) })
            }
            _ => Ok(()),
        }
    }

    fn set_state(&self, number: u32, state: DeviceState) {
        self.devices.lock().get_mut(&number).unwrap().state = state;
    }

    fn sent(&self) -> String {
        std::mem::take(&mut *self.sent.lock()).join(", ")
    }
}

#[derive(Clone, Debug)]
struct FakeDriver(Arc<FakeKernel>);

impl Driver for FakeDriver {
    fn is_there(&self) -> bool {
        self.0.limit > 0
    }

    fn features(&self) -> Result<u64, DriverError> {
        Ok(0xf_ffff)
    }

    fn numbers(&self) -> Vec<u32> {
        self.0.devices.lock().keys().copied().collect()
    }

    fn limit(&self) -> Option<u64> {
        Some(self.0.limit)
    }

    fn add(&self, request: &AddRequest) -> Result<Box<dyn DeviceControl>, DriverError> {
        let mut devices = self.0.devices.lock();
        let number =
            request.number.unwrap_or_else(|| (0..).find(|n| !devices.contains_key(n)).unwrap());
        self.0.send("ADD_DEV", number)?;
        let full = u64::try_from(devices.len()).unwrap() >= self.0.limit;
        if full || devices.contains_key(&number) {
            let code = if full { libc::EACCES } else { libc::EEXIST };
            let source = io::Error::from_raw_os_error(code);
            return Err(DriverError { command: "ADD_DEV", source });
        }
        let info = DeviceInfo {
            number,
            state: DeviceState::Dead,
            // This one does not know everything.
            flags: request.flags & !features::UPDATE_SIZE,
            queues: request.queues,
            depth: request.depth,
            max_bytes: request.max_bytes,
            pid: 0,
            mark: request.mark,
        };
        devices.insert(number, info);
        Ok(Box::new(FakeDevice { kernel: Arc::clone(&self.0), info }))
    }

    fn open(&self, number: u32) -> Result<Box<dyn DeviceControl>, DriverError> {
        let info = self.0.devices.lock().get(&number).copied();
        let source = io::Error::from_raw_os_error(libc::ENODEV);
        let info = info.ok_or(DriverError { command: "GET_DEV_INFO", source })?;
        Ok(Box::new(FakeDevice { kernel: Arc::clone(&self.0), info }))
    }
}

struct FakeDevice {
    kernel: Arc<FakeKernel>,
    info: DeviceInfo,
}

impl DeviceControl for FakeDevice {
    fn info(&self) -> DeviceInfo {
        self.info
    }

    fn refresh(&mut self) -> Result<DeviceInfo, DriverError> {
        let info = self.kernel.devices.lock().get(&self.info.number).copied();
        let source = io::Error::from_raw_os_error(libc::ENODEV);
        self.info = info.ok_or(DriverError { command: "GET_DEV_INFO", source })?;
        Ok(self.info)
    }

    fn begin_recovery(&mut self) -> Result<(), DriverError> {
        self.kernel.send("START_USER_RECOVERY", self.info.number)
    }

    fn serve(&mut self, how: Serve<'_>, fetch: Fetch<'_>) -> Result<(), DeviceError> {
        fetch(Arc::new(File::open("/dev/null").unwrap()))?;
        let command = match how {
            Serve::Start(params) => {
                assert_eq!((params.size, params.extent_size), (1 << 30, 256 << 10));
                "START_DEV"
            }
            Serve::Recover => "END_USER_RECOVERY",
        };
        let refused = |error: DriverError| DeviceError::Refused {
            command: error.command,
            device: "it".to_owned(),
            source: error.source,
        };
        self.kernel.send(command, self.info.number).map_err(refused)?;
        let mut devices = self.kernel.devices.lock();
        let info = devices.get_mut(&self.info.number).unwrap();
        info.state = DeviceState::Live;
        info.pid = i32::try_from(std::process::id()).unwrap();
        Ok(())
    }

    fn resize(&mut self, _: u64) -> Result<(), DriverError> {
        self.kernel.send("UPDATE_SIZE", self.info.number)
    }

    fn stop(&mut self) -> Result<(), DriverError> {
        self.kernel.send("STOP_DEV", self.info.number)
    }

    fn delete(&mut self, wait: bool) -> Result<(), DriverError> {
        let command = if wait { "DEL_DEV" } else { "DEL_DEV_ASYNC" };
        self.kernel.send(command, self.info.number)?;
        while self.kernel.is_open.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.kernel.devices.lock().remove(&self.info.number);
        Ok(())
    }
}

/// Workers that remember what they were given.
#[derive(Debug, Default)]
struct FakeHost {
    queues: Mutex<Vec<(usize, QueueSpec)>>,
    refuses: Mutex<bool>,
    failing: Mutex<Vec<u32>>,
}

impl QueueHost for FakeHost {
    fn workers(&self) -> usize {
        4
    }

    fn start_queue(&self, worker: usize, queue: QueueSpec) -> Result<(), FrontendError> {
        if *self.refuses.lock() {
            return Err(FrontendError::Gone);
        }
        self.queues.lock().push((worker, queue));
        Ok(())
    }

    fn await_end(&self, device: u32, _: Duration) -> bool {
        self.queues.lock().retain(|(_, queue)| queue.device != device);
        true
    }

    fn let_wait(&self, _: u32) {}

    fn fail_waiting(&self, device: u32) {
        self.failing.lock().push(device);
    }
}

struct Rig {
    kernel: Arc<FakeKernel>,
    host: Arc<FakeHost>,
    folder: PathBuf,
}

/// For a command that hangs. One that does not ends before.
const SHORT: Duration = Duration::from_secs(2);

const OPTIONS: DeviceOptions = DeviceOptions {
    owner: 77,
    queues: 1,
    depth: 0,
    max_bytes: 128 << 10,
    zero_copy: true,
    own_namespace: false,
    ready: 0,
};

impl Rig {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockd-devices-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(folder.join("dev")).unwrap();
        for number in 0..4 {
            fs::write(folder.join(format!("dev/ublkb{number}")), "").unwrap();
            fs::create_dir_all(folder.join(format!("sys/ublkb{number}/holders"))).unwrap();
            let numbers = format!("259:{number}\n");
            fs::write(folder.join(format!("sys/ublkb{number}/dev")), numbers).unwrap();
        }
        let kernel = Arc::new(FakeKernel { limit: 3, ..FakeKernel::default() });
        Self { kernel, host: Arc::default(), folder }
    }

    /// A daemon, as after a start.
    fn daemon(&self) -> Devices {
        self.daemon_with(OPTIONS)
    }

    /// One that keeps this many devices ready, once it has them.
    fn daemon_with_ready(&self, ready: usize) -> Devices {
        let daemon = self.daemon_with(DeviceOptions { ready, ..OPTIONS });
        daemon.make_ready();
        await_ready(&daemon, ready);
        daemon
    }

    fn daemon_with(&self, options: DeviceOptions) -> Devices {
        let places = Places {
            proc: self.folder.join("proc"),
            sys_block: self.folder.join("sys"),
            dev: self.folder.join("dev"),
        };
        let driver = Arc::new(FakeDriver(Arc::clone(&self.kernel)));
        let host = Arc::clone(&self.host) as Arc<dyn QueueHost>;
        Devices::at(driver, host, options, places, Links(self.folder.join("names")))
    }

    fn use_by_dm(&self, number: u32) {
        let holders = self.folder.join(format!("sys/ublkb{number}/holders/dm-0"));
        fs::create_dir_all(holders).unwrap();
    }

    fn process(&self, pid: u32, state: char) {
        let folder = self.folder.join(format!("proc/{pid}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("status"), format!("Name:\tother\nState:\t{state} (x)\n")).unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn the_stable_name_of_a_renamed_volume_follows_it() {
    let rig = Rig::new();
    let devices = rig.daemon();
    let view = devices.attach(&spec(1)).unwrap();
    let name = |name: &str| fs::read_link(rig.folder.join("names/p").join(name)).ok();
    assert_eq!(name("v1"), view.path);
    devices.rename(&[1; 16], VolumeId(1), ("p", "v1"), ("p", "other"));
    assert_eq!((name("v1"), name("other")), (None, view.path));
    // A volume without a device has no name.
    devices.rename(&[1; 16], VolumeId(2), ("p", "v2"), ("q", "v2"));
    assert_eq!(name("v3"), None);
}

fn spec(volume: u32) -> DeviceSpec {
    DeviceSpec {
        pool: [1; 16],
        pool_name: "p".to_owned(),
        volume: VolumeId(volume),
        name: format!("v{volume}"),
        size: 1 << 30,
        block_size: 512,
        extent_size: 256 << 10,
        read_only: false,
        write_cache: true,
        queues: 0,
        depth: 0,
        zero_copy: true,
        ready_mark: None,
        stands_by: false,
    }
}

#[test]
fn a_device_is_added_served_named_and_taken_away() {
    let rig = Rig::new();
    let daemon = rig.daemon();
    let view = daemon.attach(&DeviceSpec { queues: 2, ..spec(1) }).unwrap();
    assert_eq!(rig.kernel.sent(), "ADD_DEV 0, START_DEV 0");
    assert_eq!((view.number, view.numbers, view.problem), (Some(0), Some((259, 0)), None));
    assert_eq!((view.queues, view.depth, view.zero_copy), (2, 128, true));
    assert_eq!(view.asked & !view.granted, features::UPDATE_SIZE);
    {
        let queues = rig.host.queues.lock();
        let served: Vec<_> = queues.iter().map(|(worker, one)| (*worker, one.queue)).collect();
        assert_eq!(served, [(0, 0), (1, 1)]);
        assert!(queues.iter().all(|(_, one)| one.zero_copy && one.depth == 128));
    }
    let link = rig.folder.join("names/p/v1");
    assert_eq!(fs::read_link(&link).unwrap(), PathBuf::from("/dev/ublkb0"));
    assert!(!daemon.resize(&[1; 16], VolumeId(1), 2 << 30).unwrap());
    assert!(daemon.detach(&spec(1), Some(0), false).unwrap());
    assert_eq!(rig.kernel.sent(), "STOP_DEV 0, DEL_DEV 0");
    assert!(rig.host.queues.lock().is_empty() && fs::read_link(link).is_err());
    assert_eq!((daemon.served(), daemon.view(&[1; 16], VolumeId(1))), (0, None));
}

#[test]
fn copying_devices_have_shallow_queues_and_no_more_than_there_are_workers() {
    let rig = Rig::new();
    let wanted = DeviceSpec { queues: 9, zero_copy: false, ..spec(1) };
    let view = rig.daemon().attach(&wanted).unwrap();
    assert_eq!((view.queues, view.depth, view.zero_copy), (4, 32, false));
    assert_eq!(view.granted & features::ZERO_COPY, 0);
}

#[test]
fn a_device_that_cannot_be_started_leaves_nothing_behind() {
    let rig = Rig::new();
    let daemon = rig.daemon();
    *rig.host.refuses.lock() = true;
    let error = daemon.attach(&spec(1)).unwrap_err();
    assert!(matches!(error, DeviceError::Queue { .. }), "{error}");
    *rig.host.refuses.lock() = false;
    *rig.kernel.refuses.lock() = Some(("START_DEV", libc::EINVAL));
    let error = daemon.attach(&spec(1)).unwrap_err();
    assert!(error.to_string().starts_with("START_DEV of it: Invalid argument"), "{error}");
    assert!(rig.kernel.devices.lock().is_empty() && rig.host.queues.lock().is_empty());
    assert_eq!(daemon.served(), 0);
}

#[test]
fn the_limit_of_the_module_and_a_missing_driver_are_named() {
    let mut rig = Rig::new();
    let daemon = rig.daemon();
    for volume in 0..3 {
        daemon.attach(&spec(volume)).unwrap();
    }
    let text = daemon.attach(&spec(3)).unwrap_err().to_string();
    assert!(text.contains("3 devices") && text.contains("parameters/ublks_max"), "{text}");
    rig.kernel = Arc::default();
    let text = rig.daemon().attach(&spec(3)).unwrap_err().to_string();
    assert!(text.contains("/dev/ublk-control") && text.contains("modprobe ublk_drv"), "{text}");
}

fn await_ready(daemon: &Devices, count: usize) {
    let patience = super::seat::Patience::new(std::time::Duration::from_secs(20));
    while daemon.ready() != count {
        assert!(!patience.is_over(), "{} devices are ready, not {count}", daemon.ready());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn a_ready_device_is_only_started_and_replaced_by_another_one() {
    let rig = Rig::new();
    let daemon = rig.daemon_with_ready(1);
    assert_eq!(rig.kernel.sent(), "ADD_DEV 0");
    let view = daemon.attach(&spec(1)).unwrap();
    await_ready(&daemon, 1);
    assert_eq!((view.number, rig.kernel.sent().as_str()), (Some(0), "START_DEV 0, ADD_DEV 1"));
    // It was started: no other volume gets it.
    assert!(daemon.detach(&spec(1), view.number, false).unwrap());
    assert_eq!(rig.kernel.sent(), "STOP_DEV 0, DEL_DEV 0");
    // One of another form is added as it is needed.
    let view = daemon.attach(&DeviceSpec { depth: 16, ..spec(2) }).unwrap();
    assert_eq!((view.number, rig.kernel.sent().as_str()), (Some(0), "ADD_DEV 0, START_DEV 0"));
    daemon.end();
    assert_eq!((daemon.ready(), rig.kernel.sent().as_str()), (0, "STOP_DEV 1, DEL_DEV 1"));
}

#[test]
fn ready_devices_leave_room_for_others_under_the_limit() {
    let rig = Rig::new();
    // The limit is 3, of which one stays free.
    let daemon = rig.daemon_with(DeviceOptions { ready: 9, ..OPTIONS });
    daemon.make_ready();
    await_ready(&daemon, 2);
    for volume in 1..=3 {
        daemon.attach(&DeviceSpec { depth: 16, ..spec(volume) }).unwrap();
    }
    assert_eq!((daemon.served(), daemon.ready()), (3, 0));
    let text = daemon.attach(&spec(4)).unwrap_err().to_string();
    assert!(text.contains("ublks_max"), "{text}");
}

#[test]
fn a_device_that_was_ready_is_known_again_by_the_mark_in_its_record() {
    let rig = Rig::new();
    let view = rig.daemon_with_ready(1).attach(&spec(1)).unwrap();
    let record = DeviceSpec { ready_mark: view.ready_mark, ..spec(1) };
    assert!(view.ready_mark.is_some());
    rig.kernel.set_state(0, DeviceState::Quiesced);
    // A record of a device that had the number before is not about this one.
    let (other, how) = rig.daemon().recover(&spec(1), Some(0)).unwrap();
    assert_eq!((how, other.ready_mark), (Recovered::Added, None));
    assert_ne!(other.number, Some(0));
    let (again, how) = rig.daemon().recover(&record, Some(0)).unwrap();
    assert_eq!((again.number, how), (Some(0), Recovered::Continued));
    assert_eq!(again.ready_mark, view.ready_mark);
}

#[test]
fn a_ready_device_that_another_program_deleted_is_let_be() {
    let rig = Rig::new();
    let daemon = rig.daemon_with_ready(1);
    rig.kernel.devices.lock().clear();
    let other = daemon.attach(&DeviceSpec { depth: 16, ..spec(1) }).unwrap();
    assert_eq!(other.number, Some(0));
    rig.kernel.sent();
    // Its number is that of a device in use by now.
    let view = daemon.attach(&spec(2)).unwrap();
    assert_eq!(view.number, Some(1));
    assert!(rig.kernel.sent().starts_with("ADD_DEV 1, START_DEV 1"));
    daemon.end();
    assert_eq!(daemon.served(), 2);
    assert!(rig.kernel.devices.lock().contains_key(&0));
}

#[test]
fn a_driver_that_refuses_is_not_asked_again_and_again() {
    let rig = Rig::new();
    *rig.kernel.refuses.lock() = Some(("ADD_DEV", libc::ENOMEM));
    let daemon = rig.daemon_with(DeviceOptions { ready: 1, ..OPTIONS });
    daemon.make_ready();
    let patience = super::seat::Patience::new(std::time::Duration::from_secs(20));
    let mut sent = rig.kernel.sent();
    while sent.is_empty() && !patience.is_over() {
        std::thread::sleep(std::time::Duration::from_millis(1));
        sent = rig.kernel.sent();
    }
    assert_eq!(sent, "ADD_DEV 0");
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert_eq!(rig.kernel.sent(), "");
    *rig.kernel.refuses.lock() = None;
    daemon.attach(&spec(1)).unwrap();
    await_ready(&daemon, 1);
}

#[test]
fn ready_devices_make_room_for_a_recovery() {
    let rig = Rig::new();
    let daemon = rig.daemon_with(DeviceOptions { ready: 9, ..OPTIONS });
    daemon.make_ready();
    await_ready(&daemon, 2);
    for volume in 1..=3 {
        daemon.recover(&spec(volume), None).unwrap();
    }
    assert_eq!((daemon.served(), daemon.ready()), (3, 0));
}

#[test]
fn ready_devices_of_a_daemon_that_died_are_deleted_by_the_next() {
    let rig = Rig::new();
    drop(rig.daemon_with_ready(2));
    let next = rig.daemon();
    let cleaned: Vec<u32> = next.clean(&[]).into_iter().map(|(number, _)| number).collect();
    assert_eq!((cleaned, rig.kernel.devices.lock().len()), (vec![0, 1], 0));
}

#[test]
fn a_device_in_use_is_taken_away_only_by_force() {
    let rig = Rig::new();
    let daemon = rig.daemon();
    daemon.attach(&spec(1)).unwrap();
    rig.use_by_dm(0);
    let error = daemon.detach(&spec(1), Some(0), false).unwrap_err();
    assert_eq!(error.to_string(), "/dev/ublkb0 is part of block device dm-0");
    assert_eq!((daemon.served(), rig.host.failing.lock().len()), (1, 0));
    assert!(daemon.detach(&spec(1), Some(0), true).unwrap());
    assert_eq!(*rig.host.failing.lock(), [0]);
    assert!(rig.kernel.devices.lock().is_empty());
}

#[test]
fn a_device_whose_removal_came_back_late_is_detached_again_and_no_other_in_its_place() {
    for is_number_taken in [false, true] {
        let rig = Rig::new();
        let daemon = rig.daemon();
        daemon.attach(&spec(1)).unwrap();
        rig.kernel.is_open.store(true, Ordering::Release);
        let daemon = daemon.with_limit(SHORT);
        let error = daemon.detach(&spec(1), Some(0), false).unwrap_err();
        assert!(matches!(error, DeviceError::Hangs { .. }), "{error}");
        let link = rig.folder.join("names/p/v1");
        assert!(fs::read_link(&link).is_ok());
        let daemon = daemon.with_limit(super::seat::COMMAND_LIMIT);
        rig.kernel.is_open.store(false, Ordering::Release);
        let patience = super::seat::Patience::new(Duration::from_secs(20));
        while fs::read_link(&link).is_ok() || daemon.served() > 0 {
            assert!(!patience.is_over(), "the name stays: {:?}", fs::read_link(&link));
            std::thread::sleep(Duration::from_millis(1));
        }
        if is_number_taken {
            assert_eq!(daemon.attach(&spec(2)).unwrap().number, Some(0));
        }
        rig.kernel.sent();
        // Its thread may still be ending the late command.
        let found = loop {
            match daemon.detach(&spec(1), Some(0), true) {
                Err(DeviceError::Hangs { .. }) if !patience.is_over() => {}
                other => break other.unwrap(),
            }
        };
        assert!(!found && daemon.view(&[1; 16], VolumeId(1)).is_none());
        assert_eq!((rig.kernel.sent(), rig.host.failing.lock().len()), (String::new(), 0));
        assert_eq!(daemon.served(), usize::from(is_number_taken));
    }
}

/// Has a deletion come back once it is logged that it hangs, and waits until the device is
/// forgotten.
struct BackAtOnce(Arc<FakeKernel>, Arc<Devices>);

impl tracing::Subscriber for BackAtOnce {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.is_open.store(false, Ordering::Release);
        let patience = super::seat::Patience::new(Duration::from_secs(20));
        while self.1.served() > 0 && !patience.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_removal_that_comes_back_while_its_caller_leaves_is_shown_as_no_hang() {
    let rig = Rig::new();
    let daemon = rig.daemon();
    daemon.attach(&spec(1)).unwrap();
    rig.kernel.is_open.store(true, Ordering::Release);
    let daemon = Arc::new(daemon.with_limit(SHORT));
    let log = BackAtOnce(Arc::clone(&rig.kernel), Arc::clone(&daemon));
    // While a process has one subscriber, a call site that another thread, which has none, meets
    // first is switched off for all threads.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    let error = tracing::subscriber::with_default(log, || daemon.detach(&spec(1), Some(0), false));
    assert!(matches!(error, Err(DeviceError::Hangs { .. })), "{error:?}");
    let view = daemon.view(&[1; 16], VolumeId(1)).unwrap();
    assert_eq!((view.number, view.is_removed), (None, true));
    assert!(view.problem.is_some_and(|problem| problem.contains("was removed after the command")));
}

#[test]
fn a_device_that_waits_goes_on_with_what_it_was_made_with() {
    let rig = Rig::new();
    fs::create_dir(rig.folder.join("sys/ublkb0/queue")).unwrap();
    let timeout = rig.folder.join("sys/ublkb0/queue/io_timeout");
    let made = rig.daemon().attach(&DeviceSpec { queues: 2, depth: 16, ..spec(1) }).unwrap();
    rig.kernel.set_state(0, DeviceState::Quiesced);
    rig.kernel.sent();
    rig.host.queues.lock().clear();
    assert_eq!(fs::read_to_string(&timeout).unwrap(), "1000");
    // As the kernel shows it; written once more it would have no end of line.
    fs::write(&timeout, "1000\n").unwrap();
    let daemon = rig.daemon();
    let (view, how) = daemon.recover(&spec(1), Some(0)).unwrap();
    assert_eq!(fs::read_to_string(&timeout).unwrap(), "1000\n");
    assert_eq!(rig.kernel.sent(), "START_USER_RECOVERY 0, END_USER_RECOVERY 0");
    assert_eq!((how, view.queues, view.depth), (Recovered::Continued, 2, 16));
    assert_eq!((view.number, view.numbers), (made.number, made.numbers));
    assert_eq!(rig.host.queues.lock().len(), 2);
    assert_eq!(daemon.recover(&spec(1), Some(0)).unwrap().1, Recovered::Served);
    assert_eq!(daemon.stats().recoveries.load(Ordering::Relaxed), 1);
}

#[test]
fn a_device_that_is_gone_or_dead_comes_back_with_its_number() {
    let rig = Rig::new();
    let (view, how) = rig.daemon().recover(&spec(1), Some(2)).unwrap();
    assert_eq!((view.number, how), (Some(2), Recovered::Added));
    rig.kernel.sent();
    rig.kernel.set_state(2, DeviceState::Dead);
    let (view, how) = rig.daemon().recover(&spec(1), Some(2)).unwrap();
    assert_eq!(rig.kernel.sent(), "STOP_DEV 2, DEL_DEV 2, ADD_DEV 2, START_DEV 2");
    assert_eq!((view.number, how), (Some(2), Recovered::Added));
}

#[test]
fn a_number_that_others_have_now_is_left_to_them() {
    let rig = Rig::new();
    rig.daemon().attach(&spec(1)).unwrap();
    rig.kernel.devices.lock().get_mut(&0).unwrap().mark = 0;
    rig.kernel.sent();
    let (view, _) = rig.daemon().recover(&spec(1), Some(0)).unwrap();
    assert_eq!((view.number, rig.kernel.sent().as_str()), (Some(1), "ADD_DEV 1, START_DEV 1"));
    // Nor is it deleted.
    let daemon = rig.daemon();
    assert!(!daemon.detach(&spec(1), Some(0), true).unwrap());
    assert_eq!(rig.kernel.devices.lock().len(), 2);
}

#[test]
fn a_device_of_a_living_process_is_its_own_until_that_dies() {
    let rig = Rig::new();
    rig.daemon().attach(&spec(1)).unwrap();
    rig.kernel.devices.lock().get_mut(&0).unwrap().pid = 4_000_001;
    rig.process(4_000_001, 'S');
    let daemon = rig.daemon();
    let text = daemon.recover(&spec(1), Some(0)).unwrap_err().to_string();
    assert_eq!(
        text,
        "/dev/ublkb0 is served by process 4000001 (other), which lives: stop that first"
    );
    let view = daemon.view(&[1; 16], VolumeId(1)).unwrap();
    assert_eq!((view.path, view.number, view.problem), (None, Some(0), Some(text)));
    // It has died; the kernel needs a moment to see that.
    rig.process(4_000_001, 'Z');
    let kernel = Arc::clone(&rig.kernel);
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        kernel.set_state(0, DeviceState::Quiesced);
    });
    assert_eq!(daemon.recover(&spec(1), Some(0)).unwrap().1, Recovered::Continued);
    assert_eq!(daemon.view(&[1; 16], VolumeId(1)).unwrap().problem, None);
    late.join().unwrap();
}

#[test]
fn orphans_of_ours_are_deleted_and_no_others() {
    let rig = Rig::new();
    let daemon = rig.daemon();
    for volume in 0..3 {
        daemon.attach(&spec(volume)).unwrap();
        rig.kernel.set_state(volume, DeviceState::Quiesced);
    }
    let other = Mark { owner: 78, volume: 0 };
    rig.kernel.devices.lock().get_mut(&2).unwrap().mark = other.to_bits();
    rig.kernel.sent();
    let cleaned = rig.daemon().clean(&[1]);
    assert!(matches!(cleaned.as_slice(), [(0, Ok(()))]), "{cleaned:?}");
    assert_eq!(rig.kernel.sent(), "STOP_DEV 0, DEL_DEV 0");
    // One in use is worth more than a clean table.
    rig.use_by_dm(1);
    let cleaned = rig.daemon().clean(&[]);
    assert!(matches!(cleaned.as_slice(), [(1, Err(DeviceError::InUse { .. }))]), "{cleaned:?}");
    assert_eq!(rig.kernel.devices.lock().len(), 2);
}
