//! Volumes that are namespaces, through their lives: mapped, mounted for reading, raw, in sectors,
//! grown, and overwritten when they go.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::CreateSnapshotRequest;
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_testkit::clock::Clock;
use tonic::Code;

use super::growth::over_remains;
use super::node::{CLASS, GROWING, MIB, Node};
use super::{drop_caches, has_dax, mounted};
use crate::csi::{self, Driver, Options, refused};
use crate::workload::csi::life::{Shape, Volume};
use crate::workload::guest::shell;
use crate::workload::pmem::{direct, regions};

/// Lives of each volume that comes and goes beside others.
const ROUNDS: u32 = 4;

/// A step: its name, whether the short form has it, and its function.
type Step = (&'static str, bool, fn(&mut Node) -> Result<()>);

const STEPS: [Step; 10] = [
    ("what can't be is refused", true, |node| refusals(node)),
    ("ext4 is mapped", true, |node| mapped(node, "ext4", 64)),
    ("xfs is mapped", false, |node| mapped(node, "xfs", 600)),
    ("what is mounted for reading", false, |node| read_only(node)),
    ("a raw device, and what it held", false, |node| erased(node)),
    ("sectors are not mapped", false, |node| sectors(node)),
    ("an unpublished namespace grows", false, |node| grows(node)),
    ("one grows over what others left", true, |node| over_remains(node)),
    ("many come and go side by side", false, |node| beside(node)),
    ("the suite's rows", false, |node| suite(node)),
];

/// Steps through all of them. Gives how many.
///
/// # Errors
/// When one of them fails, or leaves something.
pub(super) fn all(node: &mut Node) -> Result<usize> {
    let mut steps = 0;
    for (name, in_short, step) in STEPS {
        if node.short && !in_short {
            continue;
        }
        steps += 1;
        let start = Clock::start();
        step(node).with_context(|| format!("{name}; {}", node.last_words()))?;
        node.clean(name)?;
        println!("{name}: ok, {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(steps)
}

/// Nothing is made of what can't be, in any pool.
fn refusals(node: &mut Node) -> Result<()> {
    let before = regions::ours()?;
    for (class, key, value, code) in [
        ("pooled", "usage", "AppDirect", Code::InvalidArgument),
        ("pooled", "kataContainers", "true", Code::InvalidArgument),
        ("direct-of-extents", "usage", "AppDirect", Code::FailedPrecondition),
        ("direct-of-disk", "usage", "AppDirect", Code::FailedPrecondition),
        ("direct-of-disk", "usage", "FileIO", Code::FailedPrecondition),
        ("pooled-of-disk", "usage", "FileIO", Code::FailedPrecondition),
        ("pooled-of-namespaces", "usage", "FileIO", Code::FailedPrecondition),
    ] {
        let parameters = [("class", class), (key, value)];
        let mut volume = node.volume("refused", Shape::Mount("ext4"), 96, &parameters)?;
        let answer = volume.create(&node.driver);
        let status =
            refused(answer, code).with_context(|| format!("{key} {value} of class {class}"))?;
        if class == "pooled" {
            let text = status.message();
            ensure!(text.contains(key) && text.contains("class of kind pmem-direct"), "{text}");
        }
        volume.gone()?;
    }
    let after = regions::ours()?;
    ensure!(before == after, "before: {before:?}\nafter: {after:?}");
    Ok(())
}

/// A mount with DAX, as applications request it.
fn mapped(node: &mut Node, kind: &'static str, mib: i64) -> Result<()> {
    let parameters = [("class", "direct"), ("usage", "AppDirect"), ("eraseAfter", "false")];
    let mut volume = node.volume(kind, Shape::Mount(kind), mib, &parameters)?;
    volume.create(&node.driver)?;
    context(node, &volume)?;
    let device = node.device(&volume)?;
    for _ in 0..2 {
        volume.stage(&node.driver)?;
        volume.publish(&node.driver, 0)?;
    }
    volume.publish(&node.driver, 1)?;
    for path in [&volume.staging, &volume.target(0), &volume.target(1)] {
        let (source, options) = mounted(path)?;
        ensure!(Path::new(&source) == device, "{source} rather than {}", device.display());
        ensure!(has_dax(&options), "{kind}: {options:?}");
    }
    let faults = direct::map(&volume.target(0))?;
    // Not by way of the cache, of which there is none.
    direct::compare(&volume.target(1))?;
    let (total, size) = (node.total(&volume)?, mib * MIB);
    ensure!((size / 2..size + size / 4).contains(&total), "{total} of {size} bytes");
    refused(volume.delete(&node.driver), Code::FailedPrecondition)?;
    let request = CreateSnapshotRequest {
        source_volume_id: volume.id.clone(),
        name: format!("{kind}-snapshot"),
        ..Default::default()
    };
    refused(node.driver.create_snapshot(request), Code::FailedPrecondition)?;
    refused(volume.grow(&node.driver, 2 * size), Code::FailedPrecondition)?;
    volume.unpublish(&node.driver, 1)?;
    // Data that was never synced is there when it is mounted anew.
    node.off(&volume)?;
    volume.stage(&node.driver)?;
    volume.publish(&node.driver, 0)?;
    direct::compare(&volume.target(0))?;
    println!("{kind}: {faults} faults");
    node.down(&volume)
}

/// The words of a volume's context are what the kernel has.
fn context(node: &Node, volume: &Volume) -> Result<()> {
    let device = node.device(volume)?;
    let bytes = shell(&format!("blockdev --getsize64 {}", device.display()))?;
    let usable = node.attribute(volume, "usable-bytes")?;
    ensure!(bytes.trim() == usable, "{usable} of {bytes}");
    let charged: i64 = node.attribute(volume, "charged-bytes")?.parse()?;
    ensure!(charged > usable.parse()? && usable.parse::<i64>()? >= volume.size);
    let is = [
        ("usage", "AppDirect"),
        ("durability", "power-safe"),
        ("erase-after", "false"),
        ("region", &node.region),
    ];
    for (word, value) in is {
        ensure!(node.attribute(volume, word)? == value, "{word}: {:?}", volume.context);
    }
    Ok(())
}

/// A volume that may only be read: its device refuses writers, until it is unstaged.
fn read_only(node: &mut Node) -> Result<()> {
    let parameters = [("class", "direct"), ("eraseAfter", "false")];
    let mut volume = node.up("read", Shape::Mount("ext4"), 64, &parameters)?;
    fs::write(volume.target(0).join("file"), "kept")?;
    node.off(&volume)?;
    let device = node.device(&volume)?;
    let ro = || shell(&format!("blockdev --getro {}", device.display()));
    volume.mode = Mode::SingleNodeReaderOnly;
    volume.stage(&node.driver)?;
    volume.publish_as(&node.driver, 0, volume.mode, true)?;
    let (_, options) = mounted(&volume.target(0))?;
    ensure!(has_dax(&options), "{options:?}");
    ensure!(fs::read(volume.target(0).join("file"))? == b"kept", "another file");
    ensure!(fs::write(volume.target(0).join("file"), "lost").is_err(), "it was written");
    ensure!(ro()?.trim() == "1", "its device can be written");
    node.off(&volume)?;
    ensure!(ro()?.trim() == "0", "its device can't be written any more");
    volume.delete(&node.driver)?;
    volume.gone()
}

/// A volume's data is gone when its space is free again, or at the latest when another gets it.
fn erased(node: &mut Node) -> Result<()> {
    let free = node.scrubbed(direct::POOL)?;
    let secret: Vec<u8> = b"a secret".repeat(1 << 17);
    for erase in ["true", "false"] {
        let parameters = [("class", "direct"), ("eraseAfter", erase)];
        let volume = node.up("secret", Shape::Block, 64, &parameters)?;
        ensure!(node.attribute(&volume, "erase-after")? == erase, "{:?}", volume.context);
        let target = volume.target(0);
        ensure!(fs::metadata(&target)?.rdev() == fs::metadata(node.device(&volume)?)?.rdev());
        let file = File::options().write(true).open(&target)?;
        for at in 0..64 {
            file.write_all_at(&secret, at << 20)?;
        }
        file.sync_all()?;
        drop(file);
        let taken: i64 = node.attribute(&volume, "charged-bytes")?.parse()?;
        let while_used = node.pool(direct::POOL)?.free_bytes;
        ensure!(while_used == free - taken, "{while_used} of {free} are free, less {taken}");
        node.down(&volume)?;
        let now = node.scrubbed(direct::POOL)?;
        ensure!(now == free, "{now} of {free} bytes are free again");
        let next = node.up("next", Shape::Block, 64, &[("class", "direct")])?;
        drop_caches()?;
        let bytes = fs::read(next.target(0))?;
        ensure!(bytes.len() >= 64 << 20, "{} bytes", bytes.len());
        let left = bytes.iter().position(|&byte| byte != 0);
        ensure!(left.is_none(), "eraseAfter {erase}: byte {left:?} of the next volume is not 0");
        node.down(&next)?;
        node.scrubbed(direct::POOL)?;
    }
    Ok(())
}

/// FileIO of a namespace: files and a raw device, without DAX.
fn sectors(node: &mut Node) -> Result<()> {
    for shape in [Shape::Mount("ext4"), Shape::Block] {
        let parameters = [("class", "direct"), ("usage", "FileIO")];
        let volume = node.up("sectors", shape, 32, &parameters)?;
        let device = node.device(&volume)?;
        ensure!(device.to_string_lossy().ends_with('s'), "{} has no sectors", device.display());
        ensure!(node.attribute(&volume, "usage")? == "FileIO", "{:?}", volume.context);
        if shape == Shape::Block {
            shell(&format!(
                "dd if=/dev/urandom of={} bs=1M count=8 oflag=direct",
                volume.target(0).display()
            ))?;
        } else {
            let (_, options) = mounted(&volume.target(0))?;
            ensure!(!has_dax(&options), "{options:?}");
            fs::write(volume.target(0).join("file"), "kept")?;
            node.off(&volume)?;
            volume.stage(&node.driver)?;
            volume.publish(&node.driver, 0)?;
            ensure!(fs::read(volume.target(0).join("file"))? == b"kept", "another file");
        }
        node.down(&volume)?;
        node.scrubbed(direct::POOL)?;
    }
    Ok(())
}

/// The kernel's records of pages are in the machine's memory, so that it can.
fn grows(node: &mut Node) -> Result<()> {
    let mut volume = node.up("grows", Shape::Mount("ext4"), 64, &[("class", GROWING)])?;
    let before = node.total(&volume)?;
    direct::map(&volume.target(0))?;
    refused(volume.grow(&node.driver, 128 * MIB), Code::FailedPrecondition)?;
    node.off(&volume)?;
    volume.grow(&node.driver, 128 * MIB)?;
    volume.stage(&node.driver)?;
    volume.publish(&node.driver, 0)?;
    let capacity = volume.node_grow(&node.driver, 0)?;
    ensure!(capacity >= 128 * MIB, "{capacity}");
    let after = node.total(&volume)?;
    ensure!(after > before + 48 * MIB, "{after} bytes after {before}");
    direct::compare(&volume.target(0))?;
    node.down(&volume)
}

/// Volumes of both kinds, made and removed while others are: the kernel's devices come and go while
/// they are looked at. No call may fail.
fn beside(node: &mut Node) -> Result<()> {
    let mut all = Vec::new();
    for number in 0..4 {
        let class = if number == 3 { "pooled" } else { "direct" };
        let usage = if number < 2 { ("eraseAfter", "false") } else { ("usage", "FileIO") };
        let name = format!("beside-{number}");
        let volume = node.volume(&name, Shape::Mount("ext4"), 32, &[("class", class), usage])?;
        all.push((node.rig.plugin.driver()?, volume));
    }
    std::thread::scope(|scope| {
        let one = |driver: &Driver, volume: &mut Volume| -> Result<()> {
            for round in 0..ROUNDS {
                volume.create(driver).context("create")?;
                volume.stage(driver).context("stage")?;
                volume.publish(driver, 0).context("publish")?;
                fs::write(volume.target(0).join("file"), format!("{round}"))?;
                volume.unpublish(driver, 0).context("unpublish")?;
                volume.unstage(driver).context("unstage")?;
                volume.delete(driver).context("delete")?;
            }
            volume.gone()
        };
        let threads: Vec<_> = all
            .iter_mut()
            .map(|(driver, volume)| scope.spawn(move || one(driver, volume)))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })
    })
}

/// The rows about persistent memory, with this node's real devices.
fn suite(node: &mut Node) -> Result<()> {
    let kubelet = node.rig.plugin.kubelet_dir();
    for class in ["direct", "pooled"] {
        let rows = csi::list().into_iter().filter(|(_, file)| file.ends_with("/pmem.rs"));
        let mut passed = 0;
        for (name, _) in rows {
            let options = Options {
                only: Some(name.to_owned()),
                skip_node: false,
                parameters: HashMap::from([(CLASS.to_owned(), class.to_owned())]),
                size: 32 * MIB,
                staging_dir: kubelet.join("plugins/kubernetes.io/csi"),
                target_dir: kubelet.join("pods"),
                ..node.rig.options()
            };
            let report = csi::run(&options)?;
            report.print(false);
            ensure!(report.is_good() && report.not_offered() == 0, "{name} of class {class}");
            passed += report.passed();
            node.scrubbed(direct::POOL)?;
        }
        println!("suite: {passed} rows of class {class}");
    }
    Ok(())
}
