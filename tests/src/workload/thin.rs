//! `thin`: a pool's metadata as XML becomes a pool of device-mapper's `thin-pool` on the same
//! disks, made by dm-thin's own tools. Every volume, snapshot and clone has to read there as it
//! does here.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blockd_mapper::engine::Control;
use blockd_mapper::units::VolumeId;
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;

use super::{Run, sparse};
use crate::vm::Drive;
use blockd_sim::rig::{Media, Rig};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Bytes of the metadata's disk: dm-thin needs at least 2 MiB.
const METADATA: u64 = 16 << 20;

/// A pool and what its volumes hold.
struct World {
    rig: Rig,
    random: fastrand::Rng,
    volumes: Vec<VolumeId>,
}

impl World {
    /// Volumes with a family of each kind. A discarded extent may be shared in the family, which
    /// dm-thin can't express: discards come before the snapshots.
    fn new(extent_size: usize, devices: &[usize], seed: u64) -> Result<Self> {
        let media = Media::create(u32::try_from(extent_size)?, devices, None).map_err(wrong)?;
        let rig = Rig::open(media).map_err(wrong)?;
        let mut world = Self { rig, random: fastrand::Rng::with_seed(seed), volumes: Vec::new() };
        let [base, single] =
            [("base", 5 * MIB + 3 * 512), ("single", 3 * MIB)].map(|(name, size)| {
                let size = size as u64;
                world.make(Control::Create { name: name.to_owned(), size, block_size: 512 })
            });
        let (base, single) = (base?, single?);
        world.scatter(base, 30)?;
        world.scatter(single, 20)?;
        for volume in [base, single] {
            let at = (world.random.u64(..8) * 4 + 1) * 4096;
            world.rig.discard(volume, at, 3 * 4096).map_err(wrong)?;
        }
        world.rig.control(Control::Checkpoint).map_err(wrong)?;
        let snapshot = world.snapshot(base, "first")?;
        world.scatter(base, 10)?;
        let name = "clone".to_owned();
        let size = Some(7 * MIB as u64 + 512);
        let clone = world.make(Control::Clone { source: snapshot, name, size })?;
        world.scatter(clone, 10)?;
        world.snapshot(base, "second")?;
        world.rig.control(Control::Checkpoint).map_err(wrong)?;
        // The rest stays in the log, which the XML has to have as well.
        world.scatter(base, 10)?;
        world.snapshot(clone, "of the clone")?;
        let gone = world.snapshot(single, "gone")?;
        world.rig.control(Control::Delete { volume: gone }).map_err(wrong)?;
        world.volumes.retain(|volume| *volume != gone);
        world.rig.flush(base).map_err(wrong)?;
        Ok(world)
    }

    fn make(&mut self, control: Control) -> Result<VolumeId> {
        let id = self.rig.make(control).map_err(wrong)?;
        self.volumes.push(id);
        Ok(id)
    }

    fn snapshot(&mut self, source: VolumeId, name: &str) -> Result<VolumeId> {
        self.make(Control::Snapshot { source, name: name.to_owned() })
    }

    fn size(&self, volume: VolumeId) -> Result<usize> {
        let all = self.rig.engine().volumes();
        let found = all.iter().find(|info| info.id == volume).context("a volume is gone")?;
        Ok(usize::try_from(found.size)?)
    }

    /// Writes of 512 bytes to 100 KiB all over a volume.
    fn scatter(&mut self, volume: VolumeId, writes: usize) -> Result<()> {
        let blocks = self.size(volume)? / 512;
        for _ in 0..writes {
            let at = self.random.usize(..blocks);
            let len = self.random.usize(1..200).min(blocks - at) * 512;
            let data: Vec<u8> = std::iter::repeat_with(|| self.random.u8(..)).take(len).collect();
            self.rig.write(volume, at as u64 * 512, &data).map_err(wrong)?;
        }
        Ok(())
    }
}

fn wrong(error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow::anyhow!("{error:?}")
}

/// The host's half; the guest's is a script.
///
/// # Errors
/// When a tool refuses, or anything reads otherwise.
pub fn run(run: &Run) -> Result<String> {
    let pools: &[(usize, &[usize])] = &[
        (64 * KIB, &[20 * MIB + 4096, 33 * MIB]),
        (256 * KIB, &[64 * MIB]),
        (1024 * KIB, &[40 * MIB, 50 * MIB, 60 * MIB]),
    ];
    let mut volumes = 0;
    let pools = &pools[..run.either(1, pools.len())];
    for (extent_size, devices) in pools {
        let done = compared(run, *extent_size, devices);
        volumes += done.with_context(|| format!("extents of {extent_size} bytes"))?;
    }
    Ok(format!(
        "{} pool(s) as dm-thin's, {volumes} volumes, snapshots and clones compared, 0 differ",
        pools.len()
    ))
}

fn compared(run: &Run, extent_size: usize, devices: &[usize]) -> Result<usize> {
    let folder = Folder::new("thin")?;
    let mut world = World::new(extent_size, devices, run.seed)?;
    // With changes in the log, and closed: it has to be the same XML.
    let disks = put(&folder, &world.rig.media)?;
    let early = dump(&folder, "early.xml", &["--thin-xml"], &disks)?;
    world.rig.control(Control::Close).map_err(wrong)?;
    put(&folder, &world.rig.media)?;
    let xml = dump(&folder, "pool.xml", &["--thin-xml", "--fill"], &disks)?;
    let texts = (std::fs::read_to_string(early)?, std::fs::read_to_string(&xml)?);
    ensure!(texts.0 == texts.1, "the XML says otherwise while changes are in the log");
    world.rig = Rig::open(world.rig.media.clone()).map_err(wrong)?;
    let mut sums = Vec::new();
    for volume in world.volumes.clone() {
        let size = world.size(volume)?;
        let data = world.rig.read(volume, 0, size).map_err(wrong)?;
        sums.push((volume, size, sum_of(&folder, &data)?));
    }
    let metadata = sparse(&folder, "metadata", METADATA)?;
    let script = script(extent_size, devices, &sums)?;
    let mut vm = run
        .machine("thin")?
        .modules(&["dm-thin-pool"])
        .programs(&["dmsetup", "thin_restore", "thin_check", "sha256sum"])
        .file(&xml, "/pool.xml", false)
        .drive(Drive::File(metadata));
    for disk in disks {
        vm = vm.drive(Drive::File(disk));
    }
    let output = vm.run(&script)?;
    for (volume, _, sum) in &sums {
        let line = format!("{sum}  /dev/mapper/thin{volume}");
        ensure!(
            output.text.lines().any(|found| found == line),
            "volume {volume} reads otherwise: no line is {line:?} in\n{}",
            output.text
        );
    }
    Ok(sums.len())
}

fn put(folder: &Folder, media: &Media) -> Result<Vec<PathBuf>> {
    let disks = media.devices.iter().enumerate().map(|(number, bytes)| {
        let path = folder.path().join(format!("disk{number}"));
        std::fs::write(&path, bytes)?;
        Ok(path)
    });
    disks.collect()
}

fn dump(folder: &Folder, name: &str, how: &[&str], disks: &[PathBuf]) -> Result<PathBuf> {
    let path = folder.path().join(name);
    let mut dump = Command::new(tools::blockd()?);
    dump.args(["pool", "dump"]).args(how).arg("--output").arg(&path).args(disks);
    tools::output(&mut dump).context("dumping the pool")?;
    Ok(path)
}

/// By the program that the guest has too.
fn sum_of(folder: &Folder, data: &[u8]) -> Result<String> {
    let path: PathBuf = folder.path().join("content");
    std::fs::write(&path, data)?;
    let said = tools::text(Command::new("sha256sum").arg(&path))?;
    Ok(said.split_whitespace().next().context("sha256sum says nothing")?.to_owned())
}

/// Restores, checks and activates; prints the sum of each volume.
fn script(
    extent_size: usize,
    devices: &[usize],
    sums: &[(VolumeId, usize, String)],
) -> Result<String> {
    let (mut table, mut sectors) = (String::new(), 0);
    for (device, letter) in devices.iter().zip('b'..) {
        // The data device is the whole extents of each, one after the other.
        let whole = device / extent_size * extent_size / 512;
        let disk = Path::new("/dev").join(format!("vd{letter}"));
        writeln!(table, "{sectors} {whole} linear {} 0", disk.display())?;
        sectors += whole;
    }
    let block = extent_size / 512;
    let mut text = format!(
        "set -eu\n\
         thin_restore -i /pool.xml -o /dev/vda\n\
         thin_check /dev/vda\n\
         printf '%s' '{table}' >/table\n\
         dmsetup create --noudevsync data /table\n\
         dmsetup mknodes\n\
         dmsetup create --noudevsync pool --table \
         '0 {sectors} thin-pool /dev/vda /dev/mapper/data {block} 0 1 skip_block_zeroing'\n\
         dmsetup mknodes\n"
    );
    for (volume, size, _) in sums {
        let size = size / 512;
        writeln!(
            text,
            "dmsetup create --noudevsync thin{volume} --table \
             '0 {size} thin /dev/mapper/pool {volume}'\n\
             dmsetup mknodes\n\
             sha256sum /dev/mapper/thin{volume}\n\
             dmsetup remove --noudevsync thin{volume}"
        )?;
    }
    text.push_str(
        "dmsetup status pool\n\
         dmsetup remove --noudevsync pool\n\
         dmsetup remove --noudevsync data\n\
         thin_check /dev/vda\n",
    );
    Ok(text)
}
