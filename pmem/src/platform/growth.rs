//! Namespaces grow at their ends.
//!
//! The kernel looks for free space in the order of addresses, and takes what is right in front of a
//! namespace as well (`scan_allocate` of its `namespace_devs.c`): all of its bytes would be
//! elsewhere in it then. It takes nothing that is too small, so that a namespace is made larger by
//! more than there is in front of it, and then smaller: it is cut at its end.

use std::io;
use std::thread;
use std::time::Duration;

use super::choose::{self, NoRoom, Reason, Refusal};
use super::error::PlatformError;
use super::key::Uuid;
use super::namespace::{Mode, Namespace, PageMap};
use super::region::Region;
use super::step::{Rule, Step};
use super::sysfs::Folder;
use super::{Inventory, Platform};

/// How long somebody who looks at each new device may have it open: udev, whose programs take
/// fractions of a second each.
const LOOKED_AT_TRIES: u32 = 20;
const LOOKED_AT_PAUSE: Duration = Duration::from_millis(250);

impl Platform {
    /// Makes a namespace larger. Only one whose pages are noted in ordinary memory can be: with
    /// notes on the namespace the kernel fails to enable it afterwards.
    ///
    /// # Errors
    /// When that is not possible, it is in use, or there is no room right behind it. It is as it
    /// was then, unless the error is [`PlatformError::NotTakenBack`].
    pub fn grow(&self, uuid: Uuid, size: u64) -> Result<Namespace, PlatformError> {
        let _lock = self.lock()?;
        let inventory = self.read_with_users()?;
        let (region, namespace) = found(&inventory, uuid)?;
        let sizes = sizes(region, namespace, size)?;
        self.disable(&inventory, region, namespace)?;
        let grown = self.resize(region, namespace, &sizes);
        if let Err(PlatformError::NotTakenBack { .. }) = &grown {
            // Nobody is given what nobody knows the size of.
            return grown.map(|()| namespace.clone());
        }
        let enabled = self.enable(region, &namespace.name);
        let inventory = self.read_when_enabled(uuid)?;
        let now = inventory.namespace(uuid).map(|(_, now)| now);
        let is_served = |now: &Namespace| now.mode == namespace.mode && now.device.is_some();
        match (grown, enabled, now) {
            (Ok(()), Ok(()), Some(now)) if is_served(now) && now.usable > namespace.usable => {
                Ok(now.clone())
            }
            (Err(error), Ok(()), Some(now)) if is_served(now) && now.size == namespace.size => {
                Err(error)
            }
            (grown, enabled, now) => {
                let what = format!("{namespace} of {} bytes", namespace.size);
                let found = now.map_or_else(
                    || "it is gone".to_owned(),
                    |now| format!("it has {} bytes and {:?} usable", now.size, now.usable),
                );
                let problem = format!("not well after growing to {size}: {found}");
                let error = PlatformError::Unsupported { what, problem };
                match grown.and(enabled) {
                    Ok(()) => Err(error),
                    Err(first) => Err(not_taken_back(first, error)),
                }
            }
        }
    }

    /// The same for one whose new bytes are to be seen by nobody yet: it is bare then, until it is
    /// restored.
    ///
    /// # Errors
    /// As of [`Self::grow`]. It may be bare, or have no device.
    pub fn grow_bare(&self, uuid: Uuid, size: u64) -> Result<Namespace, PlatformError> {
        let _lock = self.lock()?;
        let inventory = self.read_with_users()?;
        let (region, namespace) = found(&inventory, uuid)?;
        let sizes = sizes(region, namespace, size)?;
        self.disable(&inventory, region, namespace)?;
        let folder = self.region_folder(region).at(&namespace.name);
        self.set(&folder, "force_raw", "1")?;
        match self.resize(region, namespace, &sizes) {
            Ok(()) => {}
            // It stays bare: some of what it has now may be another's.
            Err(error @ PlatformError::NotTakenBack { .. }) => return Err(error),
            Err(error) => {
                let restored = self.set(&folder, "force_raw", "0");
                let restored = restored.and_then(|()| self.enable(region, &namespace.name));
                return Err(match restored {
                    Ok(()) => error,
                    Err(after) => not_taken_back(error, after),
                });
            }
        }
        self.enable(region, &namespace.name)?;
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

    /// Makes a namespace that was made bare what it was before. Who looks at it for a moment is
    /// waited for.
    ///
    /// # Errors
    /// When it is in use, the kernel refuses, or it was nothing else. It may have no device then.
    pub fn restore(&self, uuid: Uuid) -> Result<Namespace, PlatformError> {
        for _ in 1..LOOKED_AT_TRIES {
            match self.restore_now(uuid) {
                Err(PlatformError::InUse { .. }) => thread::sleep(LOOKED_AT_PAUSE),
                other => return other,
            }
        }
        self.restore_now(uuid)
    }

    fn restore_now(&self, uuid: Uuid) -> Result<Namespace, PlatformError> {
        let _lock = self.lock()?;
        let inventory = self.read_with_users()?;
        let (region, namespace) = found(&inventory, uuid)?;
        if namespace.mode != Mode::Raw {
            return Ok(namespace.clone());
        }
        self.disable(&inventory, region, namespace)?;
        let folder = self.region_folder(region).at(&namespace.name);
        // The kernel writes the label once more: that it has this size is durable then.
        self.set(&folder, "size", &namespace.size.to_string())?;
        self.set(&folder, "force_raw", "0")?;
        self.enable(region, &namespace.name)?;
        let inventory = self.read_when_enabled(uuid)?;
        let (_, now) = found(&inventory, uuid)?;
        match &now.device {
            Some(device) if now.mode != Mode::Raw => {
                self.await_node(&self.device_path(device))?;
                Ok(now.clone())
            }
            _ => {
                let problem = "has not become what it was before it was bare".to_owned();
                Err(PlatformError::Unsupported { what: now.to_string(), problem })
            }
        }
    }

    /// Gives a namespace that is disabled these sizes, one after the other. What fails may have had
    /// its effect all the same, as the kernel writes labels last, and is taken back.
    fn resize(
        &self,
        region: &Region,
        namespace: &Namespace,
        sizes: &[u64],
    ) -> Result<(), PlatformError> {
        let folder = self.region_folder(region).at(&namespace.name);
        let begins = folder.address()?;
        let mut result = Ok(());
        for size in sizes {
            result = self.set(&folder, "size", &size.to_string());
            if folder.address()? != begins {
                // What is cut off now would be its own.
                return Err(moved(&folder, namespace, begins)?);
            }
            if result.is_err() {
                break;
            }
        }
        let Err(error) = result else { return Ok(()) };
        if folder.number("size")? != namespace.size {
            // Again without its label, maybe. That has this size already.
            let again = self.put(&folder, "size", &namespace.size.to_string());
            let left = folder.number("size")?;
            if left != namespace.size {
                let problem = format!("has {left} bytes, not {}", namespace.size);
                let after = PlatformError::InUse { what: namespace.to_string(), problem };
                return Err(not_taken_back(error, again.err().unwrap_or(after)));
            }
        }
        let needed = sizes.last().map_or(0, |size| size.saturating_sub(namespace.size));
        let is_room = error.os_error() == Some(libc::ENOSPC);
        Err(if is_room { refused(region, needed, Reason::NotContiguous) } else { error })
    }
}

fn found(inventory: &Inventory, uuid: Uuid) -> Result<(&Region, &Namespace), PlatformError> {
    let gone = || PlatformError::NotFound { what: "namespace", name: uuid.to_string() };
    inventory.namespace(uuid).ok_or_else(gone)
}

fn not_taken_back(error: PlatformError, after: PlatformError) -> PlatformError {
    PlatformError::NotTakenBack { error: Box::new(error), after: Box::new(after) }
}

/// It begins elsewhere: somebody made room in front of it in the last milliseconds.
fn moved(
    folder: &Folder,
    namespace: &Namespace,
    began: Option<u64>,
) -> Result<PlatformError, PlatformError> {
    let (now, size) = (folder.address()?, folder.number("size")?);
    let error = PlatformError::Unsupported {
        what: namespace.to_string(),
        problem: format!("began at address {began:?} and now begins at {now:?}, of {size} bytes"),
    };
    let source = io::Error::other("its bytes are all there, further behind in it");
    let after = PlatformError::Device { what: "moving", path: folder.path().to_owned(), source };
    Ok(not_taken_back(error, after))
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
        let problem = "can't grow: the kernel does not tell where in its region it is".to_owned();
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

/// Bytes that are free right in front of it and right behind it; nothing where it is not known what
/// lies where.
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
