//! One daemon for each runtime and state folder.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use blockd_media::error::Error;

/// A folder that belongs to this process as long as it lives.
#[derive(Debug)]
pub(super) struct FolderLock(File);

impl FolderLock {
    /// Makes the folder if it isn't there, and takes it. The error names the process that has it.
    pub(super) fn take(folder: &Path, mode: u32) -> Result<Self, Error> {
        DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(folder)
            .map_err(|error| Error::file("make the folder", folder, error))?;
        let path = folder.join("lock");
        let failed = |error| Error::file("lock", &path, error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let opened = match options.open(&path) {
            // A kernel makes a file system read-only after an error of its disk.
            Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => File::open(&path),
            opened => opened,
        };
        let mut file = opened.map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                let known = file.read_to_string(&mut owner).is_ok() && !owner.trim().is_empty();
                let owner = if known { format!("process {}", owner.trim()) } else { "one".into() };
                let problem = format!("is used by another daemon, {owner}: stop it first");
                return Err(Error::in_use(format!("folder {}", folder.display()), problem));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        if let Err(error) = name_owner(&mut file) {
            tracing::warn!("{} does not name this process: {error}", path.display());
        }
        Ok(Self(file))
    }

    /// A second handle, for a folder that is both.
    pub(super) fn same(&self) -> std::io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

/// Writes this process's number over another's. A file system that is full has room for that.
fn name_owner(file: &mut File) -> std::io::Result<()> {
    let text = format!("{}\n", std::process::id());
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

#[cfg(test)]
mod tests {
    use blockd_media::error::ErrorKind;

    use super::*;

    #[test]
    fn a_folder_has_one_owner_who_is_named() {
        let folder = std::env::temp_dir().join(format!("blockd-lock-{}", std::process::id()));
        let first = FolderLock::take(&folder.join("a/b"), 0o700).unwrap();
        let error = FolderLock::take(&folder.join("a/b"), 0o700).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        let own = format!("process {}:", std::process::id());
        assert!(error.to_string().contains(&own), "{error}");
        drop(first);
        drop(FolderLock::take(&folder.join("a/b"), 0o700).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
