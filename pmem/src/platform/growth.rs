//! Namespaces grow at their ends.
//!
//! The kernel looks for free space in the order of addresses, and takes space right in front of a
//! namespace as well (`scan_allocate` of its `namespace_devs.c`): all of its bytes would be
//! elsewhere in it then. It takes nothing that is too small, so that a namespace is made larger by
//! more than there is in front of it, and then smaller: it is cut at its end.

use std::thread;
use std::time::Duration;

use super::choose::{self, NoRoom, Reason, Refusal};
use super::error::PlatformError;
use super::key::Uuid;
use super::namespace::{Mode, Namespace, PageMap};
use super::region::Region;
use super::step::{Rule, Step};
use super::sysfs::Folder;
use super::users::User;
use super::{Inventory, Platform};

/// How often to retry while a prober has a new device open: udev, whose programs take fractions of
/// a second each.
const LOOKED_AT_TRIES: u32 = 20;
const LOOKED_AT_PAUSE: Duration = Duration::from_millis(250);

impl Platform {
    /// Makes a namespace larger, and bare: its new bytes, which may be data of another namespace,
    /// must not be visible until it is restored. Only one whose pages are noted in ordinary memory
    /// can be: with notes on the namespace the kernel fails to enable it afterwards.
    ///
    /// # Errors
    /// When that is not possible, it is in use, or there is no room right behind it. It is as it
    /// was then, unless the error is [`PlatformError::NotTakenBack`]: it may be bare then, or have
    /// no device, and some of its bytes may be data of another namespace.
    pub fn grow_bare(&self, uuid: Uuid, size: u64) -> Result<Namespace, PlatformError> {
        let _lock = self.lock()?;
        let inventory = self.read_with_users()?;
        let (region, namespace) = found(&inventory, uuid)?;
        let sizes = sizes(region, namespace, size)?;
        self.disable(&inventory, region, namespace)?;
        let folder = self.region_folder(region).at(&namespace.name);
        let grown = self.set(&folder, "force_raw", "1");
        match grown.and_then(|()| self.resize(&folder, namespace, &sizes)) {
            Ok(()) => {}
            Err(error @ PlatformError::NotTakenBack { .. }) => return Err(error),
            Err(error) => {
                let restored = self.set(&folder, "force_raw", "0");
                let restored = restored.and_then(|()| self.enable(region, &namespace.name));
                let is_room = error.os_error() == Some(libc::ENOSPC);
                let error = match is_room {
                    true => refused(region, size - namespace.size, Reason::NotContiguous),
                    false => error,
                };
                return Err(match restored {
                    Ok(()) => error,
                    Err(after) => not_taken_back(error, after),
                });
            }
        }
        self.enabled_bare(region, (uuid, &namespace.name), size).map_err(|error| {
            let problem = format!("has {size} bytes, and is bare or has no device");
            let after = PlatformError::InUse { what: namespace.to_string(), problem };
            not_taken_back(error, after)
        })
    }

    fn enabled_bare(
        &self,
        region: &Region,
        (uuid, name): (Uuid, &str),
        size: u64,
    ) -> Result<Namespace, PlatformError> {
        self.enable(region, name)?;
        let inventory = self.read_when_enabled(uuid)?;
        let (_, now) = found(&inventory, uuid)?;
        match &now.device {
            Some(device) if now.mode == Mode::Raw && now.size == size => {
                self.await_node(&self.device_path(device))?;
                Ok(now.clone())
            }
            _ => {
                let problem = format!("is not bare after growing to {size}");
                Err(PlatformError::InUse { what: now.to_string(), problem })
            }
        }
    }

    /// Restores the mode of a namespace that was made bare, with at most `size` bytes. Short-lived
    /// users such as udev are waited for. If it cannot be enabled with that size for lack of memory
    /// for page metadata, it gets its size from before the growth, if that is given.
    ///
    /// # Errors
    /// When it is in use, the kernel refuses, or it was nothing else. It may have no device then.
    pub fn restore(
        &self,
        uuid: Uuid,
        at_most: u64,
        before: Option<u64>,
    ) -> Result<Namespace, PlatformError> {
        let mut tries = 1;
        loop {
            let lock = self.lock()?;
            match self.restore_now(uuid, at_most) {
                Err(PlatformError::InUse { .. }) if tries < LOOKED_AT_TRIES => tries += 1,
                Err(error) => {
                    let before = before.filter(|before| *before < at_most);
                    let Some(before) = before else { return Err(error) };
                    return Err(match self.back_to(uuid, before) {
                        Ok(false) => error,
                        Ok(true) => cut(uuid, at_most, &error),
                        Err(after) => not_taken_back(error, after),
                    });
                }
                other => return other,
            }
            drop(lock);
            thread::sleep(LOOKED_AT_PAUSE);
        }
    }

    /// Reads the inventory once udev has finished with a new device; a process that has it open for
    /// longer is reported as its user.
    ///
    /// # Errors
    /// As [`Self::read_with_users`].
    pub fn read_once_looked_at(&self, uuid: Uuid) -> Result<Inventory, PlatformError> {
        let mut tries = 1;
        loop {
            let inventory = self.read_with_users()?;
            let users = inventory.namespace(uuid).map_or(&[][..], |(_, one)| &one.users);
            let is_looked_at = users.iter().any(|user| matches!(user, User::Process { .. }));
            if !is_looked_at || tries == LOOKED_AT_TRIES {
                return Ok(inventory);
            }
            tries += 1;
            thread::sleep(LOOKED_AT_PAUSE);
        }
    }

    fn restore_now(&self, uuid: Uuid, at_most: u64) -> Result<Namespace, PlatformError> {
        let inventory = self.read_with_users()?;
        let (region, namespace) = found(&inventory, uuid)?;
        if namespace.mode != Mode::Raw {
            return Ok(namespace.clone());
        }
        self.disable(&inventory, region, namespace)?;
        let folder = self.region_folder(region).at(&namespace.name);
        // The kernel writes the label once more: that it has this size is durable then.
        self.set_surely(&folder, namespace.size.min(at_most))?;
        self.set(&folder, "force_raw", "0")?;
        self.enabled_again(uuid, region, &namespace.name)
    }

    /// Cuts one that has no device to its former size; false if it has one, or no more than that.
    fn back_to(&self, uuid: Uuid, size: u64) -> Result<bool, PlatformError> {
        let inventory = self.read_with_users()?;
        let (region, namespace) = found(&inventory, uuid)?;
        if namespace.device.is_some() || namespace.size <= size {
            return Ok(false);
        }
        self.disable(&inventory, region, namespace)?;
        let folder = self.region_folder(region).at(&namespace.name);
        self.set_surely(&folder, size)?;
        self.enabled_again(uuid, region, &namespace.name).map(|_| true)
    }

    fn enabled_again(
        &self,
        uuid: Uuid,
        region: &Region,
        name: &str,
    ) -> Result<Namespace, PlatformError> {
        self.enable(region, name)?;
        let inventory = self.read_when_enabled(uuid)?;
        let (_, now) = found(&inventory, uuid)?;
        match &now.device {
            Some(device) if now.mode != Mode::Raw => {
                self.await_node(&self.device_path(device))?;
                Ok(now.clone())
            }
            _ => {
                let problem = "was not restored to its mode from before it was bare".to_owned();
                Err(PlatformError::Unsupported { what: now.to_string(), problem })
            }
        }
    }

    /// Gives a disabled namespace these sizes, one after the other. A failed step is undone, and
    /// where that is uncertain the error is [`PlatformError::NotTakenBack`].
    fn resize(
        &self,
        folder: &Folder,
        namespace: &Namespace,
        sizes: &[u64],
    ) -> Result<(), PlatformError> {
        let begins = folder.address()?;
        for size in sizes {
            let written = self.set(folder, "size", &size.to_string());
            // If it begins elsewhere, the part that would be cut off now is its own.
            let here = match folder.address() {
                Ok(address) if address == begins => Ok(()),
                Ok(address) => Err(moved(namespace, begins, address)),
                Err(error) => Err(error),
            };
            match (written, here) {
                (Ok(()), Ok(())) => {}
                (Err(error), Ok(())) => {
                    return Err(match self.take_size_back(folder, namespace.size) {
                        Ok(()) => error,
                        Err(after) => not_taken_back(error, after),
                    });
                }
                (written, Err(after)) => {
                    let problem = format!("was to have {size} bytes");
                    let grows = PlatformError::InUse { what: namespace.to_string(), problem };
                    return Err(not_taken_back(written.err().unwrap_or(grows), after));
                }
            }
        }
        Ok(())
    }

    /// A write that failed may have had its effect all the same: the kernel writes labels last, and
    /// writes them again when it is given the size that there is.
    fn take_size_back(&self, folder: &Folder, size: u64) -> Result<(), PlatformError> {
        if folder.number("size")? == size {
            return Ok(());
        }
        self.set_surely(folder, size)
    }

    /// Twice, if need be: space that the kernel assigns but the label lacks may be given to others.
    fn set_surely(&self, folder: &Folder, size: u64) -> Result<(), PlatformError> {
        let set = || self.set(folder, "size", &size.to_string());
        set().or_else(|_| set())
    }
}

fn found(inventory: &Inventory, uuid: Uuid) -> Result<(&Region, &Namespace), PlatformError> {
    let gone = || PlatformError::NotFound { what: "namespace", name: uuid.to_string() };
    inventory.namespace(uuid).ok_or_else(gone)
}

fn not_taken_back(error: PlatformError, after: PlatformError) -> PlatformError {
    PlatformError::NotTakenBack { error: Box::new(error), after: Box::new(after) }
}

/// The error of a namespace that keeps its former size because it cannot be enabled with more.
fn cut(uuid: Uuid, size: u64, error: &PlatformError) -> PlatformError {
    let problem = format!(
        "can't be enabled with {size} bytes, as there is no memory for the metadata of its pages, \
         maybe, and keeps its former size ({})",
        error.text()
    );
    PlatformError::Unsupported { what: format!("namespace {uuid}"), problem }
}

/// The error of a namespace that moved: space in front of it was freed in the last milliseconds.
fn moved(namespace: &Namespace, began: Option<u64>, now: Option<u64>) -> PlatformError {
    let problem = format!(
        "began at address {began:?} and now begins at {now:?}: its bytes are all there, further \
         behind in it"
    );
    PlatformError::Unsupported { what: namespace.to_string(), problem }
}

fn refused(region: &Region, needed: u64, reason: Reason) -> PlatformError {
    let (free, largest) = (region.available, region.max_available_extent);
    let refusal = Refusal { region: region.key.clone(), needed, free, largest, reason };
    NoRoom { refusals: vec![refusal] }.into()
}

/// The sizes to give it, one after the other, for it to have this one and begin where it begins.
fn sizes(region: &Region, namespace: &Namespace, size: u64) -> Result<Vec<u64>, PlatformError> {
    let step = check(region, namespace, size)?;
    let needed = size - namespace.size;
    let Some((front, behind)) = free_around(region, namespace) else {
        let problem = "can't grow: the kernel does not report its offset in the region".to_owned();
        return Err(PlatformError::Unsupported { what: namespace.to_string(), problem });
    };
    if behind < needed {
        return Err(refused(region, needed, Reason::NotContiguous));
    }
    if front < needed {
        return Ok(vec![size]);
    }
    let more = step.round_down(front).checked_add(step.bytes());
    match more.filter(|more| *more <= behind).and_then(|more| namespace.size.checked_add(more)) {
        Some(beyond) => Ok(vec![beyond, size]),
        None => Err(refused(region, needed, Reason::InFront { front, behind })),
    }
}

/// Bytes that are free right in front of it and right behind it; nothing if the layout is unknown.
fn free_around(region: &Region, namespace: &Namespace) -> Option<(u64, u64)> {
    let start = namespace.start?;
    let end = start.checked_add(namespace.size)?;
    let (mut first, mut last) = (0, region.size);
    for other in region.namespaces.iter().filter(|other| other.name != namespace.name) {
        let from = other.start?;
        let to = from.checked_add(other.size)?;
        if to <= start {
            first = first.max(to);
        } else if from >= end {
            last = last.min(from);
        } else {
            return None;
        }
    }
    Some((start - first, last.checked_sub(end)?))
}

fn check(region: &Region, namespace: &Namespace, size: u64) -> Result<Step, PlatformError> {
    let refused = |problem: &str| {
        let (what, problem) = (namespace.to_string(), problem.to_owned());
        Err(PlatformError::Unsupported { what, problem })
    };
    match (namespace.mode, namespace.map) {
        _ if !region.labelled => return refused("it has its region as a whole"),
        (Mode::Fsdax, Some(PageMap::Memory)) => {}
        (Mode::Fsdax | Mode::Devdax, Some(PageMap::Device)) => {
            return refused(
                "can't grow: its pages are noted on itself, and the kernel could not enable it \
                 with more of them",
            );
        }
        (Mode::Sector, _) => {
            return refused(
                "can't grow: a sector namespace keeps the blocks that it was made with",
            );
        }
        _ => return refused("can't grow: only fsdax namespaces with their map in memory can"),
    }
    let step = namespace.align.and_then(|align| Step::of(region, align, Rule::Formula));
    let Some(step) = step else { return refused("its alignment is not known") };
    if size <= namespace.size || step.round_down(size) != size {
        let allowed = format!("more than {} and in {step}", namespace.size);
        return Err(PlatformError::Invalid { field: "size", value: size.to_string(), allowed });
    }
    let fits = choose::fits(region, size - namespace.size);
    fits.map_err(|refusal| NoRoom { refusals: vec![refusal] })?;
    Ok(step)
}
