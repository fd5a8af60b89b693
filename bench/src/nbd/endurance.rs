//! Does the daemon's memory grow with operations or connections?

use anyhow::{Context, Result};

use super::client::Client;
use super::fio::{Jobs, Settings};
use super::server::Server;
use crate::report::{Budget, Row};

/// How much of both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Reads and writes, in millions.
    pub millions: u64,
    /// Connections that are negotiated, used once and closed.
    pub connects: u64,
}

/// The allowed growth of memory, which covers random retention of an allocator.
const MOST_MIB: f64 = 1.0;

/// Runs operations and connections on a daemon that is warm and says how its memory has grown.
pub fn rows(jobs: &Jobs, server: &Server, extent: Extent) -> Result<Vec<Row>> {
    let settings = Settings { uri: &server.uri, seconds: 4.0, connections: 4, seed: 9, bytes: 0 };
    // Its first seconds fill caches and buffers.
    jobs.run("mixed", settings)?;
    connect(server, 100)?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let warm = mib(server.tree.resident()?);
    let mut operations = 0.0;
    while operations < extent.millions as f64 * 1e6 {
        operations += jobs.run("mixed", settings)?.operations;
    }
    let worked = mib(server.tree.resident()?);
    connect(server, extent.connects)?;
    let connected = mib(server.tree.resident()?);
    Ok(vec![
        Row::new("memory when warm", warm, "MiB", Budget::None),
        Row::new(
            format!("growth over {:.1} M operations", operations / 1e6),
            worked - warm,
            "MiB",
            Budget::AtMost(MOST_MIB),
        ),
        Row::new(
            format!("growth over {} connects", extent.connects),
            connected - worked,
            "MiB",
            Budget::AtMost(MOST_MIB),
        ),
    ])
}

/// Opens `count` connections, one after another: negotiated, one block read, closed.
fn connect(server: &Server, count: u64) -> Result<()> {
    for index in 0..count {
        let done = Client::connect(&server.uri).and_then(Client::read_and_leave);
        done.with_context(|| format!("connection {index}"))?;
    }
    Ok(())
}
