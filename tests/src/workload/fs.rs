//! `fs`: what people put on block devices: file systems, partitions, encryption, volume groups,
//! and tools that trim, zero and grow them.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::clock::Clock;
use blockd_testkit::daemon::Daemon;
use blockd_testkit::folder::Folder;

use super::load::{self, Counts, Load};
use super::rounds::{Rounds, Targets};
use super::{MARK, Run, device_of, figures, guest, sparse};
use crate::vm::Drive;

/// File systems: name, how it is made, how it is checked.
const KINDS: [(&str, &str, &str); 3] = [
    ("ext4", "mkfs.ext4 -q", "e2fsck -fn"),
    ("xfs", "mkfs.xfs -q", "xfs_repair -n"),
    ("btrfs", "mkfs.btrfs -q", "btrfs check --readonly"),
];

/// Device-mapper's tools would wait for udev, which the guest lacks.
const NO_UDEV: &str = "export DM_DISABLE_UDEV=1";

/// The host's half.
///
/// # Errors
/// When any step fails, or finds other bytes than were written.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("fs")?;
    let disk = sparse(&folder, "disk", 8 << 30)?;
    let vm = run
        .machine("fs")?
        .memory(2048)
        .modules(&["xfs", "btrfs", "dm-crypt", "dm-mod", "xts"])
        .programs(&["mkfs.xfs", "xfs_repair", "mkfs.btrfs", "btrfs", "resize2fs", "fstrim"])
        .programs(&["cryptsetup", "lvm", "dd", "sfdisk", "blockdev", "dmsetup"])
        .drive(Drive::File(disk));
    let output = vm.run(&run.inside(&format!("fs --seconds {}", run.either(3, 60))))?;
    println!("{}", output.text);
    Ok(figures(&output.text)?.to_owned())
}

struct Steps<'a> {
    daemon: &'a Daemon,
    targets: Arc<Targets>,
    seconds: u64,
    seed: u64,
    done: u64,
}

/// The guest's half.
///
/// # Errors
/// As [`run`].
pub fn inside(seconds: u64, seed: u64) -> Result<()> {
    let mut daemon = guest::daemon(Path::new("/dev/vda"), "")?;
    let targets = Arc::new(Targets::default());
    let mut rounds = Rounds::new(&targets, seed, 0);
    // It lasts long enough for many rounds, and each command takes time from the steps.
    rounds.pauses = 200..=600;
    let mut steps = Steps { daemon: &daemon, targets, seconds, seed, done: 0 };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| rounds.run(&daemon, &over));
        let result = steps.all();
        over.store(true, Ordering::Relaxed);
        let changed = changing.join();
        result?;
        changed.map_err(|_| anyhow::anyhow!("the thread of snapshots panicked"))?
    })
    .with_context(|| daemon.last_words())?;
    guest::no_errors()?;
    rounds.figures.expect_folds()?;
    let done = steps.done;
    ensure!(daemon.stop()?.success(), "the daemon's end: {}", daemon.last_words());
    println!(
        "{MARK}{done} steps: ext4, xfs, btrfs, fio, oracle, blkdiscard, partitions, \
              dm-crypt, add --encrypt, LVM, growing; {}; 0 differences",
        rounds.figures
    );
    Ok(())
}

impl Steps<'_> {
    fn all(&mut self) -> Result<()> {
        for kind in KINDS {
            self.step(kind.0, |steps| steps.file_system(kind))?;
        }
        self.step("fio", Self::fio)?;
        self.step("oracle, several queues", Self::oracle)?;
        self.step("blkdiscard", Self::discard)?;
        self.step("partitions", Self::partitions)?;
        self.step("dm-crypt", Self::encryption)?;
        self.step("add --encrypt", Self::encrypted)?;
        self.step("LVM", Self::volume_group)?;
        self.step("growing under load", Self::grow)
    }

    fn step(&mut self, name: &str, step: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let start = Clock::start();
        step(self).with_context(|| format!("{name}\n{}", self.daemon.last_words()))?;
        println!("{name}: ok, {:.1} s", start.elapsed().as_secs_f64());
        self.done += 1;
        Ok(())
    }

    fn add(&self, name: &str, mib: u64) -> Result<String> {
        guest::add_device(self.daemon, name, mib << 20)?;
        self.targets.add(name, None);
        Ok(device_of(name).display().to_string())
    }

    fn del(&self, name: &str) -> Result<()> {
        self.targets.remove(name);
        self.daemon.cli(&["del", name]).map(|_| ())
    }

    /// Bytes that a volume takes in the pool.
    fn mapped(&self, name: &str) -> Result<u64> {
        let shown = self.daemon.cli(&["show", name])?;
        shown["volume"]["mapped_bytes"]
            .as_u64()
            .with_context(|| format!("no mapped_bytes in {shown}"))
    }

    /// A real tree copied, the file system checked, every byte compared, and its space given back.
    fn file_system(&self, (name, make, check): (&str, &str, &str)) -> Result<()> {
        let device = self.add(name, 768)?;
        guest::shell(&format!(
            "{make} {device}; mkdir -p /mnt/{name}; mount -t {name} {device} /mnt/{name}
             cp -a /usr /mnt/{name}/; umount /mnt/{name}; {check} {device}
             echo 3 >/proc/sys/vm/drop_caches
             mount -t {name} {device} /mnt/{name}; diff -r /usr /mnt/{name}/usr"
        ))?;
        let full = self.mapped(name)?;
        guest::shell(&format!("rm -r /mnt/{name}/usr; sync; fstrim /mnt/{name}"))?;
        // A file system keeps some for itself; what was copied is some hundred MiB.
        let trimmed = self.mapped(name)?;
        println!("{name}: {full} bytes mapped, {trimmed} after fstrim");
        ensure!(trimmed < full / 2, "fstrim gave too little back: {full} to {trimmed}");
        guest::shell(&format!("umount /mnt/{name}; {check} {device}"))?;
        self.del(name)
    }

    /// Writes, reads and trims, every block with a checksum.
    fn fio(&self) -> Result<()> {
        let device = self.add("fio", 256)?;
        let size = 8 + self.seconds;
        let common = format!(
            "fio --filename={device} --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c \
             --verify_fatal=1 --randseed={} --group_reporting --output=/tmp/fio",
            self.seed
        );
        guest::shell(&format!(
            "{common} --name=mixed --rw=randrw --bsrange=4k-128k --size={size}m --numjobs=2 \
             --offset_increment=128m --verify_backlog=64"
        ))?;
        guest::shell(&format!("{common} --name=trims --rw=randtrimwrite --bs=4k --size={size}m"))?;
        guest::shell(&format!(
            "{common} --name=sync --rw=write --bs=64k --size={size}m --sync=1 --iodepth=1"
        ))?;
        self.del("fio")
    }

    /// The oracle on a device with two queues: writes, zeroes of both kinds, trims, FUA, flushes.
    fn oracle(&self) -> Result<()> {
        self.daemon.cli(&["add", "--ublk", "--queues", "2", "--size", "64M", "oracle"])?;
        let volume = crate::kill::volume::Volume::new("oracle", 3, 64 << 20, 4096);
        let volume = Arc::new(std::sync::Mutex::new(volume));
        self.targets.add("oracle", Some(&volume));
        let counts = Arc::new(Counts::default());
        let seeds: Vec<u64> = (0..6).map(|number| self.seed + number).collect();
        let path = device_of("oracle");
        let load = Load::start(&path, &volume, None, &counts, &seeds)?;
        std::thread::sleep(Duration::from_secs(self.seconds));
        load.stop()?;
        load::compare(&path, &volume)?;
        println!("{} operations", counts.operations.load(Ordering::Relaxed));
        self.del("oracle")
    }

    fn discard(&self) -> Result<()> {
        let device = self.add("discard", 64)?;
        guest::shell(&format!(
            "dd if=/dev/urandom of={device} bs=1M count=64 iflag=fullblock oflag=sync status=none"
        ))?;
        ensure!(self.mapped("discard")? >= 64 << 20, "64 MiB are written and not mapped");
        guest::shell(&format!("blkdiscard {device}; cmp -n 67108864 {device} /dev/zero"))?;
        let left = self.mapped("discard")?;
        ensure!(left == 0, "{left} bytes are mapped after blkdiscard of all");
        guest::shell(&format!(
            "dd if=/dev/urandom of={device} bs=1M count=64 iflag=fullblock oflag=direct status=none
             blkdiscard -z {device}; cmp -n 67108864 {device} /dev/zero"
        ))?;
        self.del("discard")
    }

    fn partitions(&self) -> Result<()> {
        let device = self.add("parts", 256)?;
        guest::shell(&format!(
            "printf 'label: gpt\\nsize=64M\\nsize=64M\\n' | sfdisk {device}
             disk=$(readlink -f {device}); for part in 1 2; do
             test -b ${{disk}}p$part; mkfs.ext4 -q ${{disk}}p$part; e2fsck -fn ${{disk}}p$part; done"
        ))?;
        // Found again by the kernel itself when the device comes anew.
        self.daemon.cli(&["detach", "parts"])?;
        self.daemon.cli(&["attach", "--ublk", "parts"])?;
        guest::shell(&format!(
            "disk=$(readlink -f {device}); for try in 1 2 3 4 5 6 7 8 9; do
             test -b ${{disk}}p2 && break; sleep 0.5; done; e2fsck -fn ${{disk}}p2"
        ))?;
        self.del("parts")
    }

    fn encryption(&self) -> Result<()> {
        let device = self.add("crypt", 128)?;
        let open = "cryptsetup open --key-file /tmp/key --disable-locks";
        guest::shell(&format!(
            "{NO_UDEV}; echo secret >/tmp/key; mkdir -p /run/cryptsetup
             cryptsetup luksFormat -q --disable-locks --type luks1 --pbkdf-force-iterations 1000 \
             --key-file /tmp/key {device}
             {open} {device} clear; dmsetup mknodes; mkfs.ext4 -q /dev/mapper/clear
             mkdir -p /mnt/crypt; mount -t ext4 /dev/mapper/clear /mnt/crypt
             cp -a /usr/bin /mnt/crypt/; umount /mnt/crypt
             cryptsetup close clear; {open} {device} clear; dmsetup mknodes
             mount -t ext4 /dev/mapper/clear /mnt/crypt; diff -r /usr/bin /mnt/crypt/bin
             umount /mnt/crypt; cryptsetup close clear"
        ))?;
        self.del("crypt")
    }

    /// The command's own encryption: made once, opened again, and with no other key.
    fn encrypted(&self) -> Result<()> {
        guest::shell("echo secret >/tmp/key; echo other >/tmp/other")?;
        let size = Cell::new("128M");
        let add = |key: &str| {
            let words = ["add", "--encrypt", "--key-file", key, "--size", size.get(), "sealed"];
            self.daemon.cli(&words)
        };
        let added = add("/tmp/key")?;
        let mapping = "/dev/mapper/blockd-default-sealed";
        ensure!(added["where"] == mapping && added["created"] == true, "{added}");
        let bytes = guest::shell(&format!("blockdev --getsize64 {mapping}"))?;
        ensure!(bytes.trim() == (128 << 20).to_string(), "the mapping has {bytes} bytes");
        guest::shell(&format!(
            "mkfs.ext4 -q {mapping}; mkdir -p /mnt/sealed; mount -t ext4 {mapping} /mnt/sealed
             cp -a /usr/bin /mnt/sealed/"
        ))?;
        ensure!(add("/tmp/key")?["changed"] == false, "a repeat changed something");
        for verb in ["detach", "del"] {
            let said = format!("{:?}", self.daemon.cli(&[verb, "sealed"]).map(drop));
            ensure!(said.contains("is in use: unmount it"), "{verb}: {said}");
        }
        guest::shell("umount /mnt/sealed")?;
        size.set("160M");
        let resized = self.daemon.cli(&["resize", "--size", size.get(), "sealed"])?;
        if resized["device_has_old_size"] == false {
            ensure!(add("/tmp/key")?["changed"] == true, "the mapping did not grow");
            let bytes = guest::shell(&format!("blockdev --getsize64 {mapping}"))?;
            ensure!(bytes.trim() == (160 << 20).to_string(), "the grown mapping has {bytes} bytes");
        }
        self.daemon.cli(&["detach", "sealed"])?;
        let said = format!("{:?}", add("/tmp/other").map(drop));
        ensure!(said.contains("the key of --key-file opens none of its key slots"), "{said}");
        ensure!(add("/tmp/key")?["changed"] == true, "it was not opened again");
        let bytes = guest::shell(&format!("blockdev --getsize64 {mapping}"))?;
        ensure!(bytes.trim() == (160 << 20).to_string(), "the new mapping has {bytes} bytes");
        guest::shell(&format!(
            "mount -t ext4 {mapping} /mnt/sealed; diff -r /usr/bin /mnt/sealed/bin
             umount /mnt/sealed"
        ))?;
        self.daemon.cli(&["del", "sealed"])?;
        guest::shell(&format!("test ! -e {mapping}")).map(drop)
    }

    fn volume_group(&self) -> Result<()> {
        let (one, two) = (self.add("pv1", 128)?, self.add("pv2", 128)?);
        let config = "--config 'activation { udev_sync=0 udev_rules=0 } \
                      devices { scan=[\"/dev\"] use_devicesfile=0 }'";
        guest::shell(&format!(
            "{NO_UDEV}; mkdir -p /run/lock/lvm
             disks=\"$(readlink -f {one}) $(readlink -f {two})\"
             lvm vgcreate -y {config} group $disks; lvm lvcreate -y -Zn -Wn {config} -i 2 -l 100%FREE -n data group
             dmsetup mknodes; mkfs.ext4 -q /dev/mapper/group-data
             mkdir -p /mnt/group; mount -t ext4 /dev/mapper/group-data /mnt/group
             cp -a /usr/bin /mnt/group/; umount /mnt/group
             mount -t ext4 /dev/mapper/group-data /mnt/group; diff -r /usr/bin /mnt/group/bin
             umount /mnt/group; lvm vgchange -an {config} group; lvm vgremove -y {config} group"
        ))?;
        self.del("pv1")?;
        self.del("pv2")
    }

    /// Grown while files are written: at once where the kernel can do that, else by attaching anew.
    fn grow(&self) -> Result<()> {
        let device = self.add("grow", 96)?;
        guest::mount_new("grow", Path::new("/mnt/grow"))?;
        let stop = AtomicBool::new(false);
        let files = super::files::Files::new(Path::new("/mnt/grow"));
        let written = std::thread::scope(|scope| -> Result<u64> {
            let writing = scope.spawn(|| -> Result<u64> {
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    files.write(number)?;
                }
                Ok(number)
            });
            std::thread::sleep(Duration::from_secs(1));
            let resized = self.daemon.cli(&["resize", "--size", "192M", "grow"]);
            std::thread::sleep(Duration::from_secs(1));
            stop.store(true, Ordering::Relaxed);
            let written = writing.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            println!("resize said {}", resized?);
            Ok(written)
        })?;
        let size = || guest::shell(&format!("blockdev --getsize64 {device}"));
        if size()?.trim() != (192_u64 << 20).to_string() {
            ensure!(guest::shell("uname -r")?.starts_with("6.12"), "it did not grow in use");
            guest::shell("umount /mnt/grow")?;
            self.daemon.cli(&["detach", "grow"])?;
            self.daemon.cli(&["attach", "--ublk", "grow"])?;
            ensure!(size()?.trim() == (192_u64 << 20).to_string(), "attached anew: {}", size()?);
            guest::shell(&format!("mount -t ext4 {device} /mnt/grow"))?;
        }
        guest::shell(&format!("resize2fs {device}"))?;
        guest::shell("head -c 120000000 /dev/zero >/mnt/grow/large; sync")?;
        files.check(written)?;
        guest::shell(&format!("umount /mnt/grow; e2fsck -fn {device}"))?;
        self.del("grow")
    }
}
