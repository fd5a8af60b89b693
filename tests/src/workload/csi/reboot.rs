//! The power of the node is cut while volumes are in use, and the node boots again with empty
//! folders below `/run`, no mounts and no devices. Then the calls of a kubelet come: those that
//! clean up after pods that are gone, and those for pods that are still there. Afterwards volumes
//! that no PersistentVolume names are deleted.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::{CreateSnapshotRequest, DeleteSnapshotRequest};
use blockd_testkit::clock::Clock;
use serde_json::Value;

use super::encryption;
use super::life::{self, Shape, Volume};
use super::node::insist;
use crate::csi::operator::{json_of, output, persistent_volume, write_list};
use crate::csi::rig::Rig;
use crate::csi::{Answer, Driver};
use crate::workload::guest;

/// The guest's message when everything is durable.
pub(super) const READY: &str = "ready for the power to be cut";

const MIB: i64 = 1 << 20;
const BYTES: [u8; 4096] = [0x71; 4096];
/// Where a block volume has them.
const OFFSET: u64 = 1 << 20;

/// The state of a volume's pod when the power is cut and after the boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pod {
    /// Evicted before, as by a drain: unpublished and unstaged. It comes back.
    Drained,
    /// Deleted while the node was down: the kubelet cleans up after it.
    Gone,
    /// Still there: the kubelet stages and publishes at the same paths, and cleans nothing up.
    Stays,
}

const VOLUMES: [(&str, Shape, i64, Pod); 8] = [
    ("drained-ext4", Shape::Mount("ext4"), 64, Pod::Drained),
    ("drained-block", Shape::Block, 64, Pod::Drained),
    ("gone-xfs", Shape::Mount("xfs"), 320, Pod::Gone),
    ("gone-block", Shape::Block, 64, Pod::Gone),
    ("gone-inline", Shape::Inline, 64, Pod::Gone),
    ("stays-ext4", Shape::Mount("ext4"), 64, Pod::Stays),
    ("stays-luks", Shape::Mount("ext4"), 64, Pod::Stays),
    ("stays-block", Shape::Block, 64, Pod::Stays),
];

/// The volume of that name, made or made before.
fn volume(
    rig: &Rig,
    driver: &Driver,
    (name, shape, mib, _): (&str, Shape, i64, Pod),
) -> Result<Volume> {
    let mut volume = Volume::new(rig, name, shape, mib * MIB)?;
    if name.ends_with("luks") {
        encryption::encrypt(&mut volume, "reboot");
    }
    if shape != Shape::Inline {
        volume.create(driver)?;
    }
    Ok(volume)
}

fn up(driver: &Driver, volume: &Volume) -> Answer<()> {
    if volume.shape != Shape::Inline {
        volume.stage(driver)?;
    }
    volume.publish(driver, 0)
}

fn down(driver: &Driver, volume: &Volume) -> Answer<()> {
    volume.unpublish(driver, 0)?;
    if volume.shape == Shape::Inline { Ok(()) } else { volume.unstage(driver) }
}

/// Before the cut: volumes are made, written and in use. The machine is up until it is cut.
///
/// # Errors
/// When a call fails.
pub(super) fn before(rig: &Rig) -> Result<()> {
    let driver = rig.plugin.driver()?;
    for one in VOLUMES {
        let volume = volume(rig, &driver, one)?;
        up(&driver, &volume).with_context(|| format!("{one:?}"))?;
        let (file, at) = match volume.shape {
            Shape::Block => (File::options().write(true).open(volume.target(0))?, OFFSET),
            _ => (File::create(volume.target(0).join("file"))?, 0),
        };
        file.write_all_at(&BYTES, at)?;
        file.sync_all()?;
        if volume.shape != Shape::Block {
            File::open(volume.target(0))?.sync_all()?;
        }
        drop(file);
        if one.3 == Pod::Drained {
            down(&driver, &volume)?;
        }
    }
    // The folders of the kubelet and the plugin's records, as those of a node that ran for long.
    guest::shell("sync")?;
    println!("{READY}");
    loop {
        std::thread::park();
    }
}

/// After the boot.
///
/// # Errors
/// When a call fails, bytes are lost, or something is left.
pub(super) fn after(rig: &Rig) -> Result<()> {
    let start = Clock::start();
    let left = life::left(rig)?;
    ensure!(left.mounts.is_empty() && left.mappings.is_empty(), "after a boot: {left:?}");
    ensure!(left.volumes.len() == VOLUMES.len(), "{:?} rather than {VOLUMES:?}", left.volumes);
    let driver = rig.plugin.driver()?;
    for one in VOLUMES {
        let volume = volume(rig, &driver, one)?;
        again(&driver, &volume, one.3)
            .with_context(|| format!("{one:?}; {}", rig.plugin.last_words()))?;
    }
    life::nothing_left(rig, "a reboot")?;
    guest::no_errors()?;
    println!("a reboot: ok, {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn again(driver: &Driver, volume: &Volume, pod: Pod) -> Result<()> {
    if pod == Pod::Gone {
        // Each is repeated, as by a kubelet that is started once more.
        for _ in 0..2 {
            insist("unpublishing the path from before", || volume.unpublish(driver, 0))?;
            ensure!(!volume.target(0).exists(), "the path is left");
            if volume.shape != Shape::Inline {
                insist("unstaging the path from before", || volume.unstage(driver))?;
            }
        }
        // An inline volume ends with its pod.
        if volume.shape == Shape::Inline {
            return volume.gone();
        }
    }
    insist("staging and publishing", || up(driver, volume))?;
    ensure!(!volume.stats(driver, 0)?, "it is abnormal");
    let (file, at) = match volume.shape {
        Shape::Block => (volume.target(0), OFFSET),
        _ => (volume.target(0).join("file"), 0),
    };
    let mut bytes = [0; BYTES.len()];
    File::open(file)?.read_exact_at(&mut bytes, at)?;
    ensure!(bytes == BYTES, "the bytes are lost");
    down(driver, volume)?;
    volume.delete(driver)?;
    volume.gone()
}

/// Volumes without a PersistentVolume: those in use and those with a snapshot stay, the others are
/// deleted, and those that have one are not even listed.
///
/// # Errors
/// When another volume is deleted, or one stays.
pub(super) fn orphans(rig: &Rig) -> Result<()> {
    let start = Clock::start();
    let driver = rig.plugin.driver()?;
    let names = ["bound", "free", "staged", "source"];
    let volumes = names.map(|name| {
        let mut volume = Volume::new(rig, name, Shape::Block, 16 * MIB)?;
        volume.create(&driver)?;
        Ok(volume)
    });
    let volumes = volumes.into_iter().collect::<Result<Vec<_>>>()?;
    let [bound, free, staged, source] = volumes.as_slice() else { unreachable!() };
    staged.stage(&driver)?;
    let snapshot = driver.create_snapshot(CreateSnapshotRequest {
        source_volume_id: source.id.clone(),
        name: "day".to_owned(),
        ..Default::default()
    })?;
    let snapshot_id = snapshot.snapshot.context("no snapshot")?.snapshot_id;
    let list = rig.plugin.kubelet_dir().join("pv.json");
    // The newest of the cluster, or all of the others were younger than the list.
    let mut newest = persistent_volume("bound", &bound.id, "node-a");
    newest["metadata"]["creationTimestamp"] = "2100-01-01T00:00:00Z".into();
    write_list(&list, &[newest])?;
    let run = |words: &[&str]| found(rig, &list, words);
    let kept = |answer: &Value, volume: &Volume| -> Result<String> {
        let all = answer["orphans"].as_array().context("no list")?;
        let one = all.iter().find(|one| one["volume_id"] == volume.id.as_str());
        Ok(one.with_context(|| format!("{answer}"))?["kept"].to_string())
    };
    // They were made a moment ago.
    let young = run(&["--delete", "--yes"])?;
    ensure!(young["deleted"] == 0 && kept(&young, free)?.contains("--older"), "{young}");
    let answer = run(&["--delete", "--yes", "--older", "0s"])?;
    ensure!(answer["orphans"].as_array().map(Vec::len) == Some(3), "{answer}");
    ensure!(answer["deleted"] == 1 && kept(&answer, free)? == "null", "{answer}");
    ensure!(kept(&answer, staged)?.contains("attached"), "{answer}");
    ensure!(kept(&answer, source)?.contains("snapshots: 1"), "{answer}");
    ensure!(rig.control()?.volume(&free.id).is_err(), "{} is there", free.id);
    let socket = rig.daemon.control_socket();
    let path = |path: &Path| path.display().to_string();
    let words = ["orphans", "--older", "0s", "--delete", &staged.id, "--pv-list", &path(&list)];
    let refused = output(&[&words[..], &["--blockd-socket", &path(&socket)]].concat())?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && said.contains("is kept: it is attached"), "{said}");
    // In use no longer, it is deleted.
    staged.unstage(&driver)?;
    let answer = run(&["--older", "0s", "--delete", &staged.id])?;
    ensure!(answer["deleted"] == 1, "{answer}");
    driver.delete_snapshot(DeleteSnapshotRequest { snapshot_id, ..Default::default() })?;
    for volume in [bound, source] {
        volume.delete(&driver)?;
    }
    fs::remove_file(&list)?;
    volumes.iter().try_for_each(Volume::gone)?;
    life::nothing_left(rig, "orphans")?;
    println!("orphans: ok, {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn found(rig: &Rig, list: &Path, words: &[&str]) -> Result<Value> {
    let (list, socket) =
        (list.display().to_string(), rig.daemon.control_socket().display().to_string());
    let fixed = ["orphans", "--pv-list", &list, "--blockd-socket", &socket];
    json_of(&[&fixed[..], words].concat())
}
