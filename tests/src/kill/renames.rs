//! A pool and its volume that change their names while the volume is written to.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::Daemon;

use super::load::Shared;
use super::moves::until_stopped;
use super::volume::{Volume, Wrong};

/// Names that the pool and the volume have in turn.
const POOLS: [&str; 2] = ["east", "west"];
const VOLUMES: [&str; 2] = ["old", "new"];
/// Bytes of the pool's file and of the volume.
const POOL: u64 = 256 << 20;
const VOLUME: u64 = 16 << 20;

/// Which of their names pool and volume have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Names {
    pool: usize,
    volume: usize,
}

impl Names {
    fn path(self) -> String {
        format!("{}/{}", POOLS[self.pool], VOLUMES[self.volume])
    }
}

/// The pool and what is known of it.
#[derive(Debug)]
pub struct Renames {
    /// The volume.
    pub shared: Arc<Shared>,
    names: Names,
    /// The names that they have if a command that was not answered has been carried out.
    doubt: Option<Names>,
    rng: fastrand::Rng,
    /// Answered changes.
    pub changes: u64,
}

impl Renames {
    /// Makes the pool and the volume.
    ///
    /// # Errors
    /// When the daemon refuses.
    pub fn new(daemon: &Daemon, seed: u64, id: u32, sub_block: u64) -> Result<Self> {
        let names = Names { pool: 0, volume: 0 };
        let file = daemon.folder().join("renamed");
        let (file, size) = (file.to_string_lossy(), POOL.to_string());
        daemon.cli(&["pool", "create", POOLS[0], "--path", &file, "--size", &size])?;
        daemon.add(&names.path(), VOLUME)?;
        let shared = Shared::new(Volume::new("renamed", id, VOLUME, sub_block));
        let rng = fastrand::Rng::with_seed(seed);
        Ok(Self { shared, names, doubt: None, rng, changes: 0 })
    }

    /// Renames until it is stopped.
    ///
    /// # Errors
    /// When a command fails, and it is not stopped soon after: the daemon was not to die.
    pub fn run(&mut self, daemon: &Daemon, stop: &AtomicBool) -> Result<()> {
        until_stopped(daemon, stop, || {
            self.step(daemon).context("pools and volumes that change their names")?;
            std::thread::sleep(Duration::from_millis(self.rng.u64(1..200)));
            Ok(())
        })
    }

    fn step(&mut self, daemon: &Daemon) -> Result<()> {
        let Names { pool, volume } = self.names;
        // The last command may have failed after it was carried out.
        if self.doubt.is_some() {
            return self.find(daemon).map(drop);
        }
        let after = if self.rng.bool() {
            Names { pool: 1 - pool, volume }
        } else {
            Names { pool, volume: 1 - volume }
        };
        self.doubt = Some(after);
        if after.pool == pool {
            daemon.cli(&["rename", &self.names.path(), VOLUMES[after.volume]])?;
        } else {
            daemon.cli(&["pool", "rename", POOLS[pool], POOLS[after.pool]])?;
        }
        (self.names, self.doubt) = (after, None);
        self.changes += 1;
        Ok(())
    }

    /// The present name of the volume, with its pool.
    ///
    /// # Errors
    /// When it is not there, or not by a name that it was given.
    pub fn find(&mut self, daemon: &Daemon) -> Result<String> {
        let listed = daemon.cli(&["list"])?;
        let volumes = listed["volumes"].as_array().context("no volumes are listed")?;
        let found: Vec<String> = volumes
            .iter()
            .filter_map(|one| Some((one["pool"].as_str()?, one["name"].as_str()?)))
            .filter(|(pool, _)| *pool != "default")
            .map(|(pool, name)| format!("{pool}/{name}"))
            .collect();
        let known = [Some(self.names), self.doubt.take()];
        let is_it = |names: &Names| found == [names.path()];
        let wrong = || Wrong(format!("found {found:?}, expected one of {known:?}"));
        let names = known.into_iter().flatten().find(is_it);
        ensure!(names.is_some(), wrong());
        self.names = names.unwrap_or(self.names);
        Ok(self.names.path())
    }
}
