//! The mapper's figures beside their budgets.

pub mod counts;
pub mod lookup;
pub mod rig;
pub mod scale;

use std::path::PathBuf;

use anyhow::Result;

/// A directory for sparse files, gone with everything in it when this is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new one in the system's temporary directory.
    pub fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("blockd-bench-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// Where a file of this name is.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{} is left behind: {error}", self.0.display());
        }
    }
}
