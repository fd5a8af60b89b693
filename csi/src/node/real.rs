//! The world as it is: the daemon's volumes and the files with records, on this machine.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_api::v1::{FrontEnd, VolumeKind};
use blockd_csi_base::bytes::Bytes;
use tokio::runtime::Handle;
use tonic::Code;

use super::cells::refuse_standby;
use super::host::{Host, devices};
use super::mountinfo::Device;
use super::records::{Place, Record, Records};
use super::world::{
    Conditions as _, Devices as _, Node, Result, Unfinished, Volume, Volumes, Wanted, World,
};
use crate::capability::Mode;
use crate::error::Error;
use crate::labels;
use crate::parameters::Mutable;
use crate::plugin::Plugin;
use crate::provision;
use crate::sizes::Range;

/// How often, and after which pause, the detach of an open device is retried: the kernel releases a
/// device shortly after its last unmount, and so do programs that probe new devices.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// The state that the steps use. They block, so none runs in a thread that serves calls.
#[derive(Debug)]
pub struct Real {
    plugin: Arc<Plugin>,
    records: Records,
}

impl Real {
    /// Opens the records.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn open(plugin: Arc<Plugin>) -> Result<Self> {
        let folder = &plugin.settings.state_dir;
        let records = Records::open(folder)
            .map_err(|error| Error::io(format!("records in {}", folder.display()), error))?;
        Ok(Self { plugin, records })
    }

    /// Its volumes, on this machine.
    #[must_use]
    pub fn as_world(&self) -> World<'_> {
        World { volumes: self, machine: &Host }
    }

    /// All records.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.records.all()
    }

    fn wait<T>(&self, future: impl Future<Output = Result<T>>) -> Result<T> {
        Handle::current().block_on(future)
    }

    /// Detaches a device that has no user, not even a loop device.
    fn detach_unused(&self, place: &Place, volume: &Volume) -> Result<()> {
        let loops = volume.device.as_ref().map(devices::loops_over).transpose()?;
        if let Some(name) = loops.iter().flatten().next() {
            let what = format_args!("volume {}", place.name);
            return Err(Error::in_use(what, format_args!("is below {name}")));
        }
        if volume.own {
            return volume.device.as_ref().map_or(Ok(()), |device| release_own(place, device));
        }
        tracing::debug!(volume = place.name, "detach");
        let request = v1::DetachVolumeRequest {
            name: place.name.clone(),
            pool: place.pool.clone(),
            force: false,
        };
        match self.wait(self.plugin.daemon.detach_volume(request)) {
            Err(error) if !error.is_absent() => Err(error),
            _ => Ok(()),
        }
    }

    /// The volume, asked for without a thread that waits.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn volume_now(&self, place: &Place) -> Result<Option<Volume>> {
        if !self.plugin.has_pool(&place.pool).await? {
            return Ok(None);
        }
        let found = self.plugin.daemon.find_volume(&place.pool, &place.name).await?;
        let found = found.filter(|volume| volume.kind() == VolumeKind::Volume);
        Ok(found.map(|volume| self.shown(&volume)))
    }

    /// A short name of a volume, of this driver's.
    fn digest(&self, place: &Place) -> String {
        let name = format!("{}/{}/{}", self.plugin.settings.driver, place.pool, place.name);
        format!("{:032x}", xxhash_rust::xxh3::xxh3_128(name.as_bytes()))
    }

    /// A volume that is attached as a block device, which has to be served.
    fn served(&self, place: &Place, volume: &v1::Volume) -> Result<Volume> {
        let attached = self.shown(volume);
        match &attached.device {
            Some(device) if volume.device_problem.is_empty() => devices::is_node(device)?,
            _ => {
                let problem = blockd_csi_base::error::shown(&volume.device_problem);
                return Err(Error::Unavailable {
                    address: self.plugin.daemon.address(),
                    problem: format!("the device of {} is not served: {problem}", place.name),
                });
            }
        }
        Ok(attached)
    }

    fn shown(&self, volume: &v1::Volume) -> Volume {
        let settings = &self.plugin.settings;
        let is_in_cell = settings.cells.has_pool(&volume.pool);
        shown(volume, is_in_cell.then(|| mark_of(volume, &settings.keys.unfinished())))
    }

    fn find(&self, place: &Place) -> Result<Option<v1::Volume>> {
        let found = self.wait(self.plugin.daemon.find_volume(&place.pool, &place.name))?;
        Ok(found.filter(|volume| volume.kind() == VolumeKind::Volume))
    }
}

/// Whether the volume was encrypted by this plugin, or by `blockd add --encrypt`, whose label has
/// another prefix.
fn is_labelled(labels: &BTreeMap<String, String>) -> bool {
    let is_one = |key: &str| key.rsplit('/').next() == Some("encryption");
    labels.iter().any(|(key, value)| is_one(key) && value == blockd_luks::KIND)
}

/// Values of the label with the mark of a volume in a cell.
const MARKS: [(Unfinished, &str); 2] =
    [(Unfinished::Header, blockd_luks::KIND), (Unfinished::FileSystem, "file-system")];

/// The mark of a volume in a cell. While another node has the cell, its label is not known here and
/// nothing is done that it decides.
pub(super) fn mark_of(volume: &v1::Volume, key: &str) -> Unfinished {
    let value = volume.labels.get(key).filter(|_| !volume.standby);
    let found = MARKS.iter().find(|(_, name)| value.is_some_and(|value| value == name));
    found.map_or(Unfinished::Nothing, |(mark, _)| *mark)
}

/// The request that marks a volume.
fn marking(place: &Place, key: String, unfinished: Unfinished) -> v1::ConfigureVolumeRequest {
    let (name, pool) = (place.name.clone(), place.pool.clone());
    let request = v1::ConfigureVolumeRequest { name, pool, ..Default::default() };
    match MARKS.iter().find(|(mark, _)| *mark == unfinished) {
        Some((_, value)) => {
            let set_labels = BTreeMap::from([(key, (*value).to_owned())]);
            v1::ConfigureVolumeRequest { set_labels, ..request }
        }
        None => v1::ConfigureVolumeRequest { remove_labels: vec![key], ..request },
    }
}

/// The parts of a volume that matter here. `unfinished`: its mark, if it moves between nodes.
fn shown(volume: &v1::Volume, unfinished: Option<Unfinished>) -> Volume {
    // A device that is no front end of the daemon's is the kernel's own.
    let own = volume.front_end() == FrontEnd::Unspecified && !volume.device_path.is_empty();
    let attached = volume.attached && volume.front_end() == FrontEnd::Ublk;
    let is_device = volume.front_end() == FrontEnd::Ublk && !volume.device_path.is_empty();
    let device = (own || is_device).then(|| Device {
        path: volume.device_path.as_str().into(),
        major: volume.device_major,
        minor: volume.device_minor,
    });
    let read_only =
        if own { device.as_ref().is_some_and(devices::is_read_only) } else { volume.read_only };
    Volume {
        size_bytes: volume.size_bytes,
        empty: !own && !volume.standby && volume.valid_bytes == 0,
        standby: volume.standby,
        attached,
        device,
        read_only,
        mapped_bytes: volume.mapped_bytes,
        thick: volume.settings.is_some_and(|settings| settings.thick),
        problem: volume.device_problem.clone(),
        own,
        dax: volume.dax,
        charged_bytes: volume.charged_bytes,
        encrypted: is_labelled(&volume.labels),
        locked: None,
        unfinished,
    }
}

/// A volume whose device is the kernel's own: nothing is to be made, and it can be there already.
fn attach_own(volume: &v1::Volume, attached: Volume, read_only: bool) -> Result<Volume> {
    if volume.state() == v1::VolumeState::Creating {
        return Err(Error::in_use(format_args!("volume {}", volume.name), "is still being made"));
    }
    let Some(device) = &attached.device else { return Ok(attached) };
    devices::is_node(device)?;
    devices::set_read_only(device, read_only)?;
    Ok(Volume { read_only, ..attached })
}

/// Ends the use of a device: it has no user, and becomes writable again.
fn release_own(place: &Place, device: &Device) -> Result<()> {
    // Without its node no process can have it open.
    if Host.node_at(&device.path, device)? != Node::Right {
        return Ok(());
    }
    if !Host.is_free(device)? {
        return Err(Error::in_use(format_args!("volume {}", place.name), "is in use"));
    }
    devices::set_read_only(device, false)
}

impl Volumes for Real {
    fn get(&self, place: &Place) -> Result<Option<Volume>> {
        self.wait(self.volume_now(place))
    }

    fn attach(&self, place: &Place, read_only: bool) -> Result<Volume> {
        match self.find(place)? {
            Some(volume) if self.shown(&volume).own => {
                return attach_own(&volume, self.shown(&volume), read_only);
            }
            // It is attached already, while its cell is on another node.
            Some(volume) if volume.standby => return self.served(place, &volume),
            _ => {}
        }
        tracing::debug!(volume = place.name, read_only, "attach");
        let request = v1::AttachVolumeRequest {
            name: place.name.clone(),
            pool: place.pool.clone(),
            read_only,
            front_end: FrontEnd::Ublk.into(),
            ..Default::default()
        };
        let answer = self.wait(self.plugin.daemon.attach_volume(request))?;
        self.served(place, &answer.volume.unwrap_or_default())
    }

    fn detach(&self, place: &Place) -> Result<()> {
        let found = self.find(place)?;
        let Some(volume) = found.map(|volume| self.shown(&volume)) else { return Ok(()) };
        if !volume.attached && volume.device.is_none() {
            return Ok(());
        }
        for _ in 0..TRIES {
            match self.detach_unused(place, &volume) {
                Err(error) if error.code() == Code::FailedPrecondition => std::thread::sleep(PAUSE),
                other => return other,
            }
        }
        self.detach_unused(place, &volume)
    }

    fn enlarge(&self, place: &Place, range: &Range) -> Result<Option<Volume>> {
        let is_in_cell = self.plugin.settings.cells.has_pool(&place.pool);
        if !self.plugin.settings.expand_on_node && !is_in_cell {
            return Ok(None);
        }
        tracing::debug!(volume = place.name, "enlarge");
        let absent = || Error::not_found("volume", &place.name);
        let volume = self.find(place)?.ok_or_else(absent)?;
        refuse_standby(&place.name, &volume)?;
        let volume = self.wait(provision::expand(&self.plugin, volume, range))?;
        Ok(Some(self.shown(&volume)))
    }

    fn mark(&self, place: &Place, unfinished: Unfinished) -> Result<()> {
        tracing::debug!(volume = place.name, ?unfinished, "mark");
        let request = marking(place, self.plugin.settings.keys.unfinished(), unfinished);
        self.wait(self.plugin.daemon.configure_volume(request)).map(drop)
    }

    fn create(&self, place: &Place, wanted: &Wanted) -> Result<()> {
        tracing::debug!(volume = place.name, "create");
        let class = self.plugin.settings.config.class("class", Some(&wanted.class))?;
        let (keys, none) = (&self.plugin.settings.keys, HashMap::new());
        let labels = labels::of_volume(keys, &class.name, &none, &none);
        let spec = provision::CreateSpec {
            labels: &labels,
            class,
            pool: &place.pool,
            name: &place.name,
            size: Bytes::new(wanted.size_bytes).unwrap_or_default(),
            limit: Bytes::ZERO,
            mutable: &Mutable::default(),
            pmem: wanted.pmem,
        };
        self.wait(provision::create(&self.plugin, &spec)).map(drop)
    }

    fn delete(&self, place: &Place) -> Result<()> {
        tracing::debug!(volume = place.name, "delete");
        let request = v1::DeleteVolumeRequest {
            name: place.name.clone(),
            pool: place.pool.clone(),
            force: false,
            ..Default::default()
        };
        match self.wait(self.plugin.daemon.delete_volume(request)) {
            Ok(_) => Ok(()),
            Err(error) if error.is_absent() => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn record(&self, volume: &str) -> Option<Record> {
        self.records.get(volume)
    }

    fn keep(&self, record: &Record) -> Result<()> {
        tracing::debug!(volume = record.volume, "keep");
        self.records.put(record).map_err(|error| Error::io("writing a record", error))
    }

    fn forget(&self, volume: &str) -> Result<()> {
        tracing::debug!(volume, "forget");
        self.records.remove(volume).map_err(|error| Error::io("removing a record", error))
    }

    /// Below a folder of the kubelet's that is shown to the host as it is here: a container runtime
    /// opens the image there.
    fn vm_folder(&self, place: &Place) -> Result<PathBuf> {
        let base = self.plugin.settings.kubelet_dir.join("plugins/kubernetes.io/csi");
        let failed = |error| Error::io(format!("making {}", base.display()), error);
        std::fs::create_dir_all(&base).map_err(failed)?;
        Ok(base.join(format!("vm-{}", self.digest(place))))
    }

    /// The kernel has fewer characters for it than ids have.
    fn mapping_name(&self, place: &Place) -> String {
        format!("blockd-csi-{}", self.digest(place))
    }

    fn count_conflict(&self, mode: Mode) {
        self.plugin.metrics.publish_conflict(mode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::Keys;
    use crate::testing::{MIB, Rig};

    #[tokio::test]
    async fn the_mark_of_a_volume_in_a_cell_is_a_label_of_it() {
        let rig = Rig::simple();
        let plugin = rig.plugin();
        rig.fake.add_group("san", 10_240 * MIB);
        let id = plugin.settings.cells.id("san", "pvc-1");
        let (group, name) = (id.group.clone(), id.cell.clone());
        let cell =
            v1::CreateCellRequest { group, name, device_bytes: 128 * MIB, ..Default::default() };
        plugin.daemon.create_cell(cell).await.unwrap();
        rig.fake.add(&id.cell, &id.volume, 64 * MIB);
        rig.fake.add("default", "csi.a", 64 * MIB);
        let place = Place { pool: id.cell.clone(), name: id.volume.clone() };
        let of_node = Place { pool: "default".to_owned(), name: "csi.a".to_owned() };
        let world = Real::open(plugin).unwrap();
        let work = move || {
            let unfinished = |place: &Place| world.get(place).unwrap().unwrap().unfinished;
            assert_eq!(unfinished(&of_node), None);
            assert_eq!(unfinished(&place), Some(Unfinished::Nothing));
            let key = "csi.blockd.io/unfinished";
            for (mark, label) in [
                (Unfinished::Header, Some("luks2")),
                (Unfinished::FileSystem, Some("file-system")),
                (Unfinished::FileSystem, Some("file-system")),
                (Unfinished::Nothing, None),
                (Unfinished::Nothing, None),
            ] {
                world.mark(&place, mark).unwrap();
                assert_eq!(unfinished(&place), Some(mark));
                let volume = rig.fake.volume(&place.pool, &place.name).unwrap();
                assert_eq!(volume.labels.get(key).map(String::as_str), label);
            }
        };
        tokio::task::spawn_blocking(work).await.unwrap();
    }

    #[tokio::test]
    async fn a_volume_whose_device_is_not_there_is_detached() {
        let rig = Rig::simple();
        rig.fake.add("default", "csi.a", 64 * MIB);
        let place = Place { pool: "default".to_owned(), name: "csi.a".to_owned() };
        let world = Real::open(rig.plugin()).unwrap();
        let work = move || {
            for (front_end, is_left) in [(FrontEnd::Ublk, false), (FrontEnd::Nbd, true)] {
                rig.fake.change("default", "csi.a", |volume| {
                    (volume.attached, volume.front_end) = (true, front_end.into());
                });
                world.detach(&place).unwrap();
                let volume = rig.fake.volume("default", "csi.a").unwrap();
                assert_eq!(volume.attached, is_left, "{front_end:?}");
            }
        };
        tokio::task::spawn_blocking(work).await.unwrap();
    }

    #[test]
    fn a_label_of_another_node_or_version_is_no_mark() {
        let key = Keys::new("CSI.blockd.io").unfinished();
        // A label's prefix has no capital letters, and the mark has to be stored.
        assert_eq!(key, "csi.blockd.io/unfinished");
        let volume = |value: &str, standby| {
            let labels = BTreeMap::from([(key.clone(), value.to_owned())]);
            v1::Volume { labels, standby, ..Default::default() }
        };
        assert_eq!(mark_of(&volume("file-system", false), &key), Unfinished::FileSystem);
        assert_eq!(mark_of(&volume("file-system", true), &key), Unfinished::Nothing);
        assert_eq!(mark_of(&volume("another", false), &key), Unfinished::Nothing);
    }
}
