//! The interface of the node part to the daemon's volumes with their records, and to this machine
//! with its mounts, folders and devices. Each method is one step. A call consists of such steps,
//! may be interrupted between any two of them, and is completed by its repeat: tests check this
//! with a world that dies.

use std::path::{Path, PathBuf};

use blockd_luks::{Key, Mapping};

use super::content::{Content, Making};
use super::flags::Options;
use super::mountinfo::{Device, Table};
use super::records::{Place, Record};
use crate::capability::Mode;
use crate::error::Error;
use crate::sizes::Range;

/// The result of a step.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A volume as the daemon has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    pub size_bytes: i64,
    /// Whether it was never written, or completely discarded.
    pub empty: bool,
    /// Its cell is on another node. Nothing is known of its content then.
    pub standby: bool,
    /// Attached as a block device by the daemon, also where that device is not there.
    pub attached: bool,
    /// Its block device, while it is attached as one.
    pub device: Option<Device>,
    /// Attached so that it can't be written.
    pub read_only: bool,
    /// Bytes that it takes of its pool.
    pub mapped_bytes: i64,
    /// All of it is set aside, so that the mapped bytes mean nothing.
    pub thick: bool,
    /// Why its device is not served, by the daemon; empty when it is.
    pub problem: String,
    /// Its device belongs to the kernel and exists from the start. Only reading the device shows
    /// whether it was written.
    pub own: bool,
    /// Applications can map it as it is.
    pub dax: bool,
    /// Bytes that it takes of its pool, including the overhead.
    pub charged_bytes: i64,
    /// The daemon has its label of encrypted volumes.
    pub encrypted: bool,
    /// Set while it is encrypted and not open: the reason, or nothing where none is known.
    pub locked: Option<&'static str>,
    /// The mark of a volume that moves between nodes. `None`: the record of this node has it.
    pub unfinished: Option<Unfinished>,
}

/// The step that an interrupted call began and did not complete, so that the content of its volume
/// is no data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unfinished {
    #[default]
    Nothing,
    /// A header of encryption is written.
    Header,
    /// A file system is made, behind the header if there is one.
    FileSystem,
}

impl Volume {
    /// Returns the capacity that its claim has.
    #[must_use]
    pub fn capacity_bytes(&self) -> i64 {
        self.charged_bytes.max(self.size_bytes)
    }
}

/// A loop device over an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    pub device: Device,
    pub read_only: bool,
}

/// A block device as the kernel has it, found out without opening it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLook {
    pub node: Node,
    /// `None`: the kernel has no device of these numbers.
    pub bytes: Option<u64>,
    /// Sectors that the kernel knows to be bad.
    pub bad_blocks: u64,
}

/// A file that should be the node of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    Right,
    Missing,
    /// A node of another device, or none.
    Other,
}

/// An ephemeral volume to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub size_bytes: i64,
    /// The device class, by its name.
    pub class: String,
    /// How it lies in persistent memory.
    pub pmem: crate::pmem::Plan,
}

/// The kind of a path's object, links not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Folder,
    File,
    Other,
}

/// A file system to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    pub device: &'a Device,
    pub file_system: &'a str,
    pub path: &'a Path,
    pub options: &'a Options,
}

/// How a mount ended that was not refused for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mounted {
    Done,
    /// The device can't be written, and the file system must be, to be whole again.
    NeedsWriting,
}

/// Bytes or inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub total: i64,
    pub used: i64,
    pub available: i64,
}

/// The environment of the node part.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "a world has nothing to show of itself")]
pub struct World<'a> {
    pub volumes: &'a dyn Volumes,
    pub machine: &'a dyn Machine,
}

/// Volumes as the daemon has them, and what is recorded of them here.
pub trait Volumes: Send + Sync {
    /// The volume; `None` when the daemon has none of that name.
    fn get(&self, place: &Place) -> Result<Option<Volume>>;
    /// A volume that the daemon has, as workloads see it.
    fn inside(&self, _: &Place, volume: Volume) -> Result<Volume> {
        Ok(volume)
    }
    /// Makes it a block device, if it is none yet.
    fn attach(&self, place: &Place, read_only: bool) -> Result<Volume>;
    /// The device without the layers above it, to undo an interrupted call.
    fn bare(&self, place: &Place) -> Result<Volume> {
        self.attach(place, false)
    }
    /// Makes the layers above the device as large as the device allows.
    fn stretch(&self, _: &Place) -> Result<()> {
        Ok(())
    }
    /// Detaches the device if it is not in use; also succeeds without a device or volume.
    fn detach(&self, place: &Place) -> Result<()>;
    /// Makes it as large as is asked for; `None`: that is for the controller to do.
    fn enlarge(&self, place: &Place, range: &Range) -> Result<Option<Volume>>;
    /// Marks a volume that moves between nodes, durably.
    fn mark(&self, place: &Place, unfinished: Unfinished) -> Result<()>;
    /// Makes an ephemeral volume, if it is not there.
    fn create(&self, place: &Place, wanted: &Wanted) -> Result<()>;
    /// Deletes it, if it is there.
    fn delete(&self, place: &Place) -> Result<()>;
    /// Returns the record of a volume.
    fn record(&self, volume: &str) -> Option<Record>;
    /// Writes it down, durably.
    fn keep(&self, record: &Record) -> Result<()>;
    /// Forgets it.
    fn forget(&self, volume: &str) -> Result<()>;
    /// Where the file system around an image is mounted.
    fn vm_folder(&self, place: &Place) -> Result<PathBuf>;
    /// The name of the mapping over an encrypted volume.
    fn mapping_name(&self, place: &Place) -> String;
    /// Counts a publication that was refused for the access mode of another one.
    fn count_conflict(&self, mode: Mode);
}

/// This machine: mounts, devices, encryption, images and their conditions.
pub trait Machine: Mounts + Devices + Encryption + Images + Conditions {}

impl<T: Mounts + Devices + Encryption + Images + Conditions> Machine for T {}

/// Mounts, and the folders and files that they are made at.
pub trait Mounts: Send + Sync {
    /// The mount table as it is now.
    fn mounts(&self) -> Result<Table>;
    fn mount(&self, mount: &Mount<'_>) -> Result<Mounted>;
    /// Binds one path to another.
    fn bind(&self, from: &Path, to: &Path) -> Result<()>;
    /// Makes the mount at a path read-only, through that path alone.
    fn make_read_only(&self, path: &Path) -> Result<()>;
    /// Removes the uppermost mount. `lazily`: also while its files are open.
    fn unmount(&self, path: &Path, lazily: bool) -> Result<()>;
    /// Returns the kind of the object at a path, if there is one.
    fn kind(&self, path: &Path) -> Result<Option<Kind>>;
    /// Makes a folder; that above it is there.
    fn make_folder(&self, path: &Path) -> Result<()>;
    /// Makes an empty file to bind a device to.
    fn make_file(&self, path: &Path) -> Result<()>;
    /// Removes an empty folder, or an empty file; nothing that holds something.
    fn remove(&self, path: &Path, kind: Kind) -> Result<()>;
}

/// Block devices and the file systems on them.
pub trait Devices: Send + Sync {
    /// Bytes of the device as the kernel shows it.
    fn device_bytes(&self, device: &Device) -> Result<u64>;
    /// Whether no other user claims the device: no mount, and no tool that an earlier process of
    /// this driver started.
    fn is_free(&self, device: &Device) -> Result<bool>;
    /// Returns the bytes of the file system on it, if they can be determined.
    fn file_system_bytes(&self, device: &Device, file_system: &str) -> Result<Option<u64>>;
    /// Detects its content.
    fn content(&self, device: &Device) -> Result<Content>;
    /// Discards all of it.
    fn wipe(&self, device: &Device) -> Result<()>;
    fn format(&self, device: &Device, file_system: &str, making: &Making) -> Result<()>;
    /// Repairs automatically repairable damage.
    fn check(&self, device: &Device, file_system: &str) -> Result<()>;
    /// Makes a mounted file system as large as its device.
    fn grow(&self, device: &Device, file_system: &str, path: &Path) -> Result<()>;
    /// Bytes and inodes of the mounted file system.
    fn usage(&self, path: &Path) -> Result<(Usage, Usage)>;
}

/// LUKS2 on devices, and mappings over them. Where a key is used, `false` says that it opens
/// nothing.
pub trait Encryption: Send + Sync {
    /// The open mapping of that name.
    fn mapping(&self, name: &str) -> Result<Option<Mapping>>;
    /// Writes a header with one slot, for this key.
    fn encrypt(&self, device: &Device, key: &Key) -> Result<()>;
    fn open(&self, device: &Device, name: &str, key: &Key, read_only: bool) -> Result<bool>;
    /// Closes a mapping. `false`: it is in use.
    fn close(&self, name: &str) -> Result<bool>;
    /// Makes the mapping with this node as large as its device.
    fn resize(&self, name: &str, node: &Path, key: &Key) -> Result<bool>;
    /// Whether the key opens the device.
    fn is_key(&self, device: &Device, key: &Key) -> Result<bool>;
    fn add_key(&self, device: &Device, existing: &Key, new: &Key) -> Result<bool>;
    /// Removes the slot of a key. Another key opens the device.
    fn remove_key(&self, device: &Device, key: &Key) -> Result<bool>;
}

/// Persistent memory, and images for virtual machines.
pub trait Images: Send + Sync {
    /// Whether the beginning and the end of a device read as zeroes: then it was never used.
    fn is_blank(&self, device: &Device) -> Result<bool>;
    /// Whether files of the mounted file system are mapped directly (DAX).
    fn has_dax(&self, path: &Path) -> Result<bool>;
    /// Fills the mounted file system with an image. It is there as a whole, or not at all.
    fn make_image(&self, file: &Path, partition: bool) -> Result<()>;
    /// The loop device over the file system in an image.
    fn loop_of(&self, file: &Path) -> Result<Option<Loop>>;
    /// Makes one.
    fn attach_loop(&self, file: &Path, read_only: bool) -> Result<Loop>;
    /// Detaches a loop device that is not in use.
    fn detach_loop(&self, device: &Device) -> Result<()>;
}

/// How devices and file systems are, found out without IO.
pub trait Conditions: Send + Sync {
    /// How a device is.
    fn device_look(&self, device: &Device) -> Result<DeviceLook>;
    /// Whether that path is the node of this device.
    fn node_at(&self, path: &Path, device: &Device) -> Result<Node>;
    /// Returns the errors that the file system on it has counted.
    fn file_system_errors(&self, device: &Device, file_system: &str) -> Result<u64>;
    /// False: the mounted file system returns only errors, as after a shutdown.
    fn answers(&self, path: &Path) -> Result<bool>;
}
