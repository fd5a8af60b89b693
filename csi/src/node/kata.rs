//! Volumes that hold an image for virtual machines: a file system in the volume, in it the image,
//! and in that, behind its front, the file system of the workload, on a loop device.
//!
//! For all that stages, publishes and looks, such a volume is one whose device is the loop device;
//! the mount and loop device around it are made when it is attached and removed when it is
//! detached. A machine that the container runtime starts finds the image by the loop device and
//! maps it; without one the volume works as it is mounted here.

use std::path::{Path, PathBuf};

use super::content::{Making, Plan};
use super::flags::Options;
use super::mountinfo::Device;
use super::records::{Place, Record};
use super::steps::{self, FileSystemSpec};
use super::world::{
    Kind, Loop, Mount, Mounted, Result, Unfinished, Volume, Volumes, Wanted, World,
};
use crate::capability::Mode;
use crate::error::Error;
use crate::sizes::Range;

/// The image's name, by which container runtimes and people know it.
pub const IMAGE: &str = "pmem-csi-vm.img";

/// The file system around the image: that with the least overhead of those with DAX.
const AROUND: &str = "ext4";

/// The image in a volume, as a request to stage the volume describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// A new image has a partition table inside the device that a virtual machine sees. An existing
    /// image keeps its layout.
    pub partition: bool,
    /// The usage is AppDirect: a virtual machine maps the image, so the file system around it must
    /// have DAX.
    pub app_direct: bool,
}

/// For requests that inspect or unstage a volume.
const NOT_STAGED: ImageSpec = ImageSpec { partition: false, app_direct: false };

/// Volumes of which one is the content of its image.
struct Vm<'a> {
    world: World<'a>,
    /// The CSI id of the volume.
    id: &'a str,
    spec: ImageSpec,
}

/// Does something where a volume is as workloads see it. `asked`: the image that the request
/// names. Without one, records and mounts show whether the volume holds an image.
///
/// # Errors
/// The errors of the steps.
pub fn through<T>(
    world: &World<'_>,
    id: &str,
    place: &Place,
    asked: Option<ImageSpec>,
    act: impl FnOnce(&World<'_>) -> Result<T>,
) -> Result<T> {
    let spec = match (asked, world.volumes.record(id)) {
        (Some(spec), _) => Some(spec),
        (None, Some(record)) => record.kata.then_some(NOT_STAGED),
        // A mount without a record is still there.
        (None, None) => {
            let folder = world.volumes.vm_folder(place)?;
            world.machine.mounts()?.at(&folder).map(|_| NOT_STAGED)
        }
    };
    match spec {
        Some(spec) => {
            let volumes = &Vm { world: *world, id, spec };
            act(&World { volumes, machine: world.machine })
        }
        None => act(world),
    }
}

impl Vm<'_> {
    fn image(&self, place: &Place) -> Result<PathBuf> {
        Ok(self.world.volumes.vm_folder(place)?.join(IMAGE))
    }

    fn stored(&self, place: &Place) -> Record {
        self.world.volumes.record(self.id).unwrap_or_else(|| Record::new(self.id, place))
    }

    fn set_formatting(&self, place: &Place, formatting: bool) -> Result<()> {
        let record = self.stored(place);
        if record.kata_formatting == formatting {
            return Ok(());
        }
        self.world.volumes.keep(&Record { kata: true, kata_formatting: formatting, ..record })
    }

    /// Whether the file system in the image is mounted.
    fn is_in_use(&self, file: &Path) -> Result<bool> {
        let Some(there) = self.world.machine.loop_of(file)? else { return Ok(false) };
        Ok(self.world.machine.mounts()?.entries.iter().any(|entry| entry.is_of(&there.device)))
    }

    /// Refuses an image on a file system without DAX and unmounts that file system. The data in the
    /// image is kept.
    fn check_dax(&self, place: &Place) -> Result<()> {
        if self.world.machine.has_dax(&self.world.volumes.vm_folder(place)?)? {
            return Ok(());
        }
        self.take_apart(place)?;
        Err(self.without_dax())
    }

    fn without_dax(&self) -> Error {
        let problem = "holds an image for virtual machines (kataContainers is true), and its usage \
                       AppDirect needs DAX, which the file system around the image does not have: \
                       stores of a machine would reach the page cache of this host and nothing \
                       else; the data is kept, and images need a class of kind pmem-direct";
        Error::in_use(format_args!("volume {}", self.id), problem)
    }

    /// Mounts the file system around the image. `dax`: a mount without DAX is an error.
    fn around(&self, place: &Place, volume: &Volume, dax: bool) -> Result<()> {
        let device = steps::device_of(self.id, volume)?;
        let folder = self.world.volumes.vm_folder(place)?;
        if self.world.machine.mounts()?.shows(&folder, device) {
            return Ok(());
        }
        // Of a device that is gone, with the mounts over it.
        self.take_apart(place)?;
        let spec = FileSystemSpec {
            file_system: AROUND.to_owned(),
            options: Options::parse(&[]).unwrap_or_else(|_| unreachable!("nothing to refuse")),
            hash: 0,
            making: Making { mapped: true, options: Vec::new() },
            dax: false,
        };
        let content = self.world.machine.content(device)?;
        let empty = steps::is_empty(&self.world, volume, device)?;
        let formatting = self.stored(place).kata_formatting;
        match content.plan(AROUND, empty, formatting) {
            Plan::Mount(_) => self.world.machine.check(device, AROUND)?,
            Plan::Refuse(what) => return Err(steps::refused(&self.stored(place), AROUND, &what)),
            Plan::Format(_) => {
                self.refuse_busy(device)?;
                self.set_formatting(place, true)?;
                self.world.machine.format(device, AROUND, &spec.making)?;
                self.set_formatting(place, false)?;
            }
        }
        steps::make(&self.world, &folder, Kind::Folder)?;
        let tries: &[&str] = match (dax, volume.dax) {
            (true, _) => &["dax"],
            (false, true) => &["dax", ""],
            (false, false) => &[""],
        };
        let mut last = None;
        for word in tries {
            let options = match *word {
                "" => spec.options.clone(),
                word => spec.options.clone().with(word),
            };
            let mount = Mount { device, file_system: AROUND, path: &folder, options: &options };
            match self.world.machine.mount(&mount) {
                Ok(Mounted::Done) => return Ok(()),
                Ok(Mounted::NeedsWriting) => {}
                Err(error) => last = Some(error),
            }
            // It may have been done all the same.
            if self.world.machine.mounts()?.at(&folder).is_some() {
                break;
            }
        }
        let what = format_args!("volume {}", self.id);
        Err(last.unwrap_or_else(|| Error::in_use(what, "can't be written")))
    }

    fn refuse_busy(&self, device: &Device) -> Result<()> {
        if self.world.machine.is_free(device)? {
            return Ok(());
        }
        let what = format!("volume {}", self.id);
        Err(Error::in_use(what, format_args!("is in use: {}", device.path.display())))
    }

    /// Removes the loop device and the mount around it.
    fn take_apart(&self, place: &Place) -> Result<()> {
        let folder = self.world.volumes.vm_folder(place)?;
        if self.world.machine.mounts()?.at(&folder).is_some()
            && let Some(there) = self.world.machine.loop_of(&folder.join(IMAGE))?
        {
            self.refuse_busy(&there.device)?;
            self.world.machine.detach_loop(&there.device)?;
        }
        steps::unmount(&self.world, &folder)?;
        steps::remove(&self.world, &folder)
    }
}

/// A machine that runs would not see the image grow, and one that starts would find a front that is
/// too short.
#[must_use]
pub fn refuse_growth(id: &str) -> Error {
    let problem = "holds an image for virtual machines, which does not grow";
    Error::in_use(format_args!("volume {id}"), problem)
}

/// A volume as the content of its image.
fn inside(volume: Volume, there: Option<Loop>) -> Volume {
    let read_only = there.as_ref().is_some_and(|there| there.read_only);
    let device = there.map(|there| there.device);
    Volume { device, read_only, own: true, dax: false, ..volume }
}

impl Volumes for Vm<'_> {
    fn inside(&self, place: &Place, volume: Volume) -> Result<Volume> {
        let there = self.world.machine.loop_of(&self.image(place)?)?;
        Ok(inside(volume, there))
    }

    fn get(&self, place: &Place) -> Result<Option<Volume>> {
        self.world.volumes.get(place)?.map(|volume| self.inside(place, volume)).transpose()
    }

    fn attach(&self, place: &Place, read_only: bool) -> Result<Volume> {
        let volume = self.world.volumes.attach(place, false)?;
        let file = self.image(place)?;
        // A repeated request does not disturb an image that is in use: an earlier release may have
        // staged it without DAX.
        let in_use = self.spec.app_direct && self.is_in_use(&file)?;
        let dax = self.spec.app_direct && !in_use;
        if !volume.dax && dax {
            return Err(self.without_dax());
        }
        if !volume.dax && in_use {
            let volume = self.id;
            tracing::warn!(
                volume,
                "image in use without DAX; the next stage after an unstage is refused"
            );
        }
        self.around(place, &volume, dax)?;
        if dax {
            self.check_dax(place)?;
        }
        if self.world.machine.kind(&file)?.is_none() {
            self.world.machine.make_image(&file, self.spec.partition)?;
        }
        let there = match self.world.machine.loop_of(&file)? {
            Some(there) if there.read_only == read_only => there,
            Some(there) => {
                self.refuse_busy(&there.device)?;
                self.world.machine.detach_loop(&there.device)?;
                self.world.machine.attach_loop(&file, read_only)?
            }
            None => self.world.machine.attach_loop(&file, read_only)?,
        };
        Ok(inside(volume, Some(there)))
    }

    fn detach(&self, place: &Place) -> Result<()> {
        self.take_apart(place)?;
        // The rest of an interrupted mkfs would be taken for user data.
        if self.stored(place).kata_formatting && self.world.volumes.get(place)?.is_some() {
            let volume = self.world.volumes.attach(place, false)?;
            let device = steps::device_of(self.id, &volume)?;
            self.refuse_busy(device)?;
            self.world.machine.wipe(device)?;
            self.set_formatting(place, false)?;
        }
        self.world.volumes.detach(place)
    }

    fn enlarge(&self, _: &Place, _: &Range) -> Result<Option<Volume>> {
        Err(refuse_growth(self.id))
    }

    fn mark(&self, place: &Place, unfinished: Unfinished) -> Result<()> {
        self.world.volumes.mark(place, unfinished)
    }

    fn create(&self, place: &Place, wanted: &Wanted) -> Result<()> {
        self.world.volumes.create(place, wanted)
    }

    fn delete(&self, place: &Place) -> Result<()> {
        self.world.volumes.delete(place)
    }

    fn record(&self, volume: &str) -> Option<Record> {
        self.world.volumes.record(volume)
    }

    /// Stores a record together with this state: the caller may have read the record before it
    /// changed.
    fn keep(&self, record: &Record) -> Result<()> {
        let stored = self.world.volumes.record(&record.volume);
        let kata_formatting = stored.is_some_and(|stored| stored.kata_formatting);
        self.world.volumes.keep(&Record { kata: true, kata_formatting, ..record.clone() })
    }

    fn forget(&self, volume: &str) -> Result<()> {
        self.world.volumes.forget(volume)
    }

    fn vm_folder(&self, place: &Place) -> Result<PathBuf> {
        self.world.volumes.vm_folder(place)
    }

    fn mapping_name(&self, place: &Place) -> String {
        self.world.volumes.mapping_name(place)
    }

    fn count_conflict(&self, mode: Mode) {
        self.world.volumes.count_conflict(mode);
    }
}
