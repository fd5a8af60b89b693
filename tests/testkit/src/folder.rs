//! Folders of tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// A folder that goes away with its owner, unless the test fails.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    stays: bool,
}

impl Folder {
    /// A new one below this folder. Names stay short: a socket's path has 107 bytes.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn below(parent: &Path, name: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("bd-{name}-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self { path, stays: false })
    }

    /// A new one where temporary files go.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn new(name: &str) -> Result<Self> {
        Self::below(&std::env::temp_dir(), name)
    }

    /// One that stays. It need not be there yet.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn kept(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self { path: path.to_path_buf(), stays: true })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        if std::thread::panicking() {
            eprintln!("kept: {}", self.path.display());
        } else {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
