//! The events of a node's life, step by step: growth under a writer, clones beside their sources,
//! devices that others hold, contents of others, restarts, and lost records.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use blockd_csi::proto::{
    CreateSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest, NodeGetInfoRequest,
    VolumeContentSource,
};
use blockd_testkit::clock::Clock;
use tonic::Code;

use super::life::{self, Shape, Volume};
use crate::csi::rig::{Plugin, Rig, Settings};
use crate::csi::{Answer, Driver, range, refused};
use crate::workload::files::Files;
use crate::workload::guest;

const MIB: i64 = 1 << 20;

struct Node<'a> {
    rig: &'a mut Rig,
    /// One of each kind, rather than all.
    short: bool,
    driver: Driver,
    made: u32,
}

type Step = (&'static str, fn(&mut Node<'_>) -> Result<()>);

const STEPS: [Step; 11] = [
    ("as many devices as the kernel lets there be", |node| node.info()),
    ("what others made is never formatted over", |node| node.others()),
    ("growing under a writer", |node| node.grow()),
    ("clones beside their sources", |node| node.clones()),
    ("a reader of what was not unmounted", |node| node.reader()),
    ("a loop device over a published device", |node| node.holder()),
    ("a process in a published folder", |node| node.busy()),
    ("restarts of plugin and daemon", |node| node.restarts()),
    ("inline volumes over restarts", |node| node.inline()),
    ("lost records", |node| node.lost_records()),
    ("a strict driver beside", |node| node.beside()),
];

/// All steps, counted. Nothing is left after any.
///
/// # Errors
/// When one fails.
pub(super) fn all(rig: &mut Rig, short: bool) -> Result<usize> {
    let driver = rig.plugin.driver()?;
    let mut node = Node { rig, short, driver, made: 0 };
    for (name, step) in STEPS {
        let start = Clock::start();
        step(&mut node).with_context(|| format!("{name}; {}", node.rig.plugin.last_words()))?;
        life::nothing_left(node.rig, name)?;
        println!("{name}: ok, {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(STEPS.len())
}

impl Node<'_> {
    fn volume(&mut self, shape: Shape, mib: i64) -> Result<Volume> {
        self.made += 1;
        let mut volume = Volume::new(self.rig, &format!("v{}", self.made), shape, mib * MIB)?;
        if shape != Shape::Inline {
            volume.create(&self.driver)?;
        }
        Ok(volume)
    }

    /// File systems and sizes for them; in the short form this one.
    fn kinds(&self, only: &str) -> Vec<(&'static str, i64)> {
        let all = [("ext4", 64), ("xfs", 320), ("btrfs", 256)];
        all.into_iter().filter(|(name, _)| !self.short || *name == only).collect()
    }

    /// Staged and published once.
    fn up(&mut self, shape: Shape, mib: i64) -> Result<Volume> {
        let volume = self.volume(shape, mib)?;
        if shape != Shape::Inline {
            volume.stage(&self.driver)?;
        }
        volume.publish(&self.driver, 0)?;
        Ok(volume)
    }

    fn down(&self, volume: &Volume) -> Result<()> {
        volume.unpublish(&self.driver, 0)?;
        if volume.shape != Shape::Inline {
            volume.unstage(&self.driver)?;
            volume.delete(&self.driver)?;
        }
        volume.gone()
    }

    fn info(&mut self) -> Result<()> {
        let info = self.driver.node_get_info(NodeGetInfoRequest {})?;
        let parameter = "/sys/module/ublk_drv/parameters/ublks_max";
        let most: i64 = fs::read_to_string(parameter)?.trim().parse()?;
        ensure!(info.max_volumes_per_node == most, "{info:?}, {most} in {parameter}");
        Ok(())
    }

    /// Something of a tool on a device, which is then to be mounted.
    fn others(&mut self) -> Result<()> {
        let no_udev = "export DM_DISABLE_UDEV=1; mkdir -p /run/lock/lvm";
        let config = "--config 'devices { scan=[\"/dev\"] use_devicesfile=0 }'";
        let lines = [
            "printf 'label: gpt\\nsize=8M\\n' | sfdisk -q DEVICE",
            "printf 'label: dos\\nsize=8M\\n' | sfdisk -q DEVICE",
            &format!("{no_udev}; lvm pvcreate -q {config} DEVICE"),
            "mkswap DEVICE",
            "mkfs.ext4 -q -t ext2 DEVICE",
            "head -c 4096 /dev/urandom | dd of=DEVICE bs=4096 seek=3 conv=fsync status=none",
        ];
        // The short form has one known signature, and unknown bytes.
        let short = self.short;
        let in_short = |line: &str| line.contains("label: gpt") || line.contains("seek=3");
        for line in lines.into_iter().filter(|line| !short || in_short(line)) {
            let mut volume = self.up(Shape::Block, 16)?;
            // Tools require a device's own name.
            let device = device_of(&volume.target(0))?;
            guest::shell(&line.replace("DEVICE", &device))?;
            let before = sum(&device)?;
            volume.unpublish(&self.driver, 0)?;
            volume.unstage(&self.driver)?;
            for kind in ["ext4", "xfs"] {
                volume.shape = Shape::Mount(kind);
                let status = refused(volume.stage(&self.driver), Code::FailedPrecondition)
                    .with_context(|| format!("{kind} over: {line}"))?;
                ensure!(status.message().contains("left as it is"), "{}", status.message());
                let attached = self.rig.control()?.volume(&volume.id)?.attached;
                ensure!(!attached, "it is left attached: {line}");
                volume.unstage(&self.driver)?;
            }
            volume.shape = Shape::Block;
            volume.stage(&self.driver)?;
            volume.publish(&self.driver, 0)?;
            let after = sum(&device_of(&volume.target(0))?)?;
            ensure!(before == after, "changed: {line}");
            self.down(&volume)?;
        }
        Ok(())
    }

    /// The file system grows while files are written, where the kernel can show a device in use a
    /// new size; else when the volume is staged the next time, which is said.
    fn grow(&mut self) -> Result<()> {
        for (kind, mib) in self.kinds("ext4") {
            let mut volume = self.up(Shape::Mount(kind), mib)?;
            let files = Files::new(&volume.target(0));
            let stop = AtomicBool::new(false);
            let (driver, grown) = (&self.driver, &mut volume);
            let (written, answer) = std::thread::scope(|scope| -> Result<_> {
                let writing = scope.spawn(|| -> Result<u64> {
                    let mut number = 0;
                    while !stop.load(Ordering::Relaxed) && number < 200 {
                        number += 1;
                        files.write(number)?;
                    }
                    Ok(number)
                });
                let answer =
                    grown.grow(driver, 2 * mib * MIB).and_then(|()| grown.node_grow(driver, 0));
                stop.store(true, Ordering::Relaxed);
                let written = writing.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
                Ok((written?, answer))
            })?;
            let old_kernel = guest::shell("uname -r")?.starts_with("6.12");
            match answer {
                Ok(size) => ensure!(size == 2 * mib * MIB, "{size}"),
                Err(status) if old_kernel && status.code() == Code::FailedPrecondition => {
                    volume.unpublish(&self.driver, 0)?;
                    volume.unstage(&self.driver)?;
                    volume.stage(&self.driver)?;
                    volume.publish(&self.driver, 0)?;
                    volume.node_grow(&self.driver, 0)?;
                }
                Err(status) => bail!("{kind}: {status}"),
            }
            let total = total(&volume.target(0))?;
            let wanted = u64::try_from(2 * mib * MIB)? * 3 / 4;
            ensure!(total > wanted, "{kind} has {total} bytes after growing");
            files.check(written)?;
            self.down(&volume)?;
        }
        Ok(())
    }

    fn clone_of(&mut self, from: &Volume, source: Type) -> Result<Volume> {
        self.made += 1;
        let name = format!("v{}", self.made);
        let mut volume = Volume::new(self.rig, &name, from.shape, from.size)?;
        let answer = self.driver.create_volume(CreateVolumeRequest {
            name,
            capacity_range: range(from.size, 0),
            volume_capabilities: vec![life::capability(from.shape, from.mode)],
            volume_content_source: Some(VolumeContentSource { r#type: Some(source) }),
            ..Default::default()
        })?;
        let made = answer.volume.context("no volume")?;
        (volume.id, volume.context) = (made.volume_id, made.volume_context);
        Ok(volume)
    }

    /// Mounted at the same time, also where file systems have the same UUID.
    fn clones(&mut self) -> Result<()> {
        for (kind, mib) in self.kinds("xfs") {
            let source = self.up(Shape::Mount(kind), mib)?;
            fs::write(source.target(0).join("file"), b"before")?;
            File::open(source.target(0).join("file"))?.sync_all()?;
            let of = Type::Volume(VolumeSource { volume_id: source.id.clone() });
            let clone = self.clone_of(&source, of)?;
            clone.stage(&self.driver).with_context(|| format!("a clone of {kind}"))?;
            clone.publish(&self.driver, 0)?;
            fs::write(source.target(0).join("file"), b"after")?;
            let there = fs::read(clone.target(0).join("file"))?;
            ensure!(there == b"before", "{kind}: {there:?}");
            self.down(&clone)?;
            self.down(&source)?;
        }
        Ok(())
    }

    /// A snapshot of a mounted file system is one after a crash. It is mounted for reading, from a
    /// device that can't be written.
    fn reader(&mut self) -> Result<()> {
        guest::no_errors()?;
        for (kind, mib) in self.kinds("btrfs") {
            let source = self.up(Shape::Mount(kind), mib)?;
            fs::write(source.target(0).join("file"), b"before")?;
            File::open(source.target(0).join("file"))?.sync_all()?;
            let snapshot = self.driver.create_snapshot(CreateSnapshotRequest {
                source_volume_id: source.id.clone(),
                name: format!("s-{kind}"),
                ..Default::default()
            })?;
            let snapshot_id = snapshot.snapshot.context("no snapshot")?.snapshot_id;
            let of = Type::Snapshot(SnapshotSource { snapshot_id: snapshot_id.clone() });
            let mut clone = self.clone_of(&source, of)?;
            clone.mode = Mode::SingleNodeReaderOnly;
            clone.stage(&self.driver).with_context(|| format!("reading {kind}"))?;
            clone.stage(&self.driver)?;
            clone.publish(&self.driver, 0)?;
            clone.publish(&self.driver, 0)?;
            ensure!(fs::read(clone.target(0).join("file"))? == b"before", "{kind}");
            ensure!(fs::write(clone.target(0).join("other"), b"x").is_err(), "{kind} is written");
            let device = mounted_from(&clone.target(0))?;
            let read_only = guest::shell(&format!("blockdev --getro {device}"))?;
            ensure!(read_only.trim() == "1", "{device} can be written");
            self.down(&clone)?;
            let request = DeleteSnapshotRequest { snapshot_id, ..Default::default() };
            self.driver.delete_snapshot(request)?;
            self.down(&source)?;
        }
        // File systems complain of devices that can't be written, before they are mended.
        guest::shell("dmesg -c >/dev/null").map(drop)
    }

    /// As the kubelet has one over each block volume.
    fn holder(&mut self) -> Result<()> {
        let volume = self.up(Shape::Block, 64)?;
        let target = volume.target(0).display().to_string();
        let held = guest::shell(&format!("losetup --find --show {target}"))?.trim().to_owned();
        let file = File::options().read(true).write(true).open(&held)?;
        volume.unpublish(&self.driver, 0)?;
        for _ in 0..2 {
            refused(volume.unstage(&self.driver), Code::FailedPrecondition)?;
            refused(volume.delete(&self.driver), Code::FailedPrecondition)?;
        }
        file.write_all_at(&[0x5a; 4096], 4096)?;
        file.sync_all()?;
        drop(file);
        guest::shell(&format!("losetup -d {held}"))?;
        insist("unstaging after the holder", || volume.unstage(&self.driver))?;
        volume.stage(&self.driver)?;
        volume.publish(&self.driver, 0)?;
        let mut bytes = [0; 4096];
        File::open(volume.target(0))?.read_exact_at(&mut bytes, 4096)?;
        ensure!(bytes == [0x5a; 4096], "what the holder wrote is lost");
        self.down(&volume)
    }

    fn busy(&mut self) -> Result<()> {
        let volume = self.up(Shape::Mount("ext4"), 64)?;
        let file = File::create(volume.target(0).join("file"))?;
        refused(volume.unpublish(&self.driver, 0), Code::FailedPrecondition)?;
        refused(volume.unstage(&self.driver), Code::FailedPrecondition)?;
        file.write_all_at(b"still there", 0)?;
        drop(file);
        insist("unpublishing", || volume.unpublish(&self.driver, 0))?;
        volume.unstage(&self.driver)?;
        volume.delete(&self.driver)?;
        volume.gone()
    }

    /// Nothing is mounted anew, nothing is forgotten, and IO goes on.
    fn restarts(&mut self) -> Result<()> {
        let mut volumes = Vec::new();
        for shape in [Shape::Mount("ext4"), Shape::Mount("xfs"), Shape::Block] {
            let mut volume = self.volume(shape, 320)?;
            volume.mode = Mode::SingleNodeSingleWriter;
            volume.stage(&self.driver)?;
            volume.publish(&self.driver, 0)?;
            volumes.push(volume);
        }
        let table = life::left(self.rig)?.mounts;
        for what in ["plugin", "daemon", "both"] {
            if what != "daemon" {
                self.rig.plugin.kill()?;
            }
            if what != "plugin" {
                self.rig.daemon.kill()?;
                self.rig.daemon.start()?;
            }
            if what != "daemon" {
                self.rig.plugin.start()?;
                self.driver = self.rig.plugin.driver()?;
            }
            for volume in &volumes {
                let driver = &self.driver;
                insist("staging again", || volume.stage(driver))?;
                insist("publishing again", || volume.publish(driver, 0))?;
                refused(volume.publish(driver, 1), Code::FailedPrecondition)?;
                ensure!(!volume.stats(driver, 0)?, "abnormal after {what} was started anew");
                if let Shape::Mount(_) = volume.shape {
                    fs::write(volume.target(0).join(what), what)?;
                }
            }
            let now = life::left(self.rig)?.mounts;
            ensure!(now == table, "{what}: {now:?} rather than {table:?}");
        }
        // Unmounted by another program than the plugin.
        nix::mount::umount(&volumes[0].target(0))?;
        ensure!(volumes[0].stats(&self.driver, 0)?, "nothing is abnormal about it");
        volumes[0].publish(&self.driver, 0)?;
        ensure!(fs::read(volumes[0].target(0).join("both"))? == b"both");
        for volume in &volumes {
            self.down(volume)?;
        }
        Ok(())
    }

    fn inline(&mut self) -> Result<()> {
        let [kept, lost] = [self.up(Shape::Inline, 64)?, self.up(Shape::Inline, 64)?];
        for volume in [&kept, &lost] {
            fs::write(volume.target(0).join("file"), b"data")?;
        }
        self.rig.plugin.kill()?;
        self.rig.daemon.kill()?;
        self.rig.daemon.start()?;
        self.rig.plugin.start()?;
        self.driver = self.rig.plugin.driver()?;
        for volume in [&kept, &lost] {
            insist("publishing again", || volume.publish(&self.driver, 0))?;
            ensure!(fs::read(volume.target(0).join("file"))? == b"data", "the data is lost");
        }
        self.down(&kept)?;
        self.forget()?;
        self.down(&lost)?;
        lost.unpublish(&self.driver, 0)?;
        // A pod that goes while the plugin is down.
        let volume = self.up(Shape::Inline, 64)?;
        self.rig.plugin.kill()?;
        nix::mount::umount(&volume.target(0))?;
        fs::remove_dir(volume.target(0))?;
        volume.gone()?;
        self.rig.plugin.start()?;
        self.driver = self.rig.plugin.driver()?;
        blockd_testkit::tools::wait_until("the volume to be swept away", PATIENCE, || {
            life::nothing_left(self.rig, "a pod was gone").ok()
        })
    }

    /// The plugin starts without what it remembered.
    fn forget(&mut self) -> Result<()> {
        self.rig.plugin.kill()?;
        fs::remove_dir_all(self.rig.plugin.state_dir())?;
        self.rig.plugin.start()?;
        self.driver = self.rig.plugin.driver()?;
        Ok(())
    }

    fn lost_records(&mut self) -> Result<()> {
        let shapes = [Shape::Mount("ext4"), Shape::Mount("btrfs"), Shape::Block];
        let volumes = shapes.map(|shape| self.up(shape, 256));
        let volumes = volumes.into_iter().collect::<Result<Vec<_>>>()?;
        self.forget()?;
        for volume in &volumes {
            ensure!(!volume.stats(&self.driver, 0)?, "abnormal");
            self.down(volume)?;
        }
        Ok(())
    }

    /// Two drivers of one daemon: neither sees what the other has.
    fn beside(&mut self) -> Result<()> {
        let settings = Settings {
            driver_name: "strict.blockd.io".to_owned(),
            words: vec!["--strict-single-node-writer".to_owned()],
            ..Settings::default()
        };
        let socket = self.rig.daemon.control_socket();
        let mut plugin = Plugin::new("strict", &socket, &settings)?;
        plugin.start()?;
        let ours = self.up(Shape::Mount("ext4"), 64)?;
        std::mem::swap(&mut self.rig.plugin, &mut plugin);
        let loose = std::mem::replace(&mut self.driver, self.rig.plugin.driver()?);
        let mut theirs = self.volume(Shape::Mount("ext4"), 64)?;
        theirs.mode = Mode::SingleNodeWriter;
        theirs.stage(&self.driver)?;
        theirs.publish(&self.driver, 0)?;
        refused(theirs.publish(&self.driver, 1), Code::FailedPrecondition)?;
        // A volume of another driver does not exist for this one, and deleting it succeeds.
        ours.delete(&self.driver)?;
        ensure!(ours.target(0).join("lost+found").exists(), "the other driver's volume is gone");
        self.down(&theirs)?;
        std::mem::swap(&mut self.rig.plugin, &mut plugin);
        self.driver = loose;
        plugin.stop()?;
        self.down(&ours)
    }
}

/// A step that takes longer is stuck.
pub(in crate::workload) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

/// Repeats a call while its answer permits a retry.
pub(in crate::workload) fn insist<T>(what: &str, mut call: impl FnMut() -> Answer<T>) -> Result<T> {
    let start = Clock::start();
    loop {
        let status = match call() {
            Ok(done) => return Ok(done),
            Err(status) => status,
        };
        let hopeless = matches!(
            status.code(),
            Code::InvalidArgument | Code::NotFound | Code::AlreadyExists | Code::OutOfRange
        );
        ensure!(!hopeless && start.elapsed() < PATIENCE, "{what}: {status}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// The device's own name, of its node bound to a file.
pub(super) fn device_of(path: &Path) -> Result<String> {
    let table = table()?;
    let root = table.get(&*path.to_string_lossy()).context("nothing is mounted there")?;
    Ok(format!("/dev{}", root.0))
}

/// The device that a file system was mounted from.
pub(super) fn mounted_from(path: &Path) -> Result<String> {
    let table = table()?;
    let found = table.get(&*path.to_string_lossy()).context("nothing is mounted there")?;
    Ok(found.1.clone())
}

/// Of each mount, what of the file system is shown and what it was mounted from.
fn table() -> Result<HashMap<String, (String, String)>> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let line = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mount: Vec<&str> = mount.split(' ').collect();
        let source = file_system.split(' ').nth(1)?;
        let (root, path) = (*mount.get(3)?, *mount.get(4)?);
        Some((path.to_owned(), (root.to_owned(), source.to_owned())))
    };
    Ok(text.lines().filter_map(line).collect())
}

/// Bytes of the file system that is mounted there.
pub(super) fn total(path: &Path) -> Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    Ok(stat.blocks() * stat.fragment_size())
}

fn sum(device: &str) -> Result<String> {
    guest::shell(&format!("echo 3 >/proc/sys/vm/drop_caches; sha256sum <{device}"))
}
