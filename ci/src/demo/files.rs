//! Files of this machine, copied up to a limit.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Enough to take a while, little enough for any machine.
const MAX_BYTES: u64 = 256 << 20;

/// Beyond this, looking at each file takes longer than all the rest.
const MAX_COUNT: u64 = 5_000;

/// One file may not be all there is.
const MAX_FILE_BYTES: u64 = 32 << 20;

/// Less than this shows nothing.
const MIN_BYTES: u64 = 8 << 20;

/// Where there are files to read on about any machine: many small ones first, then large ones.
const PLACES: [&str; 8] = [
    "/usr/share/doc",
    "/usr/include",
    "/usr/share/zoneinfo",
    "/usr/share/man",
    "/usr/share/perl",
    "/usr/lib/python3",
    "/usr/bin",
    "/usr/lib",
];

/// How much was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Gathered {
    pub(super) count: u64,
    pub(super) bytes: u64,
}

/// Copies files into a new folder, with their paths.
///
/// # Errors
/// When there is not enough to copy, or no room.
pub(super) fn gather(into: &Path) -> Result<Gathered> {
    fs::create_dir(into).with_context(|| format!("making {}", into.display()))?;
    let mut gathered = Gathered::default();
    for (done, place) in PLACES.iter().enumerate() {
        // No place takes it all: the rest is shared by the following ones.
        let places_left = u64::try_from(PLACES.len() - done)?;
        let share = |used: u64, most: u64| used + most.saturating_sub(used) / places_left;
        let limit = Gathered {
            count: share(gathered.count, MAX_COUNT),
            bytes: share(gathered.bytes, MAX_BYTES),
        };
        copy_some(Path::new(place), into, limit, &mut gathered)?;
    }
    if gathered.bytes < MIN_BYTES {
        bail!("this machine has only {} bytes of files to copy", gathered.bytes);
    }
    Ok(gathered)
}

fn copy_some(place: &Path, into: &Path, limit: Gathered, gathered: &mut Gathered) -> Result<()> {
    if !place.is_dir() {
        return Ok(());
    }
    for relative in list(place)? {
        if gathered.bytes >= limit.bytes || gathered.count >= limit.count {
            return Ok(());
        }
        let from = place.join(&relative);
        if fs::metadata(&from).map_or(true, |metadata| metadata.len() > MAX_FILE_BYTES) {
            continue;
        }
        // Files that this user may not read, or that disappear meanwhile, are not copied.
        let Ok(bytes) = fs::read(&from) else { continue };
        let to = into.join(place.strip_prefix("/")?).join(&relative);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&to, &bytes).with_context(|| format!("writing {}", to.display()))?;
        gathered.count += 1;
        gathered.bytes += bytes.len() as u64;
    }
    Ok(())
}

/// All regular files below a folder, by their paths from there, in the same order each time.
///
/// # Errors
/// When the folder itself cannot be read.
pub(super) fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(relative) = folders.pop() {
        let entries = match fs::read_dir(folder.join(&relative)) {
            Ok(entries) => entries,
            Err(_) if !relative.as_os_str().is_empty() => continue,
            Err(error) => {
                return Err(error).with_context(|| format!("reading {}", folder.display()));
            }
        };
        for entry in entries.flatten() {
            let path = relative.join(entry.file_name());
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(path),
                Ok(kind) if kind.is_file() => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(found)
}
