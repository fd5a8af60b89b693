//! Persistent memory of a host: reads regions and namespaces, creates and removes namespaces,
//! through sysfs alone.
//!
//! [`Platform`] reads and changes; the result of reading is an [`Inventory`]. Regions are
//! identified by [`RegionKey`] and namespaces by [`Uuid`]: the numbers of regions move from one
//! boot to the next, and a name may be there twice. An unreadable file is an error that names it.
//! Nothing is taken for absent because of an error.
//!
//! [`step`], [`choose`] and [`share`] decide and touch nothing.

pub mod choose;
pub mod clear;
mod error;
mod growth;
mod kernel;
mod key;
mod namespace;
mod overhead;
pub mod pooled;
pub mod provision;
mod region;
pub mod share;
pub mod step;
mod sysfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod users;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use error::PlatformError;
pub use kernel::{HostKernel, Kernel, new_uuid};
pub use key::{RegionKey, Uuid};
pub use namespace::{Device, DeviceClass, Mode, Namespace, PageMap};
pub use overhead::{raw_size_for, usable_of};
pub use region::{Dimm, Region, RegionKind};

pub use users::User;

use sysfs::Folder;

/// Number of scans of a changing inventory before a missing file is an error. A change is done in
/// milliseconds.
const READ_TRIES: u32 = 10;
const READ_PAUSE: Duration = Duration::from_millis(10);

/// Where a host shows its devices; tests look elsewhere.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Places {
    /// sysfs.
    pub sys: PathBuf,
    /// Nodes of devices.
    pub dev: PathBuf,
    /// procfs.
    pub proc: PathBuf,
    /// Where the lock is that makes changes one after another.
    pub run: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self::under(Path::new("/"))
    }
}

impl Places {
    /// Returns the directories of a host with another root folder.
    #[must_use]
    pub fn under(root: &Path) -> Self {
        let at = |name| root.join(name);
        Self { sys: at("sys"), dev: at("dev"), proc: at("proc"), run: at("run") }
    }

    fn nd_devices(&self) -> PathBuf {
        self.sys.join("bus/nd/devices")
    }
}

/// The persistent memory of a host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Inventory {
    /// Whether the kernel supports such memory at all: without its module, nothing is seen.
    pub has_bus: bool,
    /// Regions by key.
    pub regions: Vec<Region>,
    /// Processes that could not be examined, so that the list of users may be incomplete.
    pub unseen_processes: usize,
}

impl Inventory {
    /// The region of that key.
    #[must_use]
    pub fn region(&self, key: &RegionKey) -> Option<&Region> {
        self.regions.iter().find(|region| region.key == *key)
    }

    /// The namespace of that uuid, with its region.
    #[must_use]
    pub fn namespace(&self, uuid: Uuid) -> Option<(&Region, &Namespace)> {
        self.namespaces().find(|(_, namespace)| namespace.uuid == Some(uuid))
    }

    /// All namespaces, each with its region.
    pub fn namespaces(&self) -> impl Iterator<Item = (&Region, &Namespace)> {
        let of = |region| Region::namespaces_of(region).map(move |namespace| (region, namespace));
        self.regions.iter().flat_map(of)
    }

    /// Names that more than one namespace of a region has, with how many do.
    #[must_use]
    pub fn duplicate_names(&self) -> Vec<(RegionKey, String, usize)> {
        let mut found = Vec::new();
        for region in &self.regions {
            let mut names = std::collections::BTreeMap::<&str, usize>::new();
            for namespace in region.namespaces.iter().filter(|one| !one.alt_name.is_empty()) {
                *names.entry(&namespace.alt_name).or_default() += 1;
            }
            let twice = names.into_iter().filter(|(_, count)| *count > 1);
            found.extend(twice.map(|(name, n)| (region.key.clone(), name.to_owned(), n)));
        }
        found
    }
}

/// A host's persistent memory. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Platform {
    places: Places,
    kernel: Arc<dyn Kernel>,
}

impl Default for Platform {
    fn default() -> Self {
        Self::new(Places::default(), Arc::new(HostKernel))
    }
}

impl Platform {
    /// Returns a platform that reads these directories, and changes them through this kernel.
    #[must_use]
    pub fn new(places: Places, kernel: Arc<dyn Kernel>) -> Self {
        Self { places, kernel }
    }

    /// Where it looks.
    #[must_use]
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Reads regions and namespaces, without their users.
    ///
    /// # Errors
    /// When a file can't be read, or has invalid content.
    pub fn read(&self) -> Result<Inventory, PlatformError> {
        let mut tries = 1;
        loop {
            match self.read_once() {
                // An object that disappears during a scan is missing in the next one.
                Err(PlatformError::Read { source, .. })
                    if is_transient(&source) && tries < READ_TRIES =>
                {
                    tries += 1;
                    std::thread::sleep(READ_PAUSE);
                }
                other => return other,
            }
        }
    }

    fn read_once(&self) -> Result<Inventory, PlatformError> {
        let mut inventory = Inventory::default();
        let folder = Folder::new(self.places.nd_devices());
        let Some(names) = folder.list_if_there()? else { return Ok(inventory) };
        inventory.has_bus = true;
        // Regions are enabled before their namespaces appear. The enabled state is read first,
        // since the kernel then answers only once all namespaces are listed.
        let mut enabled = Vec::new();
        for name in names.iter().filter(|name| is_numbered(name, "region")) {
            enabled.push((name, folder.at(name).has_link("driver")?));
        }
        for name in names.iter().filter(|name| is_numbered(name, "ndbus")) {
            folder.at(name).text_if_there("wait_probe")?;
        }
        for (name, was_enabled) in enabled {
            inventory.regions.push(region::read(&self.places, name, was_enabled)?);
        }
        inventory.regions.sort_by(|a, b| a.key.cmp(&b.key).then_with(|| a.name.cmp(&b.name)));
        region::check_keys(&inventory.regions)?;
        Ok(inventory)
    }

    /// Reads regions, namespaces and their users.
    ///
    /// # Errors
    /// When a file can't be read, or has invalid content.
    pub fn read_with_users(&self) -> Result<Inventory, PlatformError> {
        let mut inventory = self.read()?;
        inventory.unseen_processes = users::find(&self.places, &mut inventory.regions)?;
        Ok(inventory)
    }

    fn device_path(&self, device: &Device) -> PathBuf {
        self.places.dev.join(&device.name)
    }
}

/// Whether a file was not there, or was opened and its device removed before it could be read.
fn is_transient(error: &std::io::Error) -> bool {
    let removed = rustix::io::Errno::NODEV.raw_os_error();
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(removed)
}

/// Whether a name is this word and a number.
fn is_numbered(name: &str, word: &str) -> bool {
    let digits = name.strip_prefix(word).unwrap_or_default();
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests;
