//! Enabling, disabling and converting a namespace.

use std::fs::File;
use std::{io, thread};

use super::super::error::PlatformError;
use super::super::key::{RegionKey, Uuid};
use super::super::namespace::{DeviceClass, Mode, Namespace};
use super::super::region::Region;
use super::super::{Inventory, Platform};
use super::{ENABLE_TRIES, NODE_PAUSE, NamespaceSpec, claim_of, existing_region, in_use, not_done};

impl Platform {
    /// Disables its device, which has no user and cannot get one meanwhile.
    pub(in super::super) fn disable(
        &self,
        inventory: &Inventory,
        region: &Region,
        namespace: &Namespace,
    ) -> Result<(), PlatformError> {
        let _held = self.hold(inventory, namespace)?;
        let folder = self.region_folder(region);
        let Some(holder) = &namespace.holder else {
            return self.unbind(&folder.at(&namespace.name), &namespace.name);
        };
        let claim = folder.at(holder);
        self.unbind(&claim, holder)?;
        // An empty text would not reach the kernel.
        self.put(&claim, "namespace", "\n")?;
        let own = folder.at(&namespace.name);
        match own.text_if_there("holder")? {
            Some(holder) if !holder.is_empty() => Err(not_done(&own, "holder", "", &holder)),
            _ => self.unbind(&own, &namespace.name),
        }
    }

    /// Refuses a namespace that is in use, and keeps others from it while the result is held.
    fn hold(
        &self,
        inventory: &Inventory,
        namespace: &Namespace,
    ) -> Result<Option<File>, PlatformError> {
        let Some(device) = &namespace.device else { return Ok(None) };
        if !namespace.users.is_empty() {
            let users: Vec<String> = namespace.users.iter().map(ToString::to_string).collect();
            return Err(in_use(namespace, &users.join(", ")));
        }
        let path = self.device_path(device);
        if device.class == DeviceClass::Character {
            // A character device cannot be opened exclusively.
            if inventory.unseen_processes > 0 {
                let count = inventory.unseen_processes;
                let problem = format!("may be in use: {count} processes can't be looked at");
                return Err(PlatformError::InUse { what: namespace.to_string(), problem });
            }
            return Ok(None);
        }
        match self.kernel.open_exclusive(&path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                Err(in_use(namespace, "claimed by the kernel"))
            }
            Err(source) => Err(PlatformError::Device { what: "opening", path, source }),
        }
    }

    /// Makes the kernel detect the mode of the namespace. Its answer is an error then, since the
    /// namespace itself has no driver in the end; the caller verifies the result.
    pub(in super::super) fn enable(
        &self,
        region: &Region,
        name: &str,
    ) -> Result<(), PlatformError> {
        let path = self.places.sys.join("bus/nd/drivers/nd_pmem/bind");
        match self.kernel.write(&path, name) {
            Ok(()) => Ok(()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => {
                Ok(())
            }
            Err(source) => {
                let value = format!("{name} of region {}", region.key);
                Err(PlatformError::Write { path, value, source })
            }
        }
    }

    /// Reads a namespace after it was enabled. Its device appears a moment later: the kernel
    /// registers it in a separate thread.
    pub(in super::super) fn read_when_enabled(
        &self,
        uuid: Uuid,
    ) -> Result<Inventory, PlatformError> {
        for _ in 1..ENABLE_TRIES {
            let inventory = self.read()?;
            if inventory.namespace(uuid).is_none_or(|(_, one)| one.device.is_some()) {
                return Ok(inventory);
            }
            thread::sleep(NODE_PAUSE);
        }
        self.read()
    }

    /// Enables a namespace that has no device, because it was disabled or by a crash.
    ///
    /// # Errors
    /// When there is none of that uuid, or the kernel can't enable it. Nothing is lost by that.
    pub fn ensure_enabled(&self, uuid: Uuid) -> Result<Namespace, PlatformError> {
        let _lock = self.lock()?;
        let inventory = self.read_with_users()?;
        let gone = || PlatformError::NotFound { what: "namespace", name: uuid.to_string() };
        let (region, namespace) = inventory.namespace(uuid).ok_or_else(gone)?;
        if namespace.device.is_some() {
            return Ok(namespace.clone());
        }
        if !region.labelled {
            // Its uuid is that of its holder, and would be gone with it.
            let (what, problem) = (namespace.to_string(), "has no label".to_owned());
            return Err(PlatformError::Unsupported { what, problem });
        }
        // A crash may have left it half disabled: the remaining holder keeps the kernel from it.
        self.disable(&inventory, region, namespace)?;
        self.enable(region, &namespace.name)?;
        let inventory = self.read_when_enabled(uuid)?;
        let (_, now) = inventory.namespace(uuid).ok_or_else(gone)?;
        let Some(device) = &now.device else {
            let problem = "has no device: the kernel did not enable it".to_owned();
            return Err(PlatformError::InUse { what: now.to_string(), problem });
        };
        self.await_node(&self.device_path(device))?;
        Ok(now.clone())
    }

    /// Removes the mode of a namespace, so that its device has all of its bytes. After a reboot the
    /// kernel restores its mode, as long as its info block is there.
    ///
    /// # Errors
    /// When it is in use, or the kernel refuses. It may have no device then.
    pub fn make_bare(&self, uuid: Uuid) -> Result<Namespace, PlatformError> {
        let _lock = self.lock()?;
        let inventory = self.read_with_users()?;
        let gone = || PlatformError::NotFound { what: "namespace", name: uuid.to_string() };
        let (region, namespace) = inventory.namespace(uuid).ok_or_else(gone)?;
        if !region.labelled {
            // Its uuid is that of its holder, and would be gone with it.
            let (what, problem) = (namespace.to_string(), "has no label".to_owned());
            return Err(PlatformError::Unsupported { what, problem });
        }
        if namespace.mode == Mode::Raw && namespace.device.is_some() {
            return Ok(namespace.clone());
        }
        self.disable(&inventory, region, namespace)?;
        self.set(&self.region_folder(region).at(&namespace.name), "force_raw", "1")?;
        self.enable(region, &namespace.name)?;
        let inventory = self.read_when_enabled(uuid)?;
        let (_, now) = inventory.namespace(uuid).ok_or_else(gone)?;
        match &now.device {
            Some(device) if now.mode == Mode::Raw => self.await_node(&self.device_path(device))?,
            _ => {
                let problem = "is not bare after it was made so".to_owned();
                return Err(PlatformError::InUse { what: now.to_string(), problem });
            }
        }
        Ok(now.clone())
    }

    /// Makes something else of the one namespace of a region without labels.
    ///
    /// # Errors
    /// When it is not bare, in use, or the kernel refuses. It is bare again then, unless the error
    /// is [`PlatformError::NotTakenBack`].
    pub fn convert(
        &self,
        region: &RegionKey,
        spec: &NamespaceSpec,
    ) -> Result<Namespace, PlatformError> {
        let _lock = self.lock()?;
        let inventory = self.read_with_users()?;
        let region = existing_region(&inventory, region)?;
        let refused = |problem: &str| {
            let what = format!("region {}", region.key);
            Err(PlatformError::Unsupported { what, problem: problem.to_owned() })
        };
        let [namespace] = region.namespaces.as_slice() else {
            return refused("has not just one namespace");
        };
        let Some(claim) = claim_of(spec.mode) else {
            return refused("is made into something else than it is");
        };
        if region.labelled || namespace.mode != Mode::Raw {
            return refused("has labels, or its namespace is not bare");
        }
        self.disable(&inventory, region, namespace)?;
        let folder = self.region_folder(region);
        let spec = NamespaceSpec { size: namespace.size, alt_name: String::new(), ..spec.clone() };
        let claimed = self.claim(&folder, &namespace.name, claim, &spec);
        claimed.and_then(|()| self.made(&spec)).map_err(|error| {
            let name = &namespace.name;
            match self.unclaim(region, &spec).and_then(|()| self.enable(region, name)) {
                Ok(()) => error,
                Err(after) => {
                    let (error, after) = (Box::new(error), Box::new(after));
                    PlatformError::NotTakenBack { error, after }
                }
            }
        })
    }

    fn unclaim(&self, region: &Region, spec: &NamespaceSpec) -> Result<(), PlatformError> {
        let inventory = self.read_with_users()?;
        match inventory.namespace(spec.uuid) {
            Some((_, namespace)) => self.disable(&inventory, region, namespace),
            None => Ok(()),
        }
    }
}
