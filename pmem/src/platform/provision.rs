//! Making and removing namespaces, by writing to sysfs alone.
//!
//! Each value that is written is read back. The kernel keeps seeds: a namespace, and one of each
//! kind that can be made of it, which have no effect until they are given values. A failed creation
//! is undone.
//!
//! One process at a time does this, by a lock: seeds are there once. Other tools do not know the
//! lock, so that the result is verified in the end all the same.

mod states;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use super::choose::{self, NoRoom};
use super::error::PlatformError;
use super::key::{RegionKey, Uuid};
use super::namespace::{Mode, Namespace, PageMap};
use super::overhead::usable_of;
use super::region::Region;
use super::step::{Rule, Step};
use super::sysfs::Folder;
use super::{Inventory, Platform, is_transient};

/// Longest name that a label has room for.
pub const MAX_NAME: usize = 63;

/// How long another process may take to make or remove a namespace: some hundred writes to sysfs
/// of milliseconds each, and clearing a few MiB.
const LOCK_TRIES: u32 = 600;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// How long the node of a device may take to come after the device: that is milliseconds.
const NODE_TRIES: u32 = 500;
/// The same for one that is enabled again.
const ENABLE_TRIES: u32 = 100;
const NODE_PAUSE: Duration = Duration::from_millis(10);

/// A namespace to be made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceSpec {
    /// Its UUID. The caller chooses and records it before the creation, so that its rest can be
    /// found after a crash.
    pub uuid: Uuid,
    /// Its alternative name, for administrators.
    pub alt_name: String,
    /// Its mode.
    pub mode: Mode,
    /// Where its pages are noted.
    pub map: PageMap,
    /// The alignment of mappings.
    pub align: u64,
    /// Bytes that it takes of the region.
    pub size: u64,
}

/// Held while something is made or removed.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

/// Kinds of devices that a namespace can have, as the kernel names them and their drivers.
#[derive(Clone, Copy)]
struct Claim {
    seed: &'static str,
    driver: &'static str,
}

const fn claim_of(mode: Mode) -> Option<Claim> {
    match mode {
        Mode::Raw => None,
        Mode::Fsdax => Some(Claim { seed: "pfn_seed", driver: "nd_pmem" }),
        Mode::Sector => Some(Claim { seed: "btt_seed", driver: "nd_pmem" }),
        Mode::Devdax => Some(Claim { seed: "dax_seed", driver: "dax_pmem" }),
    }
}

impl Platform {
    pub(super) fn lock(&self) -> Result<Lock, PlatformError> {
        let path = self.places.run.join("blockd-pmem.lock");
        let failed = |source| PlatformError::Device { what: "locking", path: path.clone(), source };
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(failed)?;
        for _ in 0..LOCK_TRIES {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { _file: file }),
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_PAUSE),
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
        }
        let what = path.display().to_string();
        let problem = "is held by another process that makes or removes namespaces".to_owned();
        Err(PlatformError::InUse { what, problem })
    }

    /// Creates a namespace. Old signatures are cleared where file systems and pools have them,
    /// before the namespace is reported.
    ///
    /// # Errors
    /// When there is no room, or the kernel refuses. Nothing of it is left then, unless the error
    /// is [`PlatformError::NotTakenBack`].
    pub fn create(
        &self,
        region: &RegionKey,
        spec: &NamespaceSpec,
    ) -> Result<Namespace, PlatformError> {
        let lock = self.lock()?;
        self.create_under(&lock, region, spec)
    }

    /// The same for a caller that holds the lock already.
    pub(super) fn create_under(
        &self,
        _lock: &Lock,
        region: &RegionKey,
        spec: &NamespaceSpec,
    ) -> Result<Namespace, PlatformError> {
        let inventory = self.read()?;
        let region = existing_region(&inventory, region)?;
        check_wish(&inventory, region, spec)?;
        let made = self.make(region, spec);
        made.or_else(|error| self.take_back(&region.key, spec.uuid, error))
    }

    fn make(&self, region: &Region, spec: &NamespaceSpec) -> Result<Namespace, PlatformError> {
        let folder = self.region_folder(region);
        let name = folder.text("namespace_seed")?;
        let seed = folder.at(&name);
        let size = seed.number("size")?;
        if size != 0 {
            let (what, problem) = (format!("the seed {name}"), format!("has {size} bytes already"));
            return Err(PlatformError::InUse { what, problem });
        }
        self.set(&seed, "uuid", &spec.uuid.to_string())?;
        self.set(&seed, "alt_name", &spec.alt_name)?;
        self.set(&seed, "size", &spec.size.to_string())?;
        match claim_of(spec.mode) {
            None => self.bind(&seed, &name, "nd_pmem")?,
            Some(claim) => self.claim(&folder, &name, claim, spec)?,
        }
        let made = self.made(spec)?;
        self.clear_marks(&made)?;
        Ok(made)
    }

    /// Sets the requested mode of the namespace.
    fn claim(
        &self,
        folder: &Folder,
        namespace: &str,
        claim: Claim,
        spec: &NamespaceSpec,
    ) -> Result<(), PlatformError> {
        let name = folder.text(claim.seed)?;
        let seed = folder.at(&name);
        if spec.mode == Mode::Sector {
            self.set(&seed, "sector_size", "4096")?;
        } else {
            let map = if spec.map == PageMap::Device { "pmem" } else { "ram" };
            self.set(&seed, "mode", map)?;
            self.set(&seed, "align", &spec.align.to_string())?;
        }
        self.set(&seed, "uuid", &spec.uuid.to_string())?;
        self.set(&seed, "namespace", namespace)?;
        self.bind(&seed, &name, claim.driver)
    }

    /// The resulting namespace, if it matches the request.
    fn made(&self, spec: &NamespaceSpec) -> Result<Namespace, PlatformError> {
        let inventory = self.read()?;
        let found = inventory.namespace(spec.uuid);
        let (_, made) = found.ok_or_else(|| PlatformError::NotFound {
            what: "the namespace that was just made,",
            name: spec.uuid.to_string(),
        })?;
        let has_map = matches!(spec.mode, Mode::Fsdax | Mode::Devdax);
        let other = |problem: String| {
            Err(PlatformError::Unsupported { what: format!("{made} as it came out"), problem })
        };
        if made.mode != spec.mode || made.size != spec.size {
            let (mode, size) = (made.mode, made.size);
            return other(format!("{mode} of {size} bytes, not {} of {}", spec.mode, spec.size));
        }
        if has_map && (made.map, made.align) != (Some(spec.map), Some(spec.align)) {
            return other(format!("map {:?} and align {:?}", made.map, made.align));
        }
        let Some(device) = &made.device else {
            return other("it has no device".to_owned());
        };
        if made.alt_name != spec.alt_name {
            return other(format!("it is called {:?}", made.alt_name));
        }
        self.await_node(&self.device_path(device))?;
        Ok(made.clone())
    }

    pub(super) fn await_node(&self, path: &std::path::Path) -> Result<(), PlatformError> {
        for _ in 0..NODE_TRIES {
            if path.exists() {
                return Ok(());
            }
            thread::sleep(NODE_PAUSE);
        }
        let source = io::Error::from(io::ErrorKind::NotFound);
        Err(PlatformError::Device { what: "waiting for", path: path.to_path_buf(), source })
    }

    /// Removes the rest of a namespace that could not be made.
    fn take_back<T>(
        &self,
        region: &RegionKey,
        uuid: Uuid,
        error: PlatformError,
    ) -> Result<T, PlatformError> {
        match self.remove(region, uuid) {
            Ok(_) => Err(error),
            Err(after) => {
                let (error, after) = (Box::new(error), Box::new(after));
                Err(PlatformError::NotTakenBack { error, after })
            }
        }
    }

    /// Removes a namespace of a region, as far as it was made; false if there is none. Its content
    /// stays on the media until it is overwritten.
    ///
    /// # Errors
    /// When it is in use, the kernel refuses, or the region's state does not show whether there is
    /// one.
    pub fn destroy(&self, region: &RegionKey, uuid: Uuid) -> Result<bool, PlatformError> {
        let _lock = self.lock()?;
        self.remove(region, uuid)
    }

    fn remove(&self, key: &RegionKey, uuid: Uuid) -> Result<bool, PlatformError> {
        let inventory = self.read_with_users()?;
        let Some((region, namespace)) = inventory.namespace(uuid) else {
            let region = existing_region(&inventory, key)?;
            return match region.hides() {
                None => self.forget_label(region, uuid).map(|()| false),
                Some(problem) => {
                    let (what, problem) = (format!("region {key}"), problem.to_owned());
                    Err(PlatformError::InUse { what, problem })
                }
            };
        };
        if !region.labelled {
            let problem = "has no labels, so that its one namespace can't be removed".to_owned();
            return Err(PlatformError::Unsupported {
                what: format!("region {}", region.key),
                problem,
            });
        }
        self.disable(&inventory, region, namespace)?;
        let folder = self.region_folder(region).at(&namespace.name);
        if folder.text_if_there("force_raw")?.is_some_and(|text| text == "1") {
            // The kernel keeps its first namespace as a seed: whatever comes of it is not bare.
            self.set(&folder, "force_raw", "0")?;
        }
        // The kernel removes the label last: again where that failed.
        self.put(&folder, "size", "0").or_else(|_| self.put(&folder, "size", "0"))?;
        let left = left_of(folder.number_if_there("size"))?;
        if left != 0 {
            return Err(not_done(&folder, "size", "0", &left.to_string()));
        }
        match self.read()?.namespace(uuid) {
            None => Ok(true),
            Some((_, left)) => Err(PlatformError::InUse {
                what: left.to_string(),
                problem: format!("still has {} bytes after it was removed", left.size),
            }),
        }
    }

    /// Removes the kernel's rest of a namespace without bytes: it has its uuid as long as its label
    /// could not be removed, which would be there again after a boot.
    fn forget_label(&self, region: &Region, uuid: Uuid) -> Result<(), PlatformError> {
        let folder = self.region_folder(region);
        let is_namespace = |name: &String| name.starts_with("namespace") && name.contains('.');
        for name in folder.list()?.into_iter().filter(is_namespace) {
            let own = folder.at(&name);
            let has_it = own.text_if_there("uuid")?.is_some_and(|text| text == uuid.to_string());
            if has_it && own.number_if_there("size")? == Some(0) {
                self.put(&own, "size", "0")?;
            }
        }
        Ok(())
    }

    pub(super) fn region_folder(&self, region: &Region) -> Folder {
        Folder::new(self.places.nd_devices().join(&region.name))
    }

    pub(super) fn put(
        &self,
        folder: &Folder,
        name: &str,
        value: &str,
    ) -> Result<(), PlatformError> {
        let path = folder.path().join(name);
        let written = self.kernel.write(&path, value);
        written.map_err(|source| PlatformError::Write { path, value: value.to_owned(), source })
    }

    /// Writes a value and reads it back.
    pub(super) fn set(
        &self,
        folder: &Folder,
        name: &str,
        value: &str,
    ) -> Result<(), PlatformError> {
        self.put(folder, name, value)?;
        let found = folder.text(name)?;
        // Of a list the kernel marks the one that is meant.
        let marked = found
            .split_whitespace()
            .find_map(|word| word.strip_prefix('[').and_then(|word| word.strip_suffix(']')));
        if found == value || marked == Some(value) {
            return Ok(());
        }
        Err(not_done(folder, name, value, &found))
    }

    fn bind(&self, folder: &Folder, name: &str, driver: &str) -> Result<(), PlatformError> {
        let drivers = self.places.sys.join("bus/nd/drivers").join(driver);
        if !drivers.exists() {
            return Err(PlatformError::Unsupported {
                what: format!("driver {driver}"),
                problem: format!("it is not there: load it (modprobe {driver})"),
            });
        }
        let path = drivers.join("bind");
        let written = self.kernel.write(&path, name);
        written.map_err(|source| PlatformError::Write { path, value: name.to_owned(), source })?;
        match self.driver_of(folder)? {
            Some(_) => Ok(()),
            None => Err(not_done(folder, "driver", driver, "")),
        }
    }

    fn unbind(&self, folder: &Folder, name: &str) -> Result<(), PlatformError> {
        let Some(driver) = self.driver_of(folder)? else { return Ok(()) };
        let path = self.places.sys.join("bus/nd/drivers").join(&driver).join("unbind");
        let written = self.kernel.write(&path, name);
        written.map_err(|source| PlatformError::Write { path, value: name.to_owned(), source })?;
        match self.driver_of(folder)? {
            None => Ok(()),
            Some(driver) => Err(not_done(folder, "driver", "", &driver)),
        }
    }

    #[expect(clippy::unused_self, reason = "reads of the same host as everything else")]
    fn driver_of(&self, folder: &Folder) -> Result<Option<String>, PlatformError> {
        let path: PathBuf = folder.path().join("driver");
        match fs::read_link(&path) {
            Ok(link) => {
                let name = link.file_name().unwrap_or_default();
                Ok(Some(name.to_string_lossy().into_owned()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(PlatformError::Read { path, source }),
        }
    }
}

/// Bytes that a namespace still has, by its file. Its folder may go as well, also between opening
/// and reading the file.
pub(super) fn left_of(size: Result<Option<u64>, PlatformError>) -> Result<u64, PlatformError> {
    match size {
        Err(PlatformError::Read { source, .. }) if is_transient(&source) => Ok(0),
        other => Ok(other?.unwrap_or(0)),
    }
}

fn existing_region<'a>(
    inventory: &'a Inventory,
    key: &RegionKey,
) -> Result<&'a Region, PlatformError> {
    let found = inventory.region(key);
    found.ok_or_else(|| PlatformError::NotFound { what: "region", name: key.to_string() })
}

fn not_done(folder: &Folder, name: &str, wanted: &str, found: &str) -> PlatformError {
    let path = folder.path().join(name);
    PlatformError::NotDone { path, wanted: wanted.to_owned(), found: found.to_owned() }
}

fn in_use(namespace: &Namespace, by: &str) -> PlatformError {
    PlatformError::InUse { what: namespace.to_string(), problem: format!("is in use: {by}") }
}

fn check_wish(
    inventory: &Inventory,
    region: &Region,
    spec: &NamespaceSpec,
) -> Result<(), PlatformError> {
    let invalid = |field, value: String, allowed: String| {
        Err(PlatformError::Invalid { field, value, allowed })
    };
    let name = &spec.alt_name;
    if name.is_empty() || name.len() > MAX_NAME || name.contains(|c: char| c.is_control()) {
        let allowed = format!("1 to {MAX_NAME} bytes without control characters");
        return invalid("the namespace's name", name.clone(), allowed);
    }
    if let Some((_, other)) = inventory.namespace(spec.uuid) {
        let (what, problem) = (other.to_string(), "exists already".to_owned());
        return Err(PlatformError::InUse { what, problem });
    }
    let step = Step::of(region, spec.align, Rule::Formula);
    match step {
        Some(step) if spec.size > 0 && step.round_down(spec.size) == spec.size => {}
        Some(step) => return invalid("size", spec.size.to_string(), step.to_string()),
        None => return invalid("align", spec.align.to_string(), "less".to_owned()),
    }
    if usable_of(spec.mode, spec.map, spec.align, spec.size) == 0 {
        let allowed = format!("more: nothing of it is left for a {} device", spec.mode);
        return invalid("size", spec.size.to_string(), allowed);
    }
    let fits = choose::fits(region, spec.size);
    fits.map_err(|refusal| NoRoom { refusals: vec![refusal] }.into())
}
