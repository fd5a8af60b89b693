//! The parts that the command line runs in its own process but does not depend on: the daemon, and
//! tools that work on pools as the daemon does. The program that combines both provides them.

use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use blockd_mapper::open::OpenReport;
use blockd_media::error::Error;
use blockd_media::pool::{PoolError, PoolSpec};
use tokio::runtime::Runtime;

/// The rest of the program.
pub trait Program: Debug {
    /// The version for people: with the commit where the build knows it.
    fn version(&self) -> &'static str;

    /// Runs the daemon to its end: `blockd serve`.
    fn serve(&self, config: Option<&Path>, listen: &[String]) -> Result<(), Error>;

    /// Checks a configuration: `blockd config check`. An error if it can't be read.
    fn check_config(&self, config: Option<&Path>, json: bool) -> Result<ConfigReport, Error>;

    /// The output of `blockd config show`.
    fn show_config(&self, config: Option<&Path>, json: bool) -> Result<String, Error>;

    /// Features of the kernel's ublk driver, which may take this long to answer.
    fn ublk_features(&self, limit: Duration) -> Result<u64, Error>;

    /// Opens a pool, which replays log and delta ring, and closes it.
    fn replay(&self, spec: &PoolSpec, runtime: &Runtime) -> Result<OpenReport, PoolError>;

    /// Takes over what a node has left. `ran` is called after each script, as it happens.
    fn remove_node(
        &self,
        removal: &NodeRemoval<'_>,
        ran: &mut dyn FnMut(HookRun<'_>),
    ) -> Result<NodeRemoved, Error>;
}

/// The findings about a configuration.
#[derive(Debug)]
pub struct ConfigReport {
    /// For standard output.
    pub text: String,
    /// All mistakes. The daemon does not start with them.
    pub errors: Vec<Error>,
    /// Settings that work and are dangerous, and what is missing on this host at present.
    pub warnings: Vec<String>,
}

/// A node that is to be removed.
#[derive(Clone, Copy, Debug)]
pub struct NodeRemoval<'a> {
    /// Its UUID, or the first eight digits.
    pub node: &'a str,
    /// The configuration that names the pools; `None` for the one at its usual place.
    pub config: Option<&'a Path>,
    /// Go on without the delta ring of a pool.
    pub accept_loss: bool,
    /// How.
    pub how: Removal,
}

/// How a node is removed.
#[derive(Clone, Copy, Debug)]
pub enum Removal {
    /// The node is recorded as dead.
    DeclareDead,
    /// The record of the node is removed.
    Forget {
        /// Also a node that was not declared dead.
        force: bool,
    },
}

/// A script that ended well.
#[derive(Clone, Copy, Debug)]
pub struct HookRun<'a> {
    /// The script.
    pub path: &'a Path,
    /// Its output.
    pub output: &'a str,
    /// How long it took.
    pub took: Duration,
}

/// A node that was removed.
#[derive(Clone, Debug)]
pub struct NodeRemoved {
    /// Its name in full, as far as it is known.
    pub node: String,
    /// Whether this call removed it.
    pub changed: bool,
    /// Pools that were taken over from it.
    pub pools: Vec<TakenPool>,
    /// Pools that can't be read, and may name it.
    pub unread: Vec<UnreadPool>,
}

/// A pool that can't be read.
#[derive(Clone, Debug)]
pub struct UnreadPool {
    /// Its name.
    pub pool: String,
    /// Why.
    pub problem: String,
}

/// A pool that was taken over.
#[derive(Clone, Debug)]
pub struct TakenPool {
    /// Its name.
    pub pool: String,
    /// Changes that were replayed from its log.
    pub log_changes: u64,
    /// Changes that were replayed from its delta ring.
    pub ring_changes: u64,
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A program without a daemon, for verbs that need nothing of it.
    #[derive(Debug)]
    pub(crate) struct Absent;

    fn absent<T>() -> Result<T, Error> {
        Err(Error::in_use("program", "is not there"))
    }

    impl Program for Absent {
        fn version(&self) -> &'static str {
            env!("CARGO_PKG_VERSION")
        }

        fn serve(&self, _: Option<&Path>, _: &[String]) -> Result<(), Error> {
            absent()
        }

        fn check_config(&self, _: Option<&Path>, _: bool) -> Result<ConfigReport, Error> {
            absent()
        }

        fn show_config(&self, _: Option<&Path>, _: bool) -> Result<String, Error> {
            absent()
        }

        fn ublk_features(&self, _: Duration) -> Result<u64, Error> {
            absent()
        }

        fn replay(&self, _: &PoolSpec, _: &Runtime) -> Result<OpenReport, PoolError> {
            Err(PoolError::Gone)
        }

        fn remove_node(
            &self,
            _: &NodeRemoval<'_>,
            _: &mut dyn FnMut(HookRun<'_>),
        ) -> Result<NodeRemoved, Error> {
            absent()
        }
    }
}
