//! The plugin, or its daemon, dies at each message between them, in every call that changes
//! something. The repeat of the call succeeds, what it answers is what was asked for, and nothing
//! is left over.

#![expect(clippy::unwrap_used, reason = "a failure fails the test")]

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};
use blockd_csi::proto::{
    ControllerExpandVolumeRequest, ControllerModifyVolumeRequest, CreateSnapshotRequest,
    CreateVolumeGroupSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest,
    DeleteVolumeGroupSnapshotRequest, DeleteVolumeRequest, VolumeContentSource,
};
use blockd_tests::csi::rig::{Control, Relay, Rig, Settings};
use blockd_tests::csi::{Answer, Driver, block, range};
use tonic::Code;

const MIB: i64 = 1 << 20;
/// Messages of one call beyond which something is wrong: it goes round in circles.
const MOST_MESSAGES: u64 = 400;
/// Repeats of a call that is answered with ABORTED or UNAVAILABLE.
const MOST_REPEATS: u32 = 500;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Plugin,
    Daemon,
}

/// A call that changes something, and what is there before it.
#[derive(Clone, Copy, Debug)]
enum Call {
    Create,
    Thick,
    Clone,
    Snapshot,
    Restore,
    Expand,
    Modify,
    Delete,
    DeleteSnapshot,
    Group,
    DeleteGroup,
}

const CONFIG: &str = r#"
[[class]]
name = "thin"
default = true

[[class]]
name = "thick"
kind = "thick"
"#;

/// The context of a round.
struct Round<'a> {
    driver: &'a Driver,
    call: Call,
    source: String,
    /// A second volume, where there is a group of both.
    other: String,
    snapshot: String,
    /// Its id and those of its snapshots.
    group: String,
}

fn wanted(name: &str, mib: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: range(mib * MIB, mib * MIB),
        volume_capabilities: vec![block(Mode::SingleNodeWriter)],
        ..Default::default()
    }
}

fn of(source: Type) -> CreateVolumeRequest {
    let volume_content_source = Some(VolumeContentSource { r#type: Some(source) });
    CreateVolumeRequest { volume_content_source, ..wanted("made", 32) }
}

fn create(driver: &Driver, request: CreateVolumeRequest) -> Answer<String> {
    Ok(driver.create_volume(request)?.volume.map(|volume| volume.volume_id).unwrap_or_default())
}

fn delete(driver: &Driver, id: &str) -> Answer<String> {
    let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
    driver.delete_volume(request).map(|_| String::new())
}

fn delete_snapshot(driver: &Driver, id: &str) -> Answer<String> {
    let request = DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
    driver.delete_snapshot(request).map(|_| String::new())
}

fn snapshot(driver: &Driver, source: &str, name: &str) -> Answer<String> {
    let request = CreateSnapshotRequest {
        source_volume_id: source.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    };
    Ok(driver.create_snapshot(request)?.snapshot.map(|one| one.snapshot_id).unwrap_or_default())
}

/// The id of a group and those of its snapshots, with spaces between.
fn group(driver: &Driver, sources: [&str; 2]) -> Answer<String> {
    let request = CreateVolumeGroupSnapshotRequest {
        name: "group".to_owned(),
        source_volume_ids: sources.map(str::to_owned).to_vec(),
        ..Default::default()
    };
    let made = driver.create_volume_group_snapshot(request)?.group_snapshot.unwrap_or_default();
    let snapshots = made.snapshots.into_iter().map(|one| one.snapshot_id);
    let ids: Vec<String> = std::iter::once(made.group_snapshot_id).chain(snapshots).collect();
    Ok(ids.join(" "))
}

fn delete_group(driver: &Driver, ids: &str) -> Answer<String> {
    let mut ids = ids.split(' ').map(str::to_owned);
    let request = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: ids.next().unwrap_or_default(),
        snapshot_ids: ids.collect(),
        ..Default::default()
    };
    driver.delete_volume_group_snapshot(request).map(|_| String::new())
}

impl<'a> Round<'a> {
    /// Makes what the call needs.
    fn prepare(driver: &'a Driver, call: Call) -> Result<Self> {
        let source = create(driver, wanted("source", 16)).context("the source")?;
        let snapshot = match call {
            Call::Restore | Call::DeleteSnapshot => snapshot(driver, &source, "taken")?,
            _ => String::new(),
        };
        let other = match call {
            Call::Group | Call::DeleteGroup => create(driver, wanted("other", 16))?,
            _ => String::new(),
        };
        let group = match call {
            Call::DeleteGroup => group(driver, [&source, &other])?,
            _ => String::new(),
        };
        Ok(Self { driver, call, source, other, snapshot, group })
    }

    /// The id of what it made, if it makes something.
    fn ask(&self, driver: &Driver) -> Answer<String> {
        match self.call {
            Call::Create => create(driver, wanted("made", 32)),
            Call::Thick => {
                let mut request = wanted("made", 32);
                request.parameters.insert("csi.blockd.io/device-class".into(), "thick".into());
                request.mutable_parameters.insert("csi.blockd.io/iops".into(), "900".into());
                create(driver, request)
            }
            Call::Clone => {
                create(driver, of(Type::Volume(VolumeSource { volume_id: self.source.clone() })))
            }
            Call::Restore => {
                let snapshot_id = self.snapshot.clone();
                create(driver, of(Type::Snapshot(SnapshotSource { snapshot_id })))
            }
            Call::Snapshot => snapshot(driver, &self.source, "made"),
            Call::Expand => {
                let request = ControllerExpandVolumeRequest {
                    volume_id: self.source.clone(),
                    capacity_range: range(48 * MIB, 0),
                    ..Default::default()
                };
                driver.controller_expand_volume(request).map(|_| String::new())
            }
            Call::Modify => {
                let pair = ("csi.blockd.io/iops".to_owned(), "900".to_owned());
                let request = ControllerModifyVolumeRequest {
                    volume_id: self.source.clone(),
                    mutable_parameters: [pair].into(),
                    ..Default::default()
                };
                driver.controller_modify_volume(request).map(|_| String::new())
            }
            Call::Delete => delete(driver, &self.source),
            Call::DeleteSnapshot => delete_snapshot(driver, &self.snapshot),
            Call::Group => group(driver, [&self.source, &self.other]),
            Call::DeleteGroup => delete_group(driver, &self.group),
        }
    }

    /// Checks that the objects of the request exist, and no others.
    fn check(&self, made: &str, control: &Control) -> Result<()> {
        let mut expected = vec![self.source.as_str(), self.snapshot.as_str(), self.other.as_str()];
        match self.call {
            // The group itself is nothing that the daemon has.
            Call::Group => expected.extend(made.split(' ').skip(1)),
            _ => expected.push(made),
        }
        match self.call {
            Call::Delete => expected.retain(|id| *id != self.source),
            Call::DeleteSnapshot => expected.retain(|id| *id != self.snapshot),
            _ => {}
        }
        expected.retain(|id| !id.is_empty());
        expected.sort_unstable();
        let all = control.volumes()?;
        let mut there: Vec<String> =
            all.iter().map(|one| format!("{}/{}", one.pool, one.name)).collect();
        there.sort_unstable();
        ensure!(there == expected, "there are {there:?}, expected {expected:?}");
        let of = |id: &str| control.volume(id);
        let iops = |id: &str| Ok::<_, anyhow::Error>(of(id)?.settings.unwrap_or_default().iops);
        match self.call {
            Call::Create | Call::Clone | Call::Restore => {
                ensure!(of(made)?.size_bytes == 32 * MIB, "{:?}", of(made)?);
            }
            Call::Thick => {
                ensure!(of(made)?.settings.unwrap_or_default().thick, "{:?}", of(made)?);
                ensure!(iops(made)? == 900, "{:?}", of(made)?);
            }
            Call::Expand => ensure!(of(&self.source)?.size_bytes == 48 * MIB, "not grown"),
            Call::Modify => ensure!(iops(&self.source)? == 900, "not modified"),
            Call::Group => ensure!(made.split(' ').count() == 3, "{made}"),
            Call::Snapshot | Call::Delete | Call::DeleteSnapshot | Call::DeleteGroup => {}
        }
        Ok(())
    }

    fn clean(&self, made: &str, control: &Control) -> Result<()> {
        let made = if matches!(self.call, Call::Group) {
            repeat(|| delete_group(self.driver, made))?;
            ""
        } else {
            made
        };
        let snapshots = [self.snapshot.as_str(), if made.contains('@') { made } else { "" }];
        for id in snapshots.into_iter().filter(|id| !id.is_empty()) {
            repeat(|| delete_snapshot(self.driver, id))?;
        }
        let made = if made.contains('@') { "" } else { made };
        let volumes = [self.source.as_str(), self.other.as_str(), made];
        for id in volumes.into_iter().filter(|id| !id.is_empty()) {
            repeat(|| delete(self.driver, id))?;
        }
        let left = control.names()?;
        ensure!(left.is_empty(), "{left:?} are left");
        Ok(())
    }
}

/// Repeats a call as the CO does: while a process is down or busy, or where a connection to the
/// killed plugin broke under the call. Then the code is the client's own, and has a cause; a
/// driver's has none.
fn repeat(mut ask: impl FnMut() -> Answer<String>) -> Result<String> {
    for _ in 0..MOST_REPEATS {
        match ask() {
            Ok(answer) => return Ok(answer),
            Err(status)
                if matches!(status.code(), Code::Aborted | Code::Unavailable)
                    || status.source().is_some() =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(status) => return Err(status).context("the repeat was refused"),
        }
    }
    bail!("{MOST_REPEATS} repeats were not enough")
}

/// Whether the call was cut: it had a message of that number.
fn cut_at(number: u64, call: Call, victim: Victim, rig: &mut Rig, relay: &Relay) -> Result<bool> {
    relay.open();
    let driver = rig.plugin.driver()?;
    let round = Round::prepare(&driver, call)?;
    // A client of its own: its connection ends with the plugin.
    let asked = rig.plugin.client(Duration::from_secs(60))?;
    let done = AtomicBool::new(false);
    relay.arm(number);
    let (cut, first) = std::thread::scope(|scope| -> Result<_> {
        let call = scope.spawn(|| {
            let answer = round.ask(&asked);
            done.store(true, Ordering::SeqCst);
            answer
        });
        let cut = relay.wait(Duration::from_millis(2), || done.load(Ordering::SeqCst));
        match victim {
            Victim::Plugin if cut => rig.plugin.kill()?,
            Victim::Daemon if cut => rig.daemon.kill()?,
            _ => {}
        }
        relay.open();
        let first = match call.join() {
            Ok(answer) => answer,
            Err(_) => bail!("the call panicked"),
        };
        Ok((cut, first))
    })?;
    if cut {
        match victim {
            Victim::Plugin => rig.plugin.start()?,
            Victim::Daemon => drop(rig.daemon.start()?),
        }
        if let Err(status) = &first {
            let unanswered = [Code::Unavailable, Code::Unknown, Code::Cancelled, Code::Internal];
            ensure!(unanswered.contains(&status.code()), "cut short, it says {status}");
        }
    } else {
        first.as_ref().map_err(|status| anyhow::anyhow!("uncut, it says {status}"))?;
    }
    let control = rig.control()?;
    let made = repeat(|| round.ask(&driver))?;
    round.check(&made, &control)?;
    let again = repeat(|| round.ask(&driver))?;
    ensure!(made == again, "{made} and {again}");
    round.clean(&made, &control)?;
    Ok(cut)
}

/// Cuts a call at each of its messages, until it has no more.
fn at_each_message(call: Call, victim: Victim) {
    let name = format!("{call:?}").to_lowercase();
    let settings = Settings { config: CONFIG.to_owned(), ..Settings::default() };
    let mut rig = Rig::start(&name, &settings).unwrap();
    let relay = Relay::start(&rig.daemon.control_socket()).unwrap();
    rig.plugin.kill().unwrap();
    rig.plugin.redirect(&relay.socket());
    rig.plugin.start().unwrap();
    let mut number = 0;
    loop {
        let cut = cut_at(number, call, victim, &mut rig, &relay)
            .with_context(|| format!("{call:?}, {victim:?} killed at message {number}"))
            .unwrap_or_else(|error| panic!("{error:#}"));
        if !cut {
            break;
        }
        number += 1;
        assert!(number < MOST_MESSAGES, "{call:?} never ends");
    }
    println!("{call:?}: {number} messages, the {victim:?} killed at each");
    assert!(number >= 2, "{call:?} asks nothing of the daemon");
}

#[test]
fn the_plugin_dies_at_each_message_of_create_volume() {
    at_each_message(Call::Create, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_create_volume() {
    at_each_message(Call::Create, Victim::Daemon);
}

#[test]
fn the_plugin_dies_at_each_message_of_a_thick_volumes_creation() {
    at_each_message(Call::Thick, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_a_thick_volumes_creation() {
    at_each_message(Call::Thick, Victim::Daemon);
}

#[test]
fn the_plugin_dies_at_each_message_of_a_clone() {
    at_each_message(Call::Clone, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_a_clone() {
    at_each_message(Call::Clone, Victim::Daemon);
}

#[test]
fn the_plugin_dies_at_each_message_of_create_snapshot() {
    at_each_message(Call::Snapshot, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_create_snapshot() {
    at_each_message(Call::Snapshot, Victim::Daemon);
}

#[test]
fn the_plugin_dies_at_each_message_of_a_restore() {
    at_each_message(Call::Restore, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_a_restore() {
    at_each_message(Call::Restore, Victim::Daemon);
}

#[test]
fn the_plugin_dies_at_each_message_of_expand_and_modify() {
    at_each_message(Call::Expand, Victim::Plugin);
    at_each_message(Call::Modify, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_expand_and_modify() {
    at_each_message(Call::Expand, Victim::Daemon);
    at_each_message(Call::Modify, Victim::Daemon);
}

#[test]
fn the_plugin_dies_at_each_message_of_a_deletion() {
    at_each_message(Call::Delete, Victim::Plugin);
    at_each_message(Call::DeleteSnapshot, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_a_deletion() {
    at_each_message(Call::Delete, Victim::Daemon);
    at_each_message(Call::DeleteSnapshot, Victim::Daemon);
}

#[test]
fn the_plugin_dies_at_each_message_of_a_group() {
    at_each_message(Call::Group, Victim::Plugin);
    at_each_message(Call::DeleteGroup, Victim::Plugin);
}

#[test]
fn the_daemon_dies_at_each_message_of_a_group() {
    at_each_message(Call::Group, Victim::Daemon);
    at_each_message(Call::DeleteGroup, Victim::Daemon);
}
