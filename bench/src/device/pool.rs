//! blockd with one pool on the disk, started and controlled by its public interfaces.

use std::path::Path;

use anyhow::{Result, ensure};
use blockd_testkit::daemon::{Daemon as Process, Home, Settings};

use super::disk::Disk;
use crate::block::Place;

/// The volume.
const VOLUME: &str = "bench";

/// A daemon that runs. It ends in order, so that it lets the disk go.
#[derive(Debug)]
pub struct Daemon(Process);

impl Daemon {
    /// Starts it with a new pool on all of the disk.
    ///
    /// # Errors
    /// When it does not come up; the message has its output.
    pub fn start(program: &Path, scratch: &Path, disk: &Disk) -> Result<Self> {
        let pool = format!("[[pool]]\nname = \"bench\"\nkind = \"disk\"\npath = {:?}\n", disk.path);
        let settings = Settings {
            home: Home::Kept(scratch.join("daemon")),
            program: Some(program.to_owned()),
            tables: "[log]\nlevel = \"warn\"\n".to_owned(),
            pools: Some(pool),
            ..Settings::default()
        };
        let mut process = Process::new("bench", &settings)?;
        process.start()?;
        Ok(Self(process))
    }

    /// Makes the volume: over ublk where there is one, else over NBD.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub fn add(&self, bytes: u64) -> Result<Place> {
        let output = self.0.cli_output(&["add", "--size", &bytes.to_string(), VOLUME])?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "blockd add: {errors}\n{}", self.0.last_words());
        let place = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        ensure!(!place.is_empty(), "blockd add has printed nothing");
        Ok(if place.starts_with('/') { Place::Device(place.into()) } else { Place::Nbd(place) })
    }

    /// The process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.0.pid()
    }

    /// Deletes the volume and ends.
    ///
    /// # Errors
    /// When the daemon refuses, or ends otherwise.
    pub fn end(mut self) -> Result<()> {
        self.0.cli(&["del", VOLUME])?;
        let status = self.0.stop()?;
        ensure!(status.success(), "blockd ended with {status}: {}", self.0.last_words());
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.0.pid().is_some() {
            let _ = self.0.stop();
        }
    }
}
