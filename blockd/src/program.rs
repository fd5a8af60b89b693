//! The parts that the command line runs in its own process: the daemon, the configuration, and
//! tools that work on pools as the daemon does.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use blockd_cli::{
    ConfigReport, HookRun, NodeRemoval, NodeRemoved, Program, Removal, TakenPool, UnreadPool,
};
use blockd_control::hook::Ran;
use blockd_control::services::{self, HostConfig, Leave, NodeName};
use blockd_engine::pool;
use blockd_mapper::open::OpenReport;
use blockd_media::error::Error;
use blockd_media::pool::{PoolError, PoolSpec};
use blockd_serve::ublk::control::{DeviceError, features_within};
use tokio::runtime::Runtime;

use crate::config::Config;
use crate::{config, daemon};

/// All of blockd in one program.
#[derive(Debug)]
pub struct Blockd;

impl Program for Blockd {
    fn version(&self) -> &'static str {
        env!("BLOCKD_VERSION")
    }

    fn serve(&self, config: Option<&Path>, listen: &[String]) -> Result<(), Error> {
        daemon::serve(config, listen)
    }

    fn check_config(&self, config: Option<&Path>, json: bool) -> Result<ConfigReport, Error> {
        config::check(config, json)
    }

    fn show_config(&self, config: Option<&Path>, json: bool) -> Result<String, Error> {
        config::show(config, json)
    }

    fn ublk_features(&self, limit: Duration) -> Result<u64, Error> {
        let device = "the ublk driver".to_owned();
        let error = match features_within(limit) {
            Some(Ok(features)) => return Ok(features),
            Some(Err(error)) if error.source.kind() == ErrorKind::NotFound => DeviceError::NoDriver,
            Some(Err(error)) => {
                DeviceError::Refused { command: error.command, device, source: error.source }
            }
            None => DeviceError::Hangs { device, command: "GET_FEATURES" },
        };
        Err(services::device_error(error))
    }

    fn replay(&self, spec: &PoolSpec, runtime: &Runtime) -> Result<OpenReport, PoolError> {
        let (handle, report) = pool::open(spec)?;
        runtime.block_on(handle.close())?;
        Ok(report)
    }

    fn remove_node(
        &self,
        removal: &NodeRemoval<'_>,
        ran: &mut dyn FnMut(HookRun<'_>),
    ) -> Result<NodeRemoved, Error> {
        let node = NodeName::parse(removal.node)?;
        let config = Config::load(removal.config)?;
        let host = HostConfig {
            runtime_dir: &config.runtime_dir,
            state_dir: &config.state_dir,
            pools: &config.pools,
            has_implied_pool: config.has_implied_pool,
            template: &config.template,
            node: &config.node,
        };
        let leave = Leave { node, accept_loss: removal.accept_loss };
        let mut report =
            |one: &Ran| ran(HookRun { path: &one.path, output: &one.output, took: one.took });
        let left = match removal.how {
            Removal::DeclareDead => services::declare_dead(host, leave, &mut report)?,
            Removal::Forget { force } => services::forget(host, leave, force, &mut report)?,
        };
        let taken = |one: services::Taken| TakenPool {
            pool: one.pool,
            log_changes: one.log_changes,
            ring_changes: one.ring_changes,
        };
        let pools = left.pools.into_iter().map(taken).collect();
        let unread = left.unread.into_iter();
        let unread =
            unread.map(|one| UnreadPool { pool: one.pool, problem: one.problem }).collect();
        Ok(NodeRemoved { node: node.to_string(), changed: left.changed, pools, unread })
    }
}
