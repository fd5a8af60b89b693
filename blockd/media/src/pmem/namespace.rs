//! Namespaces by what they are for good: the kernel numbers their devices anew at each boot.

use std::borrow::Cow;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blockd_pmem::platform::pooled::OWN_NAME;
use blockd_pmem::platform::{Platform, Uuid};
use nix::sys::stat::{major, minor};

use super::refused;

/// The prefix of a UUID in place of a path.
const PREFIX: &str = "namespace:";

/// The path of a namespace, as [`find`] understands it.
#[must_use]
pub fn path_of(uuid: Uuid) -> PathBuf {
    PathBuf::from(format!("{PREFIX}{uuid}"))
}

/// Whether it is one of [`path_of`].
#[must_use]
pub fn is_namespace(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with(PREFIX))
}

/// The namespace of one of [`path_of`].
#[must_use]
pub fn of_path(path: &Path) -> Option<Uuid> {
    path.to_str()?.strip_prefix(PREFIX)?.parse().ok()
}

/// Whether there is something: a namespace is never made by opening it.
#[must_use]
pub fn is_there(path: &Path) -> bool {
    is_namespace(path) || path.exists()
}

/// Where a device is now: a path stays what it is, a namespace is looked for.
///
/// # Errors
/// There is no such namespace, it has no character device, or the platform can't be read.
pub fn find(path: &Path) -> std::io::Result<Cow<'_, Path>> {
    let Some(text) = path.to_str().and_then(|text| text.strip_prefix(PREFIX)) else {
        return Ok(Cow::Borrowed(path));
    };
    let uuid: Uuid = text.parse().map_err(|error| refused(format_args!("{text:?}: {error}")))?;
    let inventory = Platform::default().read().map_err(Error::other)?;
    let missing = |problem: &str| Error::new(ErrorKind::NotFound, problem.to_owned());
    let (_, namespace) =
        inventory.namespace(uuid).ok_or_else(|| missing("there is no namespace of this UUID"))?;
    let device = namespace.device.as_ref();
    let device = device.ok_or_else(|| missing("the namespace is not enabled"))?;
    Ok(Cow::Owned(PathBuf::from(device.path())))
}

/// Refuses to make a pool on a character device whose label says that it is another's. A region
/// without labels has one namespace, which says nothing.
///
/// # Errors
/// Rejects a namespace of another owner, and any if the platform cannot be read.
pub(super) fn refuse_foreign(file: &File) -> std::io::Result<()> {
    let number = file.metadata()?.rdev();
    let inventory = Platform::default().read().map_err(Error::other)?;
    let of_it = (major(number), minor(number));
    let found = inventory.namespaces().find(|(_, namespace)| {
        let numbers = namespace.device.as_ref().map(|device| device.numbers);
        numbers.is_some_and(|(major, minor)| (u64::from(major), u64::from(minor)) == of_it)
    });
    match found {
        Some((region, namespace)) if region.labelled && namespace.alt_name != OWN_NAME => {
            let name = &namespace.alt_name;
            Err(refused(format_args!(
                "its namespace is called {name:?} and so another's: a pool is made in one called \
                 {OWN_NAME:?}, by `blockd pmem create` or `ndctl create-namespace -n {OWN_NAME}`"
            )))
        }
        _ => Ok(()),
    }
}
