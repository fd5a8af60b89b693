//! Volumes as block devices, with a driver that is not the kernel's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockd_api::v1;
use blockd_serve::FrontendError;
use blockd_serve::ublk::control::{
    AddRequest, DeviceControl, DeviceError, DeviceInfo, DeviceOptions, DeviceState, Devices,
    Driver, DriverError, Fetch, Serve,
};
use blockd_serve::ublk::{QueueHost, QueueSpec};
use parking_lot::Mutex;

use super::attachments::{Record, UblkRecord};
use super::testing::{Rig, file_pool, folder};
use super::tests::{MIB, attach, create};

/// The devices of a kernel, and whether their deletions hang.
#[derive(Clone, Debug, Default)]
struct Kernel(Arc<Mutex<BTreeMap<u32, DeviceInfo>>>, Arc<AtomicBool>);

impl Driver for Kernel {
    fn is_there(&self) -> bool {
        true
    }

    fn features(&self) -> Result<u64, DriverError> {
        Ok(0)
    }

    fn numbers(&self) -> Vec<u32> {
        self.0.lock().keys().copied().collect()
    }

    fn limit(&self) -> Option<u64> {
        None
    }

    fn add(&self, request: &AddRequest) -> Result<Box<dyn DeviceControl>, DriverError> {
        let AddRequest { queues, depth, max_bytes, flags, mark, .. } = *request;
        // None that a machine of a test has.
        let number = 9000;
        let state = DeviceState::Live;
        let info = DeviceInfo { number, state, flags, queues, depth, max_bytes, pid: 0, mark };
        self.0.lock().insert(number, info);
        Ok(Box::new(Device { kernel: self.clone(), info }))
    }

    fn open(&self, number: u32) -> Result<Box<dyn DeviceControl>, DriverError> {
        let found = self.0.lock().get(&number).copied();
        let source = std::io::ErrorKind::NotFound.into();
        let info = found.ok_or(DriverError { command: "GET_DEV_INFO", source })?;
        Ok(Box::new(Device { kernel: self.clone(), info }))
    }
}

struct Device {
    kernel: Kernel,
    info: DeviceInfo,
}

impl DeviceControl for Device {
    fn info(&self) -> DeviceInfo {
        self.info
    }

    fn refresh(&mut self) -> Result<DeviceInfo, DriverError> {
        Ok(self.info)
    }

    fn begin_recovery(&mut self) -> Result<(), DriverError> {
        Ok(())
    }

    fn serve(&mut self, _: Serve<'_>, _: Fetch<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn resize(&mut self, _: u64) -> Result<(), DriverError> {
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DriverError> {
        Ok(())
    }

    fn delete(&mut self, _: bool) -> Result<(), DriverError> {
        while self.kernel.1.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.kernel.0.lock().remove(&self.info.number);
        Ok(())
    }
}

/// Workers that serve no queue.
struct Host;

impl QueueHost for Host {
    fn workers(&self) -> usize {
        1
    }

    fn start_queue(&self, _: usize, _: QueueSpec) -> Result<(), FrontendError> {
        Ok(())
    }

    fn await_end(&self, _: u32, _: Duration) -> bool {
        true
    }

    fn let_wait(&self, _: u32) {}

    fn fail_waiting(&self, _: u32) {}
}

const OPTIONS: DeviceOptions = DeviceOptions {
    owner: 7,
    queues: 1,
    depth: 8,
    max_bytes: 128 << 10,
    zero_copy: false,
    own_namespace: false,
    ready: 0,
};

#[tokio::test]
async fn no_device_is_left_of_a_volume_that_could_not_be_added() {
    let mut rig = Rig::new().await;
    let kernel = Kernel::default();
    rig.with_devices(&kernel);
    let device = v1::AttachVolumeRequest { front_end: v1::FrontEnd::Ublk.into(), ..attach("") };
    let asked = v1::AddVolumeRequest {
        create: Some(create("a", MIB)),
        attach: Some(device),
        ..v1::AddVolumeRequest::default()
    };
    // The record is written before the device is made, and completed afterwards.
    rig.control.0.attachments.fail([false, true]);
    let status = rig.client.add_volume(asked.clone()).await.unwrap_err();
    assert!(status.message().ends_with("; nothing was changed"), "{}", status.message());
    assert!(kernel.numbers().is_empty() && rig.volumes().await.is_empty());
    // What can't be undone is said.
    rig.control.0.attachments.fail([false, true, true]);
    let status = rig.client.add_volume(asked.clone()).await.unwrap_err();
    assert!(status.message().contains("volume a stays attached"), "{}", status.message());
    assert!(status.message().contains("volume a was created and is left"), "{}", status.message());
    assert!(kernel.numbers().is_empty() && rig.volumes().await[0].attached);
    rig.control.recover_devices().await.unwrap();
    assert_eq!(kernel.numbers(), [9000]);
}

/// A daemon with a file's pool after the former one has died, and the file has gone with its disk.
async fn without_its_disk(rig: &Rig, kernel: &Kernel) -> Rig {
    let place = folder();
    for entry in std::fs::read_dir(rig.folder.path()).unwrap() {
        let (from, name) = entry.map(|one| (one.path(), one.file_name())).unwrap();
        // What the state directory remembers.
        if from.is_file() && name != "default.pool" {
            std::fs::copy(from, place.path().join(name)).unwrap();
        }
    }
    for device in kernel.0.lock().values_mut() {
        device.state = DeviceState::Quiesced;
    }
    let path = rig.folder.path().join("default.pool");
    std::fs::remove_file(&path).unwrap();
    let next = Rig::without_pool(place).await;
    next.with_devices(kernel);
    next.control.open_pool(&file_pool("default", &path)).await.unwrap_err();
    next.control.recover_devices().await.unwrap();
    next
}

impl Rig {
    fn with_devices(&self, kernel: &Kernel) {
        self.control.set_ublk(Arc::new(self.devices(kernel)));
    }

    fn devices(&self, kernel: &Kernel) -> Devices {
        let devices = Devices::new(Arc::new(kernel.clone()), Arc::new(Host), OPTIONS);
        devices.with_names_in(&self.folder.path().join("names"))
    }
}

#[tokio::test]
async fn a_device_whose_pool_is_missing_is_detached_by_force() {
    let (mut rig, kernel) = (Rig::without_pool(folder()).await, Kernel::default());
    rig.with_devices(&kernel);
    let config = file_pool("default", &rig.folder.path().join("default.pool"));
    rig.control.open_pool(&config).await.unwrap();
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let device = v1::AttachVolumeRequest { front_end: v1::FrontEnd::Ublk.into(), ..attach("a") };
    rig.client.attach_volume(device).await.unwrap();
    let mut next = without_its_disk(&rig, &kernel).await;
    assert_eq!(kernel.numbers(), [9000], "the device of a missing pool stays");
    let detach =
        |force| v1::DetachVolumeRequest { name: "a".to_owned(), force, ..Default::default() };
    let status = next.client.detach_volume(detach(false)).await.unwrap_err();
    assert!(status.message().contains("is missing"), "{}", status.message());
    assert_eq!(kernel.numbers(), [9000]);
    let done = next.client.detach_volume(detach(true)).await.unwrap().into_inner();
    assert!(done.changed && done.volume.is_none(), "{done:?}");
    assert!(kernel.numbers().is_empty() && !next.control.is_attached("default", "a"));
    let status = next.client.detach_volume(detach(true)).await.unwrap_err();
    assert!(status.message().contains("is missing"), "{}", status.message());
}

/// Repeats a step of a device until it is done: its thread may still be ending another command.
async fn await_done(step: impl AsyncFn() -> bool) {
    let clock = blockd_media::clock::Clock::start();
    while !step().await {
        assert!(clock.elapsed() < Duration::from_secs(20), "it is not done");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_device_that_was_removed_after_its_detach_had_ended_comes_back_by_a_call_alone() {
    let (mut rig, kernel) = (Rig::new().await, Kernel::default());
    // A device's file, which there is none of here, is waited for.
    let devices = rig.devices(&kernel).with_limit(Duration::from_secs(3));
    rig.control.set_ublk(Arc::new(devices));
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let device = v1::AttachVolumeRequest { front_end: v1::FrontEnd::Ublk.into(), ..attach("a") };
    rig.client.attach_volume(device).await.unwrap();
    kernel.1.store(true, Ordering::SeqCst);
    let detach = v1::DetachVolumeRequest { name: "a".to_owned(), ..Default::default() };
    let status = rig.client.detach_volume(detach).await.unwrap_err();
    assert!(status.message().contains("hangs in DEL_DEV"), "{}", status.message());
    kernel.1.store(false, Ordering::SeqCst);
    let problem = async || rig.control.get_volume("", "a").await.unwrap().device_problem;
    await_done(async || rig.control.ublk().unwrap().served() == 0).await;
    // As the daemon does it every 30 s.
    for _ in 0..3 {
        assert_eq!(rig.control.recover_again().await.unwrap(), 0, "it was added again");
    }
    assert!(kernel.numbers().is_empty() && problem().await.contains("was removed"));
    await_done(async || rig.control.recover("", "a").await.unwrap() == 1).await;
    assert_eq!((kernel.numbers(), problem().await), (vec![9000], String::new()));
}

#[tokio::test]
async fn the_daemon_starts_where_a_device_of_another_mark_can_not_be_remembered() {
    let (mut rig, kernel) = (Rig::new().await, Kernel::default());
    rig.with_devices(&kernel);
    let volume = rig.client.create_volume(create("a", MIB)).await.unwrap().into_inner();
    // It was ready, and is gone since the host was booted.
    let ublk = UblkRecord { device: Some(9000), mark: Some(5), ..Default::default() };
    let record = Record {
        pool: "default".to_owned(),
        volume: "a".to_owned(),
        id: volume.volume.unwrap().id,
        ublk: Some(ublk),
        ..Default::default()
    };
    let attachments = &rig.control.0.attachments;
    attachments.add(record).await.unwrap();
    attachments.fail([true]);
    let mut events = rig.control.events().reader(false, String::new());
    rig.control.recover_devices().await.expect("the daemon does not start");
    assert_eq!((kernel.numbers(), rig.control.ublk().unwrap().served()), (vec![9000], 1));
    let mark = || attachments.get("default", "a").unwrap().record.ublk.unwrap().mark;
    assert_eq!(mark(), Some(5));
    rig.control.events().close();
    let mut texts = Vec::new();
    while let Some(event) = events.next().await {
        texts.push(event.text.clone());
    }
    let is_said = |text: &String| text.contains("can't be remembered");
    assert!(texts.iter().any(is_said), "{texts:?}");
    // The next call remembers it.
    rig.control.recover("", "a").await.unwrap();
    assert_eq!(mark(), None);
}

/// The pool stays open, and goes on with the volume's device.
#[tokio::test]
async fn a_device_that_was_removed_after_the_close_of_its_pool_had_failed_is_added_again() {
    let (mut rig, kernel) = (Rig::without_pool(folder()).await, Kernel::default());
    let config = file_pool("default", &rig.folder.path().join("default.pool"));
    rig.control.open_pool(&config).await.unwrap();
    let devices = rig.devices(&kernel).with_limit(Duration::from_secs(3));
    rig.control.set_ublk(Arc::new(devices));
    rig.client.create_volume(create("a", MIB)).await.unwrap();
    let device = v1::AttachVolumeRequest { front_end: v1::FrontEnd::Ublk.into(), ..attach("a") };
    rig.client.attach_volume(device).await.unwrap();
    kernel.1.store(true, Ordering::SeqCst);
    let close = v1::ClosePoolRequest { name: "default".to_owned(), force: true };
    let status = rig.client.close_pool(close).await.unwrap_err();
    assert!(status.message().contains("hangs in DEL_DEV"), "{}", status.message());
    kernel.1.store(false, Ordering::SeqCst);
    await_done(async || rig.control.ublk().unwrap().served() == 0).await;
    await_done(async || rig.control.recover_again().await.unwrap() == 1).await;
    assert_eq!(kernel.numbers(), [9000]);
}
