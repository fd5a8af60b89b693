//! Programs of guests that are not installed here: Debian packages, unpacked below the build
//! folder with the libraries that they need.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockd_testkit::tools;

use super::fetch;
use super::kernel::Which;

/// Folders of an unpacked package that go into a guest, without the folders below them: programs,
/// libraries and the dynamic linker.
const FOLDERS: [&str; 8] = [
    "bin",
    "sbin",
    "lib64",
    "lib/x86_64-linux-gnu",
    "usr/bin",
    "usr/sbin",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
];

/// Unpacks packages, unless the folder has them from before. With the newer kernel go those of the
/// suite that it comes from.
///
/// # Errors
/// When the package manager does not have them.
pub(super) fn get(which: Which, names: &[&str]) -> Result<PathBuf> {
    let cache = tools::build_folder()?.join("vm/packages");
    fs::create_dir_all(&cache)?;
    let lock = fs::File::create(cache.join("lock"))?;
    lock.lock().context("waiting for another process that fetches packages")?;
    let root = cache.join(which.name());
    // Written when all else is there.
    let complete = root.join("complete");
    let wanted = names.join(" ");
    if fs::read_to_string(&complete).is_ok_and(|there| there == wanted) {
        return Ok(root);
    }
    fetch::programs(which, names, &cache, &root)
        .with_context(|| format!("fetching {wanted} beside kernel {}", which.name()))?;
    fs::write(complete, wanted)?;
    Ok(root)
}

/// The programs and libraries of unpacked packages, with their paths in a guest.
///
/// # Errors
/// When they can't be listed.
pub(super) fn files(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut files = Vec::new();
    for folder in FOLDERS {
        let Ok(entries) = fs::read_dir(root.join(folder)) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.is_symlink() || path.is_file() {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                files.push((path, format!("/{folder}/{name}")));
            }
        }
    }
    Ok(files)
}
