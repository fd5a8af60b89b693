//! Files on a file system: each is written anew under another name, made durable and renamed, so
//! that at any time it holds one of its versions as a whole.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::kill::content::{self, SECTOR};

/// Files that are written by turns.
const FILES: u64 = 24;
/// Marks the content of files among that of volumes.
const ID: u32 = 0x4649_4c45;
/// Sectors of the longest file.
const LONGEST: u64 = 256;

/// A folder of such files.
#[derive(Debug)]
pub struct Files(PathBuf);

impl Files {
    /// In this folder, which is there.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self(folder.to_path_buf())
    }

    /// Writes the version of a number; it is durable afterwards.
    ///
    /// # Errors
    /// With the file system's error.
    pub fn write(&self, number: u64) -> Result<()> {
        let (path, part) = (self.path(number % FILES), self.0.join("part"));
        let mut file = File::create(&part).with_context(|| format!("making file {number}"))?;
        file.write_all(&of(number)).with_context(|| format!("writing file {number}"))?;
        file.sync_all().with_context(|| format!("fsync of file {number}"))?;
        fs::rename(&part, &path)?;
        File::open(&self.0)?.sync_all().context("fsync of the folder")
    }

    /// Compares all files, the versions up to this number being durable. A newer one may be there
    /// as a whole. Returns how many were compared.
    ///
    /// # Errors
    /// When a file is missing, or holds anything else.
    pub fn check(&self, durable: u64) -> Result<u64> {
        let mut compared = 0;
        for slot in 0..FILES {
            // The newest version of this file that has to be there, versions beginning with 1.
            let oldest = (0..FILES).filter_map(|back| durable.checked_sub(back));
            let Some(oldest) = oldest.filter(|number| *number > 0).find(|n| n % FILES == slot)
            else {
                continue;
            };
            let path = self.path(slot);
            let found = fs::read(&path).with_context(|| format!("file {oldest} is lost"))?;
            // One may have been under way, and in a loaded machine its notice be late.
            let versions = [oldest, oldest + FILES];
            if !versions.iter().any(|&number| found == of(number)) {
                let start = found.get(..SECTOR).map(content::describe).unwrap_or_default();
                bail!("{}: {} bytes, {start}; right is {versions:?}", path.display(), found.len());
            }
            compared += 1;
        }
        ensure!(compared == durable.min(FILES), "{compared} files of {durable}");
        Ok(compared)
    }

    fn path(&self, slot: u64) -> PathBuf {
        self.0.join(format!("file-{slot}"))
    }
}

/// The content of a version.
fn of(number: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(number);
    let sectors = rng.u64(1..=LONGEST);
    let mut bytes = vec![0; usize::try_from(sectors).unwrap_or(1) * SECTOR];
    let generation = u32::try_from(number).unwrap_or(u32::MAX);
    for (index, sector) in (0..).zip(bytes.chunks_exact_mut(SECTOR)) {
        content::fill(sector, ID, index, generation);
    }
    // A file ends anywhere.
    bytes.truncate(bytes.len() - rng.usize(..SECTOR));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockd_testkit::folder::Folder;

    #[test]
    fn a_file_that_is_lost_old_or_garbled_is_noticed() {
        let folder = Folder::new("files").unwrap();
        let files = Files::new(folder.path());
        for number in 1..=30 {
            files.write(number).unwrap();
        }
        assert_eq!(files.check(30).unwrap(), 24);
        // The last file was written, and its answer lost.
        assert_eq!(files.check(29).unwrap(), 24);
        let path = folder.path().join("file-6");
        fs::write(&path, of(6)).unwrap();
        assert!(files.check(30).is_err(), "an old version passed");
        fs::remove_file(&path).unwrap();
        assert!(files.check(30).unwrap_err().to_string().contains("lost"));
    }
}
